"""Controls: kernels in which Transformer Engine has no part, timed again and again while the suite runs.

Where they move, the machine moved: another board, a driver, a GPU that grew hot. A gate subtracts their shift from
that of the cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benches.harness.medians import median, median_interval
from benches.harness.stopwatch import REGIMES, CpuStopwatch, Limits, Stopwatch
from benches.harness.timeline import Timeline
from benches.harness.workbench import in_one_line
from shapes.program import Program, Segment

EVERY_S = 30.0
MOST_TIME_S = 0.2  # about 20 rounds of each; at 0.25 % they stop earlier

# Large enough to fill a GPU with 132 or more multiprocessors many times over, small enough that all of them together
# are below a millisecond and 1 GB.
GEMM = {"cuda": (8192, 8192, 4096), "cpu": (256, 256, 256)}  # m, n, k
COPY_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}


class Absent(Exception):
    """A control that this device or this PyTorch does not have, and why."""


def _gemm(device: str) -> Callable[[], object]:
    """bf16 on a GPU; fp32 on a CPU, most of which have no fast bf16."""
    import torch

    m, n, k = GEMM[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(shape, device=device, dtype=dtype) for shape in ((m, k), (k, n)))
    out = torch.empty(m, n, device=device, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def _fp8_gemm(device: str) -> Callable[[], object]:
    import torch
    import torch.nn.functional as F

    if device == "cpu":
        raise Absent("only on a GPU")
    if torch.cuda.get_device_capability() < (8, 9):
        raise Absent("this GPU has no FP8")
    if not hasattr(F, "scaled_mm"):
        raise Absent(f"PyTorch {torch.__version__} has no torch.nn.functional.scaled_mm")
    m, n, k = GEMM[device]
    a, b = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
    one, recipe = torch.ones(1, device=device), F.ScalingType.TensorWise
    return lambda: F.scaled_mm(a, b.t(), one, recipe, one, recipe, output_dtype=torch.bfloat16)


def _copy(device: str) -> Callable[[], object]:
    import torch

    source = torch.zeros(COPY_BYTES[device], device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _python(_: str) -> Callable[[], object]:
    """A fixed piece of Python, about a millisecond: what the host's part of a step depends on."""
    return lambda: sum(number * number % 7 for number in range(20_000))


DEVICE_CONTROLS = {"gemm": _gemm, "fp8_gemm": _fp8_gemm, "copy": _copy}
HOST_CONTROLS = {"python": _python}


class Controls:
    """Times all controls now and then, and keeps what was found in `taken`, a list for the results file."""

    def __init__(
        self,
        device: str,
        timeline: Timeline | None,
        limits: Limits,
        taken: list[dict[str, Any]],
        now: Callable[[], float] = time.time,
    ) -> None:
        self.device, self.timeline, self.taken, self._now = device, timeline, taken, now
        self._limits = replace(limits, max_time_s=min(limits.max_time_s, MOST_TIME_S))
        self._watches: dict[str, Stopwatch | CpuStopwatch] = {}
        self._latest_s: float | None = None

    def take_if_due(self) -> None:
        """Time the controls at the start and then every EVERY_S seconds."""
        if self._latest_s is None or self._now() - self._latest_s >= EVERY_S:
            self.take()

    def take(self) -> None:
        """Time the controls. One that fails is noted as absent; nothing is raised."""
        self._latest_s = self._now()
        for name, make in (DEVICE_CONTROLS | HOST_CONTROLS).items():
            entry: dict[str, Any] = {"name": name, "time_s": self._now()}
            try:
                entry |= self._time(name, make)
            except Exception as error:  # a control is no reason to lose a case
                entry["absent"] = str(error) if isinstance(error, Absent) else in_one_line(error)
            self.taken.append(entry)

    def _time(self, name: str, make: Callable[[str], Callable[[], object]]) -> dict[str, Any]:
        timeline = self.timeline if name in DEVICE_CONTROLS else None
        if name not in self._watches:
            program = Program((Segment(name, make(self.device)),))
            self._watches[name] = Stopwatch(program, timeline) if timeline else CpuStopwatch(program)
        if timeline:
            timeline.begin_watch()
        samples = self._watches[name].time(REGIMES["rested"], [(name,)], self._limits).device_s[name]
        state = {"gpu_state": timeline.state()} if timeline else {}
        return {
            "median_s": median(samples),
            "interval_s": median_interval(samples),
            "rounds": len(samples),
            **state,
        }
