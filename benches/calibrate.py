"""How often the gate cries wolf, and what it sees: unchanged and planted runs in fresh processes, judged as in CI.

    python -m benches.calibrate --baseline FILE [--unchanged 10] [--target REGEX ... [--size 2% ...] [--planted N]]
                                [--folder DIR] [--json OUT] [--plot OUT.png] [-- PYTEST OPTIONS]
    python -m benches.calibrate --baseline FILE --stored [--size 2% ...]

Every run is one of `pytest benches --benchmark-compare=FILE`, so suspects get their second look. In a planted run every
target, which is one case or several, gets one of the sizes, and in the next run the next one: as many runs as there are
sizes give each target each size once. Runs that are in the folder already are not made again, so that what was
interrupted goes on. Rates have 95 % intervals (Clopper and Pearson). Beside the gate's stand the rules of
`--benchmark-compare-fail` on the same files.

--stored measures nothing: each run of the baseline is judged against its others, as it is and with the times of a tenth
of its cases multiplied. There is no second look then, and of a stored run only medians are known.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benches.harness.planting import parse
from benches.judging.baselines import Results, Sample, Timed, load, of_runs
from benches.noise import band_of, kind_of
from benches.report.analysis import MALFORMED
from benches.report.refusals import in_words, refuse
from shapes.commands import Parser, not_writable, print_text, write_text

GATE = "the gate"
ALL = "all"
OTHERS = "other boards"
FEWEST_STORED = 3  # two are left to say how much times differ
DRAWS = 3  # of the cases that are slowed down, for each run and size
SIZES = ("1%", "2%", "3%", "5%")
RULES = {"median:2%": ("median", 0.02), "mean:5%": ("mean", 0.05)}  # of --benchmark-compare-fail, in common use
STYLES = {GATE: "ks-", "median:2%": "kv--", "mean:5%": "k^:"}  # in the picture, of all cases together

Pair = tuple[Results, Results]  # a baseline, and a run


@dataclass(frozen=True)
class Rate:
    """So many of so many, and the 95 % interval of the rate."""

    what: str
    by: str
    hits: int
    trials: int
    low: float
    high: float
    size: str = ""  # of what was planted

    def __str__(self) -> str:
        if not self.trials:
            return f"{self.what:44} {self.by:12} no runs"
        return (
            f"{self.what:44} {self.by:12} {self.hits:4} of {self.trials:4}  "
            f"{self.hits / self.trials:7.1%}  ({self.low:.1%} to {self.high:.1%})"
        )


def rate(what: str, by: str, hits: Iterable[bool], size: str = "") -> Rate:
    """A rate with its exact interval (Clopper and Pearson 1934, Biometrika 26)."""
    from scipy.stats import binomtest

    found = list(hits)
    if not found:
        return Rate(what, by, 0, 0, 0.0, 1.0, size)
    interval = binomtest(sum(found), len(found)).proportion_ci(0.95, method="exact")
    return Rate(what, by, sum(found), len(found), float(interval.low), float(interval.high), size)


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


def false_alarms(unchanged: Iterable[Pair]) -> list[Rate]:
    """Over runs in which nothing changed, each with its baseline: suites with an alarm, and cases."""
    found = [(alarms(before, run), _shared(before, run)) for before, run in unchanged]
    rates = []
    for by in (GATE, *RULES):
        rates.append(rate("unchanged suites with an alarm", by, [bool(called[by]) for called, _ in found]))
        rates.append(rate("unchanged cases", by, [case in called[by] for called, cases in found for case in cases]))
    return rates


def _shared(before: Results, run: Results) -> list[str]:
    return [case for case in run.timed if case in before.timed]


def detections(planted: Iterable[tuple[Results, Results, Mapping[str, str]]]) -> list[Rate]:
    """Over slowed runs, each with its baseline and the size of what was planted in its cases.

    Cases of each kind, and of all, that were called slower, by size.
    """
    hits: dict[tuple[str, str, str], list[bool]] = {}
    for before, run, sizes in planted:
        called = alarms(before, run)
        for case, size in sizes.items():
            for kind, by in itertools.product((_kind(before, run, case), ALL), called):
                hits.setdefault((kind, size, by), []).append(case in called[by])
    ordered = sorted(hits, key=lambda key: (key[0] == ALL, key[0], _slowdown(key[1])))  # rules stay as they came
    return [rate(kind, by, hits[kind, size, by], size) for kind, size, by in ordered]


def _slowdown(size: str) -> tuple[float, float, float]:
    """Of two sizes, the larger one's is larger; shares, device time and host time cannot be compared."""
    plant = parse(f"x={size}")
    return plant.share, plant.device_s, plant.host_s


def planted_in(before: Results, run: Results) -> dict[str, str]:
    """Each case that a plant names with the size of it; those that share a part with one are not among them."""
    plants = [parse(text) for text in run.raw["suite"]["planted"]]
    return {case: plant.size for plant in plants for case in _shared(before, run) if plant.pattern.search(case)}


def _kind(before: Results, run: Results, case: str) -> str:
    """What sort of case it is, how long a launch of it takes, and whether the baseline has runs enough of its board."""
    from benches.judging.comparison import FEWEST_OF_THE_BOARD

    timed = before.timed[case]
    kind = kind_of(case.split("/")[0], timed.axis("mode"))
    band = band_of(timed.benchmark["stats"]["median"], timed.extra.get("launches"))
    board = run.runs[0].uuid
    own = sum(before.runs[sample.run].uuid == board for sample in timed.samples)
    known = board or before.machine.device == "cpu"
    whose = "its board" if known and own >= FEWEST_OF_THE_BOARD else OTHERS
    return f"{kind} {timed.axis('regime')}, {band}, {whose}"


def plants(targets: Sequence[str], sizes: Sequence[str], number: int) -> list[str]:
    """What a run plants: in each target the size whose turn it is."""
    return [f"{target}={sizes[(place + number) % len(sizes)]}" for place, target in enumerate(targets)]


# --- runs of the baseline ----------------------------------------------------------------------------------------


def part_of(results: Results, chosen: Sequence[int]) -> Results:
    """Some of the runs that a baseline pools, by their indices, as if there were no others."""
    found = of_runs(results, chosen)
    timed = {case: _with_samples(one, one.samples) for case, one in found.timed.items()}
    return replace(found, timed=timed, selected=None, left_out=frozenset(), lost={}, not_run=0)


def _with_samples(found: Timed, samples: Sequence[Sample]) -> Timed:
    times = [sample.median_s for sample in samples]
    stats = {**found.benchmark["stats"], "median": median(times), "mean": fmean(times)}
    return replace(found, samples=tuple(samples), benchmark={**found.benchmark, "stats": stats})


def slowed(run: Results, cases: Collection[str], share: float) -> Results:
    """The run with the times of some cases that much longer."""
    timed = dict(run.timed)
    for case in cases:
        found = timed[case]
        longer = [replace(sample, median_s=sample.median_s * (1 + share)) for sample in found.samples]
        timed[case] = _with_samples(found, longer)
    return replace(run, timed=timed)


def of_stored(before: Results, sizes: Sequence[str]) -> tuple[list[Rate], list[Rate]]:
    """False alarms and detection among a baseline's own runs, each against the others. Seeded.

    Raises ValueError for fewer than FEWEST_STORED runs.
    """
    if len(before.runs) < FEWEST_STORED:
        raise ValueError(f"{before.name}: --stored needs {FEWEST_STORED} runs or more, and found {len(before.runs)}")
    shares = {size: parse(f"stored={size}").share for size in sizes}
    every = range(len(before.runs))
    pairs = [(part_of(before, [one for one in every if one != index]), part_of(before, [index])) for index in every]
    pairs = [(others, run) for others, run in pairs if _shared(others, run)]
    generator = random.Random(0)
    trials = []
    for (others, run), (size, share), _ in itertools.product(pairs, shares.items(), range(DRAWS)):
        cases = _shared(others, run)
        chosen = generator.sample(cases, -(-len(cases) // 10))
        trials.append((others, slowed(run, chosen, share), dict.fromkeys(chosen, size)))
    return false_alarms(pairs), detections(trials)


# --- new runs ----------------------------------------------------------------------------------------------------


def run_once(baseline: Path, file: Path, options: Sequence[str]) -> Results:
    """One process of the benchmarks, judged in it. Raises ValueError where it did not measure all of its cases."""
    command = [sys.executable, "-m", "pytest", "benches", "-q", "--benchmark-quiet", f"--benchmark-json={file}"]
    log = file.with_suffix(".log")
    with (
        log.open("w+", encoding="utf-8") as output,
        subprocess.Popen(
            [*command, f"--benchmark-compare={baseline}", *options], stdout=output, stderr=subprocess.STDOUT
        ) as child,
    ):
        try:
            code = child.wait()
        except KeyboardInterrupt:  # the run got it too, and saves what it has
            child.wait()
            raise
    if not file.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        why = [line for line in lines if "error" in line.lower()] or lines
        raise ValueError(f"a run left no results (exit code {code}, see {log}): {''.join(why[-1:])}")
    found = load(file)
    if found.not_run:
        raise ValueError(f"{file}: it was ended early, and {found.not_run} cases were not run; see {log}")
    return found


def _lines(rates: Sequence[Rate]) -> dict[str, dict[str, Rate]]:
    """Rates by size: of each kind of cases as the gate calls them, and of all as it and each rule do."""
    found: dict[str, dict[str, Rate]] = {}
    for one in rates:
        if one.what == ALL or one.by == GATE:
            found.setdefault(f"{ALL}, {one.by}" if one.what == ALL else one.what, {})[one.size] = one
    return dict(sorted(found.items(), key=lambda item: (item[0].startswith(ALL), item[0].endswith(OTHERS), item[0])))


def _sizes(rates: Sequence[Rate]) -> list[str]:
    """In the order of their slowdowns."""
    return sorted({one.size for one in rates}, key=_slowdown)


def table(rates: Sequence[Rate]) -> str:
    """Found of tried, by size: a line for each kind of cases, and for the gate and each rule over all of them."""
    sizes = _sizes(rates)
    lines = [f"{'found of tried, by size':50}" + "".join(f"{size:>12}" for size in sizes)]
    for name, line in _lines(rates).items():
        cells = [f"{line[size].hits}/{line[size].trials}" if size in line else "-" for size in sizes]
        lines.append(f"{name:50}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def plot(rates: Sequence[Rate], path: Path) -> None:
    """Detection by size, with its interval: the table's lines but those of other boards. Raises ImportError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = _sizes(rates)
    lines = {name: line for name, line in _lines(rates).items() if not name.endswith(OTHERS)}
    for number, (name, line) in enumerate(lines.items()):
        there = [line[size] for size in sizes if size in line]
        heights = [one.hits / one.trials for one in there]
        errors = [[height - one.low for height, one in zip(heights, there, strict=True)]]
        errors += [[one.high - height for height, one in zip(heights, there, strict=True)]]
        places = [sizes.index(size) + 0.3 * (number / len(lines) - 0.5) for size in sizes if size in line]
        style = STYLES.get(name.removeprefix(f"{ALL}, "), "o-")
        axes.errorbar(places, heights, yerr=errors, fmt=style, capsize=2, linewidth=0.8, markersize=4, label=name)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_xlabel("slower by")
    axes.set_ylabel("called slower")
    axes.set_ylim(-0.02, 1.02)
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    figure.savefig(path, dpi=150)


def _calibrate(options: argparse.Namespace) -> tuple[list[Rate], list[Rate]]:
    if options.unchanged < 0 or (options.planted or 0) < 0:
        raise ValueError("--unchanged and --planted: must not be negative")
    if not (options.stored or options.unchanged or options.target):
        raise ValueError("--unchanged 0 without a --target: nothing to do")
    _check_outputs(options)
    before = load(options.baseline)
    sizes = options.size or list(SIZES)
    for size in sizes:
        _check(size, options.stored)
    if options.stored:
        return of_stored(before, sizes)
    for target in options.target:
        pattern = parse(f"{target}={sizes[0]}").pattern
        if not any(pattern.search(case) for case in before.timed):  # said before the unchanged runs take minutes
            raise ValueError(f"--target {target!r}: matches no case of {options.baseline}")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="calibration-"))
    folder.mkdir(parents=True, exist_ok=True)
    rounds = 2 * len(sizes) if options.planted is None else options.planted
    unchanged = [_run(options, folder / f"unchanged{number}.json", []) for number in range(options.unchanged)]
    planted = [
        _run(options, folder / f"planted{number}.json", plants(options.target, sizes, number))
        for number in range(rounds if options.target else 0)
    ]
    slower = [(before, run, planted_in(before, run)) for run in planted]
    return false_alarms((before, run) for run in unchanged), detections(slower)


def _check_outputs(options: argparse.Namespace) -> None:
    """Before minutes go into runs. Raises ValueError, and ImportError where nothing can be drawn."""
    for path in (options.json, options.plot):
        if path and (why := not_writable(path)):
            raise ValueError(f"{path}: {why}")
    if options.plot:
        from matplotlib.figure import Figure

        if options.plot.suffix.removeprefix(".").lower() not in (known := Figure().canvas.get_supported_filetypes()):
            raise ValueError(f"{options.plot}: no format for pictures; there are {', '.join(sorted(known))}")


def _check(size: str, stored: bool) -> None:
    try:
        share = parse(f"x={size}").share
    except ValueError:
        raise ValueError(f"--size {size!r}: must be as 3%, +2us or host+50us, and at most 1000%") from None
    if stored and not share:
        raise ValueError(f"--size {size!r}: stored times can be made longer by a percentage only")


def _run(options: argparse.Namespace, file: Path, planted: Sequence[str]) -> Results:
    """A run of the folder's, made if it is not there. Raises ValueError for one that planted something else."""
    if not file.exists() or load(file).not_run:  # of one that was ended early
        file.unlink(missing_ok=True)
        print(f"{file}: {' '.join(planted) or 'nothing planted'}", file=sys.stderr)
        return run_once(options.baseline, file, [*options.pytest, *(f"--plant={text}" for text in planted)])
    found = load(file)
    if found.raw["suite"]["planted"] != list(planted):
        raise ValueError(f"{file} is there, with other plants: {' '.join(found.raw['suite']['planted']) or 'none'}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 4 after one line on stderr for what cannot be calibrated."""
    parser = Parser(prog="python -m benches.calibrate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--baseline", required=True, type=Path, metavar="FILE", help="what runs are judged against")
    parser.add_argument("--stored", action="store_true", help="judge the baseline's own runs, each against the others")
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
            runs = options.folder.glob("*[0-9].json") if options.folder else ()
            write_text(options.json, json.dumps(_as_dict(unchanged, found), indent=1) + "\n", [options.baseline, *runs])
        if options.plot and found:
            plot(found, options.plot)
    except (OSError, ValueError, *MALFORMED) as error:
        return refuse("benches.calibrate", in_words(error))
    except KeyboardInterrupt:
        print("benches.calibrate: ended; with --folder the same command goes on from here", file=sys.stderr)
        return 130
    except ImportError as error:
        return refuse("benches.calibrate", f"pip install scipy matplotlib ({error})")
    parts = ["\n".join(map(str, unchanged)), table(found) if found else ""]
    return print_text("\n\n".join(part for part in parts if part))


def _as_dict(unchanged: Sequence[Rate], found: Sequence[Rate]) -> dict[str, Any]:
    return {"unchanged": [asdict(one) for one in unchanged], "planted": [asdict(one) for one in found]}


if __name__ == "__main__":
    sys.exit(main())
