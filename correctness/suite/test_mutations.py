"""The tests are tested: each fault that is planted in the emulation makes a check of correctness/checks.py fail."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from correctness import checks
from correctness.bounds import ELEMENTS, Input, step
from shapes.backends.emulation.scaling import Quantized, Quantizer
from shapes.gemms import Linear
from shapes.recipes import RECIPES, Operand

Copies = dict[int, Quantized]
QUANTIZED = [recipe.id for recipe in RECIPES.values() if recipe.quantized]
PER_TENSOR = ["fp8_delayed_scaling", "fp8_current_scaling"]
ROWS = ["fp8_block_scaling", "mxfp8"]  # whose rows have their own blocks, and nothing else in common
LINEAR = Linear("linear", 128, 256, 128)

quantize, end_step, initialize = Quantizer.__call__, Quantizer.end_step, Quantizer.__init__


# ------------------------------------------------------------------------------------------------------------ faults


def per_element(made: Quantized) -> Tensor:
    """What each value of a quantized matrix is multiplied with."""
    return replace(made, values=torch.ones_like(made.values), transformed=False).dequantize()


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Quantized], Quantized]) -> None:
    """Have every quantizer change each copy that it makes of x."""

    def faulty(self: Quantizer, x: Tensor, dims: Sequence[int] = (0, 1)) -> Copies:
        return {dim: change(x.float(), made) for dim, made in quantize(self, x, dims).items()}

    monkeypatch.setattr(Quantizer, "__call__", faulty)


def scale_off_by_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse scale is twice what it is."""
    plant(monkeypatch, lambda x, made: replace(made, inverse_scale=2 * made.inverse_scale))


def rounded_toward_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are cut off, not rounded."""

    def change(x: Tensor, made: Quantized) -> Quantized:
        element = ELEMENTS[made.element.name]
        scaled = (x / per_element(made)).nan_to_num().clamp(-element.max_finite, element.max_finite)
        steps = torch.from_numpy(step(scaled.numpy().astype(np.float64), element)).float()
        return replace(made, values=(scaled / steps).trunc() * steps)

    plant(monkeypatch, change)


def one_stale_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block has the inverse scale of the step before."""
    before: dict[int, Tensor] = {}

    def faulty(self: Quantizer, x: Tensor, dims: Sequence[int] = (0, 1)) -> Copies:
        result = {}
        for dim, made in quantize(self, x, dims).items():
            scales = made.inverse_scale.clone()
            scales.view(-1)[0] = before.get(dim, scales).view(-1)[0]
            before[dim] = made.inverse_scale
            result[dim] = replace(made, inverse_scale=scales)
        return result

    monkeypatch.setattr(Quantizer, "__call__", faulty)


def bf16_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is quantized."""

    def change(x: Tensor, made: Quantized) -> Quantized:
        one = torch.ones(())
        return replace(made, values=x, inverse_scale=one, block=(0, 0), tensor_inverse_scale=one, amax=None)

    def faulty(self: Quantizer, x: Tensor, dims: Sequence[int] = (0, 1)) -> Copies:
        self.transforms = False
        return {dim: change(x.float(), made) for dim, made in quantize(self, x, dims).items()}

    monkeypatch.setattr(Quantizer, "__call__", faulty)


def saturated_to_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too large becomes NaN."""

    def change(x: Tensor, made: Quantized) -> Quantized:
        beyond = (x / per_element(made)).abs() > made.element.max_finite * (1 + 2.0**-10)
        return replace(made, values=made.values.masked_fill(beyond, float("nan")))

    plant(monkeypatch, change)


def amax_over_the_wrong_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks lie across what is contracted."""

    def faulty(self: Quantizer, x: Tensor, dims: Sequence[int] = (0, 1)) -> Copies:
        made = quantize(self, x, (0, 1))
        return {dim: made[1 - dim] for dim in dims}

    monkeypatch.setattr(Quantizer, "__call__", faulty)


def transposed_copy_from_the_other_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The column-wise copy is the row-wise one, already quantized."""

    def faulty(self: Quantizer, x: Tensor, dims: Sequence[int] = (0, 1)) -> Copies:
        made = quantize(self, x, (0, 1))
        return dict.fromkeys(dims, made[1])

    monkeypatch.setattr(Quantizer, "__call__", faulty)


def e4m3_for_e5m2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients have the format of activations."""

    def faulty(self: Quantizer, operand: Operand, *arguments: Any, **options: Any) -> None:
        element = "e4m3" if operand.element == "e5m2" else operand.element
        initialize(self, operand._replace(element=element), *arguments, **options)

    monkeypatch.setattr(Quantizer, "__init__", faulty)


def history_one_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale of a step does not know the step before it."""
    late: dict[int, Quantizer] = {}

    def faulty_end(self: Quantizer) -> None:
        late[id(self)] = copy.deepcopy(self)
        end_step(self)

    def faulty(self: Quantizer, x: Tensor, dims: Sequence[int] = (0, 1)) -> Copies:
        made = quantize(self, x, dims)
        return quantize(late[id(self)], x, dims) if id(self) in late else made

    monkeypatch.setattr(Quantizer, "end_step", faulty_end)
    monkeypatch.setattr(Quantizer, "__call__", faulty)


# ------------------------------------------------------------------------------------------------------------ checks


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Normal elements."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def uneven() -> Tensor:
    """Elements whose rows and columns all have another size."""
    sizes = torch.exp2(torch.arange(128) % 7)
    return (normal(128, 256) * sizes[:, None] * torch.exp2(torch.arange(256) % 5)).bfloat16()


def gemm_errors(recipe: str) -> None:
    """Of normal tensors."""
    checks.check_gemm_errors(RECIPES[recipe], LINEAR, {"x": Input(), "w": Input(), "dy": Input()}, seed=0)


def elements(recipe: str) -> None:
    """Of an activation."""
    checks.check_elements(RECIPES[recipe], "x", uneven())


def copies(recipe: str) -> None:
    """Of an activation."""
    checks.check_copies(RECIPES[recipe], "x", uneven())


def other_rows(recipe: str) -> None:
    """They become 100 times as large."""
    checks.check_other_rows(RECIPES[recipe], normal(128, 256), 100 * normal(128, 256, seed=1))


def delayed_steps(_: str) -> None:
    """Of which each is larger than the last, and then smaller."""
    checks.check_delayed_steps([size * normal(16, 32) for size in (1.0, 4.0, 32.0, 2.0)])


def saturation(recipe: str) -> None:
    """Of elements 8 times as large as before."""
    checks.check_saturation(RECIPES[recipe], normal(16, 32))


# Each fault, the recipes in which it can be, and the checks that must notice it there.
FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], list[str], tuple[Callable[[str], None], ...]]] = [
    (scale_off_by_2, QUANTIZED, (gemm_errors, elements)),
    (amax_over_the_wrong_axis, ["fp8_block_scaling", "mxfp8", "nvfp4"], (elements,)),
    (amax_over_the_wrong_axis, ROWS, (other_rows,)),
    (e4m3_for_e5m2, PER_TENSOR, (gemm_errors,)),
    (rounded_toward_zero, QUANTIZED, (gemm_errors, elements)),
    (one_stale_scale, ["fp8_block_scaling", "mxfp8", "nvfp4"], (elements,)),
    (transposed_copy_from_the_other_direction, ["fp8_block_scaling", "mxfp8", "nvfp4"], (copies, elements)),
    (bf16_instead, QUANTIZED, (gemm_errors,)),
    (history_one_step_late, ["fp8_delayed_scaling"], (delayed_steps,)),
    (saturated_to_nan, ["fp8_delayed_scaling"], (saturation,)),
]
CASES = [
    pytest.param(fault, recipe, check, id=f"{fault.__name__}-{recipe}-{check.__name__}")
    for fault, recipes, noticed_by in FAULTS
    for recipe in recipes
    for check in noticed_by
]


CONTROLS = {
    f"{recipe}-{check.__name__}": (recipe, check) for _, recipes, some in FAULTS for recipe in recipes for check in some
}


@pytest.mark.parametrize(("recipe", "check"), CONTROLS.values(), ids=CONTROLS)
def test_checks_pass_without_a_fault(recipe: str, check: Callable[[str], None]) -> None:
    """What is noticed below is the fault, and nothing else."""
    check(recipe)


@pytest.mark.parametrize(("fault", "recipe", "check"), CASES)
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    recipe: str,
    check: Callable[[str], None],
) -> None:
    """The check raises AssertionError."""
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(recipe)
