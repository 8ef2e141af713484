"""`python -m shapes`: what it prints, and what it says to wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shapes.__main__ import main
from shapes.models import HYPERPARAMETERS, MODELS

ROOT = Path(__file__).parents[2]

# Exactly what a user sees; FLOPs and intensity are checked by hand in test_gemms.py and below.
CODONFM_LINES = [
    "linear     pass   M x K x N             GFLOP   share  FLOP/byte",
    "qkv        fprop  15872x4096x12288    1,597.7    8.3%      2,574",
    "mlp_up     dgrad  15872x16384x4096    2,130.3   11.1%      2,716",
    "qkv        wgrad  4096x15872x12288    1,597.7    8.3%      2,574",
    "sum        fprop                      6,390.9   33.3%",
    "sum        wgrad                      6,390.9   33.3%",
    "layer                                19,172.7  100.0%",
    "24 layers                           460,145.6",
]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints."""
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def printed_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the command prints with --json."""
    description: dict[str, Any] = json.loads(printed(capsys, *arguments, "--json"))
    return description


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says to wrong arguments: exit code 4, nothing on stdout, one line on stderr."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    assert (caught.value.code, captured.out, captured.err.count("\n")) == (4, "", 1)
    return captured.err


class TestTable:
    """The text for people."""

    def test_a_model_shows_gemms_and_sums(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Twelve GEMMs, three sums, the layer and all layers, aligned."""
        lines = printed(capsys, "codonfm_5b").splitlines()
        assert [line for line in CODONFM_LINES if line not in lines] == []
        assert len(lines) == 2 + 1 + 1 + 12 + 1 + 5 + 1 + 1

    def test_the_title_says_what_the_tokens_are(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Micro-batch, sequence, and where the model comes from."""
        title, source = printed(capsys, "codonfm_5b").splitlines()[:2]
        assert title == "codonfm_5b: 31 x 512 = 15872 tokens"
        assert source == f"source: {MODELS['codonfm_5b'].source}"

    def test_small_gemms_are_no_zeros(self, capsys: pytest.CaptureFixture[str]) -> None:
        """25165824 FLOPs are 0.025 GFLOP."""
        assert "qkv       fprop  128x256x384   0.025" in printed(capsys, "tiny")

    def test_the_lm_head_is_outside_the_layers(self, capsys: pytest.CaptureFixture[str]) -> None:
        """It has three GEMMs without a share of the layer, and is added once to all layers."""
        lines = [line.split() for line in printed(capsys, "llama3_8b", "--lm-head").splitlines()]
        assert [line for line in lines if line[:1] == ["lm_head"]] == [
            ["lm_head", "fprop", "8192x4096x128256", "8,607.1", "2,674"],
            ["lm_head", "dgrad", "8192x128256x4096", "8,607.1", "2,674"],
            ["lm_head", "wgrad", "4096x8192x128256", "8,607.1", "2,674"],
            ["lm_head", "25,821.3"],
        ]
        assert ["model", "368,869.0"] in lines

    def test_shapes_by_hand_show_what_was_asked_for(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Linears are named by their shape, and nothing is said about layers."""
        text = printed(capsys, "--shapes", "8192x5120x10240,4096x1024x1024")
        assert "8192x5120x10240  wgrad  5120x8192x10240" in text
        assert "all shapes" in text
        assert "layer" not in text

    @pytest.mark.parametrize("arguments", [(), ("--list",)])
    def test_without_a_model_all_are_listed(
        self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
    ) -> None:
        """Each with its sizes and its source."""
        lines = printed(capsys, *arguments).splitlines()
        assert (
            "llama3_8b           4096         14336     32         8       128      32  1 x 8192      128256" in lines
        )
        for name, model in MODELS.items():
            assert f"{name}: {model.source}" in lines


class TestHyperparameters:
    """A model by its sizes."""

    def test_a_model_needs_no_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The tutorial's own options give the tutorial's shapes."""
        sizes = "--hidden-size 4096 --intermediate-size 16384 --num-attention-heads 32 --num-hidden-layers 24"
        batch = "--micro-batch-size 31 --sequence-length 512"
        lines = printed(capsys, *sizes.split(), *batch.split()).splitlines()
        assert [line for line in CODONFM_LINES if line not in lines] == []

    @pytest.mark.parametrize("key", HYPERPARAMETERS)
    def test_every_hyperparameter_is_an_option(self, capsys: pytest.CaptureFixture[str], key: str) -> None:
        """It changes that field of a named model, and the model's name."""
        model = printed_json(capsys, "gemma_7b", f"--{key.replace('_', '-')}", "4")["model"]
        assert (model[key], model["name"]) == (4, f"gemma_7b+{key}:4")


class TestJson:
    """The text for programs."""

    def test_the_keys_are_stable(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A reader may rely on these names."""
        description = printed_json(capsys, "tiny")
        assert list(description) == ["model", "gemms", "sums", "repeats"]
        assert list(description["sums"]) == ["fprop", "dgrad", "wgrad", "layer", "layers", "lm_head", "model"]
        assert {tuple(gemm) for gemm in description["gemms"]} == {
            ("linear", "pass", "m", "n", "k", "mkn", "flops", "share", "min_bytes", "flops_per_byte")
        }

    def test_a_gemm_has_its_numbers(self, capsys: pytest.CaptureFixture[str]) -> None:
        """wgrad of qkv: m is out, n is in, k is tokens, and the printed shape is the transposed one."""
        gemm = next(
            gemm
            for gemm in printed_json(capsys, "codonfm_5b")["gemms"]
            if (gemm["linear"], gemm["pass"]) == ("qkv", "wgrad")
        )
        assert (gemm["m"], gemm["n"], gemm["k"], gemm["mkn"]) == (12288, 4096, 15872, "4096x15872x12288")
        assert (gemm["flops"], gemm["min_bytes"]) == (1_597_727_834_112, 620_756_992)
        assert gemm["flops_per_byte"] == 1_597_727_834_112 / 620_756_992
        # qkv has 3 of the 12 hidden_size^2 weights, and wgrad is one of three passes.
        assert gemm["share"] == pytest.approx(1 / 12, rel=1e-15)

    def test_sums_add_up(self, capsys: pytest.CaptureFixture[str]) -> None:
        """6 x tokens x weights for the layer, 6 x tokens x hidden x vocabulary for the head."""
        description = printed_json(capsys, "llama3_8b", "--lm-head")
        layer, head = 6 * 8192 * 218_103_808, 6 * 8192 * 4096 * 128256
        assert description["repeats"] == 32
        assert description["sums"] == {
            "fprop": layer // 3,
            "dgrad": layer // 3,
            "wgrad": layer // 3,
            "layer": layer,
            "layers": 32 * layer,
            "lm_head": head,
            "model": 32 * layer + head,
        }
        assert [gemm["share"] for gemm in description["gemms"][12:]] == [None, None, None]

    def test_shares_of_a_layer_are_all_of_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        """They sum to one, up to the rounding of twelve additions."""
        shares = [gemm["share"] for gemm in printed_json(capsys, "qwen3_8b")["gemms"]]
        assert sum(shares) == pytest.approx(1.0, rel=12 * sys.float_info.epsilon)

    def test_shapes_by_hand_have_no_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The key is there, and null."""
        description = printed_json(capsys, "--shapes", "2x3x5")
        assert description["model"] is None
        assert description["sums"]["model"] == 3 * 60

    def test_the_list_has_the_fields_of_each_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        """In the order of the table, with tokens."""
        models = printed_json(capsys, "--list")["models"]
        assert [model["name"] for model in models] == list(MODELS)
        assert {model["name"]: model["tokens"] for model in models}["codonfm_5b"] == 15872


class TestRefusals:
    """Wrong input gets one line that says what is wrong and what would be right."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("llama9",), "unknown model 'llama9'; known: tiny, codonfm_5b, llama3_8b"),
            (("--hidden-size", "64"), "a model without a name needs num_attention_heads"),
            (("--lm-head",), "a model without a name needs hidden_size and num_attention_heads"),
            (("tiny", "--head-dim", "0"), "head_dim=0: must be positive"),
            (("tiny", "--head-dim", "-4"), "head_dim=-4: must be positive"),
            (("tiny", "--head-dim", "x"), "argument --head-dim: invalid int value: 'x'"),
            (
                ("tiny", "--num-key-value-heads", "3"),
                "num_attention_heads=8: must be a multiple of num_key_value_heads=3",
            ),
            (("tiny", "--hidden", "64"), "unrecognized arguments: --hidden"),
            (("tiny", "llama3_8b"), "unrecognized arguments: llama3_8b"),
            (("tiny", "--lm-head"), "tiny has no LM head; models with one: llama3_8b, llama3_70b"),
            (("--shapes", "8192x5120"), "shape '8192x5120': must be MxKxN with positive whole numbers, as 8192x"),
            (("--shapes", ""), "shape '': must be MxKxN"),
            (("--shapes", "1x2x3,1x2x3"), "shape 1x2x3: given more than once"),
            (("tiny", "--shapes", "1x2x3"), "--shapes stands alone"),
            (("--head-dim", "8", "--shapes", "1x2x3"), "--shapes stands alone"),
            (("--lm-head", "--shapes", "1x2x3"), "--shapes stands alone"),
            (("--list", "--shapes", "1x2x3"), "--shapes stands alone"),
            (("--list", "tiny"), "--list stands alone"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
    )
    def test_wrong_input_is_refused_in_one_line(
        self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
    ) -> None:
        """Exit code 4, as pytest has it."""
        line = refusal(capsys, *arguments)
        assert line.startswith("python -m shapes: error: ")
        assert message in line


class TestProcess:
    """As a program of its own."""

    @staticmethod
    def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `python -m shapes` in the repository."""
        return subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, text=True, stderr=subprocess.PIPE, timeout=60, **options
        )

    def test_it_runs_as_a_module(self) -> None:
        """Exit code 0 and a table."""
        done = self.command("-m", "shapes", "tiny", stdout=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("tiny: 1 x 128 = 128 tokens\n")

    def test_a_closed_pipe_is_no_error(self) -> None:
        """`python -m shapes ... | head` ends quietly, whatever the reader leaves unread."""
        read_end, write_end = os.pipe()
        os.close(read_end)
        try:
            done = self.command("-m", "shapes", "llama3_8b", "--json", stdout=write_end)
        finally:
            os.close(write_end)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
    @pytest.mark.parametrize(
        "module",
        [
            "shapes tiny",
            "benches.report benches/baselines/nvidia-h200-sm90/te-2.20.2.json",
            "correctness.emulate --shape=32x64x32 --recipe=bf16",
        ],
    )
    def test_a_full_disk_is_one_line(self, module: str) -> None:
        """Of every command of this project that prints."""
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", *module.split()],
                cwd=ROOT,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
            )
        assert done.returncode == 1
        assert done.stderr == "cannot print: No space left on device\n"

    def test_it_needs_the_standard_library_only(self) -> None:
        """Nothing outside it and this folder is imported: no torch, so that the answer comes at once."""
        program = (
            "import sys\n"
            "from shapes.__main__ import main\n"
            "main(['tiny'])\n"
            "names = {name.partition('.')[0] for name in sys.modules}\n"
            "print(names & {'torch', 'numpy', 'rich', 'pytest', 'transformer_engine'}, file=sys.stderr)\n"
        )
        done = self.command("-c", program, stdout=subprocess.DEVNULL)
        assert (done.returncode, done.stderr) == (0, "set()\n")
