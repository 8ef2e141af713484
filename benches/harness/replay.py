"""Into pytest-benchmark through its public interface: rounds that were measured before are played back to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Replay:
    """A timer for `@pytest.mark.benchmark(timer=...)` that steps through given durations.

    pytest-benchmark reads its timer at the start and at the end of each round: every second reading is later than
    the one before by the next duration.
    """

    __name__ = "measured_rounds"  # how pytest-benchmark's files name the timer

    def __init__(self) -> None:
        self._durations: list[float] = []
        self._readings = 0

    def __call__(self) -> float:
        index, at_end = divmod(self._readings, 2)
        self._readings += 1
        return self._durations[index] if at_end else 0.0

    def play(self, benchmark: Any, durations_s: Sequence[float]) -> None:
        """Have the fixture `benchmark` record these rounds."""
        self._durations, self._readings = list(durations_s), 0
        benchmark.pedantic(lambda: None, rounds=len(self._durations), iterations=1)


REPLAY = Replay()
