"""What the tests of one layer, or of one group of GEMMs, share: it is built once and measured once per regime."""

from __future__ import annotations

from functools import cached_property

from benches.harness.stopwatch import REGIMES, CpuStopwatch, Figure, Limits, Stopwatch, Times
from benches.harness.timeline import Timeline
from shapes.backends.build import GemmSteps, build_layer
from shapes.cases import GemmCase, LayerCase
from shapes.gemms import PASSES, LinearGroup
from shapes.models import ModelConfig
from shapes.program import Program
from shapes.recipes import RECIPES

LAYER_SEGMENTS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "forward_backward": ("forward", "backward"),
}


def _stopwatch(program: Program, timeline: Timeline | None) -> Stopwatch | CpuStopwatch:
    return Stopwatch(program, timeline) if timeline else CpuStopwatch(program)


class LayerMeasurement:
    """One layer in one stage and recipe. `timeline` is the GPU's, or None on the CPU."""

    def __init__(
        self, config: ModelConfig, stage: str, recipe: str, device: str, timeline: Timeline | None, limits: Limits
    ) -> None:
        self._program = build_layer(config, stage, RECIPES[recipe], device).program()
        self._timeline, self._limits = timeline, limits
        self._times: dict[str, Times] = {}

    @cached_property
    def _watch(self) -> Stopwatch | CpuStopwatch:
        return _stopwatch(self._program, self._timeline)

    def program(self, case: LayerCase) -> Program:
        """What is run for a case: always the whole step, since a backward pass needs a forward pass."""
        del case
        return self._program

    def figure(self, case: LayerCase) -> Figure:
        """The case's time; the passes of a regime come from one measurement."""
        if case.regime not in self._times:
            self._times[case.regime] = self._watch.time(
                REGIMES[case.regime], list(LAYER_SEGMENTS.values()), self._limits
            )
        return self._times[case.regime].figure(LAYER_SEGMENTS[case.pass_name])


class GemmMeasurement:
    """All GEMMs of a group of linears in one recipe."""

    def __init__(self, group: LinearGroup, recipe: str, device: str, timeline: Timeline | None, limits: Limits) -> None:
        self._steps = GemmSteps(group, RECIPES[recipe], device)
        self._linears = [linear.name for linear in group.linears]
        self._timeline, self._limits = timeline, limits
        self._times: dict[tuple[str, ...], Times] = {}

    def _segments(self, linear: str, pass_name: str, mode: str) -> tuple[str, ...]:
        pieces = self._steps.pieces(pass_name) if mode == "autocast" else (pass_name,)
        return tuple(f"{linear}/{piece}" for piece in pieces)

    def _figures(self, linears: list[str], passes: tuple[str, ...]) -> list[tuple[str, ...]]:
        modes = ("autocast", "prequantized")
        return [self._segments(linear, name, mode) for linear in linears for name in passes for mode in modes]

    def program(self, case: GemmCase) -> Program:
        """One GEMM after its quantizations."""
        return self._steps.alone(case.linear, case.pass_name)

    def figure(self, case: GemmCase) -> Figure:
        """The case's time: from one sweep over all of the layer's GEMMs, or from the GEMM by itself."""
        in_layer = case.regime == "in_layer"
        key = (case.regime,) if in_layer else (case.regime, case.linear, case.pass_name)
        if key not in self._times:
            program = self._steps.in_layer() if in_layer else self.program(case)
            figures = (
                self._figures(self._linears, PASSES) if in_layer else self._figures([case.linear], (case.pass_name,))
            )
            self._times[key] = _stopwatch(program, self._timeline).time(REGIMES[case.regime], figures, self._limits)
        return self._times[key].figure(self._segments(case.linear, case.pass_name, case.mode))
