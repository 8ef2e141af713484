"""Where the suite keeps its state in pytest's config."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shapes.selection import Selection

SELECTION = pytest.StashKey[Selection]()
RESULTS = pytest.StashKey[dict[str, Any]]()  # what a results file is made of, as it comes


def new_results() -> dict[str, Any]:
    """What a run begins with."""
    return {
        "benchmarks": [],
        "not_measured": [],
        "evidence": {},
        "controls": [],
        "selected": 0,
        "spent_s": {},
        "began_s": time.perf_counter(),
    }


@contextmanager
def spending(config: pytest.Config, what: str) -> Iterator[None]:
    """Count the seconds in here among what the run was spent on."""
    start = time.perf_counter()
    try:
        yield
    finally:
        spent = config.stash[RESULTS]["spent_s"]
        spent[what] = spent.get(what, 0.0) + time.perf_counter() - start
