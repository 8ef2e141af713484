"""The emulated recipes: formats exactly, scales against a plain oracle, and the error of a linear within its limits."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shapes.backends.emulation.formats import FORMATS, Format, power_of_two_below, round_to
from shapes.backends.emulation.linear import EmulatedGemms, EmulatedLinear
from shapes.backends.emulation.scaling import DelayedScale, Quantized, Quantizer, quantize
from shapes.gemms import PASSES, Linear
from shapes.recipes import RECIPES, TENSOR, Operand, Recipe

QUANTIZED = [recipe for recipe in RECIPES.values() if recipe.quantized]
UNQUANTIZED = [recipe for recipe in RECIPES.values() if not recipe.quantized]
OPERANDS = sorted(
    {(recipe.scale, operand) for recipe in QUANTIZED for operand in (recipe.activation, recipe.weight, recipe.gradient)}
)
ELEMENTS = ("e4m3", "e5m2", "e2m1")
ML_DTYPES: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
FLOAT32_MAX = float(np.finfo(np.float32).max)

each_recipe = pytest.mark.parametrize("recipe", QUANTIZED, ids=lambda recipe: recipe.id)
each_element = pytest.mark.parametrize("name", ELEMENTS)
each_operand = pytest.mark.parametrize(("scale_format", "operand"), OPERANDS, ids=str)


def randn(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers with a seed of their own."""
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def uneven(*shape: int) -> Tensor:
    """Numbers that span so many powers of two that the maxima of blocks differ."""
    return randn(*shape) * torch.exp2(6 * randn(*shape, seed=1))


# ---------------------------------------------------------------------------------------------------------- formats


def all_values(name: str) -> np.ndarray:
    """The float32 value of each code of a format that stands for a finite number, ascending."""
    codes = np.arange(2 ** (4 if name == "e2m1" else 8), dtype=np.uint8).view(ML_DTYPES[name])
    values = codes.astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def rounded_by_ml_dtypes(x: np.ndarray, name: str) -> np.ndarray:
    """The same rounding by ml_dtypes, which makes NaN (E4M3) or infinity (E5M2) of what is too large: so clipped."""
    limit = FORMATS[name].max_finite
    rounded = np.clip(np.nan_to_num(x, nan=0.0), -limit, limit).astype(ML_DTYPES[name]).astype(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded)  # E2M1 has no NaN: ml_dtypes would lose it


def assert_same_bits(actual: Tensor, expected: np.ndarray) -> None:
    """Equal floats, zeros of equal sign; any NaN is as good as another."""
    np.testing.assert_array_equal(actual.numpy(), expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual.numpy())[numbers], np.signbit(expected)[numbers])


@pytest.mark.parametrize("name", FORMATS)
def test_format_table_has_the_limits_of_the_formats(name: str) -> None:
    """Largest finite value, smallest normal value and mantissa bits are those that ml_dtypes has."""
    limits = ml_dtypes.finfo(ML_DTYPES[name])
    entry = FORMATS[name]
    assert (entry.max_finite, entry.smallest_normal) == (float(limits.max), float(limits.smallest_normal))
    assert entry.mantissa_bits == limits.nmant


@pytest.mark.parametrize("name", FORMATS)
def test_every_value_of_a_format_rounds_to_itself(name: str) -> None:
    """Rounding changes no value that the format has, subnormals included."""
    values = all_values(name)
    assert_same_bits(round_to(torch.from_numpy(values), FORMATS[name]), values)


@each_element
def test_halfway_points_go_to_the_even_neighbour(name: str) -> None:
    """Points halfway between two neighbours, and the floats just below and above, round as in ml_dtypes."""
    values = all_values(name)
    halfway = (values[:-1] + values[1:]) / 2  # exact: float32 has many more bits
    x = np.concatenate([np.nextafter(halfway, -np.float32(np.inf)), halfway, np.nextafter(halfway, np.float32(np.inf))])
    assert_same_bits(round_to(torch.from_numpy(x), FORMATS[name]), rounded_by_ml_dtypes(x, name))


@each_element
def test_every_bfloat16_rounds_as_in_ml_dtypes(name: str) -> None:
    """All 65536 codes of bfloat16, the usual input: normal, subnormal, infinite and NaN."""
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    assert_same_bits(round_to(torch.from_numpy(x), FORMATS[name]), rounded_by_ml_dtypes(x, name))


@each_element
@given(x=st.lists(st.floats(width=32), min_size=1, max_size=50))
@settings(deadline=None)
def test_any_float_rounds_as_in_ml_dtypes(name: str, x: list[float]) -> None:
    """Floats of Hypothesis' choice round as in ml_dtypes."""
    values = np.array(x, dtype=np.float32)
    assert_same_bits(round_to(torch.from_numpy(values), FORMATS[name]), rounded_by_ml_dtypes(values, name))


@pytest.mark.parametrize("name", [entry.name for entry in FORMATS.values() if entry.dtype])
def test_rounding_is_the_cast_of_torch_within_range(name: str) -> None:
    """Where torch has the format, its cast gives the same values."""
    entry = FORMATS[name]
    assert entry.dtype is not None
    x = randn(10_000, scale=entry.max_finite / 100)
    assert x.abs().max() <= entry.max_finite
    assert torch.equal(round_to(x, entry), x.to(entry.dtype).float())


@each_element
def test_rounding_saturates_and_keeps_nan(name: str) -> None:
    """Too large becomes the largest finite value, infinity too, and NaN stays NaN."""
    limit = FORMATS[name].max_finite
    x = torch.tensor([1.01 * limit, FLOAT32_MAX, math.inf, -math.inf, math.nan])
    expected = torch.tensor([limit, limit, limit, -limit, math.nan])
    torch.testing.assert_close(round_to(x, FORMATS[name]), expected, rtol=0, atol=0, equal_nan=True)


@given(x=st.floats(min_value=0, width=32, allow_infinity=False))
@settings(deadline=None)
def test_e8m0_rounds_up_to_the_next_power_of_two(x: float) -> None:
    """The result is the smallest E8M0 value that is not below, or the largest one there is."""
    values = all_values("e8m0")
    expected = values[min(np.searchsorted(values, np.float32(x)), len(values) - 1)]
    assert round_to(torch.tensor([x]), FORMATS["e8m0"]).item() == expected


def test_e8m0_saturates_and_keeps_nan() -> None:
    """Zero becomes the smallest value, infinity the largest, and NaN stays NaN."""
    rounded = round_to(torch.tensor([0.0, math.inf, math.nan]), FORMATS["e8m0"])
    assert rounded[:2].tolist() == [2.0**-127, 2.0**127]
    assert rounded[2].isnan()


@given(x=st.floats(min_value=float(np.finfo(np.float32).tiny), width=32, allow_infinity=False))
@settings(deadline=None)
def test_power_of_two_below_is_the_exponent(x: float) -> None:
    """The largest power of two not above x, for every normal float."""
    assert power_of_two_below(torch.tensor([x])).item() == 2.0 ** (math.frexp(x)[1] - 1)


# ---------------------------------------------------------------------------------------------------------- scaling


def oracle_block(x: np.ndarray, scale_format: str, element: Format, tensor_amax: np.float32) -> np.ndarray:
    """The dequantized values of one block of x, in a few lines of NumPy on float32 scalars."""
    amax, one, limit = np.abs(x).max(), np.float32(1), np.float32(element.max_finite)
    if scale_format == "float32":
        scale = limit / amax
        inverse = one / scale
    elif scale_format == "power of two":
        scale = np.float32(2.0 ** (math.frexp(limit / amax)[1] - 1))
        inverse = one / scale
    elif scale_format == "e8m0":
        mantissa, exponent = math.frexp(amax * (one / limit))
        inverse = np.float32(2.0 ** (exponent - (mantissa == 0.5)))
        scale = one / inverse
    else:
        tensor_scale = np.float32(448 * 6) / tensor_amax
        stored = np.clip(amax * (tensor_scale * (one / limit)), 0, 448).astype(ml_dtypes.float8_e4m3fn)
        inverse = stored.astype(np.float32) * (one / tensor_scale)
        if inverse == 0:  # so small beside the tensor's maximum that the block is lost
            return 0 * x
        scale = one / inverse
    return rounded_by_ml_dtypes(x * scale, element.name) * inverse


@each_operand
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(256, 128), (130, 200)], ids=["whole_blocks", "partial_blocks"])
def test_quantization_equals_the_oracle(scale_format: str, operand: Operand, dim: int, shape: tuple[int, int]) -> None:
    """Each block, also a partial one at the edge, dequantizes to what NumPy makes of it alone.

    Within two roundings of float32 (2**-24 each), since a factor for the whole tensor is applied in another order.
    """
    x = uneven(*shape).bfloat16().float()
    element = FORMATS[operand.element]
    assert operand.block is not None
    rows, columns = shape if operand.block == TENSOR else operand.block if dim == 1 else operand.block[::-1]
    dequantized = quantize(x, operand, dim, scale_format).dequantize().numpy()
    source = x.numpy()
    tensor_amax = np.float32(np.abs(source).max())
    for row in range(0, shape[0], rows):
        for column in range(0, shape[1], columns):
            here = np.s_[row : row + rows, column : column + columns]
            expected = oracle_block(source[here], scale_format, element, tensor_amax)
            np.testing.assert_allclose(dequantized[here], expected, rtol=2**-23, atol=0)


@each_operand
def test_quantized_values_are_values_of_the_format(scale_format: str, operand: Operand) -> None:
    """Rounding the quantized values again changes nothing."""
    values = quantize(randn(64, 256), operand, 1, scale_format).values
    assert torch.equal(values, round_to(values, FORMATS[operand.element]))


@each_operand
def test_zero_blocks_stay_zero(scale_format: str, operand: Operand) -> None:
    """Zeros beside other blocks, and nothing but zeros, dequantize to zeros."""
    x = randn(256, 256)
    x[:128, :128] = 0
    assert quantize(x, operand, 1, scale_format).dequantize()[:128, :128].abs().max() == 0
    assert quantize(torch.zeros(64, 64), operand, 1, scale_format).dequantize().abs().max() == 0


@pytest.mark.parametrize(
    ("scale_format", "operand", "inverse_scale"),
    [
        ("float32", Operand("e4m3", TENSOR), 1.0),
        ("power of two", Operand("e4m3", (1, 128)), 1.0),
        ("e8m0", Operand("e4m3", (1, 32)), 2.0**-127),  # code 0, as TE stores it
        ("e4m3 and float32", Operand("e2m1", (1, 16)), 0.0),
    ],
    ids=lambda value: str(value),
)
def test_zero_blocks_have_the_scale_that_te_stores(scale_format: str, operand: Operand, inverse_scale: float) -> None:
    """A float32 scale of zeros is 1; a scale in E8M0 or E4M3 has that format's smallest value."""
    assert (quantize(torch.zeros(16, 256), operand, 1, scale_format).inverse_scale == inverse_scale).all()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_per_tensor_scale_is_one_when_the_maximum_is_not_finite(bad: float) -> None:
    """An infinity saturates and NaN stays NaN, both with scale 1, so that the other values survive."""
    quantized = quantize(torch.tensor([[1.0, bad]]), Operand("e4m3", TENSOR), 1, "float32")
    expected = torch.tensor([[1.0, 448.0 if math.isinf(bad) else math.nan]])
    assert quantized.inverse_scale == 1
    torch.testing.assert_close(quantized.values, expected, rtol=0, atol=0, equal_nan=True)


def test_per_tensor_scale_maps_the_maximum_to_the_largest_value() -> None:
    """scale = max_finite / amax, both formats."""
    x = randn(32, 32)
    for name in ("e4m3", "e5m2"):
        quantized = quantize(x, Operand(name, TENSOR), 1, "float32")
        assert quantized.values.abs().max() == FORMATS[name].max_finite
        assert quantized.inverse_scale == 1 / (FORMATS[name].max_finite / x.abs().max())


@pytest.mark.parametrize(
    ("scale_format", "block"), [("power of two", (1, 128)), ("power of two", (128, 128)), ("e8m0", (1, 32))], ids=str
)
def test_power_of_two_scales_use_the_upper_half_of_the_range(scale_format: str, block: tuple[int, int]) -> None:
    """The scale is a power of two, and the largest scaled magnitude lies in (224, 448]: nothing saturates."""
    x = uneven(128, 256)
    quantized = quantize(x, Operand("e4m3", block), 1, scale_format)
    inverse = quantized.inverse_scale
    assert torch.equal(inverse, power_of_two_below(inverse))
    ones = Quantized(torch.ones_like(x), inverse, block, torch.ones(()))
    scaled = x.abs() / ones.dequantize()
    blocks = scaled.reshape(128 // block[0], block[0], 256 // block[1], block[1]).amax(dim=(1, 3))
    assert blocks.min() > 224
    assert blocks.max() <= 448


def test_mxfp8_scale_is_rounded_up_so_that_nothing_saturates() -> None:
    """A block of 500 has scale 2 as in TE; the OCP specification's own conversion gives 1, and 500 becomes 448."""
    quantized = quantize(torch.full((1, 32), 500.0), Operand("e4m3", (1, 32)), 1, "e8m0")
    assert quantized.inverse_scale.item() == 2
    assert quantized.dequantize().unique().tolist() == [512.0]  # 250 lies between 240 and 256


def test_nvfp4_block_scales_are_e4m3_and_the_largest_is_448() -> None:
    """Block scales are values of E4M3, relative to a float32 factor that makes the largest one 448."""
    inverse = quantize(randn(64, 64), Operand("e2m1", (1, 16)), 1, "e4m3 and float32").inverse_scale
    assert torch.equal(inverse, round_to(inverse, FORMATS["e4m3"]))
    assert inverse.max() == 448


@given(exponent=st.integers(-60, 60), seed=st.integers(0, 1000))
@settings(deadline=None)
def test_per_tensor_current_scaling_does_not_see_powers_of_two(exponent: int, seed: int) -> None:
    """x times a power of two has the same quantized values, and an inverse scale larger by that power."""
    x, factor = randn(16, 32, seed=seed), 2.0**exponent
    operand = Operand("e4m3", TENSOR)
    plain, multiplied = (quantize(matrix, operand, 1, "float32") for matrix in (x, x * factor))
    assert torch.equal(multiplied.values, plain.values)
    assert multiplied.inverse_scale == plain.inverse_scale * factor


@each_operand
def test_one_scale_and_square_blocks_share_both_copies(scale_format: str, operand: Operand) -> None:
    """Quantizing the transpose gives the transpose exactly where the quantizer makes one matrix for both GEMMs."""
    recipe = next(r for r in QUANTIZED if r.scale == scale_format and not r.history)
    copies = Quantizer(operand, recipe, "cpu")(x := uneven(256, 256))
    assert operand.block is not None
    shared = operand.block[0] == operand.block[1]
    assert (copies[0] is copies[1]) == shared
    transposed = quantize(x.T.contiguous(), operand, 1, scale_format)
    assert torch.equal(transposed.values.T, copies[0].values)
    assert torch.equal(transposed.dequantize().T, copies[1].dequantize()) == shared


@pytest.mark.parametrize(
    ("x", "operand", "message"),
    [
        (torch.ones(2, 2, 2), Operand("e4m3", TENSOR), "only a matrix"),
        (torch.ones(2, 2), Operand("bf16"), "has no scale"),
    ],
    ids=["three_dimensions", "unquantized_operand"],
)
def test_what_cannot_be_quantized_is_refused(x: Tensor, operand: Operand, message: str) -> None:
    """A tensor that is no matrix, and an operand without a scale, raise ValueError."""
    with pytest.raises(ValueError, match=message):
        quantize(x, operand, 1, "float32")


# --------------------------------------------------------------------------------------------------- delayed scaling


def test_delayed_scale_follows_the_maximum_of_the_history() -> None:
    """It is 1 at first, then 448 over the largest of the last three steps; the oldest step leaves the history."""
    delayed = DelayedScale(FORMATS["e4m3"], history=3, device="cpu")
    scales = []
    for amax in (7.0, 28.0, 14.0, 3.5, 1.75):
        scales.append(delayed.scale.item())
        delayed.record(torch.tensor([[amax, -1.0]]))
        delayed.update()
    assert scales == [1.0, 64.0, 16.0, 16.0, 16.0]
    assert delayed.scale == 32  # of 14, 3.5 and 1.75: 28 is gone
    assert delayed.amax_history.tolist() == [0.0, 3.5, 1.75]  # room for the next step, the oldest, the newest


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_delayed_scale_stays_after_a_step_without_a_usable_maximum(amax: float) -> None:
    """Zeros, infinities and NaN do not change a scale whose history has nothing else."""
    delayed = DelayedScale(FORMATS["e4m3"], history=1, device="cpu")
    for value in (7.0, amax):
        delayed.record(torch.tensor([[value]]))
        delayed.update()
    assert delayed.scale == 64


def test_delayed_scaling_starts_with_scale_one_and_goes_on_with_the_first_maximum() -> None:
    """A layer's first step has scale 1 for all operands, its second the scale of the first step's maximum."""
    layer = EmulatedLinear(32, 32, False, RECIPES["fp8_delayed_scaling"])
    first, dy = randn(16, 32, dtype=torch.bfloat16), randn(16, 32, seed=1, dtype=torch.bfloat16)
    assert all(quantizer.delayed and quantizer.delayed.scale == 1 for quantizer in layer.quantizers.values())
    assert layer.quantizers["x"](first)[1].inverse_scale == 1
    layer(first.requires_grad_()).backward(dy)
    tensors = {"x": (first, 448), "w": (layer.weight, 448), "dy": (dy, 57344)}
    for name, (tensor, limit) in tensors.items():
        scale = limit / tensor.detach().float().abs().max()
        assert layer.quantizers[name](1000 * torch.ones(16, 32))[1].inverse_scale == 1 / scale, name


def test_delayed_scale_does_not_move_without_gradients() -> None:
    """As in TE, a forward pass under no_grad leaves the scale for the next step alone."""
    layer = EmulatedLinear(32, 32, False, RECIPES["fp8_delayed_scaling"])
    with torch.no_grad():
        layer(randn(16, 32, scale=100.0))
    delayed = layer.quantizers["x"].delayed
    assert delayed is not None
    assert delayed.scale == 1


# ------------------------------------------------------------------------------------------------------- the linear

TOKENS, IN, OUT = 256, 384, 512
MANTISSA_BITS = {"bf16": 7} | {name: entry.mantissa_bits for name, entry in FORMATS.items()}


def element_error(element: str) -> tuple[float, float]:
    """Least and most relative RMS error of rounding a tensor to a format with p mantissa bits.

    Within a binade [2^e, 2^(e+1)) the step is 2^(e-p), and the error of smoothly spread values is uniform in plus or
    minus half a step: RMS 2^(e-p) / sqrt(12). Relative to values all near the binade's lower end that is
    2^-p / sqrt(12), near its upper end half of it; every mixture of values lies between, whatever the scale. For
    subnormals it is more, and for values that a scale maps to the largest one exactly it is nothing: both hold too
    little of a normal tensor's energy (at most 28 %, for the maxima of blocks of 16) to leave these limits.
    """
    most = 2.0 ** -MANTISSA_BITS[element] / math.sqrt(12)
    return most / 2, most


def gemm_error_limits(first: str, second: str) -> tuple[float, float]:
    """Least and most relative error (Frobenius) of a GEMM of two operands of independent, zero-mean elements.

    Of (a + da)(b + db) the terms a db, da b and da db are independent, so the squares of their relative sizes add
    up. Rounding the output to bf16 adds to the upper limit.
    """
    (least_a, most_a), (least_b, most_b), (_, most_output) = map(element_error, (first, second, "bf16"))
    least = math.hypot(least_a, least_b)
    most = math.hypot(most_a, most_b, most_a * most_b, most_output)
    return least, most


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of the exact matrix."""
    return ((actual.double() - exact).norm() / exact.norm()).item()


def exact_gemms(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """fprop, dgrad and wgrad in float64."""
    x, w, dy = x.double(), w.double(), dy.double()
    return {"fprop": x @ w.T, "dgrad": dy @ w, "wgrad": dy.T @ x}


@cache
def gemm_errors(recipe: Recipe) -> dict[str, float]:
    """Relative error of each GEMM of one linear against float64."""
    gemms = EmulatedGemms(Linear("linear", TOKENS, IN, OUT), recipe, "cpu", seed=0)
    exact = exact_gemms(**gemms.tensors)
    return {name: relative_error(getattr(gemms, name)(), exact[name]) for name in PASSES}


@each_recipe
def test_error_of_every_gemm_follows_from_its_formats(recipe: Recipe) -> None:
    """The error of fprop, dgrad and wgrad lies between the limits of their operands' formats."""
    for name, error in gemm_errors(recipe).items():
        least, most = gemm_error_limits(*(operand.element for operand in recipe.gemm_operands(name)))
        assert least < error < most, f"{name}: {least=:.4f} {error=:.4f} {most=:.4f}"


@each_recipe
def test_bf16_in_place_of_a_quantized_recipe_is_noticed(recipe: Recipe) -> None:
    """The error of the same GEMMs in bf16 is below every lower limit, so a silent fallback would not pass."""
    for name, error in gemm_errors(RECIPES["bf16"]).items():
        least, _ = gemm_error_limits(*(operand.element for operand in recipe.gemm_operands(name)))
        assert error < least / 2, f"{name}: {least=:.4f} {error=:.4f}"


@each_recipe
def test_layer_computes_the_same_as_its_gemms_one_by_one(recipe: Recipe) -> None:
    """Output and gradients of the module are those of EmulatedGemms for the same tensors, bit for bit."""
    gemms = EmulatedGemms(Linear("linear", 64, 96, 128), recipe, "cpu", seed=3)
    layer = EmulatedLinear(96, 128, False, recipe)
    with torch.no_grad():
        layer.weight.copy_(gemms.tensors["w"])
    x = gemms.tensors["x"].clone().requires_grad_()
    for _ in range(2 if recipe.history else 1):  # a delayed scale needs a step before
        x.grad = layer.weight.grad = None
        y = layer(x)
        y.backward(gemms.tensors["dy"])
    assert x.grad is not None
    assert layer.weight.grad is not None
    for actual, name in ((y, "fprop"), (x.grad, "dgrad"), (layer.weight.grad, "wgrad")):
        assert torch.equal(actual, getattr(gemms, name)()), name


@st.composite
def aligned_sizes(draw: st.DrawFn, recipe: Recipe) -> tuple[int, int, int]:
    """(tokens, in, out) that the recipe can run, small, often no multiple of 128."""
    aligns = map(math.lcm, recipe.align_forward, recipe.align_backward)
    tokens, in_features, out_features = (align * draw(st.integers(1, 160 // align)) for align in aligns)
    return tokens, in_features, out_features


@each_recipe
@given(data=st.data())
@settings(deadline=None, max_examples=15)
def test_gemms_only_accumulate_in_float32(recipe: Recipe, data: st.DataObject) -> None:
    """Whatever the sizes, a GEMM differs from float64 on its dequantized operands by accumulation and output rounding.

    A float32 sum of k products is off by at most k u times the sum of their magnitudes, u = 2**-24, in any order;
    four more roundings are for the factor, applied there and in dequantizing; bf16 rounds by at most 2**-8.
    """
    tokens, in_features, out_features = data.draw(aligned_sizes(recipe))
    linear = Linear("linear", tokens, in_features, out_features)
    gemms = EmulatedGemms(linear, recipe, "cpu", seed=data.draw(st.integers(0, 100)))
    operands = {"x": recipe.activation, "w": recipe.weight, "dy": recipe.gradient}
    dims = {"fprop": {"x": 1, "w": 1}, "dgrad": {"dy": 1, "w": 0}, "wgrad": {"dy": 0, "x": 0}}
    for name in PASSES:
        matrices = {
            key: quantize(tensor, operands[key], dims[name].get(key, 1), str(recipe.scale)).dequantize()
            for key, tensor in gemms.tensors.items()
        }
        exact = exact_gemms(**matrices)[name]
        magnitudes = exact_gemms(**{key: matrix.abs() for key, matrix in matrices.items()})[name]
        bound = 2.0**-8 * exact.abs() + (1 + 2.0**-8) * (linear.gemm(name).k + 4) * 2.0**-24 * magnitudes
        difference = (getattr(gemms, name)().double() - exact).abs()
        assert (difference <= bound).all(), f"{name}: {(difference - bound).max()=}"


@each_recipe
def test_bias_is_added_before_the_output_is_rounded(recipe: Recipe) -> None:
    """16 * 16 + 0.5 * 1 + 1 = 257.5 rounds to 258 in bf16; with the product rounded first it would be 256.

    The two products lie in different blocks, so that every recipe represents the four factors.
    """
    layer, x = EmulatedLinear(160, 32, True, recipe), torch.zeros(32, 160)
    x[:, 0], x[:, 128] = 16, 0.5
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:, 0], layer.weight[:, 128] = 16, 1
        layer.bias.fill_(1)
    assert layer(x).unique().tolist() == [258]


@each_recipe
def test_bias_gradient_is_not_quantized(recipe: Recipe) -> None:
    """It is the sum of dy over all tokens in float32, rounded once."""
    layer, dy = EmulatedLinear(64, 32, True, recipe), randn(2, 16, 32, scale=1e-3, dtype=torch.bfloat16)
    layer(torch.zeros(2, 16, 64)).backward(dy)
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, dy.float().sum(dim=(0, 1)).bfloat16())


@each_recipe
def test_only_needed_gradients_are_computed(recipe: Recipe) -> None:
    """With a frozen weight only dx comes out, and with an input that needs no gradient only dw."""
    layer, x = EmulatedLinear(32, 32, False, recipe), randn(32, 32, dtype=torch.bfloat16)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert x.grad is None
    layer.weight.requires_grad_(False).grad = None
    layer(x.requires_grad_()).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None


@each_recipe
def test_misaligned_sizes_are_refused_with_the_recipe_s_reason(recipe: Recipe) -> None:
    """33 tokens suit no recipe; layer and GEMMs both raise ValueError that names the size."""
    with pytest.raises(ValueError, match=r"needs tokens to be a multiple of \d+ in the forward pass, got 33"):
        EmulatedLinear(32, 32, False, recipe)(torch.zeros(33, 32))
    with pytest.raises(ValueError, match=r"needs tokens to be a multiple"):
        EmulatedGemms(Linear("linear", 33, 32, 32), recipe)


@pytest.mark.parametrize("recipe", UNQUANTIZED, ids=lambda recipe: recipe.id)
def test_unquantized_recipes_have_gemms_but_nothing_to_quantize(recipe: Recipe) -> None:
    """The GEMMs are torch's in the compute dtype, the quantize methods are None, and the module refuses."""
    gemms = EmulatedGemms(Linear("linear", 16, 32, 48), recipe, "cpu", seed=0)
    assert (gemms.quantize_x, gemms.quantize_w, gemms.quantize_dy) == (None, None, None)
    x, w = gemms.tensors["x"], gemms.tensors["w"]
    assert torch.equal(gemms.fprop(), x @ w.T)
    assert gemms.fprop().dtype == getattr(torch, recipe.compute_dtype)
    with pytest.raises(ValueError, match="does not quantize"):
        EmulatedLinear(32, 48, False, recipe)


@each_recipe
def test_gemms_use_the_latest_quantized_operands(recipe: Recipe) -> None:
    """A tensor that changes has no effect until it is quantized again."""
    gemms = EmulatedGemms(Linear("linear", 32, 32, 32), recipe, "cpu", seed=0)
    before = gemms.fprop()
    gemms.tensors["x"].neg_()
    assert torch.equal(gemms.fprop(), before)
    assert gemms.quantize_x is not None
    gemms.quantize_x()
    assert torch.equal(gemms.fprop(), -before)


def test_gemms_of_one_seed_are_the_same() -> None:
    """Tensors depend on the seed alone."""
    linear = Linear("linear", 32, 32, 32)
    one, same, other = (EmulatedGemms(linear, RECIPES["mxfp8"], "cpu", seed) for seed in (1, 1, 2))
    assert torch.equal(one.fprop(), same.fprop())
    assert not torch.equal(one.fprop(), other.fprop())
