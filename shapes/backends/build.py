"""From a description to something that runs: a layer with its data, or the pieces of GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shapes.backends.executed import ExecutedGemm, record_matmuls
from shapes.gemms import QUANTIZATIONS, Linear, LinearGroup
from shapes.models import ModelConfig
from shapes.program import Program, Segment
from shapes.recipes import Recipe
from shapes.stages import EXECUTIONS, STAGES

Recorder = Callable[..., AbstractContextManager[list[ExecutedGemm]]]
AttentionWatch = Callable[[], AbstractContextManager[dict[str, Any]]]


class Captured(NamedTuple):
    """What went into a step's CUDA graphs: their replays call nothing in which it could be seen."""

    gemms: list[ExecutedGemm]
    attention: dict[str, Any] | None


class LayerStep:
    """A layer, an input, and the gradient of its output: forward and backward as one training step does them.

    x and dy are (micro_batch_size, sequence_length, hidden_size). dy is random, not ones: all-equal gradients are
    quantized without error and draw less power than real ones. With `cached_weights` the first step is the first of
    its microbatches and all others reuse its quantized weights, until `first_microbatch` is set to True again.
    `recorder` collects the GEMMs of a step and `watch_attention` the choice of its attention backend, unless they were
    `captured` as CUDA graphs.
    """

    def __init__(
        self,
        layer: nn.Module,
        weight_paths: dict[str, str],
        config: ModelConfig,
        recipe: Recipe,
        device: str,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        recorder: Recorder = record_matmuls,
        watch_attention: AttentionWatch | None = None,
        cached_weights: bool = False,
        seed: int = 0,
    ) -> None:
        self.layer, self.context = layer, context
        self.recorder, self.watch_attention = recorder, watch_attention
        self.captured: Captured | None = None
        self.first_microbatch = True if cached_weights else None
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
        options = {} if self.first_microbatch is None else {"is_first_microbatch": self.first_microbatch}
        with self.context():
            self.y = self.layer(self.x, **options)
        if self.first_microbatch:
            self.first_microbatch = False

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

    def results(self) -> dict[str, Tensor]:
        """Output `y` of the latest step, and its gradients: `dx`, and `d` before the names of weights."""
        assert self.y is not None, "there is no result before a step"
        return {"y": self.y.detach(), **{f"d{name}": gradient for name, gradient in self.gradients().items()}}

    @property
    def parameter_bytes(self) -> int:
        """Size of all parameters."""
        return sum(parameter.nbytes for parameter in self.layer.parameters())

    @property
    def output_bytes(self) -> int:
        """Size of the layer's output, which is as large as its input."""
        return self.x.nbytes

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


_compiled_for: list[ModelConfig] = []  # the latest, if any


def compile_anew_for(config: ModelConfig) -> None:
    """Forget what torch.compile made for another model.

    TE compiles a few of its kernels. Sizes other than those of the first model would be compiled for any size: on an
    H200 a bias gradient of GPT-2 medium took 18.8 us after other models had been built and 9.8 us otherwise, the
    backward pass of its BF16 layer 642 and 629 us. In training there is one model.
    """
    if _compiled_for and _compiled_for != [config]:
        torch.compiler.reset()
    _compiled_for[:] = [config]


def build_layer(
    config: ModelConfig, stage: str, recipe: Recipe, device: str, seed: int = 0, execution: str = "eager"
) -> LayerStep:
    """The layer of a stage with data, on `cuda` or `cpu`, ready for one of `shapes.stages.EXECUTIONS`.

    Ask `cases.support` first.
    """
    how = EXECUTIONS[execution]
    if STAGES[stage].backend == "te":
        from shapes.backends import te

        compile_anew_for(config)
        layer, paths = te.build(config, STAGES[stage], recipe, device)
        autocast = te.Autocast(recipe)
        capture: Callable[[nn.Module, Tensor], nn.Module] = partial(
            te.graphed, autocast=autocast, cached_weights=how.cached_weights
        )
        seen = (te.record_gemms, te.watch_attention)
        step = LayerStep(layer, paths, config, recipe, device, autocast, *seen, how.cached_weights, seed)
    else:
        from shapes.backends import torch_layers

        layer, paths = torch_layers.build(config, STAGES[stage], recipe, device)
        capture, step = torch_layers.graphed, LayerStep(layer, paths, config, recipe, device, seed=seed)
    if how.graph:
        with step.recorder(only_captured=True) as gemms, (step.watch_attention or nullcontext)() as attention:
            step.layer = capture(layer, step.x)
        step.captured = Captured(gemms, attention)
        step.drop_gradients()
    return step


def _gemms_class(device: str) -> tuple[Callable[[Linear, Recipe, str, int], Any], Recorder]:
    if device == "cuda":
        from shapes.backends.te import TeGemms, record_gemms

        return TeGemms, record_gemms
    from shapes.backends.emulation.linear import EmulatedGemms

    return EmulatedGemms, record_matmuls


class GemmSteps:
    """The GEMMs of a group of linears and the quantizations around them, each with operands quantized from the start.

    A step is named `<linear>/<piece>`, the piece being fprop, dgrad, wgrad, quantize_x, quantize_w or quantize_dy.
    """

    def __init__(self, group: LinearGroup, recipe: Recipe, device: str, seed: int = 0) -> None:
        make, self.recorder = _gemms_class(device)
        self.group, self.recipe = group, recipe
        self.gemms = {
            linear.name: make(linear, recipe, device, seed + index) for index, linear in enumerate(group.linears)
        }

    def pieces(self, pass_name: str, mode: str = "autocast") -> tuple[str, ...]:
        """Of a pass in a mode (cases.MODES): its quantizations, if the recipe has any, its GEMM, or both."""
        quantizations = QUANTIZATIONS[pass_name] if self.recipe.quantized else ()
        return {
            "autocast": (*quantizations, pass_name),
            "prequantized": (pass_name,),
            "quantization": quantizations,
        }[mode]

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
