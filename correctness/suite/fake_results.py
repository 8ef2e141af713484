"""Results files of simulated runs: as many cases as wanted, with the times that a test gives them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benches.report.analysis import SCHEMA
from shapes.cases import LAYER_PASSES, LayerCase
from shapes.recipes import RECIPES
from shapes.stages import STAGES

CASES = [
    LayerCase("tiny", stage, recipe, "eager", "rested", name).id
    for stage, recipe, name in itertools.product(STAGES, RECIPES, LAYER_PASSES)
]
TIMES = dict.fromkeys(CASES[:12], 1e-3)
CONTROLS = {"gemm": 7e-4, "fp8_gemm": 4e-4, "copy": 1.3e-4, "python": 1e-3}
GPU = {"name": "NVIDIA H200", "uuid": "one", "compute_capability": "9.0", "driver": "580.1", "power_limit_w": 700.0}
_MINUTES = itertools.count()


def kernel(name: str, category: str = "gemm_bf16", count: int = 1, device_s: float = 1e-3) -> dict[str, Any]:
    """A kernel of an evidence."""
    return {"name": name, "category": category, "count": count, "device_s": device_s}


def benchmark(case: str, median_s: Any, **extra: Any) -> dict[str, Any]:
    """A benchmark of a layer's case, with a time of its own."""
    values = dict(zip(LayerCase.axes, case.split("/")[1:], strict=True))
    info = {
        "case": case,
        "kind": "layer",
        **values,
        "interval_s": None,
        "stopped": "precise",
        "host_min_s": 1e-4,
        "host_median_s": 1e-4,
        "launch_bound": False,
        "gpu_state": {"samples": 1, "sm_clock_mhz": {"min": 1980, "median": 1980, "max": 1980}, "pauses": 0},
        "evidence": case.rsplit("/", 2)[0],
        "segments": ["forward"],
        "launches": 2,
        "category_s": {"gemm_bf16": 1e-3},
        "peak_bytes": 1000,
        "saved_bytes": 500,
        "parameter_bytes": 10,
    }
    names = {"name": case, "fullname": case, "group": None, "params": None, "param": None}
    return {**names, "stats": {"median": median_s, "rounds": 9}, "extra_info": info | extra}


def evidence(*kernels: Mapping[str, Any], operands: Sequence[str] = ("bf16", "bf16"), backend: str = "Fused") -> Any:
    """What ran in a layer: one GEMM and these kernels."""
    gemm = {"pass_name": "fprop", "m": 1, "n": 1, "k": 1, "operands": list(operands), "layout": "TN"}
    gemm |= {"accumulate": False, "split_accumulator": False}
    part = {"gemms": [gemm], "kernels": list(kernels or [kernel("nvjet")]), "peak_bytes": 1, "held_bytes": 1}
    attention = {"backend": backend, "excluded": []}
    return {"kernels_absent": None, "attention": attention, "segments": {"forward": part}}


def results(times: Mapping[str, Any], uuid: str = "one", controls: float = 1.0, **suite: Any) -> dict[str, Any]:
    """The file of one run: seconds by case; `controls` are times as long as usual."""
    benchmarks = [benchmark(case, median_s) for case, median_s in times.items()]
    proof = {one["extra_info"]["evidence"]: evidence() for one in benchmarks}
    minute = next(_MINUTES)
    return {
        "datetime": f"2026-01-{1 + minute // 1440:02}T{minute // 60 % 24:02}:{minute % 60:02}:00+00:00",
        "machine_info": {
            "gpu": {**GPU, "uuid": uuid},
            "versions": {"torch": "2.11.0", "transformer_engine": "2.20.2"},
            "environment": {},
        },
        "commit_info": {"id": "abc"},
        "version": "5.3.1",
        "benchmarks": benchmarks,
        "suite": {
            "schema": SCHEMA,
            "sources": "0123456789abcdef",
            "device": "cuda",
            "models": {"tiny": {"hidden_size": 64}},
            "not_measured": [],
            "not_run": 0,
            "evidence": proof,
            "controls": [
                {"name": name, "time_s": 1.0, "median_s": time_s * controls} for name, time_s in CONTROLS.items()
            ],
            "spent_s": {"all": 1.0},
            "selected": list(times),
            "left_out": [],
        }
        | suite,
    }


def noisy(times: Mapping[str, float], noise: float, seed: int) -> dict[str, float]:
    """The times with normal noise of this deviation, in logs."""
    scales = np.exp(noise * np.random.default_rng(seed).standard_normal(len(times)))
    return {case: time_s * float(scale) for (case, time_s), scale in zip(times.items(), scales, strict=True)}


def runs(count: int, times: Mapping[str, float] = TIMES, noise: float = 0.001, seed: int = 0, **more: Any) -> list[Any]:
    """The files of several runs."""
    return [results(noisy(times, noise, 1000 * seed + number), **more) for number in range(count)]
