"""How well the GEMMs measured one by one in layer order predict those inside the real layer.

    python -m benches.prediction [--model NAME ...] [--json FILE]

For every recipe that runs here, te.TransformerLayer's step and the sweep over its GEMMs and quantizations run in turn,
back to back: so both meet the same clocks, which on a GPU at its power limit swing by several percent. The layer's
kernels are timed by torch.profiler, each from the end of the one before it, as events between them would; the sweep's
pieces by events, as in the benchmarks; and beside them each piece in a loop of its own. Needs a GPU and Transformer
Engine.
"""

from __future__ import annotations

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
from benches.harness.stopwatch import REGIMES
from benches.harness.timeline import CudaTimeline, Mark, Timeline, split_at_spins
from benches.report.refusals import refuse
from shapes.cases import support
from shapes.commands import Parser, not_writable, write_text
from shapes.gemms import layer_linears
from shapes.models import MODELS, ModelConfig
from shapes.program import Program
from shapes.recipes import RECIPES, Recipe

DEFAULT_MODELS = ("codonfm_5b", "llama3_8b")
TURNS_S = 1.5  # of layer and sweep in turn, after the power has settled
LOOP = 60  # calls between two events; TE's benchmarks/gemm/benchmark_gemm.py does the same with 100
AHEAD = 2  # turns that the host is ahead of the device

Times = Sequence[tuple[str, float]]  # names and seconds


@dataclass(frozen=True)
class Fusion:
    """Quantizations of the sweep that the layer does, wholly or in part, inside a norm or an activation.

    In the sweep these are the segments, or only their kernels whose short names begin with `part`. In the layer what
    is left of them are kernels that begin with one of `rest`, some of which do a part of the activation's gradient.
    """

    segments: tuple[str, ...] = ()
    part: str = ""
    rest: tuple[str, ...] = ()


_BEHIND_A_NORM_OR_ACTIVATION = ("qkv/quantize_x", "mlp_up/quantize_x", "mlp_down/quantize_x")


def fusion(recipe: str, config: ModelConfig) -> Fusion:
    """What te.TransformerLayer fuses in a recipe (normalization.cpp, activation.cpp and bias.cpp of TE's extension).

    Current scaling: norm and activation give the amax. Delayed scaling: they also cast, and only a transpose is left;
    the cast of a gradient also sums up the bias's, which te.LayerNormMLP has it do without a bias too.
    """
    if recipe == "fp8_current_scaling":
        return Fusion(_BEHIND_A_NORM_OR_ACTIVATION, part="amax_kernel<")  # zero_amax_kernel takes a microsecond
    if recipe == "fp8_delayed_scaling":
        gradients = ("mlp_up/quantize_dy", "qkv/quantize_dy")[: 1 + config.bias]
        return Fusion((*_BEHIND_A_NORM_OR_ACTIVATION, *gradients), rest=("transpose_", "cast_transpose_fusion_"))
    return Fusion()


@dataclass(frozen=True)
class Seconds:
    """Of one layer: GEMMs, the quantizations around them, and of these what is fused in the layer."""

    gemm: float
    quantize: float
    fused: float = 0.0

    @property
    def whole(self) -> float:
        """GEMMs and quantizations."""
        return self.gemm + self.quantize

    @property
    def alike(self) -> float:
        """What layer and sweep do in the same way."""
        return self.whole - self.fused


@dataclass(frozen=True)
class Prediction:
    """Of one recipe: in the real layer, in the sweep, and each piece in a loop of its own."""

    layer: Seconds
    sweep: Seconds
    loops: Seconds

    def difference(self, of: Seconds) -> float:
        """Of the sweep or the loops against the layer, in what they do alike; relative."""
        return of.alike / self.layer.alike - 1


def kind(kernel: str) -> str:
    """`gemm`, `quantize` or `other`. What is fused into a norm or an activation is neither."""
    category = categorize(kernel)
    return "gemm" if category.startswith("gemm") else category if category == "quantize" else "other"


def piece_kind(segment: str) -> str:
    """Of a segment of the sweep."""
    return "quantize" if "/quantize" in segment else "gemm"


def total(times: Times, matches: Callable[[str], bool]) -> float:
    """Seconds of those whose names match."""
    return sum(seconds for name, seconds in times if matches(name))


def layer_seconds(kernels: Times, fused: Fusion) -> Seconds:
    """From the kernels of the layer's step."""
    return Seconds(
        gemm=total(kernels, lambda name: kind(name) == "gemm"),
        quantize=total(kernels, lambda name: kind(name) == "quantize"),
        fused=total(kernels, lambda name: bool(fused.rest) and shorten(name).startswith(fused.rest)),
    )


def sweep_seconds(pieces: Times, kernels: Times, fused: Fusion) -> Seconds:
    """From the times of the sweep's segments. Of its kernels each quantization has one that begins with `fused.part`.

    Raises ValueError where that is not so.
    """
    parts = pieces
    if fused.part:
        names = [name for name, _ in pieces if piece_kind(name) == "quantize"]
        found = [seconds for name, seconds in kernels if shorten(name).startswith(fused.part)]
        parts = list(zip(names, found, strict=True))
    return Seconds(
        gemm=total(pieces, lambda name: piece_kind(name) == "gemm"),
        quantize=total(pieces, lambda name: piece_kind(name) == "quantize"),
        fused=total(parts, lambda name: name in fused.segments),
    )


def end_to_end(kernels: Sequence[tuple[str, float, float]]) -> list[tuple[str, float]]:
    """Each kernel's time from the end of the ones before it to its own; kernels are (name, start, end), in order."""
    times, latest = [], kernels[0][1] if kernels else 0.0
    for name, _, end in kernels:
        times.append((name, max(0.0, end - latest)))
        latest = max(latest, end)
    return times


class Turns:
    """The layer's step and the sweep in turn, without a pause."""

    def __init__(self, layer: Program, sweep: Program, timeline: Timeline) -> None:
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
    """The median turn, part by part."""
    return Seconds(*(median([getattr(turn, name) for turn in turns]) for name in ("gemm", "quantize", "fused")))


def loops(sweep: Program, timeline: Timeline) -> list[tuple[str, float]]:
    """Seconds of each segment when it is called over and over, as single GEMMs are often timed."""
    times = []
    for segment in sweep.segments:
        segment.run()
        start = timeline.mark()
        for _ in range(LOOP):
            segment.run()
        end = timeline.mark()
        timeline.synchronize()
        times.append((segment.name, start.seconds_until(end) / LOOP))
    return times


def predict(config: ModelConfig, recipe: Recipe) -> Prediction:
    """Measure the layer and the sweep of one recipe."""
    from shapes.backends.build import GemmSteps, build_layer

    timeline, fused = CudaTimeline(), fusion(recipe.id, config)
    layer = build_layer(config, "te_layer", recipe, "cuda").program()
    sweep = GemmSteps(layer_linears(config), recipe, "cuda").in_layer()
    turns = Turns(layer, sweep, timeline)
    turns.run(REGIMES["in_layer"].settle_s)
    parts = split_at_spins(end_to_end(timeline.kernels(lambda: turns.run(TURNS_S))))
    layers, sweeps, pieces = parts[0::2], parts[1::2], turns.sweep_times()
    return Prediction(
        layer=middle([layer_seconds(part, fused) for part in layers]),
        sweep=middle([sweep_seconds(*both, fused) for both in zip(pieces, sweeps, strict=True)]),
        loops=sweep_seconds(loops(sweep, timeline), sweeps[-1], fused),
    )


def table(found: dict[str, Prediction]) -> str:
    """One line per recipe, in ms."""
    lines = [f"{'recipe':22}{'real layer (fused)':>24}{'sweep (fused)':>24}{'diff.':>7}{'loops':>17}{'diff.':>8}"]
    for recipe, one in found.items():
        layer, sweep, own = (
            f"{part.gemm * 1e3:.3f} + {part.quantize * 1e3:.3f}" for part in (one.layer, one.sweep, one.loops)
        )
        lines.append(
            f"{recipe:22}{layer:>16} ({one.layer.fused * 1e3:.3f}){sweep:>16} ({one.sweep.fused * 1e3:.3f})"
            f"{one.difference(one.sweep):+7.1%}{own:>17}{one.difference(one.loops):+8.1%}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m benches.prediction", description=(__doc__ or "").splitlines()[0])
    model_help = f"repeatable; default {' and '.join(DEFAULT_MODELS)}; one of {', '.join(MODELS)}"
    parser.add_argument("--model", choices=MODELS, action="append", metavar="NAME", help=model_help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args(arguments)
    if reason := devices.why_not_cuda():
        return refuse("benches.prediction", f"needs a GPU and Transformer Engine: {reason}")
    if options.json and (reason := not_writable(options.json)):
        return refuse(options.json, reason)
    results: dict[str, Any] = {}
    for name in options.model or DEFAULT_MODELS:
        found: dict[str, Prediction] = {}
        for recipe in RECIPES.values():
            if recipe.default and not support(recipe.id, layer_linears(MODELS[name]), "cuda", "te_layer"):
                gc.collect()  # the memory of the recipe before
                found[recipe.id] = predict(MODELS[name], recipe)
        print(f"{name}: GEMM + quantization of a layer in ms; differences without what the layer fuses")
        print(f"{table(found)}\n", flush=True)
        results[name] = {
            recipe: asdict(one) | {"difference": one.difference(one.sweep)} for recipe, one in found.items()
        }
    if options.json:
        write_text(options.json, json.dumps({"gpu": devices.gpu_facts(), "models": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
