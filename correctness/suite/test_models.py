"""The table of models, what a config refuses, and how changed models are named."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapes.gemms import layer_linears
from shapes.models import HYPERPARAMETERS, MODELS, ModelConfig, resolve


def config(**fields: Any) -> ModelConfig:
    """A valid config, with some fields as given."""
    base: dict[str, Any] = {"name": "test", "hidden_size": 64, "num_attention_heads": 4}
    return ModelConfig(**(base | fields))


class TestTable:
    """MODELS"""

    def test_each_model_is_found_by_its_name(self) -> None:
        """The key is the model's name."""
        assert all(key == model.name for key, model in MODELS.items())

    def test_each_model_says_where_it_comes_from(self) -> None:
        """No row is without a source, and no source is a placeholder."""
        assert [name for name, model in MODELS.items() if len(model.source) < 10] == []

    # Per layer beyond the weights of the linears, and beyond the layers: norms, biases, embeddings, heads.
    @pytest.mark.parametrize(
        ("name", "other_per_layer", "outside_layers", "published"),
        [
            ("llama3_8b", 2 * 4096, 2 * 128256 * 4096 + 4096, 8_030_261_248),
            ("llama3_70b", 2 * 8192, 2 * 128256 * 8192 + 8192, 70_553_706_496),
            ("mistral_7b", 2 * 4096, 2 * 32768 * 4096 + 4096, 7_248_023_552),
            ("mistral_nemo_12b", 2 * 5120, 2 * 131072 * 5120 + 5120, 12_247_782_400),
            ("qwen3_8b", 2 * 4096 + 2 * 128, 2 * 151936 * 4096 + 4096, 8_190_735_360),
            ("gemma_7b", 2 * 3072, 256000 * 3072 + 3072, 8_537_680_896),
            ("gpt2_medium", 3072 + 1024 + 4096 + 1024 + 4 * 1024, (50257 + 1024) * 1024 + 2 * 1024, 354_823_168),
        ],
    )
    def test_sizes_give_the_published_number_of_parameters(
        self, name: str, other_per_layer: int, outside_layers: int, published: int
    ) -> None:
        """The weights of the derived linears and all that is no linear are the checkpoint's parameters."""
        group = layer_linears(MODELS[name])
        weights = sum(linear.in_features * linear.out_features for linear in group.linears)
        assert group.repeats * (weights + other_per_layer) + outside_layers == published

    @pytest.mark.parametrize(
        ("name", "tokens"),
        [("codonfm_5b", 15872), ("gpt2_medium", 4096), ("llama3_8b", 8192), ("llama3_70b", 8192), ("tiny", 128)],
    )
    def test_batches_make_the_intended_number_of_tokens(self, name: str, tokens: int) -> None:
        """Tokens are micro-batch x sequence."""
        assert MODELS[name].tokens == tokens

    def test_explicit_attention_fits_into_memory(self) -> None:
        """One score matrix of all heads is at most 4.3 GB in BF16, so that several copies stay far below 80 GB."""
        score_bytes = {
            name: 2 * model.micro_batch_size * model.num_attention_heads * model.sequence_length**2
            for name, model in MODELS.items()
        }
        assert {name: size for name, size in score_bytes.items() if size > 4.3e9} == {}

    def test_codonfm_is_a_bidirectional_encoder_with_biases(self) -> None:
        """Its layer is TE's default one (LayerNorm, gelu, biases) without a causal mask."""
        model = MODELS["codonfm_5b"]
        assert (model.normalization, model.hidden_act, model.attn_mask_type) == (
            "LayerNorm",
            "gelu_pytorch_tanh",
            "no_mask",
        )
        assert model.bias
        assert not model.gated_mlp

    @pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "mistral_7b", "mistral_nemo_12b", "qwen3_8b"])
    def test_llama_like_models_have_the_llama_layer(self, name: str) -> None:
        """RMSNorm, SwiGLU, rotary embeddings, a causal mask, no biases."""
        model = MODELS[name]
        assert (model.normalization, model.hidden_act, model.gated_mlp) == ("RMSNorm", "silu", True)
        assert (model.attn_mask_type, model.bias) == ("causal", False)
        assert model.rope_theta > 0


class TestDerivedFields:
    """What a config fills in."""

    def test_head_dim_is_the_share_of_a_head(self) -> None:
        """hidden_size / num_attention_heads."""
        assert config(hidden_size=96, num_attention_heads=4).head_dim == 24

    def test_an_explicit_head_dim_stays(self) -> None:
        """Heads need not add up to the hidden size."""
        model = config(hidden_size=100, num_attention_heads=3, head_dim=8)
        assert (model.head_dim, model.query_size) == (8, 24)

    def test_the_mlp_is_four_times_as_wide_by_default(self) -> None:
        """As in GPT-2 and the first Transformer."""
        assert config(hidden_size=96).intermediate_size == 384

    def test_each_head_has_its_own_keys_and_values_by_default(self) -> None:
        """Multi-head attention is grouped-query attention with as many groups as heads."""
        model = config(hidden_size=96, num_attention_heads=4)
        assert (model.num_key_value_heads, model.key_value_size) == (4, 96)

    def test_the_source_is_no_part_of_what_a_model_is(self) -> None:
        """Two configs that differ in the source only are equal."""
        assert config(source="a") == config(source="b")


REFUSALS = [
    ({"name": ""}, "name='': must be there, without the / of case ids"),
    ({"name": "a/b"}, "name='a/b': must be there, without the / of case ids"),
    ({"hidden_size": 64.0}, "hidden_size=64.0: must be a whole number"),
    ({"hidden_size": "64"}, "hidden_size='64': must be a whole number"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True: must be a whole number"),
    ({"vocab_size": 1.5}, "vocab_size=1.5: must be a whole number"),
    ({"hidden_size": 0}, "hidden_size=0: must be positive"),
    ({"hidden_size": -64}, "hidden_size=-64: must be positive"),
    ({"intermediate_size": -1}, "intermediate_size=-1: must be positive"),
    ({"num_attention_heads": 0}, "num_attention_heads=0: must be positive"),
    ({"num_attention_heads": -4}, "num_attention_heads=-4: must be positive"),
    ({"num_attention_heads": 0, "head_dim": 8}, "num_attention_heads=0: must be positive"),
    ({"num_key_value_heads": -2}, "num_key_value_heads=-2: must be positive"),
    ({"head_dim": -16}, "head_dim=-16: must be positive"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be positive"),
    ({"micro_batch_size": 0}, "micro_batch_size=0: must be positive"),
    ({"sequence_length": 0}, "sequence_length=0: must be positive"),
    ({"vocab_size": -1}, "vocab_size=-1: must not be negative"),
    (
        {"hidden_size": 66},
        "hidden_size=66: must be a multiple of num_attention_heads=4 unless head_dim is given",
    ),
    ({"num_key_value_heads": 3}, "num_attention_heads=4: must be a multiple of num_key_value_heads=3"),
    ({"num_key_value_heads": 8}, "num_attention_heads=4: must be a multiple of num_key_value_heads=8"),
    ({"normalization": "layernorm"}, "normalization='layernorm': must be one of ('LayerNorm', 'RMSNorm')"),
    (
        {"hidden_act": "gelu"},
        "hidden_act='gelu': must be one of ('gelu_pytorch_tanh', 'silu', 'relu', 'relu2', 'quick_gelu')",
    ),
    ({"attn_mask_type": "padding"}, "attn_mask_type='padding': must be one of ('causal', 'no_mask')"),
    ({"rope_theta": -1.0}, "rope_theta=-1.0: must not be negative"),
    ({"head_dim": 15, "rope_theta": 1e4}, "head_dim=15: must be even for rotary embeddings"),
    ({"norm_eps": 0.0}, "norm_eps=0.0: must be positive"),
    ({"norm_eps": float("nan")}, "norm_eps=nan: must be positive"),
]


class TestRefusals:
    """ModelConfig refuses what cannot be, with field, value and rule."""

    @pytest.mark.parametrize(("fields", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
    def test_a_value_that_cannot_be_is_refused(self, fields: dict[str, Any], message: str) -> None:
        """The message is one line that names the field, its value and the rule."""
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            config(**fields)

    def test_an_odd_head_dim_is_fine_without_rotary_embeddings(self) -> None:
        """Only rotation needs pairs."""
        assert config(head_dim=15).query_size == 60


class TestResolve:
    """resolve: a named model, changed or not, or a new one."""

    @pytest.mark.parametrize("name", MODELS)
    def test_a_name_alone_is_the_model_of_the_table(self, name: str) -> None:
        """Nothing is changed and nothing renamed."""
        assert resolve(name) is MODELS[name]

    def test_an_unknown_name_lists_the_known_ones(self) -> None:
        """The message has the wrong name and all right ones."""
        with pytest.raises(ValueError, match=r"^unknown model 'llama4'; known: tiny, codonfm_5b, llama3_8b, "):
            resolve("llama4")

    def test_a_change_is_part_of_the_name(self) -> None:
        """Times of a changed model are never taken for those of the named one."""
        model = resolve("llama3_8b", {"micro_batch_size": 2})
        assert (model.name, model.tokens) == ("llama3_8b+micro_batch_size:2", 16384)

    def test_a_change_to_the_value_it_has_is_none(self) -> None:
        """Neither is None."""
        assert resolve("llama3_8b", {"hidden_size": 4096, "head_dim": None}) is MODELS["llama3_8b"]

    def test_a_new_model_is_named_after_its_hyperparameters(self) -> None:
        """`custom`, and what was given."""
        model = resolve(None, {"num_attention_heads": 32, "hidden_size": 4096})
        assert model.name == "custom+hidden_size:4096+num_attention_heads:32"
        assert (model.head_dim, model.intermediate_size, model.num_key_value_heads) == (128, 16384, 32)

    @pytest.mark.parametrize(
        ("overrides", "missing"),
        [
            ({}, "hidden_size and num_attention_heads"),
            ({"hidden_size": 64}, "num_attention_heads"),
            ({"num_attention_heads": 4}, "hidden_size"),
        ],
    )
    def test_a_new_model_needs_hidden_size_and_heads(self, overrides: dict[str, int], missing: str) -> None:
        """The message names what is missing, and only that."""
        with pytest.raises(ValueError, match=f"^a model without a name needs {missing}$"):
            resolve(None, overrides)

    def test_an_unknown_hyperparameter_is_refused(self) -> None:
        """Also a field that exists, but is not one of the hyperparameters."""
        with pytest.raises(ValueError, match=r"^unknown hyperparameter 'vocab_size'; known: hidden_size, "):
            resolve("tiny", {"vocab_size": 8})

    @pytest.mark.parametrize("key", HYPERPARAMETERS)
    @pytest.mark.parametrize("value", [0, -1])
    def test_a_hyperparameter_is_positive(self, key: str, value: int) -> None:
        """0, which has a config derive some fields, is no value that a user may set."""
        with pytest.raises(ValueError, match=f"^{key}={value}: must be positive$"):
            resolve("codonfm_5b", {key: value})

    @pytest.mark.parametrize("key", HYPERPARAMETERS)
    def test_a_hyperparameter_has_a_limit(self, key: str) -> None:
        """What no tensor can have is said here, not by PyTorch in each case."""
        with pytest.raises(ValueError, match=rf"^{key}=10{{12}}: must be at most 999999999$"):
            resolve("gemma_7b", {key: 10**12})

    def test_head_dim_follows_where_heads_fill_the_hidden_size(self) -> None:
        """Twice the hidden size, twice the head."""
        assert resolve("codonfm_5b", {"hidden_size": 8192}).head_dim == 256
        assert resolve("codonfm_5b", {"num_attention_heads": 64}).head_dim == 64

    def test_head_dim_stays_where_it_is_a_fact_of_its_own(self) -> None:
        """16 heads of 256 are not Gemma's 3072, so more heads are not smaller."""
        model = resolve("gemma_7b", {"num_attention_heads": 32})
        assert (model.head_dim, model.query_size) == (256, 8192)

    def test_a_given_head_dim_is_not_derived(self) -> None:
        """What the user says goes before what follows, also when it is the value before, and the name says so."""
        model = resolve("codonfm_5b", {"hidden_size": 8192, "head_dim": 128})
        assert (model.head_dim, model.query_size) == (128, 4096)
        assert model.name == "codonfm_5b+hidden_size:8192+head_dim:128"

    def test_key_value_heads_follow_without_groups(self) -> None:
        """Multi-head attention stays multi-head."""
        assert resolve("codonfm_5b", {"num_attention_heads": 64}).num_key_value_heads == 64

    def test_key_value_heads_stay_with_groups(self) -> None:
        """Llama's eight stay eight, and other head counts must be multiples of them."""
        assert resolve("llama3_8b", {"num_attention_heads": 64}).num_key_value_heads == 8
        with pytest.raises(ValueError, match=r"^num_attention_heads=4: must be a multiple of num_key_value_heads=8$"):
            resolve("llama3_8b", {"num_attention_heads": 4})

    @given(st.permutations(["micro_batch_size", "sequence_length", "num_hidden_layers", "intermediate_size"]))
    def test_the_order_of_changes_does_not_matter(self, keys: list[str]) -> None:
        """One model has one name."""
        model = resolve("tiny", dict.fromkeys(keys, 48))
        assert model.name == "tiny+intermediate_size:48+num_hidden_layers:48+micro_batch_size:48+sequence_length:48"

    @given(st.sampled_from(sorted(MODELS)), st.integers(1, 64))
    def test_a_batch_changes_only_name_and_batch(self, name: str, batch: int) -> None:
        """All other fields are those of the named model."""
        changed = resolve(name, {"micro_batch_size": batch})
        ours = {"name", "micro_batch_size"}
        assert {key: value for key, value in vars(changed).items() if key not in ours} == {
            key: value for key, value in vars(MODELS[name]).items() if key not in ours
        }
        assert (changed.name == name) == (batch == MODELS[name].micro_batch_size)
