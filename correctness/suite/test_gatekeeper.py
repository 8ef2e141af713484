"""The gate in pytest: which baseline, when a run fails, and that suspects get a second look."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benches.harness import device
from benches.harness.stopwatch import Figure
from benches.harness.workbench import Workbench
from benches.judging import gatekeeper
from benches.judging.baselines import stored
from benches.judging.gatekeeper import AGAIN, MOST_SUSPECTS, Gatekeeper, choose_baseline
from benches.report.analysis import SCHEMA
from correctness.suite.test_options import PLUGINS
from shapes.cases import LAYER_PASSES, LayerCase

ROOT = Path(__file__).parents[2]
GPU = {"name": "NVIDIA H200", "compute_capability": "9.0", "uuid": "one"}
CASES = [LayerCase("tiny", "torch", "bf16", "eager", "rested", name) for name in LAYER_PASSES]


def results(*medians: float, day: int = 1, gpu: Any = GPU) -> dict[str, Any]:
    """A results file with a layer's three cases."""
    return {
        "datetime": f"2026-01-{day:02}T00:00:00+00:00",
        "machine_info": {"gpu": gpu, "versions": {}},
        "suite": {"schema": SCHEMA, "device": "cuda", "models": {"tiny": {"hidden_size": 8}}, "evidence": {}},
        "benchmarks": [
            {
                "name": case.id,
                "stats": {"median": median},
                "extra_info": {
                    **{"case": case.id, "kind": "layer", "evidence": "layer/tiny/torch/bf16/eager"},
                    **dict(zip(case.axes, case.values, strict=True)),
                },
            }
            for case, median in zip(CASES, medians, strict=False)
        ],
    }


def keeper(strict: bool = False) -> Gatekeeper:
    """One that judges against five runs without noise to speak of."""
    found = Gatekeeper(strict=strict)
    for day in range(2, 7):
        found.add(results(*(time * (1 + day * 1e-4) for time in (0.01, 0.02, 0.03)), day=day), f"run {day}")
    return found


class Source:
    """What gives times again: those of a list, one after the other."""

    def __init__(self, times: list[float]) -> None:
        self.times = times

    def figure(self, case: LayerCase) -> Figure:
        return Figure([self.times.pop(0)] * 9, [], precise=True)


def look_again(found: Gatekeeper, run: dict[str, Any], build: Callable[[], Any]) -> None:
    found.builders = {"layer/tiny/torch/bf16/eager": build}
    found.measure_again(run, Workbench(), lambda: None)
    found.judge(run)


class TestSecondLook:
    """Suspects are measured again; two of three decide."""

    def test_a_case_that_stays_slow_is_slower(self) -> None:
        """With new tensors each time, and what was found in the file."""
        run, times = results(0.011, 0.02, 0.03), [0.0111, 0.0109]
        found = keeper()
        look_again(found, run, lambda: Source(times))
        assert run["benchmarks"][0]["extra_info"]["again_s"] == [0.0111, 0.0109]
        assert found.outcome
        assert found.outcome.counts["SLOWER"] == 1
        assert found.exit_code() == 1

    def test_a_case_that_was_slow_once_is_not(self) -> None:
        """And cases that were not suspected are not measured again."""
        run, times = results(0.011, 0.02, 0.03), [0.01, 0.01]
        found = keeper()
        look_again(found, run, lambda: Source(times))
        assert ["again_s" in entry["extra_info"] for entry in run["benchmarks"]] == [True, False, False]
        assert found.outcome
        assert found.outcome.counts["SLOWER"] == 0
        assert found.exit_code() == 0

    def test_what_cannot_be_measured_again_stays_slower(self) -> None:
        """With a note that says why."""

        def build() -> Any:
            raise RuntimeError("CUDA out of memory")

        found = keeper()
        look_again(found, results(0.011, 0.02, 0.03), build)
        assert found.exit_code() == 1
        assert "layer/tiny/torch/bf16/eager could not be measured again" in found.report()
        assert "CUDA out of memory" in found.report()

    def test_a_whole_suite_that_is_slower_is_not_measured_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """That is no noise of one measurement."""
        monkeypatch.setattr(gatekeeper, "MOST_SUSPECTS", 2)
        assert MOST_SUSPECTS > 2
        run, found = results(0.011, 0.022, 0.033), keeper()
        look_again(found, run, lambda: Source([]))
        assert not any("again_s" in entry["extra_info"] for entry in run["benchmarks"])
        assert "3 cases seem slower: too many" in found.report()
        assert AGAIN == 2


class TestBaseline:
    """Which file a run is judged against."""

    def test_the_newest_version_of_the_gpu_s_folder_is_taken(self, tmp_path: Path) -> None:
        """2.10 is newer than 2.9; a build of a commit, a pre-release and another name are no release."""
        folder = tmp_path / "benches" / "baselines" / "nvidia-h200-sm90"
        folder.mkdir(parents=True)
        for version in ("2.9.0", "2.10.0", "2.3.1", "2.10.0+g1a2b", "2.11.0rc1", "2.12.0.dev0", "99-mine"):
            (folder / f"te-{version}.json").touch()
        assert stored({"gpu": GPU}, tmp_path) == folder / "te-2.10.0.json"
        assert stored({"gpu": GPU | {"name": "NVIDIA B200", "compute_capability": "10.0"}}, tmp_path) is None

    @pytest.mark.parametrize(("asked", "chosen"), [(True, "te-2.20.2.json"), ("0001", "0001"), (None, None)])
    def test_a_name_is_left_alone(self, monkeypatch: pytest.MonkeyPatch, asked: Any, chosen: Any) -> None:
        """Only --benchmark-compare without one finds the stored baseline of the GPU."""
        monkeypatch.setattr(device, "gpu_model", lambda: {"name": "NVIDIA H200", "compute_capability": "9.0"})
        option = SimpleNamespace(benchmark_compare=asked)
        config = SimpleNamespace(option=option, rootpath=ROOT, getoption=lambda _: option.benchmark_compare)
        choose_baseline(cast(pytest.Config, config), "cuda")
        assert option.benchmark_compare == chosen or str(option.benchmark_compare).endswith(f"/{chosen}")

    def test_another_machine_s_is_refused_before_anything_is_measured(self) -> None:
        """In one line."""
        other = GPU | {"name": "NVIDIA B200", "compute_capability": "10.0"}
        with pytest.raises(pytest.UsageError, match=r"run 2 is of NVIDIA H200 .*, and this is NVIDIA B200"):
            keeper().check(results(0.01, gpu=other))

    @pytest.mark.parametrize("raw", [{"benchmarks": []}, {"suite": {"schema": 1}}, []])
    def test_what_is_no_results_file_is_refused(self, raw: Any) -> None:
        """In one line."""
        with pytest.raises(pytest.UsageError, match="--benchmark-compare: some file"):
            Gatekeeper(strict=False).add(raw, "some file")


def test_a_run_that_could_not_be_judged_does_not_pass() -> None:
    """It has nothing of the baseline's."""
    found = keeper()
    found.judge(results(*[0.01] * 3) | {"benchmarks": []})
    assert found.exit_code() == 1
    assert "not judged: " in found.report()


def test_what_the_gate_cannot_make_sense_of_is_a_note() -> None:
    """An exception in pytest's hook would keep pytest-benchmark from saving what was measured."""
    found = keeper()
    found.judge(results(0.01, 0.02, 0.03))
    assert found.exit_code() == 0
    spoiled = results(0.01, 0.02, 0.03)
    spoiled["benchmarks"][0]["extra_info"]["segments"] = ["forward"]
    spoiled["suite"]["evidence"] = {"layer/tiny/torch/bf16/eager": {"segments": {}}}
    found.judge(spoiled)
    assert found.exit_code() == 1
    assert "not judged: not a usable results file (KeyError: 'forward')" in found.report()


def test_a_baseline_that_the_gate_cannot_make_sense_of_is_refused_before_anything_is_measured() -> None:
    """As are several of different versions."""
    spoiled = results(0.01)
    spoiled["benchmarks"][0]["extra_info"]["segments"] = ["forward"]
    spoiled["suite"]["evidence"] = {"layer/tiny/torch/bf16/eager": {"segments": {}}}
    with pytest.raises(pytest.UsageError, match=r"^--benchmark-compare: old: not a usable results file") as error:
        Gatekeeper(strict=False).add(spoiled, "old")
    assert "\n" not in str(error.value)
    found, newer = keeper(), results(0.01, day=9)
    newer["machine_info"]["versions"]["transformer_engine"] = "2.21"
    found.check(results(0.01, day=10))
    found.add(newer, "newer")
    with pytest.raises(pytest.UsageError, match=r"runs with transformer_engine 2\.21 and None"):
        found.check(results(0.01, day=10))


def test_without_a_comparison_nothing_is_judged() -> None:
    """And nothing fails."""
    found = Gatekeeper(strict=True)
    assert not found.judges
    assert found.exit_code() == 0


COMMAND = [sys.executable, "-m", "pytest", "benches/bench_layers.py", *PLUGINS, "--device=cpu"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # more get into each other's way where many tests run at once
SMALL = ["--model=tiny", "--stage=torch_sdpa", "--recipe=bf16", "--benchmark-max-time=0.05", "--benchmark-quiet"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """A real run of three cases on the CPU."""
    return subprocess.run(
        [*COMMAND, *SMALL, *options], cwd=ROOT, env=os.environ | ONE_THREAD, text=True, capture_output=True
    )


def test_a_planted_slowdown_fails_a_real_run(tmp_path: Path) -> None:
    """100 ms more than a few: named, looked at again, and exit code 1; -k leaves a case out without failing it."""
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert run(f"--benchmark-json={before}").returncode == 0
    baseline = json.loads(before.read_text())
    baseline["suite"]["controls"] = []  # they could say that this machine, busy with other tests, is a slower one now
    before.write_text(json.dumps(baseline))
    slow = "--plant=sustained/forward$=+100000us"
    done = run(f"--benchmark-compare={before}", f"--benchmark-json={after}", slow, "-k", "forward")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "SLOWER" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "machine_info" not in done.stdout + done.stderr  # pytest-benchmark would print each flag of the CPU, twice
    again = {
        entry["extra_info"]["pass_name"]: entry["extra_info"].get("again_s")
        for entry in json.loads(after.read_text())["benchmarks"]
    }
    assert again.keys() == {"forward", "forward_backward"}
    assert min(again["forward"]) > 0.1
    assert "MISSING" not in done.stdout
