"""Scales of a quantized operand, per tensor or per block, and quantization with them, as Transformer Engine does it.

Everything here is for matrices, since that is what enters a GEMM. A quantized value times its inverse scale is the
value that it stands for. Files named are TE's, in transformer_engine/common, of version 2.20.2.

NaN never enters a maximum (CUDA's fmax ignores it), so it leaves the scale of its block alone and stays visible in its
own element; in E2M1, which has none, it turns into the largest value. An infinite maximum gives a per-tensor or a
float32 block scale of 1. Not reproduced: one of TE's kernels for MXFP8, used only for scales that are not arranged for
a GEMM, has E8M0's NaN as the scale of a block of nothing but NaN; the others have its smallest value, as here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shapes.backends.emulation import hadamard
from shapes.backends.emulation.formats import (
    FORMATS,
    Format,
    encode,
    power_of_two_below,
    round_stochastically,
    round_to,
)
from shapes.recipes import TENSOR, Operand, Recipe

_FLOAT32_MAX = torch.finfo(torch.float32).max

# Of scales with two levels (NVFP4): the largest value of an element and of a block's scale.
_E2M1_MAX, _E4M3_MAX = FORMATS["e2m1"].max_finite, FORMATS["e4m3"].max_finite

_SCALE_ELEMENTS = {"e8m0": FORMATS["e8m0"], "e4m3 and float32": FORMATS["e4m3"]}  # others are float32


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix.

    values                (rows, columns), float32, each one that the element format has
    inverse_scale         one per block, (ceil(rows / block rows), ceil(columns / block columns)); shape () for TENSOR
    block                 (rows, columns) that share a scale, in the matrix's own axes
    tensor_inverse_scale  shape (), a second factor for the whole matrix; 1 unless scales are themselves scaled
    element, scale_format what values and inverse scales are stored in
    amax                  shape (), the maximum that TE keeps with scales that are themselves scaled, else None
    transformed           whether the values are those of the random Hadamard transform of the matrix, along the rows
    """

    values: Tensor
    inverse_scale: Tensor
    block: tuple[int, int]
    tensor_inverse_scale: Tensor
    element: Format
    scale_format: str
    amax: Tensor | None = None
    transformed: bool = False

    def codes(self) -> Tensor:
        """The values as TE stores them, (rows, columns), uint8; E2M1 is not packed."""
        return encode(self.values, self.element)

    def scale_codes(self) -> Tensor:
        """The inverse scales as TE stores them: codes of E8M0 or E4M3 (uint8), or float32."""
        element = _SCALE_ELEMENTS.get(self.scale_format)
        return self.inverse_scale if element is None else encode(self.inverse_scale, element)

    @property
    def factor(self) -> Tensor:
        """The one factor for the whole matrix, shape ()."""
        return self.inverse_scale if self.block == TENSOR else self.tensor_inverse_scale

    def factors(self) -> tuple[Tensor, Tensor]:
        """The matrix with its block scales applied, and the one factor that remains, shape ().

        The matrix is exact in float32: an element has at most 4 significant bits and a block's scale at most 4, unless
        scales are float32. The factor is not applied to it, since a GEMM applies it once to the accumulated product.
        """
        if self.block == TENSOR:
            return self.values, self.factor
        return _times_per_block(self.values, self.inverse_scale, self.block), self.factor

    def dequantize(self) -> Tensor:
        """The values that the matrix stands for, (rows, columns), float32: also of a transformed one the original's."""
        matrix, factor = self.factors()
        return hadamard.inverse_transform(matrix * factor) if self.transformed else matrix * factor


def gemm_factor(a: Quantized, b: Quantized) -> Tensor:
    """What the accumulated product of two quantized matrices is multiplied with, shape ().

    With scales that are themselves scaled TE multiplies the two maxima, and that by one constant
    (compute_nvfp4_per_tensor_scale_kernel in recipe/nvfp4.cu).
    """
    if a.amax is not None and b.amax is not None:
        return a.amax * b.amax * (1.0 / (_E2M1_MAX * _E4M3_MAX) ** 2)
    return a.factor * b.factor


# --- scales ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Maxima:
    """What scales are made from: the largest magnitudes of the blocks and of the whole tensor (shape ()).

    `largest_scale` replaces an infinite one. `propagates` says that NaN and infinity reach the scales of NVFP4.
    """

    blocks: Tensor
    tensor: Tensor
    largest_scale: float
    propagates: bool


@dataclass(frozen=True)
class _Scales:
    """What quantization multiplies with, and what undoes it; see Quantized for shapes."""

    scale: Tensor
    inverse: Tensor
    tensor_inverse: Tensor
    amax: Tensor | None = None


def _divided(number: float, x: Tensor) -> Tensor:
    """number / x with one rounding: torch divides a number by a tensor as reciprocal times number, with two."""
    return x.new_full((), number) / x


def _float32_scale(amax: Tensor, max_finite: float, largest: float, otherwise: Tensor | float = 1.0) -> Tensor:
    """max_finite / amax; `largest` where that is infinite, and `otherwise` where amax is 0, infinite or NaN.

    Source: compute_scale_from_amax in recipe/recipe_common.cuh.
    """
    scale = _divided(max_finite, amax)
    scale = torch.where(scale.isinf(), largest, scale)
    return torch.where((amax > 0) & amax.isfinite(), scale, otherwise)


def _float32_scales(maxima: _Maxima, element: Format) -> _Scales:
    return _given(_float32_scale(maxima.blocks, element.max_finite, maxima.largest_scale))


def _power_of_two_scales(maxima: _Maxima, element: Format) -> _Scales:
    """Rounded down, so that nothing overflows; the inverse is exact."""
    return _given(power_of_two_below(_float32_scale(maxima.blocks, element.max_finite, maxima.largest_scale)))


def _given(scale: Tensor) -> _Scales:
    return _Scales(scale, 1.0 / scale, scale.new_ones(()))


def _e8m0_scales(maxima: _Maxima, element: Format) -> _Scales:
    """The inverse scale amax / max_finite, rounded up to a power of two. A zero block has the smallest, 2**-127."""
    inverse = round_to(maxima.blocks * (1.0 / element.max_finite), FORMATS["e8m0"])
    return _Scales(1.0 / inverse, inverse, inverse.new_ones(()))


def _e4m3_and_float32_scales(maxima: _Maxima, element: Format) -> _Scales:
    """Inverse scales amax / max_finite of the blocks, stored in E4M3 relative to one float32 factor.

    The factor is such that the largest block's inverse scale becomes E4M3's largest value. A zero block's inverse
    scale is 0, and so is one too small beside the tensor's maximum: its elements are then lost. Order of operations:
    cast/nvfp4/core_nvfp4.cuh. Where NaN and infinity propagate, an infinite maximum makes every block NaN or 0.
    """
    amax = maxima.tensor
    tensor_scale = _divided(_E4M3_MAX * element.max_finite, amax).clamp(max=_FLOAT32_MAX)
    usable = amax > 0 if maxima.propagates else (amax > 0) & amax.isfinite()
    tensor_scale = torch.where(usable, tensor_scale, 1.0)
    inverse = round_to(maxima.blocks * (tensor_scale * (1.0 / element.max_finite)), FORMATS["e4m3"])
    scale = (1.0 / (inverse * (1.0 / tensor_scale))).clamp(max=_FLOAT32_MAX)
    return _Scales(scale, inverse, amax * (1.0 / (_E4M3_MAX * element.max_finite)), amax)


_SCALES: dict[str, Callable[[_Maxima, Format], _Scales]] = {
    "float32": _float32_scales,
    "power of two": _power_of_two_scales,
    "e8m0": _e8m0_scales,
    "e4m3 and float32": _e4m3_and_float32_scales,
}


# --- quantization ----------------------------------------------------------------------------------------------


def quantize(
    x: Tensor,
    operand: Operand,
    dim: int,
    scale_format: str,
    scale: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    transformed: bool = False,
    propagates: bool = False,
    generator: torch.Generator | None = None,
) -> Quantized:
    """x (rows, columns) as it enters a GEMM that contracts dimension `dim` (0 or 1) of it.

    `scale_format` is the recipe's. The scale comes from x itself, unless one is given (shape (), for TENSOR only), and
    from `epsilon` where the largest magnitude is below that. With `transformed` the random Hadamard transform comes
    first, along the rows; with a generator rounding is stochastic; `propagates` is explained at `Quantizer`. Blocks at
    the edge are smaller where a size is no multiple of the block. Zeros stay zeros.

    Raises ValueError for an x that is no matrix, for an operand without a scale, and for a transform of a number of
    rows that 16 does not divide.
    """
    if x.dim() != 2:
        raise ValueError(f"only a matrix can be quantized, got shape {tuple(x.shape)}")
    if operand.block is None:
        raise ValueError(f"{operand} has no scale: nothing to quantize")
    element = FORMATS[operand.element]
    block = operand.block if dim == 1 else operand.block[::-1]
    # As in TE: what replaces an infinite scale of a block is the largest value of the input's type.
    largest_scale = _FLOAT32_MAX if block == TENSOR else min(torch.finfo(x.dtype).max, _FLOAT32_MAX)
    x = hadamard.transform(x.float()) if transformed else x.float()
    if scale is not None:
        scales = _given(scale)
    else:
        scales = _SCALES[scale_format](_maxima(x, block, epsilon, largest_scale, propagates), element)
    scaled = x * scales.scale if block == TENSOR else _times_per_block(x, scales.scale, block)
    values = round_to(scaled, element) if generator is None else round_stochastically(scaled, element, generator)
    return Quantized(
        values, scales.inverse, block, scales.tensor_inverse, element, scale_format, scales.amax, transformed
    )


def _maxima(x: Tensor, block: tuple[int, int], epsilon: float, largest_scale: float, propagates: bool) -> _Maxima:
    magnitudes = _magnitudes(x)
    tensor = magnitudes.amax().clamp(min=epsilon)
    if block == TENSOR:
        return _Maxima(tensor, tensor, largest_scale, propagates)
    blocks = _block_view(x.abs() if propagates else magnitudes, block).amax(dim=(1, 3)).clamp(min=epsilon)
    return _Maxima(blocks, tensor, largest_scale, propagates)


def _magnitudes(x: Tensor) -> Tensor:
    """|x| with 0 for NaN."""
    return x.abs().nan_to_num_(nan=0.0, posinf=math.inf)


def _block_view(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x as (block row, row within, block column, column within), zeros filling up the blocks at the edge."""
    rows, columns = block
    missing_rows, missing_columns = -x.shape[0] % rows, -x.shape[1] % columns
    if missing_rows or missing_columns:
        x = torch.nn.functional.pad(x, (0, missing_columns, 0, missing_rows))
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _times_per_block(x: Tensor, factor: Tensor, block: tuple[int, int]) -> Tensor:
    """x with each block multiplied by its factor, same shape."""
    blocks = _block_view(x, block) * factor[:, None, :, None]
    padded = blocks.reshape(blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
    return padded[: x.shape[0], : x.shape[1]]


# --- a recipe's quantizers -------------------------------------------------------------------------------------


class DelayedScale:
    """A scale that follows the largest magnitudes of earlier steps, for fp8_delayed_scaling.

    It is 1 until the first `update`, and from then on max_finite / 2**margin over the largest magnitude of the last
    `history` steps, or with `most_recent` over that of the last step. A step of nothing but zeros changes neither scale
    nor history: TE takes it for one in which the tensor was not used. Infinity stays in the history as long as any
    other value, and keeps the scale as it is. Source: kernel_bulk in recipe/delayed_scaling.cu. It is state of a run,
    not of a model: no state_dict has it.

    scale         shape (), float32
    amax_history  (history,), float32; entry 0 is the step under way, entry 1 the oldest, the last entry the newest
    """

    def __init__(
        self,
        element: Format,
        history: int,
        device: torch.device | str,
        *,
        margin: int = 0,
        most_recent: bool = False,
    ) -> None:
        self.max_finite = element.max_finite * 2.0**-margin
        self.most_recent = most_recent
        self.scale = torch.ones((), device=device)
        self.amax_history = torch.zeros(history, device=device)

    def record(self, x: Tensor) -> None:
        """Take note of the largest magnitude of x."""
        self.amax_history[0] = torch.maximum(self.amax_history[0], _magnitudes(x).amax().float())

    def update(self) -> None:
        """End the step: the scale for the next one, and a history with room for it in place of the oldest entry."""
        newest = self.amax_history[0].clone()
        amax = newest if self.most_recent else torch.where(newest > 0, self.amax_history.amax(), 0.0)
        self.scale = _float32_scale(amax, self.max_finite, _FLOAT32_MAX, otherwise=self.scale)
        rolled = torch.roll(self.amax_history, -1)
        rolled[0] = 0.0
        self.amax_history = torch.where(newest > 0, rolled, self.amax_history)


class Quantizer:
    """Quantizes one operand of a linear (activation, weight or gradient), once per GEMM that it enters.

    For nvfp4 the copies of activations and gradients whose tokens are contracted are those of the random Hadamard
    transform, and with `stochastic` values are rounded stochastically, as TE does it for gradients; `seed` is that of
    the random numbers. TE makes both copies of such tensors with one kernel if 64 divides the rows and 128 the columns:
    in that one NaN and infinity reach the scales, in its other kernels they do not. `epsilon` is the least maximum.

    Raises ValueError for a recipe that does not quantize.
    """

    def __init__(
        self,
        operand: Operand,
        recipe: Recipe,
        device: torch.device | str,
        *,
        stochastic: bool = False,
        seed: int = 0,
        epsilon: float = 0.0,
    ) -> None:
        if recipe.scale is None:
            raise ValueError(f"{recipe.id} does not quantize")
        self.operand = operand
        self.scale_format = recipe.scale
        self.epsilon = epsilon
        self.transforms = recipe.scale == "e4m3 and float32" and operand.block == (1, hadamard.SIZE)
        self.generator = torch.Generator(device).manual_seed(seed) if stochastic else None
        element = FORMATS[operand.element]
        self.delayed = DelayedScale(element, recipe.history, device) if recipe.history else None

    def __call__(self, x: Tensor, dims: Sequence[int] = (0, 1)) -> dict[int, Quantized]:
        """x (rows, columns) quantized for the GEMMs that contract the dimensions `dims` of it, by dimension.

        With one scale, or square blocks, both are the same matrix and it is made only once; otherwise each comes from
        x itself. Raises ValueError where `quantize` does.
        """
        scale = None
        if self.delayed is not None:
            scale = self.delayed.scale
            self.delayed.record(x)
        block = self.operand.block
        if block is not None and block[0] == block[1]:
            return dict.fromkeys(dims, self._copy(x, 1, scale))
        return {dim: self._copy(x, dim, scale) for dim in sorted(dims, reverse=True)}  # row-wise first, as in TE

    def _copy(self, x: Tensor, dim: int, scale: Tensor | None) -> Quantized:
        return quantize(
            x,
            self.operand,
            dim,
            self.scale_format,
            scale,
            epsilon=self.epsilon,
            transformed=self.transforms and dim == 0,
            propagates=self.transforms and x.shape[0] % 64 == 0 and x.shape[1] % 128 == 0,
            generator=self.generator,
        )

    def end_step(self) -> None:
        """Let a delayed scale take in what was recorded; nothing to do for others."""
        if self.delayed is not None:
            self.delayed.update()
