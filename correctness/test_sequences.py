"""Several steps in a row: graphs, cached weights, recomputed activations and optimizers. Runs wherever TE runs.

What the same kernels compute from the same data is compared bit by bit. Gradients are not: the backward pass of
attention and the sums over tokens add in an order that is not fixed; relative errors of theirs stay far below BF16's
own rounding, of 2^-9, which is what `same_gradients` allows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shapes.backends.build import LayerStep, build_layer
from shapes.cases import support
from shapes.gemms import layer_linears
from shapes.models import MODELS
from shapes.recipes import RECIPES
from shapes.stages import STAGES

TINY = MODELS["tiny"]
TE_STAGES = [stage.id for stage in STAGES.values() if stage.backend == "te"]
QUANTIZED = [recipe.id for recipe in RECIPES.values() if recipe.quantized]
# Delayed scaling's scales depend on the steps before, so that weights quantized earlier differ from those of now.
WITHOUT_HISTORY = [name for name in QUANTIZED if not RECIPES[name].history]
STEPS = 3
ORDER_OF_SUMS = 2.0**-9


@pytest.fixture(autouse=True)
def te(device: str) -> Any:
    """The backend, or a skip that says what is missing."""
    if device == "cpu":
        pytest.skip("needs Transformer Engine and a GPU; this run is on the CPU")
    from shapes.backends import te

    return te


def layer(stage: str, recipe: str, execution: str = "eager") -> LayerStep:
    """A tiny layer, always with the same weights and data; or a skip with the reason of `support`."""
    if reason := support(recipe, layer_linears(TINY), "cuda", stage):
        pytest.skip(reason)
    return build_layer(TINY, stage, RECIPES[recipe], "cuda", execution=execution)


def run(step: LayerStep) -> dict[str, Tensor]:
    """Output and gradients of a step."""
    step.program().run_once()
    return {name: tensor.clone() for name, tensor in step.results().items()}


def same_gradients(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Assert that they are equal but for the order of sums."""
    assert one.keys() == other.keys()
    for name in one.keys() - {"y"}:
        difference = (one[name].float() - other[name].float()).norm() / other[name].float().norm()
        assert difference < ORDER_OF_SUMS, f"{name} differs by {difference:.2e}"


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED])
@pytest.mark.parametrize("stage", ["torch", "torch_sdpa", *TE_STAGES])
def test_a_graph_computes_what_the_eager_layer_does(stage: str, recipe: str) -> None:
    """Step by step from the first one on: capturing leaves no trace in delayed scaling's history either."""
    eager, graph = layer(stage, recipe), layer(stage, recipe, "graph")
    for _ in range(STEPS):
        expected, actual = run(eager), run(graph)
        assert torch.equal(actual["y"], expected["y"])
        same_gradients(actual, expected)


@pytest.mark.parametrize("execution", ["eager_cached", "graph_cached"])
@pytest.mark.parametrize("recipe", WITHOUT_HISTORY)
@pytest.mark.parametrize("stage", TE_STAGES)
def test_cached_weights_give_the_results_of_requantized_ones(stage: str, recipe: str, execution: str) -> None:
    """In the first microbatch and in those after it."""
    requantized, cached = layer(stage, recipe), layer(stage, recipe, execution)
    for _ in range(STEPS):
        expected, actual = run(requantized), run(cached)
        assert torch.equal(actual["y"], expected["y"])
        same_gradients(actual, expected)


@pytest.mark.parametrize("recipe", WITHOUT_HISTORY)
@pytest.mark.parametrize("stage", TE_STAGES)
def test_cached_weights_are_stale_until_the_next_first_microbatch(stage: str, recipe: str) -> None:
    """An optimizer that changes them is not seen before; with the first microbatch of its next step it is."""
    step = layer(stage, recipe, "eager_cached")
    before = run(step)["y"]
    with torch.no_grad():
        for name, weight in step.weights.items():
            if name.endswith(".weight") and "norm" not in name:
                weight.neg_()
    assert torch.equal(run(step)["y"], before)
    step.first_microbatch = True
    fresh = layer(stage, recipe)
    with torch.no_grad():
        for name, weight in step.weights.items():
            fresh.weights[name].copy_(weight)
    after = run(step)["y"]
    assert not torch.equal(after, before)
    assert torch.equal(after, run(fresh)["y"])


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED])
@pytest.mark.parametrize("stage", ["te_fused", "te_layer"])
def test_recomputed_activations_give_the_same_gradients(te: Any, stage: str, recipe: str) -> None:
    """te.checkpoint runs the forward pass again in the backward pass, with the scales of the first time."""
    plain, recomputing = layer(stage, recipe), layer(stage, recipe)
    inner = recomputing.layer.forward
    recomputing.layer.forward = lambda x: te.modules().checkpoint(inner, x)
    for _ in range(STEPS):
        expected, actual = run(plain), run(recomputing)
        assert torch.equal(actual["y"], expected["y"])
        same_gradients(actual, expected)


@pytest.mark.parametrize("recipe", WITHOUT_HISTORY)
def test_weights_kept_quantized_give_the_results_of_requantized_ones(te: Any, recipe: str) -> None:
    """te.Linear under quantized_model_init, from the same high-precision weights."""
    layer("te_modules", recipe)  # or skip
    modules = te.modules()
    make = getattr(modules, "quantized_model_init", None) or modules.fp8_model_init
    options: dict[str, Any] = dict(bias=False, params_dtype=torch.bfloat16, device="cuda")
    with make(enabled=True, recipe=te.te_recipe(RECIPES[recipe]), preserve_high_precision_init_val=True):
        quantized = modules.Linear(256, 512, **options)
    plain = modules.Linear(256, 512, **options)
    with torch.no_grad():
        plain.weight.copy_(quantized.weight.get_high_precision_init_val().to("cuda"))
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(128, 512, device="cuda", dtype=torch.bfloat16)
    found = []
    for module in (quantized, plain):
        with te.Autocast(RECIPES[recipe])():
            y = module(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        found.append((y, dx))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("recipe", WITHOUT_HISTORY)
def test_training_with_cached_weights_is_training(recipe: str) -> None:
    """Two optimizer steps of two microbatches each: the weights come out as with requantizing every time."""
    weights = []
    for execution in ("eager", "eager_cached"):
        step = layer("te_layer", recipe, execution)
        optimizer = torch.optim.SGD(step.weights.values(), lr=0.1)
        for _ in range(2):
            step.first_microbatch = None if execution == "eager" else True
            optimizer.zero_grad()
            for _ in range(2):
                step.forward()
                step.backward()
            optimizer.step()
        weights.append({name: weight.detach().clone() for name, weight in step.weights.items()})
    for name, weight in weights[0].items():
        difference = (weights[1][name].float() - weight.float()).norm() / weight.float().norm()
        assert difference < ORDER_OF_SUMS, f"{name} differs by {difference:.2e}"
