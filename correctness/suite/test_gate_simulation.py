"""What the gate promises, on simulated suites: how often it cries wolf, and that it finds what it says it would.

Each suite has 200 cases with noise of their own about a common one, as fitted to an H200, five runs before, and one
or three runs now. Everything is seeded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from benches.judging.comparison import ALPHA, Comparison, Controls, Decisions, Table, compare, decide, time_floor
from benches.judging.moderation import Array

SUITES, CASES, BATCH = 1000, 200, 20
RUNS_BEFORE = 5
TIME_S = 1e-3
NOISE_DF = 10.0  # how much cases' variances scatter: measured on an H200
CONTROL_NOISE = 0.001  # of a control from run to run, as the GEMMs': measured on an H200
NOISES = (0.002, 0.005, 0.02)
STATED = np.full(BATCH * CASES, 0.001)  # not needed: there are runs to learn from
BOARDS = np.full(BATCH * CASES, 0.0025)


class Setting(NamedTuple):
    """A kind of suite: the noise of a run, and how many runs there are now.

    In logs, `shift` is what another board does to everything and `scatter` to each case; without both it is the same.
    """

    noise: float
    runs_now: int
    shift: float = 0.0
    scatter: float = 0.0

    @property
    def board(self) -> str:
        """Where the runs now are from."""
        return "two" if self.shift or self.scatter else "one"


@dataclass(frozen=True)
class Rates:
    """In how many suites anything was SLOWER, or FASTER; the share of planted slowdowns that were found; of cases SAME.

    `detectable` is what the gate says that it finds, in logs: the mean over suites of the median over cases.
    """

    slower: int
    faster: int
    found: float
    same: float
    detectable: float


def batches(setting: Setting, suites: int, seed: int) -> Iterator[tuple[Comparison, Array]]:
    """Suites, BATCH of them in each comparison, which keeps them apart by their kind; and the floor of each case."""
    draws = np.random.default_rng(seed)
    for _ in range(suites // BATCH):
        rows = BATCH * CASES
        noise = setting.noise * np.sqrt(NOISE_DF / draws.chisquare(NOISE_DF, rows))[:, None]
        boards = np.array(["one"] * RUNS_BEFORE), np.array([setting.board] * setting.runs_now)
        moved = setting.shift + setting.scatter * draws.standard_normal((rows, 1))
        times = [
            np.log(TIME_S) + there + noise * draws.standard_normal((rows, len(board)))
            for there, board in zip((0.0, moved), boards, strict=True)
        ]
        controls = [
            there + CONTROL_NOISE * draws.standard_normal((BATCH, len(board)))
            for there, board in zip((0.0, setting.shift), boards, strict=True)
        ]
        tables = [Table(logs, board) for logs, board in zip((*times, *controls), (*boards, *boards), strict=True)]
        suite = np.arange(rows) // CASES
        keys = [(f"suite {number}", "rested", "100 us and more") for number in suite]
        watched = Controls(tables[2], tables[3], (suite[:, None] == np.arange(BATCH)).astype(float))
        found = compare(tables[0], tables[1], keys, STATED, BOARDS, watched)
        yield found, time_floor(found)


def only(found: Comparison, rows: slice) -> Comparison:
    """The part of a comparison that is one suite."""
    return Comparison(**{name: getattr(found, name)[rows] for name in Comparison.__dataclass_fields__})


def decided(setting: Setting, suites: int, seed: int) -> Iterator[tuple[Comparison, Decisions]]:
    """Each suite and what is said of it."""
    for found, floor in batches(setting, suites, seed):
        for number in range(BATCH):
            rows = slice(number * CASES, (number + 1) * CASES)
            suite = only(found, rows)
            yield suite, decide(suite, floor[rows])


def rates(setting: Setting, suites: int = SUITES, seed: int = 1) -> Rates:
    """Judge suites in which nothing changed; then every other one with a case slower by what the gate says it finds."""
    slower = faster = 0
    found, same, detectable = [], [], []
    for number, (suite, said) in enumerate(decided(setting, suites, seed)):
        slower += bool((said.verdicts == "SLOWER").any())
        faster += bool((said.verdicts == "FASTER").any())
        same.append((said.verdicts == "SAME").mean())
        detectable.append(np.median(said.detectable))
        if number % 2:
            case, planted = number % CASES, suite.difference.copy()
            planted[case] += said.detectable[case]
            found.append(decide(replace(suite, difference=planted), said.floor).verdicts[case] == "SLOWER")
    return Rates(slower, faster, *(float(np.mean(part)) for part in (found, same, detectable)))


@pytest.fixture(scope="module")
def all_rates() -> dict[Setting, Rates]:
    """Every noise, with one run now and with three."""
    return {(setting := Setting(noise, runs_now)): rates(setting) for noise in NOISES for runs_now in (1, 3)}


def test_a_suite_in_which_nothing_changed_raises_an_alarm_once_in_a_hundred_at_most(
    all_rates: dict[Setting, Rates],
) -> None:
    """In every setting, the other direction included; of all of them together with 95 % confidence."""
    for setting, found in all_rates.items():
        assert found.slower <= SUITES / 100, setting
        assert found.faster <= SUITES / 100, setting
    alarms, suites = sum(found.slower for found in all_rates.values()), SUITES * len(all_rates)
    assert stats.binomtest(alarms, suites, alternative="less").proportion_ci(0.95, "exact").high < 0.01
    assert alarms > 0, "alarms are possible, so that their absence means something"


def test_what_is_said_to_be_found_is_found_nineteen_times_in_twenty(all_rates: dict[Setting, Rates]) -> None:
    """One case of each suite, slower by what the gate says of it."""
    for setting, found in all_rates.items():
        assert found.found >= 0.95, setting


def test_what_can_be_found_is_no_empty_promise(all_rates: dict[Setting, Rates]) -> None:
    """Ten times the noise at most, but for the floor; three runs find less than one; quiet suites are the same."""
    for noise in NOISES:
        one, three = (all_rates[Setting(noise, runs_now)] for runs_now in (1, 3))
        assert three.detectable < one.detectable < max(0.01 + 5 * noise, 10 * noise)
    assert all_rates[Setting(0.002, 1)].detectable < 0.02
    assert all_rates[Setting(0.002, 3)].same > 0.9


@pytest.mark.parametrize("scatter", [0.0, 0.005])
def test_another_board_that_the_controls_see_raises_no_alarm(scatter: float) -> None:
    """Three percent slower, all cases alike or each by half a percent more or less: as seen between H200 boards."""
    found = rates(Setting(0.002, 1, shift=0.03, scatter=scatter), suites=200)
    assert found.slower == found.faster == 0
    assert found.found >= 0.95


def test_without_a_correction_for_many_cases_most_suites_would_raise_an_alarm() -> None:
    """The simulation can tell a gate that does not keep its promise."""
    alarms = 0
    for suite, said in decided(Setting(0.005, 1), 100, seed=2):
        p = stats.t.sf(suite.difference / suite.error, suite.df)
        alarms += bool(((p <= 2 * ALPHA) & (suite.difference > np.log1p(0.01))).any())
        assert said.p_slower.min() >= p.min()
    assert alarms > 50
