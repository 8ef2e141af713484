"""What was measured outlives the run, whatever ends it; a journal becomes the file that the run would have saved."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benches.harness import journal
from benches.harness.journal import Journal, read
from benches.journal import main
from benches.report.analysis import SCHEMA
from correctness.suite.test_options import PLUGINS
from correctness.suite.test_results_schema import make_gpu_file, problems

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")


# --- journals of simulated GPUs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_file() -> Any:
    """A results file with every kind of line; to be left as it is."""
    with pytest.MonkeyPatch.context() as patch:
        return make_gpu_file(patch)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the tests are: a new folder, with one for temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def come(gpu_file: Any, cases: int | None = None) -> dict[str, Any]:
    """What a run has after so many measured cases, or at its end."""
    suite = gpu_file["suite"]
    found = {name: suite[name] for name in ("evidence", "controls", "not_measured")}
    if cases is not None:
        found |= {"controls": suite["controls"][:cases], "not_measured": []}
    measured = gpu_file["benchmarks"][:cases]
    used = {benchmark["extra_info"]["evidence"] for benchmark in measured}
    found["evidence"] = {key: value for key, value in suite["evidence"].items() if key in used}
    return {**found, "benchmarks": measured, "spent_s": {"all": 10.0 + (cases or 0)}}


def header(gpu_file: Any) -> dict[str, Any]:
    """What is known when the run begins."""
    grown = {"evidence", "controls", "not_measured", "spent_s", "not_run"}
    fixed = {name: value for name, value in gpu_file["suite"].items() if name not in grown}
    return {**{name: value for name, value in gpu_file.items() if name != "benchmarks"}, "suite": fixed}


@pytest.fixture
def text(gpu_file: Any) -> str:
    """The journal of a run that came to its end."""
    kept = Journal(header(gpu_file), come(gpu_file, 0), Path("whole.jsonl"))
    for cases in range(1, len(gpu_file["benchmarks"])):
        kept.keep(come(gpu_file, cases))
    kept.close(come(gpu_file), wanted=True)
    return Path("whole.jsonl").read_text()


class TestWriting:
    """A file that grows."""

    def test_a_run_that_ended_gives_the_file_that_it_would_have_saved(self, gpu_file: Any, text: str) -> None:
        """Whatever came in between; but for the seconds spent, and when it was written."""
        recovered = read(text)
        assert (recovered.ended, recovered.torn) == (True, None)
        suite = recovered.results["suite"] | {"spent_s": gpu_file["suite"]["spent_s"]}
        assert recovered.results | {"suite": suite} == json.loads(json.dumps(gpu_file))
        assert problems(json.dumps(recovered.results)) == []

    def test_each_line_says_what_it_is_and_when(self, text: str) -> None:
        """A case comes after its evidence."""
        lines = [json.loads(line) for line in text.splitlines()]
        kinds = [line["kind"] for line in lines]
        assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("header", "end", set(journal.KINDS))
        assert lines[-1]["content"] == {"not_run": read(text).results["suite"]["not_run"]}
        seen = set()
        for line in lines:
            assert line["spent_s"]["all"] >= 10.0
            if line["kind"] == "evidence":
                seen.add(line["content"][0])
            elif line["kind"] == "benchmark":
                assert line["content"]["extra_info"]["evidence"] in seen

    def test_wherever_it_is_cut_the_cases_before_are_there(self, gpu_file: Any, text: str) -> None:
        """As by a power cut: at every end of a line, next to it, and in between."""
        ends = [place for place, letter in enumerate(text) if letter == "\n"]
        cases = [end for end, line in zip(ends, text.splitlines(), strict=True) if '"kind": "benchmark"' in line]
        measured = json.loads(json.dumps(gpu_file["benchmarks"]))
        for cut in sorted({end + near for end in ends[1:] for near in (-1, 0, 1)} | {*range(ends[0], len(text), 997)}):
            found = read(text[:cut])
            assert found.results["benchmarks"] == measured[: sum(end <= cut for end in cases)]
            assert found.torn == (None if {cut, cut - 1} & set(ends) else text[:cut].count("\n") + 1)

    def test_what_was_interrupted_is_written_again_in_its_place(
        self, gpu_file: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C between two lines of a case: no line is twice, and none is half."""
        kept = Journal(header(gpu_file), come(gpu_file, 0), Path("kept.jsonl"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", interrupt)
            with pytest.raises(KeyboardInterrupt):
                kept.keep(come(gpu_file, 2))
        kept.close(come(gpu_file, 1), wanted=True)  # shorter than what is there
        found = read(Path("kept.jsonl").read_text())
        assert len(found.results["benchmarks"]) == len(found.results["suite"]["controls"]) == 1
        assert found.ended

    def test_nothing_new_is_nothing_written(self, gpu_file: Any) -> None:
        """Each case asks three times."""
        kept = Journal(header(gpu_file), come(gpu_file, 1), Path("kept.jsonl"))
        before = Path("kept.jsonl").read_bytes()
        kept.keep(come(gpu_file, 1))
        assert Path("kept.jsonl").read_bytes() == before
        kept.close(come(gpu_file, 1), wanted=True)


def interrupt(_: int) -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


class TestPlaces:
    """Where journals are."""

    def test_it_is_in_a_folder_of_the_working_directory(self, gpu_file: Any) -> None:
        """And is deleted if nobody wants it."""
        for wanted in (True, False):
            kept = Journal(header(gpu_file), come(gpu_file, 1))
            assert kept.path is not None
            assert kept.path.parent == Path(".benchmarks")
            assert kept.path.is_file()
            kept.close(come(gpu_file), wanted)
            assert kept.path.is_file() == wanted
            kept.path.unlink(missing_ok=True)

    def test_a_chosen_one_stays(self, gpu_file: Any) -> None:
        """Also if the results were saved, and in a file that mktemp made."""
        Path("chosen").touch()
        Journal(header(gpu_file), come(gpu_file, 1), Path("chosen")).close(come(gpu_file), wanted=False)
        assert read(Path("chosen").read_text()).ended

    def test_old_ones_do_not_pile_up(self, gpu_file: Any) -> None:
        """The latest stay; other files are left alone."""
        Path(".benchmarks").mkdir()
        old = [Path(f".benchmarks/journal-202611{day}-120000-7.jsonl") for day in range(10, 25)]
        others = [Path(".benchmarks/journal-of-mine.jsonl"), Path(".benchmarks/0001_before.json")]
        for path in (*old, *others):
            path.touch()
        kept = Journal(header(gpu_file), come(gpu_file, 1))
        kept.close(come(gpu_file), wanted=True)
        assert set(Path(".benchmarks").iterdir()) == {*others, *old[-journal.LATEST + 1 :], kept.path}

    def test_where_it_cannot_be_written_all_of_it_is_in_the_temporary_folder(self, gpu_file: Any) -> None:
        """A file is where the folder should be: nothing is raised, and the reason can be told."""
        Path(".benchmarks").touch()
        kept = Journal(header(gpu_file), come(gpu_file, 1))
        kept.close(come(gpu_file), wanted=True)
        assert kept.path is not None
        assert kept.path.parent == Path("temporary").absolute()
        assert kept.why.startswith(f" (.benchmarks/{kept.path.name}: ")
        assert len(read(kept.path.read_text()).results["benchmarks"]) == len(gpu_file["benchmarks"])

    def test_a_disk_that_fills_up_loses_nothing(self, gpu_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Half way: what was there before is in the other place too; that one, full for a while, is used again."""
        disk: list[str] = []

        def fsync(number: int) -> None:
            name = os.readlink(f"/proc/self/fd/{number}")
            if any(part in name for part in disk):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fsync)
        kept = Journal(header(gpu_file), come(gpu_file, 1))
        first = kept.path
        disk += [".benchmarks"]
        kept.keep(come(gpu_file, 2))
        second = kept.path
        assert second != first
        disk += ["temporary"]
        kept.keep(come(gpu_file, 3))
        assert kept.path is None
        assert kept.why == f" ({first}: No space left on device; {second}: No space left on device)"
        disk.clear()
        kept.close(come(gpu_file), wanted=True)
        assert kept.path
        assert kept.path == second
        assert read(kept.path.read_text()).results["benchmarks"] == json.loads(json.dumps(gpu_file["benchmarks"]))


# --- python -m benches.journal ---------------------------------------------------------------------------------


def lines_of(text: str) -> list[Any]:
    """Its lines, parsed."""
    return [json.loads(line) for line in text.splitlines()]


def as_text(lines: list[Any]) -> str:
    """The reverse."""
    return "".join(json.dumps(line) + "\n" for line in lines)


def changed(place: int, **values: Any) -> Callable[[str], str]:
    """A journal, one of whose lines has other values."""

    def change(text: str) -> str:
        lines = lines_of(text)
        lines[place] |= values
        return as_text(lines)

    return change


def of_another_schema(text: str) -> str:
    """As an older suite wrote it."""
    return text.replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA - 1}', 1)


def with_a_case_twice(text: str) -> str:
    """Its first case."""
    lines = lines_of(text)
    return as_text([*lines, *[line for line in lines if line["kind"] == "benchmark"][:1]])


REFUSED: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda _: "", "is empty"),
    "a letter": (lambda _: "Dear Sir,\n", "is no journal: its first line is no header"),
    "a number": (lambda _: "7\n", "is no journal: its first line is no header"),
    "binary": (lambda _: "\x00\x01\n" * 9, "is no journal: its first line is no header"),
    "a results file": (lambda text: json.dumps(read(text).results), "is no journal: its first line is no header"),
    "an indented one": (
        lambda text: json.dumps(read(text).results, indent=4),
        "is no journal: its first line is no header",
    ),
    "no header": (lambda text: text[text.index("\n") + 1 :], "is no journal: its first line is no header"),
    "half a header": (lambda text: text[:300], "is no journal: its first line is no header"),
    "another schema": (of_another_schema, f"has schema {SCHEMA - 1}; this suite reads schema {SCHEMA}"),
    "two runs": (lambda text: text + text, "a second header: this file holds more than one run"),
    "an unknown kind": (
        changed(3, kind="verdict"),
        "line 4: unknown kind 'verdict'; known: header, evidence, control,",
    ),
    "NaN": (changed(3, content=float("nan")), "line 4: NaN is no number of a results file"),
    "infinity": (lambda text: text + '{"kind": "control", "content": -1e999, "spent_s": {}}\n', "-1e999 is no number"),
    "a damaged line": (lambda text: text.replace('{"kind": "control"', '{"kind": "con', 1), "is not JSON"),
    "an empty line": (lambda text: text.replace("\n", "\n\n", 1), "line 2: is not JSON"),
    "no content": (
        lambda text: text.replace('"content": {"not_run"', '"contents": {"not_run"', 1),
        "lacks kind, content",
    ),
    "evidence of nothing": (changed(1, kind="evidence", content=7), "no usable journal (TypeError: "),
    "a case without a name": (
        changed(-2, kind="benchmark", content={"extra_info": {}}),
        "no usable journal (KeyError: ",
    ),
    "a time without a zone": (lambda text: text.replace("12:00:00+00:00", "noon", 1), "Invalid isoformat string"),
    "a case twice": (with_a_case_twice, "is there twice"),
}


class TestCommand:
    """`python -m benches.journal`."""

    @pytest.mark.parametrize("change", REFUSED)
    def test_what_is_no_journal_is_refused_in_one_line(
        self, change: str, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Exit code 4, and no file."""
        spoil, words = REFUSED[change]
        Path("spoilt.jsonl").write_text(spoil(text), encoding="latin-1")
        assert main(["spoilt.jsonl", "-o", "out.json"]) == pytest.ExitCode.USAGE_ERROR
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert line.startswith("spoilt.jsonl: ")
        assert words in line
        assert printed.out == ""
        assert not Path("out.json").exists()

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda text: text.replace(b'"selected"', b'"sel\xffcted"', 1), "is not text, or damaged"),
            (lambda text: text.replace(b'"median_s": ', b'"median_s": -', 1), "is no time"),
        ],
    )
    def test_a_journal_that_is_damaged_makes_no_file(
        self, damage: Callable[[bytes], bytes], words: str, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What the gate would refuse is refused here."""
        assert damage(text.encode()) != text.encode()
        Path("damaged.jsonl").write_bytes(damage(text.encode()))
        assert main(["damaged.jsonl", "-o", "out.json"]) == pytest.ExitCode.USAGE_ERROR
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
        assert not Path("out.json").exists()

    @pytest.mark.parametrize(
        ("source", "target", "said"),
        [
            ("gone.jsonl", "out.json", "gone.jsonl: No such file or directory"),
            ("temporary", "out.json", "temporary: Is a directory"),
            ("whole.jsonl", "gone/out.json", "gone/out.json: No such file or directory"),
            ("whole.jsonl", "temporary", "temporary: Is a directory"),
            ("whole.jsonl", "./whole.jsonl", "whole.jsonl: is one of the files that are read"),
            pytest.param(
                "whole.jsonl",
                str(FULL),
                "/dev/full: No space left on device",
                marks=pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full"),
            ),
        ],
    )
    def test_files_that_cannot_be_used_are_one_line(
        self, source: str, target: str, said: str, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Exit code 4; the journal is as it was."""
        assert main([source, "-o", target]) == pytest.ExitCode.USAGE_ERROR
        assert capsys.readouterr() == ("", f"{said}\n")
        assert Path("whole.jsonl").read_text() == text

    def test_it_says_what_the_file_has_and_what_is_lost(self, text: str, capsys: pytest.CaptureFixture[str]) -> None:
        """Of a run that ended, and of one that was killed while it wrote."""
        end = len(text) - 1
        for cut, more in ((end + 1, ""), (text.rindex("\n", 0, end) - 9, "; the run was killed; line ")):
            Path("cut.jsonl").write_text(text[:cut])
            assert main(["cut.jsonl", "-o", "out.json"]) == 0
            out = capsys.readouterr().out
            found = json.loads(Path("out.json").read_text())
            counts = f"{len(found['benchmarks'])} measured, 1 skipped, 1 failed, {found['suite']['not_run']} not run"
            assert out.startswith(f"out.json: {counts}{more}")
            assert out.endswith(", not finished, is left out\n" if more else " not run\n")

    def test_it_needs_neither_torch_nor_pytest(self, text: str) -> None:
        """It may run where nothing of the suite is installed."""
        script = (
            "import sys\nfrom benches.journal import main\n"
            f"code = main([{str(Path('whole.jsonl').absolute())!r}, '-o', {str(Path('out.json').absolute())!r}])\n"
            "names = {name.partition('.')[0] for name in sys.modules}\n"
            "print(code, names & {'torch', 'numpy', 'pytest', 'pytest_benchmark', 'rich'})\n"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, timeout=60)
        assert (done.stdout.splitlines()[-1], done.stderr) == ("0 set()", "")


# --- real runs -------------------------------------------------------------------------------------------------

QUICK = ("--device=cpu", "--model=tiny", "--stage=torch_sdpa", "--recipe=bf16", "--benchmark-max-time=0.02")


def command(*options: str) -> list[str]:
    """A run of the three passes of a layer, from any folder."""
    start = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pytest.ini"), *PLUGINS]
    return [*start, str(ROOT / "benches" / "bench_layers.py"), *QUICK, *options]


def run(*options: str, plugin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """It, with a plugin of this source, in the working directory."""
    Path("broken.py").write_text(plugin)
    return subprocess.run(
        command("-p", "broken", *options),
        env=os.environ | {"PYTHONPATH": os.getcwd(), "COLUMNS": "200", **environment},
        text=True,
        capture_output=True,
        timeout=120,
    )


WATCHING = """
from benches.harness.journal import Journal
from benches.harness.stopwatch import CpuStopwatch

time, write, inside = CpuStopwatch.time, Journal._write, []

def watched(*arguments):
    inside.append(True)
    try:
        return time(*arguments)
    finally:
        inside.clear()

def written(*arguments):
    assert not inside, "the journal was written while something was measured"
    return write(*arguments)

CpuStopwatch.time, Journal._write = watched, written
"""


def test_the_journal_of_a_run_is_as_the_file_that_it_saved(capsys: pytest.CaptureFixture[str]) -> None:
    """Case by case; and everyone who reads such files reads it. No line is written while something is measured."""
    done = run("--benchmark-json=saved.json", "--journal=kept.jsonl", plugin=WATCHING)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "journal: kept.jsonl\n" in done.stdout
    assert "not saved" not in done.stdout
    assert main(["kept.jsonl", "-o", "made.json"]) == 0
    assert capsys.readouterr().out == "made.json: 3 measured, 0 not run\n"
    saved, made = (json.loads(Path(name).read_text()) for name in ("saved.json", "made.json"))
    own = ("datetime", "suite")
    assert {name: made[name] for name in made if name not in own} == {
        name: saved[name] for name in saved if name not in own
    }
    assert {name: made["suite"][name] for name in made["suite"] if name != "spent_s"} == {
        name: saved["suite"][name] for name in saved["suite"] if name != "spent_s"
    }
    assert made["suite"]["selected"] == [entry["extra_info"]["case"] for entry in made["benchmarks"]]
    assert problems(Path("made.json").read_text()) == []
    for reader in (["-m", "benches.report"], ["-m", "pytest_benchmark", "compare"]):
        read_it = [sys.executable, *reader, str(Path("made.json").absolute())]
        done = subprocess.run(read_it, cwd=ROOT, text=True, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "forward_backward" in done.stdout.replace("forward_\n", "forward_")


def test_a_killed_run_loses_at_most_the_case_at_hand() -> None:
    """SIGKILL while the fourth of six cases is measured."""
    options = ("--stage=torch", "--benchmark-max-time=2", "-v")
    passed = 0
    with subprocess.Popen(command(*options), text=True, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            passed += "PASSED" in line
            if passed == 3:
                break
        killed.send_signal(signal.SIGKILL)
        passed += killed.stdout.read().count("PASSED")
    assert killed.returncode == -signal.SIGKILL
    (path,) = Path(".benchmarks").glob(journal.PATTERN)
    recovered = read(path.read_text())
    suite = recovered.results["suite"]
    measured = [entry["extra_info"]["case"] for entry in recovered.results["benchmarks"]]
    assert measured == suite["selected"][: len(measured)]
    assert passed <= len(measured) <= passed + 1
    assert suite["not_run"] == 6 - len(measured) >= 2
    assert not recovered.ended
    assert problems(json.dumps(recovered.results)) == []


BROKEN = """
def pytest_runtest_logreport(report):
    if report.when == "teardown" and "sustained-backward" in report.nodeid:
        raise RuntimeError("a plugin is broken")
"""


def test_a_hook_that_raises_leaves_the_journal_and_its_name() -> None:
    """pytest prints no summary then."""
    done = run(plugin=BROKEN)
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR
    (path,) = Path(".benchmarks").glob(journal.PATTERN)
    assert f"not saved: `python -m benches.journal {path} -o RESULTS.json` makes a results file of it" in done.stdout
    recovered = read(path.read_text())
    assert [entry["extra_info"]["pass_name"] for entry in recovered.results["benchmarks"]] == ["forward", "backward"]
    assert recovered.results["suite"]["not_run"] == 1
    assert recovered.ended


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        pytest.param(["--benchmark-disable"], {}, id="disabled"),
        pytest.param([], {"PYTEST_XDIST_WORKER": "gw0"}, id="a worker of pytest-xdist"),
        pytest.param(["--collect-only"], {}, id="nothing runs"),
    ],
)
def test_where_nothing_is_measured_there_is_no_journal(options: list[str], environment: dict[str, str]) -> None:
    """Nor a word of it."""
    done = run("--journal=none.jsonl", *options, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "journal" not in done.stdout.replace("--journal=none.jsonl", "")
    assert not Path("none.jsonl").exists()
    assert not list(Path(".benchmarks").glob("journal*"))


@pytest.fixture
def used() -> Iterator[None]:
    """A file that holds something."""
    Path("used.jsonl").write_text("{}\n")
    yield
    assert Path("used.jsonl").read_text() == "{}\n"


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--journal=used.jsonl"], "used.jsonl: is not empty; a journal overwrites nothing"),
        (["--journal=gone/it.jsonl"], "gone/it.jsonl: there is no folder gone"),
        (["--journal=temporary"], "temporary: is a folder"),
        (["--journal=it.json", "--benchmark-json=it.json"], "it.json: --benchmark-json writes to the same file"),
    ],
)
def test_a_place_that_cannot_be_is_refused_before_anything_runs(options: list[str], said: str) -> None:
    """One line, exit code 4."""
    done = run(*options, "--collect-only")
    assert (done.returncode, done.stdout) == (pytest.ExitCode.USAGE_ERROR, "")
    assert done.stderr.strip() == f"ERROR: --journal={said}"
