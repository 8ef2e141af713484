"""A linear layer, and its three GEMMs one by one, with operands quantized as Transformer Engine does it.

Products accumulate in float32 and are then cast to the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shapes.backends.emulation.scaling import Quantized, Quantizer, gemm_factor
from shapes.gemms import Linear
from shapes.recipes import Recipe

# The operands of each GEMM and the dimension of each that is contracted, with x (tokens, in), w (out, in) and
# dy (tokens, out). The output is (what is left of the first, what is left of the second).
_CONTRACTED = {
    "fprop": (("x", 1), ("w", 1)),
    "dgrad": (("dy", 1), ("w", 0)),
    "wgrad": (("dy", 0), ("x", 0)),
}

# An operand as it is, or its quantized copies by contracted dimension.
_Matrix = Tensor | dict[int, Quantized]


def gemm(pass_name: str, operands: Mapping[str, _Matrix], dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """fprop, dgrad or wgrad of the operands that it needs among x, w, dy; bias (columns of the output) is added.

    Of quantized operands the products are exact in float32, and in TF32 too should torch be told to use that, since
    they have few significant bits; only their accumulation rounds. Scales of whole tensors and the bias are applied
    to the accumulated product, before the one cast to `dtype`. Raises KeyError for an unknown pass.
    """
    (a, a_dim), (b, b_dim) = _CONTRACTED[pass_name]
    first, second = _copy(operands[a], a_dim), _copy(operands[b], b_dim)
    a_matrix, b_matrix = _matrix(first), _matrix(second)
    product = (a_matrix if a_dim == 1 else a_matrix.T) @ (b_matrix if b_dim == 0 else b_matrix.T)
    if isinstance(first, Quantized) and isinstance(second, Quantized):
        product = product * gemm_factor(first, second)
    if bias is not None:
        product = product + bias.float()
    return product.to(dtype)


def _copy(operand: _Matrix, dim: int) -> Tensor | Quantized:
    return operand if isinstance(operand, Tensor) else operand[dim]


def _matrix(copy: Tensor | Quantized) -> Tensor:
    return copy if isinstance(copy, Tensor) else copy.factors()[0]


def _quantizers(recipe: Recipe, device: torch.device | str, seed: int = 0) -> dict[str, Quantizer]:
    """Of x, w and dy. With two levels of scales, NVFP4's, gradients are rounded stochastically."""
    stochastic = recipe.scale == "e4m3 and float32"
    return {
        "x": Quantizer(recipe.activation, recipe, device),
        "w": Quantizer(recipe.weight, recipe, device),
        "dy": Quantizer(recipe.gradient, recipe, device, stochastic=stochastic, seed=seed),
    }


class _QuantizedLinear(torch.autograd.Function):
    """y = x w^T + bias for x (tokens, in). Copies for the backward pass are made in the forward one, as in TE."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, quantizers: dict[str, Quantizer]) -> Tensor:
        x_needs_grad, weight_needs_grad, *_ = ctx.needs_input_grad
        ctx.quantizers, ctx.dtype = quantizers, weight.dtype
        ctx.operands = {
            "x": quantizers["x"](x, (1, 0) if weight_needs_grad else (1,)),
            "w": quantizers["w"](weight, (1, 0) if x_needs_grad else (1,)),
        }
        return gemm("fprop", ctx.operands, weight.dtype, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        x_needs_grad, weight_needs_grad, bias_needs_grad, _ = ctx.needs_input_grad
        dims = [dim for dim, needed in ((1, x_needs_grad), (0, weight_needs_grad)) if needed]
        operands = {**ctx.operands, "dy": ctx.quantizers["dy"](dy, dims)}
        ctx.quantizers["dy"].end_step()
        return (
            gemm("dgrad", operands, ctx.dtype) if x_needs_grad else None,
            gemm("wgrad", operands, ctx.dtype) if weight_needs_grad else None,
            dy.float().sum(dim=0).to(ctx.dtype) if bias_needs_grad else None,  # from dy itself, not quantized
            None,
        )


class EmulatedLinear(nn.Module):
    """A linear layer whose GEMMs, forward and backward, have operands quantized by a recipe.

    fprop contracts `in`, dgrad `out`, wgrad `tokens`; blocks of an operand lie along what is contracted. Parameters:
    `weight` (out, in) and `bias` (out,) or None, in `dtype`, initialized as torch.nn.Linear does. `seed` is that of
    stochastic rounding, where the recipe has it.

    Raises ValueError for a recipe that does not quantize.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        recipe: Recipe,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.quantizers = _quantizers(recipe, device, seed)
        self.in_features, self.out_features, self.recipe = in_features, out_features, recipe
        plain = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features) in the weight's dtype; all leading dimensions are tokens.

        A delayed scale moves on by one step with each call while gradients are enabled, and with each backward.
        Raises ValueError for sizes that the recipe cannot run, forward or backward.
        """
        tokens = x.reshape(-1, self.in_features)
        if reason := self.recipe.misaligned(tokens.shape[0], self.in_features, self.out_features):
            raise ValueError(reason)
        y = _QuantizedLinear.apply(tokens.to(self.weight.dtype), self.weight, self.bias, self.quantizers)
        if torch.is_grad_enabled():
            self.quantizers["x"].end_step()
            self.quantizers["w"].end_step()
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes and recipe, for print(module)."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, recipe={self.recipe.id}"


class EmulatedGemms:
    """The quantizations and the GEMMs of one linear, each to be called alone, on random tensors of its own.

    Tensors are in the recipe's compute dtype: x (tokens, in) standard normal, w (out, in) normal with deviation
    1 / sqrt(in), so that outputs are of order 1, and dy (tokens, out) normal with deviation 1e-3, the order of a
    gradient. `quantize_x`, `quantize_w`, `quantize_dy` quantize for both GEMMs that an operand enters, as a training
    step does; they are None for a recipe that does not quantize. GEMMs use the latest quantized operands, `operands`;
    there are some from the start, with a delayed scale's history filled. Stochastic rounding has the same seed.

    Raises ValueError for sizes that the recipe cannot run.
    """

    quantize_x: Callable[[], None] | None = None
    quantize_w: Callable[[], None] | None = None
    quantize_dy: Callable[[], None] | None = None

    def __init__(self, linear: Linear, recipe: Recipe, device: torch.device | str = "cpu", seed: int = 0) -> None:
        if reason := recipe.misaligned(linear.tokens, linear.in_features, linear.out_features):
            raise ValueError(reason)
        self.dtype: torch.dtype = getattr(torch, recipe.compute_dtype)
        self.tensors = _random_tensors(linear, self.dtype, device, seed)
        self.operands: dict[str, _Matrix] = dict(self.tensors)
        if recipe.quantized:
            self.quantizers = _quantizers(recipe, device, seed)
            self.quantize_x, self.quantize_w, self.quantize_dy = (
                partial(self._quantize, name) for name in self.tensors
            )
            for name in (*self.tensors,) * (2 if recipe.history else 1):  # the first round only fills the history
                self._quantize(name)

    def _quantize(self, name: str) -> None:
        self.operands[name] = self.quantizers[name](self.tensors[name])
        self.quantizers[name].end_step()

    def fprop(self) -> Tensor:
        """(tokens, out) in the compute dtype."""
        return gemm("fprop", self.operands, self.dtype)

    def dgrad(self) -> Tensor:
        """(tokens, in) in the compute dtype."""
        return gemm("dgrad", self.operands, self.dtype)

    def wgrad(self) -> Tensor:
        """(out, in) in the compute dtype."""
        return gemm("wgrad", self.operands, self.dtype)


def _random_tensors(linear: Linear, dtype: torch.dtype, device: torch.device | str, seed: int) -> dict[str, Tensor]:
    """x, w and dy, in this order; see EmulatedGemms."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = {
        "x": (linear.tokens, linear.in_features, 1.0),
        "w": (linear.out_features, linear.in_features, linear.in_features**-0.5),
        "dy": (linear.tokens, linear.out_features, 1e-3),
    }
    return {
        name: (deviation * torch.randn(rows, columns, generator=generator, device=device)).to(dtype)
        for name, (rows, columns, deviation) in shapes.items()
    }
