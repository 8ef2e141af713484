"""Times of a program, segment by segment: on a GPU with launches hidden, on a CPU round by round."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benches.harness.medians import is_precise, median, median_interval
from benches.harness.timeline import Mark, Timeline
from shapes.program import Program

WARM_UP_ROUNDS = 3  # compilation, autotuning and the allocator settle within the first steps
HOST_ROUNDS = 5
FEWEST_ROUNDS = 6  # fewer do not give a 95 % interval of the median
HOST_WORK_S = 0.025  # launches enqueued behind one spin; much more overflows the driver's queue of 1024 launches
SPIN_MARGIN = 1.4  # host times vary by less than this from batch to batch
MOST_MARGIN = 5.0  # no spin helps where the driver's queue of launches is full
SPIN_FLOOR_S = 0.0003
MOST_SPIN_S = 0.5
# To know a time better is in vain: on an H200, a launch took 0.16 us longer in one process than in the next, throughout
# (medians over 108 GEMMs of 1 to 10 launches, and 12 layers of 14 to 96).
ENOUGH_S = 0.2e-6
FAST_HOST = 0.8  # of the device's time: a faster host stays ahead although its times vary


@dataclass(frozen=True)
class Regime:
    """How rounds follow each other.

    A batch holds as many rounds as fit into `busy_s` of device time, at least one. Before it the device rests for
    `rest_s`, or `rest_ratio` times what the batch takes if that is longer. Without a rest, and with a host fast
    enough, there are no batches but one unbroken stream; a launch-bound program cannot run back to back, in training
    neither. Rounds of the first `settle_s` seconds are not counted; where there are gaps, of WAKING_S, and of none if
    such a measurement has only just ended and this one's rounds are short. With `cold_cache` each segment finds an
    empty L2, and begins at a place in the queue of launches that is drawn anew.
    """

    busy_s: float
    rest_s: float = 0.0
    rest_ratio: float = 0.0
    settle_s: float = 0.0
    cold_cache: bool = False


# A burst of work leaves an H200 slower: GEMMs by up to 6 % for 30 to 80 ms, and what memory bounds by 0.4 to 1 % for
# 0.4 s. Nine rounds of 2 ms, as warming up takes, are burst enough: 0.4 ms quantizations of five in six measurements
# were slower for 0.4 s after them, and in none of 18 after rounds with pauses, or half a second of rest. So a pause is
# a rest, but not longer than this.
MOST_PAUSE_S = 0.016
# What comes before a layer's or a group's first measurement is such a burst. And a GPU that had nothing to do for
# seconds is up to 15 % slower for its first 60 ms of work with gaps in it.
WAKING_S = 0.4
# Between the measurements of two GEMMs lie some milliseconds: no longer than the rests within them.
STAYS_AWAKE_S = 0.1
HEAVY_ROUND_S = MOST_PAUSE_S / 4  # at most two rounds lie between pauses; from here on, these are too short

# Rested: 6 ms lets the power average fall and is too short for the clocks to do so (H200: a 2 ms BF16 GEMM varies by
# 0.1 % from process to process, against 7 % back to back). A layer of 28 ms needs twice its own time: its rounds then
# differ by 0.1 %, against 0.5 % after resting as long as it ran.
# Back to back: an H200's power control swings with a period of about a second (0.6 s at one speed, 0.4 s up to 10 %
# slower), beginning anew with each pause. The first swing is left out, and a second of measuring covers one.
_BACK_TO_BACK = Regime(busy_s=0.25, settle_s=1.2)
REGIMES = {
    "rested": Regime(busy_s=0.0006, rest_s=0.006, rest_ratio=2.0, settle_s=WAKING_S, cold_cache=True),
    "sustained": _BACK_TO_BACK,
    "in_layer": _BACK_TO_BACK,
}


@dataclass(frozen=True)
class Limits:
    """When to stop: medians known to `precision` (relative, with `confidence`) or ENOUGH_S, or after `max_time_s`."""

    min_rounds: int = FEWEST_ROUNDS
    max_time_s: float = 1.0
    precision: float = 0.0025
    confidence: float = 0.95


Span = tuple[Mark, Mark]  # where a segment starts and ends
# By how much less precisely than the others a figure need be known, if it is below SLACK_S. To know the quantizations
# of a Llama layer to 0.25 % would cost an H200 6 s more; those from 100 us on take 2 s of these.
Slack = Mapping[tuple[str, ...], float]
SLACK_S = 100e-6


@dataclass(frozen=True)
class Figure:
    """One reported time: seconds of each round on the device, and on the host what launching it took."""

    samples_s: list[float]
    host_s: list[float]
    precise: bool
    gpu_state: dict[str, Any] = field(default_factory=dict)

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """95 % interval of the median."""
        return median_interval(self.samples_s)

    @property
    def launch_bound(self) -> bool:
        """Whether launching takes longer than running."""
        return bool(self.host_s) and median(self.host_s) > median(self.samples_s)


@dataclass
class Times:
    """Seconds per round for each segment of a program, on the device and on the host."""

    limits: Limits
    device_s: dict[str, list[float]] = field(default_factory=dict)
    host_s: dict[str, list[float]] = field(default_factory=dict)
    gpu_state: dict[str, Any] = field(default_factory=dict)  # while it was measured
    slack: Slack = field(default_factory=dict)

    @property
    def round_s(self) -> float:
        """Device time of a whole round: the sum of the segments' medians."""
        return sum(median(samples) for samples in self.device_s.values())

    def figure(self, segments: Sequence[str]) -> Figure:
        """The time of these segments together."""
        samples = [sum(parts) for parts in zip(*(self.device_s[name] for name in segments), strict=True)]
        host = [sum(parts) for parts in zip(*(self.host_s[name] for name in segments if self.host_s), strict=True)]
        slack = self.slack.get(tuple(segments), 1.0) if samples and median(samples) < SLACK_S else 1.0
        tolerance = self.limits.precision * slack
        precise = is_precise(samples, tolerance, self.limits.confidence, ENOUGH_S)
        return Figure(samples, host, precise, self.gpu_state)

    def add(self, rounds: Sequence[dict[str, float]]) -> None:
        """Append rounds."""
        for times in rounds:
            for name, seconds in times.items():
                self.device_s.setdefault(name, []).append(seconds)

    @property
    def rounds(self) -> int:
        """How many rounds were counted."""
        return len(next(iter(self.device_s.values()), ()))

    def suffice(self, figures: Sequence[Sequence[str]]) -> bool:
        """Whether all these figures are known well enough."""
        return all(self.figure(names).precise for names in figures)


def _collect(
    times: Times,
    figures: Sequence[Sequence[str]],
    now: Callable[[], float],
    batch: Callable[[], list[dict[str, float]]],
) -> None:
    """Add batches until the figures are known well enough, or time is up and there are enough rounds.

    A program of which no round was counted for as long as it may take is given up.
    """
    limits = times.limits
    progress = now()
    end = progress + limits.max_time_s
    next_check = limits.min_rounds
    while True:
        if rounds := batch():
            times.add(rounds)
            progress = now()
        if times.rounds >= next_check:
            if times.suffice(figures):
                return
            next_check = times.rounds + 1 + times.rounds // 8  # looking costs time, and each look is a chance to err
        stuck = not rounds and now() - progress >= limits.max_time_s
        if now() >= end and (times.rounds >= limits.min_rounds or stuck):
            return


class HostTooSlowError(RuntimeError):
    """The device never waited for the host, so no time of it is its own."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python collects no cycles in here."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Stopwatch:
    """Times a program on a device with a queue. Making one warms the program up and takes its host times."""

    def __init__(self, program: Program, timeline: Timeline) -> None:
        self.program, self.timeline = program, timeline
        self.margin = SPIN_MARGIN
        self._resumed_s = timeline.now()
        is_awake = self._resumed_s - timeline.awake_s < STAYS_AWAKE_S
        for _ in range(WARM_UP_ROUNDS):
            self._pause()
            program.run_once()
        self.host_s: dict[str, list[float]] = {segment.name: [] for segment in program.segments}
        with no_garbage_collection():
            self.host_round_s = median([self._host_round() for _ in range(HOST_ROUNDS)])
        self.device_round_s = self._device_round()
        if is_awake:
            timeline.awake_s = timeline.now()

    def _pause(self) -> None:
        """Let the device rest, so that no burst of work comes before what is timed."""
        self.timeline.synchronize()
        rested = REGIMES["rested"]
        busy_s = self.timeline.now() - self._resumed_s
        self.timeline.rest(min(MOST_PAUSE_S, max(rested.rest_s, rested.rest_ratio * busy_s)))
        self._resumed_s = self.timeline.now()

    def _host_round(self) -> float:
        """Seconds that enqueuing a round takes while the device has nothing else to do; of each segment, to host_s.

        As in training it comes right after another one: to launch on a GPU that has been idle takes twice as long.
        """
        now = self.timeline.now
        self._pause()
        self.program.run_once()
        self.timeline.synchronize()
        begin = now()
        self.program.reset()
        self.timeline.mark()
        for segment in self.program.segments:
            start = now()
            segment.run()
            self.host_s[segment.name].append(now() - start)
            self.timeline.mark()
        return now() - begin

    def _device_round(self) -> float:
        self.device_round_s = 0.0
        for _ in range(5):
            self._pause()
            if rounds := self._batch(1, cold_cache=False):
                return sum(rounds[0].values())
        raise self._too_slow()

    def _too_slow(self) -> HostTooSlowError:
        return HostTooSlowError(
            f"no round that starts with {self.program.segments[0].name!r} was enqueued before the device began it, "
            f"though the device was kept busy for {self._spin_seconds(1) * 1e3:.1f} ms: a step must not wait for it"
        )

    def _spin_seconds(self, rounds: int) -> float:
        """Long enough that the device begins no round before the host has enqueued it."""
        lag_s = max(0.0, self.host_round_s - self.device_round_s) * (rounds - 1)
        return min(MOST_SPIN_S, SPIN_FLOOR_S + self.margin * (self.host_round_s + lag_s))

    def _enqueue_round(self, cold_cache: bool = False) -> list[Span] | None:
        """Marks around each segment of a round; None if the device began it before it was wholly enqueued.

        With a cold cache, each segment begins after a flush that is in no time. Otherwise one begins where the other
        ended, and their times add up to the whole.
        """
        self.program.reset()
        spans: list[Span] = []
        for segment in self.program.segments:
            if cold_cache:
                self.timeline.flush_cache()
            start = self.timeline.mark() if cold_cache or not spans else spans[-1][1]
            segment.run()
            spans.append((start, self.timeline.mark()))
        return None if spans[0][0].reached() else spans

    def _seconds(self, spans: list[Span]) -> dict[str, float]:
        """Device time of each segment, once the device has reached the marks."""
        return {
            segment.name: start.seconds_until(end)
            for segment, (start, end) in zip(self.program.segments, spans, strict=True)
        }

    def _batch(self, rounds: int, cold_cache: bool) -> list[dict[str, float]]:
        """Times of those rounds that were wholly enqueued before the device began them."""
        self.timeline.synchronize()
        self.timeline.spin(self._spin_seconds(rounds))
        marked = [spans for _ in range(rounds) if (spans := self._enqueue_round(cold_cache))]
        self.timeline.glance()  # the device is busy, and the host has nothing else to do
        self.timeline.synchronize()
        if len(marked) < rounds:
            self.margin = min(MOST_MARGIN, self.margin * 1.5)
        return [self._seconds(spans) for spans in marked]

    def _stream(self) -> Iterator[list[dict[str, float]]]:
        """Rounds without end and without a gap: the host stays some rounds ahead and reads the oldest."""
        ahead = max(3, int(HOST_WORK_S / self.device_round_s))
        queue: deque[tuple[list[Span] | None, Mark]] = deque()
        self.timeline.synchronize()
        self.timeline.spin(self._spin_seconds(1))
        while True:
            queue.append((self._enqueue_round(), self.timeline.mark()))
            if len(queue) == ahead:
                spans, end = queue.popleft()
                self.timeline.glance()
                end.wait()
                yield [self._seconds(spans)] if spans else []

    def rounds_per_batch(self, regime: Regime) -> int:
        """As many as fit into the regime's busy time, and, behind one spin, into the host's work."""
        fitting = regime.busy_s / max(self.device_round_s, 1e-6)
        if self.host_round_s > self.device_round_s or regime.rest_s:
            fitting = min(fitting, HOST_WORK_S / max(self.host_round_s, 1e-6))
        return max(1, int(fitting))

    def time(
        self, regime: Regime, figures: Sequence[Sequence[str]], limits: Limits, slack: Slack | None = None
    ) -> Times:
        """Rounds in a regime until all figures (each a set of segments) are precise or time is up.

        Raises HostTooSlowError if no round could be enqueued in time.
        """
        times = Times(limits, host_s=self.host_s, slack=slack or {})
        rounds = self.rounds_per_batch(regime)
        rest_s = max(regime.rest_s, regime.rest_ratio * rounds * self.device_round_s)

        def batch() -> list[dict[str, float]]:
            self.timeline.synchronize()
            self.timeline.rest(rest_s)
            return self._batch(rounds, regime.cold_cache)

        awake_for_s = self.timeline.now() - self.timeline.awake_s
        is_awake = bool(rest_s) and awake_for_s < STAYS_AWAKE_S and self.device_round_s < HEAVY_ROUND_S
        settle_s = 0.0 if is_awake else min(regime.settle_s, WAKING_S)
        if not rest_s and self.host_round_s < FAST_HOST * self.device_round_s:
            stream = self._stream()
            batch, settle_s = partial(next, stream), regime.settle_s

        with no_garbage_collection():
            settled = self.timeline.now() + settle_s
            while self.timeline.now() < settled:
                batch()
            _collect(times, figures, self.timeline.now, batch)
        if rest_s:
            self.timeline.awake_s = self.timeline.now()
        if not times.rounds:
            raise self._too_slow()
        return times


class CpuStopwatch:
    """Times a program that runs where it is called. There is one regime: round after round."""

    def __init__(self, program: Program) -> None:
        self.program = program
        for _ in range(WARM_UP_ROUNDS):
            program.run_once()

    def _round(self) -> dict[str, float]:
        self.program.reset()
        times = {}
        for segment in self.program.segments:
            start = time.perf_counter_ns()
            segment.run()
            times[segment.name] = (time.perf_counter_ns() - start) * 1e-9
        return times

    def time(
        self, regime: Regime, figures: Sequence[Sequence[str]], limits: Limits, slack: Slack | None = None
    ) -> Times:
        """Rounds until all figures are precise or time is up."""
        del regime
        times = Times(limits, slack=slack or {})
        with no_garbage_collection():
            _collect(times, figures, time.perf_counter, lambda: [self._round()])
        return times
