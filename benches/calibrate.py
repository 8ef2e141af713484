"""How often the gate cries wolf, and what it sees: unchanged and planted runs in fresh processes, judged as in CI.

    python -m benches.calibrate --baseline FILE [--unchanged 10] [--plant REGEX=SIZE ...] [--each 5]
                                [--folder DIR] [--json OUT] [--plot OUT.png] [-- PYTEST OPTIONS]

Every run is one of `pytest benches --benchmark-compare=FILE`, so suspects get their second look. Rates have 95 %
intervals (Clopper and Pearson). Beside the gate's stand the rules of `--benchmark-compare-fail` on the same files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benches.harness.baselines import Results, load
from benches.harness.planting import Plant, parse
from benches.report.analysis import MALFORMED
from benches.report.refusals import in_words, refuse
from shapes.printing import print_text

GATE = "the gate"
RULES = {"median:2%": ("median", 0.02), "mean:5%": ("mean", 0.05)}  # of --benchmark-compare-fail, in common use


@dataclass(frozen=True)
class Rate:
    """So many of so many, and the 95 % interval of the rate."""

    what: str
    by: str
    hits: int
    trials: int
    low: float
    high: float

    def __str__(self) -> str:
        if not self.trials:
            return f"{self.what:44} {self.by:12} none"
        return (
            f"{self.what:44} {self.by:12} {self.hits:4} of {self.trials:4}  "
            f"{self.hits / self.trials:7.1%}  ({self.low:.1%} to {self.high:.1%})"
        )


def rate(what: str, by: str, hits: Iterable[bool]) -> Rate:
    """A rate with its exact interval (Clopper and Pearson 1934, Biometrika 26)."""
    from scipy.stats import binomtest

    found = list(hits)
    if not found:
        return Rate(what, by, 0, 0, 0.0, 1.0)
    interval = binomtest(sum(found), len(found)).proportion_ci(0.95, method="exact")
    return Rate(what, by, sum(found), len(found), float(interval.low), float(interval.high))


def alarms(before: Results, now: Results) -> dict[str, frozenset[str]]:
    """Cases that the gate, and each of RULES, calls slower."""
    from benches.harness.judging import judge

    found = {GATE: {one.case for one in judge(before, now).findings if one.verdict == "SLOWER"}}
    for rule, (field, allowed) in RULES.items():
        found[rule] = {case for case in now.timed if case in before.timed and _grew(before, now, case, field) > allowed}
    return {by: frozenset(cases) for by, cases in found.items()}


def _grew(before: Results, now: Results, case: str, field: str) -> float:
    """As pytest-benchmark compares: a field of the stored statistics with the one of now."""
    was, new = (one.timed[case].benchmark["stats"].get(field) for one in (before, now))
    return new / was - 1 if was and new else 0.0


def false_alarms(before: Results, unchanged: Sequence[Results]) -> list[Rate]:
    """Over runs in which nothing changed: suites with an alarm, and cases."""
    found = [(alarms(before, run), [case for case in run.timed if case in before.timed]) for run in unchanged]
    rates = []
    for by in (GATE, *RULES):
        rates.append(rate("unchanged suites with an alarm", by, [bool(called[by]) for called, _ in found]))
        rates.append(rate("unchanged cases", by, [case in called[by] for called, cases in found for case in cases]))
    return rates


def detections(before: Results, planted: Sequence[tuple[Plant, Results]]) -> list[Rate]:
    """Over planted runs, plant by plant: matching cases that were called slower."""
    rates = []
    for text in dict.fromkeys(plant.text for plant, _ in planted):
        trials = [(plant, run, alarms(before, run)) for plant, run in planted if plant.text == text]
        for by in (GATE, *RULES):
            hits = [
                case in called[by]
                for plant, run, called in trials
                for case in run.timed
                if case in before.timed and plant.pattern.search(case)
            ]
            rates.append(rate(text, by, hits))
    return rates


def run_once(baseline: Path, file: Path, options: Sequence[str]) -> Results:
    """One process of the benchmarks, judged in it. Raises ValueError where it left no results file."""
    command = [sys.executable, "-m", "pytest", "benches", "-q", "--benchmark-quiet", f"--benchmark-json={file}"]
    done = subprocess.run([*command, f"--benchmark-compare={baseline}", *options], capture_output=True, text=True)
    if not file.exists():
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise ValueError(f"a run left no results (exit code {done.returncode}): {''.join(last)}")
    return load(file)


def plot(rates: Sequence[Rate], path: Path) -> None:
    """Detection by plant, with its interval, for the gate and each rule. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    plants = list(dict.fromkeys(one.what for one in rates))
    for offset, by in enumerate((GATE, *RULES)):
        own = [one for one in rates if one.by == by and one.trials]
        places = [plants.index(one.what) + 0.2 * (offset - 1) for one in own]
        heights = [one.hits / one.trials for one in own]
        below = [height - one.low for height, one in zip(heights, own, strict=True)]
        above = [one.high - height for height, one in zip(heights, own, strict=True)]
        axes.errorbar(places, heights, yerr=[below, above], fmt="o", capsize=3, label=by)
    axes.set_xticks(range(len(plants)), plants, rotation=20, ha="right", fontsize=8)
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("called slower")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _calibrate(options: argparse.Namespace) -> tuple[list[Rate], list[Rate]]:
    before = load(options.baseline)
    plants = [parse(text) for text in options.plant]
    folder = options.folder or Path(tempfile.mkdtemp(prefix="calibration-"))
    folder.mkdir(parents=True, exist_ok=True)
    unchanged, planted = [], []
    for number in range(options.unchanged):
        print(f"unchanged run {number + 1} of {options.unchanged}, into {folder}", file=sys.stderr)
        unchanged.append(run_once(options.baseline, folder / f"unchanged{number}.json", options.pytest))
    for index, plant in enumerate(plants):
        for number in range(options.each):
            print(f"{plant.text}: run {number + 1} of {options.each}", file=sys.stderr)
            extra = [*options.pytest, f"--plant={plant.text}"]
            planted.append((plant, run_once(options.baseline, folder / f"plant{index}-{number}.json", extra)))
    return false_alarms(before, unchanged), detections(before, planted)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 4 after one line on stderr for what cannot be calibrated."""
    parser = argparse.ArgumentParser(prog="python -m benches.calibrate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--baseline", required=True, type=Path, metavar="FILE", help="what runs are judged against")
    parser.add_argument("--unchanged", type=int, default=10, metavar="N", help="runs in which nothing is planted")
    parser.add_argument("--plant", action="append", default=[], metavar="REGEX=SIZE", help="as pytest's; repeatable")
    parser.add_argument("--each", type=int, default=5, metavar="N", help="runs of each plant")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where results files go; default: a new one")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the rates")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw detection by plant")
    parser.add_argument("pytest", nargs="*", metavar="OPTION", help="after --: pytest's, which select the cases")
    options = parser.parse_args(arguments)
    try:
        unchanged, found = _calibrate(options)
        if options.json:
            options.json.write_text(json.dumps(_as_dict(unchanged, found), indent=1) + "\n")
        if options.plot and found:
            plot(found, options.plot)
    except (OSError, ValueError, *MALFORMED) as error:
        return refuse("benches.calibrate", in_words(error))
    except ImportError as error:
        return refuse("benches.calibrate", f"pip install scipy matplotlib ({error})")
    return print_text("\n".join(map(str, [*unchanged, *found])))


def _as_dict(unchanged: Sequence[Rate], found: Sequence[Rate]) -> dict[str, Any]:
    return {"unchanged": [asdict(one) for one in unchanged], "planted": [asdict(one) for one in found]}


if __name__ == "__main__":
    sys.exit(main())
