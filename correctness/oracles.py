"""What quantization must give, in NumPy and ml_dtypes alone: nothing in here is taken from the emulation.

Blocks are given in the tensor's own axes, (0, 0) for one scale for all; scale formats have the names of shapes.recipes.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]

ML_DTYPES: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
FLOAT32_MAX = np.finfo(np.float32).max
ONE = np.float32(1)


def largest_value(element: str) -> np.float32:
    """The largest finite value of a format."""
    return np.float32(ml_dtypes.finfo(ML_DTYPES[element]).max)


def rounded(x: Floats, element: str) -> Floats:
    """Rounding by ml_dtypes, which makes NaN (E4M3) or infinity (E5M2) of what is too large: so clipped before.

    E2M1 has no NaN; ml_dtypes turns it into zero, CUDA's conversions into the largest value.
    """
    limit = largest_value(element)
    values = np.clip(np.nan_to_num(x, nan=0.0), -limit, limit).astype(ML_DTYPES[element]).astype(np.float32)
    return np.where(np.isnan(x), limit if element == "e2m1" else np.float32(np.nan), values)


def codes(values: Floats, element: str) -> NDArray[np.uint8]:
    """The codes of values that a format has; NaN gets the one that CUDA uses, all bits set but the sign."""
    found = values.astype(ML_DTYPES[element]).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0xFF if element == "e8m0" else 0x7F), found)


def assert_same_bits(actual: Tensor, expected: Floats) -> None:
    """Equal floats, zeros of equal sign; any NaN is as good as another."""
    np.testing.assert_array_equal(actual.numpy(), expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual.numpy())[numbers], np.signbit(expected)[numbers])


# ----------------------------------------------------------------------------------------------------------- scales


def block_maxima(x: Floats, block: tuple[int, int]) -> Floats:
    """The largest magnitude in each block, a partial one at the edge too; NaN does not count."""
    rows, columns = block if block != (0, 0) else x.shape
    by_rows = np.fmax.reduceat(np.abs(np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf)), _starts(x, 0, rows))
    return np.asarray(np.fmax.reduceat(by_rows, _starts(x, 1, columns), axis=1))


def _starts(x: Floats, axis: int, size: int) -> NDArray[np.int64]:
    return np.arange(0, x.shape[axis], size)


def _float32_scales(amax: Floats, limit: np.float32, tensor_amax: np.float32, largest: float) -> tuple[Floats, Floats]:
    scale = limit / amax
    scale = np.where(np.isinf(scale), np.float32(largest), scale)
    scale = np.where((amax == 0) | np.isinf(amax), ONE, scale)
    return scale, ONE / scale


def _power_of_two_scales(
    amax: Floats, limit: np.float32, tensor_amax: np.float32, largest: float
) -> tuple[Floats, Floats]:
    scale, _ = _float32_scales(amax, limit, tensor_amax, largest)
    scale = np.ldexp(ONE, np.frexp(scale)[1] - 1)
    return scale, ONE / scale


def _e8m0_scales(amax: Floats, limit: np.float32, tensor_amax: np.float32, largest: float) -> tuple[Floats, Floats]:
    mantissa, exponent = np.frexp(amax * (ONE / limit))
    exponent = np.where(amax == 0, -127, np.where(np.isinf(amax), 127, exponent - (mantissa == 0.5)))
    inverse = np.ldexp(ONE, np.clip(exponent, -127, 127))
    return ONE / inverse, inverse


def _e4m3_scales(amax: Floats, limit: np.float32, tensor_amax: np.float32, largest: float) -> tuple[Floats, Floats]:
    usable = 0 < tensor_amax < np.inf
    tensor_scale = min(np.float32(448) * limit / tensor_amax, FLOAT32_MAX) if usable else ONE
    inverse = rounded(amax * (tensor_scale * (ONE / limit)), "e4m3")
    return np.minimum(ONE / (inverse * (ONE / tensor_scale)), FLOAT32_MAX), inverse


_SCALES = {
    "float32": _float32_scales,
    "power of two": _power_of_two_scales,
    "e8m0": _e8m0_scales,
    "e4m3 and float32": _e4m3_scales,
}
SCALE_ELEMENTS = {"e8m0": "e8m0", "e4m3 and float32": "e4m3"}


def quantized(
    x: Floats, element: str, block: tuple[int, int], scale_format: str, largest: float = FLOAT32_MAX
) -> tuple[NDArray[np.uint8], NDArray[Any], np.float32]:
    """Codes (the shape of x), inverse scales per block (codes, or float32), and the largest magnitude of all.

    `largest` is what replaces an infinite scale.
    """
    with np.errstate(all="ignore"):
        amax, whole = block_maxima(x, block), block_maxima(x, (0, 0))[0, 0]
        scale, inverse = _SCALES[scale_format](amax, largest_value(element), whole, largest)
        rows, columns = block if block != (0, 0) else x.shape
        spread = scale.repeat(rows, axis=0).repeat(columns, axis=1)[: x.shape[0], : x.shape[1]]
        values = rounded(x * spread, element)
    stored = codes(inverse, SCALE_ELEMENTS[scale_format]) if scale_format in SCALE_ELEMENTS else inverse
    return codes(values, element), stored, whole
