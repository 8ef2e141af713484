"""A results file of what a run left in its journal.

    python -m benches.journal JOURNAL.jsonl -o RESULTS.json

For a run that was killed, or whose results were not saved. Imports neither torch nor pytest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benches.harness.journal import Recovered, read
from benches.report.analysis import MALFORMED, analyse
from benches.report.refusals import refuse
from shapes.printing import print_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; the exit code is 0, or 4 after one line on stderr for files that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benches.journal", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("journal", type=Path, metavar="JOURNAL.jsonl", help="in .benchmarks, or where --journal said")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="RESULTS.json", help="the file to write")
    options = parser.parse_args(arguments)
    try:
        recovered = read(options.journal.read_text(encoding="utf-8", errors="replace"))
        analyse(recovered.results)
    except (OSError, ValueError) as error:
        return refuse(options.journal, error)
    except MALFORMED as error:
        return refuse(options.journal, f"no usable journal ({type(error).__name__}: {error})")
    try:
        if options.output.exists() and options.output.samefile(options.journal):
            raise ValueError("is the journal itself")
        options.output.write_text(json.dumps(recovered.results, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        return refuse(options.output, error)
    return print_text(f"{options.output}: {_said(recovered)}")


def _said(recovered: Recovered) -> str:
    suite = recovered.results["suite"]
    outcomes = Counter(lost["outcome"] for lost in suite["not_measured"])
    counts = {"measured": len(recovered.results["benchmarks"]), **outcomes, "not run": suite["not_run"]}
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    if not recovered.ended:
        said += "; the run was killed"
    return said + (f"; line {recovered.torn}, not finished, is left out" if recovered.torn else "")


if __name__ == "__main__":
    sys.exit(main())
