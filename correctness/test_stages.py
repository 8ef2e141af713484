"""All stages compute the same layer: with the same weights, equal outputs, input gradients and weight gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from correctness.layer_bounds import relative_errors, run_step, same_data, spread_weights
from shapes.backends.build import LayerStep, build_layer, copy_weights
from shapes.cases import support
from shapes.gemms import layer_linears
from shapes.models import ACTIVATIONS, ModelConfig
from shapes.recipes import RECIPES
from shapes.stages import STAGES

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "micro_batch_size": 2,
    "sequence_length": 64,
}

# Each differs from the first in what a model can differ in.
LAYERS = {
    "gpt": ModelConfig("gpt", **SMALL, bias=True),
    "llama": ModelConfig(
        "llama",
        **SMALL,
        num_key_value_heads=2,
        normalization="RMSNorm",
        hidden_act="silu",
        gated_mlp=True,
        rope_theta=1e4,
    ),
    "one_group": ModelConfig("one_group", **SMALL, num_key_value_heads=1, rope_theta=5e5),
    "wide_heads": ModelConfig("wide_heads", **SMALL, head_dim=64, gated_mlp=True),
    "bidirectional": ModelConfig("bidirectional", **SMALL, attn_mask_type="no_mask", bias=True, rope_theta=1e4),
    **{f"act_{act}": ModelConfig(f"act_{act}", **SMALL, hidden_act=act) for act in ACTIVATIONS},
    **{f"gated_{act}": ModelConfig(f"gated_{act}", **SMALL, hidden_act=act, gated_mlp=True) for act in ACTIVATIONS},
}

# Relative error (Frobenius) between two BF16 layers. A BF16 rounding has a relative error of at most 2^-9; a result
# passes through about ten of them (norm, three projections, attention, activation, residuals), which add up as
# independent errors to sqrt(10) * 2^-9 / sqrt(3), 0.4 %, for outputs and a few times that for gradients, through which
# each is passed twice. 2 % is five times that, and a wrong mask, head order or gate gives more than 12 %.
BF16_TOLERANCE = 0.02
# ReLU's derivative jumps at 0. The two layers disagree on the sign of inputs within a rounding error (0.4 % of their
# deviation) of 0, some 0.3 % of them, each of which then has an error of its own size: sqrt(0.003), 5 %.
RELU_TOLERANCE = 0.06


def errors(step: LayerStep, reference: LayerStep) -> dict[str, float]:
    """Relative error of the output, the input's gradient and each weight's gradient after one step of both.

    On the same weights, inputs and output gradients.
    """
    spread_weights(reference)
    same_data(step, reference)
    expected, actual = run_step(reference), run_step(step)
    assert expected.keys() == actual.keys() == {"y", "x", *reference.weights}
    return relative_errors(actual, expected)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "torch"])
def test_every_stage_computes_the_same_as_explicit_pytorch(stage, name, device):
    """A stage in BF16 agrees with the first one in everything that a training step makes."""
    config = LAYERS[name]
    if reason := support("bf16", layer_linears(config), device, stage):
        pytest.skip(reason)
    reference = build_layer(config, "torch", RECIPES["bf16"], device)
    step = build_layer(config, stage, RECIPES["bf16"], device, seed=1)
    tolerance = RELU_TOLERANCE if config.hidden_act == "relu" else BF16_TOLERANCE
    wrong = {key: error for key, error in errors(step, reference).items() if not error < tolerance}
    assert not wrong


@pytest.mark.parametrize("change", ["mask", "rope", "activation", "heads"])
def test_a_wrong_layer_is_told_apart(change, device):
    """The tolerance is far below what a wrong mask, embedding, activation or head order makes."""
    config = LAYERS["llama"]
    changes: dict[str, dict[str, Any]] = {
        "mask": {"attn_mask_type": "no_mask"},
        "rope": {"rope_theta": 0.0},
        "activation": {"hidden_act": "relu"},
        "heads": {"num_attention_heads": 2, "head_dim": 64, "num_key_value_heads": 1},
    }
    other = replace(config, **changes[change])
    reference = build_layer(config, "torch", RECIPES["bf16"], device)
    step = build_layer(other, "torch", RECIPES["bf16"], device)
    assert max(errors(step, reference).values()) > 2 * RELU_TOLERANCE


def test_equal_seeds_give_equal_weights_and_data(device):
    """Two stages built with the same seed start from the same numbers."""
    first = build_layer(LAYERS["gpt"], "torch", RECIPES["bf16"], device, seed=3)
    second = build_layer(LAYERS["gpt"], "torch_sdpa", RECIPES["bf16"], device, seed=3)
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.dy, second.dy)
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def test_weights_of_another_layer_are_refused(device):
    """Copying between layers with different weights names the difference."""
    source = build_layer(LAYERS["gpt"], "torch", RECIPES["bf16"], device)
    target = build_layer(LAYERS["llama"], "torch", RECIPES["bf16"], device)
    with pytest.raises(ValueError, match="bias"):
        copy_weights(source, target)
