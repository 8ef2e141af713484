"""Controls: kernels in which Transformer Engine has no part, timed again and again while the suite runs.

Where they move, the machine moved: another board, a driver, a GPU that grew hot. A gate subtracts their shift from
that of the cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from benches.harness.kernels import LAUNCHES
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
SHORT_KERNELS = ("abs", "ceil", "cos", "exp", "floor", "neg", "sigmoid", "sin", "sqrt", "tanh")  # of one number


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


def _short_kernels(device: str) -> Callable[[], object]:
    """What launches cost the GPU, which differs from process to process; a layer of short kernels consists of them.

    Ten kernels in turn, as a layer has few alike. Of nine processes on an H200, five needed 0.1 us less for each than
    the other four; in the layers and GEMMs of GPT-2 medium it was 1.24 times as much.
    """
    import torch

    if device == "cpu":
        raise Absent("only on a GPU")
    number = torch.zeros(1, device=device)
    kernels = [getattr(number, f"{name}_") for name in SHORT_KERNELS]

    def run() -> None:
        for _ in range(LAUNCHES // len(kernels)):
            for kernel in kernels:
                kernel()

    return run


def _python(_: str) -> Callable[[], object]:
    """A fixed piece of Python, about a millisecond: what the host's part of a step depends on."""
    return lambda: sum(number * number % 7 for number in range(20_000))


DEVICE_CONTROLS = {"gemm": _gemm, "fp8_gemm": _fp8_gemm, "copy": _copy, "short_kernels": _short_kernels}
HOST_CONTROLS = {"python": _python}
Makers = Mapping[str, Callable[[str], Callable[[], object]]]


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
        self.device, self.taken, self._now = device, taken, now
        self._limits = replace(limits, max_time_s=min(limits.max_time_s, MOST_TIME_S))
        self._groups = [_Group(DEVICE_CONTROLS, timeline), _Group(HOST_CONTROLS, None)]
        self._latest_s: float | None = None

    def take_if_due(self) -> None:
        """Time the controls at the start and then every EVERY_S seconds."""
        if self._latest_s is None or self._now() - self._latest_s >= EVERY_S:
            self.take()

    def take(self) -> None:
        """Time the controls. One that fails is noted as absent; nothing is raised."""
        self._latest_s = self._now()
        for group in self._groups:
            for name, entry in group.take(self.device, self._limits).items():
                self.taken.append({"name": name, "time_s": self._latest_s, **entry})


class _Group:
    """Controls that are timed in turn. They are made when they are first timed, and kept."""

    def __init__(self, makers: Makers, timeline: Timeline | None) -> None:
        self.makers, self.timeline = makers, timeline
        self.absent: dict[str, str] = {}
        self._watch: Stopwatch | CpuStopwatch | None = None

    def take(self, device: str, limits: Limits) -> dict[str, dict[str, Any]]:
        """By name: median, interval and number of rounds, and the GPU's state; or why there is none."""
        times: dict[str, list[float]] = {}
        lost = "there is none"
        try:
            times = self._time(device, limits)
        except Exception as error:  # a control is no reason to lose a case
            lost = in_one_line(error)
        state = {"gpu_state": self.timeline.state()} if self.timeline else {}
        return {
            name: {"median_s": median(times[name]), "interval_s": median_interval(times[name])}
            | {"rounds": len(times[name])}
            | state
            if name in times
            else {"absent": self.absent.get(name, lost)}
            for name in self.makers
        }

    def _time(self, device: str, limits: Limits) -> dict[str, list[float]]:
        if self._watch is None:
            program = Program(tuple(self._segments(device)))
            self._watch = Stopwatch(program, self.timeline) if self.timeline else CpuStopwatch(program)
        if self.timeline:
            self.timeline.begin_watch()
        figures = [(segment.name,) for segment in self._watch.program.segments]
        return self._watch.time(REGIMES["rested"], figures, limits).device_s

    def _segments(self, device: str) -> Iterator[Segment]:
        for name, make in self.makers.items():
            try:
                run = make(device)
                run()
                yield Segment(name, run)
            except Exception as error:
                self.absent[name] = str(error) if isinstance(error, Absent) else in_one_line(error)
