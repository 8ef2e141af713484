"""The noise between processes is what the runs' medians say, and what cannot be compared is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches.noise import differing, main, spreads, table
from benches.report.analysis import SCHEMA
from shapes.cases import LAYER_PASSES, LayerCase

CASES = [LayerCase("tiny", "torch", "bf16", "eager", "rested", name) for name in LAYER_PASSES]


def run(*medians: float, uuid: str = "one") -> dict[str, Any]:
    """A results file with a layer's case for each median."""
    return {
        "suite": {"schema": SCHEMA, "models": {"tiny": {}}},
        "machine_info": {"gpu": {"uuid": uuid}},
        "benchmarks": [
            {
                "stats": {"median": median},
                "extra_info": {"kind": "layer", **dict(zip(case.axes, case.values, strict=True))},
            }
            for case, median in zip(CASES, medians, strict=False)
        ],
    }


def pooled(file: dict[str, Any]) -> dict[str, Any]:
    """A file that says that it is of several runs."""
    return file | {"suite": file["suite"] | {"runs": [{}, {}]}}


def nameless() -> dict[str, Any]:
    """A results file whose second case is of no model."""
    results = run(1.0, 2.0)
    results["benchmarks"][1]["extra_info"]["model"] = None
    return results


def launching(launches: Any) -> dict[str, Any]:
    """A file whose case launches so many kernels."""
    file = run(1.0)
    file["benchmarks"][0]["extra_info"]["launches"] = launches
    return file


def test_a_spread_is_the_deviation_of_medians_over_their_mean() -> None:
    """99, 100 and 101 ms: 1 ms of 100."""
    (spread,) = spreads([run(0.099), run(0.100), run(0.101)])
    assert spread.mean_s == pytest.approx(0.100)
    assert spread.relative == pytest.approx(0.01)


def test_what_boards_differ_by_is_no_noise() -> None:
    """99 and 101 ms on one board, 198 and 202 ms on a slower one: four deviations of 1 %, two degrees of freedom."""
    runs = [run(0.099), run(0.101), run(0.198, uuid="two"), run(0.202, uuid="two")]
    (spread,) = spreads(runs)
    assert spread.by_board() == [[0.099, 0.101], [0.198, 0.202]]
    assert spread.relative == pytest.approx(0.01 * 2**0.5)


def proved(launches: int, kernel: str = "nvjet", peak: int = 100) -> dict[str, Any]:
    """A results file with one case, and what it ran."""
    results = run(0.1)
    extra = results["benchmarks"][0]["extra_info"]
    extra |= {"case": "layer/a", "evidence": "a", "segments": ["forward"], "launches": launches, "peak_bytes": peak}
    uses = [{"name": kernel, "count": launches, "category": "gemm_fp8", "device_s": 0.1}]
    results["suite"]["evidence"] = {"a": {"segments": {"forward": {"kernels": uses}}}}
    return results


def test_what_rounds_explain_stands_beside_what_runs_differ_by() -> None:
    """An interval of +- 1.96 % is a deviation of a percent; where a run has none, nothing is known."""
    known, unknown = run(1.0, 2.0), run(1.0, 2.0)
    for file in (known, unknown):
        for entry in file["benchmarks"]:
            middle = entry["stats"]["median"]
            entry["extra_info"]["interval_s"] = [middle * (1 - 0.0196), middle * (1 + 0.0196)]
    unknown["benchmarks"][1]["extra_info"]["interval_s"] = None
    assert [spread.rounds for spread in spreads([known, unknown])] == [pytest.approx(0.01), None]
    lines = table(spreads([known, unknown])).splitlines()
    assert lines[0].split()[-4:-1] == ["rounds", "median", "largest"]
    assert "1.00%    0.00%    0.00%" in lines[1]


def test_what_ran_is_compared_exactly() -> None:
    """Launches, kernels and memory that differ in any run are named with their case."""
    assert differing([proved(3), proved(3), proved(3)]) == {}
    assert differing([proved(3), proved(3), proved(4)]) == {"launches": ["layer/a"], "kernels": ["layer/a"]}
    assert differing([proved(3), proved(3, kernel="cutlass")]) == {"kernels": ["layer/a"]}
    assert differing([proved(3), proved(3, peak=101)]) == {"peak_bytes": ["layer/a"]}


def test_cases_that_a_run_lacks_are_left_out() -> None:
    """A spread over fewer runs than the others would look smaller."""
    assert [spread.case for spread in spreads([run(1.0, 2.0), run(1.0)])] == [CASES[0].id]


def test_lines_are_per_kind_regime_and_band() -> None:
    """Short times have more noise by nature, and are summed up apart."""
    lines = table(spreads([run(0.1, 50e-6, 10e-6), run(0.1, 50e-6, 12e-6)])).splitlines()
    assert len(lines) == 4
    assert [line.split()[-1] for line in lines[1:]] == [case.id for case in CASES]
    assert "100 us and more" in lines[1]
    assert "15 to 100 us" in lines[2]
    assert "below 15 us" in lines[3]
    assert "12.86%" in lines[3]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([run(1.0)], "at least 2"),
        ([run(1.0), run(1.0, uuid="other")], "2 runs of as many different GPUs"),
        ([run(1.0), run()], "no case"),
        ([run(1.0) | {"datetime": "now"}] * 2, "the same run is given twice"),
        ([pooled(run(1.0)), run(1.0)], "a baseline pools runs"),
        ([launching(-1), run(1.0)], "launches -1 is no count"),
        ([launching("3"), run(1.0)], "launches '3' is no count"),
        ([run(1.0), {"benchmarks": []}], "not a results file"),
        ([run(1.0), []], "not a results file"),
        ([run(1.0), nameless()], "model None is no name"),
        ([run(1.0), run(0.0)], "is no time"),
        ([run(1.0), run(float("nan"))], "NaN is in it"),
        ([run(1.0), run(1.0) | {"machine_info": 5}], "not a usable results file"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(
    runs: list[Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 4."""
    paths = [tmp_path / f"{index}.json" for index in range(len(runs))]
    for path, content in zip(paths, runs, strict=True):
        path.write_text(json.dumps(content))
    assert main([str(path) for path in paths]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_every_case_s_medians_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON, for a gate to learn the noise from."""
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, median in zip(paths, (0.1, 0.3), strict=True):
        path.write_text(json.dumps(run(median)))
    assert main([*map(str, paths), "--json", str(tmp_path / "out.json")]) == 0
    (kept,) = json.loads((tmp_path / "out.json").read_text())
    assert (kept["case"], kept["runs_s"]) == (CASES[0].id, [0.1, 0.3])
    assert "2 processes" in capsys.readouterr().out


def test_cases_that_are_left_out_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed would hide that it lacks most of them."""
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, medians in zip(paths, ((0.1, 0.2, 0.3), (0.1,)), strict=True):
        path.write_text(json.dumps(run(*medians)))
    assert main([str(path) for path in paths]) == 0
    assert f"not in all runs, so left out: 2 cases, {min(one.id for one in CASES[1:3])}, ..." in capsys.readouterr().out
