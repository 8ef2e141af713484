"""What a user types at pytest: options, their errors, what starts fast, and the file that is written."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

from benches.report.analysis import SCHEMA
from shapes.models import HYPERPARAMETERS, MODELS
from shapes.recipes import RECIPES
from shapes.stages import STAGES

ROOT = Path(__file__).parents[2]
# Not for a run of seconds: a cache of its own, and Hypothesis' plugin, which imports all of it to sum up nothing.
PLUGINS = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
H200 = ROOT / "benches/baselines/nvidia-h200-sm90/te-2.20.2.json"
XDIST = pytest.mark.skipif(not find_spec("xdist"), reason="needs pytest-xdist")
QUICK = ("--model=tiny", "--stage=torch_sdpa", "--recipe=bf16", "--benchmark-max-time=0.05")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, where the suite is, on the CPU's cases unless they say otherwise."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment | {"COLUMNS": "120"},
        text=True,
        capture_output=True,
        timeout=120,
    )


def suite(*options: str) -> subprocess.CompletedProcess[str]:
    """`python -m pytest benches` with these options."""
    return run("-m", "pytest", "benches", *PLUGINS, "--device=cpu", *options)


def collected(*options: str) -> list[str]:
    """Names of the tests that would run."""
    done = suite("--collect-only", "-q", *options)
    assert done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout + done.stderr
    return [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line]


class TestErrors:
    """Options that cannot be."""

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            pytest.param(["--model=gpt5"], ["'gpt5'", *MODELS], id="model"),
            pytest.param(["--stage=te"], ["'te'", *STAGES], id="stage"),
            pytest.param(["--recipe=fp8"], ["'fp8'", *RECIPES], id="recipe"),
            pytest.param(["--shapes=128x256"], ["'128x256'", "MxKxN"], id="shape"),
            pytest.param(["--hidden-size=100"], ["hidden_size=100", "num_attention_heads=8"], id="hyperparameter"),
            pytest.param(["--recipe=mxfp8", "--no-fp8"], ["mxfp8"], id="no recipe left"),
            pytest.param(["--shapes=8x16x32", "--sequence-length=64"], ["sequence_length", "shapes"], id="no model"),
            pytest.param(["--gate-strict"], ["--benchmark-compare"], id="strict about nothing"),
            pytest.param(["--benchmark-compare", "--benchmark-disable"], ["--benchmark-disable"], id="disabled gate"),
            pytest.param(["--benchmark-compare", "-n2"], ["-n"], id="gate in parallel", marks=XDIST),
            pytest.param(
                ["--benchmark-json=/dev/null", "-n2"], ["--benchmark-json"], id="results in parallel", marks=XDIST
            ),
            pytest.param(["--benchmark-compare-fail=min:5%"], ["needs --benchmark-compare"], id="nothing to compare"),
            pytest.param(["--benchmark-storage=ftp://x"], ["--benchmark-storage=ftp://x"], id="storage"),
            pytest.param(["--benchmark-storage=/dev/null", "--benchmark-autosave"], ["no folder"], id="no folder"),
            pytest.param([f"--benchmark-compare={ROOT}"], ["there is no such file"], id="folder"),
            pytest.param([f"--benchmark-compare={ROOT / 'pytest.ini'}"], ["pytest.ini: is not JSON"], id="no JSON"),
        ],
    )
    def test_one_line_says_what_would_be_right(self, options: list[str], words: list[str]) -> None:
        """Exit code 4, one line on standard error with everything known, and nothing else."""
        done = suite(*options)
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert done.stdout == ""
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("ERROR: ")
        assert [word for word in words if word not in line] == []

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--benchmark-compare=nowhere.json"], "--benchmark-compare=nowhere.json: there is no such file"),
            (
                ["--benchmark-compare", "--benchmark-storage={folder}"],
                "--benchmark-compare: no baseline of this machine is stored",
            ),
        ],
    )
    def test_a_baseline_that_is_not_there_ends_the_run_before_it_measures(
        self, options: list[str], words: str, tmp_path: Path
    ) -> None:
        """pytest-benchmark warns, and would let everything pass."""
        if "{folder}" in options[-1] and list((ROOT / ".benchmarks").glob("cpu-*/*.json")):
            pytest.skip("this checkout has a baseline of a CPU, maybe this one")
        done = suite(*QUICK, *(option.format(folder=tmp_path) for option in options))
        assert (done.returncode, done.stdout) == (pytest.ExitCode.USAGE_ERROR, "")
        assert done.stderr.strip().startswith(f"ERROR: {words}")

    def test_results_do_not_overwrite_what_they_are_compared_with(self, tmp_path: Path) -> None:
        """Before pytest-benchmark 5.3 the file is gone when options are read; then it is refused as an empty one."""
        file = tmp_path / "both.json"
        file.write_bytes(H200.read_bytes())
        done = suite(f"--benchmark-compare={file}", f"--benchmark-json={file}")
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        (line,) = done.stderr.strip().splitlines()
        assert line.endswith(("--benchmark-compare reads the same file", "is empty"))

    def test_a_gpu_that_is_not_there_is_one_line_and_not_a_failure_per_case(self) -> None:
        """--device=cuda where the driver offers no GPU; what would run can still be listed."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            done = suite("--device=cuda", "--model=tiny")
            assert done.returncode == pytest.ExitCode.USAGE_ERROR
            assert done.stderr.strip() == "ERROR: --device cuda: the CUDA driver offers no GPU"
            assert collected("--device=cuda", "--model=tiny", "--stage=te_layer", "--recipe=bf16")


class TestStartingFast:
    """Nothing heavy is imported before there is something to run."""

    @pytest.mark.parametrize(
        "options", [["--collect-only"], ["--help"], ["--collect-only", f"--benchmark-compare={H200}"]]
    )
    def test_torch_is_not_imported(self, options: list[str]) -> None:
        """Nor anything else that takes a second."""
        script = f"""
import sys, pytest
code = pytest.main(["benches", "-q", "-p", "no:cacheprovider", "--device=cpu", *{options!r}])
print("imported:", sorted({{"torch", "transformer_engine", "matplotlib", "rich"}} & sys.modules.keys()))
sys.exit(code)
"""
        done = run("-c", script)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == "imported: []"

    def test_collecting_takes_less_than_two_seconds(self) -> None:
        """Of processor time, which other processes change less than the clock; the better of two tries."""
        times = []
        for _ in range(2):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            suite("--collect-only", "-q")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            if times[-1] < 2.0:
                return
        pytest.fail(f"took {min(times):.2f} s")

    def test_help_lists_every_option_of_the_suite(self) -> None:
        """One for each hyperparameter, and the choices."""
        text = run("-m", "pytest", "--help").stdout
        options = ["device", "model", "stage", "recipe", "shapes", "pre-quantize", "no-fp8", "no-fp4"]
        options += [name.replace("_", "-") for name in HYPERPARAMETERS]
        assert [name for name in options if f"  --{name}" not in text] == []


def test_what_disables_and_enables_measures_as_ever(tmp_path: Path) -> None:
    """With controls before and after: --benchmark-enable is stronger."""
    file = tmp_path / "out.json"
    done = suite(*QUICK, "--benchmark-disable", "--benchmark-enable", f"--benchmark-json={file}", "-k", "forward")
    assert done.returncode == 0, done.stdout
    results = json.loads(file.read_text())
    assert results["benchmarks"]
    assert [one["name"] for one in results["suite"]["controls"]].count("gemm") == 2


class TestSelecting:
    """pytest's own ways of choosing tests."""

    def test_everything_is_collected_by_default_and_once(self) -> None:
        """108 layers, 132 GEMMs and 40 quantizations of the model for CPUs, as test_cases.py counts them."""
        names = collected()
        assert len(names) == len(set(names)) == 108 + 132 + 40

    def test_k_chooses_by_words_of_a_case(self) -> None:
        """Linears, passes, recipes and stages are words in the names of tests."""
        assert collected(*QUICK, "-k", "wgrad and mlp_up") == ["test_gemm[tiny-bf16-in_layer-autocast-wgrad-mlp_up]"]

    def test_m_chooses_by_regime(self) -> None:
        """On a CPU layers are sustained, GEMMs are not, and nothing is rested."""
        assert collected(*QUICK, "-m", "sustained or rested") == [
            "test_layer[tiny-torch_sdpa-bf16-eager-sustained-forward]",
            "test_layer[tiny-torch_sdpa-bf16-eager-sustained-backward]",
            "test_layer[tiny-torch_sdpa-bf16-eager-sustained-forward_backward]",
        ]

    def test_pre_quantize_measures_gemms_alone(self) -> None:
        """The autocast mode of quantized recipes is left out."""
        names = collected("--recipe=mxfp8", "--pre-quantize", "-k", "test_gemm")
        assert len(names) == 12
        assert all("-prequantized-" in name for name in names)

    def test_disabling_benchmarks_runs_each_case_once_without_a_time(self) -> None:
        """As a check that everything runs: no table, no analysis."""
        done = suite(*QUICK, "--benchmark-disable", "-k", "qkv or test_layer")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "6 passed" in done.stdout.splitlines()[-1]
        assert "Median" not in done.stdout
        assert "measured" not in done.stdout

    def test_disabled_benchmarks_that_ran_are_not_called_missing(self) -> None:
        """Where others are skipped, which is shown."""
        done = suite(*QUICK, "--stage=te_layer", "--benchmark-disable", "-k", "test_layer")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Cases: 0 measured, 0 failed, 3 skipped" in done.stdout


# --- one short run and what it leaves --------------------------------------------------------------------------

MODEL = "tiny+sequence_length:64"
LAYER_KEYS = {"case", "kind", "model", "stage", "recipe", "regime", "pass_name"}
GEMM_KEYS = {"case", "kind", "model", "recipe", "regime", "mode", "pass_name", "linear", "m", "n", "k", "flops"}
FIGURE_KEYS = {"interval_s", "stopped", "host_min_s", "host_median_s", "launch_bound"}


def refuse(constant: str) -> NoReturn:
    """For json: NaN and infinities are no numbers of a results file."""
    raise ValueError(f"{constant} in a results file")


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from strings(child)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a short run printed, and the file that it wrote."""
    path = tmp_path_factory.mktemp("results") / "results.json"
    options = ("--sequence-length=64", "--stage=te_layer", "--benchmark-group-by=param:recipe")
    done = suite(*QUICK, *options, f"--benchmark-json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(path.read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def printed(short_run: tuple[str, dict[str, Any]]) -> str:
    """Its standard output."""
    return short_run[0]


@pytest.fixture(scope="module")
def results(short_run: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Its results file; every number in it is finite."""
    return short_run[1]


class TestShortRun:
    """tiny with another sequence length: PyTorch's layer is measured, Transformer Engine's is skipped."""

    def test_each_measured_case_has_the_keys_of_the_contract(self, results: dict[str, Any]) -> None:
        """Kind, axes and figure; a GEMM its shape too."""
        keys = {"layer": LAYER_KEYS | FIGURE_KEYS, "gemm": GEMM_KEYS | FIGURE_KEYS}
        infos = [entry["extra_info"] for entry in results["benchmarks"]]
        assert sorted(info["kind"] for info in infos) == ["gemm"] * 12 + ["layer"] * 3
        assert [keys[info["kind"]] - info.keys() for info in infos] == [set()] * 15

    def test_a_changed_model_has_a_name_of_its_own(self, results: dict[str, Any]) -> None:
        """In every case and in the list of models, with what it was changed to."""
        assert {entry["extra_info"]["model"] for entry in results["benchmarks"]} == {MODEL}
        assert list(results["suite"]["models"]) == [MODEL]
        assert results["suite"]["models"][MODEL]["sequence_length"] == 64
        assert results["suite"]["models"][MODEL]["tokens"] == 64

    def test_a_case_is_named_by_its_values(self, results: dict[str, Any]) -> None:
        """Kind and axes with slashes between."""
        names = {entry["extra_info"]["case"] for entry in results["benchmarks"]}
        assert f"layer/{MODEL}/torch_sdpa/bf16/eager/sustained/forward_backward" in names
        assert f"gemm/{MODEL}/bf16/in_layer/autocast/dgrad/mlp_down" in names
        assert len(names) == 15

    def test_a_gemm_has_its_shape(self, results: dict[str, Any]) -> None:
        """dgrad of mlp_down of 64 tokens: 64 x 512, contracted over 256."""
        name = f"gemm/{MODEL}/bf16/in_layer/autocast/dgrad/mlp_down"
        (info,) = (e["extra_info"] for e in results["benchmarks"] if e["extra_info"]["case"] == name)
        assert (info["m"], info["n"], info["k"], info["flops"]) == (64, 512, 256, 2 * 64 * 512 * 256)

    def test_rounds_and_intervals_are_those_of_the_stopwatch(self, results: dict[str, Any]) -> None:
        """The timer says so; an interval encloses its median, and is there from six rounds on."""
        for entry in results["benchmarks"]:
            stats, info = entry["stats"], entry["extra_info"]
            assert entry["options"]["timer"] == "measured_rounds"
            assert len(stats["data"]) == stats["rounds"] >= 5
            assert (info["interval_s"] is not None) == (stats["rounds"] >= 6)
            if info["interval_s"]:
                assert info["interval_s"][0] <= stats["median"] <= info["interval_s"][1]

    def test_both_passes_together_are_the_sum_of_each_round(self, results: dict[str, Any]) -> None:
        """forward, backward and both come from the same rounds."""
        data = {e["extra_info"]["pass_name"]: e["stats"]["data"] for e in results["benchmarks"]}
        assert data["forward_backward"] == [sum(pair) for pair in zip(data["forward"], data["backward"], strict=True)]

    def test_skipped_cases_are_listed_with_their_reasons(self, results: dict[str, Any]) -> None:
        """The three passes of the stage that needs a GPU."""
        reason = "stage te_layer needs Transformer Engine and a GPU; this run is on the CPU"
        assert results["suite"]["not_measured"] == [
            {"case": f"layer/{MODEL}/te_layer/bf16/eager/sustained/{name}", "outcome": "skipped", "reason": reason}
            for name in ("forward", "backward", "forward_backward")
        ]

    def test_the_file_says_what_it_is(self, results: dict[str, Any]) -> None:
        """Schema, device, versions."""
        assert (results["suite"]["schema"], results["suite"]["device"]) == (SCHEMA, "cpu")
        assert results["machine_info"]["gpu"] is None
        assert {"torch", "numpy", "pytest-benchmark"} <= results["machine_info"]["versions"].keys()

    def test_the_hosts_name_is_left_out(self, results: dict[str, Any]) -> None:
        """Baselines are published."""
        assert results["machine_info"]["node"] == ""
        assert platform.node() not in list(strings(results["machine_info"]))

    def test_groups_are_those_that_were_asked_for(self, printed: str) -> None:
        """--benchmark-group-by=param:recipe makes one table of the one recipe."""
        assert "benchmark 'recipe=bf16': 15 tests" in printed

    def test_the_terminal_ends_with_an_analysis_of_the_model(self, printed: str) -> None:
        """After pytest-benchmark's table."""
        assert printed.index("Median") < printed.index(f"\n{MODEL}: 1 x 64 = 64 tokens")
        assert "15 measured, 0 failed, 3 skipped" in printed


def test_shapes_measure_gemms_only(tmp_path: Path) -> None:
    """fprop, dgrad and wgrad of the shape; no layer has a time or a reason for having none."""
    path = tmp_path / "results.json"
    done = suite("--shapes=128x256x512", "--recipe=bf16", "--benchmark-max-time=0.05", f"--benchmark-json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text(), parse_constant=refuse)
    assert [entry["extra_info"]["case"] for entry in results["benchmarks"]] == [
        f"gemm/shapes/bf16/in_layer/autocast/{name}/128x256x512" for name in ("fprop", "dgrad", "wgrad")
    ]
    assert results["suite"]["not_measured"] == []


def test_a_misaligned_model_is_skipped_with_the_reason() -> None:
    """Sizes that a recipe cannot have are no failure, and the summary names linear, rule and size."""
    done = suite("--hidden-size=100", "--num-attention-heads=4", "--recipe=mxfp8", "--stage=torch_sdpa", "-rs")
    assert done.returncode == 0, done.stdout + done.stderr
    reason = "linear qkv: mxfp8 needs in_features to be a multiple of 32 in the forward pass, got 100"
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert skipped
    assert [line for line in skipped if reason not in line] == []
    assert "35 skipped" in done.stdout.splitlines()[-1]
