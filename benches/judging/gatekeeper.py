"""The gate in pytest: `--benchmark-compare` judges the run against a baseline, and suspects are measured again.

pytest-benchmark finds and loads the file; this module only chooses one where none is named, and judges.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benches.harness import device as devices
from benches.harness.medians import median
from benches.harness.safety import file_storage
from benches.harness.workbench import Workbench, in_one_line
from benches.judging.baselines import Results, read, read_json, stored, together
from benches.report.analysis import MALFORMED
from benches.report.refusals import in_words
from shapes.cases import KINDS

if TYPE_CHECKING:
    from benches.judging.judge import Outcome

PAUSE_S = 0.5  # before a suspect is measured again
AGAIN = 2  # further measurements of a suspect: two of three decide
MOST_SUSPECTS = 40  # where more are slower, it is not the noise of one measurement
NUMBERS = ("min", "max", "mean", "stddev", "median", "iqr", "q1", "q3", "ops", "rounds")  # that pytest-benchmark shows


def choose_baseline(config: pytest.Config, device: str) -> None:
    """Where `--benchmark-compare` names nothing, have pytest-benchmark compare with this machine's stored baseline.

    Without one it takes the latest of the runs that it saved, as always.
    """
    if config.getoption("benchmark_compare") is not True:
        return
    if device == "cuda":
        machine: dict[str, Any] = {"gpu": devices.gpu_model()}
    else:
        import cpuinfo  # pytest-benchmark asks it too

        machine = {"gpu": None, "cpu": cpuinfo.get_cpu_info()}
    if (device == "cpu" or machine["gpu"]) and (path := stored(machine, config.rootpath)):
        config.option.benchmark_compare = str(path)


class Gatekeeper:
    """What a run is judged against, how its suspects are measured again, and what was found."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.builders: dict[str, Callable[[], Any]] = {}  # of what cases share, by the key of its evidence
        self.outcome: Outcome | None = None
        self.notes: list[str] = []
        self._baselines: list[Results] = []

    @property
    def judges(self) -> bool:
        """Whether there is something to judge against."""
        return bool(self._baselines)

    def load(self, config: pytest.Config) -> None:
        """What --benchmark-compare asks for, before pytest-benchmark, which passes over a file that it cannot read.

        Raises pytest.UsageError, in one line, where there is nothing, or something that cannot be compared with.
        """
        asked, storage = config.getoption("benchmark_compare"), file_storage(config)
        if not asked or storage is None:
            return
        try:
            found = storage.query("[0-9][0-9][0-9][0-9]_")[-1:] if asked is True else storage.query(asked)
        except (OSError, ValueError):  # neither a file nor a pattern
            found = []
        written = config.getoption("benchmark_json")
        for path in found:
            if isinstance(written, Path) and written.exists() and written.samefile(path):
                raise pytest.UsageError(f"--benchmark-json={written}: --benchmark-compare reads the same file")
            try:
                raw, name = read_json(path), short_name(path, config.rootpath)
                self.add(raw, name)
                _check_comparable(raw, name)
            except ValueError as error:
                raise pytest.UsageError(f"--benchmark-compare: {error}") from None
        self.check_found(asked)

    def add(self, raw: Mapping[str, Any], name: str) -> None:
        """Judge against this file too. Raises pytest.UsageError, in one line, where that cannot be."""
        if not importlib.util.find_spec("scipy"):
            raise pytest.UsageError("--benchmark-compare: the gate needs scipy (pip install scipy)")
        try:
            baseline = read(raw, name)
            _check_evidence(baseline)
        except ValueError as error:
            raise pytest.UsageError(f"--benchmark-compare: {error}") from None
        self._baselines.append(baseline)

    def check_found(self, asked: str | bool | None) -> None:
        """Raise pytest.UsageError where what --benchmark-compare asked for, by name or not, is not there."""
        if not asked or self.judges:
            return
        if asked is True:
            nothing = "no baseline of this machine is stored, and no run is saved"
            raise pytest.UsageError(f"--benchmark-compare: {nothing}: name a file, or `nox -s baseline` makes one")
        raise pytest.UsageError(f"--benchmark-compare={asked}: there is no such file, and no saved run of that name")

    def check(self, results: Mapping[str, Any]) -> None:
        """Before anything is measured: raise pytest.UsageError where the baseline is of another machine."""
        if not self.judges:
            return
        now = read(_dated(results), "this run")
        try:
            before = together(self._baselines)
        except ValueError as error:
            raise pytest.UsageError(f"--benchmark-compare: {error}") from None
        if before.machine != now.machine:
            what = f"{self._baselines[0].name} is of {before.machine}, and this is {now.machine}"
            raise pytest.UsageError(f"--benchmark-compare: {what}")

    def judge(self, results: Mapping[str, Any]) -> None:
        """Judge what was measured, which becomes `outcome`; where that cannot be, a note says why."""
        from benches.judging.judge import judge

        self.outcome = None
        try:
            self.outcome = judge(together(self._baselines), read(_dated(results), "this run"))
        except Exception as error:  # a file can be spoiled in many ways, and what was measured is still to be saved
            self.notes.append(f"not judged: {in_words(error)}")

    def measure_again(self, results: Mapping[str, Any], workbench: Workbench, rest: Callable[[], None]) -> None:
        """Measure cases that seem slower twice more, after a pause and with new tensors, into their `again_s`.

        `rest` pauses. What cannot be measured again stays as it is, with a note.
        """
        self.judge(results)
        slower = (
            {finding.case for finding in self.outcome.findings if finding.verdict == "SLOWER"} if self.outcome else {}
        )
        entries = [entry["extra_info"] for entry in results["benchmarks"] if entry["extra_info"]["case"] in slower]
        if len(entries) > MOST_SUSPECTS:
            self.notes.append(f"{len(entries)} cases seem slower: too many to measure them again")
            return
        for key in dict.fromkeys(extra["evidence"] for extra in entries):
            for number in range(AGAIN):
                rest()
                self._again(key, number, [extra for extra in entries if extra["evidence"] == key], workbench)

    def _again(self, key: str, number: int, entries: list[dict[str, Any]], workbench: Workbench) -> None:
        try:
            source = workbench.get(("again", key, number), self.builders[key])
            for extra in entries:
                kind = KINDS[extra["kind"]]
                figure = source.figure(kind(**{axis: extra[axis] for axis in kind.axes}))
                extra.setdefault("again_s", []).append(median(figure.samples_s))
        except (Exception, pytest.fail.Exception) as error:  # out of memory, for instance
            self.notes.append(f"{key} could not be measured again: {in_one_line(error)}")

    def exit_code(self) -> int:
        """1 where the run does not pass: a case is slower or missing, or it could not be judged."""
        if not self.judges:
            return 0
        return self.outcome.exit_code(self.strict) if self.outcome else 1

    def report(self) -> str:
        """The verdicts, and what else is to be said."""
        from benches.report.verdicts import render

        lines = [render(self.outcome, self.strict)] if self.outcome else []
        return "\n".join([*lines, *(f"gate: {note}" for note in dict.fromkeys(self.notes))])


def _dated(results: Mapping[str, Any]) -> dict[str, Any]:
    return {"datetime": datetime.now(timezone.utc).isoformat(), **results}


def _check_evidence(baseline: Results) -> None:
    """Raise ValueError where the gate would make no sense of what ran, after all has been measured."""
    from benches.judging.differences import parts_of

    try:
        for timed in baseline.timed.values():
            parts_of(timed)
    except (ValueError, *MALFORMED) as error:
        raise ValueError(f"{baseline.name}: {in_words(error)}") from None


def _check_comparable(raw: Mapping[str, Any], name: str) -> None:
    """Raise ValueError where pytest-benchmark would fail to compare, after all has been measured."""
    for benchmark in raw["benchmarks"]:
        numbers = [(benchmark.get("stats") or {}).get(field) for field in NUMBERS]
        if not isinstance(benchmark.get("fullname"), str) or any(type(one) not in (int, float) for one in numbers):
            raise ValueError(f"{name}: {benchmark.get('name')} has no full name, or lacks one of {', '.join(NUMBERS)}")


def short_name(path: Path, root: Path) -> str:
    """A path as short as it can be said."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
