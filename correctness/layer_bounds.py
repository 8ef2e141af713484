"""What error a layer must have: the errors that bounds.py derives for the operands of its GEMMs, sent through it.

A layer with errors is PyTorch's explicit one, in which every operand of every GEMM, forward and backward, is multiplied
by random numbers of the mean and the deviation that rounding this tensor has: no rounding, no scale, no format. How the
errors then spread through norms, attention, activation and residuals, and how they add up in each gradient, is left to
the layer itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from correctness.bounds import AS_TE, HADAMARD, Extras, Limits, hadamard_matrix, measured_moments
from shapes.backends import torch_layers
from shapes.backends.build import LayerStep, build_layer, copy_weights
from shapes.models import ModelConfig
from shapes.recipes import RECIPES, Operand, Recipe
from shapes.stages import STAGES

# What random errors leave out: that rounding errors depend on the values. A share of the error.
ROOM = 0.10
# An error's norm over n independent elements varies by sqrt(1 / 2n) of itself. All elements of a gradient come from the
# same tokens, so there is that of the elements and that of the tokens; each may be off by so many deviations.
ELEMENT_DEVIATIONS = 5.0
TOKEN_DEVIATIONS = 2.0
# BF16 adds an error of its own, which the two layers share only in part: correctness/test_stages.py derives 0.4 % for
# outputs and a few times that for gradients. Added to the square of the limits.
BF16 = 0.012
DRAWS = 4


class _Noise:
    """Gives the operands of one linear the errors of a recipe."""

    def __init__(self, recipe: Recipe, seed: int, extras: Extras) -> None:
        self.recipe, self.extras = recipe, extras
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, x: Tensor, operand: Operand, dim: int, gradient: bool = False) -> Tensor:
        """x (rows, columns) with the error that it has where a GEMM contracts `dim` of it, in its own dtype."""
        nvfp4 = self.recipe.id == "nvfp4"
        transformed = nvfp4 and self.extras.hadamard and dim == 0 and operand.block == (1, HADAMARD)
        matrix = torch.from_numpy(hadamard_matrix()).to(x.device, torch.float32)
        values = _mixed(x.float(), matrix.T) if transformed else x.float()
        stochastic = nvfp4 and self.extras.stochastic and gradient
        moments = measured_moments(values.double().cpu().numpy(), operand, dim, str(self.recipe.scale), stochastic)
        deviation = math.sqrt(max(moments.energy - moments.overlap**2, 0.0))
        factors = moments.overlap + deviation * torch.randn(x.shape, generator=self.generator)
        noisy = values * factors.to(x.device)
        return (_mixed(noisy, matrix) if transformed else noisy).to(x.dtype)

    def both(self, x: Tensor, operand: Operand, gradient: bool = False) -> tuple[Tensor, Tensor]:
        """x for the GEMMs that contract dimension 0 and 1 of it: one tensor where the recipe makes only one copy."""
        first = self(x, operand, 1, gradient)
        shared = operand.block is not None and operand.block[0] == operand.block[1]
        return (first if shared else self(x, operand, 0, gradient)), first


def _mixed(x: Tensor, matrix: Tensor) -> Tensor:
    """x (rows, columns) with each group of rows multiplied by a matrix."""
    return torch.matmul(matrix, x.reshape(-1, len(matrix), x.shape[1])).view(x.shape)


class _NoisyProduct(torch.autograd.Function):
    """y = x w^T + bias for x (tokens, in), with errors in all operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, noise: _Noise) -> Tensor:
        ctx.noise, ctx.has_bias = noise, bias is not None
        (x_0, x_1), (w_0, w_1) = noise.both(x, noise.recipe.activation), noise.both(weight, noise.recipe.weight)
        ctx.save_for_backward(x_0, w_0)
        return nn.functional.linear(x_1, w_1, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight) = grad_outputs, ctx.saved_tensors
        dy_0, dy_1 = ctx.noise.both(dy, ctx.noise.recipe.gradient, gradient=True)
        return dy_1 @ weight, dy_0.T @ x, dy.float().sum(dim=0).to(dy.dtype) if ctx.has_bias else None, None


class _NoisyLinear(nn.Linear):
    noise: _Noise

    def forward(self, input: Tensor) -> Tensor:
        tokens = input.reshape(-1, self.in_features)
        y: Tensor = _NoisyProduct.apply(tokens, self.weight, self.bias, self.noise)
        return y.reshape(*input.shape[:-1], self.out_features)


def noisy_layer(config: ModelConfig, recipe: Recipe, device: str, seed: int = 0, extras: Extras = AS_TE) -> LayerStep:
    """The explicit PyTorch layer of a quantized recipe, its GEMMs with random errors of the recipe's size."""
    dtype = getattr(torch, recipe.compute_dtype)
    seeds = iter(range(seed * 10, seed * 10 + 10))  # one for each linear

    def linear(in_features: int, out_features: int) -> nn.Module:
        module = _NoisyLinear(in_features, out_features, config.bias, device=device, dtype=dtype)
        module.noise = _Noise(recipe, next(seeds), extras)
        return module

    parts = torch_layers.split_parts(
        config,
        norm=lambda: torch_layers.torch_norm(config, device, dtype),
        linear=linear,
        attention=torch_layers.ATTENTIONS[STAGES["torch"].attention](config),
        rope=torch_layers.rotary_embedding(config, device, dtype),
    )
    return LayerStep(torch_layers.Layer(config, parts), torch_layers.WEIGHT_PATHS, config, recipe, device)


def run_step(step: LayerStep, steps: int = 1) -> dict[str, Tensor]:
    """`y` and all gradients (`x` and the weights' names) of the last of some equal training steps, in float64."""
    for _ in range(steps):
        step.drop_gradients()
        step.forward()
        step.backward()
    assert step.y is not None
    return {name: tensor.detach().double() for name, tensor in {"y": step.y, **step.gradients()}.items()}


def same_data(step: LayerStep, reference: LayerStep) -> None:
    """Give `step` the weights, the input and the output's gradient of `reference`."""
    with torch.no_grad():
        copy_weights(reference, step)
        step.x.copy_(reference.x)
        step.dy.copy_(reference.dy)


def spread_weights(step: LayerStep) -> None:
    """Linears get the deviation 1 / sqrt(in_features), so that attention and MLP weigh as much as the residual path."""
    with torch.no_grad():
        for weight in step.weights.values():
            if weight.dim() == 2:
                weight.mul_(50 / weight.shape[1] ** 0.5)  # they start with a deviation of 0.02


def relative_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """||actual - expected|| / ||expected|| of each tensor."""
    assert actual.keys() == expected.keys()
    return {name: float((actual[name] - expected[name]).norm() / expected[name].norm()) for name in expected}


def layer_limits(reference: LayerStep, config: ModelConfig, recipe: Recipe, device: str) -> dict[str, Limits]:
    """The relative error that a layer of this recipe must have against `reference`, an explicit layer in BF16.

    Of its output (`y`), its input's gradient (`x`) and each weight's gradient, by the names of weights.
    """
    expected = run_step(reference)
    draws = []
    for seed in range(DRAWS):
        step = noisy_layer(config, recipe, device, seed)
        same_data(step, reference)
        draws.append(relative_errors(run_step(step), expected))
    return {
        name: _limits([draw[name] for draw in draws], tensor.numel(), config.tokens)
        for name, tensor in expected.items()
    }


def _limits(errors: list[float], elements: int, tokens: int) -> Limits:
    mean = math.sqrt(sum(error**2 for error in errors) / len(errors))
    room = ROOM + ELEMENT_DEVIATIONS / math.sqrt(2 * elements) + TOKEN_DEVIATIONS / math.sqrt(2 * tokens)
    lower = math.sqrt(max((mean * math.exp(-room)) ** 2 - BF16**2, 0.0))
    return Limits(lower, mean, math.hypot(mean * math.exp(room), BF16))


def reference_layer(config: ModelConfig, device: str, seed: int = 0) -> LayerStep:
    """The explicit PyTorch layer in BF16 with weights of such a size that every part of it matters."""
    step = build_layer(config, "torch", RECIPES["bf16"], device, seed=seed)
    spread_weights(step)
    return step
