"""Which models there are: a config of one transformer layer, and a table of named ones."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

NORMALIZATIONS = ("LayerNorm", "RMSNorm")
ACTIVATIONS = ("gelu_pytorch_tanh", "silu", "relu", "relu2", "quick_gelu")
ATTENTION_MASKS = ("causal", "no_mask")

LARGEST = 10**9 - 1  # no tensor of a real model has a side of more; what is larger is a slip of the keyboard

# What a user may set by name, on a named model or to define one; all are positive integers.
HYPERPARAMETERS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "micro_batch_size",
    "sequence_length",
)


@dataclass(frozen=True)
class ModelConfig:
    """One decoder or encoder layer, how often it is repeated, and the batch it sees.

    Fields have the names of Hugging Face's configs where those have one. Sizes count elements.
    `intermediate_size` is the width after the activation; a gated MLP projects to twice of it.
    `bias` is for all four linears, as te.TransformerLayer has it; norms have what their kind has.

    Raises ValueError, naming the field, its value and the rule, for a value that cannot be.
    """

    name: str
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int = 0  # 0: 4 x hidden_size
    num_key_value_heads: int = 0  # 0: as many as attention heads
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    num_hidden_layers: int = 1
    micro_batch_size: int = 1
    sequence_length: int = 2048
    vocab_size: int = 0  # 0: no LM head
    normalization: str = "LayerNorm"
    hidden_act: str = "gelu_pytorch_tanh"
    gated_mlp: bool = False
    bias: bool = False
    rope_theta: float = 0.0  # 0: no rotary position embedding
    attn_mask_type: str = "causal"
    norm_eps: float = 1e-5
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        self._require("name", bool(self.name) and "/" not in self.name, "must be there, without the / of case ids")
        for key in (*HYPERPARAMETERS, "vocab_size"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{key}={value!r}: must be a whole number")
        self._fill_in_derived()
        for key in HYPERPARAMETERS:
            self._require(key, getattr(self, key) > 0, "must be positive")
            self._require(key, getattr(self, key) <= LARGEST, f"must be at most {LARGEST}")
        self._require("vocab_size", self.vocab_size >= 0, "must not be negative")
        self._require(
            "num_attention_heads",
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"must be a multiple of num_key_value_heads={self.num_key_value_heads}",
        )
        self._require("normalization", self.normalization in NORMALIZATIONS, f"must be one of {NORMALIZATIONS}")
        self._require("hidden_act", self.hidden_act in ACTIVATIONS, f"must be one of {ACTIVATIONS}")
        self._require("attn_mask_type", self.attn_mask_type in ATTENTION_MASKS, f"must be one of {ATTENTION_MASKS}")
        self._require("rope_theta", self.rope_theta >= 0, "must not be negative")
        self._require("head_dim", not self.rope_theta or self.head_dim % 2 == 0, "must be even for rotary embeddings")
        self._require("norm_eps", self.norm_eps > 0, "must be positive")

    def _require(self, key: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{key}={getattr(self, key)!r}: {rule}")

    def _fill_in_derived(self) -> None:
        for key in ("hidden_size", "num_attention_heads"):
            self._require(key, getattr(self, key) > 0, "must be positive")
        if self.head_dim == 0:
            self._require(
                "hidden_size",
                self.hidden_size % self.num_attention_heads == 0,
                f"must be a multiple of num_attention_heads={self.num_attention_heads} unless head_dim is given",
            )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.intermediate_size == 0:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        if self.num_key_value_heads == 0:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)

    @property
    def tokens(self) -> int:
        """Rows of every activation: micro_batch_size x sequence_length."""
        return self.micro_batch_size * self.sequence_length

    @property
    def query_size(self) -> int:
        """Width of all queries, and of the input of the attention output projection."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all keys (and of all values)."""
        return self.num_key_value_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of queries, keys and values together: the output of the fused projection."""
        return self.query_size + 2 * self.key_value_size

    @property
    def mlp_up_size(self) -> int:
        """Output width of the MLP's first projection: gate and up together where it is gated."""
        return self.intermediate_size * (2 if self.gated_mlp else 1)


# Root mean square norms before attention and MLP, SwiGLU, no biases.
_LLAMA: dict[str, Any] = {"normalization": "RMSNorm", "hidden_act": "silu", "gated_mlp": True}

# Facts from the named source. The sequence is the one the model was pre-trained with, and the batch makes 8192
# tokens of it, a common size per GPU, unless the row says otherwise.
MODELS: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        ModelConfig(
            "tiny",
            hidden_size=256,
            intermediate_size=512,
            num_attention_heads=8,
            num_key_value_heads=2,
            num_hidden_layers=2,
            sequence_length=128,
            rope_theta=10000.0,
            source="ours: small enough for a CPU, yet with grouped queries, a gated MLP and RoPE",
            **_LLAMA,
        ),
        # As NVIDIA trains it with Transformer Engine. The first, PyTorch, version has two more LayerNorms (before
        # attn_out and mlp_down), rope_theta 1e5 and erf gelu; TE computes the tanh one. The same GEMMs run in both.
        # The head that follows is two linears and a norm, kept in high precision: no LM head in our sense.
        ModelConfig(
            "codonfm_5b",
            hidden_size=4096,
            intermediate_size=16384,
            num_attention_heads=32,
            num_hidden_layers=24,
            # The batch of TE's GEMM profiling tutorial: 15872 tokens.
            micro_batch_size=31,
            sequence_length=512,
            bias=True,
            rope_theta=10000.0,
            # Published as a padding mask, which masks nothing in full sequences.
            attn_mask_type="no_mask",
            norm_eps=1e-12,
            source="NVIDIA/bionemo-framework codonfm_native_te, preset encodon_5b; batch: TE's GEMM profiling tutorial",
        ),
        ModelConfig(
            "llama3_8b",
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=32,
            micro_batch_size=1,
            sequence_length=8192,
            vocab_size=128256,
            rope_theta=500000.0,
            source="meta-llama/Meta-Llama-3-8B config.json",
            **_LLAMA,
        ),
        # Trained with sequences of 8192. The scores of its 64 heads would then be 8.6 GB in BF16, and explicit
        # attention holds several copies, some in float32. Two sequences of 4096 have the same GEMMs and half of that.
        ModelConfig(
            "llama3_70b",
            hidden_size=8192,
            intermediate_size=28672,
            num_attention_heads=64,
            num_key_value_heads=8,
            num_hidden_layers=80,
            micro_batch_size=2,
            sequence_length=4096,
            vocab_size=128256,
            rope_theta=500000.0,
            source="meta-llama/Meta-Llama-3-70B config.json; sequence assumed",
            **_LLAMA,
        ),
        # v0.1 attends to a window of 4096, which our fields do not describe; v0.3 to all earlier tokens.
        ModelConfig(
            "mistral_7b",
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=32,
            micro_batch_size=1,
            sequence_length=8192,
            vocab_size=32768,
            rope_theta=1000000.0,
            source="mistralai/Mistral-7B-v0.3 config.json; sequence: Mistral 7B paper (v0.1)",
            **_LLAMA,
        ),
        # 32 heads of 128 are 4096, less than hidden_size: attn_out is not square.
        ModelConfig(
            "mistral_nemo_12b",
            hidden_size=5120,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            num_hidden_layers=40,
            micro_batch_size=1,
            sequence_length=8192,
            vocab_size=131072,
            rope_theta=1000000.0,
            source="mistralai/Mistral-Nemo-Base-2407 config.json; sequence assumed",
            **_LLAMA,
        ),
        # Also normalizes each query and key head (QK-norm), which our fields do not describe: times of its layer
        # lack that, its GEMMs are the same.
        ModelConfig(
            "qwen3_8b",
            hidden_size=4096,
            intermediate_size=12288,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            num_hidden_layers=36,
            micro_batch_size=2,
            sequence_length=4096,
            vocab_size=151936,
            rope_theta=1000000.0,
            norm_eps=1e-6,
            source="Qwen/Qwen3-8B config.json; sequence: Qwen3 technical report, stages 1 and 2",
            **_LLAMA,
        ),
        # 16 heads of 256 are 4096, more than hidden_size. Published weights of its norms are stored minus 1. Its
        # config first said gelu; hidden_activation, added later, is the tanh one that it was trained with.
        ModelConfig(
            "gemma_7b",
            hidden_size=3072,
            intermediate_size=24576,
            num_attention_heads=16,
            head_dim=256,
            num_hidden_layers=28,
            micro_batch_size=1,
            sequence_length=8192,
            vocab_size=256000,
            normalization="RMSNorm",
            gated_mlp=True,
            rope_theta=10000.0,
            norm_eps=1e-6,
            source="google/gemma-7b config.json; sequence: its max_position_embeddings",
        ),
        # Small on purpose: half of the usual tokens, so that the host needs longer to launch a layer than the GPU
        # to run it. gelu_new, as published, is the tanh gelu by another name.
        ModelConfig(
            "gpt2_medium",
            hidden_size=1024,
            intermediate_size=4096,
            num_attention_heads=16,
            num_hidden_layers=24,
            micro_batch_size=4,
            sequence_length=1024,
            vocab_size=50257,
            bias=True,
            source="openai-community/gpt2-medium config.json",
        ),
    )
}


def resolve(name: str | None, overrides: Mapping[str, int | None] | None = None) -> ModelConfig:
    """The named model with some hyperparameters changed, or a new one when no name is given.

    The name of the result says what was changed (`llama3_8b+micro_batch_size:2`, in the order of HYPERPARAMETERS),
    so that its times are never taken for those of the named model. None in `overrides` leaves a field as it is.

    Raises ValueError for an unknown name, a hyperparameter that cannot be, or a new model without hidden size
    and heads.
    """
    changes = _changes(overrides or {})
    if name is None:
        missing = [key for key in ("hidden_size", "num_attention_heads") if key not in changes]
        if missing:
            raise ValueError(f"a model without a name needs {' and '.join(missing)}")
        return ModelConfig(name="custom" + _suffix(changes), **changes)
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
    base = MODELS[name]
    follow = _followers(base, {key for key, value in changes.items() if value != getattr(base, key)})
    # A field that would follow, held at the value it has, is a change too.
    changes = {key: value for key, value in changes.items() if key in follow or value != getattr(base, key)}
    if not changes:
        return base
    return replace(base, name=name + _suffix(changes), **(follow | changes))


def _changes(overrides: Mapping[str, int | None]) -> dict[str, Any]:
    """What `overrides` sets, in the order of HYPERPARAMETERS, so that one model has one name."""
    for key, value in overrides.items():
        if key not in HYPERPARAMETERS:
            raise ValueError(f"unknown hyperparameter {key!r}; known: {', '.join(HYPERPARAMETERS)}")
        if value == 0:  # would have ModelConfig derive the field
            raise ValueError(f"{key}=0: must be positive")
    return {key: value for key in HYPERPARAMETERS if (value := overrides.get(key)) is not None}


def _suffix(changes: Mapping[str, int]) -> str:
    return "".join(f"+{key}:{value}" for key, value in changes.items())


def _followers(base: ModelConfig, changed: Set[str]) -> dict[str, Any]:
    """Fields that `base` derives from changed ones: 0 has them derived again. All others stay as they are."""
    follow: dict[str, Any] = {}
    if changed & {"hidden_size", "num_attention_heads"} and base.query_size == base.hidden_size:
        follow["head_dim"] = 0
    if "num_attention_heads" in changed and base.num_key_value_heads == base.num_attention_heads:
        follow["num_key_value_heads"] = 0
    return follow
