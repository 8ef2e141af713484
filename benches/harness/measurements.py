"""What the tests of one layer, or of one group of GEMMs, share: it is built once and measured once per regime."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from benches.harness.accuracy import References, gemm_errors, layer_errors
from benches.harness.evidence import Evidence, Part, check, collect, take_in_turn
from benches.harness.planting import Plant, planted
from benches.harness.stopwatch import REGIMES, CpuStopwatch, Figure, Limits, Stopwatch, Times
from benches.harness.timeline import Timeline
from benches.harness.workbench import Memo
from shapes.backends.build import GemmSteps, build_layer
from shapes.backends.executed import planned_gemms
from shapes.cases import MODES, GemmCase, LayerCase
from shapes.gemms import PASSES, LinearGroup, layer_linears
from shapes.models import ModelConfig
from shapes.program import Program
from shapes.recipes import RECIPES, Recipe
from shapes.stages import STAGES

LAYER_SEGMENTS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "forward_backward": ("forward", "backward"),
}


PAUSE_S = 0.5  # lets a GPU cool down, and its power limit forget
MOST_PAUSES = 2

# From process to process short quantizations differ by twice as much as GEMMs do (H200: medians of 0.2 % and 0.1 %),
# and from round to round by five times as much.
SLACK = {"quantization": 2.0}


class SharedMeasurement:
    """Something whose cases share measurements. `timeline` is the GPU's, or None on the CPU."""

    key: str  # under which a results file keeps its evidence
    plants: Sequence[Plant] = ()  # slowdowns that were asked for

    def __init__(self, timeline: Timeline | None, limits: Limits) -> None:
        self._timeline, self._limits = timeline, limits
        self._times, self._evidence = Memo(), Memo()

    def _key(self, case: Any) -> Hashable:
        """Cases with the same key come from one measurement."""
        raise NotImplementedError

    def _measure(self, case: Any) -> Times:
        raise NotImplementedError

    def _collect(self) -> Evidence:
        """What the segments do. Raises EvidenceError where that is not what the cases say."""
        raise NotImplementedError

    def segments(self, case: Any) -> tuple[str, ...]:
        """The segments whose times add up to the case's."""
        raise NotImplementedError

    def _program(self, case: Any) -> Program:
        """What is run for a case by itself."""
        raise NotImplementedError

    def _like(self, case: Any) -> list[Any]:
        """The case and those that are measured together with it."""
        raise NotImplementedError

    def _watch(self, program: Program, case: Any) -> Stopwatch | CpuStopwatch:
        if self.plants:
            names: dict[str, list[str]] = {segment.name: [] for segment in program.segments}
            for other in self._like(case):
                for name in self.segments(other):
                    names[name].append(other.id)
            program = planted(program, self.plants, names, self._timeline)
        return Stopwatch(program, self._timeline) if self._timeline else CpuStopwatch(program)

    def figure(self, case: Any, keep_trace: bool = False) -> Figure:
        """The case's time."""
        times: Times = self._times.get(self._key(case), lambda: self._measure_cool(case), keep_trace)
        return times.figure(self.segments(case))

    def evidence(self, keep_trace: bool = False) -> Evidence:
        """What ran, for all cases; collected once."""
        evidence: Evidence = self._evidence.get("all", self._collect, keep_trace)
        return evidence

    def _measure_cool(self, case: Any) -> Times:
        """Measure with an eye on the GPU's state; rested times that were throttled are taken again after a pause."""
        if not self._timeline:
            return self._measure(case)
        for pauses in range(MOST_PAUSES + 1):
            self._timeline.begin_watch()
            times = self._measure(case)
            times.gpu_state = {**self._timeline.state(), "pauses": pauses}
            reason = self._timeline.throttled(times.round_s) if case.regime == "rested" else None
            if not reason:
                return times
            times.gpu_state["throttled"] = reason
            if pauses < MOST_PAUSES:
                self._timeline.rest(PAUSE_S)
        return times

    def run_once(self, case: Any) -> None:
        """Run the case untimed, to its end."""
        self._program(case).run_once()
        if self._timeline:
            self._timeline.synchronize()


class LayerMeasurement(SharedMeasurement):
    """One layer in one stage, recipe and execution: the passes of a regime come from one measurement."""

    def __init__(
        self,
        config: ModelConfig,
        stage: str,
        recipe: str,
        execution: str,
        device: str,
        timeline: Timeline | None,
        limits: Limits,
        references: References | None = None,
    ) -> None:
        super().__init__(timeline, limits)
        self._config, self._references = config, references or References(device)
        self.key = "/".join(("layer", config.name, stage, recipe, execution))
        self.step = build_layer(config, stage, RECIPES[recipe], device, execution=execution)
        self.group, self._recipe = layer_linears(config), RECIPES[recipe]
        self._emulated = self._recipe.quantized and STAGES[stage].backend == "torch"
        self._program_of_step = self.step.program()
        self._watches: dict[str, Stopwatch | CpuStopwatch] = {}

    def _like(self, case: LayerCase) -> list[LayerCase]:
        return [replace(case, pass_name=name) for name in LAYER_SEGMENTS]

    def _step_watch(self, case: LayerCase) -> Stopwatch | CpuStopwatch:
        """One for all regimes, unless what is planted in them may differ."""
        regime = case.regime if self.plants else ""
        if regime not in self._watches:
            self._watches[regime] = self._watch(self._program_of_step, case)
        return self._watches[regime]

    def _key(self, case: LayerCase) -> Hashable:
        return case.regime

    def _measure(self, case: LayerCase) -> Times:
        return self._step_watch(case).time(REGIMES[case.regime], list(LAYER_SEGMENTS.values()), self._limits)

    def _collect(self) -> Evidence:
        gemms = planned_gemms(self.group.gemms(), _operands(self._recipe, self._emulated))
        planned = {
            "forward": [gemm for gemm in gemms if gemm.pass_name == "fprop"],
            "backward": [gemm for gemm in gemms if gemm.pass_name != "fprop"],
        }
        evidence = collect(self._program_of_step, self.step.recorder, self._timeline, self.step.watch_attention)
        if self.step.captured:
            counts = {name: len(part) for name, part in planned.items()}
            for name, part in take_in_turn(self.step.captured.gemms, counts).items():
                evidence.parts[name] = Part(part, evidence.parts[name].kernels)
            evidence.attention = self.step.captured.attention
        evidence.parameter_bytes, evidence.output_bytes = self.step.parameter_bytes, self.step.output_bytes
        check(evidence, planned, self._recipe.id)
        for name, errors in self._errors().items():
            evidence.parts[name].errors = errors
        return evidence

    def _errors(self) -> dict[str, dict[str, float]]:
        reference = self._references.of(self._config, self._recipe)
        self._program_of_step.run_once()
        errors = layer_errors(self.step.results(), reference)
        self._program_of_step.reset()
        return errors

    def segments(self, case: LayerCase) -> tuple[str, ...]:
        return LAYER_SEGMENTS[case.pass_name]

    def _program(self, case: LayerCase) -> Program:
        return self._program_of_step  # the whole step: there is no backward pass without a forward pass


class GemmMeasurement(SharedMeasurement):
    """All GEMMs of a group of linears in one recipe: one sweep in layer order, and each one rested by itself."""

    def __init__(self, group: LinearGroup, recipe: str, device: str, timeline: Timeline | None, limits: Limits) -> None:
        super().__init__(timeline, limits)
        self.key = "/".join(("gemm", group.name, recipe))
        self.group, self._recipe = group, RECIPES[recipe]
        self._emulated = self._recipe.quantized and device == "cpu"
        self.steps = GemmSteps(group, self._recipe, device)
        self._linears = [linear.name for linear in group.linears]

    def _together(self, case: GemmCase) -> tuple[Sequence[str], Sequence[str]]:
        """Linears and passes that are measured in one program: all in layer order, or one GEMM alone."""
        return (self._linears, PASSES) if case.regime == "in_layer" else ([case.linear], [case.pass_name])

    def _key(self, case: GemmCase) -> Hashable:
        return case.regime, *map(tuple, self._together(case))

    def _measure(self, case: GemmCase) -> Times:
        linears, passes = self._together(case)
        program = self.steps.in_layer() if case.regime == "in_layer" else self._program(case)
        pieces = [(self._pieces(linear, name, mode), mode) for linear in linears for name in passes for mode in MODES]
        figures = {names: SLACK.get(mode, 1.0) for names, mode in pieces if names}  # nothing is quantized for a wgrad
        return self._watch(program, case).time(REGIMES[case.regime], list(figures), self._limits, figures)

    def _like(self, case: GemmCase) -> list[GemmCase]:
        linears, passes = self._together(case)
        modes = MODES if self._recipe.quantized else MODES[:1]
        return [
            replace(case, linear=linear, pass_name=name, mode=mode)
            for linear, name, mode in itertools.product(linears, passes, modes)
        ]

    def _collect(self) -> Evidence:
        operands = _operands(self._recipe, self._emulated)
        planned = {f"{gemm.linear}/{gemm.pass_name}": planned_gemms([gemm], operands) for gemm in self.group.gemms()}
        evidence = collect(self.steps.in_layer(), self.steps.recorder, self._timeline)
        check(evidence, planned, self._recipe.id)
        for name, errors in gemm_errors(self.steps).items():
            evidence.parts[name].errors = errors
        return evidence

    def _pieces(self, linear: str, pass_name: str, mode: str) -> tuple[str, ...]:
        return tuple(f"{linear}/{piece}" for piece in self.steps.pieces(pass_name, mode))

    def segments(self, case: GemmCase) -> tuple[str, ...]:
        return self._pieces(case.linear, case.pass_name, case.mode)

    def _program(self, case: GemmCase) -> Program:
        return self.steps.alone(case.linear, case.pass_name)


def _operands(recipe: Recipe, emulated: bool) -> Callable[[str], tuple[object, ...]]:
    """Formats of a pass's operands; emulated ones are multiplied in float32."""
    return (lambda _: ("fp32", "fp32")) if emulated else recipe.gemm_operands
