"""Proof of what ran: GEMMs, kernels, memory and attention backend of a program, from untimed rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benches.harness.kernels import KernelUse, category_seconds, launches, summarize
from benches.harness.stopwatch import no_garbage_collection
from benches.harness.timeline import Timeline, TraceError
from shapes.program import Program

if TYPE_CHECKING:  # it imports torch
    from shapes.backends.executed import ExecutedGemm

ON_CPU = "kernels and memory are seen on a GPU only"


class EvidenceError(RuntimeError):
    """What ran is not what the case says."""


@dataclass
class Part:
    """What one segment of a program did.

    `kernels` is None where they cannot be seen. Bytes are above what was allocated when the round began: the peak
    during the segment, and what it left behind. None on a CPU, and for a CUDA graph, which keeps memory of its own.
    """

    gemms: list[ExecutedGemm] = field(default_factory=list)
    kernels: list[KernelUse] | None = None
    peak_bytes: int | None = None
    held_bytes: int | None = None
    errors: dict[str, float] = field(default_factory=dict)  # relative, against BF16, by result


@dataclass
class Evidence:
    """What the segments of a program did. `kernels_absent` says why kernels could not be seen, if so."""

    parts: dict[str, Part]
    kernels_absent: str | None = None
    attention: Mapping[str, Any] | None = None
    parameter_bytes: int | None = None
    output_bytes: int = 0  # of the forward pass: not saved for the backward pass

    def summary(self, names: Sequence[str]) -> dict[str, Any]:
        """What a results file says of these segments together: launches, seconds by category, bytes, worst error."""
        parts = [self.parts[name] for name in names]
        uses = [use for part in parts for use in part.kernels or ()]
        seen = self.kernels_absent is None
        forward = self.parts["forward"].held_bytes if "forward" in names else None
        peaks = [part.peak_bytes for part in parts if part.peak_bytes is not None]  # none on a CPU, or in a graph
        return {
            "segments": list(names),
            "launches": launches(uses) if seen else None,
            "category_s": category_seconds(uses) if seen else None,
            "peak_bytes": max(peaks, default=None),
            "saved_bytes": None if forward is None else forward - self.output_bytes,
            "parameter_bytes": self.parameter_bytes,
            "relative_error": max((error for part in parts for error in part.errors.values()), default=None),
        }

    def as_dict(self) -> dict[str, Any]:
        """All of it, for a results file."""
        return {
            "kernels_absent": self.kernels_absent,
            "attention": self.attention,
            "segments": {name: asdict(part) for name, part in self.parts.items()},
        }


def collect(
    program: Program,
    recorder: Callable[[], AbstractContextManager[list[ExecutedGemm]]],
    timeline: Timeline | None,
    attention: Callable[[], AbstractContextManager[Mapping[str, Any]]] | None = None,
) -> Evidence:
    """Run a program three times: to have everything allocated that stays, to see GEMMs and memory, to see kernels.

    `recorder` collects GEMMs, `attention` the choice of a backend. On a CPU, where `timeline` is None, there is no
    memory and there are no kernels.
    """
    program.run_once()
    with no_garbage_collection(), (attention or nullcontext)() as chosen:
        # Garbage that is collected in between would count as memory given back.
        parts = _gemms_and_memory(program, recorder, timeline)
    evidence = Evidence(parts, kernels_absent=None if timeline else ON_CPU, attention=chosen)
    if timeline:
        try:
            program.reset()
            traces = timeline.trace([segment.run for segment in program.segments])
        except TraceError as error:
            evidence.kernels_absent = str(error)
        else:
            for part, trace in zip(parts.values(), traces, strict=True):
                part.kernels = summarize(trace)
    program.reset()
    return evidence


def _gemms_and_memory(
    program: Program, recorder: Callable[[], AbstractContextManager[list[ExecutedGemm]]], timeline: Timeline | None
) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    program.reset()
    if timeline:
        timeline.synchronize()
    before = timeline.allocated_bytes() if timeline else 0
    for segment in program.segments:
        if timeline:
            timeline.forget_peak()
        with recorder() as seen:
            segment.run()
        parts[segment.name] = part = Part(list(seen))
        if timeline:
            timeline.synchronize()
            part.peak_bytes = timeline.peak_bytes() - before
            part.held_bytes = timeline.allocated_bytes() - before
    return parts


def check(evidence: Evidence, planned: Mapping[str, Sequence[ExecutedGemm]], recipe: str) -> None:
    """Raise EvidenceError, naming them, where a segment's GEMMs are not the planned ones.

    `planned` has the GEMMs of each segment that has any; their operand formats are those of the recipe.
    """
    from shapes.backends.executed import differences

    wrong = {name: differences(planned.get(name, ()), part.gemms) for name, part in evidence.parts.items()}
    for name, difference in wrong.items():
        if difference:
            raise EvidenceError(f"{name} did not run as {recipe}: {difference}")


def take_in_turn(gemms: Iterable[ExecutedGemm], counts: Mapping[str, int]) -> dict[str, list[ExecutedGemm]]:
    """GEMMs by segment, given in the order in which segments ran; what is left over goes to the last one."""
    remaining = list(gemms)
    parts = {name: [remaining.pop(0) for _ in range(min(count, len(remaining)))] for name, count in counts.items()}
    parts[list(parts)[-1]] += remaining
    return parts
