"""Which precision recipes there are, as a table: formats, scaling granularity, alignment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

TENSOR = (0, 0)  # one scale for the whole tensor


class Operand(NamedTuple):
    """How one tensor enters a GEMM: its element format and the block (rows, columns) that shares a scale.

    A block is given along the contracted dimension: (1, 128) means 128 neighbours that are summed up share a
    scale. TENSOR is one scale for all; None says that there is no scale.
    """

    element: str
    block: tuple[int, int] | None = None

    def __str__(self) -> str:
        """`bf16`, `e4m3`, `e4m3:128x128`."""
        return self.element if self.block in (None, TENSOR) else f"{self.element}:{self.block[0]}x{self.block[1]}"


@dataclass(frozen=True)
class Recipe:
    """A precision recipe.

    `align` are divisors, forward and backward, for (tokens, in_features, out_features): a linear whose sizes are
    no multiples cannot run. Which GPU can run it TE says. `scale` is the format of a scale, `history` how many earlier
    maxima a delayed scale looks back on.
    """

    id: str
    activation: Operand
    weight: Operand
    gradient: Operand
    scale: str | None
    align_forward: tuple[int, int, int] = (1, 1, 1)
    align_backward: tuple[int, int, int] = (1, 1, 1)
    compute_dtype: str = "bfloat16"
    history: int = 0
    default: bool = True

    @property
    def quantized(self) -> bool:
        """Whether operands are quantized at all."""
        return self.scale is not None

    def gemm_operands(self, pass_name: str) -> tuple[Operand, Operand]:
        """The two operands of a GEMM: (activation, weight), (gradient, weight) or (gradient, activation)."""
        return {
            "fprop": (self.activation, self.weight),
            "dgrad": (self.gradient, self.weight),
            "wgrad": (self.gradient, self.activation),
        }[pass_name]

    def misaligned(self, tokens: int, in_features: int, out_features: int) -> str | None:
        """Why a linear of these sizes cannot run forward and backward, or None."""
        sizes = {"tokens": tokens, "in_features": in_features, "out_features": out_features}
        for direction, align in (("forward", self.align_forward), ("backward", self.align_backward)):
            for (name, size), divisor in zip(sizes.items(), align, strict=True):
                if size % divisor:
                    return f"{self.id} needs {name} to be a multiple of {divisor} in the {direction} pass, got {size}"
        return None


_BF16, _FP16 = Operand("bf16"), Operand("fp16")

# What the two recipes with one scale per tensor share.
_FP8_PER_TENSOR = Recipe(
    "",
    activation=Operand("e4m3", TENSOR),
    weight=Operand("e4m3", TENSOR),
    gradient=Operand("e5m2", TENSOR),
    scale="float32",
    align_forward=(8, 16, 8),
    align_backward=(16, 16, 16),
)

# Formats and granularity: transformer_engine/common/recipe/__init__.py and
# transformer_engine/pytorch/quantization.py of TE 2.20.2. Alignment: the checks of TE's modules (forward) and of
# its cuBLASLt calls (backward: the contracted dimension is then tokens or out_features).
RECIPES: dict[str, Recipe] = {
    recipe.id: recipe
    for recipe in (
        Recipe("bf16", _BF16, _BF16, _BF16, None),
        Recipe("fp16", _FP16, _FP16, _FP16, None, compute_dtype="float16", default=False),
        replace(_FP8_PER_TENSOR, id="fp8_delayed_scaling", history=1024),
        replace(_FP8_PER_TENSOR, id="fp8_current_scaling"),
        Recipe(
            "fp8_block_scaling",
            activation=Operand("e4m3", (1, 128)),
            weight=Operand("e4m3", (128, 128)),
            gradient=Operand("e4m3", (1, 128)),
            scale="power of two",
            align_forward=(8, 16, 8),
            align_backward=(16, 16, 16),
        ),
        Recipe(
            "mxfp8",
            activation=Operand("e4m3", (1, 32)),
            weight=Operand("e4m3", (1, 32)),
            gradient=Operand("e4m3", (1, 32)),
            scale="e8m0",
            align_forward=(32, 32, 32),
            align_backward=(32, 32, 32),
        ),
        Recipe(
            "nvfp4",
            activation=Operand("e2m1", (1, 16)),
            weight=Operand("e2m1", (16, 16)),
            gradient=Operand("e2m1", (1, 16)),
            scale="e4m3 and float32",
            align_forward=(16, 16, 16),
            align_backward=(16, 16, 16),
        ),
    )
}
