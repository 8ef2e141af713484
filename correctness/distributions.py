"""Distributions of a tensor's elements: how they are drawn, and how their magnitudes are spread."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DECADES = 12.0  # that `log_uniform` spans
OUTLIER = 1000.0  # deviations; activations of language models have features some 100 to 1000 times the others

_erf = np.vectorize(math.erf, otypes=[float])


@dataclass(frozen=True)
class Distribution:
    """Independent elements with random signs, for a size of 1; a tensor's own size multiplies them.

    `below` gives the share of magnitudes that are not above each of its argument (any shape), `draw` an array of
    elements. With an `outlier` one element of a tensor, anywhere in it, has this magnitude instead. `signs` is False
    where all elements are positive.
    """

    below: Callable[[Array], Array]
    draw: Callable[[np.random.Generator, tuple[int, int]], Array]
    outlier: float = 0.0
    signs: bool = True


def _signs(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    return generator.choice([-1.0, 1.0], shape)


def _draw_log_uniform(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    return _signs(generator, shape) * 10.0 ** generator.uniform(-DECADES / 2, DECADES / 2, shape)


def _below_log_uniform(x: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.clip(np.log10(x) / DECADES + 0.5, 0.0, 1.0)


def _draw_outlier(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    x = generator.standard_normal(shape)
    x[generator.integers(shape[0]), generator.integers(shape[1])] = OUTLIER
    return x


def _below_normal(x: Array) -> Array:
    return np.asarray(_erf(x / math.sqrt(2.0)))


def _below_one(x: Array) -> Array:
    return (x >= 1.0).astype(float)


DISTRIBUTIONS: dict[str, Distribution] = {
    "normal": Distribution(_below_normal, lambda generator, shape: generator.standard_normal(shape)),
    "uniform": Distribution(lambda x: np.clip(x, 0.0, 1.0), lambda generator, shape: generator.uniform(-1, 1, shape)),
    "log_uniform": Distribution(_below_log_uniform, _draw_log_uniform),
    "outlier": Distribution(_below_normal, _draw_outlier, outlier=OUTLIER),
    "plus_minus": Distribution(_below_one, _signs),
    "constant": Distribution(_below_one, lambda _, shape: np.ones(shape), signs=False),
    "zeros": Distribution(np.ones_like, lambda _, shape: np.zeros(shape)),
}
