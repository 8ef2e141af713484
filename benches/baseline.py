"""Pool runs of fresh processes into the baseline of their machine, and show what that changes.

    python -m benches.baseline RUN.json [RUN2.json ...] [--add | --renew] [--replace] [-o FILE]

The runs are judged against the stored baseline, and what differs is shown; where there is one, be it of another version
of TE, nothing is written without --replace. With --add the runs are added to it, as those of another day or of another
board of the same model are. With --renew they are too, and the cases that they have forget all earlier runs: where
these cases were meant to change, or are measured in another way now. FILE is by default the machine's and TE's:
benches/baselines/<gpu>/te-<version>.json, or a file under .benchmarks/ for a CPU. Imports neither torch nor pytest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.judging.baselines import default_file, pool, read, read_json, stored
from benches.report.analysis import MALFORMED
from benches.report.refusals import in_words, refuse
from benches.report.verdicts import counted
from shapes.commands import Parser, print_text, write_text

ENOUGH_RUNS = 5  # fewer say little of how much a case differs from run to run


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 4 after one line on stderr for runs that make no baseline."""
    parser = Parser(prog="python -m benches.baseline", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json", help="written with --benchmark-json")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--add", action="store_true", help="add the runs to the stored baseline")
    how.add_argument("--renew", action="store_true", help="so too, but their cases forget all earlier runs")
    parser.add_argument("--replace", action="store_true", help="write the baseline; otherwise only show what changes")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: the machine's own place")
    options = parser.parse_args(arguments)
    try:
        lines = _pool(options)
    except (OSError, ValueError, *MALFORMED) as error:
        return refuse("benches.baseline", in_words(error))
    except ImportError:
        return refuse("benches.baseline", "`pip install scipy` lets the gate compute")
    return print_text("\n".join(lines))


def _pool(options: argparse.Namespace) -> list[str]:
    runs = [read_json(path) for path in options.runs]
    names = [str(path) for path in options.runs]
    read(runs[0], names[0])  # it says whose baseline it is
    file = options.output or default_file(runs[0])
    onto = options.add or options.renew
    if onto and not file.exists():
        raise ValueError(f"--{'renew' if options.renew else 'add'}: there is no baseline {file}")
    known = file if options.output or file.exists() else stored(runs[0]["machine_info"])
    old = read_json(known) if known and known.exists() else None
    pooled = pool(runs, old if onto else None, options.renew, names)
    lines = [] if old is None else [_compared(old, pool(runs), str(known))]
    if gone := _cases(old) - _cases(pooled):
        lines.append(f"not in the new baseline, so never judged again: {len(gone)} cases, {min(gone)}, ...")
    count = len(pooled["suite"]["runs"])
    if count < ENOUGH_RUNS:
        lines.append(f"{counted(count, 'run')}: {ENOUGH_RUNS} or more say how much a case differs from run to run")
    if options.replace or old is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(slim(pooled), indent=1, allow_nan=False) + "\n", options.runs)
        lines.append(f"{file}: {len(pooled['benchmarks'])} cases of {counted(count, 'run')}")
    else:
        lines.append(f"{file} {'is as it was' if file.exists() else 'is not there'}; --replace writes the new one")
    return lines


def _compared(old: Any, new: Any, name: str) -> str:
    """The gate's report of the new runs against a stored baseline, or why there is none."""
    from benches.judging.judge import judge
    from benches.report.verdicts import render

    try:
        return render(judge(read(old, name), read(new, "the new runs")))
    except ValueError as error:
        return f"not comparable with the stored one: {error}"


def _cases(results: Any) -> set[str]:
    """Of a file of whatever schema; somebody's own benchmark is no case."""
    extras = [one.get("extra_info") or {} for one in results["benchmarks"]] if results else []
    return {extra["case"] for extra in extras if "case" in extra}


def slim(results: Any) -> Any:
    """Without what nobody compares: all but a few facts of the CPU, and digits beyond the sixth."""
    known = ("arch", "bits", "count", "brand_raw", "vendor_id_raw")
    cpu = results["machine_info"].get("cpu") or {}
    machine = results["machine_info"] | {"cpu": {name: cpu[name] for name in known if name in cpu}}
    return _rounded(results | {"machine_info": machine})


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < 1e6 else round(value, 3)
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    sys.exit(main())
