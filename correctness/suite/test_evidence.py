"""What ran is proved before a time is believed: GEMMs, kernels, memory, attention backend."""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from benches.harness.evidence import Evidence, EvidenceError, Part, check, collect, take_in_turn
from benches.harness.kernels import KernelUse
from benches.harness.measurements import GemmMeasurement, LayerMeasurement
from benches.harness.stopwatch import REGIMES, Limits, Stopwatch
from benches.harness.timeline import QUEUE_PLACES, SPIN_KERNEL, CudaTimeline, TraceError, split_at_spins
from correctness.suite.fake_timeline import MS, TICK, FakeTimeline
from shapes.backends.build import GemmSteps
from shapes.backends.executed import ExecutedGemm, differences, planned_gemms, record_matmuls
from shapes.cases import LayerCase, support
from shapes.gemms import layer_linears
from shapes.models import MODELS
from shapes.program import Program, Segment
from shapes.recipes import RECIPES
from shapes.stages import EXECUTIONS, STAGES

TINY = MODELS["tiny"]
LIMITS = Limits(max_time_s=0.05)
FPROP = ExecutedGemm("fprop", 256, 512, 128, ("e4m3", "e4m3"), "TN")


def fake_program(timeline: FakeTimeline) -> Program:
    """Forward keeps 300 bytes of the 1000 that it needs, backward gives them back."""

    def forward() -> None:
        timeline.allocate(1000)
        timeline.allocate(-700)
        timeline.launch("nvjet_sm90_qqtst_128x128", MS)
        timeline.launch("Memset (Device)", TICK)

    def backward() -> None:
        timeline.allocate(200)
        timeline.allocate(-500)
        timeline.launch("a_kernel_of_tomorrow", 2 * MS)
        timeline.launch("a_kernel_of_tomorrow", 2 * MS)

    return Program((Segment("forward", forward), Segment("backward", backward)))


def fake_evidence(**options: Any) -> Evidence:
    timeline = FakeTimeline(**options)
    evidence = collect(fake_program(timeline), lambda: nullcontext([FPROP]), timeline)
    evidence.output_bytes = 100
    return evidence


class TestCollecting:
    """What an untimed round shows."""

    def test_kernels_are_those_of_their_segment(self) -> None:
        """Each with its count and its device time."""
        parts = fake_evidence().parts
        assert [use.category for use in parts["forward"].kernels or ()] == ["gemm_fp8", "memset"]
        (use,) = parts["backward"].kernels or []
        assert (use.name, use.category, use.count, use.device_s) == ("a_kernel_of_tomorrow", "other", 2, 4 * MS)

    def test_memory_is_above_what_was_there_before_the_round(self) -> None:
        """Peak and rest of each segment, whatever else is allocated."""
        parts = fake_evidence(allocated=5000).parts
        assert (parts["forward"].peak_bytes, parts["forward"].held_bytes) == (1000, 300)
        assert (parts["backward"].peak_bytes, parts["backward"].held_bytes) == (500, 0)

    def test_a_case_sums_up_its_segments(self) -> None:
        """Launches and seconds add up, peaks do not, and the output is not saved for the backward pass."""
        summary = fake_evidence().summary(("forward", "backward"))
        assert summary["launches"] == 4
        assert summary["category_s"] == {"gemm_fp8": MS, "memset": TICK, "other": 4 * MS}
        assert (summary["peak_bytes"], summary["saved_bytes"]) == (1000, 200)
        assert fake_evidence().summary(("backward",))["saved_bytes"] is None

    def test_a_case_has_the_worst_error_of_its_segments(self) -> None:
        """Of the output in forward, of all gradients in backward."""
        evidence = fake_evidence()
        evidence.parts["forward"].errors = {"y": 0.01}
        evidence.parts["backward"].errors = {"dx": 0.02, "dqkv.weight": 0.03}
        assert evidence.summary(("forward",))["relative_error"] == 0.01
        assert evidence.summary(("forward", "backward"))["relative_error"] == 0.03

    def test_without_a_profiler_the_rest_is_there(self) -> None:
        """The field says why there are no kernels."""
        evidence = fake_evidence(blind="torch.profiler saw no kernels")
        assert evidence.kernels_absent == "torch.profiler saw no kernels"
        assert evidence.summary(("forward",)) | {"launches": 0, "category_s": {}} == {
            "segments": ["forward"],
            "launches": 0,
            "category_s": {},
            "peak_bytes": 1000,
            "saved_bytes": 200,
            "parameter_bytes": None,
            "relative_error": None,
        }
        assert evidence.summary(("forward",))["launches"] is None
        assert evidence.parts["forward"].gemms == [FPROP]

    def test_on_a_cpu_there_are_gemms_only(self) -> None:
        """And a reason for what is not there."""
        evidence = collect(Program((Segment("forward", lambda: None),)), lambda: nullcontext([FPROP]), None)
        assert evidence.parts == {"forward": Part([FPROP])}
        assert evidence.kernels_absent == "kernels and memory are seen on a GPU only"


class TestTraces:
    """How a trace is split into actions."""

    SPIN = ("void at::cuda::spin_kernel(long)", 0.0)

    def test_a_spin_begins_each_action(self) -> None:
        """What comes before the first belongs to none; an action may launch nothing."""
        kernels = [("before", 1.0), self.SPIN, ("a", 3.0), ("b", 1.0), self.SPIN, self.SPIN, ("c", 2.0)]
        assert split_at_spins(kernels) == [[("a", 3.0), ("b", 1.0)], [], [("c", 2.0)]]

    @pytest.mark.parametrize(
        ("kernels", "message"), [([], "saw no kernels: CUPTI may be"), ([("a", 1.0), SPIN], "lost kernels")]
    )
    def test_a_trace_without_its_spins_is_no_trace(self, kernels: Any, message: str) -> None:
        """Rather none than one that gives an action another's kernels."""
        timeline = object.__new__(CudaTimeline)  # without a GPU
        timeline.kernels = lambda action: [(name, 0.0, seconds) for name, seconds in kernels]  # type: ignore[method-assign]
        with pytest.raises(TraceError, match=message):
            timeline.trace([lambda: None, lambda: None])


class TestDifferences:
    """How executed GEMMs are compared with planned ones."""

    def test_order_layout_and_accumulation_do_not_matter(self) -> None:
        """They are no promise of a case."""
        other = ExecutedGemm("dgrad", 256, 128, 512, ("e5m2", "e4m3"))
        seen = ExecutedGemm("fprop", 256, 512, 128, ("e4m3", "e4m3"), "NN", accumulate=True, split_accumulator=True)
        assert differences([FPROP, other], [other, seen]) is None

    def test_a_wrong_size_is_named(self) -> None:
        """Both the GEMM that should have run and the one that did."""
        wrong = ExecutedGemm("fprop", 256, 513, 128, ("e4m3", "e4m3"))
        assert differences([FPROP], [wrong]) == (
            "planned but not executed: fprop m=256 n=512 k=128 e4m3 x e4m3; "
            "executed but not planned: fprop m=256 n=513 k=128 e4m3 x e4m3"
        )

    def test_a_gemm_too_many_and_one_too_few_are_seen(self) -> None:
        """Counts matter."""
        assert differences([FPROP], [FPROP, FPROP]) == (
            "planned but not executed: none; executed but not planned: fprop m=256 n=512 k=128 e4m3 x e4m3"
        )
        assert "not executed: fprop m=256 n=512 k=128 e4m3 x e4m3 and 2 more;" in str(differences([FPROP] * 3, []))

    def test_products_of_pytorch_have_no_pass(self) -> None:
        """They are compared by size and format."""
        assert differences([FPROP], [ExecutedGemm("", 256, 512, 128, ("e4m3", "e4m3"))]) is None
        assert differences([FPROP], [ExecutedGemm("", 256, 512, 128, ("bf16", "bf16"))]) is not None

    def test_the_error_names_segment_and_recipe(self) -> None:
        """One sentence for the terminal."""
        evidence = Evidence({"forward": Part([FPROP])})
        check(evidence, {"forward": [FPROP]}, "fp8_current_scaling")
        with pytest.raises(EvidenceError, match=r"^forward did not run as fp8_current_scaling: planned but"):
            check(evidence, {}, "fp8_current_scaling")

    def test_captured_gemms_go_to_the_segments_in_turn(self) -> None:
        """None is lost, however many there are."""
        counts = {"forward": 2, "backward": 1}
        assert take_in_turn([FPROP] * 5, counts) == {"forward": [FPROP] * 2, "backward": [FPROP] * 3}
        assert take_in_turn([FPROP], counts) == {"forward": [FPROP], "backward": []}


class TestState:
    """The GPU's state while a case is measured, on a simulated timeline."""

    CASE = LayerCase("tiny", "torch", "bf16", "eager", "rested", "forward")

    def measured(self, monkeypatch: pytest.MonkeyPatch, reasons: list[str | None]) -> dict[str, Any]:
        """The state of a case whose measurements were throttled for these reasons, one after the other."""
        timeline = FakeTimeline(throttle_reasons=reasons)
        source = LayerMeasurement(TINY, "torch", "bf16", "eager", "cpu", timeline, LIMITS)
        program = fake_program(timeline)
        monkeypatch.setattr(source, "_program_of_step", program)
        return source.figure(self.CASE).gpu_state

    def test_it_is_looked_at_while_the_device_is_busy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """At least once per measurement."""
        assert self.measured(monkeypatch, [])["samples"] > 0

    def test_throttled_times_are_taken_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a pause; what counts is the last time."""
        state = self.measured(monkeypatch, ["hot", None])
        assert (state["pauses"], state.get("throttled")) == (1, None)

    def test_a_case_that_stays_throttled_is_marked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After two pauses it is left at that."""
        state = self.measured(monkeypatch, ["hot", "hot", "still hot", "never asked"])
        assert (state["pauses"], state["throttled"]) == (2, "still hot")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("stage", ["torch", "torch_sdpa"])
def test_layers_of_pytorch_run_the_planned_gemms(device: str, stage: str, recipe: str) -> None:
    """Seen by PyTorch's dispatcher, forward and backward; on a CPU with emulated recipes too."""
    if reason := support(recipe, layer_linears(TINY), device, stage):
        pytest.skip(reason)
    timeline = CudaTimeline() if device == "cuda" else None
    evidence = LayerMeasurement(TINY, stage, recipe, "eager", device, timeline, LIMITS).evidence()
    assert {name: len(part.gemms) for name, part in evidence.parts.items()} == {"forward": 4, "backward": 8}


@pytest.mark.parametrize("recipe", RECIPES)
def test_single_gemms_are_the_planned_ones(device: str, recipe: str) -> None:
    """One per segment that is a GEMM, none in those that quantize."""
    if reason := support(recipe, layer_linears(TINY), device):
        pytest.skip(reason)
    timeline = CudaTimeline() if device == "cuda" else None
    evidence = GemmMeasurement(layer_linears(TINY), recipe, device, timeline, LIMITS).evidence()
    counts = {name: len(part.gemms) for name, part in evidence.parts.items()}
    assert counts == {name: int("quantize" not in name) for name in counts}


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block_scaling"])
def test_the_sweep_is_in_the_order_of_a_layer(recipe: str) -> None:
    """Forward from the first linear to the last, backward from the last to the first; quantizations before GEMMs."""
    sweep = GemmSteps(layer_linears(TINY), RECIPES[recipe], "cpu").in_layer()
    names = [segment.name for segment in sweep.segments]
    gemms = [name for name in names if "quantize" not in name]
    linears = ["qkv", "attn_out", "mlp_up", "mlp_down"]
    forward = [f"{linear}/fprop" for linear in linears]
    backward = [f"{linear}/{pass_name}" for linear in reversed(linears) for pass_name in ("dgrad", "wgrad")]
    assert gemms == forward + backward
    if recipe != "bf16":
        assert names[:3] == ["qkv/quantize_x", "qkv/quantize_w", "qkv/fprop"]
        assert names[12:15] == ["mlp_down/quantize_dy", "mlp_down/dgrad", "mlp_down/wgrad"]


def test_products_of_linears_with_a_bias_are_seen() -> None:
    """Their sizes are those of the factors, not of the bias."""
    import torch

    linear = torch.nn.Linear(16, 32)
    with record_matmuls() as seen:
        linear(torch.ones(8, 16)).sum().backward()
    assert [(gemm.m, gemm.n, gemm.k) for gemm in seen] == [(8, 32, 16), (32, 16, 8)]


def test_emulation_that_does_not_run_is_caught() -> None:
    """A layer that is called FP8 and has plain linears multiplies bf16 by bf16."""
    source = LayerMeasurement(TINY, "torch_sdpa", "fp8_current_scaling", "eager", "cpu", None, LIMITS)
    plain = LayerMeasurement(TINY, "torch_sdpa", "bf16", "eager", "cpu", None, LIMITS)
    source.step.layer = plain.step.layer
    with pytest.raises(pytest.fail.Exception, match=r"did not run as fp8_current_scaling.*bf16 x bf16"):
        source.evidence()


# --- on a GPU --------------------------------------------------------------------------------------------------

TE_STAGES = [stage.id for stage in STAGES.values() if stage.backend == "te"]
QUANTIZED = [recipe.id for recipe in RECIPES.values() if recipe.quantized]


@pytest.fixture
def timeline(device: str) -> CudaTimeline:
    """The GPU's, or a skip."""
    if device == "cpu":
        pytest.skip("needs Transformer Engine and a GPU; this run is on the CPU")
    return CudaTimeline()


def measurement(timeline: CudaTimeline, stage: str, recipe: str, execution: str = "eager") -> LayerMeasurement:
    """A tiny layer, or a skip with the reason of `support`."""
    if reason := support(recipe, layer_linears(TINY), "cuda", stage):
        pytest.skip(reason)
    return LayerMeasurement(TINY, stage, recipe, execution, "cuda", timeline, LIMITS)


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("stage", TE_STAGES)
def test_fp8_that_does_not_run_is_an_error(timeline: CudaTimeline, stage: str, recipe: str) -> None:
    """A stage that is called FP8 and runs outside its autocast: the error names the BF16 operands."""
    from shapes.backends.te import Autocast

    source = measurement(timeline, stage, recipe)
    source.step.context = Autocast(RECIPES["bf16"])
    with pytest.raises(pytest.fail.Exception, match=rf"did not run as {recipe}: .*not planned: .*bf16 x bf16"):
        source.evidence()


def test_a_wrong_size_is_an_error(timeline: CudaTimeline) -> None:
    """A layer that is not the model's: the error names a GEMM of each."""
    from dataclasses import replace

    source = measurement(timeline, "te_layer", "bf16")
    source.group = layer_linears(replace(TINY, intermediate_size=2 * TINY.intermediate_size))
    up = source.group.linears[2].gemm("fprop")
    with pytest.raises(pytest.fail.Exception, match=rf"planned but not executed: fprop m={up.m} n={up.n} k={up.k} "):
        source.evidence()


def test_memory_does_not_depend_on_the_blocks_that_earlier_cases_left(timeline: CudaTimeline) -> None:
    """PyTorch hands out a free block whole if less than 1 MiB of it would be left; the request is what counts."""
    import torch

    def measured() -> tuple[int, int]:
        before = timeline.allocated_bytes()
        timeline.forget_peak()
        block = torch.empty(size, device="cuda", dtype=torch.uint8)
        held = timeline.allocated_bytes() - before
        del block
        return held, timeline.peak_bytes() - before

    size = 20 * 2**20 + 1000
    torch.cuda.empty_cache()
    assert measured() == (size, size)
    torch.cuda.empty_cache()
    earlier = torch.empty(size + 2**19, device="cuda", dtype=torch.uint8)
    del earlier
    assert measured() == (size, size)


def test_a_step_that_lags_is_launch_bound(timeline: CudaTimeline) -> None:
    """A host that takes 5 ms for a step of microseconds, and one that does not."""
    import torch

    x = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)

    def lagging() -> None:
        time.sleep(0.005)
        torch.add(x, x, out=y)

    for run, expected in ((lagging, True), (partial(torch.mm, x, x, out=y), False)):
        watch = Stopwatch(Program((Segment("step", run),)), timeline)
        figure = watch.time(REGIMES["rested"], [("step",)], LIMITS).figure(("step",))
        assert figure.launch_bound is expected


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED])
@pytest.mark.parametrize("stage", ["torch_sdpa", *TE_STAGES])
def test_each_execution_runs_the_planned_gemms(timeline: CudaTimeline, stage: str, recipe: str, execution: str) -> None:
    """Eager or as a graph, with weights cached or not; and the evidence has everything that a GPU shows."""
    if not any(case.execution == execution for case in cases(stage, recipe, execution)):
        pytest.skip("no case")
    source = measurement(timeline, stage, recipe, execution)
    evidence = source.evidence()
    assert evidence.kernels_absent is None
    for name, part in evidence.parts.items():
        assert part.kernels
        assert len(part.gemms) == {"forward": 4, "backward": 8}[name]
        gemms = sum(use.count for use in part.kernels if use.category.startswith("gemm"))
        assert gemms >= len(part.gemms), f"{gemms} kernels for {len(part.gemms)} GEMMs"
    summary = evidence.summary(("forward", "backward"))
    assert summary["parameter_bytes"] == sum(weight.nbytes for weight in source.step.weights.values())
    if not EXECUTIONS[execution].graph:  # a graph keeps its memory
        assert summary["peak_bytes"] > summary["saved_bytes"] > source.step.output_bytes
    if stage in ("te_attention", "te_fused", "te_layer"):
        assert evidence.attention
        assert "Attention" in evidence.attention["backend"]


def cases(stage: str, recipe: str, execution: str) -> list[LayerCase]:
    from shapes.cases import layer_cases

    return list(layer_cases("tiny", [stage], [recipe], "cuda", [execution]))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_cached_weights_are_not_quantized_again(timeline: CudaTimeline, recipe: str) -> None:
    """One quantization less per linear, as far as the eager step is concerned."""
    again, cached = (
        measurement(timeline, "te_layer", recipe, execution).evidence() for execution in ("eager", "eager_cached")
    )
    quantizations = [
        sum(use.count for use in evidence.parts["forward"].kernels or () if use.category == "quantize")
        for evidence in (again, cached)
    ]
    assert quantizations[0] - quantizations[1] >= 4


def test_a_kernel_s_time_is_in_its_category(timeline: CudaTimeline) -> None:
    """The categories' seconds are those of the kernels, and GEMMs of both formats are told apart."""
    for recipe, expected in (("bf16", "gemm_bf16"), ("fp8_current_scaling", "gemm_fp8")):
        evidence = measurement(timeline, "te_layer", recipe).evidence()
        uses: list[KernelUse] = [use for part in evidence.parts.values() for use in part.kernels or ()]
        assert sum(use.count for use in uses if use.category == expected) >= 12
        assert not [use.name for use in uses if use.category == "other"]
        total = sum(evidence.summary(("forward", "backward"))["category_s"].values())
        assert total == pytest.approx(sum(use.device_s for use in uses))


def test_a_flush_leaves_what_comes_next_anywhere_in_the_queue_of_launches(timeline: CudaTimeline) -> None:
    """Before 400 evictions come none to seven launches of nothing, each number about as often."""

    def flush() -> None:
        for _ in range(400):
            timeline.flush_cache()

    names = [name for name, _, _ in timeline.kernels(flush)]
    spins = [1 if SPIN_KERNEL in name else 0 for name in names]
    assert spins.count(0) == 400
    places = [len(list(group)) for spin, group in itertools.groupby(spins) if spin]
    # A number is drawn 50 times on average, and so is none, after which no spin comes; 25 is four deviations less.
    assert all(places.count(number) > 25 for number in range(1, QUEUE_PLACES))
    assert 25 < 400 - len(places) < 75


def test_the_profiler_does_not_slow_what_comes_after_it(timeline: CudaTimeline) -> None:
    """Device time and launches of a layer, before and after its kernels were traced."""
    source = measurement(timeline, "te_layer", "bf16")
    program, names = source.step.program(), ("forward", "backward")

    def seconds() -> tuple[float, float]:
        figure = Stopwatch(program, timeline).time(REGIMES["rested"], [names], LIMITS).figure(names)
        return min(figure.samples_s), min(figure.host_s)

    timeline.trace([segment.run for segment in program.segments])  # loads the profiler
    program.reset()
    before = seconds()
    for _ in range(3):
        timeline.trace([segment.run for segment in program.segments])
        program.reset()
    after = seconds()
    assert after[0] < 1.03 * before[0]  # the fastest rounds of a tiny layer repeat within 1 % or so
    assert after[1] < 1.5 * before[1]  # the host's times vary by a tenth or two from one moment to the next


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED])
def test_gemms_of_grouped_linears_are_seen(timeline: CudaTimeline, recipe: str) -> None:
    """One per group and pass, with the operands of the recipe."""
    import torch

    from shapes.backends import te

    if reason := support(recipe, layer_linears(TINY), "cuda", "te_modules"):
        pytest.skip(reason)
    module = te.modules().GroupedLinear(2, 256, 512, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with te.record_gemms() as seen:
        with te.Autocast(RECIPES[recipe])():
            y = module(x, [128, 256])
        y.backward(torch.randn_like(y))
    sizes = [(tokens, 512, 256) for tokens in (128, 256)]
    planned = {
        "fprop": [(tokens, out, inside) for tokens, out, inside in sizes],
        "dgrad": [(tokens, inside, out) for tokens, out, inside in sizes],
        "wgrad": [(out, inside, tokens) for tokens, out, inside in sizes],
    }
    for pass_name, expected in planned.items():
        found = [gemm for gemm in seen if gemm.pass_name == pass_name]
        assert sorted((gemm.m, gemm.n, gemm.k) for gemm in found) == sorted(expected)
        assert {gemm.operands for gemm in found} == {
            gemm.operands
            for gemm in planned_gemms(layer_linears(TINY).gemms(), RECIPES[recipe].gemm_operands)
            if gemm.pass_name == pass_name
        }
