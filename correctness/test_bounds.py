"""The derivation of correctness/bounds.py: its parts against what they stand for, and that both limits bite."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from correctness import strategies
from correctness.bounds import (
    ELEMENTS,
    PROMOTED,
    Extras,
    Input,
    Limits,
    _Side,
    _variance,
    accumulation_limits,
    gemm_limits,
    hadamard_matrix,
    measured_moments,
    operand_moments,
    rounded,
    scales,
    step,
    tensor_core_product,
    tensor_shape,
    usual_inputs,
)
from correctness.checks import operand_of, settled
from correctness.distributions import DISTRIBUTIONS
from correctness.emulate import draw, emulated_gemms, exact_gemms, gemm_errors, relative_error
from shapes.backends.emulation.formats import FORMATS, round_to
from shapes.gemms import PASSES, Linear
from shapes.recipes import RECIPES, TENSOR, Recipe

QUANTIZED = [recipe for recipe in RECIPES.values() if recipe.quantized]
LARGE = Linear("linear", 512, 1024, 256)
RANDOM_SIGNS = [name for name, kind in DISTRIBUTIONS.items() if kind.signs and name != "zeros"]

each_recipe = pytest.mark.parametrize("recipe", QUANTIZED, ids=lambda recipe: recipe.id)
roles = st.sampled_from(("x", "w", "dy"))
each_pass = pytest.mark.parametrize("name", PASSES)


# ------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("name", [name for name in ELEMENTS if name in FORMATS])
def test_formats_are_those_of_the_emulation(name: str) -> None:
    """Written down twice, so that a slip in one shows."""
    ours, theirs = ELEMENTS[name], FORMATS[name]
    assert ours == (theirs.max_finite, theirs.smallest_normal, theirs.mantissa_bits)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
@given(x=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_rounding_is_that_of_the_emulation(name: str, x: list[float]) -> None:
    """Two implementations, one in NumPy and one in torch, of any number."""
    expected = round_to(torch.tensor(x), FORMATS[name]).double().numpy()
    assert np.array_equal(rounded(np.array(x), ELEMENTS[name]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@given(x=st.floats(min_value=-60000, max_value=60000, width=32))
def test_rounding_of_outputs_is_torch_s(dtype: torch.dtype, x: float) -> None:
    """BF16 and FP16 likewise."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert rounded(np.array(x), ELEMENTS[name]) == torch.tensor(x).to(dtype).double().item()


@pytest.mark.parametrize("name", ELEMENTS)
@given(x=st.floats(min_value=0, max_value=6, width=32))
def test_a_step_is_the_distance_to_the_next_value(name: str, x: float) -> None:
    """Of a value of the format that is no power of two: these have a smaller step below."""
    element = ELEMENTS[name]
    value = rounded(np.array(x), element)
    after = rounded(value + step(value, element), element)
    assert after == value + step(value, element) or value == element.max_finite
    assert rounded(value + 0.49 * step(value, element), element) == value


@each_recipe
@given(
    role=roles,
    dim=st.sampled_from((0, 1)),
    shape=strategies.matrix_shapes(),
    values=strategies.values("normal", "regions", "log_uniform", "constant"),
)
def test_scales_are_those_of_the_emulation(
    recipe: Recipe, role: str, dim: int, shape: tuple[int, int], values: strategies.Values
) -> None:
    """Of a block that holds a whole tensor, but for float32."""
    x = values.tensor(shape)
    operand = operand_of(recipe, role)
    assert operand.block is not None
    if operand.block != TENSOR:
        x = x[: operand.block[dim == 0], : operand.block[dim == 1]]
    copy = settled(recipe, role, x)[dim]
    amax = float(x.abs().max())
    _, inverse = scales(np.array([[amax]]), ELEMENTS[operand.element], str(recipe.scale), amax)
    ones = replace(copy, values=torch.ones_like(copy.values))
    assert ones.dequantize()[0, 0].item() == pytest.approx(inverse.item(), rel=2.0**-21)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@given(seed=strategies.seeds, shape=st.sampled_from(((64, 64), (16, 256))), at=st.floats(-3, 3))
def test_drawn_elements_have_their_distribution(name: str, seed: int, shape: tuple[int, int], at: float) -> None:
    """The share of magnitudes below a point is as derived, within 5 deviations of a binomial distribution."""
    kind = DISTRIBUTIONS[name]
    x = kind.draw(np.random.default_rng(seed), shape)
    expected = float(kind.below(np.array(10.0**at)))
    outliers = 1 / x.size if kind.outlier else 0.0
    room = 5 * math.sqrt(expected * (1 - expected) / x.size) + outliers
    assert float((np.abs(x) <= 10.0**at).mean()) == pytest.approx(expected, abs=room + 1e-12)
    assert kind.signs or (x >= 0).all()
    assert not kind.outlier or np.abs(x).max() == kind.outlier


@each_recipe
@pytest.mark.parametrize("distribution", [*RANDOM_SIGNS, "constant"])
@given(data=st.data(), seed=strategies.seeds)
def test_moments_are_those_of_a_drawn_tensor(recipe: Recipe, distribution: str, data: st.DataObject, seed: int) -> None:
    """Derived by summing over all that an element can be, and measured in one tensor: within 8 % of each other."""
    role, dim = data.draw(st.sampled_from((("x", 1), ("w", 1), ("dy", 1), ("w", 0))))
    operand, given_input = operand_of(recipe, role), data.draw(strategies.inputs(distribution))
    derived = operand_moments(operand, recipe, role, dim, LARGE, given_input, Extras(stochastic=False))
    x = given_input.size * DISTRIBUTIONS[distribution].draw(np.random.default_rng(seed), tensor_shape(role, LARGE))
    measured = measured_moments(rounded(x, ELEMENTS["bf16"]), operand, dim, str(recipe.scale))
    assert measured.square == pytest.approx(derived.square, rel=0.08)
    assert measured.error == pytest.approx(derived.error, rel=0.08, abs=1e-4)
    assert measured.overlap == pytest.approx(derived.overlap, abs=0.08 * derived.error + 1e-4)


def test_the_hadamard_matrix_is_orthogonal_and_flat() -> None:
    """It keeps norms, and makes 16 equal parts of one element."""
    matrix = hadamard_matrix()
    assert np.allclose(matrix @ matrix.T, np.eye(16))
    assert (np.abs(matrix) == 0.25).all()


# ------------------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize(
    ("recipe", "distribution"),
    [
        pytest.param(recipe, distribution, id=f"{recipe.id}-{distribution}")
        for recipe in RECIPES.values()
        for distribution in ("normal", "uniform", "log_uniform")
        if (recipe.compute_dtype, distribution) != ("float16", "log_uniform")  # float16 does not have such numbers
    ],
)
def test_expected_and_emulated_errors_of_large_gemms_are_within_3_percent(recipe: Recipe, distribution: str) -> None:
    """And the limits are not further than 18 % away, nor too near to be met by chance."""
    inputs = {role: replaced(role, distribution) for role in ("x", "w", "dy")}
    errors = gemm_errors(recipe, draw(LARGE, inputs, seed=1))
    for name in PASSES:
        limits = gemm_limits(recipe, name, LARGE, inputs)
        assert errors[name] in limits
        assert errors[name] == pytest.approx(limits.expected, rel=0.03)
        assert 0.85 < limits.lower / limits.expected < 0.97
        assert 1.03 < limits.upper / limits.expected < 1.18


def replaced(role: str, distribution: str) -> Input:
    """The usual input, with another distribution unless it is the weight's."""
    usual = usual_inputs(LARGE)[role]
    return usual if role == "w" else usual._replace(distribution=distribution)


@each_recipe
@given(data=st.data(), seed=strategies.seeds)
def test_bf16_in_place_of_a_recipe_is_below_its_lower_limit(recipe: Recipe, data: st.DataObject, seed: int) -> None:
    """For every GEMM with at least 256 outputs."""
    linear = data.draw(strategies.linears(recipe, "aligned", "large").filter(at_least_256_outputs))
    errors = gemm_errors(RECIPES["bf16"], draw(linear, usual_inputs(linear), seed))
    for name in PASSES:
        assert errors[name] < gemm_limits(recipe, name, linear).lower / 2


def at_least_256_outputs(linear: Linear) -> bool:
    """Of each of the three GEMMs."""
    return min(linear.gemm(name).m * linear.gemm(name).n for name in PASSES) >= 256


@each_recipe
@given(
    data=st.data(), seed=strategies.seeds, role=st.sampled_from(("x", "w", "dy")), factor=st.sampled_from((2.0, 0.5))
)
def test_a_scale_off_by_2_is_above_the_upper_limit(
    recipe: Recipe, data: st.DataObject, seed: int, role: str, factor: float
) -> None:
    """Of any operand, up or down, in both GEMMs that have it: the error is then at least 1/2."""
    linear = data.draw(strategies.linears(recipe, "aligned", "large").filter(at_least_256_outputs))
    tensors = draw(linear, usual_inputs(linear), seed)
    exact = exact_gemms(tensors)
    off = emulated_gemms(recipe, {**tensors, role: factor * tensors[role]})
    has = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}[role]
    for name in has:
        assert relative_error(off[name], exact[name]) > gemm_limits(recipe, name, linear).upper


@pytest.mark.parametrize(("one", "other"), [("e4m3", "e5m2"), ("e4m3", "e2m1")])
@each_pass
def test_limits_tell_formats_apart(name: str, one: str, other: str) -> None:
    """The same recipe with another format has limits that do not overlap."""
    recipe = RECIPES["fp8_current_scaling"]
    limits = []
    for element in (one, other):
        operand = recipe.activation._replace(element=element)
        same = replace(recipe, activation=operand, weight=operand, gradient=operand)
        limits.append(gemm_limits(same, name, LARGE))
    assert limits[0].upper < limits[1].lower


@each_recipe
@given(data=st.data())
def test_limits_are_ordered_and_narrower_for_larger_gemms(recipe: Recipe, data: st.DataObject) -> None:
    """lower <= expected <= upper; 4 times the tokens vary less."""
    linear = data.draw(strategies.linears(recipe, "aligned"))
    for name in PASSES:
        small, large = (gemm_limits(recipe, name, each) for each in (linear, replace(linear, tokens=4 * linear.tokens)))
        assert 0 <= small.lower <= small.expected <= small.upper
        assert large.upper / large.expected < small.upper / small.expected


@given(seed=strategies.seeds, data=st.data())
def test_expectations_hold_without_what_nvfp4_does_besides(seed: int, data: st.DataObject) -> None:
    """With or without a Hadamard transform and stochastic rounding, the emulation is where it should be."""
    extras = Extras(data.draw(st.booleans()), data.draw(st.booleans()))
    linear = Linear("linear", 128, 128, 128)
    inputs = {"x": Input(data.draw(st.sampled_from(RANDOM_SIGNS))), "w": Input(), "dy": Input()}
    errors = gemm_errors(RECIPES["nvfp4"], draw(linear, inputs, seed), extras, seed)
    for name in PASSES:
        assert errors[name] in gemm_limits(RECIPES["nvfp4"], name, linear, inputs, extras)


@each_pass
def test_stochastic_rounding_costs_and_the_transform_pays(name: str) -> None:
    """Stochastic rounding makes the error of gradients larger; a transform makes an outlier's smaller, in wgrad."""
    recipe, inputs = RECIPES["nvfp4"], {"x": Input("outlier"), "dy": Input()}
    plain = gemm_limits(recipe, name, LARGE, extras=Extras(False, False)).expected
    rounded_stochastically = gemm_limits(recipe, name, LARGE, extras=Extras(False, True)).expected
    assert (rounded_stochastically > 1.1 * plain) == (name != "fprop")
    with_outlier = gemm_limits(recipe, name, LARGE, inputs, Extras(False, False)).expected
    transformed = gemm_limits(recipe, name, LARGE, inputs, Extras(True, False)).expected
    assert (transformed != with_outlier) == (name == "wgrad")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"x": Input("log_uniform", 1e30), "dy": Input(size=1e30)},
            "no expectation for outputs that bf16 does not have",
        ),
        ({"x": Input("constant")}, "no expectation for constant elements after a Hadamard transform"),
    ],
    ids=["overflow", "constant"],
)
def test_what_cannot_be_expected_is_said(inputs: dict[str, Input], message: str) -> None:
    """As ValueError, and not as numbers."""
    with pytest.raises(ValueError, match=message):
        gemm_limits(RECIPES["nvfp4"], "wgrad", LARGE, inputs)


def test_outliers_that_may_meet_have_no_expectation() -> None:
    """Their product would be most of the result."""
    inputs = {"x": Input("outlier"), "dy": Input("outlier")}
    with pytest.raises(ValueError, match="no expectation for outliers that meet: the contraction has only 16 elements"):
        gemm_limits(RECIPES["mxfp8"], "wgrad", replace(LARGE, tokens=16), inputs)


def test_a_limit_contains_what_lies_between() -> None:
    """Ends included; NaN is nowhere."""
    limits = Limits(0.1, 0.2, 0.4)
    assert [error in limits for error in (0.1, 0.4, 0.09, 0.41, math.nan)] == [True, True, False, False, False]


# ------------------------------------------------------------------------------------------------------ accumulation


@given(seed=strategies.seeds, k=st.integers(1, 300), toward_zero=st.booleans())
def test_tensor_cores_lose_no_more_than_they_cut_off(seed: int, k: int, toward_zero: bool) -> None:
    """33 terms per instruction are each less than 2^-13 of the largest too small; float32 promotes every 128."""
    generator = np.random.default_rng(seed)
    a, b = (rounded(generator.standard_normal((3, k)), ELEMENTS["e4m3"]) for _ in range(2))
    magnitudes = np.abs(a) @ np.abs(b).T
    for promoted in (None, PROMOTED):
        error = np.abs(tensor_core_product(a, b, promoted, toward_zero) - a @ b.T)
        assert (error <= -(-k // 32) * 33 * 2.0**-13 * magnitudes + k * 2.0**-24 * magnitudes).all()


@given(seed=strategies.seeds, k=st.integers(1, 300))
def test_tensor_cores_are_exact_where_14_bits_are_enough(seed: int, k: int) -> None:
    """Whole numbers from -3 to 3 have sums below 2^12."""
    generator = np.random.default_rng(seed)
    a, b = (generator.integers(-3, 4, (4, k)).astype(float) for _ in range(2))
    for toward_zero in (True, False):
        assert np.array_equal(tensor_core_product(a, b, None, toward_zero), a @ b.T)


@pytest.mark.parametrize("contracted", [512, 2048])
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3")], ids=["fprop", "gradients"])
def test_fast_accumulation_is_coarser_than_split(formats: tuple[str, str], contracted: int) -> None:
    """Its error grows with the contraction, up to a few percent; split accumulation stays near 10^-3 at most."""
    fast, split = (accumulation_limits(*formats, contracted, split) for split in (False, True))
    assert fast.expected > 1.5 * split.expected
    assert fast.upper > 2 * split.upper
    assert split.upper < 3e-3
    assert fast.lower > 2.0**-24 * contracted**0.5  # more than float32 loses


@pytest.mark.parametrize(
    ("m", "n", "k", "of_a", "of_b"),
    [(4, 6, 8, 0.0, 0.0), (4, 4, 4, 0.0, 0.0), (16, 8, 4, 0.0, 0.0), (8, 8, 16, 0.9, 0.0), (8, 16, 32, 0.5, 0.5)],
)
def test_a_product_s_norm_varies_as_derived(m: int, n: int, k: int, of_a: float, of_b: float) -> None:
    """Of 20,000 products of normal matrices, some with an outlier that is a share of the square; two do not meet.

    Within a tenth, and without outliers exactly by the part that the derivation has too much: 2 / mnk.
    """
    draws = np.random.default_rng(k)
    a, b = draws.standard_normal((20_000, m, k)), draws.standard_normal((20_000, n, k))
    for matrix, share, column in ((a, of_a, 0), (b, of_b, 1)):
        if share:
            matrix[:, 0, column] = math.sqrt(share / (1 - share) * matrix[0].size)
    norms = np.square(a @ b.transpose(0, 2, 1)).sum(axis=(1, 2))
    sides = [_Side(outer=rows, peaks=3.0, outlier=share, signs=True) for rows, share in ((m, of_a), (n, of_b))]
    if not (of_a or of_b):
        assert _variance(sides[0], sides[1], k) == pytest.approx(2 * (m + n + k + 2) / (m * n * k))
    assert _variance(sides[0], sides[1], k) == pytest.approx(norms.var() / norms.mean() ** 2, rel=0.1)


@pytest.mark.parametrize("distribution", ["normal", "log_uniform"])
def test_errors_differ_from_tensor_to_tensor_by_elements_and_by_scales(distribution: str) -> None:
    """Of 1,000 weights in NVFP4, whose error depends on the scale that a block gets; without that part by 0.8 times."""
    linear, recipe = Linear("l", 16, 128, 128), RECIPES["nvfp4"]
    derived = operand_moments(recipe.weight, recipe, "w", 1, linear, Input(distribution, 1.0), Extras(stochastic=False))
    draws = np.random.default_rng(2)
    squares = []
    for _ in range(1000):
        x = rounded(DISTRIBUTIONS[distribution].draw(draws, (128, 128)), ELEMENTS["bf16"])
        measured = measured_moments(x, recipe.weight, 1, str(recipe.scale))
        squares.append(measured.error**2 * measured.square)
    elements = (derived.peaks[1] - 1) / 128**2
    found = np.var(squares) / np.mean(squares) ** 2
    assert elements + derived.wobble == pytest.approx(found, rel=0.12)  # the variance of 1,000 is known to 4.5 %
    assert elements < 0.9 * found
