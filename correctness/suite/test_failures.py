"""One case that goes wrong: the others go on, and whatever was measured is in the file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benches.harness.journal import read
from benches.report.analysis import analyse
from correctness.suite.test_options import PLUGINS

ROOT = Path(__file__).parents[2]

# A plugin that makes the second measurement fail; three cases come from each measurement.
PLUGIN = """
import torch
from benches.harness.stopwatch import CpuStopwatch

measure, calls = CpuStopwatch.time, []

def dead(*_):
    raise RuntimeError("CUDA error: device-side assert triggered")

def time(watch, *arguments):
    if watch.program.segments[0].name == "forward":  # a layer, no control
        calls.append(1)
        if len(calls) == 2:
            {fault}
    return measure(watch, *arguments)

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
        *PLUGINS,
        "--device=cpu",
        "--benchmark-max-time=0.02",
        f"--benchmark-json={folder / 'out.json'}",
        f"--journal={folder / 'out.jsonl'}",
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "benches/bench_layers.py", *names, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    results = json.loads((folder / "out.json").read_text())
    assert_same(read((folder / "out.jsonl").read_text()).results, results)
    return done.returncode, done.stdout, results


def assert_same(recovered: dict[str, Any], saved: dict[str, Any]) -> None:
    """The journal lacks nothing that the file has."""
    assert recovered["benchmarks"] == saved["benchmarks"]
    for name in ("selected", "not_measured", "evidence", "not_run"):
        assert recovered["suite"][name] == saved["suite"][name]


def test_out_of_memory_fails_the_case_and_the_suite_goes_on(tmp_path: Path) -> None:
    """The three passes of that layer have no time and a reason, the other nine have times."""
    code, output, results = run(tmp_path, OUT_OF_MEMORY)
    reason = "OutOfMemoryError: CUDA out of memory. Tried to allocate 46.88 GiB."
    assert code == pytest.ExitCode.TESTS_FAILED
    assert results["suite"]["not_measured"] == [
        {"case": f"layer/tiny/torch/fp8_block_scaling/eager/sustained/{name}", "outcome": "failed", "reason": reason}
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
        "layer/tiny/torch/fp8_block_scaling/eager/sustained/forward"
    ]
    assert [entry["extra_info"]["pass_name"] for entry in results["benchmarks"]] == [
        "forward",
        "backward",
        "forward_backward",
    ]
    assert "the GPU can no longer be used in this process: RuntimeError: CUDA error: device-side assert" in output
    assert "Traceback" not in output


QUICK = ("--model=tiny", "--stage=torch", "--stage=torch_sdpa", "--recipe=bf16", "--device=cpu", "--benchmark-quiet")


def command(*options: str) -> list[str]:
    """A short run of layers on the CPU."""
    return [sys.executable, "-m", "pytest", *PLUGINS, "benches/bench_layers.py", *QUICK, *options]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--benchmark-json=" + "a" * 300, "too long"),
        ("--benchmark-max-time=sNaN", "must be a number of seconds"),
        ("--benchmark-json=no/such/folder/x.json", "there is no folder"),
        ("--benchmark-json=benches", "is a folder"),
        ("--benchmark-max-time=nan", "must be a number of seconds"),
        ("--benchmark-max-time=-1", "must be a number of seconds"),
    ],
)
def test_what_would_fail_after_measuring_is_refused_before(option: str, words: str) -> None:
    """One line and exit code 4; nothing is measured."""
    if "json" in option and importlib.metadata.version("pytest-benchmark") < "5.3":
        pytest.skip("pytest-benchmark opens the file itself before 5.3")
    done = subprocess.run(command(option), cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("ERROR: --benchmark-")
    assert words in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_results_that_cannot_be_saved_are_saved_elsewhere(tmp_path: Path) -> None:
    """The disk fills up while the suite measures: one line says where the journal went, and it is complete."""
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    options = ("--benchmark-max-time=0.02", "--benchmark-json=/dev/full", f"--journal={full}")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command(*options), cwd=ROOT, env=environment, text=True, capture_output=True, timeout=120)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "Traceback" not in done.stdout + done.stderr
    (path,) = tmp_path.glob("journal-*.jsonl")
    lines = [line for line in done.stdout.splitlines() if "No space left on device" in line]
    assert lines == [
        f"journal: {path} ({full}: No space left on device)",
        "ERROR: pytest-benchmark could not finish: OSError: [Errno 28] No space left on device",
        f"not saved: `python -m benches.journal {path} -o RESULTS.json` makes a results file of it"
        f" ({full}: No space left on device)",
    ]
    results = read(path.read_text()).results
    assert len(results["benchmarks"]) == 6
    analyse(results)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_run_that_is_ended_saves_what_it_has(tmp_path: Path, number: signal.Signals) -> None:
    """A batch system, a lost terminal and Ctrl-C: the file has the cases before, and says how many never ran."""
    path = tmp_path / "out.json"
    options = ("--benchmark-max-time=1", f"--benchmark-json={path}", f"--journal={tmp_path / 'out.jsonl'}", "-v")
    heed = partial(signal.signal, number, signal.SIG_DFL)  # a shell has what it runs in the background ignore Ctrl-C
    with subprocess.Popen(command(*options), cwd=ROOT, text=True, stdout=subprocess.PIPE, preexec_fn=heed) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if "forward_backward] PASSED" in line:
                break
        run.send_signal(number)
        output = run.stdout.read()
        code = run.wait(60)
    results = json.loads(path.read_text())
    assert len(results["benchmarks"]) == results["suite"]["not_run"] == 3
    assert_same(read((tmp_path / "out.jsonl").read_text()).results, results)
    # Python 3.11 may give a frame that was interrupted no line number, on which pytest fails after all is saved.
    if sys.version_info[:2] != (3, 11) or code == pytest.ExitCode.INTERRUPTED:
        assert code == pytest.ExitCode.INTERRUPTED
        assert "3 not run" in output


def test_a_second_signal_does_not_stop_the_saving(tmp_path: Path) -> None:
    """Ctrl-C by an impatient user, or a batch system that signals twice."""
    path = tmp_path / "out.json"
    (tmp_path / "impatient.py").write_text(
        "import os, signal\n"
        "def pytest_benchmark_update_json(config):\n"  # while the file is being made
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run(
        command("-p", "impatient", "--benchmark-max-time=0.02", f"--benchmark-json={path}"),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert len(json.loads(path.read_text())["benchmarks"]) == 6
    (journal,) = re.findall(r"^journal: (\S+)$", done.stdout, re.MULTILINE)
    assert not (ROOT / journal).exists(), "it is not needed once the results are saved"
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.OK


def test_skipped_cases_have_their_reasons_shown_even_if_nothing_ran() -> None:
    """Without -rs, and without a time."""
    options = ("--stage=te_layer", "--model=tiny", "--recipe=bf16", "--device=cpu")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, "benches/bench_layers.py", *options],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "120"},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == pytest.ExitCode.OK
    assert "3 skipped: stage te_layer needs Transformer Engine and a GPU; this run is on the CPU" in done.stdout
