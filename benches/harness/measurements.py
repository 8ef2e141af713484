"""What the tests of one layer, or of one group of GEMMs, share: it is built once and measured once per regime."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import Any

from benches.harness.stopwatch import REGIMES, CpuStopwatch, Figure, Limits, Stopwatch, Times
from benches.harness.timeline import Timeline
from benches.harness.workbench import Memo
from shapes.backends.build import GemmSteps, build_layer
from shapes.cases import MODES, GemmCase, LayerCase
from shapes.gemms import PASSES, LinearGroup
from shapes.models import ModelConfig
from shapes.program import Program
from shapes.recipes import RECIPES

LAYER_SEGMENTS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "forward_backward": ("forward", "backward"),
}


class SharedMeasurement:
    """Something whose cases share measurements. `timeline` is the GPU's, or None on the CPU."""

    def __init__(self, timeline: Timeline | None, limits: Limits) -> None:
        self._timeline, self._limits = timeline, limits
        self._times = Memo()

    def _key(self, case: Any) -> Hashable:
        """Cases with the same key come from one measurement."""
        raise NotImplementedError

    def _measure(self, case: Any) -> Times:
        raise NotImplementedError

    def _segments(self, case: Any) -> tuple[str, ...]:
        """The segments whose times add up to the case's."""
        raise NotImplementedError

    def _program(self, case: Any) -> Program:
        """What is run for a case by itself."""
        raise NotImplementedError

    def _watch(self, program: Program) -> Stopwatch | CpuStopwatch:
        return Stopwatch(program, self._timeline) if self._timeline else CpuStopwatch(program)

    def figure(self, case: Any, keep_trace: bool = False) -> Figure:
        """The case's time."""
        times: Times = self._times.get(self._key(case), lambda: self._measure(case), keep_trace)
        return times.figure(self._segments(case))

    def run_once(self, case: Any) -> None:
        """Run the case untimed, to its end."""
        self._program(case).run_once()
        if self._timeline:
            self._timeline.synchronize()


class LayerMeasurement(SharedMeasurement):
    """One layer in one stage and recipe: the passes of a regime come from one measurement."""

    def __init__(
        self, config: ModelConfig, stage: str, recipe: str, device: str, timeline: Timeline | None, limits: Limits
    ) -> None:
        super().__init__(timeline, limits)
        self._step = build_layer(config, stage, RECIPES[recipe], device).program()

    @cached_property
    def _step_watch(self) -> Stopwatch | CpuStopwatch:
        return self._watch(self._step)

    def _key(self, case: LayerCase) -> Hashable:
        return case.regime

    def _measure(self, case: LayerCase) -> Times:
        return self._step_watch.time(REGIMES[case.regime], list(LAYER_SEGMENTS.values()), self._limits)

    def _segments(self, case: LayerCase) -> tuple[str, ...]:
        return LAYER_SEGMENTS[case.pass_name]

    def _program(self, case: LayerCase) -> Program:
        return self._step  # the whole step: there is no backward pass without a forward pass


class GemmMeasurement(SharedMeasurement):
    """All GEMMs of a group of linears in one recipe: one sweep in layer order, and each one rested by itself."""

    def __init__(self, group: LinearGroup, recipe: str, device: str, timeline: Timeline | None, limits: Limits) -> None:
        super().__init__(timeline, limits)
        self._steps = GemmSteps(group, RECIPES[recipe], device)
        self._linears = [linear.name for linear in group.linears]

    def _key(self, case: GemmCase) -> Hashable:
        return case.regime if case.regime == "in_layer" else (case.regime, case.linear, case.pass_name)

    def _measure(self, case: GemmCase) -> Times:
        if case.regime == "in_layer":
            program, linears, passes = self._steps.in_layer(), self._linears, list(PASSES)
        else:
            program, linears, passes = self._program(case), [case.linear], [case.pass_name]
        figures = [self._pieces(linear, name, mode) for linear in linears for name in passes for mode in MODES]
        return self._watch(program).time(REGIMES[case.regime], figures, self._limits)

    def _pieces(self, linear: str, pass_name: str, mode: str) -> tuple[str, ...]:
        pieces = self._steps.pieces(pass_name) if mode == "autocast" else (pass_name,)
        return tuple(f"{linear}/{piece}" for piece in pieces)

    def _segments(self, case: GemmCase) -> tuple[str, ...]:
        return self._pieces(case.linear, case.pass_name, case.mode)

    def _program(self, case: GemmCase) -> Program:
        return self._steps.alone(case.linear, case.pass_name)
