"""From a description to something that runs: a layer with its data, or the pieces of GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shapes.gemms import Linear, LinearGroup
from shapes.models import ModelConfig
from shapes.program import Program, Segment
from shapes.recipes import Recipe
from shapes.stages import STAGES

# The quantizations that Transformer Engine does in the pass of a GEMM; wgrad reuses what the other passes made.
QUANTIZATIONS = {"fprop": ("quantize_x", "quantize_w"), "dgrad": ("quantize_dy",), "wgrad": ()}


class LayerStep:
    """A layer, an input, and the gradient of its output: forward and backward as one training step does them.

    x and dy are (micro_batch_size, sequence_length, hidden_size). dy is random, not ones: all-equal gradients are
    quantized without error and draw less power than real ones.
    """

    def __init__(
        self,
        layer: nn.Module,
        weight_paths: dict[str, str],
        config: ModelConfig,
        recipe: Recipe,
        device: str,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        seed: int = 0,
    ) -> None:
        self.layer, self.context = layer, context
        parameters = dict(layer.named_parameters())
        self.weights = {name: parameters[path] for name, path in weight_paths.items() if path in parameters}
        generator = torch.Generator(device).manual_seed(seed)
        _initialize(self.weights, generator)
        shape = (config.micro_batch_size, config.sequence_length, config.hidden_size)
        dtype = getattr(torch, recipe.compute_dtype)
        self.x = torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_()
        self.dy = torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(1e-3)
        self.y: Tensor | None = None

    def forward(self) -> None:
        """The forward pass; the recipe's autocast covers it and nothing else."""
        with self.context():
            self.y = self.layer(self.x)

    def backward(self) -> None:
        """The gradients of the input and of every weight."""
        assert self.y is not None, "backward comes after forward"
        self.y.backward(self.dy)

    def drop_gradients(self) -> None:
        """As an optimizer's zero_grad does, so that gradients are written and not added up."""
        self.y = None
        for tensor in (self.x, *self.weights.values()):
            tensor.grad = None

    def program(self) -> Program:
        """One round: forward, then backward."""
        return Program((Segment("forward", self.forward), Segment("backward", self.backward)), self.drop_gradients)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the latest step by the names of weights, and `x` for the input's."""
        tensors = {"x": self.x, **self.weights}
        return {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}


def _initialize(weights: dict[str, nn.Parameter], generator: torch.Generator) -> None:
    """Equal seeds give equal weights in every stage. 0.02 is the deviation that GPT-2 and Llama start from."""
    with torch.no_grad():
        for name in sorted(weights):
            weights[name].normal_(0.0, 0.02, generator=generator)
            if name.endswith("norm.weight"):
                weights[name].add_(1.0)


def copy_weights(source: LayerStep, target: LayerStep) -> None:
    """Give `target` the weights of `source`. Raises ValueError where the two do not have the same weights."""
    if source.weights.keys() != target.weights.keys():
        raise ValueError(f"weights differ: {sorted(source.weights.keys() ^ target.weights.keys())}")
    with torch.no_grad():
        for name, weight in source.weights.items():
            target.weights[name].copy_(weight)


def build_layer(config: ModelConfig, stage: str, recipe: Recipe, device: str, seed: int = 0) -> LayerStep:
    """The layer of a stage with data, on `cuda` or `cpu`. Ask `cases.support` first."""
    if STAGES[stage].backend == "te":
        from shapes.backends import te

        layer, paths = te.build(config, STAGES[stage], recipe, device)
        return LayerStep(layer, paths, config, recipe, device, te.autocast(recipe), seed)
    from shapes.backends import torch_layers

    layer, paths = torch_layers.build(config, STAGES[stage], recipe, device)
    return LayerStep(layer, paths, config, recipe, device, seed=seed)


def _gemms_class(device: str) -> Callable[[Linear, Recipe, str, int], Any]:
    if device == "cuda":
        from shapes.backends.te import TeGemms

        return TeGemms
    from shapes.backends.emulation.linear import EmulatedGemms

    return EmulatedGemms


class GemmSteps:
    """The GEMMs of a group of linears and the quantizations around them, each with operands quantized from the start.

    A step is named `<linear>/<piece>`, the piece being fprop, dgrad, wgrad, quantize_x, quantize_w or quantize_dy.
    """

    def __init__(self, group: LinearGroup, recipe: Recipe, device: str, seed: int = 0) -> None:
        make = _gemms_class(device)
        self.group, self.recipe = group, recipe
        self.gemms = {
            linear.name: make(linear, recipe, device, seed + index) for index, linear in enumerate(group.linears)
        }

    def pieces(self, pass_name: str) -> tuple[str, ...]:
        """The quantizations of a pass, if the recipe has any, and its GEMM."""
        return (*(QUANTIZATIONS[pass_name] if self.recipe.quantized else ()), pass_name)

    def _segments(self, linear: str, *passes: str) -> Iterator[Segment]:
        for pass_name in passes:
            for piece in self.pieces(pass_name):
                yield Segment(f"{linear}/{piece}", getattr(self.gemms[linear], piece))

    def in_layer(self) -> Program:
        """All steps in the order in which a layer runs them: forward, then backward from the last linear."""
        names = list(self.gemms)
        forward = [segment for name in names for segment in self._segments(name, "fprop")]
        backward = [segment for name in reversed(names) for segment in self._segments(name, "dgrad", "wgrad")]
        return Program((*forward, *backward))

    def alone(self, linear: str, pass_name: str) -> Program:
        """One GEMM after its quantizations."""
        return Program(tuple(self._segments(linear, pass_name)))
