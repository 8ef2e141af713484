"""A baseline pools runs that belong together, keeps each of them, and is a file that pytest-benchmark reads."""

from __future__ import annotations

import copy
import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, stdev
from typing import Any

import pytest

from benches import baseline
from benches.judging.baselines import axes_of, folder, load, pool, read, together
from benches.report.analysis import SCHEMA
from correctness.suite.fake_results import CASES, TIMES, evidence, kernel, results, runs

ROOT = Path(__file__).parents[2]
FIRST, SECOND, THIRD = CASES[:3]
STORED = "benches/baselines/nvidia-h200-sm90/te-2.20.2.json"


def case_of(baseline: Any, case: str) -> Any:
    """A case's benchmark in a file."""
    (found,) = [one for one in baseline["benchmarks"] if one["extra_info"]["case"] == case]
    return found


class TestPooling:
    """pool(runs), onto an older baseline or not."""

    def test_a_case_keeps_each_run_and_has_their_median(self) -> None:
        """In order of the runs; pytest-benchmark's statistics are of the runs' medians."""
        baseline = pool([results({FIRST: time_s}) for time_s in (3e-3, 1e-3, 2e-3)])
        found = case_of(baseline, FIRST)
        assert found["extra_info"]["runs"] == [
            {"run": 0, "median_s": 3e-3, "host_median_s": 1e-4},
            {"run": 1, "median_s": 1e-3, "host_median_s": 1e-4},
            {"run": 2, "median_s": 2e-3, "host_median_s": 1e-4},
        ]
        stats = found["stats"]
        assert (stats["median"], stats["rounds"]) == (2e-3, 3)
        assert (stats["min"], stats["max"]) == (1e-3, 3e-3)
        assert stats["mean"] == pytest.approx(2e-3)
        assert stats["stddev"] == pytest.approx(stdev([3e-3, 1e-3, 2e-3]))
        assert stats["total"] == pytest.approx(6e-3)

    def test_each_run_says_when_where_and_with_what(self) -> None:
        """And what its controls took: the median of what was taken of each, of Python the least."""
        run = results({FIRST: 1e-3}, uuid="two")
        run["suite"]["controls"] = [
            {"name": name, "time_s": 0.0, "median_s": time_s}
            for name in ("gemm", "python")
            for time_s in (3e-3, 1e-3, 2e-3)
        ] + [{"name": "fp8_gemm", "time_s": 0.0, "absent": "this GPU has no FP8"}]
        (found,) = pool([run])["suite"]["runs"]
        assert found == {
            "datetime": run["datetime"],
            "uuid": "two",
            "driver": "580.1",
            "versions": {"torch": "2.11.0", "transformer_engine": "2.20.2"},
            "sources": "0123456789abcdef",
            "controls": {"gemm": 2e-3, "python": 1e-3},
        }

    def test_runs_of_other_days_and_boards_are_added(self) -> None:
        """After those that are there; a case need not be in all of them."""
        old = pool([results({FIRST: 1e-3, SECOND: 5e-3}), results({FIRST: 2e-3, SECOND: 5e-3})])
        new = pool([results({FIRST: 9e-3, THIRD: 7e-3}, uuid="two")], onto=old)
        assert [run["uuid"] for run in new["suite"]["runs"]] == ["one", "one", "two"]
        assert [one["median_s"] for one in case_of(new, FIRST)["extra_info"]["runs"]] == [1e-3, 2e-3, 9e-3]
        assert [one["run"] for one in case_of(new, SECOND)["extra_info"]["runs"]] == [0, 1]
        assert [one["run"] for one in case_of(new, THIRD)["extra_info"]["runs"]] == [2]
        assert new["machine_info"]["gpu"]["uuid"] == "two"

    def test_cases_that_are_renewed_forget_their_earlier_runs(self) -> None:
        """Others keep theirs, and runs that have no others are gone."""
        old = pool([results({FIRST: 1e-3, SECOND: 5e-3}), results({FIRST: 2e-3}), results({SECOND: 6e-3}, uuid="two")])
        new = pool([results({FIRST: 9e-3, THIRD: 7e-3}, uuid="three")], onto=old, renew=True)
        assert [run["uuid"] for run in new["suite"]["runs"]] == ["one", "two", "three"]
        assert [(one["run"], one["median_s"]) for one in case_of(new, FIRST)["extra_info"]["runs"]] == [(2, 9e-3)]
        assert case_of(new, FIRST)["stats"]["median"] == 9e-3
        assert [one["median_s"] for one in case_of(new, SECOND)["extra_info"]["runs"]] == [5e-3, 6e-3]
        assert [one["run"] for one in case_of(new, THIRD)["extra_info"]["runs"]] == [2]

    def test_all_cases_can_be_renewed(self) -> None:
        """Cases, runs and machine are then as in one that was made anew."""
        old, new = pool(runs(5)), runs(5, seed=9)
        for file in new:
            file["machine_info"]["gpu"]["uuid"] = "two"
        renewed, anew = pool(new, onto=old, renew=True), pool(new)
        assert renewed["benchmarks"] == anew["benchmarks"]
        assert renewed["suite"]["runs"] == anew["suite"]["runs"]
        assert renewed["machine_info"] == anew["machine_info"]

    def test_what_ran_is_what_the_newest_file_says(self) -> None:
        """Whichever is given first."""
        old, new = results({FIRST: 1e-3, SECOND: 1e-3}), results({FIRST: 1e-3})
        key = new["benchmarks"][0]["extra_info"]["evidence"]
        new["suite"]["evidence"][key] = evidence(kernel("newer"))
        new["benchmarks"][0]["extra_info"]["launches"] = 7
        for order in ([old, new], [new, old]):
            baseline = pool(order)
            assert case_of(baseline, FIRST)["extra_info"]["launches"] == 7
            assert case_of(baseline, SECOND)["extra_info"]["launches"] == 2
            (use,) = baseline["suite"]["evidence"][key]["segments"]["forward"]["kernels"]
            assert use["name"] == "newer"

    def test_the_interval_is_of_the_runs(self) -> None:
        """By order statistics, so with fewer than six there is none, and their range is given."""
        entry = case_of(pool(runs(5)), FIRST)
        assert entry["extra_info"]["interval_s"] == (entry["stats"]["min"], entry["stats"]["max"])
        entry = case_of(pool(runs(12)), FIRST)
        low, high = entry["extra_info"]["interval_s"]
        assert entry["stats"]["min"] < low < entry["stats"]["median"] < high < entry["stats"]["max"]

    def test_seconds_are_those_of_all_runs(self) -> None:
        """What measuring took, five times."""
        files = runs(5)
        for number, file in enumerate(files):
            file["suite"]["spent_s"] = {"measuring": 10.0 + number, "all": 20.0}
        assert pool(files)["suite"]["spent_s"] == {"measuring": 60.0, "all": 100.0}

    def test_seconds_of_runs_that_are_forgotten_are_too(self) -> None:
        """Whose share of the old file's nobody knows."""
        old, new = pool(runs(3)), runs(2)
        assert pool(new, onto=old, renew=True)["suite"]["spent_s"] == {"all": 2.0}
        assert pool(new, onto=old)["suite"]["spent_s"] == {"all": 5.0}

    @pytest.mark.parametrize("date", ["2025-12-31T20:00:00-08:00", "2026-01-01T04:00:00Z", "2026-01-01T04:00:00.5"])
    def test_the_newest_is_so_by_the_clock(self, date: str) -> None:
        """Wherever it was read: these are four o'clock of UTC, and nine in the morning of Tokyo is midnight."""
        early, late = results({FIRST: 1e-3}), results({FIRST: 1e-3})
        early["datetime"], late["datetime"] = "2026-01-01T09:00:00+09:00", date
        late["benchmarks"][0]["extra_info"]["launches"] = 7
        for order in ([early, late], [late, early]):
            assert case_of(pool(order), FIRST)["extra_info"]["launches"] == 7

    def test_a_case_that_a_run_lost_is_not_called_lost(self) -> None:
        """Another run has its time; one that none has stays lost."""
        lost = [{"case": case, "outcome": "failed", "reason": "out of memory"} for case in (FIRST, THIRD)]
        baseline = pool([results({FIRST: 1e-3}), results({SECOND: 1e-3}, not_measured=lost)])
        assert [one["case"] for one in baseline["suite"]["not_measured"]] == [THIRD]

    def test_what_any_run_could_not_do_is_known(self) -> None:
        """Also what only an older one asked for."""
        lost = [{"case": case, "outcome": "skipped", "reason": "needs a newer GPU"} for case in (SECOND, THIRD)]
        pooled = pool([results({FIRST: 1e-3}, not_measured=lost), results({FIRST: 1e-3, SECOND: 1e-3})])
        assert pooled["suite"]["not_measured"] == lost[1:]

    def test_the_runs_are_left_as_they_are(self) -> None:
        """Pooling changes none of its arguments."""
        files = runs(2)
        before = copy.deepcopy(files)
        pool(files[1:], onto=pool(files[:1]))
        assert files == before

    def test_pytest_benchmark_compares_with_it(self, tmp_path: Path) -> None:
        """Its own command line shows one beside another, and of how many runs they are."""
        for name, count in (("old", 5), ("new", 2)):
            (tmp_path / f"{name}.json").write_text(json.dumps(pool(runs(count, {FIRST: 2e-3}))))
        command = ["-m", "pytest_benchmark", "compare", "--columns=median,iqr,outliers,ops,rounds"]
        files = [str(tmp_path / f"{name}.json") for name in ("old", "new")]
        done = subprocess.run(
            [sys.executable, *command, *files], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        rows = [line.split() for line in done.stdout.splitlines() if line.startswith(FIRST)]
        assert sorted(row[-1] for row in rows) == ["2", "5"]


class TestCommand:
    """`python -m benches.baseline`: what it writes, and when."""

    @pytest.fixture(autouse=True)
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Where the baselines lie."""
        monkeypatch.chdir(tmp_path)
        return tmp_path

    @staticmethod
    def called(*options: str, files: list[Any]) -> int:
        """The exit code with these runs."""
        names = [f"run{number}.json" for number in range(len(files))]
        for name, file in zip(names, files, strict=True):
            Path(name).write_text(json.dumps(file))
        return baseline.main([*names, *options])

    def test_the_first_one_is_written(self, capsys: pytest.CaptureFixture[str]) -> None:
        """In the GPU's folder, under TE's version."""
        assert self.called(files=runs(5)) == 0
        assert len(load(Path(STORED)).runs) == 5
        assert capsys.readouterr().out.splitlines() == [f"{STORED}: 12 cases of 5 runs"]

    def test_what_is_there_is_replaced_when_told_to(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Without being told it is compared, and left."""
        self.called(files=runs(5))
        old = Path(STORED).read_text()
        slow = runs(3, dict.fromkeys(TIMES, 2e-3))
        capsys.readouterr()
        assert self.called(files=slow) == 0
        out = capsys.readouterr().out
        assert Path(STORED).read_text() == old
        assert "12 SLOWER" in out
        assert out.splitlines()[-2:] == [
            "3 runs: 5 or more say how much a case differs from run to run",
            f"{STORED} is as it was; --replace writes the new one",
        ]
        assert self.called("--replace", files=slow) == 0
        assert len(load(Path(STORED)).runs) == 3

    def test_runs_that_are_added_are_compared_with_those_before_them(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Not with themselves."""
        self.called(files=runs(5))
        more = runs(2, seed=7)
        capsys.readouterr()
        assert self.called("--add", "--replace", files=more) == 0
        assert "2 runs against" in capsys.readouterr().out
        assert len(load(Path(STORED)).runs) == 7
        assert self.called("--add", "--replace", files=more) == 4
        assert "is there twice" in capsys.readouterr().err

    def test_cases_can_be_renewed(self, capsys: pytest.CaptureFixture[str]) -> None:
        """What differs is shown all the same, and there must be something to renew."""
        slow = runs(5, {FIRST: 2e-3})
        assert self.called("--renew", files=slow) == 4
        assert f"--renew: there is no baseline {STORED}" in capsys.readouterr().err
        self.called(files=runs(5))
        capsys.readouterr()
        assert self.called("--renew", "--replace", files=slow) == 0
        assert "1 SLOWER" in capsys.readouterr().out
        stored = load(Path(STORED))
        assert {len(found.samples) for found in stored.timed.values()} == {5}
        assert (len(stored.runs), len(stored.timed)) == (10, 12)
        with pytest.raises(SystemExit, match="4"):
            self.called("--add", "--renew", files=slow)
        assert "not allowed with argument" in capsys.readouterr().err

    def test_cases_that_the_new_one_lacks_are_counted(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Nobody would judge them ever after."""
        self.called(files=runs(5))
        fewer = runs(5, {FIRST: 1e-3})
        assert self.called(files=fewer) == 0
        assert f"never judged again: 11 cases, {min(list(TIMES)[1:])}, ..." in capsys.readouterr().out

    def test_one_of_an_older_schema_can_be_replaced(self, capsys: pytest.CaptureFixture[str]) -> None:
        """It cannot be compared with, and would be in the way for ever."""
        self.called(files=runs(5))
        older = json.loads(Path(STORED).read_text())
        older["suite"]["schema"] = SCHEMA - 1
        Path(STORED).write_text(json.dumps(older))
        assert self.called("--replace", files=runs(5)) == 0
        assert f"not comparable with the stored one: {STORED}: has schema {SCHEMA - 1}" in capsys.readouterr().out
        assert json.loads(Path(STORED).read_text())["suite"]["schema"] == SCHEMA

    def test_somebody_s_own_benchmark_in_it_does_not_matter(self, capsys: pytest.CaptureFixture[str]) -> None:
        """pytest-benchmark writes all that ran into one file."""
        files = runs(2)
        for file in files:
            file["benchmarks"].append({"name": "theirs", "stats": {"median": 1.0}, "extra_info": {}})
        assert self.called("-o", "mine.json", files=files[:1]) == 0
        assert "mine.json: 12 cases of 1 run" in capsys.readouterr().out
        Path("mine.json").write_text(json.dumps(files[0]))
        assert self.called("-o", "mine.json", files=files[1:]) == 0

    def test_the_stored_one_survives_a_full_disk(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        """And a file of a run is not overwritten."""
        self.called(files=runs(5))
        old = Path(STORED).read_text()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        more = runs(5)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) - 1000, limits[1]))
        try:
            assert self.called("--replace", files=more) == 4
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert f"{STORED}: File too large" in capsys.readouterr().err
        assert Path(STORED).read_text() == old
        assert self.called("--replace", "-o", "run0.json", files=more) == 4
        assert "run0.json: is one of the files that are read" in capsys.readouterr().err

    def test_figures_have_six_digits(self) -> None:
        """Also those of an interval; the rest nobody compares."""
        self.called(files=runs(7))
        numbers = json.loads(Path(STORED).read_text(), parse_float=str)["benchmarks"][0]["extra_info"]["interval_s"]
        assert [len(number.lstrip("0.")) <= 6 for number in numbers] == [True, True]

    def test_a_new_version_of_te_is_compared_with_the_old_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A regression must not become the baseline unseen."""
        self.called(files=runs(5))
        newer = runs(5, dict.fromkeys(TIMES, 2e-3))
        for file in newer:
            file["machine_info"]["versions"]["transformer_engine"] = "2.21.0"
        capsys.readouterr()
        assert self.called(files=newer) == 0
        out, other = capsys.readouterr().out, STORED.replace("2.20.2", "2.21.0")
        assert "12 SLOWER" in out
        assert out.splitlines()[-1] == f"{other} is not there; --replace writes the new one"
        assert not Path(other).exists()
        assert self.called("--add", files=newer) == 4
        assert f"--add: there is no baseline {other}" in capsys.readouterr().err
        assert self.called("--replace", files=newer) == 0
        assert Path(other).exists()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another GPU": (lambda file: file["machine_info"]["gpu"].update(name="NVIDIA B200"), "of NVIDIA B200 (9.0), and"),
    "another kind of device": (lambda file: file["suite"].update(device="cpu"), "unknown CPU (cpu)"),
    "another schema": (lambda file: file["suite"].update(schema=SCHEMA + 1), f"has schema {SCHEMA + 1}, not {SCHEMA}"),
    "planted": (lambda file: file["suite"].update(planted=True), "work was planted in it"),
    "another TE": (
        lambda file: file["machine_info"]["versions"].update(transformer_engine="2.21"),
        "runs with transformer_engine 2.20.2 and 2.21",
    ),
    "no date": (lambda file: file.update(datetime=None), "'None' is not when a run was"),
    "ended early": (lambda file: file["suite"].update(not_run=3), "it was ended early, and 3 cases were not run"),
    "kernels of negative time": (
        lambda file: file["benchmarks"][0]["extra_info"].update(category_s={"copy": -1.0}),
        "-1.0 s of copy kernels is no time",
    ),
    "no suite": (lambda file: file.pop("suite"), "no top-level object 'suite'"),
    "a case twice": (lambda file: file["benchmarks"].append(file["benchmarks"][0]), f"case {FIRST} is there twice"),
    "no time": (lambda file: file["benchmarks"][0]["stats"].update(median=0.0), "median 0.0 s is no time"),
    "no cases": (lambda file: file["benchmarks"][0]["extra_info"].update(case="layer/a"), "is not the name of a case"),
    "a list": (lambda file: file.update(machine_info=[]), "not a usable results file"),
}


class TestRefusals:
    """What is no run of the same baseline."""

    @pytest.mark.parametrize("why", REFUSED)
    def test_what_does_not_belong_is_refused_in_one_line(self, why: str) -> None:
        """As a run, and as what runs are added to; the line says which one it is."""
        spoil, words = REFUSED[why]
        good, bad = runs(2)
        spoil(bad)
        with pytest.raises(ValueError, match=r"run 2|runs with") as error:
            pool([good, bad])
        assert words in str(error.value)
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match=r"baseline|runs with"):
            pool([good], onto=bad)

    def test_nothing_is_no_baseline(self) -> None:
        """Neither no run nor one without a time."""
        with pytest.raises(ValueError, match="no runs"):
            pool([])
        with pytest.raises(ValueError, match="no case has a time"):
            pool([results({})])

    def test_a_run_counts_once(self) -> None:
        """Given twice, or added to a baseline that has it, it would look as if nothing differed from run to run."""
        run = results(TIMES)
        with pytest.raises(ValueError, match="is there twice"):
            pool([run, run])
        with pytest.raises(ValueError, match="is there twice"):
            pool([run], onto=pool([run]))

    @pytest.mark.parametrize(
        ("entries", "words"),
        [
            ([], "has no runs"),
            ([{"run": 5, "median_s": 1.0, "host_median_s": None}], "its runs are"),
            ([{"run": 0, "median_s": 1.0, "host_median_s": None}] * 2, "its runs are"),
            ([{"run": 0, "median_s": math.inf, "host_median_s": None}], "is no time"),
            ([{"run": 0, "median_s": 1.0, "host_median_s": -1.0}], "is no time"),
            ([{"run": 0}], "not a usable results file"),
        ],
    )
    def test_runs_of_a_case_are_runs_of_the_file(self, entries: Any, words: str) -> None:
        """Each once, with a time."""
        baseline = pool(runs(2))
        baseline["benchmarks"][0]["extra_info"]["runs"] = entries
        with pytest.raises(ValueError, match=words):
            read(baseline, "b.json")


class TestReading:
    """A file as runs of cases."""

    def test_a_single_run_is_a_baseline_of_one(self) -> None:
        """With its own board, versions and controls."""
        found = read(results({FIRST: 2e-3}), "a.json")
        (run,) = found.runs
        assert (run.uuid, run.controls["gemm"]) == ("one", 7e-4)
        assert [(sample.run, sample.median_s) for sample in found.timed[FIRST].samples] == [(0, 2e-3)]

    def test_a_pooled_file_reads_back(self, tmp_path: Path) -> None:
        """Through JSON."""
        path = tmp_path / "b.json"
        path.write_text(json.dumps(pool(runs(4))))
        found = load(path)
        assert len(found.runs) == 4
        assert {len(one.samples) for one in found.timed.values()} == {4}
        assert median(one.median_s for one in found.timed[FIRST].samples) == pytest.approx(1e-3, rel=0.01)

    def test_what_one_of_several_runs_did_not_come_to_was_run(self) -> None:
        """If another one has its time; and if none has, it was not."""
        whole = together(
            [
                read(results({FIRST: 1e-3}, selected=[FIRST, SECOND, THIRD], not_run=2), "1"),
                read(results({FIRST: 2e-3, SECOND: 3e-3}, selected=[FIRST, SECOND, THIRD], not_run=1), "2"),
            ]
        )
        assert whole.not_run == 1

    def test_files_together_keep_runs_apart(self) -> None:
        """Runs are numbered through, and cases that were left out of one and selected in another were selected."""
        one = read(results({FIRST: 1e-3}, left_out=[SECOND, THIRD]), "1")
        two = read(results({FIRST: 2e-3, SECOND: 3e-3}), "2")
        whole = together([one, two])
        assert [sample.run for sample in whole.timed[FIRST].samples] == [0, 1]
        assert [sample.run for sample in whole.timed[SECOND].samples] == [1]
        assert whole.selected == frozenset({FIRST, SECOND})
        assert whole.left_out == {THIRD}

    def test_benchmarks_of_others_are_passed_over(self) -> None:
        """A file may hold more than the suite's."""
        file = results({FIRST: 1e-3})
        file["benchmarks"].append({"name": "somebody's", "stats": {"median": 0.0}, "extra_info": {}})
        assert list(read(file, "a").timed) == [FIRST]

    def test_a_case_s_name_has_its_axes(self) -> None:
        """By kind."""
        assert axes_of("gemm/tiny/bf16/rested/autocast/fprop/qkv")["linear"] == "qkv"
        with pytest.raises(ValueError, match="not the name of a case"):
            axes_of("gemm/tiny")


class TestFolders:
    """Where a machine's baselines lie."""

    def test_the_committed_baselines_lie_where_they_are_looked_for(self) -> None:
        """Each in the folder of its own machine."""
        files = sorted((ROOT / "benches" / "baselines").rglob("*.json"))
        assert files
        for file in files:
            machine = json.loads(file.read_text(encoding="utf-8"))["machine_info"]
            assert ROOT / folder(machine) == file.parent

    @pytest.mark.parametrize(
        ("machine", "path"),
        [
            (
                {"gpu": {"name": "NVIDIA GeForce RTX 4090", "compute_capability": "8.9"}},
                "benches/baselines/nvidia-geforce-rtx-4090-sm89",
            ),
            (
                {"gpu": {"name": "NVIDIA B300 SXM6 AC", "compute_capability": "10.3"}},
                "benches/baselines/nvidia-b300-sxm6-ac-sm103",
            ),
            ({"gpu": None, "cpu": {"brand_raw": "Intel(R) Xeon(R) Processor"}}, ".benchmarks/cpu-intel-xeon-processor"),
            ({"gpu": None}, ".benchmarks/cpu-unknown-cpu"),
        ],
    )
    def test_a_folder_is_named_after_the_machine(self, machine: Any, path: str) -> None:
        """A GPU's is kept with the sources, a CPU's is not."""
        assert folder(machine).as_posix() == path
