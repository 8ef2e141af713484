"""The median of rounds and how well it is known, without an assumption about their distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from statistics import NormalDist
from statistics import median as median

LARGE = 500  # from here on the normal approximation gives the same rank or the next wider one


@cache
def interval_ranks(count: int, confidence: float = 0.95) -> tuple[int, int] | None:
    """Zero-based ranks of the two order statistics that enclose the median with at least this confidence.

    The number of samples below the median is binomial(count, 1/2) for any continuous distribution, so the interval
    from the r-th smallest to the r-th largest misses it with probability 2 P(binomial < r) (David and Nagaraja,
    Order Statistics, section 7.1). None where even smallest to largest is not enough (count < 6 for 0.95).
    """
    if count > LARGE:
        rank = int(count / 2 - NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(count) / 2)
    else:
        allowed = Fraction(1 - confidence) / 2 * 2**count
        rank, tail = 0, 1
        while tail <= allowed:
            rank += 1
            tail += math.comb(count, rank)
    return (rank - 1, count - rank) if rank else None


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """The interval that contains the true median with at least this confidence, or None with too few samples."""
    ranks = interval_ranks(len(samples), confidence)
    if ranks is None:
        return None
    ordered = sorted(samples)
    return ordered[ranks[0]], ordered[ranks[1]]


def is_precise(samples: Sequence[float], tolerance: float, confidence: float = 0.95, enough: float = 0.0) -> bool:
    """Whether the median's interval is within +- tolerance (relative) of the median, or +- enough (absolute)."""
    interval = median_interval(samples, confidence)
    if interval is None:
        return False
    middle = median(samples)
    allowed = max(tolerance * middle, enough)
    return middle - interval[0] <= allowed and interval[1] - middle <= allowed
