"""Signals end a run in order, and are as they were when it is over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from benches.harness.safety import ENDING, end_in_order, undisturbed


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Each test begins with a process's own handlers, and leaves pytest's as they are."""
    kept = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_each_ends_the_run_as_ctrl_c_does() -> None:
    """A KeyboardInterrupt that says which it was; a second one does nothing."""
    end_in_order()
    with pytest.raises(KeyboardInterrupt, match="ended by SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    with undisturbed():
        os.kill(os.getpid(), signal.SIGINT)


def test_after_the_saving_they_do_what_they_did_before_the_run() -> None:
    """Also where the run was interrupted."""
    before = {number: signal.getsignal(number) for number in ENDING}
    end_in_order()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    with undisturbed():
        pass
    assert {number: signal.getsignal(number) for number in ENDING} == before


def test_what_others_decided_stays() -> None:
    """nohup has SIGHUP ignored, and a program around pytest may handle SIGTERM itself."""
    others = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, others)
    end_in_order()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    with undisturbed():
        pass
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is others
