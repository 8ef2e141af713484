"""What must hold of an emulated recipe, as functions that raise AssertionError where it does not.

The property tests call them with what Hypothesis draws; correctness/suite/test_mutations.py plants faults and sees
whether they notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from correctness.bounds import ELEMENTS, Input, gemm_limits, quantization_limit
from correctness.emulate import draw, gemm_errors
from shapes.backends.emulation.scaling import Quantized, Quantizer
from shapes.gemms import Linear
from shapes.recipes import RECIPES, Operand, Recipe

DELAYED = RECIPES["fp8_delayed_scaling"]


def operand_of(recipe: Recipe, role: str) -> Operand:
    """How x, w or dy is quantized."""
    return {"x": recipe.activation, "w": recipe.weight, "dy": recipe.gradient}[role]


def quantizer(recipe: Recipe, role: str) -> Quantizer:
    """The quantizer of x, w or dy, rounding to the nearest and without a Hadamard transform."""
    result = Quantizer(operand_of(recipe, role), recipe, "cpu")
    result.transforms = False
    return result


def settled(recipe: Recipe, role: str, x: Tensor) -> dict[int, Quantized]:
    """The copies of x, by what is contracted, in a third step: after x itself, and an eighth of it turned around.

    A delayed scale is then the one for x, and whatever a quantizer kept from the step before is wrong for x.
    """
    made = quantizer(recipe, role)
    for before in (x, x.flip(0, 1) / 8):
        made(before)
        made.end_step()
    return made(x)


def check_gemm_errors(recipe: Recipe, linear: Linear, inputs: Mapping[str, Input], seed: int) -> None:
    """The error of every GEMM lies between the limits that its formats, its scaling and its data give.

    Raises ValueError where there is no expectation.
    """
    limits = {name: gemm_limits(recipe, name, linear, inputs) for name in ("fprop", "dgrad", "wgrad")}
    errors = gemm_errors(recipe, draw(linear, inputs, seed), seed=seed)
    wrong = {name: (errors[name], limits[name]) for name in limits if errors[name] not in limits[name]}
    assert not wrong, f"{recipe.id}, outside of limits: {wrong}"


def check_elements(recipe: Recipe, role: str, x: Tensor) -> None:
    """No element of a copy is further from x than half a step of its format, in the scale of its block."""
    for dim, copy in settled(recipe, role, x).items():
        exact = x.double().numpy()
        limit = quantization_limit(exact, operand_of(recipe, role), dim, str(recipe.scale))
        difference = np.abs(copy.dequantize().double().numpy() - exact)
        assert (difference <= limit).all(), f"{recipe.id} {role}: {(difference - limit).max()} too far, dimension {dim}"


def check_copies(recipe: Recipe, role: str, x: Tensor) -> None:
    """The copy for either GEMM is made from x, with blocks along what is contracted: as of x^T, seen the other way."""
    copies, of_transpose = settled(recipe, role, x), settled(recipe, role, x.T.contiguous())
    for dim in (0, 1):
        assert torch.equal(copies[dim].dequantize(), of_transpose[1 - dim].dequantize().T), f"{recipe.id}: {dim}"


def check_other_rows(recipe: Recipe, x: Tensor, others: Tensor) -> None:
    """A row of x, contracted along it, is quantized alike whatever the other rows are; `others` replaces them."""
    changed = torch.cat([x[:1], others[1:]])
    rows = [settled(recipe, "x", each)[1].dequantize()[0] for each in (x, changed)]
    assert torch.equal(*rows), f"{recipe.id}: the first row depends on others"


def check_delayed_steps(steps: Sequence[Tensor]) -> None:
    """In each step the scale is that of the largest magnitude in the recipe's history before it, 1 in the first."""
    made = quantizer(DELAYED, "x")
    largest_finite = ELEMENTS[DELAYED.activation.element].max_finite
    seen: list[float] = []
    for number, x in enumerate(steps):
        recent = max(seen[-DELAYED.history :], default=0.0)
        expected = np.float32(largest_finite) / np.float32(recent) if recent else np.float32(1)
        copy = made(x)[1]
        assert copy.inverse_scale.item() == np.float32(1) / expected, f"step {number}: of {copy.inverse_scale}"
        if amax := x.abs().max().item():
            seen.append(amax)
        made.end_step()


def check_saturation(recipe: Recipe, x: Tensor) -> None:
    """What is beyond the range of a delayed scale becomes the largest value, with its sign: never NaN, nor infinite."""
    made = quantizer(recipe, "x")
    made(x / 8)
    made.end_step()
    copy = made(x)[1]
    largest = ELEMENTS[recipe.activation.element].max_finite
    beyond = x.abs().double() * (1 / copy.inverse_scale.double()) > largest * (1 + 2.0**-10)
    assert beyond.any()
    assert torch.equal(copy.values[beyond], largest * x[beyond].float().sign())
