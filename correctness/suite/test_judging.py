"""Each verdict for what it says, statistics against what they are derived from, and what is compared exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benches.harness import controls
from benches.judging.baselines import pool, read, together
from benches.judging.comparison import (
    MEDIAN_VARIANCE,
    Comparison,
    Controls,
    Table,
    between_boards,
    centre,
    compare,
    decide,
    holm,
    host_floor,
    levels,
    median_variance,
    middle,
    of_the_board,
    time_floor,
    within_boards,
)
from benches.judging.judge import LAUNCHES, VERDICTS, Finding, Outcome, judge, scatter
from benches.judging.moderation import Scatter, fit_prior, moderate, rounded, stated_deviation
from benches.report.verdicts import render
from correctness.suite.fake_results import CASES, CONTROLS, TIMES, evidence, kernel, noisy, results, runs

FIRST, SECOND, THIRD = CASES[:3]
NEW = CASES[20]
Spoil = Callable[[Any], Any]


def gate(now: Any, baseline: Any = None, **more: Any) -> Outcome:
    """The outcome of a file, or of several, against a baseline of five runs."""
    files = now if isinstance(now, list) else [now]
    before = read(baseline or pool(runs(5)), "baseline")
    return judge(before, together([read(file, "now") for file in files]), **more)


def of(outcome: Outcome, case: str) -> Finding:
    """What is said of a case."""
    (found,) = [finding for finding in outcome.findings if finding.case == case]
    return found


def slowed(factor: float, case: str = FIRST, seed: int = 9, **more: Any) -> Any:
    """A run in which a case takes `factor` times as long."""
    times = noisy(TIMES, 0.001, seed)
    return results(times | {case: times[case] * factor}, **more)


def changed(spoil: Spoil, case: str = FIRST) -> Any:
    """A run as fast as ever, with something else changed: `spoil` gets the case's benchmark and its evidence."""
    file = slowed(1.0)
    (found,) = [one for one in file["benchmarks"] if one["extra_info"]["case"] == case]
    spoil(SimpleCase(found, file["suite"]["evidence"]))
    return file


class SimpleCase:
    """A case of a file, to be changed."""

    def __init__(self, found: Any, proofs: Any) -> None:
        self.extra, self._proofs = found["extra_info"], proofs

    def ran(self, proof: Any) -> None:
        """Replace the case's evidence, which other cases share."""
        self._proofs[self.extra["evidence"]] = proof


class TestTimes:
    """SLOWER, FASTER, SAME and UNRESOLVED."""

    def test_nothing_changed_is_the_same(self) -> None:
        """All of it, with the exit code of success."""
        outcome = gate(slowed(1.0))
        assert outcome.counts == dict.fromkeys(VERDICTS, 0) | {"SAME": len(TIMES)}
        assert outcome.exit_code(strict=True) == 0

    def test_two_percent_more_is_slower(self) -> None:
        """With the interval around it, and nothing else is."""
        outcome = gate(slowed(1.02))
        found = of(outcome, FIRST)
        assert found.verdict == "SLOWER"
        assert found.time
        assert found.time.interval[0] < 1.02 < found.time.interval[1]
        assert found.time.ratio == pytest.approx(1.02, abs=0.003)
        assert outcome.counts["SLOWER"] == 1
        assert outcome.exit_code() == 1

    def test_two_percent_less_is_faster(self) -> None:
        """Which fails nothing."""
        outcome = gate(slowed(0.98))
        assert of(outcome, FIRST).verdict == "FASTER"
        assert outcome.exit_code(strict=True) == 0

    def test_what_is_certain_but_below_the_floor_is_the_same(self) -> None:
        """Half a percent is found, and is nobody's concern."""
        files = [slowed(1.005, seed=seed) for seed in range(9)]
        found = of(gate(files), FIRST)
        assert found.verdict == "SAME"
        assert found.time
        assert found.time.interval[0] > 1.001
        assert found.time.floor == pytest.approx(0.01)

    def test_a_noisy_case_is_unresolved(self) -> None:
        """Three percent more says nothing where runs differ by two."""
        baseline = pool(runs(5, noise=0.02))
        outcome = gate(slowed(1.03), baseline)
        assert of(outcome, FIRST).verdict == "UNRESOLVED"
        assert outcome.exit_code() == 0
        assert outcome.exit_code(strict=True) == 1

    def test_a_short_case_has_half_a_microsecond(self) -> None:
        """10 us may take 5 % longer."""
        times = dict.fromkeys(TIMES, 1e-05)
        found = of(gate(results(times | {FIRST: 10.4e-6}), pool(runs(5, times))), FIRST)
        assert found.verdict in ("SAME", "UNRESOLVED")
        assert found.time
        assert found.time.floor == pytest.approx(0.05, abs=0.002)
        assert of(gate(results(times | {FIRST: 10.7e-6}), pool(runs(5, times))), FIRST).verdict == "SLOWER"

    def test_one_odd_run_of_three_moves_nothing(self) -> None:
        """The middle one counts; and runs that contradict each other settle nothing."""
        odd, even = [slowed(1.05, seed=seed) for seed in (1, 2)], [slowed(1.0, seed=seed) for seed in (3, 4)]
        found = of(gate([*odd[:1], *even]), FIRST).time
        assert found
        assert found.ratio == pytest.approx(1.0, abs=0.003)
        assert of(gate([*odd[:1], *even]), FIRST).verdict in ("SAME", "UNRESOLVED")
        assert of(gate([*odd, *even[:1]]), FIRST).verdict == "UNRESOLVED"
        assert of(gate([*odd, slowed(1.05, seed=5)]), FIRST).verdict == "SLOWER"

    def test_everything_slower_is_found_as_well(self) -> None:
        """There is no normal to which the suite is scaled."""
        outcome = gate(results({case: time_s * 1.03 for case, time_s in TIMES.items()}))
        assert outcome.counts["SLOWER"] == len(TIMES)

    def test_what_can_be_found_is_said(self) -> None:
        """Beyond the floor, by what two thresholds and the noise need; a noisier baseline finds less."""
        quiet, loud = (of(gate(slowed(1.0), pool(runs(5, noise=noise))), FIRST).time for noise in (0.001, 0.01))
        assert quiet
        assert loud
        assert 0.01 < quiet.detectable < 0.02 < loud.detectable < 0.5


class TestBaselineOfOneRun:
    """Where how much runs differ is not known from the baseline."""

    def test_it_is_judged_with_stated_noise_and_says_so(self) -> None:
        """Less is found than with five."""
        one, five = gate(slowed(1.05), runs(1)[0]), gate(slowed(1.05))
        assert of(one, FIRST).verdict == "SLOWER"
        assert any("the baseline is one run" in note for note in one.notes)
        assert any("noise of 12 of 12 cases is assumed" in note for note in one.notes)
        assert not any("assumed" in note for note in five.notes)

    def test_a_noise_file_replaces_the_stated_noise(self) -> None:
        """As `python -m benches.noise --json` writes it."""
        spreads = [{"case": case, "runs_s": [1e-3, 1.0002e-3, 0.9999e-3, 1.0001e-3]} for case in TIMES]
        outcome = gate(slowed(1.0), runs(1)[0], others=scatter(spreads))
        found = of(outcome, FIRST).time
        assert found
        assert not found.noise_stated
        assert found.noise < 0.0003
        with pytest.raises(ValueError, match="not the times of several runs"):
            scatter([{"case": FIRST, "runs_s": [1e-3]}])
        assert scatter([]) is None

    def test_equal_times_of_a_noise_file_are_no_reason_to_learn_nothing_from_the_others(self) -> None:
        """Medians of short kernels are often equal to the tick of the clock."""
        times = np.random.default_rng(1).normal(14e-6, 0.1e-6, (20, 5))
        times[0] = 14e-6
        found = scatter([{"case": case, "runs_s": list(row)} for case, row in zip(CASES, times, strict=False)])
        assert found is not None
        assert found.df == pytest.approx(np.full(20, 4.0))
        assert found.variance[1:] == pytest.approx(np.log(times[1:]).var(axis=1, ddof=1))
        assert fit_prior(found.variance, found.df)[1] > 1.0

    def test_differences_of_the_suite_show_that_it_is_noisier_than_stated(self) -> None:
        """Twelve cases that scatter by 3 % are no alarm, though 0.1 % is stated."""
        outcome = gate(results(noisy(TIMES, 0.03, 5)), runs(1, noise=0.03)[0])
        assert outcome.counts["SLOWER"] == 0
        assert all(finding.time and finding.time.noise > 0.01 for finding in outcome.judged)


class TestControls:
    """What the machine did to everything is not the cases' doing."""

    def test_what_the_controls_did_is_taken_off(self) -> None:
        """Three percent slower, all of it, on the same board."""
        slow = {case: time_s * 1.03 for case, time_s in TIMES.items()}
        outcome = gate(results(slow, controls=1.03))
        assert outcome.counts["SLOWER"] == 0
        found = of(outcome, FIRST).time
        assert found
        assert [found.raw, found.expected] == pytest.approx([1.03, 1.03], rel=0.003)
        assert outcome.controls["gemm"] == pytest.approx(1.03)

    def test_what_may_hide_behind_a_faster_machine_is_not_called_the_same(self) -> None:
        """As fast as ever where everything else gained ten percent: how far cases follow controls is not known."""
        assert gate(slowed(1.0, controls=0.9)).counts["UNRESOLVED"] == len(TIMES)

    def test_a_case_follows_the_controls_of_its_kernels(self) -> None:
        """By their share of its time; FP8 follows BF16 where there is no control of it."""
        now, baseline = slowed(1.0), pool(runs(5))
        shares = {"gemm_fp8": 5e-4, "attention": 3e-4, "gemm_bf16": 2e-4}
        for benchmark in baseline["benchmarks"]:
            benchmark["extra_info"]["category_s"] = shares
        shifts = {"gemm": 1.01, "fp8_gemm": 1.04, "copy": 1.02, "python": 5.0}
        for control in now["suite"]["controls"]:
            control["median_s"] *= shifts[control["name"]]
        found = of(gate(now, baseline), FIRST).time
        assert found
        assert found.expected == pytest.approx(1.04**0.5 * 1.02**0.3 * 1.01**0.2)
        now["suite"]["controls"] = [one for one in now["suite"]["controls"] if one["name"] != "fp8_gemm"]
        found = of(gate(now, baseline), FIRST).time
        assert found
        assert found.expected == pytest.approx(1.01**0.7 * 1.02**0.3)

    def test_short_gemms_do_not_follow_the_controls_of_long_ones(self) -> None:
        """A quarter of the GEMMs' time is in kernels of 50 us: power, by which boards differ, does not reach them."""
        now, baseline = slowed(1.0), pool(runs(5))
        kernels = [kernel("long", count=2, device_s=6e-4), kernel("short", count=4, device_s=2e-4)]
        for proof in baseline["suite"]["evidence"].values():
            proof["segments"]["forward"]["kernels"] = kernels
        shifts = {"gemm": 1.04, "fp8_gemm": 5.0, "copy": 1.02, "python": 5.0}
        for control in now["suite"]["controls"]:
            control["median_s"] *= shifts[control["name"]]
        found = of(gate(now, baseline), FIRST).time
        assert found
        assert found.expected == pytest.approx(1.04**0.75 * 1.02**0.25)

    def test_what_launches_cost_is_taken_off_run_by_run(self) -> None:
        """Runs whose 20 launches cost 0.1 us more each are alike; where one lacks the control all stay as they are."""
        assert LAUNCHES == controls.LAUNCHES
        times, cost = dict.fromkeys(CASES[:12], 1e-3), 0.1e-6

        def file(number: int) -> Any:
            made = results({case: time_s + 20 * cost * (number % 2) for case, time_s in times.items()})
            for benchmark in made["benchmarks"]:
                benchmark["extra_info"]["launches"] = 20
            made["suite"]["controls"].append(
                {"name": "short_kernels", "time_s": 1.0, "median_s": (number % 2 + 20) * 1e-5}
            )
            return made

        baseline = pool([file(number) for number in range(5)])
        found = of(gate(file(5), baseline), FIRST)
        assert found.verdict == "SAME"
        assert found.time
        assert found.time.raw == pytest.approx(1.002)
        assert found.time.ratio == pytest.approx(1.0, abs=1e-6)
        assert found.time.noise < 1e-4
        without = [file(number) for number in range(6)]
        without[5]["suite"]["controls"].pop()
        outcome = gate(without[5], pool(without[:5]))
        assert any("no control of short kernels" in note for note in outcome.notes)
        found = of(outcome, FIRST)
        assert found.time
        assert found.time.ratio == pytest.approx(1.002)
        assert found.time.noise > 1e-3  # as the five differ, uncorrected as well
        without[1]["suite"]["controls"].pop()
        found = of(gate(file(5), pool(without[:5])), FIRST)
        assert found.time
        assert found.time.ratio == pytest.approx(1.002)
        assert found.time.noise > 1e-3
        without[1]["machine_info"]["gpu"]["uuid"] = "two"  # with which nothing is compared: three others are enough
        found = of(gate(file(5), pool(without[:5])), FIRST)
        assert found.time
        assert found.time.ratio == pytest.approx(1.0, abs=1e-6)

    def test_controls_are_those_of_a_case_s_own_runs(self) -> None:
        """Of the same board, on a day when all of it was 3 % slower; the other cases were measured on other days."""
        slow_times = {case: time_s * 1.03 for case, time_s in TIMES.items()}
        others = dict.fromkeys(CASES[12:20], 1e-3)
        baseline = pool([*runs(30, others), *runs(3, slow_times, controls=1.03)])
        now = results(noisy(slow_times, 0.001, 77) | others, controls=1.03)
        found = of(gate(now, baseline), FIRST).time
        assert found
        assert found.expected == pytest.approx(1.0, abs=1e-4)

    def test_a_control_of_launches_that_must_be_wrong_takes_nothing_off(self) -> None:
        """By it the 20 launches of a millisecond would cost a quarter more of it."""

        def file(control_s: float) -> Any:
            made = slowed(1.0)
            for benchmark in made["benchmarks"]:
                benchmark["extra_info"]["launches"] = 20
            made["suite"]["controls"].append({"name": "short_kernels", "time_s": 1.0, "median_s": control_s})
            return made

        baseline = pool([file(2e-4) for _ in range(5)])
        for control_s, ratio in ((2e-4 + 9e-4, 1 - 0.18), (2e-4 + 12.5e-4, 1.0)):
            found = of(gate(file(control_s), baseline), FIRST).time
            assert found
            assert found.ratio == pytest.approx(ratio, abs=0.003)

    def test_without_controls_nothing_is_taken_off(self) -> None:
        """And the outcome says so."""
        file = slowed(1.0)
        file["suite"]["controls"] = []
        outcome = gate(file)
        found = of(outcome, FIRST).time
        assert found
        assert found.expected == 1.0
        assert any("no controls" in note for note in outcome.notes)


class TestBoards:
    """Another GPU of the same model."""

    def test_another_board_is_judged_more_carefully(self) -> None:
        """One and a half percent may be the board, five are not."""
        assert of(gate(slowed(1.015)), FIRST).verdict == "SLOWER"
        assert of(gate(slowed(1.015, uuid="two")), FIRST).verdict == "UNRESOLVED"
        outcome = gate(slowed(1.05, uuid="two"))
        assert of(outcome, FIRST).verdict == "SLOWER"
        assert any("another board" in note for note in outcome.notes)

    def test_a_board_is_compared_with_itself_where_it_can_be(self) -> None:
        """The baseline's other board is half as fast."""
        other = dict.fromkeys(TIMES, 0.002)
        baseline = pool([*runs(3), *runs(5, other, uuid="two")])
        outcome = gate(slowed(1.02), baseline)
        assert outcome.counts["SLOWER"] == 1
        assert of(outcome, FIRST).verdict == "SLOWER"

    def test_a_gpu_that_does_not_tell_which_one_it_is_is_another(self) -> None:
        """Also than the baseline's runs of which nobody knows either."""
        outcome = gate(slowed(1.0, uuid=None), pool(runs(5, uuid=None)))
        assert any("another board" in note for note in outcome.notes)

    def test_a_board_of_which_only_other_cases_are_stored_is_another(self) -> None:
        """And the controls of these runs, by which it is 2 % faster, say nothing of the cases."""
        other = runs(5, dict.fromkeys(CASES[12:20], 1e-3), uuid="two", controls=0.98)
        outcome = gate(slowed(1.0, uuid="two"), pool([*runs(5), *other]))
        assert any("another board" in note for note in outcome.notes)
        assert outcome.controls["gemm"] == pytest.approx(1.0)
        assert outcome.runs_before == 10

    def test_controls_are_compared_with_those_of_the_same_board(self) -> None:
        """As cases are; the other board's are 3 % slower."""
        outcome = gate(slowed(1.0), pool([*runs(3), *runs(5, uuid="two", controls=1.03)]))
        assert outcome.controls == pytest.approx(dict.fromkeys(CONTROLS, 1.0))

    def test_a_control_that_a_board_lacks_does_not_set_it_apart(self) -> None:
        """Boards show how much boards differ with the controls that all of them have: here by nothing."""
        known = [run for uuid in ("one", "two", "three") for run in runs(3, uuid=uuid)]
        for run in known[:3]:
            run["suite"]["controls"] = [one for one in run["suite"]["controls"] if one["name"] != "gemm"]
        found = of(gate(slowed(1.0, uuid="four"), pool(known)), FIRST).time
        assert found
        assert found.interval[1] - found.interval[0] < 0.2  # what no control stands for may differ by 2.5 %

    def test_a_run_of_other_cases_changes_nothing(self) -> None:
        """Two boards differ by 4 %, so what a third does is no surprise; a run of other cases is of a fourth board."""
        far = {case: time_s * (1 + 0.04 * (-1) ** number) for number, (case, time_s) in enumerate(TIMES.items())}
        known = [*runs(3), *runs(3, far, uuid="two")]
        other = runs(1, dict.fromkeys(CASES[12:20], 1e-3), uuid="four")
        now = slowed(1.04, uuid="three")
        alone, together_with_it = gate(now, pool(known)), gate(now, pool([*known, *other]))
        assert of(alone, FIRST).verdict == "UNRESOLVED"
        assert [finding.time for finding in alone.findings] == [finding.time for finding in together_with_it.findings]

    def test_only_a_board_that_the_baseline_lacks_is_named(self) -> None:
        """One of several that it has is no difference."""
        baseline = pool([*runs(3), *runs(3, uuid="two")])
        differing = [
            {change.what for change in gate(slowed(1.0, uuid=one), baseline).differing} for one in ("two", "3")
        ]
        assert ["boards" in names for names in differing] == [False, True]

    def test_boards_of_the_baseline_show_how_much_boards_differ(self) -> None:
        """Where two of them are 4 % apart beyond their controls, a third one may be as well."""
        far = noisy(dict.fromkeys(TIMES, 0.001), 0.04, 3)
        near = gate(slowed(1.06, uuid="three"), pool([*runs(5), *runs(5, uuid="two")]))
        wide = gate(slowed(1.06, uuid="three"), pool([*runs(5), *runs(5, far, uuid="two")]))
        assert of(near, FIRST).verdict == "SLOWER"
        assert of(wide, FIRST).verdict == "UNRESOLVED"

    def test_a_gpu_that_does_not_tell_which_it_is_counts_as_another(self) -> None:
        """Nobody knows that it is the same."""
        outcome = gate(slowed(1.015, uuid=""), pool(runs(5, uuid="")))
        assert of(outcome, FIRST).verdict == "UNRESOLVED"


CHANGES: dict[str, tuple[Spoil, str, str, str]] = {
    "launches": (lambda case: case.extra.update(launches=3), "launches", "2", "3"),
    "peak": (lambda case: case.extra.update(peak_bytes=1001), "peak bytes", "1000", "1001"),
    "saved": (lambda case: case.extra.update(saved_bytes=400), "saved bytes", "500", "400"),
    "a kernel": (lambda case: case.ran(evidence(kernel("cutlass"))), "kernels", "1 x nvjet", "1 x cutlass"),
    "a kernel more": (lambda case: case.ran(evidence(kernel("nvjet", count=2))), "kernels", "none", "1 x nvjet"),
    "precision": (
        lambda case: case.ran(evidence(operands=("e4m3", "e4m3"))),
        "precision",
        "1 x bf16 x bf16",
        "1 x e4m3 x e4m3",
    ),
    "attention": (lambda case: case.ran(evidence(backend="Unfused")), "attention", "Fused", "Unfused"),
    "host time": (lambda case: case.extra.update(host_median_s=4e-4), "host time", "100 us", "400 us (4.00x)"),
}


class TestChanged:
    """What is as fast as before, and is not what it was."""

    @pytest.mark.parametrize("what", CHANGES)
    def test_what_changed_is_said(self, what: str) -> None:
        """Exactly compared, and failing only where the gate is strict."""
        spoil, name, before, now = CHANGES[what]
        outcome = gate(changed(spoil))
        found = of(outcome, FIRST)
        assert found.verdict == "CHANGED"
        assert [(one.what, one.before, one.now) for one in found.changes] == [(name, before, now)]
        assert (outcome.exit_code(), outcome.exit_code(strict=True)) == (0, 1)

    def test_what_was_not_seen_is_not_compared(self) -> None:
        """Kernels that no profiler saw, and memory of a graph."""

        def blind(case: SimpleCase) -> None:
            proof = evidence()
            proof["segments"]["forward"]["kernels"] = None
            case.ran(proof)
            case.extra.update(launches=None, peak_bytes=None, saved_bytes=None, host_median_s=None)

        assert of(gate(changed(blind)), FIRST).verdict == "SAME"

    def test_an_attention_backend_that_nobody_told_is_not_compared(self) -> None:
        """A results file without evidence has none."""
        assert of(gate(changed(lambda case: case.ran({}))), FIRST).verdict == "SAME"

    def test_what_is_too_noisy_to_tell_can_have_changed(self) -> None:
        """What ran is compared exactly, whatever the times do."""
        noisy_one = slowed(1.0, seed=3)
        noisy_one["benchmarks"][0]["extra_info"]["launches"] = 9
        outcome = gate(noisy_one, pool(runs(5, noise=0.05)))
        assert of(outcome, FIRST).verdict == "CHANGED"
        assert outcome.counts["UNRESOLVED"] == len(TIMES) - 1

    def test_host_time_that_is_a_tenth_more_is_nothing(self) -> None:
        """It differs by that much anyway."""
        assert of(gate(changed(lambda case: case.extra.update(host_median_s=1.1e-4))), FIRST).verdict == "SAME"

    def test_a_slower_case_stays_slower(self) -> None:
        """With the changes as reasons."""
        file = slowed(1.05)
        file["benchmarks"][0]["extra_info"]["launches"] = 9
        found = of(gate(file), FIRST)
        assert found.verdict == "SLOWER"
        assert [one.what for one in found.changes] == ["launches"]


class TestReasons:
    """What moved in a case that got slower."""

    def test_kernels_are_matched_by_name_and_then_by_category(self) -> None:
        """Replaced, added, removed, grown; what grew by little is not named."""
        before = [kernel("a"), kernel("softmax", "attention"), kernel("grown", "norm"), kernel("little", "norm")]
        before += [kernel("short", "norm", device_s=1e-6), kernel("twice", "norm"), kernel("twice", "norm")]
        now = [
            kernel("b", device_s=1.05e-3),
            kernel("cast", "quantize"),
            kernel("grown", "norm", device_s=1.04e-3),
            kernel("little", "norm", device_s=1.015e-3),
            kernel("short", "norm", device_s=1.5e-6),  # half as long again, and no part of what the case got slower by
            kernel("twice", "norm", count=2, device_s=2e-3),
        ]
        baseline = pool(runs(5))
        file = slowed(1.05)
        key = file["benchmarks"][0]["extra_info"]["evidence"]
        baseline["suite"]["evidence"][key], file["suite"]["evidence"][key] = evidence(*before), evidence(*now)
        found = of(gate(file, baseline), FIRST)
        assert found.reasons
        kernels = found.reasons.kernels
        assert [(old.name, new.name) for old, new in kernels.replaced] == [("a", "b")]
        assert [one.name for one in kernels.added] == ["cast"]
        assert [one.name for one in kernels.removed] == ["softmax"]
        assert [(old.name, new.device_s) for old, new in kernels.grew] == [("grown", 1.04e-3)]

    def test_clocks_and_versions_are_compared(self) -> None:
        """The SM clock of both, and every version that differs."""
        file = slowed(1.05)
        file["benchmarks"][0]["extra_info"]["gpu_state"] = {"sm_clock_mhz": {"median": 1400}, "throttled": "too hot"}
        file["machine_info"]["versions"]["cudnn"] = "9.19"
        file["machine_info"]["gpu"]["driver"] = "590.2"
        outcome = gate(file)
        found = of(outcome, FIRST)
        assert found.reasons
        assert [str(one) for one in found.reasons.state] == [
            "SM clock: 1980 MHz -> 1400 MHz",
            "throttled: no -> too hot",
        ]
        assert [str(one) for one in outcome.differing] == ["driver: 580.1 -> 590.2", "cudnn: none -> 9.19"]


def lacking(case: str = FIRST, **suite: Any) -> Any:
    """A run without one of the baseline's cases."""
    file = results({one: time_s for one, time_s in TIMES.items() if one != case})
    file["suite"] |= suite
    return file


class TestCasesThatAreNotThere:
    """MISSING, NEW, and what was not asked for."""

    @pytest.mark.parametrize("outcome", ["failed", "skipped"])
    def test_a_case_without_a_time_is_missing_with_its_reason(self, outcome: str) -> None:
        """Failed or skipped."""
        lost = [{"case": FIRST, "outcome": outcome, "reason": "out of memory"}]
        found = gate(lacking(not_measured=lost, selected=list(TIMES)))
        assert of(found, FIRST).verdict == "MISSING"
        assert of(found, FIRST).reason == f"{outcome}: out of memory"
        assert found.exit_code() == 1

    def test_a_case_that_the_run_did_not_come_to_is_missing(self) -> None:
        """It was selected."""
        found = of(gate(lacking(selected=list(TIMES), not_run=1)), FIRST)
        assert (found.verdict, found.reason) == ("MISSING", "not run: the run ended before it")

    def test_a_case_that_was_deselected_is_not_missing(self) -> None:
        """By -k, -m or a path; how many is said."""
        outcome = gate(lacking(left_out=[FIRST]))
        assert FIRST not in [finding.case for finding in outcome.findings]
        assert outcome.left_out == {"tiny": 1}
        assert outcome.exit_code(strict=True) == 0

    @pytest.mark.parametrize(
        "case",
        [
            "layer/llama3_8b/torch/bf16/eager/rested/forward",
            "layer/somebodys/torch/bf16/eager/rested/forward",
            "layer/tiny/torch/bf16/graph/rested/forward",
            "gemm/tiny/bf16/rested/autocast/fprop/qkv",
            "gemm/shapes/bf16/rested/autocast/fprop/8x8x8",
        ],
    )
    def test_a_case_that_options_left_out_is_not_missing(self, case: str) -> None:
        """Of another model, execution or kind."""
        baseline = pool(runs(5))
        other = pool(runs(5))["benchmarks"][0]
        other["extra_info"] |= {"case": case, "kind": case.split("/")[0]}
        baseline["benchmarks"].append(other)
        outcome = gate(slowed(1.0), baseline)
        assert outcome.counts["MISSING"] == 0
        assert sum(outcome.left_out.values()) == 1

    def test_a_renamed_case_is_new_and_missing(self) -> None:
        """A stage that has another name now: nothing that was selected explains that the old one is gone."""
        times = {case.replace("/torch/", "/old_torch/"): time_s for case, time_s in TIMES.items()}
        outcome = gate(results(TIMES | {CASES[-1]: 1e-3}), pool(runs(5, times | {CASES[-1]: 1e-3})))
        assert outcome.counts["MISSING"] == outcome.counts["NEW"] == len(TIMES)
        assert "renamed or removed: stage 'old_torch'" in of(outcome, FIRST.replace("/torch/", "/old_torch/")).reason
        assert outcome.exit_code() == 1

    def test_a_case_that_exists_no_more_is_missing(self) -> None:
        """Though each of its values does, in other cases."""
        found = of(gate(lacking()), FIRST)
        assert (found.verdict, found.reason) == (
            "MISSING",
            "renamed or removed: no case of this name can be selected any more",
        )

    def test_a_new_case_is_new(self) -> None:
        """And fails nothing."""
        outcome = gate(results(TIMES | {NEW: 1e-3}))
        assert of(outcome, NEW).verdict == "NEW"
        assert outcome.exit_code(strict=True) == 0

    def test_a_new_case_that_failed_is_no_regression(self) -> None:
        """Strictly it fails all the same."""
        lost = [{"case": NEW, "outcome": "skipped", "reason": "needs a newer GPU"}]
        outcome = gate(slowed(1.0, not_measured=lost))
        assert outcome.lost == {NEW: ("skipped", "needs a newer GPU")}
        assert (outcome.exit_code(), outcome.exit_code(strict=True)) == (0, 1)

    def test_a_case_that_this_machine_has_never_run_fails_nobody(self) -> None:
        """Skipped in the baseline as well; one that failed there is lost."""
        lost = [{"case": NEW, "outcome": "skipped", "reason": "needs a newer GPU"}]
        for outcome, code in (("skipped", 0), ("failed", 1)):
            found = gate(slowed(1.0, not_measured=lost), pool(runs(5, not_measured=[lost[0] | {"outcome": outcome}])))
            assert (bool(found.lost), found.exit_code(strict=True)) == (bool(code), code)

    def test_a_case_that_some_runs_lack_is_judged_by_the_others(self) -> None:
        """Which strictly fails."""
        lost = [{"case": FIRST, "outcome": "failed", "reason": "out of memory"}]
        outcome = gate([slowed(1.0, seed=1), slowed(1.0, seed=2), lacking(not_measured=lost)])
        assert (of(outcome, FIRST).verdict, of(outcome, FIRST).absent_runs) == ("SAME", 1)
        assert (outcome.exit_code(), outcome.exit_code(strict=True)) == (0, 1)
        assert f"{FIRST} failed in 1 of 3 runs: out of memory" in render(outcome)

    def test_a_case_that_failed_in_most_runs_is_missing(self) -> None:
        """Its time in one of three does not excuse it, and why it failed is said. A skipped one is not."""
        for kind, verdict in (("failed", "MISSING"), ("skipped", "SAME")):
            lost = [{"case": FIRST, "outcome": kind, "reason": "its GEMMs ran in BF16"}]
            outcome = gate([slowed(1.0), *(lacking(not_measured=lost) for _ in range(2))])
            assert of(outcome, FIRST).verdict == verdict
            assert ("failed in 2 of 3 runs: its GEMMs ran in BF16" in render(outcome)) == (verdict == "MISSING")
            assert ("not in all 3 runs: 1 case" in render(outcome)) == (verdict == "SAME")
        lost = [{"case": FIRST, "outcome": "failed", "reason": "out of memory"}]
        assert of(gate([slowed(1.0), lacking(not_measured=lost)]), FIRST).verdict == "SAME"  # half are not most

    def test_an_older_file_does_not_say_what_was_selected(self) -> None:
        """Then nothing that it lacks is missing; if its run was ended, it cannot be judged."""
        file = lacking()
        del file["suite"]["selected"], file["suite"]["left_out"]
        assert gate(file).counts["MISSING"] == 0
        file["suite"]["not_run"] = 1
        with pytest.raises(ValueError, match="1 selected cases were not run"):
            gate(file)


class TestStatistics:
    """The formulas, against simulation and against other ways to compute them."""

    def test_the_median_of_normal_numbers_varies_as_the_table_says(self) -> None:
        """Within what 200,000 draws tell."""
        draws = np.random.default_rng(1)
        for count, expected in enumerate(MEDIAN_VARIANCE[1:], start=1):
            medians, _ = middle(draws.standard_normal((200_000, count)))
            assert medians.var() == pytest.approx(expected, rel=0.015)
        assert median_variance(np.array([30]))[0] > middle(draws.standard_normal((50_000, 30)))[0].var()

    def test_the_middle_of_numbers_passes_over_gaps(self) -> None:
        """As numpy's nanmedian, and NaN where there is none."""
        logs = np.random.default_rng(2).standard_normal((50, 7))
        logs[np.random.default_rng(3).random(logs.shape) < 0.4] = np.nan
        logs[0] = np.nan
        found, count = middle(logs)
        assert np.isnan(found[0])
        assert count[0] == 0
        assert found[1:] == pytest.approx(np.nanmedian(logs[1:], axis=1))

    def test_variance_is_within_boards(self) -> None:
        """A board that is slower as a whole adds nothing to it."""
        table = Table(np.array([[1.0, 2.0, 11.0, 12.0]]), np.array(["a", "a", "b", "b"]))
        variance, df = within_boards(table)
        assert (variance[0], df[0]) == (0.5, 2)
        found = centre(table)
        assert found.log_s[0] == 6.5
        assert found.factor[0] == 0.25

    def test_levels_are_of_a_case_s_runs_by_board(self) -> None:
        """The middle of each board's, and their mean; none where one of its boards has no control."""
        logs = np.array([[0.0, 0.0, 0.3, 0.3, 0.5], [1.0, 3.0, 2.0, 2.0, np.nan]])
        there = np.array([[1, 1, 1, 1, 0], [0, 0, 1, 1, 0], [0, 1, 0, 0, 1], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0]], bool)
        found, factor = levels(Table(logs, np.array(list("aabbc"))), there)
        nothing = np.nan
        expected = [[0.15, 2.0], [0.3, 2.0], [0.25, nothing], [0.25, nothing], [nothing, nothing]]
        assert found == pytest.approx(np.array(expected), nan_ok=True)
        expected = [[0.25, 0.25], [0.5, 0.5], [0.5, nothing], [0.5, nothing], [nothing, nothing]]
        assert factor == pytest.approx(np.array(expected), nan_ok=True)

    def test_a_board_s_own_runs_are_taken_where_there_are_enough(self) -> None:
        """Case by case."""
        before = Table(np.array([[1.0, 1, 1, 5], [np.nan, 1, 1, 5]]), np.array(["a", "a", "a", "b"]))
        now = Table(np.array([[1.0], [1.0]]), np.array(["a"]))
        assert np.isnan(of_the_board(before, now).logs[:, 3]).tolist() == [True, False]

    @pytest.mark.parametrize(("d0", "deviation"), [(4.0, 0.01), (20.0, 0.5)])
    def test_the_prior_is_the_one_that_variances_were_drawn_from(self, d0: float, deviation: float) -> None:
        """Scaled inverse chi-squared, of many cases; d0 a little less, by design."""
        draws = np.random.default_rng(4)
        true = deviation**2 * d0 / draws.chisquare(d0, 20_000)
        df = np.full(len(true), 4.0)
        found, found_df = fit_prior(true * draws.chisquare(df) / df, df)
        assert np.sqrt(found) == pytest.approx(deviation, rel=0.02)
        assert 0.8 * d0 < found_df < 1.05 * d0

    def test_equal_variances_have_no_scatter(self) -> None:
        """Then the mean of all counts, with the degrees of freedom of all."""
        keys = [("layer", "rested", "100 us and more")] * 10
        found = moderate(Scatter(keys, np.full(10, 4e-6), np.full(10, 4.0)), None, np.full(10, 1.0))
        assert found.variance == pytest.approx(np.full(10, 4e-6))
        assert found.df == pytest.approx(np.full(10, 40.0))
        assert not found.stated.any()

    def test_runs_that_agree_to_the_tick_are_no_reason_to_learn_nothing_from_the_others(self) -> None:
        """One of twenty cases of 14 us has twice the same time: its kind's variance counts, not next to none."""
        times = np.random.default_rng(1).normal(14e-6, 0.1e-6, (20, 2)).round(7)
        times[0] = 14e-6
        variance, df = np.log(times).var(axis=1, ddof=1), np.full(20, 1.0)
        keys = [("gemm", "rested", "below 15 us")] * 20
        found = moderate(Scatter(keys, rounded(variance, times.mean(axis=1)), df), None, np.full(20, 1.0))
        assert np.sqrt(found.variance[0]) > 0.002
        bare = moderate(Scatter(keys, variance, df), None, np.full(20, 1.0))
        assert np.sqrt(bare.variance[0]) < 0.0005
        assert found.df[0] > bare.df[0] + 1

    def test_a_few_cases_stand_alone(self) -> None:
        """If they have the runs for it."""
        keys = [("layer", "rested", "100 us and more")] * 2
        found = moderate(Scatter(keys, np.array([1e-6, 4e-6]), np.array([4.0, 0.0])), None, np.full(2, 0.01))
        assert found.variance == pytest.approx([1e-6, 1e-4])
        assert found.df == pytest.approx([4, 8])
        assert found.stated.tolist() == [False, True]

    def test_kinds_of_one_regime_stand_in_for_each_other_and_regimes_do_not(self) -> None:
        """Three layers borrow from ten GEMMs that are rested too."""
        layers, gemms = ("layer", "rested", "100 us and more"), ("gemm", "rested", "100 us and more")
        variance = np.concatenate([np.full(3, 9e-6), np.full(10, 1e-6)])
        together = moderate(Scatter([layers] * 3 + [gemms] * 10, variance, np.full(13, 4.0)), None, np.full(13, 1.0))
        assert together.variance[0] < 9e-6
        apart = ("gemm", "in_layer", "100 us and more")
        alone = moderate(Scatter([layers] * 3 + [apart] * 10, variance, np.full(13, 4.0)), None, np.full(13, 1.0))
        assert alone.variance[0] == pytest.approx(9e-6)

    def test_holm_s_correction_is_that_of_its_definition(self) -> None:
        """The smallest p times all, the next times one fewer, and never less than one before."""
        p = np.array([0.01, 0.04, 0.03, 0.005])
        assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])

    def test_without_anything_to_borrow_it_is_student_s_t(self) -> None:
        """The interval of five runs against five with equal variance, but that medians are compared."""
        draws = np.random.default_rng(6).standard_normal((2, 1, 5)) * 0.01
        before, now = (Table(part, np.array(["a"] * 5)) for part in draws)
        found = compare(before, now, [("layer", "rested", "100 us and more")], np.array([1.0]), np.array([1.0]))
        decided = decide(found, time_floor(found))
        pooled = np.sqrt(np.mean([part.var(ddof=1) for part in draws[:, 0]]))
        half = stats.t.ppf(0.975, 8) * pooled * np.sqrt(2 * MEDIAN_VARIANCE[5])
        assert found.difference[0] == pytest.approx(np.median(draws[1]) - np.median(draws[0]))
        assert decided.high[0] - found.difference[0] == pytest.approx(half)

    def test_noise_of_controls_adds_to_that_of_cases(self) -> None:
        """By the case's share of them."""
        boards = np.array(["a"] * 5)
        draws = np.random.default_rng(7).standard_normal((2, 3, 5))
        before, now = (Table(1e-4 * part[:2], boards) for part in draws)
        was, found = (Table(0.02 * part[2:], boards) for part in draws)
        controls = Controls(was, found, np.array([[1.0], [0.0]]))
        stated, keys = np.full(2, 0.1), [("layer", "rested", "100 us and more")] * 2
        error = compare(before, now, keys, stated, stated, controls).error
        assert error[0] > 50 * error[1]

    @pytest.mark.parametrize(("shift", "taken_off"), [(0.004, 0.0), (0.009, 0.009), (-0.004, 0.0), (-0.009, -0.009)])
    def test_what_a_control_differs_by_from_run_to_run_is_not_taken_off(self, shift: float, taken_off: float) -> None:
        """Its runs deviate by 0.2 %: a shift of 0.4 % may be chance, and one of 0.9 % is none."""
        logs = 0.002 * np.array([[-1.0, 1.0, 0.0, -1.0, 1.0]])
        before, now = Table(logs / 10, np.array(["a"] * 5)), Table(np.zeros((1, 1)), np.array(["a"]))
        controls = Controls(Table(logs, before.boards), Table(np.full((1, 1), shift), now.boards), np.ones((1, 1)))
        found = compare(before, now, [("layer", "rested", BAND)], np.ones(1), np.ones(1), controls)
        assert found.shift[0] == taken_off
        assert found.difference[0] == -taken_off


BAND = "100 us and more"


def handmade(regime: str) -> tuple[Table, Table, Controls]:
    """Three cases on boards a, b and c: two controls, one of them or none stands for them."""
    draws = np.random.default_rng(11)
    boards, board = np.array(["a", "a", "a", "b", "b"]), np.array(["c"])
    before = Table(1e-3 * draws.standard_normal((3, 5)) + 0.01 * (boards == "b"), boards)
    now = Table(1e-3 * draws.standard_normal((3, 1)) + 0.02, board)
    was = Table(2e-3 * draws.standard_normal((2, 5)) + np.array([[0.004], [-0.003]]) * (boards == "b"), boards)
    found = Table(np.array([[0.011], [-0.016]]), board)
    assert regime in ("rested", "in_layer", "sustained")
    return before, now, Controls(was, found, np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]]))


@pytest.mark.parametrize(("regime", "following"), [("rested", 0.3), ("in_layer", 0.3), ("sustained", 0.5)])
def test_the_error_is_the_root_of_its_four_parts(regime: str, following: float) -> None:
    """Written out: runs, controls, how well cases follow them, and boards; so are difference and degrees of freedom."""
    before, now, controls = handmade(regime)
    apart = 0.004
    found = compare(before, now, [("layer", regime, BAND)] * 3, np.full(3, 1.0), np.full(3, apart), controls)
    a, b = before.logs[:, :3], before.logs[:, 3:]
    variance = (2 * a.var(axis=1, ddof=1) + b.var(axis=1, ddof=1)) / 3  # three cases are too few to borrow from
    of_boards = 0.4487 / 4 + 0.5 / 4  # median_variance of three and of two runs, half of the weight each
    weights, (of_a, of_b) = controls.weights, (controls.before.logs[:, :3], controls.before.logs[:, 3:])
    levels = np.stack([np.median(of_a, axis=1), np.median(of_b, axis=1)])
    shifts = weights * (controls.now.logs[:, 0] - levels.mean(axis=0))
    of_controls = (4 * 0.001**2 + 2 * of_a.var(axis=1, ddof=1) + of_b.var(axis=1, ddof=1)) / (4 + 3)
    middles = np.stack([np.median(a, axis=1), np.median(b, axis=1)]) - levels @ weights.T
    seen = (middles.var(axis=0, ddof=1) - variance * (0.4487 + 0.5) / 2).mean()
    assert seen > 0
    uncontrolled = 1 - weights.sum(axis=1)
    parts = np.stack(
        [
            variance * (of_boards + 1),
            (weights**2 * of_controls).sum(axis=1) * (of_boards + 1),
            (following * np.abs(shifts).sum(axis=1)) ** 2,
            ((apart**2 + seen) / 2 + (0.025 * uncontrolled) ** 2) * (1 + 2 * 0.5**2),
        ]
    )
    assert found.difference == pytest.approx(
        now.logs[:, 0] - (np.median(a, axis=1) + np.median(b, axis=1)) / 2 - shifts.sum(axis=1)
    )
    assert found.error**2 == pytest.approx(parts.sum(axis=0), rel=1e-6)
    one, both = (weights**2 * of_controls)[:2]
    df_of_controls = np.array([7.0, 7 * both.sum() ** 2 / (both**2).sum(), 7.0])
    df = np.stack([np.full(3, 3.0), df_of_controls, np.full(3, 10.0), np.full(3, 10.0)])
    assert one[1] == 0
    assert found.df == pytest.approx(parts.sum(axis=0) ** 2 / (parts**2 / df).sum(axis=0), rel=1e-6)


def test_boards_that_differ_by_their_runs_alone_do_not_differ() -> None:
    """What runs differ by is counted once: of five equal boards half of what was stated is left, at most."""
    boards = np.repeat(np.array(list("abcde")), 2)
    logs = 0.005 * np.random.default_rng(5).standard_normal((400, 10))
    found = between_boards(Table(logs, boards), np.full(400, 0.005**2), np.full(400, 0.002), np.array(["kind"] * 400))
    assert np.sqrt(found).max() < 0.002


def test_cases_of_some_boards_show_how_much_boards_differ() -> None:
    """Half of them on two of six boards, which differ by 1 %; 0.2 % was stated, and counts as much as one of the two.

    The others are on one board, and say nothing.
    """
    generator = np.random.default_rng(6)
    logs = 0.01 * generator.standard_normal((2000, 6))
    for number, row in enumerate(logs):
        row[generator.permutation(6)[1 + number % 2 :]] = np.nan
    found = between_boards(
        Table(logs, np.array(list("abcdef"))), np.zeros(2000), np.full(2000, 0.002), np.array(["kind"] * 2000)
    )
    assert np.sqrt(found) == pytest.approx(np.sqrt((0.01**2 + 0.002**2) / 2), rel=0.05)


@pytest.mark.parametrize(
    ("key", "device", "deviation"),
    [
        (("layer", "rested", BAND), "cuda", 0.001),
        (("layer", "rested", "15 to 100 us"), "cuda", 0.006),
        (("gemm", "rested", "below 15 us"), "cuda", 0.02),
        (("gemm", "in_layer", BAND), "cuda", 0.01),
        (("gemm", "in_layer", "15 to 100 us"), "cuda", 0.015),
        (("layer", "sustained", BAND), "cuda", 0.02),
        (("layer", "rested", BAND), "cpu", 0.05),
    ],
)
def test_of_one_run_the_noise_is_the_measured_one_of_its_kind(key: Any, device: str, deviation: float) -> None:
    """As processes on H200s differed: see benches/README.md."""
    assert stated_deviation(key, device) == deviation


def certain(*differences: float, noise: float = 0.0, seconds: float = 1e-3) -> Comparison:
    """Cases that differ by this much, in logs, for sure."""
    many = len(differences)
    nothing = np.zeros(many)
    return Comparison(
        before=np.full(many, np.log(seconds)),
        now=nothing,
        shift=nothing,
        difference=np.array(differences),
        error=np.full(many, 1e-6),
        df=np.full(many, 50.0),
        noise=np.full(many, noise),
        stated=np.zeros(many, dtype=bool),
    )


@pytest.mark.parametrize(
    ("noise", "seconds", "floor"), [(0.001, 1e-3, 0.01), (0.02, 1e-3, 0.0618), (0.001, 10e-6, 0.05)]
)
def test_the_floor_is_one_percent_three_times_the_noise_or_half_a_microsecond(
    noise: float, seconds: float, floor: float
) -> None:
    """Whichever is largest; certain differences below it are none, in either direction."""
    found = certain(
        *np.log([1 + 0.95 * floor, 1 - 0.9 * floor, 1 + 1.05 * floor, 1 / (1 + 1.05 * floor)]),
        noise=noise,
        seconds=seconds,
    )
    floors = time_floor(found)
    assert np.exp(floors) - 1 == pytest.approx(np.full(4, floor), rel=1e-3)
    below = "SAME" if floor <= 0.05 else "UNRESOLVED"
    assert list(decide(found, floors).verdicts) == [below, below, "SLOWER", "FASTER"]


def test_the_floor_of_host_times_is_a_fifth() -> None:
    """Or three times their noise."""
    assert np.exp(host_floor(certain(0.0, noise=0.01))) == pytest.approx([1.2])
    assert host_floor(certain(0.0, noise=0.2)) == pytest.approx([0.6])


class TestRefusals:
    """What cannot be compared."""

    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (lambda file: file["machine_info"]["gpu"].update(name="NVIDIA B200"), "is of NVIDIA H200"),
            (lambda file: file["machine_info"]["gpu"].update(compute_capability="10.0"), "is of NVIDIA H200"),
            (lambda file: file["suite"].update(device="cpu"), "unknown CPU"),
        ],
    )
    def test_another_machine_is_refused(self, spoil: Spoil, words: str) -> None:
        """Another model of GPU, or none."""
        file = slowed(1.0)
        spoil(file)
        with pytest.raises(ValueError, match=words):
            gate(file)

    def test_a_run_of_the_baseline_is_no_judge_of_it(self) -> None:
        """It would be the same as itself."""
        files = runs(5)
        with pytest.raises(ValueError, match="is one of baseline, and cannot be judged by itself"):
            gate(files[2], pool(files))

    def test_a_run_with_nothing_in_common_is_refused(self) -> None:
        """Nothing would have been judged, and it would have passed."""
        with pytest.raises(ValueError, match="nothing can be compared"):
            gate(results({"layer/other/torch/bf16/eager/rested/forward": 1e-3}))

    def test_a_baseline_without_times_is_refused(self) -> None:
        """Everything would be new."""
        with pytest.raises(ValueError, match="no case has a time"):
            gate(slowed(1.0), results({}))

    def test_a_run_without_times_is_judged(self) -> None:
        """All is missing."""
        lost = [{"case": case, "outcome": "failed", "reason": "no GPU"} for case in TIMES]
        outcome = gate(results({}, not_measured=lost, selected=list(TIMES)))
        assert outcome.counts["MISSING"] == len(TIMES)


def test_planted_work_is_said() -> None:
    """And judged: that is what it is for."""
    outcome = gate(slowed(1.05, planted=True))
    assert outcome.planted
    assert any("PLANTED" in note for note in outcome.notes)
    assert outcome.counts["SLOWER"] == 1
