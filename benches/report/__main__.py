"""`python -m benches.report RESULTS.json [--plot OUT.png]`: the tables, and plots, of a stored results file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benches.report.analysis import analyse
from benches.report.terminal import render

USAGE_ERROR = 4  # pytest's exit code for one


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit code is 0, or 4 after one line on stderr for a file that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benches.report", description="Tables of a stored results file.")
    parser.add_argument("results", type=Path, metavar="RESULTS.json", help="written with --benchmark-json")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw one figure per model")
    options = parser.parse_args(arguments)
    try:
        analysis = analyse(json.loads(options.results.read_text(encoding="utf-8")))
        print(render(analysis, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ), end="")
    except (OSError, ValueError) as error:
        return _refuse(options.results, error)
    if options.plot:
        try:
            from benches.report.plots import plot

            for path in plot(analysis, options.plot):
                print(path)
        except (ImportError, OSError, ValueError) as error:
            return _refuse(options.plot, error)
    return 0


def _refuse(path: Path, error: Exception) -> int:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    print(f"{path}: {reason}", file=sys.stderr)
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
