"""`python -m benches.report RESULTS.json`: the tables, and plots, of a stored results file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benches.judging.baselines import read_json
from benches.report.analysis import MALFORMED, REGIMES, analyse
from benches.report.refusals import in_words, refuse
from benches.report.terminal import NO_RICH, render
from shapes.commands import Parser, print_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit code is 0, or 4 after one line on stderr for a file that cannot be used."""
    parser = Parser(prog="python -m benches.report", description="Tables of a stored results file.")
    parser.add_argument("results", type=Path, metavar="RESULTS.json", help="written with --benchmark-json")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw one figure per model")
    parser.add_argument("--regime", choices=REGIMES, help="show these times (default: back to back if there are any)")
    options = parser.parse_args(arguments)
    try:
        analysis = analyse(read_json(options.results), options.regime)
        text = render(analysis, color=bool(sys.stdout and sys.stdout.isatty()) and "NO_COLOR" not in os.environ)
    except (OSError, ValueError, *MALFORMED) as error:
        return refuse(options.results, in_words(error))
    if text.strip() == NO_RICH:
        return refuse(options.results, NO_RICH)
    if code := print_text(text.rstrip("\n")):
        return code
    if options.plot:
        try:
            from benches.report.plots import plot

            for path in plot(analysis, options.plot):
                print(path)
        except (ImportError, OSError, ValueError) as error:
            return refuse(options.plot, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
