"""`python -m correctness.emulate`: what it prints, and what it says to wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from correctness import emulate
from correctness.bounds import Extras, Input
from correctness.distributions import DISTRIBUTIONS
from correctness.emulate import draw, emulated_gemms, main, one_linear, relative_error
from shapes.gemms import PASSES, Linear
from shapes.recipes import RECIPES

ROOT = Path(__file__).parents[2]
KEYS = ("recipe", "pass", "m", "n", "k", "mkn", "operands", "error", "lower", "expected", "upper", "within", "reason")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints."""
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def described(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What the command writes with --json."""
    file = tmp_path / "errors.json"
    printed(capsys, *arguments, "--json", str(file))
    description: dict[str, Any] = json.loads(file.read_text())
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

    def test_all_recipes_are_shown_with_all_gemms(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Three lines each, none outside of its limits."""
        rows = [line.split() for line in printed(capsys, "--shape", "64x96x128").splitlines()]
        shown = [(row[0], row[1]) for row in rows if row[-1:] == ["within"]]
        assert shown == [(recipe, name) for recipe in RECIPES for name in PASSES]
        assert not any("OUTSIDE" in row for row in rows)

    def test_a_line_has_error_expectation_and_limits(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Shapes are M x K x N as elsewhere, wgrad's transposed."""
        lines = printed(capsys, "--shape", "64x96x128", "--recipe", "mxfp8").splitlines()
        assert lines[0] == "linear 64x96x128: x and dy normal, w normal, seed 0"
        header, units, fprop, _, wgrad = lines[2:7]
        assert " ".join(header.split()) == "recipe GEMM M x K x N operands error expected error / from to"
        assert units.split() == ["expected"]
        assert fprop.split()[:6] == ["mxfp8", "fprop", "64x96x128", "e4m3:1x32", "x", "e4m3:1x32"]
        error, expected, ratio, lower, upper = map(float, fprop.split()[6:11])
        assert lower < error < upper
        assert ratio == pytest.approx(error / expected, abs=0.002)
        assert wgrad.split()[2] == "96x64x128"

    def test_a_recipe_that_refuses_the_shape_says_so_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Its lines have no numbers, the others have."""
        text = printed(capsys, "--shape", "64x96x120")
        assert text.count("mxfp8 needs out_features to be a multiple of 32 in the forward pass, got 120") == 1
        rows = {tuple(line.split()[:2]): line.split()[-5:] for line in text.splitlines() if line.startswith("mxfp8  ")}
        assert rows == {("mxfp8", name): ["-"] * 5 for name in PASSES}
        assert text.count("within") == 6  # bf16 and fp16

    def test_what_has_no_expectation_has_an_error_and_a_reason(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Constant elements after a Hadamard transform."""
        text = printed(capsys, "--shape", "64x96x128", "--recipe", "nvfp4", "--distribution", "constant")
        assert "nvfp4 wgrad: no expectation for constant elements after a Hadamard transform" in text
        assert text.count("within") == 2

    def test_what_is_not_finite_is_no_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        """float16 overflows: there is neither an error nor an expectation."""
        arguments = ("--shape", "64x96x128", "--recipe", "fp16", "--distribution", "log_uniform")
        text = printed(capsys, *arguments)
        assert "fp16 fprop: no expectation for outputs that fp16 does not have" in text
        assert next(line for line in text.splitlines() if line.startswith("fp16    fprop")).split()[-5:] == ["-"] * 5


class TestOptions:
    """What changes the numbers, and what does not."""

    def test_equal_seeds_give_equal_numbers(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """And others others, also with stochastic rounding."""
        arguments = ("--shape", "32x32x32", "--recipe", "nvfp4")
        one, same, other = (described(capsys, tmp_path, *arguments, "--seed", seed)["gemms"] for seed in "112")
        assert one == same
        assert all(first["error"] != second["error"] for first, second in zip(one, other, strict=True))

    def test_hadamard_and_stochastic_rounding_can_be_left_out(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """Stochastic rounding is in dgrad and wgrad, the transform in wgrad alone; expectations follow."""
        arguments = ("--shape", "64x64x64", "--recipe", "nvfp4", "--distribution", "outlier")
        options: tuple[tuple[str, ...], ...] = ((), ("--no-hadamard",), ("--no-stochastic-rounding",))
        both, no_hadamard, nearest = (described(capsys, tmp_path, *arguments, *more)["gemms"] for more in options)
        for key in ("error", "expected"):
            assert [a[key] != b[key] for a, b in zip(both, no_hadamard, strict=True)] == [False, False, True]
            assert [a[key] != b[key] for a, b in zip(both, nearest, strict=True)] == [False, True, True]

    @pytest.mark.parametrize("distribution", DISTRIBUTIONS)
    def test_every_distribution_is_emulated(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, distribution: str
    ) -> None:
        """Every error of the quantized recipes is finite, and within its limits where there are some."""
        names = [name for recipe in RECIPES if recipe != "fp16" for name in ("--recipe", recipe)]
        gemms = described(capsys, tmp_path, "--shape", "64x96x128", *names, "--distribution", distribution)["gemms"]
        assert all(gemm["error"] is not None for gemm in gemms)
        assert [(gemm["recipe"], gemm["pass"]) for gemm in gemms if gemm["within"] is False] == []

    def test_zeros_have_no_error(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """In no recipe."""
        gemms = described(capsys, tmp_path, "--shape", "32x32x32", "--distribution", "zeros")["gemms"]
        assert {(gemm["error"], gemm["lower"], gemm["upper"]) for gemm in gemms} == {(0.0, 0.0, 0.0)}


class TestJson:
    """The file for programs."""

    def test_the_keys_are_stable(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """A reader may rely on these names."""
        description = described(capsys, tmp_path, "--shape", "24x48x32", "--seed", "5", "--no-hadamard")
        assert list(description) == ["shape", "distribution", "seed", "hadamard", "stochastic_rounding", "gemms"]
        assert description["shape"] == {"tokens": 24, "in_features": 48, "out_features": 32}
        assert (description["distribution"], description["seed"]) == ("normal", 5)
        assert (description["hadamard"], description["stochastic_rounding"]) == (False, True)
        assert {tuple(gemm) for gemm in description["gemms"]} == {KEYS}
        assert len(description["gemms"]) == 3 * len(RECIPES)

    def test_a_refused_shape_has_a_reason_and_no_numbers(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """24 tokens: of the quantized recipes none can run it backward."""
        gemms = described(capsys, tmp_path, "--shape", "24x48x32")["gemms"]
        refused = [gemm for gemm in gemms if gemm["reason"]]
        assert {gemm["recipe"] for gemm in refused} == {recipe.id for recipe in RECIPES.values() if recipe.quantized}
        assert {(gemm["error"], gemm["expected"], gemm["within"]) for gemm in refused} == {(None, None, None)}

    def test_a_gemm_has_its_numbers(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """wgrad: m is out, n is in, k is tokens; the error is the one that the functions give."""
        arguments = ("--shape", "64x96x128", "--recipe", "fp8_block_scaling", "--seed", "3")
        wgrad = described(capsys, tmp_path, *arguments)["gemms"][2]
        assert [wgrad[key] for key in ("m", "n", "k", "mkn")] == [128, 96, 64, "96x64x128"]
        assert wgrad["operands"] == ["e4m3:1x128", "e4m3:1x128"]
        linear = Linear("linear", 64, 96, 128)
        tensors = draw(linear, {"x": Input(), "w": Input(size=96**-0.5), "dy": Input(size=1e-3)}, 3)
        actual = emulated_gemms(RECIPES["fp8_block_scaling"], tensors, Extras(), 3)["wgrad"]
        assert wgrad["error"] == relative_error(actual, tensors["dy"].double().T @ tensors["x"].double())
        assert wgrad["within"] is (wgrad["lower"] <= wgrad["error"] <= wgrad["upper"])


class TestRefusals:
    """Wrong input gets one line that says what is wrong and what would be right."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((), "the following arguments are required: --shape"),
            (("--shape", "512x1024"), "shape '512x1024': must be MxKxN with positive whole numbers"),
            (("--shape", "0x16x16"), "shape '0x16x16': must be MxKxN with positive whole numbers"),
            (("--shape", "16x16x16,32x32x32"), "shape '16x16x16,32x32x32': one at a time"),
            (("--shape", "100000x100000x100000"), "its matrices have 6e+10 elements, at most 2.7e+08 fit"),
            (("--shape", "16x16x16", "--recipe", "fp8"), "argument --recipe: invalid choice: 'fp8'"),
            (("--shape", "16x16x16", "--distribution", "cauchy"), "argument --distribution: invalid choice: 'cauchy'"),
            (("--shape", "16x16x16", "--seed", "-1"), "argument --seed: must be from 0 to 2**63 - 1, got -1"),
            (("--shape", "16x16x16", "--seed", "x"), "argument --seed: invalid _seed value: 'x'"),
            (("--shape", "16x16x16", "--recipe", "mxfp8"), "mxfp8 needs tokens to be a multiple of 32 in the forward"),
            (("--shape", "24x32x32", "--recipe", "fp8_current_scaling"), "of 16 in the backward pass, got 24"),
            (("--shape", "16x16x16", "--shapes", "1x1x1"), "unrecognized arguments: --shapes 1x1x1"),
            (("16x16x16",), "the following arguments are required: --shape"),
        ],
        ids=lambda value: " ".join(value) or "nothing" if isinstance(value, tuple) else "",
    )
    def test_wrong_input_is_refused_in_one_line(
        self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
    ) -> None:
        """Exit code 4, as of pytest's options."""
        line = refusal(capsys, *arguments)
        assert line.startswith("python -m correctness.emulate: error: ")
        assert message in line

    def test_a_file_that_cannot_be_written_is_refused(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """With the name of it; nothing is printed as if all were well."""
        for file, reason in ((tmp_path, "Is a directory"), (tmp_path / "no" / "file", "No such file or directory")):
            line = refusal(capsys, "--shape", "16x16x16", "--recipe", "bf16", "--json", str(file))
            assert f"--json={file}: {reason}" in line


class TestFunctions:
    """What others may use."""

    def test_inputs_are_left_alone(self) -> None:
        """Emulating a recipe neither changes tensors nor asks for their gradients."""
        tensors = draw(Linear("linear", 32, 32, 32), dict.fromkeys(("x", "w", "dy"), Input()), 0)
        before = {role: tensor.clone() for role, tensor in tensors.items()}
        for recipe in RECIPES.values():
            emulated_gemms(recipe, tensors)
        assert all(torch.equal(tensors[role], before[role]) for role in tensors)
        assert not any(tensor.requires_grad for tensor in tensors.values())

    @pytest.mark.parametrize("seed", range(20))
    def test_outliers_do_not_meet(self, seed: int) -> None:
        """Those of x and dy are at tokens half of all apart."""
        linear = Linear("linear", 64, 32, 32)
        tensors = draw(linear, {"x": Input("outlier"), "w": Input(), "dy": Input("outlier", 1e-3)}, seed)
        x, dy = (int(tensors[role].abs().max(dim=1).values.argmax()) for role in ("x", "dy"))
        assert abs(x - dy) == 32

    def test_a_shape_is_one_linear(self) -> None:
        """tokens x in_features x out_features."""
        linear = one_linear("512x1024x256")
        assert (linear.tokens, linear.in_features, linear.out_features) == (512, 1024, 256)

    def test_relative_errors_of_zeros(self) -> None:
        """Nothing instead of nothing is right; something instead of nothing is infinitely wrong."""
        zeros, ones = torch.zeros(2, 2), torch.ones(2, 2)
        assert relative_error(zeros, zeros) == 0
        assert relative_error(ones, zeros) == float("inf")
        assert relative_error(2 * ones, ones) == 1


def test_it_runs_as_a_module() -> None:
    """Exit code 0 and a table; 4 and a line."""
    command = [sys.executable, "-m", "correctness.emulate", "--recipe", "nvfp4", "--shape"]
    done = subprocess.run([*command, "32x64x16"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("linear 32x64x16: ")
    failed = subprocess.run([*command, "32x64x1"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (4, "", 1)


@pytest.mark.parametrize("package", ["numpy", "torch"])
def test_what_is_not_installed_is_said_in_one_line(package: str) -> None:
    """The README offers the command on any machine."""
    script = (
        f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_module('correctness.emulate', None, '__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1)
    assert "`pip install numpy torch`" in done.stderr


def test_limits_are_those_of_the_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An error outside of them is marked."""
    monkeypatch.setattr(emulate, "gemm_errors", lambda *_: dict.fromkeys(PASSES, 0.5))
    assert printed(capsys, "--shape", "32x32x32", "--recipe", "mxfp8").count("OUTSIDE") == 3
