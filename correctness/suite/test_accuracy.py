"""Errors beside speed: what they are relative to, and that no result without a number passes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from benches.harness.accuracy import References, gemm_errors, layer_errors, relative_error
from benches.harness.evidence import Evidence, EvidenceError
from benches.harness.measurements import GemmMeasurement, LayerMeasurement
from benches.harness.stopwatch import Limits
from shapes.cases import support
from shapes.gemms import LINEARS, layer_linears
from shapes.models import MODELS
from shapes.recipes import RECIPES

TINY = MODELS["tiny"]
GRADIENTS = {"dx", *(f"d{linear}.weight" for linear in LINEARS)}


def layer_evidence(stage: str, recipe: str, device: str = "cpu") -> Evidence:
    """Of a tiny layer, or a skip with the reason of `support`."""
    if reason := support(recipe, layer_linears(TINY), device, stage):
        pytest.skip(reason)
    return LayerMeasurement(TINY, stage, recipe, "eager", device, None, Limits()).evidence()


def test_an_error_is_relative_to_the_expected_norm() -> None:
    """(3, 4) has the norm 5, its difference from (3, 5) the norm 1."""
    assert relative_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_result_that_is_not_finite_is_an_error(wrong: float) -> None:
    """However many others are right."""
    expected = torch.ones(100)
    actual = expected.clone()
    actual[7] = wrong
    with pytest.raises(EvidenceError, match="not finite"):
        relative_error(actual, expected)


def test_a_layer_s_reference_is_pytorch_s_in_bf16() -> None:
    """That stage has no error; attention written out rounds elsewhere, and no more than BF16 does."""
    parts = layer_evidence("torch_sdpa", "bf16").parts
    assert parts["forward"].errors == {"y": 0.0}
    assert parts["backward"].errors == dict.fromkeys(GRADIENTS, 0.0)
    written_out = layer_evidence("torch", "bf16").summary(("forward", "backward"))
    assert 0.0 < written_out["relative_error"] < 0.02


def test_errors_grow_with_the_formats_steps() -> None:
    """BF16, FP8, FP4: 8, 4 and 2 significant bits in the forward pass."""
    errors = [layer_evidence("torch", recipe).parts["forward"].errors["y"] for recipe in ("bf16", "mxfp8", "nvfp4")]
    assert errors[0] < errors[1] / 4
    assert errors[1] < errors[2] / 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_gemm_has_the_error_of_its_output(recipe: str) -> None:
    """Against the product of what was quantized; without quantization there is none."""
    if reason := support(recipe, layer_linears(TINY), "cpu"):
        pytest.skip(reason)
    parts = GemmMeasurement(layer_linears(TINY), recipe, "cpu", None, Limits()).evidence().parts
    errors = {name: part.errors for name, part in parts.items() if part.errors}
    assert len(errors) == 12
    assert {result for found in errors.values() for result in found} == {"y", "dx", "dw"}
    values = [error for found in errors.values() for error in found.values()]
    if RECIPES[recipe].quantized:
        assert 0.01 < min(values) < max(values) < 0.5
    else:
        assert max(values) == 0.0


def test_a_reference_is_kept_for_the_layers_of_a_model() -> None:
    """All stages and recipes with the same compute dtype share it; another model has its own."""
    references = References("cpu")
    first = references.of(TINY, RECIPES["bf16"])
    assert references.of(TINY, RECIPES["nvfp4"]) is first
    assert references.of(TINY, RECIPES["fp16"])["y"].dtype == torch.float16
    shorter = references.of(replace(TINY, sequence_length=TINY.sequence_length // 2), RECIPES["bf16"])
    assert shorter["y"].shape[1] == first["y"].shape[1] // 2


def test_a_layer_with_a_wrong_result_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in one weight is seen in the output, and the case fails with a sentence."""
    source = LayerMeasurement(TINY, "torch", "bf16", "eager", "cpu", None, Limits())
    with torch.no_grad():
        source.step.weights["mlp_down.weight"][0, 0] = math.nan
    with pytest.raises(pytest.fail.Exception, match="not finite"):
        source.evidence()


def test_errors_of_layers_and_gemms_are_by_segment() -> None:
    """The names of the segments in which the results come about."""
    results: dict[str, Any] = {name: torch.ones(2) for name in ("y", *GRADIENTS, "dqkv.bias", "dinput_norm.weight")}
    errors = layer_errors(results, results)
    assert errors == {"forward": {"y": 0.0}, "backward": dict.fromkeys(GRADIENTS, 0.0)}
    source = GemmMeasurement(layer_linears(TINY), "bf16", "cpu", None, Limits())
    assert gemm_errors(source.steps).keys() == {f"{gemm.linear}/{gemm.pass_name}" for gemm in source.group.gemms()}
