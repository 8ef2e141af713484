"""The error of what Transformer Engine computes, from both sides: single GEMMs and whole layers. Runs wherever TE runs.

A GEMM against float64 on the very operands that TE quantized: only the accumulation differs, and its limits are those
of Hopper's tensor cores, fast or split. A GEMM against float64 on operands that were not quantized: the recipe's own
error. A layer against the same stage in BF16: the recipe's errors, sent through the layer; and stage against stage.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.bounds import (
    CONTRACTED,
    Input,
    Limits,
    accumulation_limits,
    float32_limit,
    gemm_limits,
)
from correctness.checks import operand_of
from correctness.emulate import exact_gemms, relative_error
from correctness.layer_bounds import layer_limits, reference_layer, relative_errors, run_step, same_data
from correctness.test_te_quantizers import StandIn
from shapes.backends.build import LayerStep, build_layer
from shapes.backends.emulation.formats import FORMATS, decode
from shapes.backends.emulation.scaling import Quantizer
from shapes.cases import support
from shapes.gemms import PASSES, Linear, LinearGroup, layer_linears
from shapes.models import ModelConfig
from shapes.recipes import RECIPES, TENSOR, Operand, Recipe
from shapes.stages import STAGES

QUANTIZED = [recipe for recipe in RECIPES.values() if recipe.quantized]
TE_STAGES = [stage.id for stage in STAGES.values() if stage.backend == "te"]
ROLES = {"x": "activation", "w": "weight", "dy": "gradient"}

# Short and long contractions, in each GEMM: fprop contracts in, dgrad out, wgrad tokens.
LINEARS = [
    Linear("square", 512, 512, 512),
    Linear("wide", 256, 2048, 1024),
    Linear("tall", 2048, 256, 512),
]
# fprop and dgrad contract equally many elements: what differs is how they add up.
LONG = Linear("long", 256, 4096, 4096)

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "micro_batch_size": 2,
    "sequence_length": 128,
}
LLAMA: dict[str, Any] = {"normalization": "RMSNorm", "hidden_act": "silu", "gated_mlp": True, "rope_theta": 1e4}
CONFIGS = {
    config.name: config
    for config in (
        ModelConfig("gpt", **SMALL, bias=True),
        ModelConfig("llama", **SMALL, **LLAMA, num_key_value_heads=2),
        ModelConfig("bidirectional", **SMALL, attn_mask_type="no_mask", bias=True, rope_theta=1e4),
        ModelConfig("relu2", **SMALL, hidden_act="relu2"),
    )
}
STEPS = 3  # a delayed scale has seen the data

each_recipe = pytest.mark.parametrize("recipe", QUANTIZED, ids=lambda recipe: recipe.id)
each_linear = pytest.mark.parametrize("linear", LINEARS, ids=lambda linear: linear.name)


@pytest.fixture
def te(device: str) -> Any:
    """The backend, or a skip that says what is missing."""
    if device == "cpu":
        pytest.skip("needs Transformer Engine and a GPU; this run is on the CPU")
    from shapes.backends import te

    return te


def skip_unsupported(recipe: Recipe, group: LinearGroup, stage: str = "te_modules") -> None:
    """Skip with the reason of `support`."""
    if reason := support(recipe.id, group, "cuda", stage):
        pytest.skip(reason)


def is_hopper() -> bool:
    """Whose FP8 tensor cores keep 14 bits of a product; later ones keep more."""
    return torch.cuda.get_device_capability()[0] == 9


# ----------------------------------------------------------------------------------------------------------- operands


def dequantized(copy: Any, operand: Operand, scale_format: str, dim: int) -> Tensor:
    """The values that a copy (te.Copy) of TE's stands for, float64, (outer, contracted): as the GEMM has it.

    A copy that went through a Hadamard transform stands for the transformed tensor: so do both operands of its GEMM.
    """
    values = decode(copy.codes.contiguous(), FORMATS[operand.element]).double()
    scale = copy.inverse_scale
    if scale_format in ("e8m0", "e4m3 and float32"):
        scale = decode(scale.contiguous(), FORMATS["e8m0" if scale_format == "e8m0" else "e4m3"])
    scale = scale.double()
    if operand.block != TENSOR:
        for axis in (0, 1):  # a scale for each line, or for blocks of them; the last one may be cut
            size, blocks = values.shape[axis], scale.shape[axis]
            block = 1 if blocks == size else (operand.block or (1, 1))[axis if dim == 1 else 1 - axis]
            scale = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, size)
    if scale_format == "e4m3 and float32":
        scale = scale * (copy.amax.double() / (FORMATS["e4m3"].max_finite * FORMATS["e2m1"].max_finite))
    return values * scale if dim == 1 else (values * scale).T


def operands(source: Any, recipe: Recipe, data: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Both operands of a GEMM as TE quantizes them, float64, (m, k) and (n, k); gradients rounded to the nearest."""
    nearest = {"stochastic_rounding": False} if recipe.id == "nvfp4" else {}
    found = []
    for role, dim in CONTRACTED[name]:
        tensor = data[ROLES[role]]
        if not recipe.quantized:
            found.append(tensor.double() if dim == 1 else tensor.double().T)
            continue
        options = nearest if role == "dy" else {}
        copy = source.quantized(recipe, ROLES[role], tensor, **options)[dim]
        found.append(dequantized(copy, operand_of(recipe, role), str(recipe.scale), dim))
    return found[0], found[1]


@each_recipe
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dim", [0, 1])
def test_copies_are_dequantized_as_the_emulation_does(recipe: Recipe, role: str, dim: int) -> None:
    """On a stand-in for TE: from TE's layouts, but for the factor of NVFP4 that float32 rounds."""
    x = torch.randn(160, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    options = {"scale": (1000 / x.abs().max().float()).reshape(1)} if recipe.history else {}
    copy = StandIn().quantized(recipe, ROLES[role], x, **options)[dim]
    made = Quantizer(operand_of(recipe, role), recipe, "cpu")
    if made.delayed:
        made.delayed.scale = options["scale"].reshape(())
    matrix, factor = made(x)[dim].factors()
    expected = matrix.double() * factor.double()
    actual = dequantized(copy, operand_of(recipe, role), str(recipe.scale), dim)
    torch.testing.assert_close(actual, expected if dim == 1 else expected.T, rtol=2.0**-22, atol=0)


# -------------------------------------------------------------------------------------------------------------- GEMMs


def float32_gemms(te: Any, recipe: Recipe, linear: Linear) -> Any:
    """TE's GEMMs with outputs in float32, so that nothing hides how they add up; gradients rounded to the nearest."""
    gemms = te.TeGemms(linear, recipe, "cuda")
    gemms.dtype = torch.float32
    gemms.outputs = {name: output.float() for name, output in gemms.outputs.items()}
    if recipe.id == "nvfp4":
        gemms.quantizers["gradient"].stochastic_rounding = False
        gemms.quantize_dy()
    return gemms


def accumulation_error(te: Any, recipe: Recipe, linear: Linear, name: str) -> float:
    """Of a GEMM of TE's, against the float64 product of its operands."""
    gemms = float32_gemms(te, recipe, linear)
    a, b = operands(te, recipe, gemms.data, name)
    return relative_error(getattr(gemms, name)(), a @ b.T)


def hopper_limits(recipe: Recipe, linear: Linear, name: str) -> Limits:
    """fprop with one scale per tensor is fast; gradients, and all of block scaling, split."""
    first, second = recipe.gemm_operands(name)
    split = name != "fprop" or recipe.activation.block != TENSOR
    return accumulation_limits(first.element, second.element, linear.gemm(name).k, split)


@each_recipe
@each_linear
@pytest.mark.parametrize("name", PASSES)
def test_gemms_differ_from_their_operands_product_by_accumulation(
    te: Any, recipe: Recipe, linear: Linear, name: str
) -> None:
    """Within what the tensor cores may lose; later GPUs than Hopper may be better."""
    skip_unsupported(recipe, LinearGroup("alone", (linear,)))
    limits, error = hopper_limits(recipe, linear, name), accumulation_error(te, recipe, linear, name)
    if not is_hopper():
        limits = limits._replace(lower=0.0)
    assert error in limits, f"{error:.3g} is outside of {limits}"


@each_linear
@pytest.mark.parametrize("name", PASSES)
def test_gemms_in_bf16_add_up_in_float32(te: Any, linear: Linear, name: str) -> None:
    """Element by element; tensor cores cut off where a processor rounds, which may be twice as far."""
    recipe = RECIPES["bf16"]
    gemms = float32_gemms(te, recipe, linear)
    a, b = operands(te, recipe, gemms.data, name)
    limit = torch.from_numpy(2 * float32_limit(a.cpu().numpy(), b.cpu().numpy()))
    difference = (getattr(gemms, name)().double() - a @ b.T).abs().cpu()
    assert (difference <= limit).all(), f"{(difference / limit).max():.3g} times the limit"


@pytest.mark.parametrize("recipe", [RECIPES["fp8_delayed_scaling"], RECIPES["fp8_current_scaling"]], ids=lambda r: r.id)
def test_fast_accumulation_is_coarser_than_split(te: Any, recipe: Recipe) -> None:
    """4096 products: fprop loses more than dgrad, which is promoted to float32 every so many."""
    skip_unsupported(recipe, LinearGroup("alone", (LONG,)))
    if not is_hopper():
        pytest.skip("only Hopper's FP8 tensor cores add up in fewer bits than float32 has")
    fast, split = (accumulation_error(te, recipe, LONG, name) for name in ("fprop", "dgrad"))
    assert fast > 1.5 * split, f"{fast=:.3g} {split=:.3g}"


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@each_linear
def test_gemms_have_the_error_of_their_formats(te: Any, recipe: Recipe, linear: Linear) -> None:
    """Against float64 on what was to be quantized: not more than the formats say, nor less. Outputs as layers have."""
    skip_unsupported(recipe, LinearGroup("alone", (linear,)))
    gemms = te.TeGemms(linear, recipe, "cuda")
    exact = exact_gemms({role: gemms.data[name] for role, name in ROLES.items()})
    inputs = {"x": Input(), "w": Input(size=0.02), "dy": Input(size=1e-3)}
    wrong = {}
    for name in PASSES:
        limits = gemm_limits(recipe, name, linear, inputs)
        if recipe.quantized:  # adding up has an error of its own, independent of the operands'
            limits = limits._replace(upper=math.hypot(limits.upper, hopper_limits(recipe, linear, name).upper))
        error = relative_error(getattr(gemms, name)(), exact[name])
        if error not in limits:
            wrong[name] = (error, limits)
    assert not wrong


REFUSED = [(24, 64, 64), (64, 64, 24), (64, 24, 64), (1, 64, 64), (20, 128, 128)]


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        pytest.param(recipe, sizes, id=f"{recipe.id}-{'x'.join(map(str, sizes))}")
        for recipe in QUANTIZED
        for sizes in REFUSED
        if recipe.misaligned(*sizes)
    ],
)
def test_te_refuses_in_words_what_the_recipe_s_table_refuses(te: Any, recipe: Recipe, sizes: tuple[int, ...]) -> None:
    """In quantizing or in one of the GEMMs, forward or backward; and the process goes on."""
    if reason := te.unsupported_reason(recipe.id):
        pytest.skip(f"{recipe.id}: {reason}")

    def run(linear: Linear) -> list[Tensor]:
        gemms = te.TeGemms(linear, recipe, "cuda")
        results = [getattr(gemms, name)() for name in PASSES]
        torch.cuda.synchronize()
        return results

    with pytest.raises((ValueError, RuntimeError, AssertionError)) as caught:
        run(Linear("refused", *sizes))
    assert str(caught.value)
    assert all(result.isfinite().all() for result in run(Linear("accepted", 128, 128, 128)))


# ------------------------------------------------------------------------------------------------------------- layers


@cache
def reference(name: str) -> LayerStep:
    """The explicit PyTorch layer in BF16, whose weights and data all stages get."""
    return reference_layer(CONFIGS[name], "cuda")


@cache
def expected(name: str, recipe: Recipe) -> dict[str, Limits]:
    """The error that a layer must have in a recipe."""
    return layer_limits(reference(name), CONFIGS[name], recipe, "cuda")


@cache
def stage_results(name: str, stage: str, recipe: Recipe) -> dict[str, Tensor]:
    """Output and gradients of a stage's training step, in float64."""
    step = build_layer(CONFIGS[name], stage, recipe, "cuda")
    same_data(step, reference(name))
    return run_step(step, STEPS if recipe.history else 1)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("stage", TE_STAGES)
@each_recipe
def test_a_stage_has_the_error_of_its_recipe(te: Any, recipe: Recipe, stage: str, config: str) -> None:
    """Output, input gradient and each weight gradient against the same stage in BF16, from both sides.

    te_modules is te.Linear, te_fused te.LayerNormLinear and te.LayerNormMLP, te_layer te.TransformerLayer.
    """
    skip_unsupported(recipe, layer_linears(CONFIGS[config]), stage)
    limits = expected(config, recipe)
    errors = relative_errors(stage_results(config, stage, recipe), stage_results(config, stage, RECIPES["bf16"]))
    assert not {name: (error, limits[name]) for name, error in errors.items() if error not in limits[name]}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("stage", TE_STAGES[1:])
@each_recipe
def test_stages_in_one_recipe_agree(te: Any, recipe: Recipe, stage: str, config: str) -> None:
    """Better than with BF16: values that differ by a rounding of BF16 are mostly quantized alike."""
    skip_unsupported(recipe, layer_linears(CONFIGS[config]), stage)
    limits = expected(config, recipe)
    errors = relative_errors(stage_results(config, stage, recipe), stage_results(config, TE_STAGES[0], recipe))
    assert not {name: (error, limits[name].upper) for name, error in errors.items() if error > limits[name].upper}


def test_the_operands_of_a_gemm_are_those_of_its_linear() -> None:
    """On a stand-in for TE: contracted dimensions are the last ones, and the product is the GEMM's."""
    recipe, linear = RECIPES["fp8_block_scaling"], Linear("linear", 64, 96, 160)
    generator = torch.Generator().manual_seed(0)
    shapes = {"activation": (64, 96), "weight": (160, 96), "gradient": (64, 160)}
    data = {role: torch.randn(shape, generator=generator).bfloat16() for role, shape in shapes.items()}
    exact = exact_gemms({role: data[name] for role, name in ROLES.items()})
    for name in PASSES:
        a, b = operands(StandIn(), recipe, data, name)
        gemm = linear.gemm(name)
        assert (a.shape, b.shape) == ((gemm.m, gemm.k), (gemm.n, gemm.k))
        assert 0.01 < relative_error(a @ b.T, exact[name]) < 0.06
