"""A device's clock: marks on its stream, and the means to keep a queue full, a cache cold and a chip rested."""

from __future__ import annotations

import time
from typing import Any, Protocol


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
        """Enqueue the eviction of all cached data."""


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

        self._cuda = torch.cuda
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # Twice the L2 cache, so that nothing of it survives; 60 MB where torch does not know its size.
        size = 2 * (getattr(properties, "L2_cache_size", 0) or 60_000_000)
        self._evictor = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._cycles_per_s = self._calibrate_spin()

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
        self._evictor.zero_()
