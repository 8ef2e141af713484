"""Rounds that were measured before arrive in pytest-benchmark's file as they were."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# An even and an odd number of rounds, one round, equal rounds; none a sum or difference of others.
ROUNDS = {
    "even": [0.25, 0.125, 0.5, 3.0],
    "odd": [1e-6, 1.1e-6, 0.9e-6, 1.7e-6, 1.0e-6],
    "one": [0.75],
    "equal": [0.001953125] * 30,
}

TESTS = f"""
import pytest
from benches.harness.replay import REPLAY

@pytest.mark.benchmark(timer=REPLAY)
@pytest.mark.parametrize("name", {list(ROUNDS)!r})
def test_replayed(benchmark, name):
    REPLAY.play(benchmark, {ROUNDS!r}[name])

@pytest.mark.benchmark(timer=REPLAY)
def test_twice_as_many_readings_as_rounds_and_no_more(benchmark):
    REPLAY.play(benchmark, [1.0, 2.0])
    with pytest.raises(IndexError):
        REPLAY(), REPLAY()
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of Python in a folder, with the suite importable."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, text=True, capture_output=True, timeout=60
    )


@pytest.fixture(scope="module")
def results_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pytest-benchmark wrote of a run that replays ROUNDS."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-json=results.json")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "results.json"


@pytest.fixture(scope="module")
def entries(results_file: Path) -> dict[str, Any]:
    """Benchmarks of the file by name."""
    return {entry["name"]: entry for entry in json.loads(results_file.read_text())["benchmarks"]}


@pytest.mark.parametrize("name", ROUNDS)
class TestFile:
    """pytest-benchmark's file"""

    def test_it_has_exactly_these_rounds(self, entries: dict[str, Any], name: str) -> None:
        """Every one, in their order, as one iteration each."""
        stats = entries[f"test_replayed[{name}]"]["stats"]
        assert stats["data"] == ROUNDS[name]
        assert (stats["rounds"], stats["iterations"]) == (len(ROUNDS[name]), 1)

    def test_its_statistics_are_those_of_the_rounds(self, entries: dict[str, Any], name: str) -> None:
        """Median, least and greatest."""
        stats, rounds = entries[f"test_replayed[{name}]"]["stats"], ROUNDS[name]
        expected = (statistics.median(rounds), min(rounds), max(rounds))
        assert (stats["median"], stats["min"], stats["max"]) == expected

    def test_it_says_that_the_timer_replayed(self, entries: dict[str, Any], name: str) -> None:
        """Nobody takes the times for those of a clock around the test."""
        assert entries[f"test_replayed[{name}]"]["options"]["timer"] == "measured_rounds"


def test_its_compare_command_reads_the_file(results_file: Path) -> None:
    """`pytest-benchmark compare` prints the replayed medians."""
    command = ("-m", "pytest_benchmark", "compare", results_file.name, "--columns=median,rounds", "--sort=name")
    done = run(results_file.parent, *command)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "test_replayed[one]" in line]
    assert len(lines) == 1
    assert "750" in lines[0], "0.75 s, printed in a unit of the table's choice"
