"""Which GEMMs a layer runs: ModelConfig -> linears -> fprop, dgrad and wgrad of each, with FLOPs and bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shapes.models import LARGEST, ModelConfig

PASSES = ("fprop", "dgrad", "wgrad")
LINEARS = ("qkv", "attn_out", "mlp_up", "mlp_down")

# The quantizations that Transformer Engine does in the pass of a GEMM; wgrad reuses what the other passes made.
QUANTIZATIONS = {"fprop": ("quantize_x", "quantize_w"), "dgrad": ("quantize_dy",), "wgrad": ()}


@dataclass(frozen=True)
class Gemm:
    """output[m, n] = sum over k: m output rows, n output columns, k contracted.

    fprop is (tokens, out, in), dgrad (tokens, in, out), wgrad (out, in, tokens).
    """

    linear: str
    pass_name: str
    m: int
    n: int
    k: int

    @property
    def mkn(self) -> str:
        """M x K x N, the order in which Transformer Engine's own tables print a shape.

        wgrad is (in, tokens, out) there: the transposed problem, so m and n change places.
        """
        m, n = (self.n, self.m) if self.pass_name == "wgrad" else (self.m, self.n)
        return f"{m}x{self.k}x{n}"

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    def min_bytes(self, operand_bytes: float = 2.0, output_bytes: float = 2.0) -> float:
        """Memory traffic at least: each operand read once, the output written once."""
        return (self.m * self.k + self.k * self.n) * operand_bytes + self.m * self.n * output_bytes


@dataclass(frozen=True)
class Linear:
    """One linear layer: (tokens, in_features) -> (tokens, out_features)."""

    name: str
    tokens: int
    in_features: int
    out_features: int

    def gemm(self, pass_name: str) -> Gemm:
        """The GEMM of one pass. Raises KeyError for an unknown pass."""
        m, n, k = {
            "fprop": (self.tokens, self.out_features, self.in_features),
            "dgrad": (self.tokens, self.in_features, self.out_features),
            "wgrad": (self.out_features, self.in_features, self.tokens),
        }[pass_name]
        return Gemm(self.name, pass_name, m, n, k)


@dataclass(frozen=True)
class LinearGroup:
    """Linears that run one after the other, `repeats` times: the linears of a layer, or shapes given by hand."""

    name: str
    linears: tuple[Linear, ...]
    repeats: int = 1

    def gemms(self) -> list[Gemm]:
        """All GEMMs of one repetition, in the order of PASSES and then of the linears."""
        return [linear.gemm(pass_name) for pass_name in PASSES for linear in self.linears]


def layer_linears(config: ModelConfig) -> LinearGroup:
    """The four linears of a layer: fused q, k, v, and gate and up fused where the MLP is gated."""
    sizes = {
        "qkv": (config.hidden_size, config.qkv_size),
        "attn_out": (config.query_size, config.hidden_size),
        "mlp_up": (config.hidden_size, config.mlp_up_size),
        "mlp_down": (config.intermediate_size, config.hidden_size),
    }
    linears = tuple(Linear(name, config.tokens, *sizes[name]) for name in LINEARS)
    return LinearGroup(config.name, linears, config.num_hidden_layers)


def lm_head(config: ModelConfig) -> Linear | None:
    """The projection to the vocabulary, or None for a model without one."""
    if not config.vocab_size:
        return None
    return Linear("lm_head", config.tokens, config.hidden_size, config.vocab_size)


def parse_shapes(text: str) -> LinearGroup:
    """Linears from 'MxKxN,MxKxN,...': tokens x in_features x out_features of each.

    Raises ValueError for anything else, naming the part that is wrong.
    """
    linears = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)x([1-9][0-9]*)", part.strip())
        if not match:
            raise ValueError(f"shape {part.strip()!r}: must be MxKxN with positive whole numbers, as 8192x5120x10240")
        if max(map(len, match.groups())) > len(str(LARGEST)):
            raise ValueError(f"shape {part.strip()[:40]!r}: no side can be more than {LARGEST}")
        tokens, in_features, out_features = map(int, match.groups())
        linears.append(Linear(part.strip(), tokens, in_features, out_features))
    names = [linear.name for linear in linears]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"shape {', '.join(sorted(repeated))}: given more than once")
    return LinearGroup("shapes", tuple(linears))
