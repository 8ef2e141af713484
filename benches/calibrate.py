"""How often the gate cries wolf, and what it sees: unchanged and planted runs in fresh processes, judged as in CI.

    python -m benches.calibrate --baseline FILE [--unchanged 10] [--target REGEX ... [--size 2% ...] [--planted N]]
                                [--folder DIR] [--json OUT] [--plot OUT.png] [-- PYTEST OPTIONS]

Every run is one of `pytest benches --benchmark-compare=FILE`, so suspects get their second look. In a planted run every
target, which is one case or several, gets one of the sizes, and in the next run the next one: as many runs as there are
sizes give each target each size once. Runs that are in the folder already are not made again, so that what was
interrupted goes on. Rates have 95 % intervals (Clopper and Pearson). Beside the gate's stand the rules of
`--benchmark-compare-fail` on the same files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benches.harness.planting import Plant, parse
from benches.judging.baselines import Results, load
from benches.noise import band_of, kind_of
from benches.report.analysis import MALFORMED
from benches.report.refusals import in_words, refuse
from shapes.printing import print_text

GATE = "the gate"
SIZES = ("1%", "2%", "3%", "5%")
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
    from benches.judging.judge import judge

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


def detections(before: Results, planted: Sequence[Results]) -> list[Rate]:
    """Over planted runs: cases of each kind, and of all, that were called slower, by the size planted in them."""
    hits: dict[tuple[str, str, str], list[bool]] = {}
    for run in planted:
        called = alarms(before, run)
        for plant, case in _trials(before, run):
            for kind, by in itertools.product((_kind(before, case), "all"), called):
                hits.setdefault((plant.size, kind, by), []).append(case in called[by])
    ordered = sorted(hits, key=lambda key: (key[1] == "all", key[1]))  # sizes and rules stay as they came
    return [rate(f"{kind}: {size}", by, hits[size, kind, by]) for size, kind, by in ordered]


def _trials(before: Results, run: Results) -> Iterator[tuple[Plant, str]]:
    """Each case with what was planted in it: those that a plant names, not those that share a part with them."""
    for plant in map(parse, run.raw["suite"]["planted"]):
        yield from ((plant, case) for case in run.timed if case in before.timed and plant.pattern.search(case))


def _kind(before: Results, case: str) -> str:
    """What kind of case it is, and how long it takes."""
    timed = before.timed[case]
    kind = kind_of(case.split("/")[0], timed.axis("mode"))
    return f"{kind}, {band_of(timed.benchmark['stats']['median'], timed.extra.get('launches'))} a launch"


def plants(targets: Sequence[str], sizes: Sequence[str], number: int) -> list[str]:
    """What a run plants: in each target the size whose turn it is."""
    return [f"{target}={sizes[(place + number) % len(sizes)]}" for place, target in enumerate(targets)]


def run_once(baseline: Path, file: Path, options: Sequence[str]) -> Results:
    """One process of the benchmarks, judged in it. Raises ValueError where it left no results file."""
    command = [sys.executable, "-m", "pytest", "benches", "-q", "--benchmark-quiet", f"--benchmark-json={file}"]
    done = subprocess.run([*command, f"--benchmark-compare={baseline}", *options], capture_output=True, text=True)
    if not file.exists():
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise ValueError(f"a run left no results (exit code {done.returncode}): {''.join(last)}")
    return load(file)


def plot(rates: Sequence[Rate], path: Path) -> None:
    """Detection by size, with its interval, for the gate and each rule; a panel for each kind of cases.

    Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(one.what.split(": ")[0] for one in rates))
    figure = Figure(figsize=(3 + 2.6 * len(kinds), 3.8), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
        for offset, by in enumerate((GATE, *RULES)):
            own = [one for one in rates if one.by == by and one.what.startswith(f"{kind}: ")]
            heights = [one.hits / one.trials for one in own]
            below = [height - one.low for height, one in zip(heights, own, strict=True)]
            above = [one.high - height for height, one in zip(heights, own, strict=True)]
            places = [place + 0.12 * (offset - 1) for place in range(len(own))]
            axes.errorbar(places, heights, yerr=[below, above], fmt="o-", capsize=3, linewidth=0.8, label=by)
            axes.set_xticks(range(len(own)), [one.what.split(": ")[1] for one in own])
        axes.set_title(kind, fontsize=9)
        axes.set_xlabel("planted")
        axes.set_ylim(-0.02, 1.02)
    figure.axes[0].set_ylabel("called slower")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _calibrate(options: argparse.Namespace) -> tuple[list[Rate], list[Rate]]:
    before = load(options.baseline)
    sizes = options.size or list(SIZES)
    for text in plants(options.target, sizes, 0):
        parse(text)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="calibration-"))
    folder.mkdir(parents=True, exist_ok=True)
    rounds = 2 * len(sizes) if options.planted is None else options.planted
    unchanged = [_run(options, folder / f"unchanged{number}.json", []) for number in range(options.unchanged)]
    planted = [
        _run(options, folder / f"planted{number}.json", plants(options.target, sizes, number))
        for number in range(rounds if options.target else 0)
    ]
    return false_alarms(before, unchanged), detections(before, planted)


def _run(options: argparse.Namespace, file: Path, planted: Sequence[str]) -> Results:
    """A run of the folder's, made if it is not there. Raises ValueError for one that planted something else."""
    if not file.exists():
        print(f"{file}: {' '.join(planted) or 'nothing planted'}", file=sys.stderr)
        return run_once(options.baseline, file, [*options.pytest, *(f"--plant={text}" for text in planted)])
    found = load(file)
    if found.raw["suite"]["planted"] != list(planted):
        raise ValueError(f"{file} is there, with other plants: {' '.join(found.raw['suite']['planted']) or 'none'}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 4 after one line on stderr for what cannot be calibrated."""
    parser = argparse.ArgumentParser(prog="python -m benches.calibrate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--baseline", required=True, type=Path, metavar="FILE", help="what runs are judged against")
    parser.add_argument("--unchanged", type=int, default=10, metavar="N", help="runs in which nothing is planted")
    parser.add_argument("--target", action="append", default=[], metavar="REGEX", help="cases to slow down; repeatable")
    sizes = f"slowdowns, as --plant has them; repeatable; default: {', '.join(SIZES)}".replace("%", "%%")
    parser.add_argument("--size", action="append", default=[], metavar="SIZE", help=sizes)
    parser.add_argument("--planted", type=int, metavar="N", help="planted runs; default: two for each size")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where results files are; default: a new one")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the rates")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw detection by size")
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
