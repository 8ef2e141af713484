"""A device as the stopwatch and the evidence need it: marks on its stream, its memory, its kernels, its state."""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from benches.harness.gpu_state import GpuWatch, throttled

SPIN_KERNEL = "spin_kernel"  # of torch.cuda._sleep, in its kernel's name
# Launches that a segment begins after, at most, besides its own: some places in the queue cost up to a microsecond.
# Rounds of equally many launches come to the same places again and again, in one measurement to cheap ones, in the next
# to others. Quantizations of 113 us in four launches differed by 0.6 % from measurement to measurement in a process,
# and by 0.12 %, as much as their rounds let expect, after none to seven launches more (H200).
QUEUE_PLACES = 8
SHORT_ROUND_S = 0.005  # a step that takes longer meets the power limit by itself, however long the GPU rested


class Mark(Protocol):
    """A point on the device's stream."""

    def reached(self) -> bool:
        """Whether the device has come to it."""

    def wait(self) -> None:
        """Keep the host waiting until the device has come to it."""

    def seconds_until(self, later: Any) -> float:
        """Device time between two marks that have been reached."""


class Timeline(Protocol):
    """What the stopwatch needs from a device; a test puts a simulated one in its place."""

    awake_s: float  # when the latest measurement with gaps ended, on the host's clock

    def now(self) -> float:
        """The host's clock, in seconds."""

    def mark(self) -> Mark:
        """Enqueue a mark."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was enqueued."""

    def spin(self, seconds: float) -> None:
        """Enqueue work that keeps the device's queue, but little else of it, busy for at least that long."""

    def rest(self, seconds: float) -> None:
        """Leave the device idle."""

    def flush_cache(self) -> None:
        """Enqueue the eviction of all cached data, and have what comes next begin anywhere in the queue of launches."""

    def glance(self) -> None:
        """Look at the device's clocks and power, while it is busy with what was enqueued."""

    def begin_watch(self) -> None:
        """Forget what was seen at earlier glances."""

    def state(self) -> dict[str, Any]:
        """What was seen at the glances since `begin_watch`: see gpu_state.GpuWatch.report."""

    def throttled(self, round_s: float) -> str | None:
        """Why times since `begin_watch` should be taken again after a pause; `round_s` is what a round takes."""

    def allocated_bytes(self) -> int:
        """Memory in use, as it was asked for."""

    def peak_bytes(self) -> int:
        """The most memory that was in use since the latest `forget_peak`."""

    def forget_peak(self) -> None:
        """Have the peak begin anew at what is in use."""

    def trace(self, actions: Sequence[Callable[[], object]]) -> list[list[tuple[str, float]]]:
        """Run actions and return, for each, name and seconds of every kernel, copy and memset, in order.

        Raises TraceError where that cannot be seen.
        """


class TraceError(RuntimeError):
    """What ran on the device cannot be seen."""


class CudaMark:
    """A CUDA event."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def reached(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_until(self, later: CudaMark) -> float:
        return float(self._event.elapsed_time(later._event)) * 1e-3


class CudaTimeline:
    """The current stream of the current GPU."""

    def __init__(self) -> None:
        import torch

        self._cuda, self._random = torch.cuda, random.Random(0)
        self.awake_s = -math.inf
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # Twice the L2 cache, so that nothing of it survives; 60 MB where torch does not know its size.
        size = 2 * (getattr(properties, "L2_cache_size", 0) or 60_000_000)
        self._evictor = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._cycles_per_s = self._calibrate_spin()
        self._watch = GpuWatch(str(getattr(properties, "uuid", "")))

    def _calibrate_spin(self) -> float:
        """The rate of the spin kernel's counter, so that a spin lasts as long as it is asked to."""
        cycles, rate = 2_000_000, 0.0
        for _ in range(3):
            start = self.mark()
            self._spin_cycles(cycles)
            end = self.mark()
            self.synchronize()
            rate = max(rate, cycles / start.seconds_until(end))
        return rate

    def _spin_cycles(self, cycles: int) -> None:
        # The only use of a private name of torch. It has no public spin kernel, and anything else that occupies
        # the stream for milliseconds draws power or touches the cache.
        self._cuda._sleep(cycles)

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> CudaMark:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return CudaMark(event)

    def synchronize(self) -> None:
        self._cuda.synchronize()

    def spin(self, seconds: float) -> None:
        self._spin_cycles(int(seconds * self._cycles_per_s))

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def flush_cache(self) -> None:
        for _ in range(self._random.randrange(QUEUE_PLACES)):
            self._spin_cycles(0)
        self._evictor.zero_()

    def glance(self) -> None:
        self._watch.glance()

    def begin_watch(self) -> None:
        self._watch.begin()

    def state(self) -> dict[str, Any]:
        return self._watch.report()

    def throttled(self, round_s: float) -> str | None:
        return throttled(self._watch.report(), self._watch.max_sm_clock_mhz, short=round_s < SHORT_ROUND_S)

    def allocated_bytes(self) -> int:
        return self._requested("current")

    def peak_bytes(self) -> int:
        return self._requested("peak")

    def _requested(self, which: str) -> int:
        """What was asked of the allocator. What it hands out is up to 1 MiB more per block, as earlier cases left it.

        CUDA's own allocator (backend:cudaMallocAsync) counts no requests.
        """
        stats = self._cuda.memory_stats()
        return int(stats.get(f"requested_bytes.all.{which}") or stats[f"allocated_bytes.all.{which}"])

    def forget_peak(self) -> None:
        self._cuda.reset_peak_memory_stats()

    def trace(self, actions: Sequence[Callable[[], object]]) -> list[list[tuple[str, float]]]:
        def run() -> None:
            for action in actions:
                self.spin(0.0)  # its kernel tells where an action begins
                action()
                self.synchronize()

        parts = split_at_spins([(name, end - start) for name, start, end in self.kernels(run)])
        if len(parts) != len(actions):
            lost = "lost kernels" if parts else "saw no kernels: CUPTI may be missing or forbidden here"
            raise TraceError(f"torch.profiler {lost}")
        return parts

    def kernels(self, action: Callable[[], object]) -> list[tuple[str, float, float]]:
        """Run an action and return all its kernels, copies and memsets in order: name, start and end in seconds.

        Raises TraceError where they cannot be seen.
        """
        from torch.profiler import ProfilerActivity, profile

        self.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of cycles, of which there is one
            try:
                profiler = profile(activities=[ProfilerActivity.CUDA])
                profiler.start()
            except (RuntimeError, AssertionError) as error:
                raise TraceError(f"torch.profiler: {error}") from None
            try:
                action()
                self.synchronize()
            finally:
                profiler.stop()
            events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
        events.sort(key=lambda event: event.time_range.start)
        ranges = [(str(event.name), event.time_range) for event in events]
        return [(name, times.start * 1e-6, times.end * 1e-6) for name, times in ranges]


def split_at_spins(kernels: Sequence[tuple[str, float]]) -> list[list[tuple[str, float]]]:
    """Kernels between one spin and the next; those before the first are left out."""
    parts: list[list[tuple[str, float]]] = []
    for name, seconds in kernels:
        if SPIN_KERNEL in name:
            parts.append([])
        elif parts:
            parts[-1].append((name, seconds))
    return parts
