"""One case that goes wrong: the others go on, and whatever was measured is in the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# A plugin that makes the second measurement fail; three cases come from each measurement.
PLUGIN = """
import torch
from benches.harness.stopwatch import CpuStopwatch

measure, calls = CpuStopwatch.time, []

def dead(*_):
    raise RuntimeError("CUDA error: device-side assert triggered")

def time(*arguments):
    calls.append(1)
    if len(calls) == 2:
        {fault}
    return measure(*arguments)

CpuStopwatch.time = time
"""
OUT_OF_MEMORY = "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 46.88 GiB.')"
DEATH = "torch.cuda.is_initialized, torch.cuda.synchronize = (lambda: True), dead; dead()"


def run(folder: Path, fault: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and results of three small layers, the second of which has the fault."""
    (folder / "fault.py").write_text(PLUGIN.format(fault=fault))
    names = ("--model=tiny", "--stage=torch", "--stage=torch_sdpa", "--recipe=bf16", "--recipe=fp8_block_scaling")
    options = (
        "-p",
        "fault",
        "-p",
        "no:cacheprovider",
        "--device=cpu",
        "--benchmark-max-time=0.02",
        f"--benchmark-json={folder / 'out.json'}",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "benches/bench_layers.py", *names, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    return done.returncode, done.stdout, json.loads((folder / "out.json").read_text())


def test_out_of_memory_fails_the_case_and_the_suite_goes_on(tmp_path: Path) -> None:
    """The three passes of that layer have no time and a reason, the other nine have times."""
    code, output, results = run(tmp_path, OUT_OF_MEMORY)
    reason = "OutOfMemoryError: CUDA out of memory. Tried to allocate 46.88 GiB."
    assert code == pytest.ExitCode.TESTS_FAILED
    assert results["suite"]["not_measured"] == [
        {"case": f"layer/tiny/torch/fp8_block_scaling/sustained/{name}", "outcome": "failed", "reason": reason}
        for name in ("forward", "backward", "forward_backward")
    ]
    assert len(results["benchmarks"]) == 9
    assert reason in output
    assert "Traceback" not in output


def test_a_dead_gpu_ends_the_run_with_everything_before_it_saved(tmp_path: Path) -> None:
    """The case that killed it is named, and nothing is tried after it."""
    code, output, results = run(tmp_path, DEATH)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert [entry["case"] for entry in results["suite"]["not_measured"]] == [
        "layer/tiny/torch/fp8_block_scaling/sustained/forward"
    ]
    assert [entry["extra_info"]["pass_name"] for entry in results["benchmarks"]] == [
        "forward",
        "backward",
        "forward_backward",
    ]
    assert "the GPU can no longer be used in this process: RuntimeError: CUDA error: device-side assert" in output
    assert "Traceback" not in output
