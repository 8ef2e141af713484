"""The report reads a results file right: sums, speedups, shares, notes, whatever part of the cases is there."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benches.report.__main__ import main
from benches.report.analysis import GEMM_MODES, SCHEMA, Analysis, analyse
from benches.report.terminal import CPU_NOTICE, NO_RICH, render, significant
from shapes.cases import MODES, GemmCase, LayerCase, gemm_cases, layer_cases
from shapes.gemms import PASSES, LinearGroup, layer_linears, parse_shapes
from shapes.models import MODELS, ModelConfig
from shapes.stages import STAGES

RECIPES = ("bf16", "fp8_current_scaling", "fp8_delayed_scaling")
BASELINE = Path(__file__).parents[2] / "benches/baselines/nvidia-h200-sm90/te-2.20.2.json"
CODON = MODELS["codonfm_5b"]

# Invented times, in seconds. A layer's forward takes a third of both passes.
LAYER_S = {"torch": 0.040, "torch_sdpa": 0.032, "te_modules": 0.030, "te_attention": 0.028, "te_fused": 0.026}
PASS_SHARE = {"forward": 1 / 3, "backward": 2 / 3, "forward_backward": 1.0}
RECIPE_FACTOR = {"bf16": 1.0, "fp8_current_scaling": 0.5, "fp8_delayed_scaling": 0.4}
RESTED_FACTOR = 0.9
GEMM_S = {"fprop": 0.001, "dgrad": 0.002, "wgrad": 0.003}  # bf16, each linear
QUANTIZATION_S = 0.00025  # added to each GEMM by autocast

Case = LayerCase | GemmCase


def seconds_of(case: Case) -> float:
    """The invented time of a case."""
    time = RECIPE_FACTOR[case.recipe] * (RESTED_FACTOR if case.regime == "rested" else 1.0)
    if isinstance(case, LayerCase):
        return time * LAYER_S.get(case.stage, 0.024) * PASS_SHARE[case.pass_name]
    if case.mode == "quantization":
        return QUANTIZATION_S
    quantizes = case.mode == "autocast" and case.recipe != "bf16"
    return time * GEMM_S[case.pass_name] + (QUANTIZATION_S if quantizes else 0.0)


def benchmark(case: Case, group: LinearGroup) -> dict[str, Any]:
    """A case's entry in the results file."""
    median = seconds_of(case)
    extra: dict[str, Any] = {"case": case.id, "kind": case.kind} | dataclasses.asdict(case)
    extra |= {"interval_s": [0.999 * median, 1.001 * median], "stopped": "precise", "launch_bound": False}
    extra |= {"host_min_s": 1e-5, "host_median_s": 1.1e-5}
    if isinstance(case, GemmCase):
        linear = next(one for one in group.linears if one.name == case.linear)
        gemm = linear.gemm(case.pass_name)
        extra |= {"m": gemm.m, "n": gemm.n, "k": gemm.k, "flops": gemm.flops}
    return {"name": case.id, "fullname": case.id, "stats": {"median": median, "rounds": 9}, "extra_info": extra}


def results_of(
    config: ModelConfig = CODON,
    device: str = "cuda",
    keep: Callable[[Case], bool] = lambda case: True,
    group: LinearGroup | None = None,
) -> dict[str, Any]:
    """A results file of those cases of a model, or of shapes given by hand, that `keep` keeps."""
    entry = {"num_hidden_layers": 1, "tokens": 0} if group else dataclasses.asdict(config) | {"tokens": config.tokens}
    group = group or layer_linears(config)
    layers = [] if group.name == "shapes" else layer_cases(group.name, tuple(STAGES), RECIPES, device)
    cases: list[Case] = [*layers, *gemm_cases(group, RECIPES, MODES, device)]
    gpu = {"name": "NVIDIA H200", "uuid": "GPU-0"} if device == "cuda" else None
    return {
        "benchmarks": [benchmark(case, group) for case in cases if keep(case)],
        "machine_info": {"gpu": gpu, "versions": {"torch": "2.11.0", "transformer_engine": "2.20.2", "cudnn": None}},
        "suite": {"schema": SCHEMA, "device": device, "models": {group.name: entry}, "not_measured": []},
    }


def analysis_of(**options: Any) -> Analysis:
    return analyse(results_of(**options))


def lost(case: Case, outcome: str, reason: str) -> dict[str, str]:
    return {"case": case.id, "outcome": outcome, "reason": reason}


def words_of(text: str, start: str) -> str:
    """The only line of a text that starts so, with single blanks."""
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return " ".join(line.split())


def test_layer_rows_follow_stages_and_recipes() -> None:
    """Rows stand in the order of the stages and, within one, of the recipes, and only measured ones are there."""
    (model,) = analysis_of().models
    assert model.layers is not None
    found = [(row.stage, row.recipe) for row in model.layers.rows]
    te_stages = ("te_modules", "te_attention", "te_fused", "te_layer")
    # RECIPES here is out of the order of shapes.recipes, where delayed scaling comes first.
    assert found == [
        ("torch", "bf16"),
        ("torch_sdpa", "bf16"),
        *((stage, recipe) for stage in te_stages for recipe in (RECIPES[0], RECIPES[2], RECIPES[1])),
    ]


def test_layer_speedups_are_of_forward_backward_over_bf16_stages() -> None:
    """te_layer in current scaling takes 24 / 2 ms where torch takes 40, torch_sdpa 32 and te_layer in bf16 24."""
    (model,) = analysis_of().models
    assert model.layers is not None
    (row,) = (row for row in model.layers.rows if (row.stage, row.recipe) == ("te_layer", "fp8_current_scaling"))
    assert row.seconds == pytest.approx({"forward": 0.004, "backward": 0.008, "forward_backward": 0.012})
    assert row.speedups == pytest.approx({"torch": 40 / 12, "torch_sdpa": 32 / 12, "same_stage": 2.0})
    assert model.layers.references == ["torch", "torch_sdpa", "same_stage"]


def test_a_speedup_that_no_row_has_is_no_column() -> None:
    """One stage alone has only what its recipes bring; in bf16 nothing."""
    for recipes, references in ((RECIPES, ["same_stage"]), (("bf16",), [])):

        def keep(case: Case, recipes: Sequence[str] = recipes) -> bool:
            return isinstance(case, LayerCase) and case.stage == "te_layer" and case.recipe in recipes

        (model,) = analysis_of(keep=keep).models
        assert model.layers is not None
        assert model.layers.references == references


def test_layer_regime_is_sustained_and_rested_only_without_it() -> None:
    """The regime of training is shown where it was measured."""
    (both,) = analysis_of().models
    (rested,) = analysis_of(keep=lambda case: case.regime == "rested").models
    assert both.layers is not None
    assert rested.layers is not None
    assert (both.layers.regime, rested.layers.regime) == ("sustained", "rested")
    assert both.layers.rows[0].seconds["forward_backward"] == 0.040
    assert rested.layers.rows[0].seconds["forward_backward"] == pytest.approx(0.9 * 0.040)


def test_regimes_are_never_mixed() -> None:
    """A reference with a rested time only gives no speedup to a sustained one, and its row has dashes."""

    def keep(case: Case) -> bool:
        return isinstance(case, LayerCase) and (case.stage != "torch" or case.regime == "rested")

    (model,) = analysis_of(keep=keep).models
    assert model.layers is not None
    first, *others = model.layers.rows
    assert first.stage == "torch"
    assert set(first.seconds.values()) == {None}
    assert all(row.speedups["torch"] is None and row.speedups["torch_sdpa"] for row in others)


def test_gemm_sums() -> None:
    """Four linears of 1, 2, 3 ms are 4, 8, 12 ms per pass, 24 ms per layer and 24 times as much in 24 layers."""
    table = analysis_of().models[0].gemms["autocast"]
    assert [table.pass_s(name, "bf16") for name in PASSES] == pytest.approx([0.004, 0.008, 0.012])
    assert table.layer_s("bf16") == pytest.approx(0.024)
    assert table.model_s("bf16") == pytest.approx(24 * 0.024)


def test_gemm_modes_share_the_unquantized_reference() -> None:
    """Current scaling halves 24 ms; with 12 x 0.25 ms of quantization it takes 15 ms, a fifth of it quantization."""
    (model,) = analysis_of().models
    speedups = {
        mode: model.gemms[mode].speedup(model.gemms[mode].layer_s, "fp8_current_scaling") for mode in GEMM_MODES
    }
    assert speedups == pytest.approx({"autocast": 24 / 15, "prequantized": 24 / 12})
    assert model.quantization_share("fp8_current_scaling") == pytest.approx(3 / 15)
    assert model.quantization_share("bf16") is None


def test_unquantized_recipes_alone_are_no_table_beside_one_of_the_other_mode() -> None:
    """Where GEMMs were measured prequantized only, bf16 is the reference there and not a table of its own."""
    (model,) = analysis_of(keep=lambda case: not isinstance(case, GemmCase) or is_gemm_alone(case)).models
    assert list(model.gemms) == ["prequantized"]
    (model,) = analysis_of(keep=lambda case: case.recipe == "bf16").models
    assert list(model.gemms) == ["autocast"]


def is_gemm_alone(case: GemmCase) -> bool:
    """Whether there is no quantization in a case's time."""
    return case.mode == "prequantized" or case.recipe == "bf16"


def test_quantizations_have_a_table_of_their_own() -> None:
    """Of quantized recipes, and of the passes that quantize."""
    (model,) = analysis_of().models
    table = model.gemms["quantization"]
    assert "bf16" not in table.recipes
    assert {row.gemm.pass_name for row in table.rows} == {"fprop", "dgrad"}
    assert table.layer_s("fp8_current_scaling") == pytest.approx(2 * 4 * QUANTIZATION_S)
    (model,) = analysis_of(keep=lambda case: isinstance(case, GemmCase) and case.mode == "quantization").models
    assert list(model.gemms) == ["quantization"]
    assert model.gemm_splits() == []


def test_layer_rows_say_how_well_their_time_is_known() -> None:
    """Half the interval of forward_backward's median, relative to it, in its own column."""
    analysis = analysis_of()
    assert analysis.models[0].layers is not None
    row = analysis.models[0].layers.rows[0]
    assert row.uncertainty is not None
    assert f"{100 * row.uncertainty:.1f} %" in next(
        line for line in render(analysis, 120).splitlines() if line.startswith(row.stage)
    )


def test_gemms_of_both_modes_are_in_layer() -> None:
    """In-layer times predict training, so rested ones are shown only without them."""
    assert {table.regime for table in analysis_of().models[0].gemms.values()} == {"in_layer"}
    rested = analysis_of(keep=lambda case: case.regime == "rested").models[0].gemms
    assert {mode: table.regime for mode, table in rested.items()} == dict.fromkeys(MODES, "rested")
    assert rested["autocast"].layer_s("bf16") == pytest.approx(0.9 * 0.024)


def test_gemm_rows_are_grouped_by_pass_and_have_the_shapes_that_ran() -> None:
    """The 12 GEMMs, fprop first; 15872 x 4096 x 12288 in 1 ms is 1597.7 TFLOP/s."""
    table = analysis_of().models[0].gemms["prequantized"]
    assert [row.gemm for row in table.rows] == layer_linears(CODON).gemms()
    assert table.layer_tflops("bf16") == pytest.approx(sum(row.gemm.flops for row in table.rows) / 0.024 / 1e12)


def test_a_sum_needs_all_its_parts() -> None:
    """Without one dgrad, neither dgrad nor layer nor model nor share has a value; fprop still has."""

    def keep(case: Case) -> bool:
        part = isinstance(case, GemmCase) and (case.pass_name, case.linear) == ("dgrad", "mlp_up")
        return not (part and case.recipe == "fp8_current_scaling")

    (model,) = analysis_of(keep=keep).models
    table = model.gemms["autocast"]
    recipe = "fp8_current_scaling"
    assert [table.pass_s("dgrad", recipe), table.layer_s(recipe), table.model_s(recipe)] == [None, None, None]
    assert model.quantization_share(recipe) is None
    assert table.pass_s("fprop", recipe) == pytest.approx(4 * (0.0005 + QUANTIZATION_S))
    assert table.layer_s("bf16") == pytest.approx(0.024)


def test_shapes_given_by_hand_are_their_own_layer() -> None:
    """Two shapes have 2 ms of fprop, and their sum is the whole."""
    (model,) = analysis_of(group=parse_shapes("64x32x128,64x64x64")).models
    table = model.gemms["autocast"]
    assert table.pass_s("fprop", "bf16") == pytest.approx(0.002)
    assert table.model_s("bf16") == table.layer_s("bf16") == pytest.approx(0.012)
    assert [row.gemm.linear for row in table.rows[:2]] == ["64x32x128", "64x64x64"]


def test_a_failed_shape_keeps_its_pass_without_a_sum() -> None:
    """A shape that only `not_measured` names still belongs to the sum."""
    group = parse_shapes("64x32x128,64x64x64")
    results = results_of(group=group, keep=lambda case: isinstance(case, GemmCase) and case.linear == "64x32x128")
    case = GemmCase("shapes", "bf16", "in_layer", "autocast", "fprop", "64x64x64")
    results["suite"]["not_measured"] = [lost(case, "failed", "out of memory")]
    table = analyse(results).models[0].gemms["autocast"]
    assert len(table.rows) == 6
    assert table.layer_s("bf16") is None


def test_notes_gather_what_needs_care() -> None:
    """Imprecise cases come worst first, failures keep their cases, skips are counted by reason."""
    results = results_of()
    first, second, third = (entry["extra_info"] for entry in results["benchmarks"][:3])
    median = results["benchmarks"][0]["stats"]["median"]
    first |= {"stopped": "max_time", "interval_s": [0.99 * median, 1.04 * median]}
    second |= {"stopped": "max_time"}
    third |= {"launch_bound": True}
    skipped = [
        LayerCase("codonfm_5b", "te_layer", "nvfp4", "eager", "rested", name) for name in ("forward", "backward")
    ]
    failed = LayerCase("codonfm_5b", "te_layer", "mxfp8", "eager", "rested", "forward")
    results["suite"]["not_measured"] = [lost(case, "skipped", "nvfp4: needs 10.0") for case in skipped]
    results["suite"]["not_measured"] += [lost(failed, "failed", "CUDA out of memory.\n  30 GiB")]
    notes = analyse(results).notes
    assert [case for case, _ in notes.imprecise] == [first["case"], second["case"]]
    assert [size for _, size in notes.imprecise] == pytest.approx([0.025, 0.001])
    assert notes.launch_bound == (third["case"],)
    assert notes.failed == {"CUDA out of memory. 30 GiB": (failed.id,)}
    assert notes.skipped == {"nvfp4: needs 10.0": 2}
    text = render(analyse(results), 300)  # wide enough that no note is wrapped
    assert "Worst: 2.5 % of layer/codonfm_5b/torch/bf16/eager/rested/forward." in text
    assert f"1 failed: CUDA out of memory. 30 GiB\n  {failed.id}" in text
    assert "2 skipped: nvfp4: needs 10.0" in text


SUBSETS: dict[str, Callable[[Case], bool]] = {
    "nothing": lambda case: False,
    "one stage": lambda case: isinstance(case, LayerCase) and case.stage == "te_fused",
    "one recipe": lambda case: case.recipe == "fp8_delayed_scaling",
    "only forward": lambda case: case.pass_name == "forward",
    "only rested": lambda case: case.regime == "rested",
    "only prequantized": lambda case: isinstance(case, GemmCase) and case.mode == "prequantized",
    "one gemm": lambda case: isinstance(case, GemmCase) and (case.pass_name, case.linear) == ("wgrad", "qkv"),
}


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_any_subset_gives_tables(subset: str, device: str) -> None:
    """Each measured case's table is there, and nothing that cannot be known is printed as a number."""
    pytest.importorskip("rich")
    results = results_of(device=device, keep=SUBSETS[subset])
    analysis = analyse(results)
    text = render(analysis, 100)
    kinds = {entry["extra_info"]["kind"] for entry in results["benchmarks"]}
    assert ("Layer in" in text) == ("layer" in kinds)
    assert ("M x K x N" in text) == ("gemm" in kinds)
    assert ("No case of this model has a time." in text) == (not kinds)
    assert not any(word in text for word in ("None", "nan", "inf "))


def test_unknown_keys_are_tolerated() -> None:
    """A producer may add keys and benchmarks of other kinds."""
    results = results_of()
    expected = analyse(results)
    results["suite"] |= {"controls": [1, 2]}
    results["suite"]["models"]["codonfm_5b"] |= {"colour": "green"}
    results["benchmarks"][0]["extra_info"] |= {"clocks": {"sm": 1980}}
    results["benchmarks"] += [{"name": "other", "stats": {"median": 1.0}, "extra_info": {"kind": "control"}}]
    results["benchmarks"] += [{"name": "foreign", "stats": {"median": 1.0}}]
    assert analyse(results) == expected


def _broken(change: Callable[[dict[str, Any]], Any]) -> Any:
    results = copy.deepcopy(results_of())
    change(results)
    return results


REFUSED: dict[str, tuple[Any, str]] = {
    "a list": ([], "no top-level object 'suite'"),
    "pytest-benchmark's own": ({"benchmarks": [], "machine_info": {}}, "no top-level object 'suite'"),
    "another schema": (
        _broken(lambda results: results["suite"].update(schema=1)),
        "has schema 1, not 2",
    ),
    "no benchmarks": (_broken(lambda results: results.pop("benchmarks")), "'benchmarks' must be a list"),
    "no median": (_broken(lambda results: results["benchmarks"][0]["stats"].pop("median")), "lacks 'median'"),
    "a time of zero": (
        _broken(lambda results: results["benchmarks"][0]["stats"].update(median=0.0)),
        "0.0 s is no time",
    ),
    "a lost axis": (_broken(lambda results: results["benchmarks"][0]["extra_info"].pop("regime")), "lacks 'regime'"),
    "an unknown recipe": (
        _broken(lambda results: results["benchmarks"][0]["extra_info"].update(recipe="fp2")),
        "unknown recipe 'fp2'",
    ),
    "a case twice": (_broken(lambda results: results["benchmarks"].append(results["benchmarks"][0])), "is there twice"),
    "an unknown model": (_broken(lambda results: results["suite"]["models"].clear()), "which suite.models lacks"),
    "an impossible model": (
        _broken(lambda results: results["suite"]["models"]["codonfm_5b"].update(head_dim=-1)),
        "head_dim=-1",
    ),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_is_no_results_file_is_refused_in_one_line(problem: str) -> None:
    """The message names what is wrong."""
    results, words = REFUSED[problem]
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        analyse(results)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 4, "-"),
        (0.0, 4, "0.000"),
        (2.2204, 4, "2.220"),
        (0.034214, 4, "0.03421"),
        (9.99996, 4, "10.00"),
        (641.72, 4, "641.7"),
        (138321.0, 4, "138300"),
        (-0.5, 2, "-0.50"),
    ],
)
def test_significant_digits(value: float | None, digits: int, text: str) -> None:
    """As many digits as asked, no exponent, trailing zeros kept, also where rounding carries."""
    assert significant(value, digits) == text


def test_rendered_tables_say_what_and_where() -> None:
    """Header, regime, units, shapes in TE's order, sums and shares, dashes for what is not known."""
    pytest.importorskip("rich")
    text = render(analysis_of(), 110)
    assert text.startswith("NVIDIA H200, torch 2.11.0, transformer_engine 2.20.2\n")
    assert "codonfm_5b: 31 x 512 = 15872 tokens" in text
    assert "Layer in ms, regime sustained." in text
    assert "in ms, regime in_layer" in text
    autocast = text[text.index("autocast: GEMMs") : text.index("prequantized: GEMMs")]
    # Recipes in the order of shapes.recipes: bf16, delayed (0.4 ms + 0.25), current (0.5 ms + 0.25).
    assert words_of(autocast, "fprop qkv") == "fprop qkv 15872x4096x12288 1.000 0.6500 1.54x 0.7500 1.33x"
    assert words_of(autocast, "24 layers") == "24 layers in ms 576.0 302.4 1.90x 360.0 1.60x"
    assert words_of(autocast, "quantization") == "quantization share 23.8 % 20.0 %"


def test_missing_parts_are_dashes() -> None:
    """With one GEMM alone, sums have dashes and its own line its time."""
    pytest.importorskip("rich")
    text = render(analysis_of(keep=SUBSETS["one gemm"]), 110)
    autocast = text[text.index("autocast: GEMMs") : text.index("prequantized: GEMMs")]
    assert words_of(autocast, "wgrad qkv").split()[3] == "3.000"
    assert set(words_of(autocast, "layer           sum").split()[2:]) == {"-"}


@pytest.mark.parametrize("width", [80, 100, 120])
def test_tables_fit_the_width_in_plain_ascii(width: int) -> None:
    """No line is longer, none has an escape code, and each recipe has its column in each GEMM table."""
    pytest.importorskip("rich")
    text = render(analysis_of(), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()
    assert "\x1b" not in text
    assert [text.count(f"{name}\n") + text.count(f"{name} ") for name in ("delayed", "current")] == [3, 3]


@pytest.mark.parametrize("width", [40, 80, 110])
def test_no_digit_is_cut_off_where_the_page_is_narrow(width: int) -> None:
    """Every word of a GPU's stored baseline stands on a wide page and on a narrow one."""
    pytest.importorskip("rich")
    analysis = analyse(json.loads(BASELINE.read_text(encoding="utf-8")))
    wide, narrow = (set(render(analysis, columns).split()) for columns in (400, width))
    rules = {word for word in wide if set(word) <= set("-=")}
    assert wide - rules - narrow == set()


def test_color_changes_no_character() -> None:
    """Colour adds escape codes and nothing else, so nothing is lost without it."""
    pytest.importorskip("rich")
    plain, colored = (render(analysis_of(), 110, color) for color in (False, True))
    from rich.text import Text

    text = Text.from_ansi(colored).plain
    assert "\x1b" in colored
    assert [line.rstrip() for line in text.splitlines()] == plain.splitlines()


def test_errors_stand_beside_times() -> None:
    """Of a layer's output and gradients, and of the worst GEMM of each pass; nowhere in a file that has none."""
    pytest.importorskip("rich")
    results = results_of()
    assert "error" not in render(analyse(results), 120)
    for entry in results["benchmarks"]:
        extra = entry["extra_info"]
        if extra.get("mode") == "quantization":  # no GEMM, no error
            continue
        of_backward = extra["pass_name"] in ("backward", "dgrad")
        extra["relative_error"] = 0.0 if extra["recipe"] == "bf16" else 0.05 if of_backward else 0.0312
    text = render(analyse(results), 120)
    assert words_of(text, "te_layer      fp8_current_scaling").endswith(" 3.1 % 5.0 %")
    assert words_of(text, "te_layer      bf16").endswith(" 0.0 % 0.0 %")
    errors = [" ".join(line.split()) for line in text.splitlines() if line.startswith("dgrad error")]
    assert errors == ["dgrad error worst 0.0 % 5.0 % 5.0 %"] * 2


def test_launch_bound_times_are_marked() -> None:
    """A star stands beside the time of that pass, and the notes say what it means."""
    pytest.importorskip("rich")
    results = results_of()
    for entry in results["benchmarks"]:
        entry["extra_info"]["launch_bound"] = entry["name"] == "layer/codonfm_5b/te_layer/bf16/eager/sustained/forward"
    text = render(analyse(results), 110)
    assert words_of(text, "te_layer      bf16").split()[2:5] == ["8.000*", "16.00", "24.00"]
    assert "* 1 launch-bound cases" in text


def test_cpu_times_are_labelled() -> None:
    """The first line of a CPU's report warns."""
    pytest.importorskip("rich")
    assert render(analysis_of(config=MODELS["tiny"], device="cpu"), 120).startswith(CPU_NOTICE)


def test_without_rich_one_line_says_how_to_get_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich is optional."""
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert render(analysis_of(), 100) == NO_RICH + "\n"


def test_analysis_imports_neither_torch_nor_pytest_nor_rich() -> None:
    """A results file can be read where nothing of the suite is installed."""
    code = "import sys, benches.report.analysis; print({'torch', 'pytest', 'rich', 'matplotlib'} & set(sys.modules))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("subset", [name for name in SUBSETS if name not in ("nothing", "one gemm")])
def test_a_plot_is_a_png(subset: str, tmp_path: Path) -> None:
    """One model, one file of that name."""
    pytest.importorskip("matplotlib")
    from benches.report.plots import plot

    assert plot(analysis_of(keep=SUBSETS[subset]), tmp_path / "out.png") == [tmp_path / "out.png"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_each_model_has_its_figure(tmp_path: Path) -> None:
    """With several models their names tell the files apart."""
    pytest.importorskip("matplotlib")
    from benches.report.plots import plot

    results, other = results_of(), results_of(config=MODELS["llama3_8b"])
    results["benchmarks"] += other["benchmarks"]
    results["suite"]["models"] |= other["suite"]["models"]
    paths = plot(analyse(results), tmp_path / "out.png")
    assert [path.name for path in paths] == ["out-codonfm_5b.png", "out-llama3_8b.png"]
    assert all(path.stat().st_size > 0 for path in paths)


def test_a_number_is_marked_if_it_is_launch_bound_itself(tmp_path: Path) -> None:
    """Beside a bar stands forward_backward; that the forward pass alone is launch-bound says nothing of it."""
    pytest.importorskip("matplotlib")
    from benches.report import plots

    for name, marked in (("forward", False), ("forward_backward", True)):
        results = results_of()
        for entry in results["benchmarks"]:
            entry["extra_info"]["launch_bound"] = entry["extra_info"]["pass_name"] == name
        drawn: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("matplotlib.axes.Axes.annotate", lambda _, text, *__, to=drawn, **___: to.append(text))
            plots.plot(analyse(results), tmp_path / "out.png")
        assert ("*" in drawn[0]) == marked


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    """Without a layer or a complete set of GEMMs there is no empty figure."""
    pytest.importorskip("matplotlib")
    from benches.report.plots import plot

    with pytest.raises(ValueError, match="nothing to draw"):
        plot(analysis_of(keep=SUBSETS["one gemm"]), tmp_path / "out.png")
    assert not list(tmp_path.iterdir())


def test_splits_say_where_quantization_is_not_told_apart() -> None:
    """Both modes give 3 ms of quantization; autocast alone gives none, and says which mode it is."""
    split = analysis_of().models[0].gemm_splits()[2]
    assert (split.recipe, split.mode) == ("fp8_current_scaling", "prequantized")
    assert split.quantization_s == pytest.approx(0.003)
    autocast = analysis_of(keep=lambda case: isinstance(case, GemmCase) and case.mode == "autocast").models[0]
    assert [(one.mode, one.quantization_s) for one in autocast.gemm_splits()] == [
        ("autocast", 0.0),  # bf16
        ("autocast", None),
        ("autocast", None),
    ]


def test_command_prints_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stored file gives tables on stdout and the figure asked for."""
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    path, out = tmp_path / "results.json", tmp_path / "out.png"
    path.write_text(json.dumps(results_of()), encoding="utf-8")
    assert main([str(path), "--plot", str(out)]) == 0
    assert "Layer in ms" in capsys.readouterr().out
    assert out.stat().st_size > 0


@pytest.mark.parametrize("text", [None, "{", "[]", '{"suite": {"schema": 7}}', "\udcff"])
def test_command_refuses_other_files_in_one_line(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is missing, no text, no JSON or not ours ends with exit code 4 and one line naming it."""
    path = tmp_path / "results.json"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert main([str(path)]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{path}: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("benchmarks", 0), 1),
        (("benchmarks", 0, "extra_info"), "text"),
        (("benchmarks", 0, "extra_info", "interval_s"), [1]),
        (("benchmarks", 0, "extra_info", "regime"), "weird"),
        (("benchmarks", 0, "extra_info", "model"), ["codonfm_5b"]),
        (("benchmarks", 0, "stats", "median"), 1e308),
        (("benchmarks", 0, "stats", "median"), 1e-320),
        (("benchmarks", -1, "extra_info", "m"), 1e400),
        (("machine_info",), 5),
        (("machine_info", "gpu"), "H200"),
        (("suite", "models", "codonfm_5b"), 7),
        (("suite", "not_measured"), [1]),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else repr(value),
)
def test_command_refuses_json_of_another_shape_in_one_line(
    path: tuple[Any, ...], value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any value of a good file replaced by another kind ends with exit code 4 and a line, never in a traceback."""
    results = results_of()
    inner = results
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results))
    assert main([str(file)]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{file}: ")
    assert captured.err.count("\n") == 1


def test_command_shows_the_regime_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rested times are there, too, though tables are of back-to-back ones by default."""
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results_of()))
    assert main([str(file), "--regime", "rested"]) == 0
    text = capsys.readouterr().out
    assert "regime rested" in text
    assert "regime sustained" not in text
    assert "regime in_layer" not in text


@pytest.mark.parametrize("name", ["out.nothing", "missing/out.png"])
def test_command_refuses_plots_it_cannot_write(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown format or folder ends with exit code 4 and one line."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results_of()), encoding="utf-8")
    assert main([str(path), "--plot", str(tmp_path / name)]) == 4
    assert capsys.readouterr().err.count("\n") == 1
