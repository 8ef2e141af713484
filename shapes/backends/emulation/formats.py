"""Element formats of quantized tensors, and rounding to them, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_EXPONENT_BITS = 0x7F800000  # of a float32
_MANTISSA_BITS = 0x007FFFFF


@dataclass(frozen=True)
class Format:
    """A number format: its largest finite value, smallest normal value, bits behind the binary point, torch dtype.

    `dtype` is None where torch has no dtype that it casts float32 to.
    """

    name: str
    max_finite: float
    smallest_normal: float
    mantissa_bits: int
    dtype: torch.dtype | None = None


# E4M3 and E5M2: OCP 8-bit Floating Point Specification 1.0, tables 1 and 2. E2M1 and E8M0: OCP Microscaling
# Formats Specification 1.0, sections 5.3.3 and 5.4.1. E8M0 has neither sign nor zero nor subnormals.
FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        Format("e4m3", 448.0, 2.0**-6, 3, torch.float8_e4m3fn),
        Format("e5m2", 57344.0, 2.0**-14, 2, torch.float8_e5m2),
        Format("e2m1", 6.0, 1.0, 1),
        Format("e8m0", 2.0**127, 2.0**-127, 0),
    )
}


def round_to(x: Tensor, element: Format) -> Tensor:
    """x (float32, any shape), each value replaced by one that the format has; float32 again.

    To the nearest value, ties to even, and everything beyond the largest finite value (infinities too) becomes
    that, as CUDA's `satfinite` conversions do. Below the smallest normal value the step stays constant. NaN stays
    NaN, although E2M1 has none: it is for the caller to see. Zeros keep their sign.

    E8M0 is a format of scales and rounds up instead: see `power_of_two_above`.
    """
    if element.mantissa_bits == 0:
        return power_of_two_above(x)
    clamped = x.clamp(-element.max_finite, element.max_finite)
    step = power_of_two_below(clamped.abs()).clamp_(min=element.smallest_normal).mul_(2.0**-element.mantissa_bits)
    # Exact but for the rounding to a whole number of steps. torch's float8 casts give the same, but take several times
    # as long there and back for a CPU's small matrices, and what they do out of range depends on torch's version.
    return clamped.div_(step).round_().mul_(step)


def power_of_two_below(x: Tensor) -> Tensor:
    """The largest power of two that is not above x (float32, normal and positive; 0 for zero and subnormals)."""
    return (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def power_of_two_above(x: Tensor) -> Tensor:
    """The smallest E8M0 value that is not below x (float32, not negative), as float32. NaN stays NaN.

    Zero and all below 2**-127 become 2**-127, all above 2**127 becomes 2**127. Transformer Engine rounds the scales
    of MXFP8 up (`float_to_e8m0` in common/util/ptx.cuh) so that no block overflows; the OCP specification's own
    conversion rounds them down and lets the largest elements saturate.
    """
    smallest, largest = FORMATS["e8m0"].smallest_normal, FORMATS["e8m0"].max_finite
    # Adding a mantissa of ones carries into the exponent unless the mantissa is zero.
    above = ((x.clamp(max=largest).view(torch.int32) + _MANTISSA_BITS) & _EXPONENT_BITS).view(torch.float32)
    return torch.where(x <= smallest, smallest, torch.where(x.isnan(), x, above))
