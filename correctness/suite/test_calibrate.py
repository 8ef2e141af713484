"""Rates of false alarms and of detection: counted from results files, with their intervals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benches import calibrate
from benches.calibrate import (
    GATE,
    Rate,
    alarms,
    detections,
    false_alarms,
    main,
    of_stored,
    part_of,
    planted_in,
    plants,
    rate,
)
from benches.judging.baselines import Results, pool, read
from correctness.suite.fake_results import CASES, TIMES, noisy, results, runs

ROOT = Path(__file__).parents[2]
BEFORE = read(pool(runs(5)), "before")
SLOWED = CASES[3]


def run(seed: int, slower: float = 1.0) -> Results:
    """A run of now, in which one case is slower, and says that this was planted."""
    times = noisy(TIMES, 0.001, 100 + seed)
    raw = results(times | {SLOWED: times[SLOWED] * slower})
    raw["suite"]["planted"] = [f"{SLOWED}$={100 * slower - 100:.0f}%"] if slower > 1 else []
    return read(raw, f"run {seed}")


def test_a_rate_has_the_exact_interval() -> None:
    """0 of 10: up to 1 - 0.025^(1/10), which is 30.8 %; 10 of 10: its mirror image; nothing of nothing: all."""
    assert (rate("a", "b", [False] * 10).low, rate("a", "b", [False] * 10).high) == pytest.approx(
        (0.0, 0.3085), abs=1e-4
    )
    assert rate("a", "b", [True] * 10).low == pytest.approx(1 - 0.3085, abs=1e-4)
    assert rate("a", "b", []) == Rate("a", "b", 0, 0, 0.0, 1.0)


def test_unchanged_runs_raise_no_alarm() -> None:
    """Suites and cases are counted for the gate and for each rule."""
    rates = {(one.what, one.by): one for one in false_alarms((BEFORE, run(seed)) for seed in range(4))}
    assert rates["unchanged suites with an alarm", GATE].trials == 4
    assert rates["unchanged cases", GATE].trials == 4 * len(TIMES)
    assert rates["unchanged cases", GATE].hits == 0
    assert len(rates) == 2 * 3


def test_a_planted_case_is_found_and_no_other() -> None:
    """5 % is far above this noise; the rule of 2 % of the median sees it, that of 5 % of the mean does not surely."""
    assert alarms(BEFORE, run(0, slower=1.05))[GATE] == {SLOWED}
    slower = [run(seed, slower=1.05) for seed in range(3)]
    found = detections((BEFORE, one, planted_in(BEFORE, one)) for one in slower)
    rates = {(one.what, one.size, one.by): one for one in found}
    kind = "layer rested, 100 us and more, its board"
    for by in (GATE, "median:2%"):
        assert (rates[kind, "5%", by].hits, rates[kind, "5%", by].trials) == (3, 3)
        assert rates["all", "5%", by].hits == 3


def test_each_target_gets_each_size_in_its_turn() -> None:
    """And in one run the targets get different ones."""
    sizes = ["1%", "2%", "3%"]
    planted = [plants(["a", "b"], sizes, number) for number in range(3)]
    assert planted == [["a=1%", "b=2%"], ["a=2%", "b=3%"], ["a=3%", "b=1%"]]


def test_a_line_says_rate_and_interval() -> None:
    """And that there were no trials, where there were none."""
    assert str(rate("5 %", GATE, [True, False])).endswith("1 of    2    50.0%  (1.3% to 98.7%)")
    assert str(rate("5 %", GATE, [])).endswith("no runs")


def test_a_baseline_is_calibrated_by_its_own_runs() -> None:
    """Nothing in it is slower than the rest of it; what is made 5 % longer is found, case by case."""
    unchanged, slower = of_stored(BEFORE, ["5%"])
    alarmed = {(one.what, one.by): one for one in unchanged}
    assert alarmed["unchanged suites with an alarm", GATE].hits == 0
    assert alarmed["unchanged cases", GATE].trials == 5 * 12
    (found,) = (one for one in slower if (one.what, one.size, one.by) == ("all", "5%", GATE))
    assert found.hits == found.trials == 5 * 3 * 2


def test_the_table_has_a_line_for_each_kind_and_each_rule() -> None:
    """Sizes are its columns."""
    lines = calibrate.table(of_stored(BEFORE, ["3%", "5%"])[1]).splitlines()
    assert lines[0].split()[-2:] == ["3%", "5%"]
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "layer rested, 100 us and more, its board",
        "all, mean:5%",
        "all, median:2%",
        "all, the gate",
    ]
    assert lines[1].split()[-1] == "30/30"


def test_a_run_of_a_baseline_has_its_own_times() -> None:
    """Its median is that run's, and its control too."""
    lost = {"layer/tiny/te_layer/mxfp8/eager/rested/forward": ("skipped", "needs a newer GPU")}
    alone = part_of(replace(BEFORE, lost=lost), [3])
    assert alone.lost == {}, "what the others could not do is not its own"
    (sample,) = alone.timed[SLOWED].samples
    assert sample.run == 0
    assert sample.median_s == BEFORE.timed[SLOWED].samples[3].median_s
    assert alone.timed[SLOWED].benchmark["stats"]["median"] == sample.median_s
    assert alone.runs == (BEFORE.runs[3],)


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """A stored baseline."""
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(pool(runs(5))))
    return path


def test_the_command_runs_judges_writes_and_draws(
    baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted runs get their plant, and all get the options after --."""
    asked: list[list[str]] = []

    def run_once(_: Path, file: Path, options: list[str]) -> Results:
        asked.append(list(options))
        return run(len(asked), slower=1.05 if any("--plant" in option for option in options) else 1.0)

    monkeypatch.setattr(calibrate, "run_once", run_once)
    out, picture = tmp_path / "rates.json", tmp_path / "power.png"
    words = [f"--baseline={baseline}", "--unchanged=2", "--planted=1", f"--target={SLOWED}$", "--size=5%"]
    assert main([*words, f"--json={out}", f"--plot={picture}", f"--folder={tmp_path}", "--", "-m", "rested"]) == 0
    assert asked == [["-m", "rested"]] * 2 + [["-m", "rested", f"--plant={SLOWED}$=5%"]]
    assert [one["hits"] for one in json.loads(out.read_text())["planted"] if one["by"] == GATE] == [1, 1]
    assert picture.stat().st_size > 1000
    assert "unchanged suites with an alarm" in capsys.readouterr().out


def test_a_run_is_not_overwritten_by_its_rates(baseline: Path, tmp_path: Path, capsys: Any) -> None:
    """It took minutes; rates that are there already are written anew."""
    file = tmp_path / "unchanged0.json"
    file.write_text(content := json.dumps(run(0).raw))
    words = [f"--baseline={baseline}", "--unchanged=1", f"--folder={tmp_path}"]
    assert main([*words, f"--json={file}"]) == 4
    assert "is one of the files that are read" in capsys.readouterr().err
    assert file.read_text() == content
    assert [main([*words, f"--json={tmp_path}/rates.json"]) for _ in range(2)] == [0, 0]


def test_what_was_interrupted_goes_on(baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are in the folder are judged, and only the others are made."""
    made: list[str] = []

    def run_once(_: Path, file: Path, __: list[str]) -> Results:
        made.append(file.name)
        return run(1)

    monkeypatch.setattr(calibrate, "run_once", run_once)
    (tmp_path / "unchanged0.json").write_text(json.dumps(run(0).raw))
    (tmp_path / "planted0.json").write_text(json.dumps(run(0, slower=1.05).raw))
    words = [f"--baseline={baseline}", "--unchanged=2", "--planted=1", f"--target={SLOWED}$", f"--folder={tmp_path}"]
    assert main([*words, "--size=5%"]) == 0
    assert made == ["unchanged1.json"]


def test_a_run_that_was_ended_early_is_no_run(
    baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It is refused, and made again by the next call."""
    ended = {**run(0).raw, "suite": {**run(0).raw["suite"], "not_run": 3}}
    made = iter([ended, run(0).raw])

    class Process:
        """A run that is over at once, and leaves its file."""

        def __init__(self, command: list[str], **_: Any) -> None:
            file = next(word for word in command if word.startswith("--benchmark-json="))
            Path(file.partition("=")[2]).write_text(json.dumps(next(made)))

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait(self) -> int:
            return 1

    monkeypatch.setattr(calibrate.subprocess, "Popen", Process)
    words = [f"--baseline={baseline}", "--unchanged=1", f"--folder={tmp_path}"]
    assert main(words) == 4
    assert "unchanged0.json: it was ended early, and 3 cases were not run" in capsys.readouterr().err
    assert main(words) == 0


def test_ctrl_c_waits_until_the_run_has_saved(baseline: Path, tmp_path: Path) -> None:
    """The run, in its own process, gets the signal too and needs a second to save; its log says that it did."""
    file = tmp_path / "unchanged0.json"
    script = f"""
import sys, pathlib
from benches import calibrate
calibrate.sys.executable = {str(tmp_path / "python")!r}
sys.exit(calibrate.main(["--baseline={baseline}", "--unchanged=1", "--folder={tmp_path}"]))
"""
    saves = "got = []; signal.signal(signal.SIGINT, lambda *_: got.append(1)); print('begun', flush=True)"
    saves = f"import signal, time; {saves}; [time.sleep(0.05) for _ in iter(lambda: not got, False)]"
    saves = f"{saves}; time.sleep(1); print('saved')"
    fake = f'#!/bin/sh\nexec {sys.executable} -c "{saves}"\n'
    (tmp_path / "python").write_text(fake)
    (tmp_path / "python").chmod(0o755)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as child:
        log = file.with_suffix(".log")
        while not (log.exists() and "begun" in log.read_text()):
            assert child.poll() is None
            time.sleep(0.05)
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=60)
    assert log.read_text().splitlines() == ["begun", "saved"]
    assert (child.returncode, said.splitlines()[-1][:24]) == (130, "benches.calibrate: ended")


def test_ctrl_c_is_one_line(baseline: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Exit code 130, as a shell has it."""

    def run_once(*_: Any) -> Results:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "run_once", run_once)
    assert main([f"--baseline={baseline}", "--unchanged=1"]) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("benches.calibrate: ended; ")


def test_runs_with_other_plants_are_refused(baseline: Path, tmp_path: Path, capsys: Any) -> None:
    """A folder of another calibration is not taken for this one's."""
    (tmp_path / "unchanged0.json").write_text(json.dumps(run(0, slower=1.05).raw))
    assert main([f"--baseline={baseline}", "--unchanged=1", f"--folder={tmp_path}"]) == 4
    assert "unchanged0.json is there, with other plants" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--baseline=nowhere.json"], "nowhere.json: No such file"),
        (["--baseline={single}", "--stored"], "--stored needs 3 runs or more, and found 1"),
        (["--baseline={baseline}", "--stored", "--size=+2us"], "--size '+2us': stored times can be made longer by"),
        (["--baseline={baseline}", "--target=x", "--size=y"], "--size 'y': must be"),
        (
            ["--baseline={baseline}", "--target=^layer/", "--target=x/y"],
            "--target 'x/y': matches no case of {baseline}",
        ),
        (["--baseline={baseline}", "--stored", f"--size={'9' * 400}%"], "at most 1000%"),
        (["--baseline={baseline}", "--unchanged=-1"], "must not be negative"),
        (["--baseline={baseline}", "--unchanged=0"], "nothing to do"),
        (["--baseline={baseline}", "--stored", "--json={baseline}"], "is one of the files that are read"),
        (["--baseline={baseline}", "--json=/nowhere/rates.json"], "/nowhere/rates.json: there is no folder /nowhere"),
        (["--baseline={baseline}", "--plot=power.foo"], "power.foo: no format for pictures; there are "),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str, baseline: Path, capsys: Any) -> None:
    """And pytest's exit code for a usage error."""
    single = baseline.with_name("single.json")
    single.write_text(json.dumps(pool(runs(1))))
    assert main([word.format(baseline=baseline, single=single) for word in words]) == 4
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert line.format(baseline=baseline) in printed.err


def test_a_run_that_leaves_nothing_is_one_line(baseline: Path, tmp_path: Path, capsys: Any) -> None:
    """The error that pytest said is in it, and all that it said is kept."""
    words = [f"--baseline={baseline}", "--unchanged=1", f"--folder={tmp_path}", "--", "--device=cpu", "--model=nobody"]
    assert main(words) == 4
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("benches.calibrate: ")]
    assert f"a run left no results (exit code 4, see {tmp_path / 'unchanged0.log'}): ERROR: unknown model" in line
    assert "ERROR: unknown model" in (tmp_path / "unchanged0.log").read_text()
