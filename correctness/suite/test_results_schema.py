"""A results file is what benches/results.schema.json says: of a real run, of simulated GPUs, of stored baselines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benches.harness import controls, kernels
from benches.harness.controls import Absent, Controls
from benches.harness.device import DEVICES, machine_info
from benches.harness.gpu_state import GAUGES, REASONS, GpuWatch, throttled
from benches.harness.measurements import GemmMeasurement, LayerMeasurement, SharedMeasurement
from benches.harness.medians import median
from benches.harness.plugin import extra_info, pytest_benchmark_update_json, pytest_benchmark_update_machine_info
from benches.harness.stash import PLANTS, RESULTS, SELECTION, new_results
from benches.harness.stopwatch import Limits
from benches.judging.baselines import pool
from benches.report.analysis import MALFORMED, REGIMES, SCHEMA, analyse
from correctness.suite.fake_nvml import UUID, FakeNvml
from correctness.suite.fake_timeline import MS, FakeTimeline
from correctness.suite.test_options import QUICK, refuse, suite
from shapes.backends.executed import ExecutedGemm
from shapes.cases import GEMM_REGIMES, LAYER_PASSES, LAYER_REGIMES, MODES, GemmCase, LayerCase
from shapes.gemms import LINEARS, PASSES, QUANTIZATIONS
from shapes.models import ACTIVATIONS, ATTENTION_MASKS, NORMALIZATIONS, ModelConfig
from shapes.program import Program, Segment
from shapes.recipes import RECIPES
from shapes.selection import Selection, select
from shapes.stages import EXECUTIONS, STAGES

jsonschema = pytest.importorskip("jsonschema")
Draft202012Validator = jsonschema.Draft202012Validator

BENCHES = Path(__file__).parents[2] / "benches"
JSON_SCHEMA = json.loads((BENCHES / "results.schema.json").read_text(encoding="utf-8"))
BASELINES = sorted((BENCHES / "baselines").rglob("*.json"))


# --- what refuses a file ---------------------------------------------------------------------------------------


def finite(number: str) -> float:
    """For json, which reads 1e999 as infinity without a word."""
    return float(number) if math.isfinite(float(number)) else refuse(number)


def loose_ends(results: Mapping[str, Any]) -> Iterator[str]:
    """What a case refers to and is not there, and names that are not those of its values. No schema can say this."""
    for info in (benchmark["extra_info"] for benchmark in results["benchmarks"]):
        kind = LayerCase if info["kind"] == "layer" else GemmCase
        if info["case"] != kind(**{axis: info[axis] for axis in kind.axes}).id:
            yield f"{info['case']} is not the name of its values"
        found = results["suite"]["evidence"].get(info["evidence"], {"segments": {}})
        if lacking := [name for name in info["segments"] if name not in found["segments"]]:
            yield f"{info['case']}: no evidence {info['evidence']} of {', '.join(lacking)}"


def problems(text: str) -> list[str]:
    """Why a text is no results file, each line beginning with who says so."""
    try:
        results = json.loads(text, parse_constant=refuse, parse_float=finite)
    except ValueError as error:
        return [f"numbers: {error}"]
    errors = Draft202012Validator(JSON_SCHEMA).iter_errors(results)
    found = [f"schema: {error.json_path}: {error.message[:300]}" for error in errors]
    if not found:
        found += [f"references: {sentence}" for sentence in loose_ends(results)]
    try:
        analyse(results)
    except (ValueError, *MALFORMED) as error:
        found.append(f"analysis: {error}")
    return found


# --- a run on the CPU ------------------------------------------------------------------------------------------

IMPOSSIBLE = "999999999x999999999x16"  # no memory can hold it; and nvfp4 wants multiples of 16


@pytest.fixture(scope="module")
def cpu_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a short run: layers and GEMMs of a model smaller than tiny, and shapes that cannot be."""
    path = tmp_path_factory.mktemp("results") / "results.json"
    sizes = ("--hidden-size=64", "--intermediate-size=64", "--sequence-length=32", f"--shapes={IMPOSSIBLE}")
    done = suite(*QUICK, "--recipe=nvfp4", *sizes, "--benchmark-min-rounds=1", f"--benchmark-json={path}")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def cpu_file(cpu_text: str) -> Any:
    """The same, parsed."""
    return json.loads(cpu_text)


class TestCpuRun:
    """`pytest benches` on the CPU, as a user runs it."""

    def test_its_file_is_as_the_schema_says(self, cpu_text: str) -> None:
        """And every number is finite, every reference leads somewhere, and the report reads it."""
        assert problems(cpu_text) == []

    def test_every_kind_of_case_is_in_it(self, cpu_file: Any) -> None:
        """Both kinds, all passes and modes; skipped and failed ones have reasons."""
        infos = [benchmark["extra_info"] for benchmark in cpu_file["benchmarks"]]
        assert {info["kind"] for info in infos} == {"layer", "gemm"}
        assert {info["pass_name"] for info in infos} == {*LAYER_PASSES, *PASSES}
        assert {info["mode"] for info in infos if info["kind"] == "gemm"} == set(MODES)
        lost = cpu_file["suite"]["not_measured"]
        assert {(one["outcome"], one["case"].split("/")[2]) for one in lost} == {
            ("failed", "bf16"),
            ("skipped", "nvfp4"),
        }
        assert all(one["case"].endswith(IMPOSSIBLE) and one["reason"] for one in lost)

    def test_each_layer_and_group_of_gemms_has_evidence(self, cpu_file: Any) -> None:
        """Their GEMMs, and why there is no more to see on a CPU."""
        evidence = cpu_file["suite"]["evidence"]
        assert evidence.keys() == {benchmark["extra_info"]["evidence"] for benchmark in cpu_file["benchmarks"]}
        assert len(evidence) == 4
        for found in evidence.values():
            assert sum(len(segment["gemms"]) for segment in found["segments"].values()) == 12
            assert found["kernels_absent"]

    def test_controls_are_of_the_start_and_of_the_end(self, cpu_file: Any) -> None:
        """All of them, at least twice, in order of time; one needs a GPU."""
        names = [*controls.DEVICE_CONTROLS, *controls.HOST_CONTROLS]
        taken = cpu_file["suite"]["controls"]
        rounds, rest = divmod(len(taken), len(names))
        assert [entry["name"] for entry in taken] == names * rounds
        assert (rounds >= 2, rest) == (True, 0)
        assert [entry["time_s"] for entry in taken] == sorted(entry["time_s"] for entry in taken)
        assert {entry["name"] for entry in taken if "absent" in entry} == {"fp8_gemm", "short_kernels"}

    def test_it_says_where_it_comes_from(self, cpu_file: Any) -> None:
        """Versions, sources, commit and time."""
        machine = cpu_file["machine_info"]
        assert {"torch", "numpy", "pytest-benchmark"} <= machine["versions"].keys()
        assert cpu_file["suite"]["sources"]
        assert {"id", "dirty"} <= cpu_file["commit_info"].keys()
        assert cpu_file["datetime"]


# --- simulated GPUs --------------------------------------------------------------------------------------------

SIMULATED = Limits(max_time_s=0.2)
SEEN = {
    "backend": "FusedAttention (sub-backend 1)",
    "excluded": ["Disabling UnfusedDotProductAttention as causal"],
    "flash_attn": {"2": "2.8.3"},
}
UNSEEN: dict[str, Any] = {"backend": None, "excluded": [], "absent": "this version of Transformer Engine does not tell"}


class WatchedTimeline(FakeTimeline):
    """A simulated device whose state is NVML's, as CudaTimeline's is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.watch = GpuWatch(UUID, self.now)

    def glance(self) -> None:
        self.watch.glance()

    def begin_watch(self) -> None:
        self.watch.begin()

    def state(self) -> dict[str, Any]:
        return self.watch.report()

    def throttled(self, round_s: float) -> str | None:
        return throttled(self.watch.report(), self.watch.max_sm_clock_mhz, short=False)


def on_device(timeline: FakeTimeline, program: Program, real: bool = True) -> Program:
    """The program, whose segments also, or only, take time and memory of the simulated device."""

    def run(segment: Segment) -> None:
        if real:
            segment.run()
        timeline.allocate(4096)
        timeline.allocate(-1024)
        timeline.launch("nvjet_tst_128x128", 20 * MS)
        timeline.launch("a_kernel_of_tomorrow", MS)

    return Program([Segment(one.name, partial(run, one)) for one in program.segments], program.reset)


def simulated(patch: pytest.MonkeyPatch, selection: Selection, nvml: FakeNvml) -> Iterator[SharedMeasurement]:
    """A layer on a GPU that is too hot, one on a GPU of which nothing can be seen, and GEMMs on a cool one."""
    patch.setitem(sys.modules, "pynvml", nvml)
    (config,) = selection.models
    for stage, blind, attention in (("torch", "", SEEN), ("torch_sdpa", "torch.profiler saw no kernels", UNSEEN)):
        nvml.refused = {"nvmlInit"} if blind else set()
        timeline = WatchedTimeline(blind=blind)
        nvml.reasons = REASONS["hw_thermal_slowdown"] | REASONS["sw_power_cap"]
        layer = LayerMeasurement(config, stage, "bf16", "eager", "cpu", timeline, SIMULATED)
        patch.setattr(layer.step, "watch_attention", partial(nullcontext, attention))
        patch.setattr(layer, "_program_of_step", on_device(timeline, layer.step.program()))
        layer.evidence()  # of real GEMMs; to be timed they would take long
        patch.setattr(layer, "_program_of_step", on_device(timeline, layer.step.program(), real=False))
        yield layer
        nvml.reasons, nvml.refused = 0, set()
    timeline = WatchedTimeline()
    gemms = GemmMeasurement(selection.groups["shapes"], "bf16", "cpu", timeline, SIMULATED)
    whole, alone = gemms.steps.in_layer, gemms.steps.alone
    patch.setattr(gemms.steps, "in_layer", lambda: on_device(timeline, whole()))
    patch.setattr(gemms.steps, "alone", lambda *which: on_device(timeline, alone(*which)))
    yield gemms


def benchmark_of(source: SharedMeasurement, case: LayerCase | GemmCase, results: Any, selection: Selection) -> Any:
    """What the fixture `measure` and pytest-benchmark record."""
    evidence, figure = source.evidence(), source.figure(case)
    results["evidence"].setdefault(source.key, evidence.as_dict())
    proof = {"evidence": source.key, **evidence.summary(source.segments(case))}
    stats = {"median": median(figure.samples_s), "rounds": len(figure.samples_s)}
    return {"name": case.id, "stats": stats, "extra_info": extra_info(case, figure, proof, selection)}


def take_controls(patch: pytest.MonkeyPatch, taken: list[dict[str, Any]]) -> None:
    """One that has a time, one that is absent, one that breaks, and the host's own."""
    timeline = WatchedTimeline()

    def absent(_: str) -> Callable[[], object]:
        raise Absent("this GPU has no FP8")

    makes = {
        "gemm": lambda _: lambda: timeline.launch("nvjet_tst_128x128", MS),
        "fp8_gemm": absent,
        "copy": lambda _: lambda: 1 // 0,
    }
    patch.setattr(controls, "DEVICE_CONTROLS", makes)
    Controls("cuda", timeline, SIMULATED, taken).take()


def gpu_of_torch(patch: pytest.MonkeyPatch) -> None:
    """An H200, for those who ask torch."""
    properties = SimpleNamespace(
        name="NVIDIA H200", uuid=UUID, major=9, minor=0, multi_processor_count=132, total_memory=150109880320
    )
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def make_gpu_file(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A file as the suite writes it, on the fakes: one case was skipped, one failed, and some never ran."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "sequence_length": 32}
    options: dict[str, Any] = {"shapes": "32x64x64", "stages": ["torch", "torch_sdpa", "te_layer"], "graphs": True}
    selection = select("cuda", ["tiny"], sizes, recipes=["bf16", "nvfp4"], **options)
    results = new_results() | {"spent_s": {"building": 0.5, "evidence": 0.25, "controls": 0.0, "measuring": 2.0}}
    nvml = FakeNvml()
    cases: list[LayerCase | GemmCase] = [*selection.layer_cases(), *selection.gemm_cases()]
    for source in simulated(patch, selection, nvml):
        own = [case for case in cases if case.id.startswith(f"{source.key}/")]
        results["benchmarks"] += [benchmark_of(source, case, results, selection) for case in own]
    take_controls(patch, results["controls"])
    skipped, failed, *_ = (case.id for case in cases if isinstance(case, LayerCase) and case.execution == "graph")
    results["not_measured"] = [
        {"case": skipped, "outcome": "skipped", "reason": "bf16: this GPU has no CUDA graphs"},
        {"case": failed, "outcome": "failed", "reason": "OutOfMemoryError: CUDA out of memory."},
    ]
    config = cast(pytest.Config, SimpleNamespace(stash={SELECTION: selection, RESULTS: results, PLANTS: []}))
    results["selected"] = [case.id for case in cases]
    output: dict[str, Any] = {"benchmarks": results["benchmarks"], "machine_info": {"release": "6.1-of-somebody"}}
    gpu_of_torch(patch)
    nvml.refused = {"nvmlDeviceGetMigMode"}
    results["machine_info"] = machine_info("cuda")
    pytest_benchmark_update_machine_info(config, output["machine_info"])
    pytest_benchmark_update_json(config, output)
    return output | {"datetime": "2026-11-30T12:00:00+00:00", "commit_info": {}, "version": ""}


@pytest.fixture(scope="module")
def gpu_text() -> str:
    """The file of simulated GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        return json.dumps(make_gpu_file(patch))


@pytest.fixture
def gpu_file(gpu_text: str) -> Any:
    """The same, parsed; each test may change its own."""
    return json.loads(gpu_text)


def states(results: Any) -> dict[str, Any]:
    """The GPU's state of each case."""
    return {one["extra_info"]["case"]: one["extra_info"]["gpu_state"] for one in results["benchmarks"]}


LAYER = "layer/tiny+hidden_size:64+intermediate_size:64+sequence_length:32"


class TestGpuRun:
    """What only a GPU shows, from simulated ones."""

    def test_its_file_is_as_the_schema_says(self, gpu_text: str) -> None:
        """Without most of what pytest-benchmark adds."""
        assert problems(gpu_text) == []

    def test_a_state_has_every_gauge_and_marks_what_was_throttled(self, gpu_file: Any) -> None:
        """Heat that two pauses did not help against; only rested times are taken again."""
        rested = states(gpu_file)[f"{LAYER}/torch/bf16/eager/rested/forward"]
        assert rested.keys() == {"samples", *GAUGES, "throttle_reasons", "pauses", "throttled"}
        assert (rested["pauses"], rested["throttled"]) == (2, "hw_thermal_slowdown in 100 % of samples")
        sustained = states(gpu_file)[f"{LAYER}/torch/bf16/eager/sustained/forward"]
        assert (sustained["pauses"], "throttled" in sustained) == (0, False)

    def test_what_cannot_be_seen_has_a_reason(self, gpu_file: Any) -> None:
        """Neither NVML nor the profiler nor the choice of an attention."""
        assert states(gpu_file)[f"{LAYER}/torch_sdpa/bf16/eager/rested/forward"] == {
            "absent": "NVMLError: Not Supported",
            "pauses": 0,
        }
        found = gpu_file["suite"]["evidence"][f"{LAYER}/torch_sdpa/bf16/eager"]
        assert found["kernels_absent"] == "torch.profiler saw no kernels"
        assert found["attention"] == UNSEEN

    def test_kernels_and_memory_are_those_of_the_segments(self, gpu_file: Any) -> None:
        """In the evidence by segment, and summed up in the case."""
        segment = gpu_file["suite"]["evidence"]["gemm/shapes/bf16"]["segments"]["32x64x64/fprop"]
        assert [use["category"] for use in segment["kernels"]] == ["gemm_bf16", "other"]
        assert (segment["peak_bytes"], segment["held_bytes"]) == (4096, 3072)
        name = f"{LAYER}/torch/bf16/eager/rested/forward_backward"
        (info,) = (one["extra_info"] for one in gpu_file["benchmarks"] if one["extra_info"]["case"] == name)
        assert (info["launches"], info["category_s"]) == (4, {"gemm_bf16": 40 * MS, "other": 2 * MS})
        assert (info["peak_bytes"], info["saved_bytes"]) == (3072 + 4096, 3072 - 32 * 64 * 2)

    def test_cases_without_a_time_and_controls_of_each_outcome_are_there(self, gpu_file: Any) -> None:
        """So that the schema is tried on all of them."""
        suite_info = gpu_file["suite"]
        assert [lost["outcome"] for lost in suite_info["not_measured"]] == ["skipped", "failed"]
        assert suite_info["not_run"] > 0
        with_time = {entry["name"]: "gpu_state" in entry for entry in suite_info["controls"] if "absent" not in entry}
        assert with_time == {"gemm": True, "python": False}
        assert gpu_file["machine_info"]["gpu"]["nvml"] == "mig: NVMLError: Not Supported"


def test_stored_baselines_are_as_the_schema_says() -> None:
    """All that are in the repository."""
    assert BASELINES
    assert [f"{path.name}: {one}" for path in BASELINES for one in problems(path.read_text(encoding="utf-8"))] == []


def test_a_baseline_is_a_results_file(gpu_file: Any, cpu_file: Any) -> None:
    """Of several runs, on a GPU and on a CPU; what a run of it says is written down, too."""
    for file in (gpu_file, cpu_file):
        suite = {key: value for key, value in file["suite"].items() if key != "planted"} | {"not_run": 0}
        baseline = pool([file | {"suite": suite, "datetime": f"2026-01-0{day}"} for day in (1, 2)])
        assert problems(json.dumps(baseline)) == []
        for found in (baseline["suite"]["runs"][0], first(baseline)["runs"][0]):
            found["unheard_of"] = 1
            assert [line.split(":")[0] for line in problems(json.dumps(baseline))] == ["schema"]
            del found["unheard_of"]


# --- what is no results file -----------------------------------------------------------------------------------


def first(results: Any) -> Any:
    """What a file says of its first case: a throttled, rested layer."""
    return results["benchmarks"][0]["extra_info"]


def first_kernel(results: Any) -> Any:
    """A kernel of the first case."""
    return results["suite"]["evidence"][first(results)["evidence"]]["segments"]["forward"]["kernels"][0]


CHANGES: dict[str, tuple[Callable[[Any], object], set[str]]] = {  # who refuses it
    "no state": (lambda file: first(file).pop("gpu_state"), {"schema"}),
    "no kind": (lambda file: first(file).pop("kind"), {"schema"}),
    "no stage": (lambda file: first(file).pop("stage"), {"schema", "analysis"}),
    "no m": (lambda file: file["benchmarks"][-1]["extra_info"].pop("m"), {"schema", "analysis"}),
    "no evidence": (lambda file: file["suite"].pop("evidence"), {"schema"}),
    "no driver": (lambda file: file["machine_info"]["gpu"].pop("driver"), {"schema"}),
    "no pauses": (lambda file: first(file)["gpu_state"].pop("pauses"), {"schema"}),
    "a state as on the CPU": (lambda file: first(file).update(gpu_state={"absent": "only on a GPU"}), {"schema"}),
    "no samples": (lambda file: first(file)["gpu_state"].pop("samples"), {"schema"}),
    "no rounds": (lambda file: file["suite"]["controls"][0].pop("rounds"), {"schema"}),
    "no outcome": (lambda file: file["suite"]["not_measured"][0].pop("outcome"), {"schema"}),
    "launches as text": (lambda file: first(file).update(launches="4"), {"schema", "analysis"}),
    "bytes with a fraction": (lambda file: first(file).update(peak_bytes=0.5), {"schema"}),
    "half an interval": (lambda file: first(file)["interval_s"].pop(), {"schema", "analysis"}),
    "models as a list": (lambda file: file["suite"].update(models=[]), {"schema", "analysis"}),
    "microseconds of a kernel": (lambda file: first_kernel(file).update(device_us=1.0), {"schema"}),
    "another category": (lambda file: first_kernel(file).update(category="gemm"), {"schema"}),
    "another reason": (lambda file: first(file)["gpu_state"]["throttle_reasons"].update(hot=1.0), {"schema"}),
    "a share of 200 %": (lambda file: first(file)["gpu_state"]["throttle_reasons"].update(sw_power_cap=2), {"schema"}),
    "a state that is absent and there": (lambda file: first(file)["gpu_state"].update(absent="no NVML"), {"schema"}),
    "another regime": (lambda file: first(file).update(regime="hasty"), {"schema", "analysis"}),
    "a GEMM's regime": (lambda file: first(file).update(regime="in_layer"), {"schema"}),
    "another recipe": (lambda file: first(file).update(recipe="fp6"), {"schema", "analysis"}),
    "a negative time": (
        lambda file: file["benchmarks"][0]["stats"].update(median=-1e-3),
        {"schema", "analysis"},
    ),
    "no number": (lambda file: file["benchmarks"][0]["stats"].update(median=math.nan), {"numbers"}),
    "an infinite number": (lambda file: first_kernel(file).update(device_s=-math.inf), {"numbers"}),
    "another schema": (lambda file: file["suite"].update(schema=SCHEMA - 1), {"schema", "analysis"}),
    "a GPU on the CPU": (lambda file: file["suite"].update(device="cpu"), {"schema"}),
    "no GPU": (lambda file: file["machine_info"].update(gpu=None), {"schema"}),
    "evidence that is not there": (
        lambda file: file["suite"]["evidence"].pop(first(file)["evidence"]),
        {"references"},
    ),
    "a segment that is not there": (
        lambda file: first(file).update(segments=["qkv/fprop"]),
        {"references"},
    ),
    "the name of another case": (
        lambda file: first(file).update(case=file["benchmarks"][1]["extra_info"]["case"]),
        {"references"},
    ),
    "a case twice": (lambda file: file["benchmarks"].append(file["benchmarks"][0]), {"analysis"}),
    "a model that is not there": (lambda file: file["suite"]["models"].pop("shapes"), {"analysis"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_is_refused(change: str, gpu_file: Any) -> None:
    """By whom it should be, and by nobody else."""
    spoil, refusing = CHANGES[change]
    spoil(gpu_file)
    found = problems(json.dumps(gpu_file))
    assert {line.split(":")[0] for line in found} == refusing, found


def test_a_number_beyond_floating_point_is_refused(gpu_text: str, gpu_file: Any) -> None:
    """Python reads it as infinity."""
    written = json.dumps(gpu_file["benchmarks"][0]["stats"]["median"])
    assert problems(gpu_text.replace(f'"median": {written}', '"median": 1e999', 1)) == [
        "numbers: 1e999 in a results file"
    ]


def objects(value: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object in a JSON value and where it is."""
    if isinstance(value, (dict, list)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from objects(child, f"{place}.{key}")
    if isinstance(value, dict):
        yield place, value


def ours(results: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The suite's own objects in a file and their names; of those with the same name and fields only the first."""
    parts = {f"case {number}": results["benchmarks"][number]["extra_info"] for number in (0, -1)}
    parts |= {"suite": results["suite"], "gpu": results["machine_info"]["gpu"]}
    tried = set()
    for place, found in [pair for name, part in parts.items() for pair in objects(part, name)]:
        name = place.rsplit(".", 1)[-1]
        if (name, *found) not in tried:
            tried.add((name, *found))
            yield name, found


def test_a_new_field_has_to_be_written_down(gpu_file: Any) -> None:
    """Whatever is added to an object of the suite's and not to the schema is refused."""
    validator = Draft202012Validator(JSON_SCHEMA)
    refused = {}
    for name, found in ours(gpu_file):
        found["unheard_of"] = {}
        refused[name] = not validator.is_valid(gpu_file)
        del found["unheard_of"]
    assert {"case 0", "case -1", "gpu_state", "suite", "gpu", "attention", "forward"} <= refused.keys()
    assert [name for name in refused if not refused[name]] == []
    assert validator.is_valid(gpu_file)


def test_these_fields_may_be_missing_and_all_others_are_there(gpu_file: Any) -> None:
    """Those of which nothing is known, and a mark that is not set; a map may lack any entry."""
    validator = Draft202012Validator(JSON_SCHEMA)
    maps = {"models", "evidence", "errors", "spent_s", "segments", "category_s", "throttle_reasons", "flash_attn"}
    optional = set()
    for found in [found for name, found in ours(gpu_file) if name not in maps]:
        for key in list(found):
            whole = dict(found)
            del found[key]
            optional |= {key} if validator.is_valid(gpu_file) else set()
            found.update(whole)
    in_a_state = {*GAUGES, "throttle_reasons", "throttled"}
    assert optional == {
        *in_a_state,
        "gpu_state",
        "flash_attn",
        "absent",
        "nvml",
        "relative_error",
        "errors",
        "planted",
        "selected",
        "left_out",
    }


# --- the schema itself -----------------------------------------------------------------------------------------

DEFINITIONS = JSON_SCHEMA["$defs"]
LAYER_FIELDS, GEMM_FIELDS, CASE_FIELDS = (
    DEFINITIONS[name]["properties"] for name in ("layer_case", "gemm_case", "case")
)
MODEL_FIELDS, SUITE_FIELDS = (DEFINITIONS[name]["properties"] for name in ("model", "suite"))
STATE_FIELDS = DEFINITIONS["gpu_state"]["else"]["properties"]
QUANTIZING = {piece for pieces in QUANTIZATIONS.values() for piece in pieces}


def both(regimes: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Regimes on either device."""
    return {regime for names in regimes.values() for regime in names}


def test_the_schema_is_one() -> None:
    """Of the draft that it names, and for the files that the report reads."""
    assert JSON_SCHEMA["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    Draft202012Validator.check_schema(JSON_SCHEMA)
    assert SUITE_FIELDS["schema"]["const"] == SCHEMA


@pytest.mark.parametrize(
    ("written", "table"),
    [
        pytest.param(LAYER_FIELDS["stage"]["enum"], STAGES, id="stages"),
        pytest.param(LAYER_FIELDS["execution"]["enum"], EXECUTIONS, id="executions"),
        pytest.param(LAYER_FIELDS["regime"]["enum"], both(LAYER_REGIMES), id="regimes of layers"),
        pytest.param(LAYER_FIELDS["pass_name"]["enum"], LAYER_PASSES, id="passes of layers"),
        pytest.param(GEMM_FIELDS["regime"]["enum"], both(GEMM_REGIMES), id="regimes of GEMMs"),
        pytest.param(GEMM_FIELDS["pass_name"]["enum"], PASSES, id="passes of GEMMs"),
        pytest.param(GEMM_FIELDS["mode"]["enum"], MODES, id="modes"),
        pytest.param(GEMM_FIELDS["linear"]["anyOf"][0]["enum"], LINEARS, id="linears"),
        pytest.param(CASE_FIELDS["recipe"]["enum"], RECIPES, id="recipes"),
        pytest.param({*LAYER_FIELDS["regime"]["enum"], *GEMM_FIELDS["regime"]["enum"]}, REGIMES, id="regimes"),
        pytest.param(DEFINITIONS["category"]["enum"], kernels.CATEGORIES, id="categories"),
        pytest.param(STATE_FIELDS["throttle_reasons"]["propertyNames"]["enum"], REASONS, id="throttle reasons"),
        pytest.param(STATE_FIELDS.keys() - {"samples", "throttle_reasons"}, GAUGES, id="gauges"),
        pytest.param(
            DEFINITIONS["control_name"]["enum"], [*controls.DEVICE_CONTROLS, *controls.HOST_CONTROLS], id="controls"
        ),
        pytest.param(SUITE_FIELDS["device"]["enum"], DEVICES, id="devices"),
        pytest.param(MODEL_FIELDS["normalization"]["enum"], NORMALIZATIONS, id="normalizations"),
        pytest.param(MODEL_FIELDS["hidden_act"]["enum"], ACTIVATIONS, id="activations"),
        pytest.param(MODEL_FIELDS["attn_mask_type"]["enum"], ATTENTION_MASKS, id="attention masks"),
        pytest.param(MODEL_FIELDS.keys() - {"tokens"}, [field.name for field in fields(ModelConfig)], id="models"),
        pytest.param(DEFINITIONS["gemm"]["properties"], [field.name for field in fields(ExecutedGemm)], id="GEMMs"),
        pytest.param(DEFINITIONS["gemm"]["properties"]["pass_name"]["enum"], ["", *PASSES], id="passes that ran"),
    ],
)
def test_what_the_schema_lists_is_what_the_code_knows(written: Any, table: Any) -> None:
    """Each name once."""
    assert sorted(written) == sorted(table)


def test_names_of_segments_are_those_of_programs() -> None:
    """Passes of a layer, and the pieces of GEMMs."""
    names = {*LAYER_PASSES[:2], *(f"qkv/{piece}" for piece in (*PASSES, *QUANTIZING))}
    is_name = Draft202012Validator(DEFINITIONS["segment_name"]).is_valid
    assert [name for name in sorted(names) if not is_name(name)] == []
    assert not is_name("forward_backward")
    assert not is_name("qkv/forward")


def test_names_of_kernels_are_as_long_as_the_code_makes_them() -> None:
    """At most."""
    assert DEFINITIONS["kernel"]["properties"]["name"]["maxLength"] == kernels.LONGEST_NAME
