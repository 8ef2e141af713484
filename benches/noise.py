"""How much times differ from one fresh process to the next: the noise that a comparison has to rise above.

    python -m benches.noise RUN1.json RUN2.json ... [--json OUT.json]

Each file is a run of its own process (`nox -s noise` makes them with the same selection). A case's spread is the
standard deviation of its medians from run to run on one board, relative to their mean; what boards differ by is left
out. Beside it stands how much of that the rounds within a run explain: to measure longer helps against nothing else.
Imports neither torch nor pytest.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benches.judging.baselines import read_json
from benches.report.analysis import MALFORMED, Measurement, timed_cases
from benches.report.refusals import in_words, refuse
from shapes.commands import Parser, print_text, write_text

FEWEST_RUNS = 2
FEW = 3  # cases that a line names
# Lower ends, in seconds per launch: what processes and boards differ by depends on how long kernels are, not on how
# many there are. Below 15 us a time is mostly the GPU's own start and end of a kernel.
BANDS = {"100 us and more": 100e-6, "15 to 100 us": 15e-6, "below 15 us": 0.0}


def band_of(time_s: float, launches: int | None) -> str:
    """Which of BANDS the time per launch is in; where launches are not known, as on a CPU, the whole time."""
    return next(name for name, least_s in BANDS.items() if time_s / (launches or 1) >= least_s)


def kind_of(kind: str, mode: str | None) -> str:
    """Cases of which kind differ alike from run to run: quantizations wait for memory, GEMMs do not."""
    return mode if mode == "quantization" else kind


@dataclass(frozen=True)
class Spread:
    """A case's times over several processes: seconds of each run's median, and which board the run was on."""

    case: str
    kind: str
    regime: str
    runs_s: tuple[float, ...]
    boards: tuple[str, ...] = ()  # none: all on one
    launches: int | None = None
    rounds: float | None = None  # deviation of a median, relative, as the run's own rounds tell it

    @property
    def mean_s(self) -> float:
        """Mean of the runs' medians, in seconds."""
        return fmean(self.runs_s)

    @property
    def relative(self) -> float:
        """Standard deviation of the runs' medians over their mean, board by board, pooled."""
        squares = sum((time_s / fmean(own) - 1) ** 2 for own in self.by_board() for time_s in own)
        return math.sqrt(squares / self.df)

    @property
    def df(self) -> int:
        """Degrees of freedom of that: runs less boards."""
        return len(self.runs_s) - len(self.by_board())

    def by_board(self) -> list[list[float]]:
        """The runs' medians, board by board."""
        groups: dict[str, list[float]] = {}
        for time_s, board in zip(self.runs_s, self.boards or [""] * len(self.runs_s), strict=True):
            groups.setdefault(board, []).append(time_s)
        return list(groups.values())

    @property
    def band(self) -> str:
        """Which of BANDS the time per launch is in."""
        return band_of(self.mean_s, self.launches)


def spreads(runs: Sequence[Mapping[str, Any]]) -> list[Spread]:
    """The spread of each case that has a time in every run, in the first run's order.

    Raises ValueError for fewer than two runs on every board, for a file that is not this suite's, and where no case is
    in all of them.
    """
    if len(runs) < FEWEST_RUNS:
        raise ValueError(f"{len(runs)} run has no spread: at least {FEWEST_RUNS} are needed")
    tables = [{found.case: found for found in timed_cases(run)} for run in runs]
    _check_apart(runs)
    boards = tuple(str(((run.get("machine_info") or {}).get("gpu") or {}).get("uuid")) for run in runs)
    if len(set(boards)) == len(runs):
        raise ValueError(f"{len(runs)} runs of as many different GPUs: what these differ by is not noise")
    shared = [case for case in tables[0] if all(case in table for table in tables)]
    if not shared:
        raise ValueError("no case has a time in every run")
    return [
        Spread(
            case.id,
            kind_of(case.kind, getattr(case, "mode", None)),
            case.regime,
            tuple(table[case].median_s for table in tables),
            boards,
            tables[0][case].proof.launches,
            _of_rounds([table[case] for table in tables]),
        )
        for case in shared
    ]


def _of_rounds(measured: Sequence[Measurement[Any]]) -> float | None:
    """From the 95 % intervals of medians, which are 1.96 deviations to each side; root mean square over runs."""
    halves = [one.uncertainty for one in measured if one.uncertainty is not None]
    return math.sqrt(fmean(half**2 for half in halves)) / 1.96 if len(halves) == len(measured) else None


def _check_apart(runs: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for runs that are not each of a process of its own."""
    if any((run.get("suite") or {}).get("runs") for run in runs):
        raise ValueError("a baseline pools runs: give the runs themselves")
    begun = [(run.get("datetime"), str(run.get("machine_info"))) for run in runs if run.get("datetime")]
    if len(set(begun)) < len(begun):
        raise ValueError("the same run is given twice")


def differing(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What should be the same in every run and is not: launches, kernels, peak and saved bytes -> the cases.

    Another kernel or another launch explains a spread; memory that differs cannot be compared exactly.
    """
    tables = [_proofs(run) for run in runs]
    found: dict[str, list[str]] = {}
    for case, proof in tables[0].items():
        others = [table[case] for table in tables[1:] if case in table]
        for name, value in proof.items():
            if any(other[name] != value for other in others):
                found.setdefault(name, []).append(case)
    return found


def _proofs(run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    evidence = run["suite"].get("evidence") or {}
    proofs = {}
    for benchmark in run["benchmarks"]:
        extra = benchmark.get("extra_info") or {}
        if "case" not in extra:
            continue
        segments = (evidence.get(extra.get("evidence")) or {}).get("segments") or {}
        kernels = [
            (use["name"], use["count"])
            for name in extra.get("segments") or ()
            for use in (segments.get(name) or {}).get("kernels") or ()
        ]
        exact = {name: extra.get(name) for name in ("launches", "peak_bytes", "saved_bytes")}
        proofs[extra["case"]] = exact | {"kernels": sorted(kernels)}
    return proofs


def table(found: Sequence[Spread]) -> str:
    """One line per kind, regime and band: how many cases, their median spread, and the largest with its case.

    `rounds` is the median of what the rounds explain.
    """
    lines = [f"{'kind':12} {'regime':10} {'per launch':16} {'cases':>5} {'rounds':>8} {'median':>8} {'largest':>8}  of"]
    groups: dict[tuple[str, str, str], list[Spread]] = {}
    for spread in found:
        groups.setdefault((spread.kind, spread.regime, spread.band), []).append(spread)
    for (kind, regime, band), members in groups.items():
        middle, worst = median(one.relative for one in members), max(members, key=lambda one: one.relative)
        known = [one.rounds for one in members if one.rounds is not None]
        of_rounds = f"{median(known):.2%}" if known else "-"
        figures = f"{of_rounds:>8} {middle:8.2%} {worst.relative:8.2%}"
        lines.append(f"{kind:12} {regime:10} {band:16} {len(members):5} {figures}  {worst.case}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 4 after one line on stderr for files that cannot be used."""
    parser = Parser(prog="python -m benches.noise", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json", help="written with --benchmark-json")
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="also write every case's medians and spread")
    options = parser.parse_args(arguments)
    try:
        runs = [read_json(path) for path in options.runs]
        found, unequal = spreads(runs), differing(runs)
        if options.json:
            text = json.dumps([asdict(one) | {"relative": one.relative} for one in found], indent=1)
            write_text(options.json, text + "\n", options.runs)
    except (OSError, ValueError, *MALFORMED) as error:
        return refuse("benches.noise", in_words(error))
    boards = len(found[0].by_board())
    where = f" on {boards} boards" if boards > 1 else ""
    within = ", within a board" if boards > 1 else ""
    heading = (
        f"{len(runs)} processes{where}; spread: standard deviation of a case's medians{within}, relative to their mean"
        "\nrounds: how much of it the rounds within a run explain"
    )
    lines = [heading, table(found)]
    if left_out := {one.case.id for run in runs for one in timed_cases(run)} - {one.case for one in found}:
        lines.append(f"not in all runs, so left out: {len(left_out)} cases, {min(left_out)}, ...")
    lines += [f"{name} differ from run to run in {len(cases)} cases: {_few(cases)}" for name, cases in unequal.items()]
    return print_text("\n".join(lines if unequal else [*lines, "launches, kernels and memory are equal in all runs"]))


def _few(cases: Sequence[str]) -> str:
    return ", ".join(cases[:FEW]) + (", ..." if len(cases) > FEW else "")


if __name__ == "__main__":
    sys.exit(main())
