"""How much a case's time differs from run to run, learned from its few runs and from all cases of its kind.

    s~^2 = (d0 s0^2 + d s^2) / (d0 + d),   with d0 + d degrees of freedom,

of a case's variance s^2 with d degrees of freedom, where the variances of its kind are s0^2 on average and scatter as
if each had d0 degrees of freedom: the moderated t of G. K. Smyth, "Linear models and empirical Bayes methods for
assessing differential expression", Statistical Applications in Genetics and Molecular Biology 3 (2004), article 3,
sections 3 to 6, as limma computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma, polygamma

Array = NDArray[np.float64]
Key = tuple[str, str, str]  # kind, regime, and which of benches.noise.BANDS the time is in

FEWEST_TO_BORROW = 8  # cases; of fewer, how much their variances scatter cannot be told
CAUTION = 20.0  # standard errors times cases
FEWEST_ALONE = 2  # degrees of freedom with which a case can do without the others
MOST_DF = 1e6  # as good as infinitely many
LEAST_VARIANCE = 1e-10  # of logs: 0.001 %. Runs that agree exactly did so by chance
CLOCK_TICK_S = 32e-9  # an H200's events are told in steps of it

# Where nothing else is known: standard deviations of logs over five or six processes on an H200, rested as
# `nox -s noise` found them (medians 0.05 to 0.08 % from 100 us, 0.3 to 0.6 % from 15 us, 1.5 to 2 % below), rounded
# up; in a layer 0.4 to 1.7 %; back to back layers follow the power limit. Their scatter fitted to 11 degrees.
STATED_DEVIATIONS = {
    ("rested", "100 us and more"): 0.001,
    ("rested", "15 to 100 us"): 0.006,
    ("rested", "below 15 us"): 0.02,
    ("in_layer", "100 us and more"): 0.01,
    ("in_layer", "15 to 100 us"): 0.015,
}
STATED_DEVIATION = 0.02  # of all else on a GPU
STATED_CPU_DEVIATION = 0.05
STATED_DF = 8.0


@dataclass(frozen=True)
class Scatter:
    """Variances of the log times of cases from run to run, and the degrees of freedom of each."""

    keys: Sequence[Key]
    variance: Array
    df: Array


@dataclass(frozen=True)
class Moderated:
    """Each case's moderated variance, its degrees of freedom, and whether its kind's is only stated."""

    variance: Array
    df: Array
    stated: NDArray[np.bool_]


def fit_prior(variance: Array, df: Array) -> tuple[float, float]:
    """s0^2 and d0 of variances with these degrees of freedom (Smyth 2004, section 6.2).

    d0 is infinite where the variances scatter no more than equal ones would; s0^2 is then their mean. The scatter is
    taken to be larger than it looks, by one standard error and more of them the fewer cases there are: a d0 that is too
    large by chance makes tails too thin, and in simulations of 200 cases doubles the false alarms.
    """
    least = max(1e-5 * float(np.median(variance)), LEAST_VARIANCE)
    z = np.log(np.maximum(variance, least)) - digamma(df / 2) + np.log(df / 2)
    scatter = float(z.var(ddof=1))
    fourth = float(((z - z.mean()) ** 4).mean())
    error = np.sqrt(max(fourth - scatter**2, 0.0) / len(z))
    excess = scatter + (1 + CAUTION / len(z)) * error - float(polygamma(1, df / 2).mean())
    if excess <= 0:
        return float(np.average(variance, weights=df)), np.inf
    half = _inverse_trigamma(excess)
    return float(np.exp(z.mean() + digamma(half) - np.log(half))), 2 * half


def _inverse_trigamma(value: float) -> float:
    """Newton's iteration of Smyth 2004, appendix: it converges from below without fail."""
    if value < 1e-6:
        return 1 / value
    half = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(polygamma(1, half))
        step = trigamma * (1 - trigamma / value) / float(polygamma(2, half))
        half += step
        if -step / half < 1e-8:
            break
    return half


def moderate(own: Scatter, others: Scatter | None, stated: Array) -> Moderated:
    """Moderated variances of cases.

    Each is shrunk towards those of its kind, regime and band of times, or, where these are fewer than FEWEST_TO_BORROW,
    towards its regime's and band's. `others` are variances, of a noise file, to learn from too. Where all that is too
    little, a case counts alone if it has the runs, and else the deviation that is `stated` counts.
    """
    variance, df = own.variance.copy(), own.df.copy()
    is_stated = np.zeros(len(df), dtype=bool)
    names = list(dict.fromkeys([*own.keys, *(others.keys if others else ())]))
    codes = _codes(own.keys, names)
    seen = [(codes, own.variance, own.df)]
    if others:
        seen.append((_codes(others.keys, names), others.variance, others.df))
    seen_codes, seen_variance, seen_df = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    for code in np.unique(codes):
        rows = codes == code
        members = _members(names, int(code), seen_codes, seen_df)
        if members is None:
            alone = own.df[rows] >= FEWEST_ALONE
            is_stated[rows] = ~alone
            prior, prior_df = stated[rows] ** 2, np.where(alone, 0.0, STATED_DF)
            pooled_df = np.full(len(prior), MOST_DF)
        else:
            s0_squared, d0 = fit_prior(seen_variance[members], seen_df[members])
            prior, prior_df = np.full(rows.sum(), s0_squared), np.full(rows.sum(), min(d0, MOST_DF))
            pooled_df = np.full(rows.sum(), seen_df[members].sum())  # limma: no more than all of them have
        total = prior_df + own.df[rows]
        variance[rows] = (prior_df * prior + own.df[rows] * own.variance[rows]) / total
        df[rows] = np.minimum(total, pooled_df)
    return Moderated(np.maximum(variance, LEAST_VARIANCE), df, is_stated)


def rounded(variance: Array, seconds: Array) -> Array:
    """Variances of log times that are not less than a time that is told in clock ticks can have.

    Medians of short kernels are often equal to the tick. Taken as they are, a case of no variance among others makes
    its kind look as if nothing could be learned of one from the others.
    """
    return np.maximum(variance, (CLOCK_TICK_S / seconds) ** 2 / 12)


def _codes(keys: Sequence[Key], names: list[Key]) -> NDArray[np.int64]:
    index: dict[Any, int] = {name: number for number, name in enumerate(names)}
    return np.array([index[key] for key in keys], dtype=np.int64)


def _members(names: list[Key], code: int, codes: NDArray[np.int64], df: Array) -> NDArray[np.bool_] | None:
    """Which variances a kind of cases is to be shrunk towards; None where there are too few."""
    for left_out in (0, 1):  # of a key's parts: regimes are not mixed
        alike = [number for number, name in enumerate(names) if name[left_out:] == names[code][left_out:]]
        members = np.isin(codes, alike) & (df > 0)
        if members.sum() >= FEWEST_TO_BORROW:
            return members
    return None


def stated_deviation(key: Key, device: str) -> float:
    """The deviation to assume of a kind of cases of which nothing is known."""
    return STATED_CPU_DEVIATION if device == "cpu" else STATED_DEVIATIONS.get(key[1:], STATED_DEVIATION)
