"""Laws that every recipe obeys, on whatever Hypothesis draws. The emulation stands in for the GPUs that have them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from correctness import strategies
from correctness.bounds import ELEMENTS, Input, float32_limit, product_limit, quantization_limit, rounded
from correctness.checks import (
    DELAYED,
    check_copies,
    check_delayed_steps,
    check_elements,
    check_gemm_errors,
    check_other_rows,
    check_saturation,
    operand_of,
    quantizer,
    settled,
)
from correctness.emulate import draw, emulated_gemms, emulated_linear
from correctness.strategies import MODERATE, Values
from shapes.backends.emulation.linear import EmulatedLinear
from shapes.backends.emulation.scaling import Quantizer
from shapes.gemms import PASSES, Linear
from shapes.recipes import RECIPES, TENSOR, Operand, Recipe

QUANTIZED = [recipe for recipe in RECIPES.values() if recipe.quantized]
PER_TENSOR = [recipe for recipe in QUANTIZED if recipe.activation.block == TENSOR]
BLOCKS = [recipe for recipe in QUANTIZED if recipe.activation.block != TENSOR]
# Blocks of a row have nothing in common with other rows: nvfp4 has a scale for the whole tensor besides.
OWN_ROWS = [recipe for recipe in BLOCKS if recipe.id != "nvfp4"]
FP8 = [recipe for recipe in QUANTIZED if recipe.id != "nvfp4"]
NVFP4 = RECIPES["nvfp4"]

roles = st.sampled_from(("x", "w", "dy"))
dims = st.sampled_from((0, 1))
exponents = st.integers(-20, 20)
shapes = strategies.matrix_shapes()
nonzero = strategies.values(*(kind for kind in MODERATE if kind != "zeros"))


def each(recipes: list[Recipe]) -> pytest.MarkDecorator:
    """A test of its own for every recipe."""
    return pytest.mark.parametrize("recipe", recipes, ids=lambda recipe: recipe.id)


def is_shared(operand: Operand) -> bool:
    """Whether both GEMMs use one copy: with one scale, or square blocks."""
    assert operand.block is not None
    return operand.block[0] == operand.block[1]


def usual(seed: int, size: float = 1.0) -> dict[str, Input]:
    """Normal x, w and dy."""
    return {"x": Input(size=size), "w": Input(), "dy": Input(size=1e-3)}


def accumulated(k: int) -> float:
    """How far, relative to its row's largest value, an output may be off for the order of a sum and BF16's rounding."""
    return 2.0**-7 + k * 2.0**-22


# ------------------------------------------------------------------------------------------------ quantized elements


@each(QUANTIZED)
@given(role=roles, shape=shapes, values=strategies.values(*MODERATE, "log_uniform"))
def test_an_element_is_at_most_half_a_step_off(
    recipe: Recipe, role: str, shape: tuple[int, int], values: Values
) -> None:
    """Half a unit in the last place, in the scale of its block; also of what lies beyond an outlier's range."""
    check_elements(recipe, role, values.tensor(shape))


@each(QUANTIZED)
@given(role=roles, dim=dims, shape=shapes, values=strategies.values())
def test_values_are_those_of_the_format(
    recipe: Recipe, role: str, dim: int, shape: tuple[int, int], values: Values
) -> None:
    """Whatever the input, even denormal or the largest there is: rounding again changes nothing."""
    copy = quantizer(recipe, role)(values.tensor(shape))[dim]
    element = ELEMENTS[operand_of(recipe, role).element]
    actual = copy.values.double().numpy()
    assert np.array_equal(actual, rounded(actual, element))


@each(QUANTIZED)
@given(role=roles, dim=dims, shape=shapes, values=strategies.values(), factor=st.sampled_from((2.0, 0.5, -1.0)))
def test_values_are_finite(
    recipe: Recipe, role: str, dim: int, shape: tuple[int, int], values: Values, factor: float
) -> None:
    """Quantizing finite numbers gives finite numbers, at every step of a delayed scale."""
    made, x = quantizer(recipe, role), values.tensor(shape)
    for _ in range(3):
        assert made(x)[dim].values.isfinite().all()
        made.end_step()
        x = (x * factor).clamp(-3e38, 3e38)


@each(QUANTIZED)
@given(role=roles, shape=shapes, values=nonzero, exponent=exponents)
def test_a_power_of_two_scales_both_copies_exactly(
    recipe: Recipe, role: str, shape: tuple[int, int], values: Values, exponent: int
) -> None:
    """Quantized values stay, whatever the granularity of scales: only these move."""
    x = values.tensor(shape)
    scaled = settled(recipe, role, x * 2.0**exponent)
    for dim, copy in settled(recipe, role, x).items():
        assert torch.equal(scaled[dim].dequantize(), copy.dequantize() * 2.0**exponent)


@each(QUANTIZED)
@given(role=roles, dim=dims, shape=shapes, values=strategies.values(*MODERATE, "log_uniform"))
def test_a_negated_tensor_has_the_negated_copies(
    recipe: Recipe, role: str, dim: int, shape: tuple[int, int], values: Values
) -> None:
    """Rounding does not prefer a sign."""
    x = values.tensor(shape)
    assert torch.equal(settled(recipe, role, -x)[dim].dequantize(), -settled(recipe, role, x)[dim].dequantize())


@each(QUANTIZED)
@given(role=roles, dim=dims, shape=shapes)
def test_zeros_stay_zeros(recipe: Recipe, role: str, dim: int, shape: tuple[int, int]) -> None:
    """A tensor of zeros has no scale to speak of, and comes back as it was."""
    assert not settled(recipe, role, torch.zeros(shape))[dim].dequantize().any()


@each(QUANTIZED)
@given(shape=shapes, values=nonzero, seed=strategies.seeds)
def test_zero_elements_stay_zero(recipe: Recipe, shape: tuple[int, int], values: Values, seed: int) -> None:
    """Among others, in every copy."""
    zeros = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    x = values.tensor(shape).masked_fill(zeros, 0.0)
    for copy in settled(recipe, "x", x).values():
        assert not copy.dequantize()[zeros].any()


@each(QUANTIZED)
@given(role=roles, values=strategies.values("normal", "log_uniform", "regions"), seed=strategies.seeds)
def test_order_is_kept_within_a_block(recipe: Recipe, role: str, values: Values, seed: int) -> None:
    """Of two elements with one scale the larger one stays at least as large."""
    operand = operand_of(recipe, role)
    columns = 64 if operand.block == TENSOR else operand_of(recipe, role).block[1]  # type: ignore[index]
    rows = 1 if not is_shared(operand) or operand.block == TENSOR else columns
    x = values.tensor((rows, columns)).view(-1).sort().values.view(rows, columns)
    flat = settled(recipe, role, x)[1].dequantize().view(-1)
    assert (flat.diff() >= 0).all()


@each(QUANTIZED)
@given(role=roles, shape=shapes, values=strategies.values("normal", "eighths", "constant"))
def test_the_largest_element_uses_the_format_s_range(
    recipe: Recipe, role: str, shape: tuple[int, int], values: Values
) -> None:
    """With a scale of a block's own, its largest value lies in the upper half; with a float32 scale it is the last.

    Rounding a scale of E4M3 to the nearest may move it by 1/16 only, which E2M1's values next to 6 do not notice.
    """
    copy, largest = (
        settled(recipe, role, values.tensor(shape))[1],
        ELEMENTS[operand_of(recipe, role).element].max_finite,
    )
    assert (
        copy.values.abs().max() == largest
        if recipe.scale in ("float32", "e4m3 and float32")
        else (largest / 2 <= copy.values.abs().max() <= largest)
    )


@each(PER_TENSOR)
@given(role=roles, shape=shapes, values=nonzero)
def test_the_largest_magnitude_is_exact(recipe: Recipe, role: str, shape: tuple[int, int], values: Values) -> None:
    """Per tensor it becomes the format's largest value, and comes back, but for float32's rounding of the scale."""
    x = values.tensor(shape)
    assert settled(recipe, role, x)[1].dequantize().abs().max().item() == pytest.approx(
        x.abs().max().item(), rel=2**-22
    )


@each(FP8)
@given(role=roles, dim=dims, shape=shapes, values=strategies.values(*MODERATE))
def test_quantizing_twice_is_quantizing_once(
    recipe: Recipe, role: str, dim: int, shape: tuple[int, int], values: Values
) -> None:
    """What a copy stands for has a copy that stands for the same, but for float32's rounding of the scale."""
    once = settled(recipe, role, values.tensor(shape))[dim].dequantize()
    again = settled(recipe, role, once)[dim].dequantize()
    torch.testing.assert_close(again, once, rtol=2.0**-21, atol=0)


@given(role=roles, dim=dims, shape=shapes, values=strategies.values("normal", "constant"))
def test_quantizing_nvfp4_twice_moves_elements_by_a_step_at_most(
    role: str, dim: int, shape: tuple[int, int], values: Values
) -> None:
    """A block's scale, itself rounded, may change: no element is further than it could be from its first copy."""
    once = settled(NVFP4, role, values.tensor(shape))[dim].dequantize()
    again = settled(NVFP4, role, once)[dim].dequantize()
    limit = quantization_limit(once.double().numpy(), operand_of(NVFP4, role), dim, str(NVFP4.scale))
    assert (np.abs((again - once).double().numpy()) <= limit).all()


@each(QUANTIZED)
@given(role=roles, shape=shapes, values=strategies.values(*MODERATE))
def test_a_copy_does_not_depend_on_the_other(recipe: Recipe, role: str, shape: tuple[int, int], values: Values) -> None:
    """Asked for alone or together, copies are the same: one is not made from the other."""
    x = values.tensor(shape)
    both = quantizer(recipe, role)(x)
    for dim in (0, 1):
        assert torch.equal(quantizer(recipe, role)(x, (dim,))[dim].dequantize(), both[dim].dequantize())


# ------------------------------------------------------------------------------------------------- which blocks share


@each(QUANTIZED)
@given(role=roles, shape=shapes, values=strategies.values(*MODERATE, "log_uniform"))
def test_copies_are_made_along_what_is_contracted(
    recipe: Recipe, role: str, shape: tuple[int, int], values: Values
) -> None:
    """The column-wise copy is the row-wise one of the transpose."""
    check_copies(recipe, role, values.tensor(shape))


@each(QUANTIZED)
@given(role=roles, shape=shapes, values=strategies.values("normal", "regions"))
def test_both_copies_are_equal_where_the_recipe_says_so(
    recipe: Recipe, role: str, shape: tuple[int, int], values: Values
) -> None:
    """One scale, or square blocks: the transposed copy is the transpose. Blocks of a row: it is another one."""
    copies = settled(recipe, role, values.tensor(shape))
    if is_shared(operand_of(recipe, role)):
        assert torch.equal(copies[0].dequantize(), copies[1].dequantize())
    else:
        assert copies[0].block == copies[1].block[::-1] != copies[1].block


@each(OWN_ROWS)
@given(shape=strategies.matrix_shapes(), values=strategies.values(*MODERATE), others=strategies.values())
def test_a_row_with_its_own_blocks_does_not_depend_on_others(
    recipe: Recipe, shape: tuple[int, int], values: Values, others: Values
) -> None:
    """Even if they are denormal, or the largest there is."""
    check_other_rows(recipe, values.tensor(shape), others.tensor(shape))


@given(shape=shapes, values=nonzero, others=strategies.values("normal", "eighths"))
def test_a_row_of_nvfp4_depends_on_others_by_their_maximum_only(
    shape: tuple[int, int], values: Values, others: Values
) -> None:
    """With a row that holds the tensor's largest element, what the rest is does not matter."""
    x, rest = values.tensor(shape), others.tensor(shape)
    top = torch.full((1, shape[1]), 8 * max(x.abs().max().item(), rest.abs().max().item()), dtype=x.dtype)
    check_other_rows(NVFP4, torch.cat([x[:1], top, x]), torch.cat([x[:1], top, rest]))


@each(QUANTIZED)
@given(shape=shapes, values=strategies.values(*MODERATE), seed=strategies.seeds)
def test_permuted_rows_have_the_permuted_copy(
    recipe: Recipe, shape: tuple[int, int], values: Values, seed: int
) -> None:
    """Of an activation: nothing depends on where a row is."""
    x = values.tensor(shape)
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed))
    assert torch.equal(settled(recipe, "x", x[order])[1].dequantize(), settled(recipe, "x", x)[1].dequantize()[order])


@each(BLOCKS)
@given(data=st.data(), role=roles, dim=dims, shape=shapes, values=strategies.values("normal", "regions"))
def test_an_element_has_an_effect_in_its_block_only(
    recipe: Recipe, data: st.DataObject, role: str, dim: int, shape: tuple[int, int], values: Values
) -> None:
    """As long as it is not the largest of all."""
    x = values.tensor(shape)
    row, column = data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))
    changed = x.clone()
    changed[row, column] = x.abs().max() / 2
    x[0, 0] = changed[0, 0] = 4 * x.abs().max()
    before, after = settled(recipe, role, x)[dim], settled(recipe, role, changed)[dim]
    rows, columns = before.block
    outside = torch.ones(shape, dtype=torch.bool)
    top, left = row // rows * rows, column // columns * columns
    outside[top : top + rows, left : left + columns] = False
    assert torch.equal(before.dequantize()[outside], after.dequantize()[outside])


@each(OWN_ROWS)
@given(role=roles, columns=st.integers(1, 160), pair=st.tuples(nonzero, nonzero), blocks=st.integers(1, 2))
def test_concatenated_tensors_have_the_concatenated_copies(
    recipe: Recipe, role: str, columns: int, pair: tuple[Values, Values], blocks: int
) -> None:
    """Both copies, if the first tensor ends with a block."""
    rows = blocks * max(operand_of(recipe, role).block or (1, 1))
    parts = [values.tensor((rows, columns)) for values in pair]
    whole, copies = settled(recipe, role, torch.cat(parts)), [settled(recipe, role, part) for part in parts]
    for dim in (0, 1):
        assert torch.equal(whole[dim].dequantize(), torch.cat([copy[dim].dequantize() for copy in copies]))


@each(QUANTIZED)
@given(role=roles, dim=dims, shape=shapes, values=strategies.values(*MODERATE))
def test_padding_with_zeros_changes_nothing(
    recipe: Recipe, role: str, dim: int, shape: tuple[int, int], values: Values
) -> None:
    """A block that the edge cuts is as good as one filled up with zeros."""
    x = values.tensor(shape)
    padded = torch.nn.functional.pad(x, (0, -shape[1] % 128, 0, -shape[0] % 128))
    copy = settled(recipe, role, padded)[dim].dequantize()
    assert torch.equal(copy[: shape[0], : shape[1]], settled(recipe, role, x)[dim].dequantize())
    assert copy.count_nonzero() == copy[: shape[0], : shape[1]].count_nonzero()


# ---------------------------------------------------------------------------------------------------- delayed scaling


@given(sizes=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8), values=strategies.values("normal", "eighths"))
def test_a_delayed_scale_is_that_of_the_steps_before(sizes: list[float], values: Values) -> None:
    """Step by step, whichever of them was the largest."""
    check_delayed_steps([values.tensor((8, 16)) * size for size in sizes])


@given(values=st.lists(strategies.values(*MODERATE), min_size=1, max_size=6))
def test_a_step_of_zeros_leaves_no_trace_in_a_delayed_scale(values: list[Values]) -> None:
    """Steps of other tensors, with steps of zeros between them."""
    steps = [each.tensor((8, 16)) for each in values]
    check_delayed_steps([tensor for step in steps for tensor in (step, torch.zeros(8, 16))])


@given(values=st.lists(nonzero, min_size=5, max_size=9), history=st.integers(1, 4))
def test_a_delayed_scale_forgets(values: list[Values], history: int) -> None:
    """What is further back than the history is long does not count any more."""
    made = Quantizer(DELAYED.activation, replace(DELAYED, history=history), "cpu")
    steps = [each.tensor((8, 16)) for each in values]
    for x in steps:
        made(x)
        made.end_step()
    largest = max(x.abs().max().item() for x in steps[-history:])
    assert made(steps[0])[1].inverse_scale.item() == pytest.approx(largest / 448, rel=2.0**-22)


@given(shape=shapes, values=strategies.values("normal", "constant", "eighths"))
def test_what_a_delayed_scale_does_not_expect_saturates(shape: tuple[int, int], values: Values) -> None:
    """A tensor 8 times as large as those before: its largest elements become the largest value."""
    check_saturation(DELAYED, values.tensor(shape))


@given(role=roles, shape=shapes, values=strategies.values(*MODERATE))
def test_a_delayed_scale_that_saw_the_tensor_is_the_current_one(
    role: str, shape: tuple[int, int], values: Values
) -> None:
    """With the same data in each step the two recipes are one."""
    x = values.tensor(shape)
    current = settled(RECIPES["fp8_current_scaling"], role, x)[1]
    assert torch.equal(settled(DELAYED, role, x)[1].dequantize(), current.dequantize())


# ----------------------------------------------------------------------------------------------- what nvfp4 does more


@given(rows=st.integers(1, 8), columns=st.integers(1, 64), values=nonzero)
def test_a_hadamard_transformed_copy_stands_for_the_same(rows: int, columns: int, values: Values) -> None:
    """Transformed back it is as far from the tensor as the transformed one was: not further than its steps allow."""
    x = values.tensor((16 * rows, columns))
    copy = Quantizer(NVFP4.activation, NVFP4, "cpu")(x)[0]
    assert copy.transformed
    # No element of a block is above 6 steps of its scale, and half of the largest step, 2, is 1 of them; the tensor's
    # own scale may leave a block with one up to 2^-10 of the largest too coarse. 16 such errors make a row's norm.
    groups = x.double().view(rows, 16, columns).norm(dim=1)
    error = (copy.dequantize().double() - x.double()).view(rows, 16, columns).norm(dim=1)
    assert (error <= groups * (4 / 6) + groups.max() * 2.0**-8).all()


@given(shape=strategies.matrix_shapes(16, 16, 64), values=strategies.values("normal", "regions"), seed=strategies.seeds)
def test_stochastic_rounding_takes_one_of_two_neighbours(shape: tuple[int, int], values: Values, seed: int) -> None:
    """Less than a step away, and a value of the format."""
    x = values.tensor(shape)
    made = Quantizer(NVFP4.gradient, NVFP4, "cpu", stochastic=True, seed=seed)
    copy = made(x, (1,))[1]
    exact = x.double().numpy()
    limit = quantization_limit(exact, NVFP4.gradient, 1, str(NVFP4.scale), stochastic=True)
    assert (np.abs(copy.dequantize().double().numpy() - exact) <= limit).all()


@given(values=strategies.values("normal"), seed=strategies.seeds)
def test_stochastic_rounding_has_the_right_mean(values: Values, seed: int) -> None:
    """Over 64 roundings the mean of each element is off by at most 5 deviations of it, and 1/256 of a step.

    A rounding to one of two neighbours varies by half a step at most; TE spends 8 random bits on it and rounds the
    probability down.
    """
    x = values.tensor((16, 64))
    made = Quantizer(NVFP4.gradient, NVFP4, "cpu", stochastic=True, seed=seed)
    mean = torch.stack([made(x, (1,))[1].dequantize() for _ in range(64)]).double().mean(dim=0).numpy()
    exact = x.double().numpy()
    whole = quantization_limit(exact, NVFP4.gradient, 1, str(NVFP4.scale), stochastic=True)
    half = quantization_limit(exact, NVFP4.gradient, 1, str(NVFP4.scale))
    beyond = np.maximum(2 * half - whole, 0)  # saturation, which no randomness undoes
    assert (np.abs(mean - exact) <= (whole - beyond) * (5 / 2 / 8 + 2.0**-8) + beyond).all()


# ------------------------------------------------------------------------------------------------------------- GEMMs


@each(list(RECIPES.values()))
@given(data=st.data(), seed=strategies.seeds)
def test_the_error_of_every_gemm_is_what_its_formats_say(recipe: Recipe, data: st.DataObject, seed: int) -> None:
    """Not more and not less, for any shape that the recipe runs and any distribution of its operands."""
    linear = data.draw(strategies.linears(recipe))
    kinds = ["normal", "uniform"]
    if recipe.compute_dtype != "float16":  # which overflows at 2^16
        kinds += ["log_uniform", "plus_minus"] + ["outlier"] * (linear.tokens >= 32)
    small = 4 if recipe.compute_dtype == "float16" else 12
    activation, gradient = (data.draw(strategies.inputs(*kinds, smallest=-4, largest=small)) for _ in range(2))
    inputs = {"x": activation, "w": Input(), "dy": gradient}
    check_gemm_errors(recipe, linear, inputs, seed)


@each(QUANTIZED)
@given(data=st.data(), seed=strategies.seeds)
def test_an_output_is_off_by_what_its_operands_are(recipe: Recipe, data: st.DataObject, seed: int) -> None:
    """Element by element: errors of the operands times the other operand, float32's sum, and the output's rounding."""
    linear = data.draw(strategies.linears(recipe, "tiny", "barely aligned"))
    tensors = draw(linear, usual(seed), seed)
    x, w = (tensors[role].double().numpy() for role in ("x", "w"))
    limits = [
        quantization_limit(each, operand_of(recipe, role), 1, str(recipe.scale)) for role, each in (("x", x), ("w", w))
    ]
    total = product_limit(x, limits[0], w, limits[1]) + float32_limit(np.abs(x) + limits[0], np.abs(w) + limits[1])
    exact = x @ w.T
    total += 2.0**-8 * (np.abs(exact) + total)
    actual = emulated_gemms(recipe, tensors)["fprop"].double().numpy()
    assert (np.abs(actual - exact) <= total).all()


@each(QUANTIZED)
@given(data=st.data(), seed=strategies.seeds, role=st.sampled_from(("x", "w", "dy")), exponent=st.integers(-12, 12))
def test_a_power_of_two_scales_a_gemm_exactly(
    recipe: Recipe, data: st.DataObject, seed: int, role: str, exponent: int
) -> None:
    """On one operand it comes out of the two GEMMs that have it, and of the third it does not."""
    linear = data.draw(strategies.linears(recipe, "tiny", "barely aligned"))
    tensors = draw(linear, usual(seed), seed)
    plain = emulated_gemms(recipe, tensors)
    scaled = emulated_gemms(recipe, {**tensors, role: tensors[role] * 2.0**exponent})
    has = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}[role]
    for name in PASSES:
        assert torch.equal(scaled[name], plain[name] * 2.0 ** (exponent if name in has else 0)), name


@each(QUANTIZED)
@given(data=st.data(), seed=strategies.seeds)
def test_negated_activations_negate_outputs_and_weight_gradients(
    recipe: Recipe, data: st.DataObject, seed: int
) -> None:
    """And leave the input's gradient alone."""
    linear = data.draw(strategies.linears(recipe, "tiny", "thin"))
    tensors = draw(linear, usual(seed), seed)
    plain, negated = emulated_gemms(recipe, tensors), emulated_gemms(recipe, {**tensors, "x": -tensors["x"]})
    assert torch.equal(negated["fprop"], -plain["fprop"])
    assert torch.equal(negated["wgrad"], -plain["wgrad"])
    assert torch.equal(negated["dgrad"], plain["dgrad"])


def assert_close_to(actual: Tensor, expected: Tensor, contracted: int) -> None:
    """Equal but for another order of the sum, which may also round BF16 outputs to a neighbour."""
    atol = accumulated(contracted) * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=atol)


@each(QUANTIZED)
@given(data=st.data(), seed=strategies.seeds)
def test_permuted_tokens_have_permuted_outputs(recipe: Recipe, data: st.DataObject, seed: int) -> None:
    """fprop and, with deterministic rounding, dgrad; with one scale per tensor wgrad stays as it is."""
    linear = data.draw(strategies.linears(recipe))
    tensors = draw(linear, usual(seed), seed)
    order = torch.randperm(linear.tokens, generator=torch.Generator().manual_seed(seed))
    plain = emulated_gemms(recipe, tensors)
    permuted = emulated_gemms(recipe, {**tensors, "x": tensors["x"][order], "dy": tensors["dy"][order]})
    assert_close_to(permuted["fprop"], plain["fprop"][order], linear.in_features)
    if recipe is not NVFP4:
        assert_close_to(permuted["dgrad"], plain["dgrad"][order], linear.out_features)
    if recipe in PER_TENSOR:
        assert_close_to(permuted["wgrad"], plain["wgrad"], linear.tokens)


@each(OWN_ROWS)
@given(data=st.data(), seed=strategies.seeds, size=st.sampled_from((0.0, 1e-6, 1e6)))
def test_a_token_does_not_depend_on_others(recipe: Recipe, data: st.DataObject, seed: int, size: float) -> None:
    """The first token's output and gradient are the same whether others are zero, small or huge."""
    linear = data.draw(strategies.linears(recipe, "tiny", "barely aligned"))
    tensors = draw(linear, usual(seed), seed)
    others = {role: torch.cat([tensors[role][:1], size * tensors[role][1:]]) for role in ("x", "dy")}
    plain, changed = emulated_gemms(recipe, tensors), emulated_gemms(recipe, {**tensors, **others})
    for name in ("fprop", "dgrad"):
        assert_close_to(changed[name][0], plain[name][0], linear.gemm(name).k)


@each(OWN_ROWS)
@given(data=st.data(), seed=strategies.seeds)
def test_a_batch_is_its_parts(recipe: Recipe, data: st.DataObject, seed: int) -> None:
    """Outputs of concatenated tokens are the concatenated outputs; their weight gradients add up."""
    linear = data.draw(strategies.linears(recipe, "tiny", "barely aligned"))
    block = max(recipe.activation.block or (1, 1))
    linear = replace(linear, tokens=block)  # so that no block of wgrad has tokens of both
    parts = [draw(linear, usual(seed), seed + index) for index in range(2)]
    parts[1]["w"] = parts[0]["w"]
    whole = emulated_gemms(
        recipe,
        {
            role: torch.cat([part[role] for part in parts]) if role != "w" else parts[0]["w"]
            for role in ("x", "w", "dy")
        },
    )
    results = [emulated_gemms(recipe, part) for part in parts]
    for name in ("fprop", "dgrad"):
        assert_close_to(whole[name], torch.cat([result[name] for result in results]), linear.gemm(name).k)
    assert_close_to(whole["wgrad"].float(), results[0]["wgrad"].float() + results[1]["wgrad"].float(), 2 * block)


@each(OWN_ROWS)
@given(data=st.data(), seed=strategies.seeds)
def test_a_contraction_is_the_sum_of_its_parts(recipe: Recipe, data: st.DataObject, seed: int) -> None:
    """Features side by side: outputs add up, gradients of inputs and weights lie side by side."""
    linear = data.draw(strategies.linears(recipe, "tiny"))
    linear = replace(linear, in_features=max(recipe.activation.block or (1, 1)))
    parts = [draw(linear, usual(seed), seed + index) for index in range(2)]
    parts[1]["dy"] = parts[0]["dy"]
    whole = emulated_gemms(
        recipe,
        {"dy": parts[0]["dy"], **{role: torch.cat([part[role] for part in parts], dim=1) for role in ("x", "w")}},
    )
    results = [emulated_gemms(recipe, part) for part in parts]
    total = results[0]["fprop"].float() + results[1]["fprop"].float()
    assert_close_to(whole["fprop"].float(), total, 2 * linear.in_features)
    for name in ("dgrad", "wgrad"):
        assert_close_to(whole[name], torch.cat([result[name] for result in results], dim=1), linear.gemm(name).k)


@each(list(RECIPES.values()))
@given(data=st.data(), seed=strategies.seeds, role=roles)
def test_zero_in_zero_out(recipe: Recipe, data: st.DataObject, seed: int, role: str) -> None:
    """Both GEMMs that have an operand of zeros give zeros, the third does not."""
    linear = data.draw(strategies.linears(recipe, "tiny", "thin"))
    tensors = draw(linear, usual(seed), seed)
    results = emulated_gemms(recipe, {**tensors, role: torch.zeros_like(tensors[role])})
    zero = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "dy": ("dgrad", "wgrad")}[role]
    assert {name for name in PASSES if not results[name].any()} == set(zero)


def results_with(
    recipe: Recipe, linear: Linear, seed: int, role: str, value: float
) -> tuple[dict[str, Tensor], int, int]:
    """The GEMMs with one element of an operand replaced, and where it is."""
    tensors = draw(linear, usual(seed), seed)
    row, column = seed % tensors[role].shape[0], (seed // 7) % tensors[role].shape[1]
    tensors[role][row, column] = value
    return emulated_gemms(recipe, tensors), row, column


# Where one element of an operand ends up: rows or columns of each GEMM's output, by its own row or column.
REACHES = {
    "x": {"fprop": ("row", "row"), "wgrad": ("column", "column")},
    "w": {"fprop": ("column", "row"), "dgrad": ("column", "column")},
    "dy": {"dgrad": ("row", "row"), "wgrad": ("row", "column")},
}


@each(FP8)
@given(data=st.data(), seed=strategies.seeds, role=roles)
def test_nan_in_is_nan_out(recipe: Recipe, data: st.DataObject, seed: int, role: str) -> None:
    """In the row or column of the output that it has a part in, and nowhere else."""
    linear = data.draw(strategies.linears(recipe, "tiny", "barely aligned"))
    results, row, column = results_with(recipe, linear, seed, role, math.nan)
    for name in PASSES:
        expected = torch.zeros_like(results[name], dtype=torch.bool)
        if name in REACHES[role]:
            along, index = REACHES[role][name]
            at = row if index == "row" else column
            (expected if along == "row" else expected.T)[at] = True
        assert torch.equal(results[name].isnan(), expected), name


@each([RECIPES["bf16"], RECIPES["fp16"], RECIPES["mxfp8"], NVFP4])
@given(data=st.data(), seed=strategies.seeds, role=roles, value=st.sampled_from((math.inf, -math.inf)))
def test_infinity_in_is_visible_in_the_output(
    recipe: Recipe, data: st.DataObject, seed: int, role: str, value: float
) -> None:
    """Something in both GEMMs that have it is not finite."""
    linear = data.draw(strategies.linears(recipe, "tiny", "barely aligned"))
    results, _, _ = results_with(recipe, linear, seed, role, value)
    assert {name for name in PASSES if not results[name].isfinite().all()} == set(REACHES[role])


@each([recipe for recipe in FP8 if recipe.id != "mxfp8"])
@given(data=st.data(), seed=strategies.seeds, role=roles)
def test_these_recipes_hide_an_infinity_as_te_does(recipe: Recipe, data: st.DataObject, seed: int, role: str) -> None:
    """Pinned, not praised: conversions saturate, so an infinity becomes the largest value, in a scale of 1."""
    linear = data.draw(strategies.linears(recipe, "tiny"))
    results, _, _ = results_with(recipe, linear, seed, role, math.inf)
    assert all(result.isfinite().all() for result in results.values())


@given(seed=strategies.seeds)
def test_nvfp4_hides_a_nan_as_te_does(seed: int) -> None:
    """Pinned, not praised: E2M1 has no NaN, and in sizes that are not for TE's fused kernel no scale shows it."""
    results, _, _ = results_with(NVFP4, Linear("linear", 32, 96, 32), seed, "x", math.nan)
    assert all(result.isfinite().all() for result in results.values())


@each(QUANTIZED)
@given(data=st.data(), seed=strategies.seeds)
def test_a_bias_is_added_to_the_product(recipe: Recipe, data: st.DataObject, seed: int) -> None:
    """The output moves by it, up to the rounding of both."""
    linear = data.draw(strategies.linears(recipe, "tiny"))
    tensors = draw(linear, usual(seed), seed)
    layer = EmulatedLinear(linear.in_features, linear.out_features, True, recipe)
    with torch.no_grad():
        layer.weight.copy_(tensors["w"])
        layer.bias.normal_(generator=torch.Generator().manual_seed(seed))
        biased, bias = layer(tensors["x"]).double(), layer.bias.double()
    plain = emulated_linear(recipe, tensors["w"])(tensors["x"]).detach().double()
    limit = 2.0**-8 * (biased.abs() + plain.abs()) + linear.in_features * 2.0**-22 * plain.abs().max()
    assert ((biased - plain - bias).abs() <= limit).all()


@each(QUANTIZED)
@given(data=st.data(), seed=strategies.seeds, parts=st.sampled_from(((1, -1), (2, -1), (-1, 1))))
def test_leading_dimensions_are_tokens(recipe: Recipe, data: st.DataObject, seed: int, parts: tuple[int, int]) -> None:
    """(batch, sequence, in) gives what (tokens, in) gives."""
    linear = data.draw(strategies.linears(recipe, "tiny"))
    tensors = draw(linear, usual(seed), seed)
    layers = [emulated_linear(recipe, tensors["w"]) for _ in range(2)]
    flat, shaped = layers[0](tensors["x"]), layers[1](tensors["x"].reshape(*parts, linear.in_features))
    assert torch.equal(shaped.reshape(flat.shape), flat)


# -------------------------------------------------------------------------------------------- what a recipe refuses


@each(QUANTIZED)
@given(data=st.data())
def test_a_refused_shape_gives_words_and_no_numbers(recipe: Recipe, data: st.DataObject) -> None:
    """Also one that only the backward pass refuses: the forward pass says so, and returns nothing."""
    linear = data.draw(strategies.refused_linears(recipe))
    reason = recipe.misaligned(linear.tokens, linear.in_features, linear.out_features)
    assert reason is not None
    x = torch.ones(linear.tokens, linear.in_features, requires_grad=True)
    layer = EmulatedLinear(linear.in_features, linear.out_features, False, recipe)
    with pytest.raises(
        ValueError, match=r"needs .* to be a multiple of .* in the (forward|backward) pass, got"
    ) as caught:
        layer(x)
    assert str(caught.value) == reason
    assert x.grad is None


@each([recipe for recipe in QUANTIZED if recipe.align_forward != recipe.align_backward])
@given(data=st.data())
def test_a_shape_that_only_the_backward_pass_refuses_says_so(recipe: Recipe, data: st.DataObject) -> None:
    """Tokens or out_features of 8 but not 16: te.Linear runs forward and fails in backward; we do not begin."""
    odd = st.integers(0, 9).map(lambda half: 8 * (2 * half + 1))
    even = st.integers(1, 10).map(lambda times: 16 * times)
    pairs = st.one_of(st.tuples(odd, even), st.tuples(even, odd), st.tuples(odd, odd))
    tokens, out_features = data.draw(pairs)
    reason = recipe.misaligned(tokens, 32, out_features)
    assert reason is not None
    assert "backward" in reason


@each(QUANTIZED)
@given(data=st.data(), seed=strategies.seeds)
def test_an_accepted_shape_gives_finite_numbers_of_the_right_shape(
    recipe: Recipe, data: st.DataObject, seed: int
) -> None:
    """Forward and backward, whatever the proportions."""
    linear = data.draw(strategies.linears(recipe))
    results = emulated_gemms(recipe, draw(linear, usual(seed), seed))
    for name, result in results.items():
        gemm = linear.gemm(name)
        assert result.shape == (gemm.m, gemm.n)
        assert result.isfinite().all()
