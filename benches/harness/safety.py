"""Nothing that was measured is lost: outputs are tried before the run, and whatever ends it early lets it save."""

from __future__ import annotations

import json
import math
import os
import signal
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has one of them


def check_options(config: pytest.Config) -> None:
    """Raise pytest.UsageError, in one line, for options of pytest-benchmark that would fail after the measuring."""
    seconds = float(config.getoption("benchmark_max_time"))
    if not (math.isfinite(seconds) and seconds >= 0):
        raise pytest.UsageError(f"--benchmark-max-time={seconds}: must be a number of seconds, 0 or more")
    if (path := config.getoption("benchmark_json")) and (reason := _not_writable(Path(path))):
        raise pytest.UsageError(f"--benchmark-json={path}: {reason}")


def _not_writable(path: Path) -> str | None:
    if path.is_dir():
        return "is a folder"
    if not path.absolute().parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        return "cannot be written"
    return None


def end_in_order() -> None:
    """Have SIGTERM (a batch system, `timeout`) and SIGHUP (a lost terminal) end the run as Ctrl-C does."""
    for number in ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    for ending in ENDING:
        signal.signal(ending, signal.SIG_DFL)  # a second one ends the process at once
    raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")


def save_elsewhere(results: dict[str, Any]) -> Path:
    """Write a results file to the temporary folder. Raises OSError where that cannot be written either."""
    stamp = datetime.now(timezone.utc)
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"results-{stamp:%Y%m%d-%H%M%S}-", suffix=".json", delete=False
    ) as file:
        json.dump({**results, "commit_info": {}, "datetime": stamp.isoformat(), "version": ""}, file)
    return Path(file.name)
