"""How well the GEMMs measured one by one in layer order predict those inside the real layer.

    python -m benches.prediction [--model NAME] [--json FILE]

For every recipe that runs here: the sum of the in-layer sweep, and the same kernels of te.TransformerLayer forward and
backward as torch.profiler sees them, both back to back with the power settled. Needs a GPU and Transformer Engine.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

from benches.harness import device as devices
from benches.harness.medians import median
from benches.harness.safety import not_writable
from benches.harness.stopwatch import REGIMES, Limits, Stopwatch
from benches.harness.timeline import CudaTimeline
from benches.report.analysis import USAGE_ERROR
from shapes.cases import support
from shapes.gemms import layer_linears
from shapes.models import MODELS, ModelConfig
from shapes.recipes import RECIPES, Recipe

# Parts of kernel names, seen on an H200 with TE 2.20.2. What is fused into a norm or an activation is neither.
KERNELS = {
    "quantize": (
        "cast_transpose",
        "transpose_optimized_kernel",
        "transpose_general_kernel",
        "amax_kernel",
        "compute_scale_from_amax",
        "block_scaled_",
        "fp8::detail::identity",
        "quantize_mxfp8",
        "quantize_transpose_nvfp4",
        "hadamard",
    ),
    "gemm": ("nvjet", "cublasLt", "cutlass", "gemm"),
}
PROFILED_STEPS = 15
STEP_MARK = "spin_kernel"


def kernel_kind(name: str) -> str:
    """`quantize`, `gemm` or `other`."""
    return next((kind for kind, parts in KERNELS.items() if any(part in name for part in parts)), "other")


def layer_kernels(config: ModelConfig, recipe: Recipe) -> dict[str, float]:
    """Seconds per training step of te.TransformerLayer by kind of kernel, back to back after the power has settled."""
    from torch.profiler import ProfilerActivity, profile

    from shapes.backends.build import build_layer

    timeline = CudaTimeline()
    program = build_layer(config, "te_layer", recipe, "cuda").program()
    watch = Stopwatch(program, timeline)
    settle_s = 2 * REGIMES["in_layer"].settle_s  # starting the profiler is a pause of its own
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(int(settle_s / watch.device_round_s) + PROFILED_STEPS):
            timeline.spin(1e-6)  # its kernel marks where a step begins
            program.run_once()
        timeline.spin(1e-6)
        timeline.synchronize()
    kernels = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    kernels.sort(key=lambda event: event.time_range.start)
    begins = [index for index, event in enumerate(kernels) if STEP_MARK in event.name][-PROFILED_STEPS - 1 :]
    seconds = {"gemm": 0.0, "quantize": 0.0, "other": 0.0}
    for event in kernels[begins[0] : begins[-1]]:
        if STEP_MARK not in event.name:
            seconds[kernel_kind(event.name)] += event.device_time * 1e-6 / PROFILED_STEPS
    return seconds


def sweep_pieces(config: ModelConfig, recipe: Recipe) -> dict[str, float]:
    """Seconds of the GEMMs and quantizations of one layer by the in-layer sweep."""
    from shapes.backends.build import GemmSteps

    program = GemmSteps(layer_linears(config), recipe, "cuda").in_layer()
    whole = tuple(segment.name for segment in program.segments)
    times = Stopwatch(program, CudaTimeline()).time(REGIMES["in_layer"], [whole], Limits())
    seconds = {"gemm": 0.0, "quantize": 0.0}
    for name, rounds in times.device_s.items():
        seconds["quantize" if "/quantize" in name else "gemm"] += median(rounds)
    return seconds


def compare(config: ModelConfig, recipe: Recipe) -> dict[str, Any]:
    """Both, and the relative difference of their sums."""
    real = layer_kernels(config, recipe)
    gc.collect()  # the layer's memory, before the operands need theirs
    sweep = sweep_pieces(config, recipe)
    ratio = sum(sweep.values()) / (real["gemm"] + real["quantize"])
    return {"real_s": real, "sweep_s": sweep, "difference": ratio - 1}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benches.prediction", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="codonfm_5b", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args(arguments)
    if reason := devices.why_not_cuda():
        print(f"needs a GPU and Transformer Engine: {reason}", file=sys.stderr)
        return USAGE_ERROR
    if options.json and (reason := not_writable(options.json)):
        print(f"{options.json}: {reason}", file=sys.stderr)
        return USAGE_ERROR
    config = MODELS[options.model]
    found: dict[str, Any] = {}
    print(f"{config.name}: GEMM + quantization of a layer, ms")
    print(f"{'recipe':24}{'in the real layer':>24}{'in the sweep':>24}{'difference':>12}")
    for recipe in RECIPES.values():
        if not recipe.default or support(recipe.id, layer_linears(config), "cuda", "te_layer"):
            continue
        result = found[recipe.id] = compare(config, recipe)
        real, sweep = (
            f"{part['gemm'] * 1e3:.3f} + {part['quantize'] * 1e3:.3f}" for part in (result["real_s"], result["sweep_s"])
        )
        print(f"{recipe.id:24}{real:>24}{sweep:>24}{result['difference']:+12.1%}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf8") as file:
            json.dump({"model": config.name, "gpu": devices.gpu_facts(), "recipes": found}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
