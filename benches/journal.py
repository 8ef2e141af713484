"""A results file of what a run left in its journal.

    python -m benches.journal JOURNAL.jsonl -o RESULTS.json

For a run that was killed, or whose results were not saved. Imports neither torch nor pytest.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benches.harness.journal import Recovered, read
from benches.judging import baselines
from benches.report.analysis import MALFORMED, analyse
from benches.report.refusals import refuse
from shapes.commands import Parser, print_text, write_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; the exit code is 0, or 4 after one line on stderr for files that cannot be used."""
    parser = Parser(prog="python -m benches.journal", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("journal", type=Path, metavar="JOURNAL.jsonl", help="in .benchmarks, or where --journal said")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="RESULTS.json", help="the file to write")
    options = parser.parse_args(arguments)
    try:
        recovered = read(_text(options.journal))
        analyse(recovered.results)
        baselines.read(recovered.results, "it")  # what the gate would refuse is no results file
    except (OSError, ValueError) as error:
        return refuse(options.journal, error)
    except MALFORMED as error:
        return refuse(options.journal, f"no usable journal ({type(error).__name__}: {error})")
    try:
        write_text(options.output, json.dumps(recovered.results, indent=1) + "\n", [options.journal])
    except (OSError, ValueError) as error:
        return refuse(options.output, error)
    return print_text(f"{options.output}: {_said(recovered)}")


def _text(path: Path) -> str:
    """A journal's text, of which the last line may be cut off within a character. Raises ValueError for no text."""
    if path.is_char_device():  # some have no end
        raise ValueError("is not a file")
    whole, newline, rest = path.read_bytes().rpartition(b"\n")
    try:
        return (whole + newline).decode() + rest.decode(errors="replace")
    except UnicodeDecodeError:
        raise ValueError("is not text, or damaged") from None


def _said(recovered: Recovered) -> str:
    suite = recovered.results["suite"]
    outcomes = Counter(str(lost["outcome"]) for lost in suite["not_measured"])
    counts = {"measured": len(recovered.results["benchmarks"]), **outcomes, "not run": suite["not_run"]}
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    if not recovered.ended:
        said += "; the run was killed"
    return said + (f"; line {recovered.torn}, not finished, is left out" if recovered.torn else "")


if __name__ == "__main__":
    sys.exit(main())
