"""Layers: PyTorch's stages agree for any config, and emulated recipes have the error that layer_bounds.py derives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from correctness import strategies
from correctness.layer_bounds import layer_limits, reference_layer, relative_errors, run_step, same_data
from correctness.test_stages import BF16_TOLERANCE, RELU_TOLERANCE
from shapes.backends.build import build_layer
from shapes.models import ModelConfig
from shapes.recipes import RECIPES, Recipe

QUANTIZED = [recipe for recipe in RECIPES.values() if recipe.quantized]

each_recipe = pytest.mark.parametrize("recipe", QUANTIZED, ids=lambda recipe: recipe.id)


def few() -> settings:
    """A third of the profile's examples."""
    return settings(max_examples=max(settings().max_examples // 3, 1))


@given(config=strategies.configs(), seed=st.integers(0, 1000))
def test_explicit_and_fused_attention_make_the_same_layer(config: ModelConfig, seed: int) -> None:
    """In BF16, outputs and all gradients, for any heads, groups, norms, masks, activations and biases.

    With ReLU few elements change sign in a layer as small as these, and their number varies: twice the tolerance.
    """
    reference = reference_layer(config, "cpu", seed)
    step = build_layer(config, "torch_sdpa", RECIPES["bf16"], "cpu")
    same_data(step, reference)
    tolerance = 2 * RELU_TOLERANCE if config.hidden_act == "relu" else BF16_TOLERANCE
    errors = relative_errors(run_step(step), run_step(reference))
    assert not {name: error for name, error in errors.items() if not error < tolerance}


@pytest.mark.parametrize("stage", ["torch", "torch_sdpa"])
@each_recipe
@few()
@given(config=strategies.configs(), seed=st.integers(0, 1000))
def test_an_emulated_layer_has_the_error_of_its_recipe(
    stage: str, recipe: Recipe, config: ModelConfig, seed: int
) -> None:
    """Output, input gradient and every weight gradient, from both sides."""
    reference = reference_layer(config, "cpu", seed)
    limits = layer_limits(reference, config, recipe, "cpu")
    step = build_layer(config, stage, recipe, "cpu", seed=seed)
    same_data(step, reference)
    errors = relative_errors(run_step(step, steps=2), run_step(reference))
    assert not {name: (error, limits[name]) for name, error in errors.items() if error not in limits[name]}


@each_recipe
@few()
@given(config=strategies.configs(), seed=st.integers(0, 1000))
def test_stages_in_one_recipe_agree(recipe: Recipe, config: ModelConfig, seed: int) -> None:
    """Better than with BF16: values that differ by a rounding of BF16 are mostly quantized alike."""
    reference = reference_layer(config, "cpu", seed)
    limits = layer_limits(reference, config, recipe, "cpu")
    results = []
    for stage in ("torch", "torch_sdpa"):
        step = build_layer(config, stage, recipe, "cpu", seed=seed)
        same_data(step, reference)
        results.append(run_step(step, steps=2))
    errors = relative_errors(results[0], results[1])
    assert not {name: (error, limits[name].upper) for name, error in errors.items() if error > limits[name].upper}


@each_recipe
@few()
@given(config=strategies.configs(), seed=st.integers(0, 1000))
def test_a_layer_that_ran_in_bf16_is_noticed(recipe: Recipe, config: ModelConfig, seed: int) -> None:
    """Its output and its weight gradients are closer than the recipe's can be."""
    reference = reference_layer(config, "cpu", seed)
    limits = layer_limits(reference, config, recipe, "cpu")
    step = build_layer(config, "torch_sdpa", RECIPES["bf16"], "cpu")
    same_data(step, reference)
    errors = relative_errors(run_step(step), run_step(reference))
    matrices = ["y", *(name for name, weight in step.weights.items() if weight.dim() == 2)]
    assert [name for name in matrices if errors[name] in limits[name]] == []
