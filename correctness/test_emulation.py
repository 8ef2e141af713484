"""The emulated linear and its GEMMs: their errors follow from the formats, and only accumulation comes on top."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shapes.backends.emulation.formats import FORMATS
from shapes.backends.emulation.linear import EmulatedGemms, EmulatedLinear
from shapes.backends.emulation.scaling import Quantized, gemm_factor
from shapes.gemms import PASSES, Linear
from shapes.recipes import RECIPES, Recipe

QUANTIZED = [recipe for recipe in RECIPES.values() if recipe.quantized]
UNQUANTIZED = [recipe for recipe in RECIPES.values() if not recipe.quantized]

each_recipe = pytest.mark.parametrize("recipe", QUANTIZED, ids=lambda recipe: recipe.id)

TOKENS, IN, OUT = 256, 384, 512
MANTISSA_BITS = {"bf16": 7} | {name: entry.mantissa_bits for name, entry in FORMATS.items()}


def randn(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers with a seed of their own."""
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def element_error(element: str, stochastic: bool = False) -> tuple[float, float]:
    """Least and most relative RMS error of rounding a tensor to a format with p mantissa bits.

    Within a binade [2^e, 2^(e+1)) the step is 2^(e-p), and the error of smoothly spread values is uniform in plus or
    minus half a step: RMS 2^(e-p) / sqrt(12). Relative to values all near the binade's lower end that is
    2^-p / sqrt(12), near its upper end half of it; every mixture of values lies between, whatever the scale. For
    subnormals it is more, and for values that a scale maps to the largest one exactly it is nothing: both hold too
    little of a normal tensor's energy (at most 28 %, for the maxima of blocks of 16) to leave these limits.

    Stochastic rounding of a value that is f steps above its lower neighbour has variance f (1 - f), on average 1/6 of
    a step's square instead of 1/12: an error larger by sqrt(2).
    """
    most = 2.0 ** -MANTISSA_BITS[element] / math.sqrt(6 if stochastic else 12)
    return most / 2, most


def gemm_error_limits(recipe: Recipe, pass_name: str) -> tuple[float, float]:
    """Least and most relative error (Frobenius) of a GEMM of two operands of independent, zero-mean elements.

    Of (a + da)(b + db) the terms a db, da b and da db are independent, so the squares of their relative sizes add
    up. Rounding the output to bf16 adds to the upper limit.
    """
    first, second = recipe.gemm_operands(pass_name)
    stochastic = recipe.id == "nvfp4" and pass_name != "fprop"  # the gradient, always the first
    (least_a, most_a), (least_b, most_b) = element_error(first.element, stochastic), element_error(second.element)
    (_, most_output) = element_error("bf16")
    least = math.hypot(least_a, least_b)
    most = math.hypot(most_a, most_b, most_a * most_b, most_output)
    return least, most


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of the exact matrix."""
    return ((actual.double() - exact).norm() / exact.norm()).item()


def product(pass_name: str, **tensors: Tensor) -> Tensor:
    """fprop, dgrad or wgrad in float64, of those that it needs among x, w and dy."""
    x, w, dy = (tensors.get(name, torch.empty(0)).double() for name in ("x", "w", "dy"))
    return {"fprop": lambda: x @ w.T, "dgrad": lambda: dy @ w, "wgrad": lambda: dy.T @ x}[pass_name]()


@cache
def gemm_errors(recipe: Recipe) -> dict[str, float]:
    """Relative error of each GEMM of one linear against float64."""
    gemms = EmulatedGemms(Linear("linear", TOKENS, IN, OUT), recipe, "cpu", seed=0)
    return {name: relative_error(getattr(gemms, name)(), product(name, **gemms.tensors)) for name in PASSES}


@each_recipe
def test_error_of_every_gemm_follows_from_its_formats(recipe: Recipe) -> None:
    """The error of fprop, dgrad and wgrad lies between the limits of their operands' formats."""
    for name, error in gemm_errors(recipe).items():
        least, most = gemm_error_limits(recipe, name)
        assert least < error < most, f"{name}: {least=:.4f} {error=:.4f} {most=:.4f}"


@each_recipe
def test_bf16_in_place_of_a_quantized_recipe_is_noticed(recipe: Recipe) -> None:
    """The error of the same GEMMs in bf16 is below every lower limit, so a silent fallback would not pass."""
    for name, error in gemm_errors(RECIPES["bf16"]).items():
        least, _ = gemm_error_limits(recipe, name)
        assert error < least / 2, f"{name}: {least=:.4f} {error=:.4f}"


@each_recipe
def test_layer_computes_the_same_as_its_gemms_one_by_one(recipe: Recipe) -> None:
    """Output and gradients of the module are those of EmulatedGemms for the same tensors, bit for bit."""
    gemms = EmulatedGemms(Linear("linear", 64, 96, 128), recipe, "cpu", seed=3)
    layer = EmulatedLinear(96, 128, False, recipe, seed=3)
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


CONTRACTED = {"fprop": {"x": 1, "w": 1}, "dgrad": {"dy": 1, "w": 0}, "wgrad": {"dy": 0, "x": 0}}


def operands_of(gemms: EmulatedGemms, pass_name: str) -> dict[str, Quantized]:
    """The quantized copies that a GEMM multiplies."""
    copies = {}
    for name, dim in CONTRACTED[pass_name].items():
        operand = gemms.operands[name]
        assert isinstance(operand, dict)
        copies[name] = operand[dim]
    return copies


@each_recipe
@given(data=st.data())
@settings(max_examples=max(settings().max_examples // 2, 1))
def test_gemms_only_accumulate_in_float32(recipe: Recipe, data: st.DataObject) -> None:
    """Whatever the sizes, a GEMM differs from float64 on its quantized operands by accumulation and output rounding.

    A float32 sum of k products is off by at most k u times the sum of their magnitudes, u = 2**-24, in any order; one
    more rounding is for the factor; bf16 rounds by at most 2**-8.
    """
    tokens, in_features, out_features = data.draw(aligned_sizes(recipe))
    linear = Linear("linear", tokens, in_features, out_features)
    gemms = EmulatedGemms(linear, recipe, "cpu", seed=data.draw(st.integers(0, 100)))
    for name in PASSES:
        copies = operands_of(gemms, name)
        factor = gemm_factor(*copies.values()).double()
        matrices = {key: copy.factors()[0] for key, copy in copies.items()}
        exact = factor * product(name, **matrices)
        magnitudes = factor * product(name, **{key: matrix.abs() for key, matrix in matrices.items()})
        bound = 2.0**-8 * exact.abs() + (1 + 2.0**-8) * (linear.gemm(name).k + 1) * 2.0**-24 * magnitudes
        difference = (getattr(gemms, name)().double() - exact).abs()
        assert (difference <= bound).all(), f"{name}: {(difference - bound).max()=}"


@each_recipe
def test_gemms_multiply_what_their_operands_stand_for(recipe: Recipe) -> None:
    """The float64 product of the dequantized operands, transformed ones turned back, but for the output's rounding."""
    gemms = EmulatedGemms(Linear("linear", 64, 96, 128), recipe, "cpu", seed=1)
    for name in PASSES:
        matrices = {key: copy.dequantize() for key, copy in operands_of(gemms, name).items()}
        error = relative_error(getattr(gemms, name)(), product(name, **matrices))
        assert 2.0**-12 < error < 2.0**-8, name


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
