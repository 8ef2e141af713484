"""A round of work as named segments: what the backends build and the stopwatch times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Segment:
    """A piece of a round with a time of its own. `run` enqueues its work and does not wait for it."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True)
class Program:
    """Segments that make up one round, in order. `reset` runs on the host before each round, outside all times."""

    segments: Sequence[Segment]
    reset: Callable[[], object] = _nothing

    def run_once(self) -> None:
        """One untimed round."""
        self.reset()
        for segment in self.segments:
            segment.run()
