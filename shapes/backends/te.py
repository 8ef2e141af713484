"""The one file that knows Transformer Engine: recipes, layers, single GEMMs, support, and what was executed.

Supports TE 2.9 and newer. TE is imported at the time of use, since its import needs a GPU.
Names of TE that start with an underscore are used where it offers no public way: test_house_rules.py lists them.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shapes.backends import torch_layers
from shapes.backends.emulation.formats import FORMATS
from shapes.backends.executed import ExecutedGemm, plain_format
from shapes.backends.torch_layers import Parts
from shapes.gemms import PASSES, Linear
from shapes.models import ModelConfig
from shapes.recipes import RECIPES, TENSOR, Recipe
from shapes.stages import Stage

# recipe id -> class in transformer_engine.common.recipe, and te's query for support
_RECIPES = {
    "fp8_delayed_scaling": ("DelayedScaling", "is_fp8_available"),
    "fp8_current_scaling": ("Float8CurrentScaling", "is_fp8_available"),
    "fp8_block_scaling": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "mxfp8": ("MXFP8BlockScaling", "is_mxfp8_available"),
    "nvfp4": ("NVFP4BlockScaling", "is_nvfp4_available"),
}

# hidden_act -> TE's names for a plain and for a gated MLP
_ACTIVATIONS = {
    "gelu_pytorch_tanh": ("gelu", "geglu"),
    "silu": ("silu", "swiglu"),
    "relu": ("relu", "reglu"),
    "relu2": ("srelu", "sreglu"),
    "quick_gelu": ("qgelu", "qgeglu"),
}

# Fast accumulation in fprop, exact in the gradients: _2X_ACC_* in TE's module/base.py. Block scaling is always exact.
_SPLIT_ACCUMULATOR = {"fprop": False, "dgrad": True, "wgrad": True}

_FUSED_PATHS = {
    "input_norm.weight": "norm_qkv.layer_norm_weight",
    "input_norm.bias": "norm_qkv.layer_norm_bias",
    "qkv.weight": "norm_qkv.weight",
    "qkv.bias": "norm_qkv.bias",
    "attn_out.weight": "attn_out.weight",
    "attn_out.bias": "attn_out.bias",
    "post_attention_norm.weight": "norm_mlp.layer_norm_weight",
    "post_attention_norm.bias": "norm_mlp.layer_norm_bias",
    "mlp_up.weight": "norm_mlp.fc1_weight",
    "mlp_up.bias": "norm_mlp.fc1_bias",
    "mlp_down.weight": "norm_mlp.fc2_weight",
    "mlp_down.bias": "norm_mlp.fc2_bias",
}
_LAYER_PARTS = {
    "norm_qkv.": "layer.self_attention.layernorm_qkv.",
    "attn_out.": "layer.self_attention.proj.",
    "norm_mlp.": "layer.layernorm_mlp.",
}


def _layer_path(path: str) -> str:
    part = next(part for part in _LAYER_PARTS if path.startswith(part))
    return _LAYER_PARTS[part] + path.removeprefix(part)


_LAYER_PATHS = {name: _layer_path(path) for name, path in _FUSED_PATHS.items()}


@cache
def modules() -> Any:
    """TE's package for PyTorch, imported now."""
    import transformer_engine.pytorch as te

    return te


def _tex() -> Any:
    modules()  # it loads the libraries that the extension needs
    import transformer_engine_torch as tex

    return tex


@cache
def unsupported_reason(recipe: str) -> str | None:
    """Why Transformer Engine cannot run a recipe here, in its own words where it gives some; None if it can."""
    if not torch.cuda.is_available():
        return "Transformer Engine needs a GPU, and PyTorch sees none"
    try:
        te = modules()
    except Exception as error:  # a broken installation raises anything
        return f"Transformer Engine cannot be imported: {type(error).__name__}: {error}"
    if not hasattr(te, "autocast"):
        return f"Transformer Engine {version()} is too old: this suite needs 2.9 or newer"
    if recipe not in _RECIPES:
        return None
    class_name, query = _RECIPES[recipe]
    import transformer_engine.common.recipe as recipes

    if not hasattr(recipes, class_name) or not hasattr(te, query):
        return f"Transformer Engine {version()} has no {class_name}"
    supported, reason = getattr(te, query)(return_reason=True)
    return None if supported else reason or f"{query}() is false"


def version() -> str:
    """Transformer Engine's version."""
    import transformer_engine

    return str(transformer_engine.__version__)


def te_recipe(recipe: Recipe, **options: Any) -> Any:
    """A new recipe object of TE with TE's defaults but for `options`. Attention may change it: it is never shared."""
    import transformer_engine.common.recipe as recipes

    return getattr(recipes, _RECIPES[recipe.id][0])(**options)


class Autocast:
    """Makes the context for a forward pass in a recipe: the same recipe object in every step."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = te_recipe(recipe) if recipe.quantized else None

    def __call__(self) -> AbstractContextManager[Any]:
        return modules().autocast(enabled=self.recipe is not None, recipe=self.recipe)


# --- layers ----------------------------------------------------------------------------------------------------


def _attention(config: ModelConfig) -> torch_layers.Attention:
    return modules().DotProductAttention(
        config.num_attention_heads,
        config.head_dim,
        num_gqa_groups=config.num_key_value_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type=config.attn_mask_type,
    )


def _rope_angles(config: ModelConfig) -> Tensor | None:
    if not config.rope_theta:
        return None
    embedding = modules().RotaryPositionEmbedding(config.head_dim, rotary_base=config.rope_theta)
    return embedding(config.sequence_length)


def _rope(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    angles = _rope_angles(config)
    if angles is None:
        return lambda x: x
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    return lambda x: apply_rotary_pos_emb(x, angles, tensor_format="bshd", fused=True)


def _fused_parts(config: ModelConfig, dtype: torch.dtype, device: str) -> Parts:
    te = modules()
    common: dict[str, Any] = dict(bias=config.bias, params_dtype=dtype, device=device)
    norm: dict[str, Any] = dict(eps=config.norm_eps, normalization=config.normalization)
    return Parts(
        norm_qkv=te.LayerNormLinear(config.hidden_size, config.qkv_size, **norm, **common),
        attn_out=te.Linear(config.query_size, config.hidden_size, **common),
        norm_mlp=te.LayerNormMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=_ACTIVATIONS[config.hidden_act][config.gated_mlp],
            **norm,
            **common,
        ),
        attention=_attention(config),
        rope=_rope(config),
    )


class _TransformerLayer(nn.Module):
    """te.TransformerLayer with its rotary embedding: (b, s, hidden) -> (b, s, hidden)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.angles = _rope_angles(config)
        self.layer = modules().TransformerLayer(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            num_gqa_groups=config.num_key_value_heads,
            kv_channels=config.head_dim,
            layernorm_epsilon=config.norm_eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type=config.attn_mask_type,
            normalization=config.normalization,
            activation=_ACTIVATIONS[config.hidden_act][config.gated_mlp],
            bias=config.bias,
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            attn_input_format="bshd",
            params_dtype=dtype,
            device=device,
        )

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.layer(x, rotary_pos_emb=self.angles, **options)


def _forget_earlier_layers() -> None:
    """Empty TE's process-wide buffers of delayed scaling.

    They keep the histories of every module that ever ran, and every quantized layer that runs later, in any recipe,
    updates them all in each step.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


def build(config: ModelConfig, stage: Stage, recipe: Recipe, device: str) -> tuple[nn.Module, dict[str, str]]:
    """A stage made of TE's modules, and where its weights lie (name -> path of the parameter)."""
    te = modules()
    _forget_earlier_layers()
    dtype = getattr(torch, recipe.compute_dtype)
    if stage.fused == "layer":
        return _TransformerLayer(config, dtype, device), _LAYER_PATHS
    if stage.fused == "modules":
        return torch_layers.Layer(config, _fused_parts(config, dtype, device)), _FUSED_PATHS
    uses_te_attention = stage.attention == "te"
    parts = torch_layers.split_parts(
        config,
        norm=lambda: getattr(te, config.normalization)(
            config.hidden_size, eps=config.norm_eps, dtype=dtype, device=device
        ),
        linear=lambda i, o: te.Linear(i, o, bias=config.bias, params_dtype=dtype, device=device),
        attention=_attention(config) if uses_te_attention else torch_layers.ATTENTIONS[stage.attention](config),
        rope=_rope(config) if uses_te_attention else torch_layers.rotary_embedding(config, device, dtype),
    )
    return torch_layers.Layer(config, parts), torch_layers.WEIGHT_PATHS


def graphed(layer: nn.Module, x: Tensor, autocast: Autocast, cached_weights: bool) -> nn.Module:
    """The layer with its forward and its backward pass captured as CUDA graphs, for this x and recipe.

    Calls of it need the same autocast. With cached weights they need `is_first_microbatch`; the kernels that quantize
    weights are in the graph all the same, and a flag on the GPU makes them do nothing.
    """
    make = modules().make_graphed_callables
    # Gradients lie where the graph puts them; TE 2.19 and newer would copy them once more.
    options = {"clone_param_grads_on_return": False}
    known = {name: value for name, value in options.items() if name in inspect.signature(make).parameters}
    return make(
        layer,
        (x,),
        enabled=autocast.recipe is not None,
        recipe=autocast.recipe,
        cache_quantized_params=cached_weights,
        **known,
    )


# --- single GEMMs ----------------------------------------------------------------------------------------------


def _delayed_quantizer(recipe: Recipe, role: str, data: Tensor) -> Any:
    """A scale as delayed scaling has it once its history has seen the data: largest finite value / amax."""
    scale = (FORMATS[getattr(recipe, role).element].max_finite / data.abs().max().float()).reshape(1)
    return modules().Float8Quantizer(scale, torch.zeros_like(scale), _fp8_dtype(recipe, role))


def _current_quantizer(recipe: Recipe, role: str, data: Tensor) -> Any:
    return modules().Float8CurrentScalingQuantizer(_fp8_dtype(recipe, role), data.device)


def _block_quantizer(recipe: Recipe, role: str, _: Tensor) -> Any:
    dimensions = 2 if getattr(recipe, role).block == (128, 128) else 1
    return modules().Float8BlockQuantizer(
        _fp8_dtype(recipe, role), rowwise=True, columnwise=True, block_scaling_dim=dimensions
    )


def _mxfp8_quantizer(recipe: Recipe, role: str, _: Tensor) -> Any:
    return modules().MXFP8Quantizer(_fp8_dtype(recipe, role))


def _nvfp4_quantizer(_: Recipe, role: str, __: Tensor) -> Any:
    options = {
        "activation": dict(with_rht=True, with_post_rht_amax=True),
        "weight": dict(with_2d_quantization=True),
        "gradient": dict(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True),
    }
    return modules().NVFP4Quantizer(**options[role])


_QUANTIZERS: dict[str, Callable[[Recipe, str, Tensor], Any]] = {
    "fp8_delayed_scaling": _delayed_quantizer,
    "fp8_current_scaling": _current_quantizer,
    "fp8_block_scaling": _block_quantizer,
    "mxfp8": _mxfp8_quantizer,
    "nvfp4": _nvfp4_quantizer,
}


def _fp8_dtype(recipe: Recipe, role: str) -> Any:
    dtypes = _tex().DType
    return {"e4m3": dtypes.kFloat8E4M3, "e5m2": dtypes.kFloat8E5M2}[getattr(recipe, role).element]


def quantizer(recipe: Recipe, role: str, data: Tensor) -> Any:
    """The quantizer that TE's modules use for `activation`, `weight` or `gradient`, row- and column-wise."""
    result = _QUANTIZERS[recipe.id](recipe, role, data)
    result.internal = True  # as the modules do: plain storage, no autograd
    if hasattr(result, "optimize_for_gemm"):  # TE 2.12 and newer: scales in the layout that the GEMM wants
        result.optimize_for_gemm = recipe.id != "nvfp4" or all(size % 128 == 0 for size in data.shape)
    return result


@dataclass(frozen=True)
class Copy:
    """One copy of a quantized tensor, brought from TE's layout into the tensor's own axes.

    codes          (rows, columns), uint8, one element each
    inverse_scale  shape () for one per tensor, else one per block: float32, or codes of E8M0 or E4M3 (uint8). Blocks of
                   NVFP4 are single rows (or columns) here, for 16 x 16 blocks too
    amax           shape (), the largest magnitude that TE keeps, or None
    """

    codes: Tensor
    inverse_scale: Tensor
    amax: Tensor | None = None


def quantized(recipe: Recipe, role: str, data: Tensor, **options: Any) -> dict[int, Copy]:
    """The row- and column-wise copies (1 and 0, the dimension that a GEMM contracts) that TE makes of a tensor's data.

    `options` are attributes of TE's quantizer, as `force_pow_2_scales`, `amax_epsilon`, `scale` or
    `stochastic_rounding`. Raises AttributeError for one that it does not have.
    """
    maker = quantizer(recipe, role, data)
    if hasattr(maker, "optimize_for_gemm"):
        maker.optimize_for_gemm = False  # scales in the order of their blocks
    for name, value in options.items():
        getattr(maker, name)
        setattr(maker, name, value)
    copies = copies_of(maker(data), *data.shape)
    if recipe.history:  # the maximum is noted in the quantizer, and enters the history from there
        return {dim: replace(copy, amax=maker.amax.reshape(())) for dim, copy in copies.items()}
    return copies


def copies_of(tensor: Any, rows: int, columns: int) -> dict[int, Copy]:
    """The copies in TE's storage of a quantized tensor; see Copy. Raises KeyError for a storage that is not known."""
    kind = next((kind for kind in _STORAGES if kind in type(tensor).__name__), type(tensor).__name__)
    return _STORAGES[kind](tensor.get_metadata(), rows, columns)


def _per_tensor_copies(stored: dict[str, Any], rows: int, columns: int) -> dict[int, Copy]:
    """One scale; on GPUs whose GEMMs take any layout one buffer serves both."""
    codes, transposed, scale = stored["data"], stored["data_transpose"], stored["fp8_scale_inv"].reshape(())
    other = codes if transposed is None else transposed.view(columns, rows).T
    return {1: Copy(codes.view(rows, columns), scale), 0: Copy(other, scale)}


def _block_copies(stored: dict[str, Any], rows: int, columns: int) -> dict[int, Copy]:
    """Column-wise data are transposed. Scales of 1 x 128 are too, the row-wise ones, and padded to a multiple of 4."""
    row_codes, column_codes = stored["rowwise_data"], stored["columnwise_data"].view(columns, rows).T
    row_scales, column_scales = stored["rowwise_scale_inv"], stored["columnwise_scale_inv"]
    block_rows, block_columns = -(-rows // 128), -(-columns // 128)
    if stored["is_2D_scaled"]:
        row_scales, column_scales = row_scales[:, :block_columns], column_scales[:, :block_rows].T
    else:
        row_scales, column_scales = row_scales[:, :rows].T, column_scales[:, :columns]
    return {1: Copy(row_codes.view(rows, columns), row_scales), 0: Copy(column_codes, column_scales)}


def _mxfp8_copies(stored: dict[str, Any], rows: int, columns: int) -> dict[int, Copy]:
    """Nothing is transposed; scales are padded to 128 lines and 4 blocks."""
    row_scales = stored["rowwise_scale_inv"][:rows, : columns // 32]
    column_scales = stored["columnwise_scale_inv"][: rows // 32, :columns]
    return {
        1: Copy(stored["rowwise_data"].view(rows, columns), row_scales),
        0: Copy(stored["columnwise_data"].view(rows, columns), column_scales),
    }


def _nvfp4_copies(stored: dict[str, Any], rows: int, columns: int) -> dict[int, Copy]:
    """Two codes per byte, the first in the lower half. Column-wise data and scales are transposed, scales padded."""

    def unpacked(data: Tensor, lines: int) -> Tensor:
        data = data.view(torch.uint8).view(lines, -1)
        return torch.stack([data & 0xF, data >> 4], dim=2).view(lines, -1)

    row_scales = stored["rowwise_scale_inv"].view(torch.uint8)[:rows, : columns // 16]
    column_scales = stored["columnwise_scale_inv"].view(torch.uint8)[:columns, : rows // 16]
    return {
        1: Copy(unpacked(stored["rowwise_data"], rows), row_scales, stored["amax_rowwise"].reshape(())),
        0: Copy(unpacked(stored["columnwise_data"], columns).T, column_scales.T, stored["amax_columnwise"].reshape(())),
    }


# What the name of TE's storage contains, and how it is read: pytorch/tensor/storage/*.py and `get_scale_shape` in
# pytorch/tensor/*.py.
_STORAGES: dict[str, Callable[[dict[str, Any], int, int], dict[int, Copy]]] = {
    "Float8Tensor": _per_tensor_copies,
    "Float8Blockwise": _block_copies,
    "MXFP8": _mxfp8_copies,
    "NVFP4": _nvfp4_copies,
}


class DelayedLinear:
    """A te.Linear without bias under delayed scaling, and the state of its scales. `options` are DelayedScaling's."""

    def __init__(self, in_features: int, out_features: int, device: str, **options: Any) -> None:
        _forget_earlier_layers()
        self.linear = modules().Linear(
            in_features, out_features, bias=False, params_dtype=torch.bfloat16, device=device
        )
        self.recipe = te_recipe(RECIPES["fp8_delayed_scaling"], **options)

    @property
    def weight(self) -> Tensor:
        """(out, in)."""
        return self.linear.weight

    def step(self, x: Tensor, dy: Tensor) -> Tensor:
        """Forward and backward for x (tokens, in) and dy (tokens, out); returns y (tokens, out)."""
        with modules().autocast(enabled=True, recipe=self.recipe):
            y = self.linear(x.detach().requires_grad_())
        y.backward(dy)
        return y.detach()

    def scales(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By operand, after a first step: scale (shape ()) and maxima (history,), those of the step under way first."""
        forward, backward = (self.linear.fp8_meta[f"scaling_{direction}"] for direction in ("fwd", "bwd"))
        places = {"x": (forward, 0), "w": (forward, 1), "dy": (backward, 0)}
        return {name: (state.scale[index], state.amax_history[:, index]) for name, (state, index) in places.items()}


@cache
def _gemm_function() -> Callable[..., Any]:
    """TE's general_gemm without its workspace argument, which TE 2.10 dropped."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    if "workspace" not in inspect.signature(general_gemm).parameters:
        return general_gemm
    from transformer_engine.pytorch.module.base import get_workspace

    return lambda a, b, **options: general_gemm(a, b, get_workspace(), **options)


_ROLES = ("activation", "weight", "gradient")  # of x, w and dy


class TeGemms:
    """The GEMMs of one linear as a te.Linear without bias calls them, and the quantizations around them, one by one.

    x is (tokens, in), w (out, in), dy (tokens, out); the results are (tokens, out), (tokens, in), (out, in). Operands
    and outputs keep their memory, so that every round has the same addresses.
    """

    def __init__(self, linear: Linear, recipe: Recipe, device: str, seed: int = 0) -> None:
        self.recipe, self.dtype = recipe, getattr(torch, recipe.compute_dtype)
        generator = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, columns: int, deviation: float) -> Tensor:
            data = torch.randn(rows, columns, generator=generator, device=device, dtype=self.dtype)
            return data.mul_(deviation)

        data = {
            "activation": normal(linear.tokens, linear.in_features, 1.0),
            "weight": normal(linear.out_features, linear.in_features, 0.02),
            "gradient": normal(linear.tokens, linear.out_features, 1e-3),
        }
        self.data, self.operands = data, dict(data)
        self.outputs = {
            name: torch.empty(gemm.m, gemm.n, device=device, dtype=self.dtype)
            for name, gemm in ((name, linear.gemm(name)) for name in PASSES)
        }
        self.quantizers = {role: quantizer(recipe, role, data[role]) for role in data} if recipe.quantized else {}
        for role, maker in self.quantizers.items():
            self.operands[role] = maker(data[role])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is quantized: x, w and dy."""
        return dict(zip(("x", "w", "dy"), (self.data[role] for role in _ROLES), strict=True))

    def _quantize(self, role: str) -> None:
        _tex().quantize(self.data[role], self.quantizers[role], self.operands[role], None)

    def quantize_x(self) -> None:
        """The activation, row- and column-wise."""
        self._quantize("activation")

    def quantize_w(self) -> None:
        """The weight, row- and column-wise."""
        self._quantize("weight")

    def quantize_dy(self) -> None:
        """The output's gradient, row- and column-wise."""
        self._quantize("gradient")

    def _gemm(self, pass_name: str, a: str, b: str, layout: str) -> Tensor:
        _gemm_function()(
            self.operands[a],
            self.operands[b],
            out_dtype=self.dtype,
            layout=layout,
            out=self.outputs[pass_name],
            use_split_accumulator=_SPLIT_ACCUMULATOR[pass_name] or self.recipe.weight.block not in (None, TENSOR),
            grad=pass_name != "fprop",
        )
        return self.outputs[pass_name]

    def fprop(self) -> Tensor:
        """y = x w^T."""
        return self._gemm("fprop", "weight", "activation", "TN")

    def dgrad(self) -> Tensor:
        """dx = dy w."""
        return self._gemm("dgrad", "weight", "gradient", "NN")

    def wgrad(self) -> Tensor:
        """dw = dy^T x."""
        return self._gemm("wgrad", "activation", "gradient", "NT")


# --- what was executed -----------------------------------------------------------------------------------------


_LAYOUT_PASSES = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}


def operand_format(tensor: Any) -> str:
    """`bf16`, `e4m3`, `e4m3:1x128`, `e4m3:128x128`, `e4m3:1x32`, `e2m1:1x16`, `e2m1:16x16`: see recipes.Operand."""
    kind = type(tensor).__name__
    if isinstance(tensor, Tensor) and not hasattr(tensor, "_quantizer"):
        return plain_format(tensor)
    if "NVFP4" in kind:
        two_dimensional = getattr(getattr(tensor, "_quantizer", None), "with_2d_quantization", False)
        return "e2m1:16x16" if two_dimensional else "e2m1:1x16"
    element = "e5m2" if "E5M2" in tensor._fp8_dtype.name else "e4m3"
    if "Blockwise" in kind:
        return f"{element}:128x128" if tensor._is_2D_scaled else f"{element}:1x128"
    return f"{element}:1x32" if "MXFP8" in kind else element


def _rows_and_columns(tensor: Any) -> tuple[int, int]:
    sizes = tuple(tensor.size())
    rows = 1
    for size in sizes[:-1]:
        rows *= size
    return rows, sizes[-1]


def _executed(a: Any, transposed_a: bool, b: Any, transposed_b: bool, accumulate: bool, split: bool) -> ExecutedGemm:
    (rows_a, columns_a), (rows_b, columns_b) = _rows_and_columns(a), _rows_and_columns(b)
    m, k = (columns_b, rows_b) if transposed_b else (rows_b, columns_b)
    return ExecutedGemm(
        pass_name=_LAYOUT_PASSES[transposed_a, transposed_b],
        m=m,
        n=rows_a if transposed_a else columns_a,
        k=k,
        operands=(operand_format(b), operand_format(a)),
        layout="".join("T" if transposed else "N" for transposed in (transposed_a, transposed_b)),
        accumulate=accumulate,
        split_accumulator=split,
    )


def _one(a: Any, ta: bool, b: Any, tb: bool, *rest: Any) -> list[ExecutedGemm]:
    return [_executed(a, ta, b, tb, rest[-2], rest[-1])]


def _group(a: Any, ta: bool, b: Any, tb: bool, *rest: Any) -> list[ExecutedGemm]:
    """One GEMM per pair of lists; a group without tokens runs none."""
    accumulate, split = rest[10], rest[11]
    pairs = [(one, other) for one, other in zip(a, b, strict=True) if 0 not in (*one.size(), *other.size())]
    return [_executed(one, ta, other, tb, accumulate, split) for one, other in pairs]


# Functions of transformer_engine_torch through which all GEMMs of TE's modules go, and how to read their arguments.
# From general_grouped_gemm_for_grouped_tensor on, the sizes of groups are known on the GPU only: not seen here.
_GEMM_FUNCTIONS = {"generic_gemm": _one, "te_general_grouped_gemm": _group}


@contextmanager
def record_gemms(only_captured: bool = False) -> Iterator[list[ExecutedGemm]]:
    """Collect every GEMM that TE's modules execute inside the block, in order, those of a te.GroupedLinear one by one.

    With `only_captured` only those that go into a CUDA graph: the replays of it call nothing that could be seen.
    """
    tex = _tex()
    seen: list[ExecutedGemm] = []

    def recording(original: Any, read: Any) -> Any:
        def function(*arguments: Any, **options: Any) -> Any:
            if not only_captured or torch.cuda.is_current_stream_capturing():
                seen.extend(read(*arguments))
            return original(*arguments, **options)

        return function

    originals = {name: getattr(tex, name) for name in _GEMM_FUNCTIONS if hasattr(tex, name)}
    for name, original in originals.items():
        setattr(tex, name, recording(original, _GEMM_FUNCTIONS[name]))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(tex, name, original)


# --- which attention -------------------------------------------------------------------------------------------


@contextmanager
def watch_attention() -> Iterator[dict[str, Any]]:
    """Have TE choose its attention backend anew inside the block, and collect the choice and the reasons for it.

    `backend` is None where nothing chose one, `excluded` TE's own sentences on those not taken, and `flash_attn` the
    versions of the packages flash-attn, as far as they are installed.
    """
    found: dict[str, Any] = {"backend": None, "excluded": []}
    try:
        from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends
        from transformer_engine.pytorch.attention.dot_product_attention.utils import AttentionLogging
    except ImportError as error:  # another version of TE keeps them elsewhere
        found["absent"] = f"this version of Transformer Engine does not tell: {error}"
        yield found
        return
    logger, level = logging.getLogger("DotProductAttention"), AttentionLogging._log_level
    before = (logger.handlers, logger.propagate, logger.level)
    logger.handlers, logger.propagate = [_AttentionLog(found)], False
    AttentionLogging._log_level = logging.DEBUG
    _attention_backends["backend_selection_requires_update"] = True
    try:
        yield found
    finally:
        AttentionLogging._log_level = level
        logger.handlers, logger.propagate, logger.level = before


class _AttentionLog(logging.Handler):
    """Reads what TE's choice of an attention backend logs."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if match := re.search(r"Selected backend = (.*?)\.?$", text):
            self.found["backend"] = match[1]
        elif text.startswith("Disabling") and text not in self.found["excluded"]:
            self.found["excluded"].append(text)
        elif installed := re.findall(r"'flash_attn_?(\d?)_version': '([^']*)'", text):
            self.found["flash_attn"] = {number or "2": version for number, version in installed}
