"""Nothing that was measured is lost: outputs are tried before the run, and whatever ends it early lets it save."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest

from shapes.commands import not_writable

# What ends a run: Ctrl-C, a batch system or `timeout`, a lost terminal. Windows lacks the last.
ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)
_replaced: dict[int, Any] = {}  # what end_in_order put its own handler in the place of


def check_options(config: pytest.Config) -> None:
    """Raise pytest.UsageError, in one line, for options that would fail, or lose something, after the measuring."""
    seconds = Decimal(config.getoption("benchmark_max_time"))
    if not seconds.is_finite() or seconds < 0:
        raise pytest.UsageError(f"--benchmark-max-time={seconds}: must be a number of seconds, 0 or more")
    if config.getoption("benchmark_histogram") and not importlib.util.find_spec("pygal"):
        raise pytest.UsageError("--benchmark-histogram needs pygal: pip install pytest-benchmark[histogram]")
    path = config.getoption("benchmark_json")  # before pytest-benchmark 5.3 an open file: then it can be written
    if isinstance(path, Path) and (reason := not_writable(path)):
        raise pytest.UsageError(f"--benchmark-json={path}: {reason}")
    _check_storage(config)
    _check_gate(config)
    journal = config.getoption("journal")
    if journal and (reason := not_writable(journal) or _holds_something(journal)):
        raise pytest.UsageError(f"--journal={journal}: {reason}")
    if journal and isinstance(path, Path) and journal.absolute() == path.absolute():
        raise pytest.UsageError(f"--journal={journal}: --benchmark-json writes to the same file")


def measures(config: pytest.Config) -> bool:
    """Whether cases are to have times: pytest-benchmark measures nothing where it is disabled or xdist is at work."""
    option = config.getoption
    disabled = option("benchmark_disable") and not option("benchmark_enable")
    return not (disabled or option("dist", "no") != "no" or "PYTEST_XDIST_WORKER" in os.environ)


def _check_gate(config: pytest.Config) -> None:
    """A gate that judges nothing must not look as if everything passed it."""
    option = config.getoption
    for name in ("compare", "json", "save"):
        if option(f"benchmark_{name}") and not measures(config) and "PYTEST_XDIST_WORKER" not in os.environ:
            raise pytest.UsageError(f"--benchmark-{name}: nothing is measured with --benchmark-disable or xdist's -n")
    for name, flag in (("gate_strict", "--gate-strict"), ("benchmark_compare_fail", "--benchmark-compare-fail")):
        if option(name) and not option("benchmark_compare"):
            raise pytest.UsageError(f"{flag}: needs --benchmark-compare, which says what to judge against")


def _check_storage(config: pytest.Config) -> None:
    """Where pytest-benchmark saves its runs must be a folder, also if nobody has saved any."""
    if (storage := file_storage(config)) is None:
        return
    saves = config.getoption("benchmark_save") or config.getoption("benchmark_autosave")
    if saves and not (storage.path.is_dir() and os.access(storage.path, os.W_OK)):
        raise pytest.UsageError(f"--benchmark-storage={storage.path}: is no folder that can be written to")


def file_storage(config: pytest.Config) -> Any:
    """Where pytest-benchmark finds its saved runs; None where that is Elasticsearch.

    Raises pytest.UsageError for what is no storage.
    """
    from pytest_benchmark.utils import get_machine_id, load_storage

    place = config.getoption("benchmark_storage")
    if place.startswith("elasticsearch+"):
        return None
    try:
        return load_storage(place, logger=None, default_machine_id=get_machine_id(), netrc=None)
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"--benchmark-storage={place}: {error}") from None


def _holds_something(path: Path) -> str | None:
    """A run that is begun again must not overwrite what the one that was killed has left."""
    return "is not empty; a journal overwrites nothing" if path.is_file() and path.stat().st_size else None


def end_in_order() -> None:
    """Have whatever ends a run do so as Ctrl-C does, once: what comes after it cannot stop the saving.

    As Ctrl-C, it takes effect when the call into CUDA at hand returns; a GPU that hangs is left by SIGKILL.
    """
    for number in ENDING:
        if signal.getsignal(number) in _DEFAULT:  # not what nohup ignores, or a program around pytest handles
            _replaced[number] = signal.signal(number, _interrupt)


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Nothing but SIGKILL and SIGQUIT ends the process in here; afterwards signals do what they did before the run."""
    if threading.current_thread() is not threading.main_thread():  # only there signals can be set
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING} | _replaced
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _replaced.clear()
