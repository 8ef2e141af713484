"""Where the suite keeps its state in pytest's config."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benches.harness.journal import Journal
from benches.harness.planting import Plant
from benches.judging.gatekeeper import Gatekeeper
from shapes.selection import Selection

SELECTION = pytest.StashKey[Selection]()
PLANTS = pytest.StashKey[list[Plant]]()
RESULTS = pytest.StashKey[dict[str, Any]]()  # what a results file is made of, as it comes
GATE = pytest.StashKey[Gatekeeper]()
JOURNAL = pytest.StashKey[Journal]()  # only of a run that is to measure something


def new_results() -> dict[str, Any]:
    """What a run begins with."""
    return {
        "benchmarks": [],
        "not_measured": [],
        "evidence": {},
        "controls": [],
        "selected": [],  # ids of the cases that are to have a time
        "spent_s": {},
        "began_s": time.perf_counter(),
        "saved": False,
    }


def until_now(config: pytest.Config) -> dict[str, Any]:
    """RESULTS, where `spent_s` also has the seconds of the whole run until now, as `all`."""
    results = config.stash[RESULTS]
    return {**results, "spent_s": {**results["spent_s"], "all": time.perf_counter() - results["began_s"]}}


@contextmanager
def spending(config: pytest.Config, what: str) -> Iterator[None]:
    """Count the seconds in here among what the run was spent on."""
    start = time.perf_counter()
    try:
        yield
    finally:
        spent = config.stash[RESULTS]["spent_s"]
        spent[what] = spent.get(what, 0.0) + time.perf_counter() - start
