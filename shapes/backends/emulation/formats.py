"""Element formats of quantized tensors: their values and codes, and rounding to them, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

_EXPONENT_BITS = 0x7F800000  # of a float32
_MANTISSA_BITS = 0x007FFFFF


@dataclass(frozen=True)
class Format:
    """A number format: how its codes are read, and its limits.

    A code is a sign (if `signed`), `exponent_bits` and `mantissa_bits`, from the top. Exponent 0 has no leading one,
    so that there are zeros and subnormals, except in a format without a sign. `special` are the codes, without sign,
    that stand for no finite number; `nan_code` is what NaN becomes, None where there is none. `dtype` is torch's, None
    where torch has none that it casts float32 to.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max_finite: float
    smallest_normal: float
    special: Mapping[int, float] = field(default_factory=dict)
    signed: bool = True
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """Of a code: 8, or 4 for E2M1."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def nan_code(self) -> int | None:
        """The code that CUDA's conversions give NaN: the canonical one, with all bits set but the sign."""
        return max((code for code, value in self.special.items() if math.isnan(value)), default=None)


# E4M3 and E5M2: OCP 8-bit Floating Point Specification 1.0, tables 1 and 2. E2M1 and E8M0: OCP Microscaling
# Formats Specification 1.0, sections 5.3.3 and 5.4.1. E8M0 has neither sign nor zero nor subnormals.
FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        Format("e4m3", 4, 3, 448.0, 2.0**-6, {0x7F: math.nan}, dtype=torch.float8_e4m3fn),
        Format(
            "e5m2",
            5,
            2,
            57344.0,
            2.0**-14,
            {0x7C: math.inf, 0x7D: math.nan, 0x7E: math.nan, 0x7F: math.nan},
            dtype=torch.float8_e5m2,
        ),
        Format("e2m1", 2, 1, 6.0, 1.0),
        Format("e8m0", 8, 0, 2.0**127, 2.0**-127, {0xFF: math.nan}, signed=False),
    )
}


# --- codes -----------------------------------------------------------------------------------------------------


def _magnitude(code: int, element: Format) -> float:
    """What a code without sign stands for."""
    if code in element.special:
        return element.special[code]
    exponent, mantissa = divmod(code, 2**element.mantissa_bits)
    first = int(element.signed)  # the exponent of the smallest normal value
    significand = mantissa * 2.0**-element.mantissa_bits + (exponent >= first)
    return significand * element.smallest_normal * 2.0 ** (max(exponent, first) - first)


@cache
def _magnitudes(name: str, device: torch.device) -> Tensor:
    """The values of all codes without sign, in their order: ascending, NaN last."""
    element = FORMATS[name]
    codes = range(2 ** (element.exponent_bits + element.mantissa_bits))
    return torch.tensor([_magnitude(code, element) for code in codes], device=device)


def decode(codes: Tensor, element: Format) -> Tensor:
    """The float32 values of codes (uint8, any shape; 0 to 15 for E2M1)."""
    magnitudes = _magnitudes(element.name, codes.device)
    index = codes.long()
    values = magnitudes[index % len(magnitudes)]
    return torch.where(index >= len(magnitudes), -values, values)


def encode(values: Tensor, element: Format) -> Tensor:
    """The codes (uint8, same shape) of values (float32) that the format has, as `round_to` gives them.

    NaN has the code that CUDA gives it, whatever its sign. Raises ValueError for a value that the format does not have.
    """
    magnitudes = _magnitudes(element.name, values.device)
    ascending = magnitudes.nan_to_num(nan=math.inf, posinf=math.inf)
    nan, negative = values.isnan(), values.signbit()
    index = torch.searchsorted(ascending, values.abs().contiguous()).clamp(max=len(magnitudes) - 1)
    known = (magnitudes[index] == values.abs()) & (element.signed | ~negative)
    if element.nan_code is not None:
        known |= nan
    if not known.all():
        raise ValueError(f"{element.name} has no value {values[~known][0].item()}")
    codes = torch.where(negative, index + len(magnitudes), index)
    return torch.where(nan, element.nan_code or 0, codes).to(torch.uint8)


# --- rounding --------------------------------------------------------------------------------------------------


def round_to(x: Tensor, element: Format) -> Tensor:
    """x (float32, any shape), each value replaced by one that the format has; float32 again.

    To the nearest value. Of two that are equally near, the one whose code is even: its last mantissa bit is 0. What is
    beyond the largest finite value, infinities too, becomes that, as in CUDA's `satfinite` conversions. Below the
    smallest normal value the step stays constant. Zeros keep their sign. NaN stays NaN, but E2M1 has none: there it
    becomes the largest value with a positive sign, as in CUDA.

    E8M0 is a format of scales and rounds up instead, without ties: see `power_of_two_above`.
    """
    if element.mantissa_bits == 0:
        return power_of_two_above(x)
    clamped = _within(x, element)
    step = _step(clamped.abs(), element)
    # Exact but for the rounding to a whole number of steps. torch's float8 casts give the same, but take several times
    # as long there and back for a CPU's small matrices, and what they do out of range depends on torch's version.
    return clamped.div_(step).round_().mul_(step)


def round_stochastically(x: Tensor, element: Format, generator: torch.Generator) -> Tensor:
    """x (float32, any shape), each value replaced by one of its two neighbours in a signed format; float32 again.

    The further one is taken with a probability equal to the distance from the nearer to zero, in steps, rounded down
    to 1/256: Transformer Engine spends 8 random bits on a value (`stochastic_round_fp4_e2m1` in common/util/ptx.cuh,
    which stands in for the instruction `cvt.rs` where a GPU lacks it). The mean is x, but for that rounding. Values of
    the format stay. Saturation, zeros and NaN as in `round_to`.
    """
    clamped = _within(x, element)
    magnitude = clamped.abs()
    raised = random_bytes(x, generator).mul_(2.0**-8).mul_(_step(magnitude, element)).add_(magnitude)
    step = _step(raised, element)  # adding may have led into the next binade, with twice the step
    rounded = raised.div_(step).floor_().mul_(step).clamp_(max=element.max_finite)
    return rounded.copysign_(clamped)


def _within(x: Tensor, element: Format) -> Tensor:
    """A copy of x within the format's range, without NaN for a format that has none."""
    if element.nan_code is None:
        return x.nan_to_num(nan=element.max_finite).clamp_(-element.max_finite, element.max_finite)
    return x.clamp(-element.max_finite, element.max_finite)


def _step(magnitude: Tensor, element: Format) -> Tensor:
    """The distance between the format's values where a magnitude lies."""
    return power_of_two_below(magnitude).clamp_(min=element.smallest_normal).mul_(2.0**-element.mantissa_bits)


def random_bytes(like: Tensor, generator: torch.Generator) -> Tensor:
    """Whole numbers from 0 to 255, all equally likely, as float32 of the shape of `like`."""
    words = torch.empty(-(-like.numel() // 8), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=generator)  # all 64 bits
    return words.view(torch.uint8)[: like.numel()].view(like.shape).float()


def power_of_two_below(x: Tensor) -> Tensor:
    """The largest power of two that is not above x (float32, normal and positive; 0 for zero and subnormals)."""
    return (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def power_of_two_above(x: Tensor) -> Tensor:
    """The smallest E8M0 value that is not below x (float32, not negative), as float32. NaN stays NaN.

    Zero and all below 2**-127 become 2**-127, all above 2**127 becomes 2**127. Transformer Engine rounds the scales
    of MXFP8 up (`float_to_e8m0` in common/util/ptx_arch_spec.cuh) so that no block overflows; the OCP specification's
    own conversion rounds them down and lets the largest elements saturate.
    """
    smallest, largest = FORMATS["e8m0"].smallest_normal, FORMATS["e8m0"].max_finite
    # Adding a mantissa of ones carries into the exponent unless the mantissa is zero.
    above = ((x.clamp(max=largest).view(torch.int32) + _MANTISSA_BITS) & _EXPONENT_BITS).view(torch.float32)
    return torch.where(x <= smallest, smallest, torch.where(x.isnan(), x, above))
