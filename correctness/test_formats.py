"""The element formats: every code, every point halfway between two values, and rounding to them, against ml_dtypes.

Tie rules: E4M3, E5M2 and E2M1 round to the nearest value, and from halfway to the one with an even code; stochastic
rounding knows no ties; E8M0, a format of scales, rounds up.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from correctness import oracles
from correctness.oracles import FLOAT32_MAX, ML_DTYPES, assert_same_bits
from shapes.backends.emulation import formats
from shapes.backends.emulation.formats import (
    FORMATS,
    decode,
    encode,
    power_of_two_below,
    round_stochastically,
    round_to,
)

ELEMENTS = ("e4m3", "e5m2", "e2m1")
each_format = pytest.mark.parametrize("name", FORMATS)
each_element = pytest.mark.parametrize("name", ELEMENTS)


def all_codes(name: str) -> np.ndarray:
    """Every code of a format: 16 for E2M1, 256 for others."""
    return np.arange(2 ** (4 if name == "e2m1" else 8), dtype=np.uint8)


def all_values(name: str) -> np.ndarray:
    """The float32 value of each code of a format that stands for a finite number, ascending."""
    values = all_codes(name).view(ML_DTYPES[name]).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def around_halfway(name: str) -> np.ndarray:
    """Points halfway between neighbours, and the floats just below and above them."""
    values = all_values(name)
    halfway = values[:-1] + (values[1:] - values[:-1]) / 2  # exact: float32 has many more bits
    return np.concatenate([np.nextafter(halfway, np.float32(towards)) for towards in (-np.inf, np.inf)] + [halfway])


# ------------------------------------------------------------------------------------------------------------ codes


@each_format
def test_format_table_has_the_limits_of_the_formats(name: str) -> None:
    """Largest finite value, smallest normal value and the widths of a code's fields are those that ml_dtypes has."""
    limits, entry = ml_dtypes.finfo(ML_DTYPES[name]), FORMATS[name]
    assert (entry.max_finite, entry.smallest_normal) == (float(limits.max), float(limits.smallest_normal))
    assert (entry.bits, entry.exponent_bits, entry.mantissa_bits) == (limits.bits, limits.nexp, limits.nmant)


@each_format
def test_every_code_decodes_as_in_ml_dtypes(name: str) -> None:
    """All 256 codes (16 of E2M1): values, signs of zeros, infinities and NaN."""
    codes = all_codes(name)
    assert_same_bits(decode(torch.from_numpy(codes), FORMATS[name]), codes.view(ML_DTYPES[name]).astype(np.float32))


@each_format
def test_every_code_is_the_code_of_its_value(name: str) -> None:
    """Encoding undoes decoding; every NaN gets the one code that CUDA uses."""
    codes, entry = torch.from_numpy(all_codes(name)), FORMATS[name]
    values = decode(codes, entry)
    nan = values.isnan()
    assert torch.equal(encode(values, entry)[~nan], codes[~nan])
    assert set(encode(values, entry)[nan].tolist()) == ({entry.nan_code} if nan.any() else set())


@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("e4m3", 0b0_1111_110, 448.0),
        ("e4m3", 0b0_0001_000, 2.0**-6),
        ("e4m3", 0b0_0000_111, 0.875 * 2.0**-6),
        ("e4m3", 0b0_0000_001, 2.0**-9),
        ("e4m3", 0b1_0000_000, -0.0),
        ("e4m3", 0b0_1111_111, math.nan),
        ("e5m2", 0b0_11110_11, 57344.0),
        ("e5m2", 0b0_00001_00, 2.0**-14),
        ("e5m2", 0b0_00000_11, 0.75 * 2.0**-14),
        ("e5m2", 0b0_00000_01, 2.0**-16),
        ("e5m2", 0b1_11111_00, -math.inf),
        ("e5m2", 0b0_11111_01, math.nan),
        ("e2m1", 0b0_11_1, 6.0),
        ("e2m1", 0b0_01_0, 1.0),
        ("e2m1", 0b0_00_1, 0.5),
        ("e2m1", 0b1_11_0, -4.0),
        ("e8m0", 0, 2.0**-127),
        ("e8m0", 127, 1.0),
        ("e8m0", 254, 2.0**127),
        ("e8m0", 255, math.nan),
    ],
)
def test_codes_of_the_specifications(name: str, code: int, value: float) -> None:
    """Extremes as the tables of OCP FP8 1.0 (1 and 2) and OCP MX 1.0 (5.3.3 and 5.4.1) give them."""
    assert_same_bits(decode(torch.tensor([code], dtype=torch.uint8), FORMATS[name]), np.array([value], np.float32))


@pytest.mark.parametrize(
    ("name", "value"),
    [("e4m3", 0.3), ("e4m3", math.inf), ("e5m2", 5.5), ("e2m1", 5.0), ("e2m1", math.nan), ("e8m0", 0.0), ("e8m0", -1)],
)
def test_a_value_that_a_format_lacks_has_no_code(name: str, value: float) -> None:
    """Encoding does not round: it raises ValueError and names the value."""
    with pytest.raises(ValueError, match=f"{name} has no value {float(value)}"):
        encode(torch.tensor([1.0, value]), FORMATS[name])


# --------------------------------------------------------------------------------------------- rounding to nearest


@each_format
def test_every_value_of_a_format_rounds_to_itself(name: str) -> None:
    """Rounding changes no value that the format has, subnormals included."""
    values = all_values(name)
    assert_same_bits(round_to(torch.from_numpy(values), FORMATS[name]), values)


@each_element
def test_halfway_points_and_their_neighbours_round_as_in_ml_dtypes(name: str) -> None:
    """Points halfway between two neighbours, and the floats just below and above."""
    x = around_halfway(name)
    assert_same_bits(round_to(torch.from_numpy(x), FORMATS[name]), oracles.rounded(x, name))


@each_element
def test_halfway_points_go_to_the_even_code(name: str) -> None:
    """The tie rule itself: all codes of rounded halfway points end in 0, and both neighbours are as far."""
    values = all_values(name)
    halfway = torch.from_numpy((values[:-1] + values[1:]) / 2)
    rounded = round_to(halfway, FORMATS[name])
    assert (encode(rounded, FORMATS[name]) % 2 == 0).all()
    assert torch.equal((rounded - halfway).abs(), torch.from_numpy((values[1:] - values[:-1]) / 2))


@each_element
def test_every_bfloat16_rounds_as_in_ml_dtypes(name: str) -> None:
    """All 65536 codes of bfloat16, the usual input: normal, subnormal, infinite and NaN."""
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    assert_same_bits(round_to(torch.from_numpy(x), FORMATS[name]), oracles.rounded(x, name))


@each_element
@given(x=st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_any_float_rounds_as_in_ml_dtypes(name: str, x: list[float]) -> None:
    """Floats of Hypothesis' choice round as in ml_dtypes."""
    values = np.array(x, dtype=np.float32)
    assert_same_bits(round_to(torch.from_numpy(values), FORMATS[name]), oracles.rounded(values, name))


@pytest.mark.parametrize("name", [entry.name for entry in FORMATS.values() if entry.dtype])
def test_rounding_is_the_cast_of_torch_within_range(name: str) -> None:
    """Where torch has the format, its cast gives the same values, and its bytes are our codes."""
    entry = FORMATS[name]
    assert entry.dtype is not None
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * entry.max_finite / 100
    assert x.abs().max() <= entry.max_finite
    cast, rounded = x.to(entry.dtype), round_to(x, entry)
    assert torch.equal(rounded, cast.float())
    assert torch.equal(encode(rounded, entry), cast.view(torch.uint8))


@each_element
def test_rounding_saturates_and_keeps_nan_where_there_is_one(name: str) -> None:
    """Too large becomes the largest finite value, infinity too; NaN stays NaN, or becomes the largest value in E2M1."""
    limit = FORMATS[name].max_finite
    x = torch.tensor([1.01 * limit, FLOAT32_MAX, math.inf, -math.inf, math.nan, -math.nan])
    nan = limit if name == "e2m1" else math.nan
    expected = torch.tensor([limit, limit, limit, -limit, nan, nan])
    torch.testing.assert_close(round_to(x, FORMATS[name]), expected, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------------------------- scales


@given(x=st.floats(min_value=0, width=32, allow_infinity=False))
def test_e8m0_rounds_up_to_the_next_power_of_two(x: float) -> None:
    """The result is the smallest E8M0 value that is not below, or the largest one there is."""
    values = all_values("e8m0")
    expected = values[min(np.searchsorted(values, np.float32(x)), len(values) - 1)]
    assert round_to(torch.tensor([x]), FORMATS["e8m0"]).item() == expected


def test_e8m0_rounds_everything_between_two_values_up() -> None:
    """Halfway points, their neighbours, and the floats next to each value: there are no ties."""
    values = all_values("e8m0")
    above, below = np.nextafter(values[:-1], np.float32(np.inf)), np.nextafter(values[1:], np.float32(0))
    x = np.concatenate([around_halfway("e8m0"), above, below])
    expected = values[np.searchsorted(values, x)]
    assert (expected > x).all()
    assert_same_bits(round_to(torch.from_numpy(x), FORMATS["e8m0"]), expected)


def test_e8m0_saturates_and_keeps_nan() -> None:
    """Zero and subnormals below 2**-127 become the smallest value, infinity the largest, and NaN stays NaN."""
    rounded = round_to(torch.tensor([0.0, 1e-45, math.inf, FLOAT32_MAX, math.nan]), FORMATS["e8m0"])
    assert rounded[:4].tolist() == [2.0**-127, 2.0**-127, 2.0**127, 2.0**127]
    assert rounded[4].isnan()


@given(x=st.floats(min_value=float(np.finfo(np.float32).tiny), width=32, allow_infinity=False))
def test_power_of_two_below_is_the_exponent(x: float) -> None:
    """The largest power of two not above x, for every normal float."""
    assert power_of_two_below(torch.tensor([x])).item() == 2.0 ** (math.frexp(x)[1] - 1)


# --------------------------------------------------------------------------------------------- stochastic rounding


def generator(seed: int = 0) -> torch.Generator:
    """One with a seed."""
    return torch.Generator().manual_seed(seed)


def raised_and_cut(x: np.ndarray, byte: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Magnitudes plus so many 256ths of the step in which each lies, cut off to the next value below."""
    step = np.diff(values)[np.minimum(np.searchsorted(values, x, side="right") - 1, len(values) - 2)]
    raised = np.minimum(x + byte / 256 * step, values[-1])
    return np.asarray(values[np.searchsorted(values, raised, side="right") - 1])


@each_element
def test_stochastic_rounding_takes_each_neighbour_for_its_share_of_the_random_bytes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 256 bytes, at quarters and odd places of every step: the result is that of adding and cutting off."""
    values = all_values(name)[all_values(name) >= 0]
    steps = np.diff(values)
    x = np.concatenate([values, *(values[:-1] + part * steps for part in (0.25, 0.3, 0.5, 0.999))]).astype(np.float32)
    monkeypatch.setattr(formats, "random_bytes", lambda like, _: torch.arange(256.0).expand(like.shape).clone())
    both = torch.from_numpy(np.stack([x, -x]))[..., None].expand(2, -1, 256)
    rounded = round_stochastically(both, FORMATS[name], generator()).numpy()
    expected = raised_and_cut(x[:, None].astype(float), np.arange(256), values.astype(float))
    np.testing.assert_array_equal(rounded, np.stack([expected, -expected]))


@pytest.mark.parametrize(("x", "neighbours"), [(2.3, {2.0, 3.0}), (-5.5, {-4.0, -6.0}), (0.1, {0.0, 0.5})])
def test_stochastic_rounding_has_the_right_mean(x: float, neighbours: set[float]) -> None:
    """Over 100000 values, both neighbours occur and nothing else, and the mean is x, but for 1/256 of a step.

    The allowance is five standard errors of the mean, each value deviating by at most half a step.
    """
    count, step = 100_000, max(neighbours) - min(neighbours)
    rounded = round_stochastically(torch.full((count,), x), FORMATS["e2m1"], generator())
    assert set(rounded.unique().tolist()) == neighbours
    error = (rounded.double().mean().item() - x) * math.copysign(1.0, x)
    allowed = 5 * step / 2 / math.sqrt(count)
    assert -step / 256 - allowed < error < allowed


@each_element
def test_stochastic_rounding_leaves_values_of_the_format(name: str) -> None:
    """Whatever the random numbers."""
    values = torch.from_numpy(all_values(name))
    assert_same_bits(round_stochastically(values, FORMATS[name], generator()), values.numpy())


def test_stochastic_rounding_saturates_as_rounding_to_nearest_does() -> None:
    """Infinity, too large values, NaN and zeros."""
    x = torch.tensor([6.5, 100.0, math.inf, -math.inf, math.nan, -0.0])
    assert_same_bits(
        round_stochastically(x, FORMATS["e2m1"], generator()), np.array([6, 6, 6, -6, 6, -0.0], np.float32)
    )


def test_stochastic_rounding_depends_on_the_seed_alone() -> None:
    """Equal seeds give equal results, others do not, and a generator goes on from call to call."""
    x = torch.randn(1000, generator=generator(1))

    def rounded(source: torch.Generator) -> Tensor:
        return round_stochastically(x, FORMATS["e2m1"], source)

    source = generator(0)
    first, second = rounded(source), rounded(source)
    assert torch.equal(first, rounded(generator(0)))
    assert not torch.equal(first, second)
    assert not torch.equal(first, rounded(generator(2)))


def testrandom_bytes_are_uniform() -> None:
    """Every byte occurs about equally often, in sizes that no word divides too: five standard deviations."""
    count = 256 * 400 + 3
    found = formats.random_bytes(torch.empty(1, count), generator())
    assert found.shape == (1, count)
    frequency = torch.bincount(found.long().flatten(), minlength=256)
    assert len(frequency) == 256
    assert (frequency - count / 256).abs().max() < 5 * math.sqrt(count / 256)
