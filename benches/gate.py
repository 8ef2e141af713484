"""Is anything slower than the stored baseline, how sure is that, and what changed?

    python -m benches.gate NOW.json [NOW2.json ...] [--baseline FILE] [--json OUT] [--strict] [--noise NOISE.json]

Several files are runs of fresh processes, judged together. Without --baseline it is the stored one of the machine that
measured. Exit codes: 0; 1 where a case is SLOWER or MISSING, and with --strict also for UNRESOLVED, CHANGED and cases
without a time; 4 where files cannot be compared. `benches.judging.judge` says what verdicts mean. Imports neither
torch nor pytest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benches.judging.baselines import Results, folder, load, read_json, stored, together
from benches.report.analysis import MALFORMED
from benches.report.refusals import in_words, refuse
from benches.report.verdicts import render
from shapes.commands import Parser, print_text, write_text

if TYPE_CHECKING:
    from benches.judging.judge import Outcome
    from benches.judging.moderation import Scatter

NO_SCIPY = "`pip install scipy` lets the gate compute"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, after one line on stderr for files that cannot be compared."""
    parser = Parser(prog="python -m benches.gate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("now", nargs="+", type=Path, metavar="NOW.json", help="written with --benchmark-json")
    parser.add_argument(
        "--baseline", type=Path, metavar="FILE", help="or another run; default: the machine's stored one"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write every verdict with its numbers")
    parser.add_argument("--strict", action="store_true", help="fail UNRESOLVED, CHANGED and skips as well")
    parser.add_argument("--noise", type=Path, metavar="NOISE.json", help="written by python -m benches.noise --json")
    options = parser.parse_args(arguments)
    try:
        now = together([load(path) for path in options.now])
        baseline = options.baseline or _stored(now)
        outcome = _judged(load(baseline), now, options.noise)
        text = render(outcome, options.strict)
        if options.json:
            found = json.dumps(as_dict(outcome, options.strict), indent=1, allow_nan=False) + "\n"
            read = [path for path in (*options.now, baseline, options.noise) if path]
            write_text(options.json, found, read)
    except (OSError, ValueError, *MALFORMED) as error:
        return refuse("benches.gate", in_words(error))
    except ImportError as error:
        return refuse("benches.gate", f"{error}; {NO_SCIPY}")
    return print_text(text) or outcome.exit_code(options.strict)


def _stored(now: Results) -> Path:
    machine_info = now.raw["machine_info"]
    if found := stored(machine_info):
        return found
    raise ValueError(f"no baseline of {now.machine} in {folder(machine_info)}: name one with --baseline")


def _judged(before: Results, now: Results, noise: Path | None) -> Outcome:
    from benches.judging.judge import judge

    try:
        return judge(before, now, _learned(noise) if noise else None)
    except MALFORMED as error:
        raise ValueError(f"{now.name}, {before.name}: not usable ({type(error).__name__}: {error})") from None


def _learned(noise: Path) -> Scatter | None:
    from benches.judging.judge import scatter

    spreads = read_json(noise)
    try:
        if not isinstance(spreads, list):
            raise ValueError("no list")
        return scatter(spreads)
    except (ValueError, *MALFORMED) as error:
        raise ValueError(f"{noise}: not what python -m benches.noise --json writes ({error})") from None


def as_dict(outcome: Outcome, strict: bool = False) -> dict[str, Any]:
    """An outcome for JSON: counts, exit code, controls, notes, and every finding with its numbers."""
    found = [finding.time.detectable for finding in outcome.judged if finding.time]
    return {
        "exit_code": outcome.exit_code(strict),
        "strict": strict,
        "counts": outcome.counts,
        "detectable": {"median": median(found), "largest": max(found)} if found else None,
        **asdict(outcome),
    }


if __name__ == "__main__":
    sys.exit(main())
