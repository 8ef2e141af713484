"""How well the GEMMs measured one by one in layer order predict those inside the real layer.

    python -m benches.prediction [--model NAME ...] [--json FILE]

For every recipe that runs here, te.TransformerLayer's step and the sweep over its GEMMs and quantizations run in turn,
back to back: so both meet the same clocks, which on a GPU at its power limit swing by several percent. The layer's
kernels are timed by torch.profiler, the sweep's pieces by the events that the benchmarks use, and beside them each
GEMM in a loop of its own. Needs a GPU and Transformer Engine.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benches.harness import device as devices
from benches.harness.kernels import categorize, shorten
from benches.harness.medians import median
from benches.harness.safety import not_writable
from benches.harness.stopwatch import REGIMES
from benches.harness.timeline import CudaTimeline, Mark, split_at_spins
from benches.report.analysis import USAGE_ERROR
from shapes.cases import support
from shapes.gemms import layer_linears
from shapes.models import MODELS, ModelConfig
from shapes.program import Program
from shapes.recipes import RECIPES, Recipe

DEFAULT_MODELS = ("codonfm_5b", "llama3_8b")
TURNS_S = 1.5  # of layer and sweep in turn, after the power has settled
LOOP = 60  # calls between two events; TE's benchmarks/gemm/benchmark_gemm.py does the same with 100
AHEAD = 2  # turns that the host is ahead of the device

# Quantizations of which the layer does a part elsewhere: te.LayerNormLinear and te.LayerNormMLP have the norm and the
# activation compute the amax that current scaling needs (normalization.cpp and activation.cpp of TE's extension).
# The pass over the data that the sweep needs for it is in no kernel of the layer.
AMAX_ELSEWHERE = {"fp8_current_scaling": ("qkv/quantize_x", "mlp_up/quantize_x", "mlp_down/quantize_x")}
AMAX_KERNEL = "amax_kernel<"  # how its short name begins; zero_amax_kernel and others are a microsecond each


@dataclass(frozen=True)
class Seconds:
    """Of one layer: GEMMs, and the quantizations around them."""

    gemm: float
    quantize: float

    @property
    def whole(self) -> float:
        """Both."""
        return self.gemm + self.quantize


@dataclass(frozen=True)
class Prediction:
    """Of one recipe: the real layer, the sweep, what of the sweep the layer does elsewhere, each piece in a loop."""

    layer: Seconds
    sweep: Seconds
    elsewhere_s: float
    loops: Seconds

    @property
    def difference(self) -> float:
        """The sweep, without what the layer does elsewhere, against the layer's kernels; relative."""
        return (self.sweep.whole - self.elsewhere_s) / self.layer.whole - 1


def kind(kernel: str) -> str:
    """`gemm`, `quantize` or `other`. What is fused into a norm or an activation is neither."""
    category = categorize(kernel)
    return "gemm" if category.startswith("gemm") else category if category == "quantize" else "other"


def split(times: Sequence[tuple[str, float]], kind_of: Callable[[str], str]) -> Seconds:
    """Sums by kind of named durations."""
    sums = {"gemm": 0.0, "quantize": 0.0, "other": 0.0}
    for name, seconds in times:
        sums[kind_of(name)] += seconds
    return Seconds(sums["gemm"], sums["quantize"])


def piece_kind(segment: str) -> str:
    """Of a segment of the sweep."""
    return "quantize" if "/quantize" in segment else "gemm"


def amax_seconds(kernels: Sequence[tuple[str, float]], segments: Sequence[str], of: Sequence[str]) -> float:
    """Seconds of the amax kernels of some quantizations. Each quantization of the sweep has one, in its order."""
    quantizations = [name for name in segments if piece_kind(name) == "quantize"]
    if not of:
        return 0.0
    found = [seconds for name, seconds in kernels if shorten(name).startswith(AMAX_KERNEL)]
    return sum(seconds for name, seconds in zip(quantizations, found, strict=True) if name in of)


class Turns:
    """The layer's step and the sweep in turn, without a pause."""

    def __init__(self, layer: Program, sweep: Program, timeline: CudaTimeline) -> None:
        self.layer, self.sweep, self.timeline = layer, sweep, timeline
        self.marks: list[list[Mark]] = []

    def run(self, seconds: float) -> None:
        """Enqueue turns for this long, the host some turns ahead of the device, and wait for them."""
        end = self.timeline.now() + seconds
        self.marks.clear()
        while self.timeline.now() < end:
            self._turn()
            if len(self.marks) > AHEAD:
                self.marks[-1 - AHEAD][-1].wait()
        self.timeline.synchronize()

    def _turn(self) -> None:
        self.timeline.spin(0.0)  # its kernel tells where the layer's step begins
        self.layer.run_once()
        self.timeline.spin(0.0)  # and where the sweep does
        self.sweep.reset()
        marks: list[Mark] = [self.timeline.mark()]
        for segment in self.sweep.segments:
            segment.run()
            marks.append(self.timeline.mark())
        self.marks.append(marks)

    def sweep_times(self) -> list[list[tuple[str, float]]]:
        """Of each turn, the segments' times by their events."""
        names = [segment.name for segment in self.sweep.segments]
        return [
            [(name, marks[index].seconds_until(marks[index + 1])) for index, name in enumerate(names)]
            for marks in self.marks
        ]


def middle(turns: Sequence[Seconds]) -> Seconds:
    """The median turn, kind by kind."""
    return Seconds(median([turn.gemm for turn in turns]), median([turn.quantize for turn in turns]))


def loops(sweep: Program, timeline: CudaTimeline) -> Seconds:
    """Each segment called over and over between two events, as single GEMMs are often timed."""
    times = []
    for segment in sweep.segments:
        segment.run()
        start = timeline.mark()
        for _ in range(LOOP):
            segment.run()
        end = timeline.mark()
        timeline.synchronize()
        times.append((segment.name, start.seconds_until(end) / LOOP))
    return split(times, piece_kind)


def predict(config: ModelConfig, recipe: Recipe) -> Prediction:
    """Measure the layer and the sweep of one recipe."""
    from shapes.backends.build import GemmSteps, build_layer

    timeline = CudaTimeline()
    layer = build_layer(config, "te_layer", recipe, "cuda").program()
    sweep = GemmSteps(layer_linears(config), recipe, "cuda").in_layer()
    turns = Turns(layer, sweep, timeline)
    turns.run(REGIMES["in_layer"].settle_s)
    parts = split_at_spins(timeline.kernels(lambda: turns.run(TURNS_S)))
    layers, sweeps = parts[0::2], parts[1::2]
    segments = [segment.name for segment in sweep.segments]
    of = AMAX_ELSEWHERE.get(recipe.id, ())
    return Prediction(
        layer=middle([split(part, kind) for part in layers]),
        sweep=middle([split(times, piece_kind) for times in turns.sweep_times()]),
        elsewhere_s=median([amax_seconds(part, segments, of) for part in sweeps]),
        loops=loops(sweep, timeline),
    )


def table(found: dict[str, Prediction]) -> str:
    """One line per recipe, in ms."""
    lines = [f"{'recipe':22}{'in the real layer':>19}{'in the sweep':>19}{'elsewhere':>11}{'diff.':>8}{'loops':>19}"]
    for recipe, one in found.items():
        texts = [f"{part.gemm * 1e3:.3f} + {part.quantize * 1e3:.3f}" for part in (one.layer, one.sweep, one.loops)]
        loops_difference = one.loops.whole / one.layer.whole - 1
        lines.append(
            f"{recipe:22}{texts[0]:>19}{texts[1]:>19}{one.elsewhere_s * 1e3:11.3f}{one.difference:+8.1%}"
            f"{texts[2]:>19} {loops_difference:+.1%}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benches.prediction", description=(__doc__ or "").splitlines()[0])
    model_help = f"repeatable; default {' and '.join(DEFAULT_MODELS)}; one of {', '.join(MODELS)}"
    parser.add_argument("--model", choices=MODELS, action="append", metavar="NAME", help=model_help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args(arguments)
    if reason := devices.why_not_cuda():
        print(f"needs a GPU and Transformer Engine: {reason}", file=sys.stderr)
        return USAGE_ERROR
    if options.json and (reason := not_writable(options.json)):
        print(f"{options.json}: {reason}", file=sys.stderr)
        return USAGE_ERROR
    results: dict[str, Any] = {}
    for name in options.model or DEFAULT_MODELS:
        found: dict[str, Prediction] = {}
        for recipe in RECIPES.values():
            if recipe.default and not support(recipe.id, layer_linears(MODELS[name]), "cuda", "te_layer"):
                gc.collect()  # the memory of the recipe before
                found[recipe.id] = predict(MODELS[name], recipe)
        print(f"{name}: GEMM + quantization of a layer, ms\n{table(found)}\n", flush=True)
        results[name] = {recipe: asdict(one) | {"difference": one.difference} for recipe, one in found.items()}
    if options.json:
        with open(options.json, "w", encoding="utf8") as file:
            json.dump({"gpu": devices.gpu_facts(), "models": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
