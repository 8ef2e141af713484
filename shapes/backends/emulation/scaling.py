"""Scales of a quantized operand, per tensor or per block, and quantization with them, as Transformer Engine does it.

Everything here is for matrices, since that is what enters a GEMM. A quantized value times its inverse scale is the
value that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shapes.backends.emulation.formats import FORMATS, Format, power_of_two_below, round_to
from shapes.recipes import TENSOR, Operand, Recipe

_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix.

    values                (rows, columns), float32, each one that the element format has
    inverse_scale         one per block, (ceil(rows / block rows), ceil(columns / block columns)); shape () for TENSOR
    block                 (rows, columns) that share a scale, in the matrix's own axes
    tensor_inverse_scale  shape (), a second factor for the whole matrix; 1 unless scales are themselves scaled
    """

    values: Tensor
    inverse_scale: Tensor
    block: tuple[int, int]
    tensor_inverse_scale: Tensor

    def factors(self) -> tuple[Tensor, Tensor]:
        """The matrix with its block scales applied, and the one factor that remains, shape ().

        The matrix is exact in float32: an element has at most 4 significant bits and a block's scale at most 4. The
        factor is not applied to it, since a GEMM applies it once to the accumulated product.
        """
        if self.block == TENSOR:
            return self.values, self.inverse_scale
        return _times_per_block(self.values, self.inverse_scale, self.block), self.tensor_inverse_scale

    def dequantize(self) -> Tensor:
        """The values that the matrix stands for, (rows, columns), float32."""
        matrix, factor = self.factors()
        return matrix * factor


@dataclass(frozen=True)
class _Scales:
    """What quantization multiplies with, and what undoes it; see Quantized for shapes."""

    scale: Tensor
    inverse: Tensor
    tensor_inverse: Tensor


def _float32_scale(amax: Tensor, element: Format, otherwise: Tensor | float = 1.0) -> Tensor:
    """max_finite / amax, and `otherwise` where amax is 0, infinite or NaN (compute_scale_from_amax in TE)."""
    scale = (element.max_finite / amax).clamp(max=_FLOAT32_MAX)
    return torch.where((amax > 0) & amax.isfinite(), scale, otherwise)


def _float32_scales(amax: Tensor, x_amax: Callable[[], Tensor], element: Format) -> _Scales:
    scale = _float32_scale(amax, element)
    return _Scales(scale, 1.0 / scale, torch.ones_like(scale))


def _power_of_two_scales(amax: Tensor, x_amax: Callable[[], Tensor], element: Format) -> _Scales:
    """Rounded down, so that nothing overflows; the inverse is exact (recipe/recipe_common.cuh in TE)."""
    scale = power_of_two_below(_float32_scale(amax, element))
    return _Scales(scale, 1.0 / scale, scale.new_ones(()))


def _e8m0_scales(amax: Tensor, x_amax: Callable[[], Tensor], element: Format) -> _Scales:
    """The inverse scale amax / max_finite, rounded up to a power of two. A zero block has the smallest, 2**-127."""
    inverse = round_to(amax * (1.0 / element.max_finite), FORMATS["e8m0"])
    return _Scales(1.0 / inverse, inverse, inverse.new_ones(()))


def _e4m3_and_float32_scales(amax: Tensor, x_amax: Callable[[], Tensor], element: Format) -> _Scales:
    """Inverse scales amax / max_finite of the blocks, stored in E4M3 relative to one float32 factor.

    The factor is such that the largest block's inverse scale becomes E4M3's largest value. Order of operations:
    common/cast/nvfp4/core_nvfp4.cuh in TE. A zero block's inverse scale is 0.
    """
    scale_format = FORMATS["e4m3"]
    largest = x_amax()
    tensor_scale = (scale_format.max_finite * element.max_finite / largest).clamp(max=_FLOAT32_MAX)
    tensor_scale = torch.where((largest > 0) & largest.isfinite(), tensor_scale, 1.0)
    inverse = round_to(amax * (tensor_scale * (1.0 / element.max_finite)), scale_format)
    tensor_inverse = 1.0 / tensor_scale
    scale = (1.0 / (inverse * tensor_inverse)).clamp(max=_FLOAT32_MAX)
    return _Scales(scale, inverse, tensor_inverse)


_SCALES: dict[str, Callable[[Tensor, Callable[[], Tensor], Format], _Scales]] = {
    "float32": _float32_scales,
    "power of two": _power_of_two_scales,
    "e8m0": _e8m0_scales,
    "e4m3 and float32": _e4m3_and_float32_scales,
}


def quantize(x: Tensor, operand: Operand, dim: int, scale_format: str, scale: Tensor | None = None) -> Quantized:
    """x (rows, columns) as it enters a GEMM that contracts dimension `dim` (0 or 1) of it.

    `scale_format` is the recipe's. The scale comes from x itself, unless one is given (shape (), for TENSOR only).
    Blocks at the edge are smaller where a size is no multiple of the block. Zeros stay zeros.

    Raises ValueError for an x that is no matrix and for an operand without a scale.
    """
    if x.dim() != 2:
        raise ValueError(f"only a matrix can be quantized, got shape {tuple(x.shape)}")
    if operand.block is None:
        raise ValueError(f"{operand} has no scale: nothing to quantize")
    x = x.float()
    element = FORMATS[operand.element]
    block = operand.block if dim == 1 else operand.block[::-1]
    if block == TENSOR:
        scales = _given(scale) if scale is not None else _SCALES[scale_format](_amax(x), lambda: _amax(x), element)
        scaled = x * scales.scale
    else:
        scales = _SCALES[scale_format](_block_amax(x, block), lambda: _amax(x), element)
        scaled = _times_per_block(x, scales.scale, block)
    return Quantized(round_to(scaled, element), scales.inverse, block, scales.tensor_inverse)


def _given(scale: Tensor) -> _Scales:
    return _Scales(scale, 1.0 / scale, torch.ones_like(scale))


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude in x, shape ()."""
    return x.abs().amax()


def _block_view(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x as (block row, row within, block column, column within), zeros filling up the blocks at the edge."""
    rows, columns = block
    missing_rows, missing_columns = -x.shape[0] % rows, -x.shape[1] % columns
    if missing_rows or missing_columns:
        x = torch.nn.functional.pad(x, (0, missing_columns, 0, missing_rows))
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude in each block, (block rows, block columns)."""
    return _block_view(x.abs(), block).amax(dim=(1, 3))


def _times_per_block(x: Tensor, factor: Tensor, block: tuple[int, int]) -> Tensor:
    """x with each block multiplied by its factor, same shape."""
    blocks = _block_view(x, block) * factor[:, None, :, None]
    padded = blocks.reshape(blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
    return padded[: x.shape[0], : x.shape[1]]


class DelayedScale:
    """A scale that follows the largest magnitudes of earlier steps, for fp8_delayed_scaling.

    It is 1 until the first `update`, and from then on max_finite over the largest magnitude of the last `history`
    steps. A step whose magnitudes are all 0 or not finite leaves it as it is when nothing else is in the history.
    Source: common/recipe/delayed_scaling.cu in TE. It is state of a run, not of a model: no state_dict has it.

    scale         shape (), float32
    amax_history  (history,), float32; entry 0 is the step under way, entry 1 the oldest, the last entry the newest
    """

    def __init__(self, element: Format, history: int, device: torch.device | str) -> None:
        self.element = element
        self.scale = torch.ones((), device=device)
        self.amax_history = torch.zeros(history, device=device)

    def record(self, x: Tensor) -> None:
        """Take note of the largest magnitude of x."""
        self.amax_history[0] = torch.fmax(self.amax_history[0], _amax(x).float())

    def update(self) -> None:
        """End the step: the scale for the next one, and a history with room for it in place of the oldest entry."""
        self.scale = _float32_scale(self.amax_history.amax(), self.element, otherwise=self.scale)
        self.amax_history = torch.roll(self.amax_history, -1)
        self.amax_history[0] = 0.0


class Quantizer:
    """Quantizes one operand of a linear (activation, weight or gradient), once per GEMM that it enters."""

    def __init__(self, operand: Operand, recipe: Recipe, device: torch.device | str) -> None:
        if recipe.scale is None:
            raise ValueError(f"{recipe.id} does not quantize")
        self.operand = operand
        self.scale_format = recipe.scale
        element = FORMATS[operand.element]
        self.delayed = DelayedScale(element, recipe.history, device) if recipe.history else None

    def __call__(self, x: Tensor, dims: Sequence[int] = (0, 1)) -> dict[int, Quantized]:
        """x (rows, columns) quantized for the GEMMs that contract the dimensions `dims` of it, by dimension.

        With one scale, or square blocks, both are the same matrix and it is made only once.
        """
        scale = None
        if self.delayed is not None:
            scale = self.delayed.scale
            self.delayed.record(x)
        block = self.operand.block
        if block is not None and block[0] == block[1]:
            shared = quantize(x, self.operand, 1, self.scale_format, scale)
            return dict.fromkeys(dims, shared)
        return {dim: quantize(x, self.operand, dim, self.scale_format, scale) for dim in dims}

    def end_step(self) -> None:
        """Let a delayed scale take in what was recorded; nothing to do for others."""
        if self.delayed is not None:
            self.delayed.update()
