"""Tensors on which quantizers are compared bit by bit: the usual ones, and the extremes of a type."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from correctness.distributions import DISTRIBUTIONS, Array

_Draw = Callable[[np.random.Generator, tuple[int, int]], Array]


def _of_any_size(name: str) -> _Draw:
    """A distribution, multiplied by a factor with any mantissa between 2**-30 and 2**30."""
    return lambda generator, shape: DISTRIBUTIONS[name].draw(generator, shape) * 2.0 ** generator.uniform(-30, 30)


def _regions(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Normal elements whose size differs from one 16 x 16 region to the next; a quarter of all but the first is 0."""
    regions = (-(-shape[0] // 16), -(-shape[1] // 16))
    present = generator.uniform(size=regions) > 0.25
    present[0, 0] = True
    sizes = 2.0 ** generator.uniform(-12, 12, regions) * present
    spread = sizes.repeat(16, axis=0).repeat(16, axis=1)[: shape[0], : shape[1]]
    return np.asarray(generator.standard_normal(shape) * spread)


def _eighths(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Multiples of 1/8 up to 6, the largest included: with a power of two as scale many lie halfway between values."""
    x = generator.integers(-48, 49, shape) / 8
    x[0, 0] = 6.0
    return np.asarray(x)


def _denormal(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Below the smallest normal value of bfloat16 and float32, 2**-126."""
    return generator.uniform(-1, 1, shape) * 2.0**-126


def _largest(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    """The largest finite bfloat16, of either sign; in float16 infinity."""
    return generator.choice([-1.0, 1.0], shape) * torch.finfo(torch.bfloat16).max


def _not_finite(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Normal elements, one in 200 of them NaN and one in 400 infinite."""
    x = generator.standard_normal(shape)
    chance = generator.uniform(size=shape)
    x[chance < 0.005] = np.nan
    x[chance > 0.9975] = np.inf
    return x


FINITE: dict[str, _Draw] = {
    **{name: _of_any_size(name) for name in ("normal", "log_uniform", "outlier", "constant", "zeros")},
    "regions": _regions,
    "eighths": _eighths,
    "denormal": _denormal,
    "largest": _largest,
}
KINDS = {**FINITE, "not_finite": _not_finite}


def tensor(kind: str, shape: tuple[int, int], seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor of one of KINDS on the CPU; equal arguments give equal tensors."""
    return torch.from_numpy(KINDS[kind](np.random.default_rng(seed), shape)).to(dtype)
