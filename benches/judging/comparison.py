"""The gate's statistics: what is slower than a baseline, how sure that is, and what could have been seen.

Per case d = log(time now / time before) - the shift that the controls lead to expect. Times are medians over runs of
fresh processes: an odd run cannot move them far. d's variance adds up what is known to move it:

- the case's own differences from run to run, moderated by those of its kind (`moderation`);
- the controls' differences from run to run, times the case's share of what they stand for;
- how far cases follow their controls: a part of the shift;
- the board, where it is another one: boards differ by more than the controls say.

The degrees of freedom of the sum are Satterthwaite's (Biometrics Bulletin 2 (1946), 110-114). SLOWER is one-sided,
with Holm's correction over all judged cases (Scandinavian Journal of Statistics 6 (1979), 65-70), which holds however
the cases depend on each other; FASTER is another such family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from benches.judging.moderation import Array, Key, Moderated, Scatter, moderate, rounded

# One run in a hundred of which nothing has changed may be told apart from its baseline, half of these as slower.
ALPHA = 0.005
CONFIDENCE = 0.95  # of the interval, which decides on SAME
PLANNED_POWER = 0.97  # of the detectable effect, stated as 0.95: deviations are estimates themselves

FLOOR = 0.01
FLOOR_NOISES = 3.0
FLOOR_S = 0.5e-6  # what CUDA's events resolve
WIDEST_SAME = 0.05  # a case so noisy that its floor is above this is not called the same for differing by less
HOST_FLOOR = 0.2  # measured: 12 % (layers) and 43 % (GEMMs) from process to process

# Var(median of n) / Var(one), n from 0, of a normal distribution; from 11 on pi / (2 n), which is no smaller.
MEDIAN_VARIANCE = (np.nan, 1.0, 0.5, 0.4487, 0.2982, 0.2868, 0.2147, 0.2104, 0.1682, 0.1661, 0.1383)

FEWEST_OF_THE_BOARD = 3  # runs, for a board to be compared with itself alone
FEWEST_TO_SCATTER = 4  # cases of a kind, to say how much they differ among themselves
# Of a control from process to process: measured 0.1 % of GEMMs and 0.2 % of the copy, and some percent on CPUs that
# others share. A shift of less than so many deviations is none: in ten unchanged runs on the baseline's board cases did
# not follow their controls' noise, and to take it off made it theirs (+2 % was found in 35 of 39 quantizations of
# 100 us and more instead of 39, +1 % in 134 of 444 GEMMs instead of 326).
CONTROL_DEVIATIONS = {"cuda": 0.001, "cpu": 0.03}
CONTROL_NOISES = 3.0
CONTROL_DF = 4.0  # what is stated counts as much as so many runs

# How well controls tell what cases do, from the same cases on three H200 boards whose controls were up to 2.5 % apart.
# Rested cases of two boards were off by 0.2 to 0.35 % (root mean square) where controls agreed within 0.4 %, and by 0.4
# to 0.7 %, at most 1.9 %, where they shifted by 1.3 to 1.8 %: 0.25 % for each board, and 0.3 of the shift. The controls
# are rested, but what runs back to back is at the power limit, where boards differ by more, and otherwise: layers were
# off by 1.7 %, at most 3.7 %. Three other boards, 1.1 to 1.9 % apart: after correction their cases differed by 0.20,
# 0.47 and 0.83 % rested (root mean squares, by bands of the time per launch), by 0.6 and 1.0 % in a layer, by
# 0.9 % sustained.
FOLLOWING = {"rested": 0.3, "in_layer": 0.3, "sustained": 0.5}
BOARD_DEVIATIONS = {
    ("rested", "100 us and more"): 0.0025,
    ("rested", "15 to 100 us"): 0.005,
    ("rested", "below 15 us"): 0.01,
    ("in_layer", "100 us and more"): 0.006,
}
BOARD_DEVIATION = 0.012  # of all else
NO_CONTROL_DEVIATION = 0.025  # of boards, for what no control stands for
HOST_BOARD_DEVIATION = 0.25  # another board is in another host
STATED_DF = 10.0  # of these two: three pairs of boards are few, and a pair has many cases


@dataclass(frozen=True)
class Table:
    """Logs of seconds: a row for each case or control, a column for each run, NaN where there is none; and boards."""

    logs: Array
    boards: NDArray[np.str_]


@dataclass(frozen=True)
class Centre:
    """Middle of each row's runs: the mean over boards of the median of a board's runs.

    `factor` is its variance over that of one run; `shares` has each board's weight in each row.
    """

    log_s: Array
    factor: Array
    shares: dict[str, Array]


@dataclass(frozen=True)
class Controls:
    """Controls before and now, a row each, and how much of each case each of them stands for: (cases, controls)."""

    before: Table
    now: Table
    weights: Array
    device: str = "cuda"


@dataclass(frozen=True)
class Expected:
    """The shift that controls lead to expect of each case, in logs, and the two parts of its variance.

    `control` comes from the controls' own differences from run to run, with `control_df`; `following` from how well
    cases follow them. `uncontrolled` is the share of a case for which there is no control.
    """

    shift: Array
    control: Array
    control_df: Array
    following: Array
    uncontrolled: Array


@dataclass(frozen=True)
class Comparison:
    """Cases now against before, in logs: corrected difference, standard error, degrees of freedom, and noise.

    `noise` is the standard deviation of one run; `stated` says where it is not from runs of these cases.
    """

    before: Array
    now: Array
    shift: Array
    difference: Array
    error: Array
    df: Array
    noise: Array
    stated: NDArray[np.bool_]


@dataclass(frozen=True)
class Decisions:
    """What can be said of each case. Differences in logs; p values are corrected for the number of cases.

    `low` and `high` are the ends of the difference's interval; `detectable` is the smallest slowdown that is found
    95 times in 100; `verdicts` are of SLOWER, FASTER, SAME, UNRESOLVED.
    """

    floor: Array
    low: Array
    high: Array
    p_slower: Array
    p_faster: Array
    detectable: Array
    verdicts: NDArray[np.str_]


def middle(logs: Array) -> tuple[Array, NDArray[np.int64]]:
    """Median of each row's numbers, and how many there are. NaN where there is none."""
    ordered = np.sort(logs, axis=1)  # NaN come last
    count = np.isfinite(ordered).sum(axis=1)
    ranks = np.stack([np.maximum(count - 1, 0) // 2, np.minimum(count // 2, max(logs.shape[1] - 1, 0))], axis=1)
    return np.take_along_axis(ordered, ranks, axis=1).mean(axis=1), count


def median_variance(count: NDArray[np.int64]) -> Array:
    """Variance of the median of so many normal numbers over that of one."""
    largest = len(MEDIAN_VARIANCE) - 1
    return np.where(
        count > largest, np.pi / 2 / np.maximum(count, 1), np.array(MEDIAN_VARIANCE)[np.minimum(count, largest)]
    )


def centre(table: Table) -> Centre:
    """The middle of each row, over boards and runs."""
    boards = [str(board) for board in np.unique(table.boards)]
    found = [middle(table.logs[:, table.boards == board]) for board in boards]
    counts = np.stack([count for _, count in found])
    shares = (counts > 0) / np.maximum((counts > 0).sum(axis=0), 1)
    parts = np.where(counts > 0, shares * np.stack([logs for logs, _ in found]), 0.0).sum(axis=0)
    factor = np.where(counts > 0, shares**2 * median_variance(counts), 0.0).sum(axis=0)
    nothing = ~(counts > 0).any(axis=0)
    return Centre(np.where(nothing, np.nan, parts), factor, dict(zip(boards, shares, strict=True)))


def within_boards(*tables: Table) -> tuple[Array, Array]:
    """Variance of each row's runs about the mean of their board and table, and its degrees of freedom."""
    squares, df = np.zeros(len(tables[0].logs)), np.zeros(len(tables[0].logs))
    for table in tables:
        for board in np.unique(table.boards):
            logs = table.logs[:, table.boards == board]
            there = np.isfinite(logs)
            count = there.sum(axis=1)
            mean = np.where(there, logs, 0.0).sum(axis=1) / np.maximum(count, 1)
            squares += np.where(there, (logs - mean[:, None]) ** 2, 0.0).sum(axis=1)
            df += np.maximum(count - 1, 0)
    return squares / np.maximum(df, 1), df


def of_the_board(before: Table, now: Table) -> Table:
    """`before`, where all runs now are of one board, without other boards' runs of cases that it has often enough."""
    if len(set(now.boards)) > 1:
        return before
    own = before.boards == now.boards[0]
    enough = np.isfinite(before.logs[:, own]).sum(axis=1) >= FEWEST_OF_THE_BOARD
    return Table(np.where(enough[:, None] & ~own, np.nan, before.logs), before.boards)


def levels(controls: Table, there: NDArray[np.bool_]) -> tuple[Array, Array]:
    """The middle of each control over the runs that a case has, and its variance over that of one run.

    `there` says which these are: (cases, runs). Both results are (cases, controls), NaN where one of the case's boards
    lacks the control.
    """
    patterns, which = np.unique(there, axis=0, return_inverse=True)  # cases of a run mostly have the same ones
    found = [_level(controls, pattern) for pattern in patterns]
    log_s, factor = (np.stack(part)[which.reshape(-1)] for part in zip(*found, strict=True))
    return log_s, factor


def _level(controls: Table, chosen: NDArray[np.bool_]) -> tuple[Array, Array]:
    """The `centre` over these runs; what one of their boards lacks has none."""
    if not chosen.any():
        nothing = np.full(len(controls.logs), np.nan)
        return nothing, nothing
    found = centre(Table(controls.logs[:, chosen], controls.boards[chosen]))
    everywhere = np.all([share > 0 for share in found.shares.values()], axis=0)
    return np.where(everywhere, found.log_s, np.nan), np.where(everywhere, found.factor, np.nan)


def expected(before: Table, now: Table, controls: Controls, following: Array) -> Expected:
    """What controls lead to expect of cases, from the runs that a case has: others may be of a faster or slower day.

    A control that lacks on either side stands for nothing, and one that shifted by no more than it does from run to
    run did not shift.
    """
    variance, df = within_boards(controls.before, controls.now)
    stated = CONTROL_DEVIATIONS[controls.device] ** 2
    moderated = (CONTROL_DF * stated + df * variance) / (CONTROL_DF + df)
    was, found = (
        levels(of_controls, np.isfinite(of_cases.logs))
        for of_controls, of_cases in ((controls.before, before), (controls.now, now))
    )
    shift, factor = found[0] - was[0], found[1] + was[1]
    known = np.isfinite(shift) & np.isfinite(factor)
    weights = np.where(known, controls.weights, 0.0)
    variances = np.where(known, factor, 0.0) * moderated
    shifted = known & (np.abs(shift) > CONTROL_NOISES * np.sqrt(variances))
    parts = weights * np.where(shifted, shift, 0.0)
    variances = weights**2 * variances
    control = variances.sum(axis=1)
    return Expected(
        shift=parts.sum(axis=1),
        control=control,
        control_df=_satterthwaite(variances.T, np.broadcast_to(CONTROL_DF + df, variances.shape).T),
        following=(following * np.abs(parts).sum(axis=1)) ** 2,
        uncontrolled=1 - weights.sum(axis=1),
    )


def unexpected(cases: int) -> Expected:
    """No control stands for these cases, and none is needed."""
    nothing = np.zeros(cases)
    return Expected(nothing, nothing, nothing + 1.0, nothing, nothing)


def _satterthwaite(variances: Array, df: Array) -> Array:
    """Degrees of freedom of the sum over the first axis."""
    whole = variances.sum(axis=0)
    parts = (variances**2 / df).sum(axis=0)
    return np.where(parts > 0, whole**2 / np.where(parts > 0, parts, 1.0), df.max(axis=0))


def _boards_apart(before: Centre, now: Centre) -> Array:
    """By how many variances of a board two centres differ: 0 for the same boards, 2 for one board and another."""
    nothing = np.zeros(len(before.log_s))
    boards = {*before.shares, *now.shares}
    return sum(((now.shares.get(one, nothing) - before.shares.get(one, nothing)) ** 2 for one in boards), nothing)


def between_boards(before: Table, noise: Array, stated: Array, kinds: NDArray[np.str_]) -> Array:
    """Variance of a board's part in each case: as stated, and as those cases show that `before` has of several boards.

    `before` is corrected for its controls, `noise` the variance of one run, which is in the boards' middles too, and
    `kinds` are regimes and bands of times. The stated variance counts as much as one board.
    """
    parts = [middle(before.logs[:, before.boards == board]) for board in np.unique(before.boards)]
    there = np.stack([count > 0 for _, count in parts])
    middles = np.where(there, np.stack([logs for logs, _ in parts]), 0.0)
    of_runs = np.where(there, np.stack([median_variance(count) for _, count in parts]), 0.0)
    count = np.maximum(there.sum(axis=0), 1)
    squares = np.where(there, (middles - middles.sum(axis=0) / count) ** 2, 0.0).sum(axis=0)
    df = count - 1.0
    beyond = squares - df * noise * of_runs.sum(axis=0) / count
    variance = stated**2
    for kind in np.unique(kinds):
        rows = kinds == kind
        if known := float(df[rows].sum()):
            found = max(float(beyond[rows].sum()) / known, 0.0)
            boards = float(df[rows & (df > 0)].mean())  # beyond the first, that a case has: cases vary together
            variance = np.where(rows, (variance + boards * found) / (1 + boards), variance)
    return variance


def compare(
    before: Table,
    now: Table,
    keys: Sequence[Key],
    stated: Array,
    apart: Array,
    controls: Controls | None = None,
    others: Scatter | None = None,
) -> Comparison:
    """Compare cases, a row each in both tables. `stated` are deviations to assume where there is too little to learn.

    `apart` are deviations between boards; `others` are variances to learn from, as of a noise file.
    """
    bands = np.array(["/".join(key[1:]) for key in keys])
    own = of_the_board(before, now)
    was, found = centre(own), centre(now)
    following = np.array([FOLLOWING.get(key[1], 0.5) for key in keys])
    shift = expected(own, now, controls, following) if controls else unexpected(len(keys))
    difference = found.log_s - was.log_s - shift.shift
    factor = was.factor + found.factor
    variance, df = within_boards(before, now)
    moderated = moderate(Scatter(keys, rounded(variance, np.exp(was.log_s)), df), others, stated)
    moderated = _at_least_as_they_differ(moderated, keys, difference, factor)
    of_boards = between_boards(_corrected(before, controls), moderated.variance, apart, bands)
    of_boards += (NO_CONTROL_DEVIATION * shift.uncontrolled) ** 2
    variances = np.stack(
        [moderated.variance * factor, shift.control, shift.following, of_boards * _boards_apart(was, found)]
    )
    all_df = np.stack([moderated.df, shift.control_df, np.full(len(keys), STATED_DF), np.full(len(keys), STATED_DF)])
    return Comparison(
        before=was.log_s,
        now=found.log_s,
        shift=shift.shift,
        difference=difference,
        error=np.sqrt(variances.sum(axis=0)),
        df=_satterthwaite(variances, all_df),
        noise=np.sqrt(moderated.variance),
        stated=moderated.stated,
    )


def _corrected(before: Table, controls: Controls | None) -> Table:
    """Logs less what the controls of their board are: only differences between boards mean anything."""
    if controls is None:
        return before
    of_boards = np.unique(before.boards)[:, None] == before.boards  # (boards, runs)
    there = np.isfinite(before.logs) & np.asarray(of_boards)[:, None]
    found = np.stack([levels(controls.before, runs)[0] for runs in there])  # (boards, cases, controls)
    lacking = (there.any(axis=2)[:, :, None] & ~np.isfinite(found)).any(axis=0)  # by one board: corrects none
    logs = before.logs.copy()
    for here, level in zip(of_boards, found, strict=True):
        usable = np.isfinite(level) & ~lacking
        logs[:, here] -= (controls.weights * np.where(usable, level, 0.0)).sum(axis=1)[:, None]
    return Table(logs, before.boards)


def _at_least_as_they_differ(moderated: Moderated, keys: Sequence[Key], difference: Array, factor: Array) -> Moderated:
    """Where noise is only stated, it is not less than what most cases of a kind show: differences about their median.

    By the median absolute deviation, for cases of which most have not changed. This GPU may be a noisier one.
    """
    variance = moderated.variance.copy()
    for key in {key for key, stated in zip(keys, moderated.stated, strict=True) if stated}:
        rows = np.array([one == key for one in keys]) & moderated.stated
        scaled = difference[rows] / np.sqrt(factor[rows])
        if rows.sum() >= FEWEST_TO_SCATTER:
            scatter = 1.4826 * np.median(np.abs(scaled - np.median(scaled)))
            variance[rows] = np.maximum(variance[rows], scatter**2)
    return Moderated(variance, moderated.df, moderated.stated)


def holm(p: Array) -> Array:
    """p values corrected so that the chance of any false one among them stays below what is asked of each."""
    order = np.argsort(p)
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order]), 1.0)
    return corrected


def time_floor(found: Comparison) -> Array:
    """What a difference has to exceed, in logs: 1 %, three times the noise, or what the clock resolves."""
    clock = np.log1p(FLOOR_S / np.exp(found.before))
    return np.maximum(np.maximum(np.log1p(FLOOR), FLOOR_NOISES * found.noise), clock)


def host_floor(found: Comparison) -> Array:
    """The same for host times."""
    return np.maximum(np.log1p(HOST_FLOOR), FLOOR_NOISES * found.noise)


def decide(found: Comparison, floor: Array) -> Decisions:
    """SLOWER and FASTER: beyond the floor, and significant. SAME: the interval lies within it. Else UNRESOLVED."""
    margin = np.minimum(floor, np.log1p(WIDEST_SAME))
    t = found.difference / found.error
    p_slower, p_faster = holm(stdtr(found.df, -t)), holm(stdtr(found.df, t))
    half = stdtrit(found.df, (1 + CONFIDENCE) / 2) * found.error
    low, high = found.difference - half, found.difference + half
    threshold = stdtrit(found.df, 1 - ALPHA / max(len(t), 1)) * found.error
    return Decisions(
        floor=floor,
        low=low,
        high=high,
        p_slower=p_slower,
        p_faster=p_faster,
        # Beyond both thresholds with the power asked for; Holm's first is its strictest.
        detectable=np.maximum(floor, threshold) + stdtrit(found.df, PLANNED_POWER) * found.error,
        verdicts=np.select(
            [
                (p_slower <= ALPHA) & (found.difference > floor),
                (p_faster <= ALPHA) & (found.difference < -floor),
                (low > -margin) & (high < margin),
            ],
            ["SLOWER", "FASTER", "SAME"],
            "UNRESOLVED",
        ),
    )
