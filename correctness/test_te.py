"""What Transformer Engine executes is what we derive and what the recipe says. Runs wherever TE runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from shapes.backends.build import GemmSteps, build_layer
from shapes.cases import support
from shapes.gemms import PASSES, QUANTIZATIONS, layer_linears
from shapes.models import MODELS, ModelConfig
from shapes.recipes import RECIPES, Recipe
from shapes.stages import STAGES

TE_STAGES = [stage.id for stage in STAGES.values() if stage.backend == "te"]

# A whole layer of each is run; the other models differ from these in nothing but sizes.
EXECUTED_MODELS = ["codonfm_5b", "llama3_8b", "gpt2_medium", "gemma_7b"]

Signature = tuple[str, int, int, int, tuple[str, ...]]


@pytest.fixture(autouse=True)
def te(device):
    """The backend, or a skip that says what is missing."""
    if device == "cpu":
        pytest.skip("needs Transformer Engine and a GPU; this run is on the CPU")
    from shapes.backends import te

    return te


def skip_unsupported(recipe: str, config: ModelConfig, stage: str) -> None:
    """Skip with the reason of `support`."""
    if reason := support(recipe, layer_linears(config), "cuda", stage):
        pytest.skip(reason)


def derived(config: ModelConfig, recipe: Recipe) -> Counter[Signature]:
    """The GEMMs that a layer should run."""
    return Counter(
        (gemm.pass_name, gemm.m, gemm.n, gemm.k, tuple(map(str, recipe.gemm_operands(gemm.pass_name))))
        for gemm in layer_linears(config).gemms()
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("stage", TE_STAGES)
@pytest.mark.parametrize("model", EXECUTED_MODELS)
def test_executed_gemms_are_the_derived_ones(te, model, stage, recipe):
    """Count, sizes, pass and operand formats of every GEMM in a training step."""
    config = MODELS[model]
    skip_unsupported(recipe, config, stage)
    step = build_layer(config, stage, RECIPES[recipe], "cuda")
    with te.record_gemms() as seen:
        step.program().run_once()
    executed: Counter[Signature] = Counter((gemm.pass_name, gemm.m, gemm.n, gemm.k, gemm.operands) for gemm in seen)
    assert executed == derived(config, RECIPES[recipe])


@pytest.mark.parametrize("recipe", [recipe.id for recipe in RECIPES.values() if recipe.quantized])
def test_a_layer_without_its_autocast_is_caught(te, recipe):
    """A layer that is called FP8 and runs in BF16 does not have the GEMMs of its recipe."""
    config = MODELS["tiny"]
    skip_unsupported(recipe, config, "te_layer")
    step = build_layer(config, "te_layer", RECIPES[recipe], "cuda")
    step.context = te.Autocast(RECIPES["bf16"])
    with te.record_gemms() as seen:
        step.program().run_once()
    assert {gemm.operands for gemm in seen} == {("bf16", "bf16")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_single_gemms_are_called_as_in_te_linear(te, recipe):
    """Our GEMMs of a linear have the operands, layouts and accumulation of te.Linear's."""
    config = MODELS["tiny"]
    skip_unsupported(recipe, config, "te_modules")
    step = build_layer(config, "te_modules", RECIPES[recipe], "cuda")
    with te.record_gemms() as in_layer:
        step.program().run_once()
    steps = GemmSteps(layer_linears(config), RECIPES[recipe], "cuda")
    with te.record_gemms() as alone:
        steps.in_layer().run_once()
    assert Counter(alone) == Counter(in_layer)


def test_a_layer_does_not_update_the_scales_of_earlier_layers(te):
    """TE keeps the histories of delayed scaling for the whole process; a later layer must not pay for them."""
    from torch.profiler import ProfilerActivity, profile

    config = MODELS["tiny"]
    skip_unsupported("fp8_delayed_scaling", config, "te_modules")
    updates = {}
    for recipe in ("fp8_delayed_scaling", "fp8_current_scaling"):
        program = build_layer(config, "te_modules", RECIPES[recipe], "cuda").program()
        program.run_once()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            program.run_once()
            torch.cuda.synchronize()
        updates[recipe] = sum("amax_and_scale_update" in event.name for event in profiler.events())
    assert updates["fp8_delayed_scaling"] > 0
    assert updates["fp8_current_scaling"] == 0


def test_quantizations_are_the_ones_te_linear_does(te):
    """te.Linear quantizes three tensors per step: input and weight in forward, the output's gradient in backward."""
    config = MODELS["tiny"]
    skip_unsupported("fp8_current_scaling", config, "te_modules")
    assert sum(len(QUANTIZATIONS[pass_name]) for pass_name in PASSES) == 3
    step = build_layer(config, "te_modules", RECIPES["fp8_current_scaling"], "cuda")
    step.program().run_once()
    linear: Any = step.layer.attn_out
    used = [*linear.quantizers["scaling_fwd"][:2], linear.quantizers["scaling_bwd"][0]]
    assert [type(quantizer).__name__ for quantizer in used] == ["Float8CurrentScalingQuantizer"] * 3


def test_unsupported_recipes_have_te_s_own_reason(te):
    """A GPU before Blackwell is told so in TE's words."""
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU has MXFP8 and NVFP4")
    assert te.unsupported_reason("mxfp8") == "Device compute capability 10.0 or higher required for MXFP8 execution."
    assert te.unsupported_reason("nvfp4") == "Device compute capability 10.0 or higher required for NVFP4 execution."
