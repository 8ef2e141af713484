"""The GEMMs that follow from a config, against shapes written out by hand."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapes.gemms import LINEARS, PASSES, Gemm, Linear, layer_linears, lm_head, parse_shapes
from shapes.models import MODELS, ModelConfig, resolve

# (tokens, in_features, out_features) of qkv, attn_out, mlp_up, mlp_down, from the published configs by hand.
LINEAR_SIZES = {
    "tiny": [(128, 256, 384), (128, 256, 256), (128, 256, 1024), (128, 512, 256)],
    "codonfm_5b": [(15872, 4096, 12288), (15872, 4096, 4096), (15872, 4096, 16384), (15872, 16384, 4096)],
    "llama3_8b": [(8192, 4096, 6144), (8192, 4096, 4096), (8192, 4096, 28672), (8192, 14336, 4096)],
    "llama3_70b": [(8192, 8192, 10240), (8192, 8192, 8192), (8192, 8192, 57344), (8192, 28672, 8192)],
    "mistral_7b": [(8192, 4096, 6144), (8192, 4096, 4096), (8192, 4096, 28672), (8192, 14336, 4096)],
    "mistral_nemo_12b": [(8192, 5120, 6144), (8192, 4096, 5120), (8192, 5120, 28672), (8192, 14336, 5120)],
    "qwen3_8b": [(8192, 4096, 6144), (8192, 4096, 4096), (8192, 4096, 24576), (8192, 12288, 4096)],
    "gemma_7b": [(8192, 3072, 12288), (8192, 4096, 3072), (8192, 3072, 49152), (8192, 24576, 3072)],
    "gpt2_medium": [(4096, 1024, 3072), (4096, 1024, 1024), (4096, 1024, 4096), (4096, 4096, 1024)],
}

# As Transformer Engine's GEMM profiling tutorial prints them.
CODONFM_MKN = [
    ("fprop", "qkv", "15872x4096x12288"),
    ("fprop", "attn_out", "15872x4096x4096"),
    ("fprop", "mlp_up", "15872x4096x16384"),
    ("fprop", "mlp_down", "15872x16384x4096"),
    ("dgrad", "qkv", "15872x12288x4096"),
    ("dgrad", "attn_out", "15872x4096x4096"),
    ("dgrad", "mlp_up", "15872x16384x4096"),
    ("dgrad", "mlp_down", "15872x4096x16384"),
    ("wgrad", "qkv", "4096x15872x12288"),
    ("wgrad", "attn_out", "4096x15872x4096"),
    ("wgrad", "mlp_up", "4096x15872x16384"),
    ("wgrad", "mlp_down", "16384x15872x4096"),
]

sizes = st.integers(1, 1 << 16)
linears = st.builds(Linear, st.just("linear"), sizes, sizes, sizes)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Models of any shape: grouped queries, an explicit head_dim, gated or not."""
    key_value_heads = draw(st.integers(1, 16))
    return ModelConfig(
        "drawn",
        hidden_size=draw(st.integers(1, 4096)),
        num_attention_heads=key_value_heads * draw(st.integers(1, 8)),
        num_key_value_heads=key_value_heads,
        head_dim=draw(st.integers(1, 256)),
        intermediate_size=draw(st.integers(1, 16384)),
        num_hidden_layers=draw(st.integers(1, 100)),
        micro_batch_size=draw(st.integers(1, 64)),
        sequence_length=draw(st.integers(1, 8192)),
        vocab_size=draw(st.integers(0, 200000)),
        gated_mlp=draw(st.booleans()),
    )


class TestDerivation:
    """From a model to its linears and GEMMs."""

    def test_every_named_model_is_written_out_here(self) -> None:
        """A new row in the table needs its shapes in this file."""
        assert LINEAR_SIZES.keys() == MODELS.keys()

    @pytest.mark.parametrize("name", LINEAR_SIZES)
    def test_linears_have_the_sizes_written_by_hand(self, name: str) -> None:
        """Queries, keys and values are one linear, and so are gate and up."""
        found = [
            (linear.tokens, linear.in_features, linear.out_features) for linear in layer_linears(MODELS[name]).linears
        ]
        assert found == LINEAR_SIZES[name]

    @pytest.mark.parametrize("name", MODELS)
    def test_a_layer_has_four_linears_and_twelve_gemms(self, name: str) -> None:
        """In the order of the passes and then of the linears, as often as the model has layers."""
        group = layer_linears(MODELS[name])
        assert [linear.name for linear in group.linears] == ["qkv", "attn_out", "mlp_up", "mlp_down"]
        assert [(gemm.pass_name, gemm.linear) for gemm in group.gemms()] == [
            (pass_name, linear) for pass_name in PASSES for linear in LINEARS
        ]
        assert (group.name, group.repeats) == (name, MODELS[name].num_hidden_layers)

    def test_codonfm_prints_the_twelve_shapes_of_te(self) -> None:
        """M x K x N as in TE's tables, where wgrad is in x tokens x out."""
        found = [(gemm.pass_name, gemm.linear, gemm.mkn) for gemm in layer_linears(MODELS["codonfm_5b"]).gemms()]
        assert found == CODONFM_MKN

    @pytest.mark.parametrize(
        ("pass_name", "m", "n", "k"),
        [("fprop", 8192, 6144, 4096), ("dgrad", 8192, 4096, 6144), ("wgrad", 6144, 4096, 8192)],
    )
    def test_each_pass_has_its_m_n_k(self, pass_name: str, m: int, n: int, k: int) -> None:
        """fprop (tokens, out, in), dgrad (tokens, in, out), wgrad (out, in, tokens)."""
        assert Linear("qkv", 8192, 4096, 6144).gemm(pass_name) == Gemm("qkv", pass_name, m, n, k)

    def test_an_unknown_pass_is_a_key_error(self) -> None:
        """There are three."""
        with pytest.raises(KeyError):
            Linear("qkv", 1, 1, 1).gemm("forward")

    def test_grouped_queries_narrow_keys_and_values_only(self) -> None:
        """With a quarter of the key-value heads, qkv is half as wide; attn_out is as before."""
        grouped, full = (
            {linear.name: linear for linear in layer_linears(resolve("llama3_8b", changes)).linears}
            for changes in ({}, {"num_key_value_heads": 32})
        )
        assert (grouped["qkv"].out_features, full["qkv"].out_features) == (6144, 12288)
        assert grouped["attn_out"] == full["attn_out"]

    @pytest.mark.parametrize(
        ("name", "shape"), [("llama3_8b", (8192, 4096, 128256)), ("gpt2_medium", (4096, 1024, 50257))]
    )
    def test_the_lm_head_projects_to_the_vocabulary(self, name: str, shape: tuple[int, int, int]) -> None:
        """(tokens, hidden, vocabulary)."""
        assert lm_head(MODELS[name]) == Linear("lm_head", *shape)

    @pytest.mark.parametrize("name", ["tiny", "codonfm_5b"])
    def test_a_model_without_vocabulary_has_no_lm_head(self, name: str) -> None:
        """It is None, not a linear of no width."""
        assert lm_head(MODELS[name]) is None

    @given(configs(), st.integers(2, 8))
    def test_a_larger_batch_scales_tokens_and_nothing_else(self, config: ModelConfig, factor: int) -> None:
        """Features come from the model, tokens from the batch."""
        larger = ModelConfig(**(vars(config) | {"micro_batch_size": config.micro_batch_size * factor}))
        for before, after in zip(layer_linears(config).linears, layer_linears(larger).linears, strict=True):
            assert after == Linear(before.name, before.tokens * factor, before.in_features, before.out_features)


class TestFlopsAndBytes:
    """What a GEMM costs."""

    # 6 x tokens x weights: two FLOPs per weight and token in each of three passes (Kaplan et al. 2020, section 2.1).
    @pytest.mark.parametrize(
        ("name", "flops"),
        [
            # h=4096, weights 12 h^2 = 201326592
            ("codonfm_5b", 6 * 15872 * 201_326_592),
            # 4096 x (6144 + 4096 + 3 x 14336)
            ("llama3_8b", 6 * 8192 * 218_103_808),
            # 3072 x (12288 + 4096 + 3 x 24576)
            ("gemma_7b", 6 * 8192 * 276_824_064),
            # h=1024, weights 12 h^2
            ("gpt2_medium", 6 * 4096 * 12_582_912),
        ],
    )
    def test_a_layer_has_six_flops_per_token_and_weight(self, name: str, flops: int) -> None:
        """The sum over the twelve GEMMs is the closed form."""
        assert sum(gemm.flops for gemm in layer_linears(MODELS[name]).gemms()) == flops

    @given(configs())
    def test_the_closed_form_holds_for_any_model(self, config: ModelConfig) -> None:
        """Heads count twice (queries, output) and key-value heads twice (keys, values), MLP matrices two or three."""
        heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
        mlp_matrices = 3 if config.gated_mlp else 2
        weights = config.hidden_size * (heads * config.head_dim + mlp_matrices * config.intermediate_size)
        flops = sum(gemm.flops for gemm in layer_linears(config).gemms())
        assert flops == 6 * config.micro_batch_size * config.sequence_length * weights

    @given(linears)
    def test_all_passes_of_a_linear_have_equal_flops(self, linear: Linear) -> None:
        """Only the roles of the three sizes change, so also the least memory traffic is equal."""
        gemms = [linear.gemm(pass_name) for pass_name in PASSES]
        assert len({gemm.flops for gemm in gemms}) == 1
        assert len({gemm.min_bytes() for gemm in gemms}) == 1
        assert {tuple(sorted((gemm.m, gemm.n, gemm.k))) for gemm in gemms} == {
            tuple(sorted((linear.tokens, linear.in_features, linear.out_features)))
        }

    def test_flops_are_multiplications_and_additions(self) -> None:
        """2 x 3 x 5 products, each with an addition."""
        assert Gemm("linear", "fprop", 2, 3, 5).flops == 60

    @pytest.mark.parametrize(
        ("operand_bytes", "output_bytes", "expected"),
        [(2.0, 2.0, 62.0), (1.0, 2.0, 37.0), (0.5, 2.0, 24.5), (1.0, 4.0, 49.0)],
    )
    def test_each_element_moves_at_least_once(self, operand_bytes: float, output_bytes: float, expected: float) -> None:
        """2x5 and 5x3 are read, 25 elements, and 2x3 is written, 6 elements."""
        assert Gemm("linear", "fprop", 2, 3, 5).min_bytes(operand_bytes, output_bytes) == expected

    def test_bytes_are_those_of_bf16_unless_said(self) -> None:
        """Two per element."""
        assert Gemm("linear", "wgrad", 4096, 12288, 15872).min_bytes() == 620_756_992


class TestParseShapes:
    """Linears written by hand."""

    def test_a_shape_is_tokens_in_out(self) -> None:
        """M x K x N is that of fprop, and the text is the name."""
        group = parse_shapes("8192x5120x10240, 16x32x48")
        assert group.linears == (Linear("8192x5120x10240", 8192, 5120, 10240), Linear("16x32x48", 16, 32, 48))
        assert (group.name, group.repeats) == ("shapes", 1)

    @given(st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=5, unique=True))
    def test_fprop_prints_what_was_written(self, shapes: list[tuple[int, int, int]]) -> None:
        """Text to linears to text is the same text."""
        texts = ["x".join(map(str, shape)) for shape in shapes]
        linears = parse_shapes(",".join(texts)).linears
        assert [linear.gemm("fprop").mkn for linear in linears] == texts

    @pytest.mark.parametrize("digits", [10, 400, 5000])
    def test_a_side_has_a_limit(self, digits: int) -> None:
        """Nothing of the text beyond its beginning is repeated."""
        with pytest.raises(ValueError, match=r"^shape '9{10}.{0,30}': no side can be more than 999999999$"):
            parse_shapes("9" * digits + "x16x16")

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("", ""),
            ("8192x5120", "8192x5120"),
            ("8192x5120x10240x2", "8192x5120x10240x2"),
            ("8192x0x10240", "8192x0x10240"),
            ("8192x-5120x10240", "8192x-5120x10240"),
            ("8192 x 5120 x 10240", "8192 x 5120 x 10240"),
            ("1x2x3,,4x5x6", ""),
            ("1x2x3, 4x5x6.0", "4x5x6.0"),
            ("1x2x3,axbxc", "axbxc"),
            ("08x2x3", "08x2x3"),
            ("1x2x\u0663", "1x2x\u0663"),
        ],
    )
    def test_anything_else_is_refused_naming_the_part(self, text: str, part: str) -> None:
        """The message says which part is wrong and what would be right."""
        message = f"shape {part!r}: must be MxKxN with positive whole numbers, as 8192x5120x10240"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            parse_shapes(text)

    def test_a_repeated_shape_is_refused(self) -> None:
        """Two cases would have one id."""
        with pytest.raises(ValueError, match=r"^shape 1x2x3: given more than once$"):
            parse_shapes("1x2x3,4x5x6,1x2x3")
