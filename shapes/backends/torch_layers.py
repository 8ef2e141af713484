"""One transformer layer from parts, and PyTorch's parts for it.

Every stage up to TE's fused modules is this layer with other parts, so that stages differ in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shapes.backends.emulation.linear import EmulatedLinear
from shapes.models import ModelConfig
from shapes.recipes import Recipe
from shapes.stages import Stage

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}

# Where a layer whose norms and linears are modules of their own keeps its weights.
WEIGHT_PATHS = {
    "input_norm.weight": "norm_qkv.0.weight",
    "input_norm.bias": "norm_qkv.0.bias",
    "qkv.weight": "norm_qkv.1.weight",
    "qkv.bias": "norm_qkv.1.bias",
    "attn_out.weight": "attn_out.weight",
    "attn_out.bias": "attn_out.bias",
    "post_attention_norm.weight": "norm_mlp.0.weight",
    "post_attention_norm.bias": "norm_mlp.0.bias",
    "mlp_up.weight": "norm_mlp.1.weight",
    "mlp_up.bias": "norm_mlp.1.bias",
    "mlp_down.weight": "norm_mlp.3.weight",
    "mlp_down.bias": "norm_mlp.3.bias",
}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Parts:
    """What a layer is built from.

    norm_qkv: (b, s, hidden) -> (b, s, query + 2 x key/value); attn_out: (b, s, query) -> (b, s, hidden);
    norm_mlp: (b, s, hidden) -> (b, s, hidden); rope: (b, s, heads, head_dim) -> the same;
    attention: q, k, v of (b, s, heads, head_dim), k and v with their own number of heads -> (b, s, query).
    """

    norm_qkv: nn.Module
    attn_out: nn.Module
    norm_mlp: nn.Module
    attention: Attention
    rope: Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """A pre-norm transformer layer with residuals: (b, s, hidden) -> (b, s, hidden)."""

    def __init__(self, config: ModelConfig, parts: Parts) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.split = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        self.norm_qkv, self.attn_out, self.norm_mlp = parts.norm_qkv, parts.attn_out, parts.norm_mlp
        self.attention, self.rope = parts.attention, parts.rope

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Options go to every linear."""
        heads = self.norm_qkv(x, **options).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split(self.split, dim=-2)
        x = x + self.attn_out(self.attention(self.rope(q), self.rope(k), v), **options)
        return x + self.norm_mlp(x, **options)


class Chain(nn.Sequential):
    """Modules one after the other; options go to those that `takes_options` names by their index."""

    def __init__(self, *modules: nn.Module, takes_options: tuple[int, ...]) -> None:
        super().__init__(*modules)
        self.takes_options = takes_options

    def forward(self, input: Tensor, **options: Any) -> Tensor:
        for index, module in enumerate(self):
            input = module(input, **(options if index in self.takes_options else {}))
        return input


class Activation(nn.Module):
    """The MLP's activation; gated: activation of the first half times the second half."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.function, self.gated = ACTIVATIONS[config.hidden_act], config.gated_mlp

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.function(x)
        gate, up = x.chunk(2, dim=-1)
        return self.function(gate) * up


def split_parts(
    config: ModelConfig,
    norm: Callable[[], nn.Module],
    linear: Callable[[int, int], nn.Module],
    attention: Attention,
    rope: Callable[[Tensor], Tensor],
) -> Parts:
    """Parts in which each norm and each linear (in_features, out_features) is a module of its own."""
    hidden = config.hidden_size
    return Parts(
        norm_qkv=Chain(norm(), linear(hidden, config.qkv_size), takes_options=(1,)),
        attn_out=linear(config.query_size, hidden),
        norm_mlp=Chain(
            norm(),
            linear(hidden, config.mlp_up_size),
            Activation(config),
            linear(config.intermediate_size, hidden),
            takes_options=(1, 3),
        ),
        attention=attention,
        rope=rope,
    )


def explicit_attention(config: ModelConfig) -> Attention:
    """Attention written out: all scores in memory, softmax in float32."""
    groups = config.num_attention_heads // config.num_key_value_heads
    causal = config.attn_mask_type == "causal"

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(2, 3) / math.sqrt(config.head_dim)
        if causal:
            length = q.shape[2]
            future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        return (weights @ v).transpose(1, 2).flatten(2)

    return attention


def sdpa_attention(config: ModelConfig) -> Attention:
    """torch.nn.functional.scaled_dot_product_attention, which picks a fused kernel."""
    causal = config.attn_mask_type == "causal"
    grouped = config.num_attention_heads != config.num_key_value_heads

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2).flatten(2)

    return attention


ATTENTIONS = {"explicit": explicit_attention, "sdpa": sdpa_attention}


def rotary_embedding(config: ModelConfig, device: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Rotary position embedding (arXiv 2104.09864) on (b, s, heads, head_dim), halves rotated against each other.

    The identity for a model without one.
    """
    if not config.rope_theta:
        return lambda x: x
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    positions = torch.arange(config.sequence_length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, config.rope_theta**-exponents).repeat(1, 2)[:, None, :]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotate


def torch_norm(config: ModelConfig, device: str, dtype: torch.dtype) -> nn.Module:
    """The config's norm as a module of PyTorch."""
    kind = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}[config.normalization]
    return kind(config.hidden_size, eps=config.norm_eps, device=device, dtype=dtype)


def build(config: ModelConfig, stage: Stage, recipe: Recipe, device: str) -> tuple[nn.Module, dict[str, str]]:
    """A stage made of PyTorch's modules and where its weights lie; quantized recipes are emulated."""
    dtype = getattr(torch, recipe.compute_dtype)

    def linear(in_features: int, out_features: int) -> nn.Module:
        if recipe.quantized:
            return EmulatedLinear(in_features, out_features, config.bias, recipe, device, dtype)
        return nn.Linear(in_features, out_features, config.bias, device=device, dtype=dtype)

    parts = split_parts(
        config,
        norm=lambda: torch_norm(config, device, dtype),
        linear=linear,
        attention=ATTENTIONS[stage.attention](config),
        rope=rotary_embedding(config, device, dtype),
    )
    return Layer(config, parts), WEIGHT_PATHS


def graphed(layer: nn.Module, x: Tensor) -> nn.Module:
    """The layer with its forward and its backward pass captured as CUDA graphs, for this x. Needs a GPU."""
    torch.cuda.make_graphed_callables(layer, (x,))  # it replaces the layer's forward
    return layer
