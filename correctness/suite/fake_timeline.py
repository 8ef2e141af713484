"""A simulated device with a stream, in the place of a GPU: its clock is exact and it costs no time.

All times are multiples of TICK, a power of two, so that their sums and differences are exact in floating point and a
test can ask for equality.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benches.harness.timeline import TraceError
from shapes.program import Program, Segment

TICK = 2.0**-20  # seconds: about a microsecond
MS = 1024 * TICK  # about a millisecond


def whole_ticks(seconds: float) -> float:
    """The duration, rounded up to ticks."""
    return math.ceil(seconds / TICK) * TICK


@dataclass(frozen=True)
class Throttle:
    """Work takes `slowdown` times as long once the device was busy for more than `share` of the last `window_s`.

    Spinning does not count as busy: it keeps the queue occupied and draws next to no power.
    """

    share: float = 0.6
    window_s: float = 50 * MS
    slowdown: float = 1.0 + 1.0 / 16


@dataclass(frozen=True)
class FakeMark:
    """A point of the stream, reached at `at_s` on the clock that host and device share."""

    timeline: FakeTimeline
    at_s: float

    def reached(self) -> bool:
        return self.timeline.host_s >= self.at_s

    def wait(self) -> None:
        self.timeline.host_s = max(self.timeline.host_s, self.at_s)

    def seconds_until(self, later: FakeMark) -> float:
        assert later.reached(), "a mark was read before the device came to it"
        return later.at_s - self.at_s


@dataclass
class FakeTimeline:
    """One host thread and one stream. Work starts when the work before it ends, but not before it is enqueued.

    `call_s` is the host time of a mark, a spin or a flush. At most `queue_depth` of them and of pieces of work wait on
    the stream; enqueuing one more blocks the host, as a driver does. `noise` is the relative standard deviation of
    device times, drawn with `seed`. A piece of work takes `cold` times as long right after a flush.
    """

    call_s: float = 0.0
    throttle: Throttle | None = None
    queue_depth: int = 1_000_000
    noise: float = 0.0
    seed: int = 0
    cold: float = 1.0
    flush_s: float = 0.0
    waking_s: float = 0.0  # work takes `waking` times as long before this time
    waking: float = 1.25
    spin_s: float = 0.0  # what a spin takes beyond what it is asked for

    awake_s: float = -math.inf
    host_s: float = 0.0
    end_s: float = 0.0  # when the device will have done everything
    log: list[str] = field(default_factory=list)
    glances: int = 0
    throttle_reasons: list[str | None] = field(default_factory=list)  # of one measurement after the other
    allocated: int = 0
    peak: int = 0
    launched: list[tuple[str, float]] = field(default_factory=list)
    blind: str = ""  # why a trace cannot be had
    _busy: deque[tuple[float, float]] = field(default_factory=deque)
    _pending: list[float] = field(default_factory=list)
    _is_cold: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    # What the stopwatch uses.

    def now(self) -> float:
        return self.host_s

    def mark(self) -> FakeMark:
        self._enqueue(self.call_s, 0.0)
        self.log.append("mark")
        return FakeMark(self, self.end_s)

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.end_s)
        self._pending.clear()

    def spin(self, seconds: float) -> None:
        self._enqueue(self.call_s, whole_ticks(seconds) + self.spin_s)
        self.log.append("spin")

    def rest(self, seconds: float) -> None:
        self.host_s += whole_ticks(seconds)
        self.log.append("rest")

    def flush_cache(self) -> None:
        self._enqueue(self.call_s, self.flush_s)
        self._is_cold = True
        self.log.append("flush")

    # What the evidence uses.

    def glance(self) -> None:
        self.glances += 1

    def begin_watch(self) -> None:
        self.glances = 0

    def state(self) -> dict[str, Any]:
        return {"samples": self.glances}

    def throttled(self, round_s: float) -> str | None:
        return self.throttle_reasons.pop(0) if self.throttle_reasons else None

    def allocated_bytes(self) -> int:
        return self.allocated

    def peak_bytes(self) -> int:
        return self.peak

    def forget_peak(self) -> None:
        self.peak = self.allocated

    def trace(self, actions: Sequence[Callable[[], object]]) -> list[list[tuple[str, float]]]:
        traces = []
        for action in actions:
            self.launched.clear()
            action()
            self.synchronize()
            traces.append(list(self.launched))
        if self.blind:
            raise TraceError(self.blind)
        return traces

    # What programs use.

    def allocate(self, size: int) -> None:
        """Take memory, or give it back where the size is negative."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def launch(self, kernel: str, device_s: float) -> None:
        """Work that a trace shows by its name."""
        self.work(TICK, device_s)
        self.launched.append((kernel, device_s))

    def work(self, host_s: float, device_s: float) -> None:
        """Enqueue `device_s` seconds of work, which takes the host `host_s`."""
        factor = 1.0 + self.noise * self._random.gauss(0.0, 1.0) if self.noise else 1.0
        factor *= self.cold if self._is_cold else 1.0
        self._is_cold = False
        factor *= self.waking if self.host_s < self.waking_s else 1.0
        if (
            self.throttle
            and self._busy_share(self.throttle, max(self.end_s, self.host_s + host_s)) > self.throttle.share
        ):
            factor *= self.throttle.slowdown
        self._enqueue(host_s, device_s * factor)
        self._busy.append((self.end_s - device_s * factor, self.end_s))

    def _enqueue(self, host_s: float, device_s: float) -> None:
        while self._pending and (self._pending[0] <= self.host_s or len(self._pending) >= self.queue_depth):
            self.host_s = max(self.host_s, heapq.heappop(self._pending))
        self.host_s += host_s
        self.end_s = max(self.end_s, self.host_s) + device_s
        heapq.heappush(self._pending, self.end_s)

    def _busy_share(self, throttle: Throttle, at_s: float) -> float:
        since = at_s - throttle.window_s
        while self._busy and self._busy[0][1] <= since:
            self._busy.popleft()
        return sum(end - max(start, since) for start, end in self._busy) / throttle.window_s


@dataclass
class Step:
    """A program on a fake timeline: named segments of (host seconds, device seconds), and what happened to it."""

    timeline: FakeTimeline
    costs: dict[str, tuple[float, float]]
    reset_cost: tuple[float, float] | None = None
    extra_host_s: Callable[[int], float] = lambda round_number: 0.0  # on top, in the last segment of a round
    before: Callable[[], object] = lambda: None  # called by each segment
    rounds: int = 0

    def _run(self, name: str) -> None:
        self.before()
        host_s, device_s = self.costs[name]
        if name == list(self.costs)[-1]:
            self.rounds += 1
            host_s += self.extra_host_s(self.rounds)
        self.timeline.work(host_s, device_s)
        self.timeline.log.append(name)

    def _reset(self) -> None:
        if self.reset_cost:
            self.timeline.work(*self.reset_cost)
        self.timeline.log.append("reset")

    def program(self) -> Program:
        """What the stopwatch gets."""
        return Program([Segment(name, partial(self._run, name)) for name in self.costs], self._reset)


def naive_seconds(timeline: FakeTimeline, program: Program, rounds: int) -> Sequence[float]:
    """What synchronizing and reading the host's clock around each round measures."""
    times = []
    for _ in range(rounds):
        timeline.synchronize()
        start = timeline.now()
        program.run_once()
        timeline.synchronize()
        times.append(timeline.now() - start)
    return times
