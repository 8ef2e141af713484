"""The gate's command line: what it prints, how it ends, and one line for whatever cannot be compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benches.gate import main
from benches.judging.baselines import default_file, pool, read, together
from benches.judging.judge import VERDICTS, judge
from benches.report.analysis import SCHEMA
from benches.report.verdicts import FEW, render
from correctness.suite.fake_results import CASES, TIMES, evidence, kernel, noisy, results, runs

ROOT = Path(__file__).parents[2]
FIRST, SECOND, THIRD, FOURTH = CASES[:4]
Printed = pytest.CaptureFixture[str]


def regressed() -> Any:
    """A run with a slower case, a failed, a changed, a new and a faster one."""
    times = noisy(TIMES, 0.001, 7)
    file = results(times | {FIRST: times[FIRST] * 1.1, FOURTH: times[FOURTH] * 0.9, CASES[20]: 1e-3})
    file["suite"]["not_measured"] = [{"case": SECOND, "outcome": "failed", "reason": "out of memory"}]
    file["benchmarks"] = [one for one in file["benchmarks"] if one["extra_info"]["case"] != SECOND]
    for benchmark in file["benchmarks"]:
        extra = benchmark["extra_info"]
        if extra["case"] == THIRD:
            extra["launches"] = 3
        if extra["case"] == FIRST:
            extra |= {"launch_bound": True, "peak_bytes": 2000}
            file["suite"]["evidence"][extra["evidence"]] = evidence(kernel("slow_gemm", device_s=1.1e-3))
    file["machine_info"]["versions"]["transformer_engine"] = "2.21.0"
    return file


def written(tmp_path: Path, **files: Any) -> list[str]:
    """Paths of files with these contents: text, bytes, or what JSON says."""
    paths = []
    for name, content in files.items():
        path = tmp_path / f"{name}.json"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        paths.append(str(path))
    return paths


def against(tmp_path: Path, now: Any, baseline: Any, *options: str) -> int:
    """The exit code of the command line for one file against another."""
    first, second = written(tmp_path, now=now, baseline=baseline)
    return main([first, "--baseline", second, *options])


class TestOutput:
    """What is printed, and the exit code."""

    def test_a_run_like_the_baseline_passes(self, tmp_path: Path, capsys: Printed) -> None:
        """With what it could have seen, and what the controls did."""
        assert against(tmp_path, runs(1, seed=3)[0], pool(runs(5)), "--strict") == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        lines = printed.out.splitlines()
        assert lines[0].startswith("1 run against ")
        assert lines[0].endswith(", 5 runs")
        assert lines[-3].startswith("controls: gemm +0.00 %")
        assert lines[-2].startswith("a slowdown that is found 95 times in 100: 1.")
        assert lines[-1] == "12 SAME"

    def test_several_runs_are_judged_together(self, tmp_path: Path, capsys: Printed) -> None:
        """As the strongest answer."""
        files = written(tmp_path, a=runs(1, seed=3)[0], b=runs(1, seed=4)[0], c=runs(1, seed=5)[0])
        assert main([*files, "--baseline", *written(tmp_path, baseline=pool(runs(5)))]) == 0
        assert capsys.readouterr().out.startswith("3 runs against ")

    def test_a_slower_case_has_a_block(self, tmp_path: Path, capsys: Printed) -> None:
        """Times, interval, kernels, host, memory, clock and versions; then the rest in short, and the totals last."""
        assert against(tmp_path, regressed(), pool(runs(5))) == 1
        blocks = capsys.readouterr().out.strip().split("\n\n")
        heads = [block.split()[0] for block in blocks[1:-1]]
        assert heads == ["SLOWER", "MISSING", "CHANGED", "NEW", "FASTER"]
        slower = blocks[1].splitlines()
        assert slower[0].split() == ["SLOWER", FIRST]
        assert "ms -> 1.1" in slower[1] or "us -> 1.1" in slower[1]
        assert "95 % interval +9." in slower[1]
        assert "the controls account for +0.00 %" in slower[2]
        assert slower[3:] == [
            "  replaced: 1 x nvjet 1.000 ms -> 1 x slow_gemm 1.100 ms",
            "  host time: 100.0 us -> 100.0 us (not told apart, launch-bound)",
            "  peak bytes: 1000 -> 2000",
            "  SM clock: 1980 MHz -> 1980 MHz",
            "  differs: transformer_engine: 2.20.2 -> 2.21.0",
        ]
        assert blocks[2].splitlines() == [f"MISSING     {SECOND}", "  failed: out of memory"]
        assert "launches: 2 -> 3" in blocks[3]
        assert blocks[-1].splitlines()[-1] == "1 SLOWER, 1 MISSING, 1 CHANGED, 1 NEW, 1 FASTER, 8 SAME"

    def test_json_has_every_verdict_with_its_numbers(self, tmp_path: Path, capsys: Printed) -> None:
        """And the exit code."""
        out = tmp_path / "out.json"
        assert against(tmp_path, regressed(), pool(runs(5)), "--json", str(out)) == 1
        capsys.readouterr()
        kept = json.loads(out.read_text(), parse_constant=pytest.fail)
        assert (kept["exit_code"], kept["strict"]) == (1, False)
        assert list(kept["counts"]) == list(VERDICTS)
        assert 0.01 < kept["detectable"]["median"] <= kept["detectable"]["largest"]
        by_case = {finding["case"]: finding for finding in kept["findings"]}
        assert len(by_case) == len(TIMES) + 1
        slower = by_case[FIRST]
        assert slower["verdict"] == "SLOWER"
        low, high = slower["time"]["interval"]
        assert low < slower["time"]["ratio"] < high
        assert slower["reasons"]["kernels"]["replaced"][0][1]["name"] == "slow_gemm"
        assert by_case[SECOND]["reason"] == "failed: out of memory"

    def test_strict_fails_what_is_not_surely_the_same(self, tmp_path: Path, capsys: Printed) -> None:
        """UNRESOLVED, which it lists, and skips."""
        noise = pool(runs(5, noise=0.02))
        assert against(tmp_path, runs(1, noise=0.02, seed=3)[0], noise) == 0
        assert "UNRESOLVED  " not in capsys.readouterr().out
        assert against(tmp_path, runs(1, noise=0.02, seed=3)[0], noise, "--strict") == 1
        assert "UNRESOLVED  " in capsys.readouterr().out
        lost = [{"case": case, "outcome": "skipped", "reason": "needs a newer GPU"} for case in CASES[20:22]]
        skipped = runs(1, seed=3, not_measured=lost)[0]
        assert against(tmp_path, skipped, pool(runs(5))) == 0
        assert against(tmp_path, skipped, pool(runs(5)), "--strict") == 1
        assert f"NO TIME     {CASES[20]} and 1 more\n  skipped: needs a newer GPU\n" in capsys.readouterr().out

    def test_a_noise_file_is_read(self, tmp_path: Path, capsys: Printed) -> None:
        """Where the baseline is one run, it says how much runs differ."""
        baseline, now = runs(2)
        spreads = [{"case": case, "runs_s": [1e-3, 1.02e-3, 0.98e-3]} for case in TIMES]
        (noise,) = written(tmp_path, noise=spreads)
        assert against(tmp_path, now, baseline) == 0
        assert "is assumed" in capsys.readouterr().out
        assert against(tmp_path, now, baseline, "--noise", noise, "--strict") == 1
        out = capsys.readouterr().out
        assert "is assumed" not in out
        assert "12 UNRESOLVED" in out

    def test_without_a_baseline_it_is_the_machine_s_stored_one(
        self, tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or one line that says where there is none."""
        monkeypatch.chdir(tmp_path)
        (now,) = written(tmp_path, now=runs(1, seed=3)[0])
        assert main([now]) == 4
        line = capsys.readouterr().err
        assert "no baseline of NVIDIA H200 (9.0) in benches/baselines/nvidia-h200-sm90" in line.replace("\\", "/")
        baseline = pool(runs(5))
        path = tmp_path / default_file(baseline)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(baseline))
        assert main([now]) == 0
        assert "te-2.20.2.json, 5 runs" in capsys.readouterr().out

    def test_long_lists_are_cut_and_failures_are_not(self) -> None:
        """Of what fails every case is named."""
        baseline = read(pool(runs(5)), "b")
        fast = judge(baseline, read(results(dict.fromkeys(TIMES, 0.0005)), "n"))
        assert f"FASTER      {len(TIMES) - FEW} more" in render(fast)
        slow = judge(baseline, read(results(dict.fromkeys(TIMES, 0.002)), "n"))
        assert render(slow).count("SLOWER      ") == len(TIMES)

    def test_a_run_that_is_too_noisy_to_be_judged_says_so(self) -> None:
        """It passes, but nobody should think that this means something."""
        for noise, words in ((0.001, False), (0.3, True)):
            outcome = judge(read(pool(runs(5, noise=noise)), "b"), read(runs(1, seed=3, noise=noise)[0], "n"))
            assert ("too noisy to be judged" in render(outcome)) == words

    def test_cases_that_only_some_runs_have_are_counted(self) -> None:
        """Of three runs, one lacks two."""
        files = [results(TIMES), results(TIMES), results({case: TIMES[case] for case in list(TIMES)[2:]})]
        outcome = judge(read(pool(runs(5)), "b"), together([read(file, "n") for file in files]))
        assert f"not in all 3 runs: 2 cases, {FIRST}, ..." in render(outcome)

    def test_kernels_that_could_not_be_seen_are_not_called_the_same(self) -> None:
        """Both are said of a slower case."""
        slow = runs(1, dict.fromkeys(TIMES, 0.002))[0]
        assert "kernels: the same" in render(judge(read(pool(runs(5)), "b"), read(slow, "n")))
        slow["suite"]["evidence"] = {}
        assert "kernels: not seen" in render(judge(read(pool(runs(5)), "b"), read(slow, "n")))

    def test_cases_that_were_not_asked_for_are_counted(self) -> None:
        """So that nobody takes them for judged."""
        outcome = judge(read(pool(runs(5)), "b"), read(results({FIRST: 1e-3}, left_out=list(TIMES)[1:]), "n"))
        assert "not selected, so not judged: 11 of tiny" in render(outcome)


def first(file: Any) -> Any:
    """The first benchmark of a file."""
    return file["benchmarks"][0]


def one_run(file: Any) -> None:
    """A baseline's only run."""
    file["suite"]["runs"] = []


UNUSABLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another GPU": (lambda file: file["machine_info"]["gpu"].update(name="NVIDIA B200"), "NVIDIA B200 (9.0)"),
    "another capability": (lambda file: file["machine_info"]["gpu"].update(compute_capability="10.0"), "(10.0)"),
    "a CPU": (lambda file: file["suite"].update(device="cpu"), "unknown CPU"),
    "another schema": (lambda file: file["suite"].update(schema=SCHEMA + 1), f"has schema {SCHEMA + 1}, not {SCHEMA}"),
    "no schema": (lambda file: file["suite"].pop("schema"), "has schema None"),
    "no suite": (lambda file: file.pop("suite"), "not a results file of this suite"),
    "no benchmarks": (lambda file: file.pop("benchmarks"), "not a usable results file (KeyError"),
    "no machine": (lambda file: file.pop("machine_info"), "not a usable results file (KeyError"),
    "no GPU": (lambda file: file["machine_info"].update(gpu=None), "not a usable results file (TypeError"),
    "benchmarks of another shape": (lambda file: file.update(benchmarks=[1]), "not a usable results file"),
    "a zero time": (lambda file: first(file)["stats"].update(median=0.0), "median 0.0 s is no time"),
    "a negative time": (lambda file: first(file)["stats"].update(median=-1.0), "median -1.0 s is no time"),
    "an infinite time": (lambda file: first(file)["stats"].update(median="1e999"), "median 1e999 s is no time"),
    "a time that is text": (lambda file: first(file)["stats"].update(median="fast"), "could not convert"),
    "no time": (lambda file: first(file)["stats"].update(median=None), "not a usable results file (TypeError"),
    "NaN": (lambda file: first(file)["stats"].update(median=float("nan")), "NaN is in it"),
    "infinity": (lambda file: first(file)["extra_info"].update(host_median_s=float("inf")), "Infinity is in it"),
    "a host time below zero": (lambda file: first(file)["extra_info"].update(host_median_s=-1.0), "host time -1.0 s"),
    "a control that took no time": (
        lambda file: file["suite"]["controls"][0].update(median_s=0.0),
        "control gemm 0.0 s is no time",
    ),
    "a case twice": (lambda file: file["benchmarks"].append(first(file)), f"case {FIRST} is there twice"),
    "no name": (lambda file: first(file)["extra_info"].pop("case"), "not a usable results file (KeyError"),
    "another name": (lambda file: first(file)["extra_info"].update(case="forward"), "is not the name of a case"),
    "no runs": (one_run, "has no runs"),
    "runs of another shape": (lambda file: file["suite"].update(runs=[{}]), "not a usable results file (KeyError"),
    "no evidence of a segment": (
        lambda file: first(file)["extra_info"].update(segments=["backward"]),
        "not usable (KeyError",
    ),
}

NO_FILES: dict[str, tuple[Any, str]] = {
    "empty": ("", "is empty"),
    "blank": (" \n", "is empty"),
    "not JSON": ("hello", "is not JSON, or cut off"),
    "not text": (b"\xff\xfe\x00", "is not text"),
    "a list": ([], "not a results file of this suite"),
    "a number": (5, "not a results file of this suite"),
    "nested without end": ("[" * 100_000, "recursion"),
}


class TestRefusals:
    """Exit code 4 and one line on stderr, whatever the file."""

    def refused(self, code: int, printed: Any, words: str, name: str) -> None:
        """One line that says what and where, no traceback, and nothing on stdout."""
        assert code == 4
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert printed.err.startswith("benches.gate: ")
        assert words in printed.err
        assert name in printed.err

    @pytest.mark.parametrize("side", ["now", "baseline"])
    @pytest.mark.parametrize("what", UNUSABLE)
    def test_a_file_with_something_wrong(self, what: str, side: str, tmp_path: Path, capsys: Printed) -> None:
        """Whether it is the run or the baseline."""
        spoil, words = UNUSABLE[what]
        files = dict(zip(("baseline", "now"), runs(2), strict=True))
        spoil(files[side])
        code = against(tmp_path, files["now"], files["baseline"])
        self.refused(code, capsys.readouterr(), words, f"{side}.json")

    @pytest.mark.parametrize("side", ["now", "baseline"])
    @pytest.mark.parametrize("what", NO_FILES)
    def test_something_that_is_no_file_of_results(self, what: str, side: str, tmp_path: Path, capsys: Printed) -> None:
        """Not even of another version."""
        content, words = NO_FILES[what]
        files = dict(zip(("baseline", "now"), runs(2), strict=True)) | {side: content}
        code = against(tmp_path, files["now"], files["baseline"])
        self.refused(code, capsys.readouterr(), words, f"{side}.json")

    @pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
    def test_a_truncated_file(self, kept: float, tmp_path: Path, capsys: Printed) -> None:
        """Wherever it was cut off."""
        text = json.dumps(pool(runs(3)))
        code = against(tmp_path, runs(1)[0], text[: int(kept * len(text))])
        self.refused(code, capsys.readouterr(), "is not JSON, or cut off", "baseline.json")

    def test_a_file_that_is_not_there(self, tmp_path: Path, capsys: Printed) -> None:
        """Or is a folder, or cannot be written."""
        (now,) = written(tmp_path, now=runs(1)[0])
        self.refused(main([now, "--baseline", "nowhere"]), capsys.readouterr(), "No such file", "nowhere")
        self.refused(main([now, "--baseline", str(tmp_path)]), capsys.readouterr(), "Is a directory", str(tmp_path))
        code = against(tmp_path, *runs(2), "--json", str(tmp_path / "no" / "out.json"))
        self.refused(code, capsys.readouterr(), "No such file", "out.json")

    def test_another_set_of_cases(self, tmp_path: Path, capsys: Printed) -> None:
        """Nothing would be judged."""
        code = against(tmp_path, results({"layer/other/torch/bf16/eager/rested/forward": 1e-3}), runs(1)[0])
        self.refused(code, capsys.readouterr(), "nothing can be compared", "now.json")

    def test_the_same_run_twice(self, tmp_path: Path, capsys: Printed) -> None:
        """It would look as if runs did not differ."""
        now, baseline = written(tmp_path, now=runs(1)[0], baseline=runs(1)[0])
        self.refused(main([now, now, "--baseline", baseline]), capsys.readouterr(), "is there twice", "the run of")

    @pytest.mark.parametrize("content", [{}, [1], [{"case": FIRST, "runs_s": [0.0, 1.0]}], [{"case": "x"}], "", "{"])
    def test_a_noise_file_that_is_none(self, content: Any, tmp_path: Path, capsys: Printed) -> None:
        """Of whatever shape; an empty object is no list of cases."""
        (noise,) = written(tmp_path, noise=content)
        code = against(tmp_path, *runs(2), "--noise", noise)
        self.refused(code, capsys.readouterr(), "", "noise.json")

    def test_what_was_read_is_not_overwritten(self, tmp_path: Path, capsys: Printed) -> None:
        """A file of noise took six runs."""
        (noise,) = written(tmp_path, noise=[{"case": FIRST, "runs_s": [1e-3, 1.001e-3]}])
        content = Path(noise).read_text()
        code = against(tmp_path, *runs(2), "--noise", noise, "--json", noise)
        self.refused(code, capsys.readouterr(), "is one of the files that are read", "noise.json")
        assert Path(noise).read_text() == content


@pytest.mark.parametrize("rounds", [1, 1000])
def test_how_many_rounds_a_run_had_does_not_matter(rounds: int, tmp_path: Path, capsys: Printed) -> None:
    """Noise is between runs; one round has a time like any other."""
    now = runs(1, seed=3)[0]
    for benchmark in now["benchmarks"]:
        benchmark["stats"]["rounds"] = rounds
    assert against(tmp_path, now, pool(runs(5))) == 0
    assert "12 SAME" in capsys.readouterr().out


def test_a_baseline_of_one_run_is_said_to_be_one(tmp_path: Path, capsys: Printed) -> None:
    """It is compared all the same."""
    assert against(tmp_path, *runs(2)) == 0
    assert "  the baseline is one run: how much it differs from the next is not in it" in capsys.readouterr().out


def test_it_runs_alone_and_imports_neither_torch_nor_pytest(tmp_path: Path) -> None:
    """In a fresh interpreter."""
    now, baseline = written(tmp_path, now=regressed(), baseline=pool(runs(5)))
    script = f"""
import sys
from benches.gate import main
code = main([{now!r}, "--baseline", {baseline!r}])
print(code, sorted({{"torch", "pytest", "pytest_benchmark"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "1 []"


def test_without_scipy_one_line_says_what_to_install(tmp_path: Path) -> None:
    """And there is no traceback."""
    files = written(tmp_path, now=runs(1)[0], baseline=runs(1)[0])
    script = f"""
import sys
sys.modules["scipy"] = None
sys.argv = ["gate", {files[0]!r}, "--baseline", {files[1]!r}]
from benches.gate import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.count("\n") == 1
    assert "pip install scipy" in done.stderr
