"""The journal: what was measured, line by line as it comes, so that a killed run loses only the case at hand.

Each line is a JSON object: `kind`, `content`, and `spent_s`, the seconds of the run until then as in a results file.
The first is the `header`, with what a results file has at its top; then come `evidence` (a key and what it says),
`control`, `not_measured` and `benchmark`, each as in a results file; an `end` is last unless the run was killed.
Imports neither torch nor pytest.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from benches.report.analysis import MALFORMED, SCHEMA

FOLDER = Path(".benchmarks")  # as pytest-benchmark's
PATTERN = "journal-[0-9]*-[0-9]*-[0-9]*.jsonl"
LATEST = 10  # journals that stay in FOLDER; one of a full run has a few MB
HEADER, END = "header", "end"
KINDS = {"evidence": "evidence", "control": "controls", "not_measured": "not_measured", "benchmark": "benchmarks"}


def suite_info(fixed: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """A results file's `suite`: what is known when the run begins, and what has come since then."""
    come = {benchmark["extra_info"]["case"] for benchmark in results["benchmarks"]}
    come |= {lost["case"] for lost in results["not_measured"]}
    return {
        **fixed,
        **{name: results[name] for name in ("not_measured", "evidence", "controls", "spent_s")},
        "not_run": sum(case not in come for case in fixed["selected"]),
    }


# --- writing ---------------------------------------------------------------------------------------------------


class Journal:
    """A file that is on the disk as soon as something is kept in it.

    `chosen` is where somebody wants it; else it is in FOLDER, where the latest few stay, and is deleted if the results
    turn out to be saved elsewhere. Where it cannot be written, all of it goes to the temporary folder. Raises nothing.
    """

    def __init__(self, header: Mapping[str, Any], results: Mapping[str, Any], chosen: Path | None = None) -> None:
        name = f"journal-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{os.getpid()}.jsonl"
        self.chosen = chosen
        self.troubles: dict[Path, str] = {}  # why it is not, or was not, where it should be
        self._header = header
        self._places = [chosen or FOLDER / name, Path(tempfile.gettempdir(), name)]
        self._made: list[Path] = []
        self._file: FileIO | None = None
        self._whole = False
        # Bytes that are whole, and how many of each kind they hold. Replaced at once when all is on the disk: whatever
        # ends a write before, a full disk or Ctrl-C, the next one repeats it in the same place.
        self._done: tuple[int, Mapping[str, int]] = (0, {})
        self.keep(results)

    @property
    def path(self) -> Path | None:
        """Where it is; None where it cannot be written."""
        return self._places[0] if self._whole else None

    @property
    def why(self) -> str:
        """In brackets, why it is not where it should be; else nothing."""
        reasons = "; ".join(f"{path}: {reason}" for path, reason in self.troubles.items())
        return reasons and f" ({reasons})"

    def keep(self, results: Mapping[str, Any], ended: bool = False) -> None:
        """Write what is new in `results`: its `benchmarks`, `not_measured`, `evidence` and `controls` only grow."""
        for _ in list(self._places):
            try:
                self._write(results, ended)
            except OSError as error:
                self._leave(error)
            else:
                self._whole = True
                return
        self._whole = False  # until the last place can be written again

    def close(self, results: Mapping[str, Any], wanted: bool) -> None:
        """Write the last lines. A file that nobody chose goes where it is not `wanted`."""
        self.keep(results, ended=True)
        self._close()
        for path in () if wanted or self.chosen else self._made:
            with suppress(OSError):
                path.unlink()

    def _write(self, results: Mapping[str, Any], ended: bool) -> None:
        length, done = self._done
        lines = list(_lines(results, done))
        if not length:
            lines.insert(0, {"kind": HEADER, "content": self._header})
        if ended:
            missing = suite_info(self._header["suite"], results)["not_run"]
            lines.append({"kind": END, "content": {"not_run": missing}})
        if not lines:
            return
        text = "".join(json.dumps({**line, "spent_s": results["spent_s"]}, default=repr) + "\n" for line in lines)
        file = self._file = self._file or self._open(self._places[0])
        if file.seek(0, os.SEEK_END) > length:
            file.truncate(length)
        file.seek(length)
        rest = memoryview(text.encode())
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())  # 0.3 ms on a local disk, between two cases: then not even a power cut loses the line
        self._done = (length + len(text), {kind: len(results[place]) for kind, place in KINDS.items()})

    def _open(self, place: Path) -> FileIO:
        if place == self.chosen:
            return FileIO(place, "w")
        place.parent.mkdir(exist_ok=True)
        file = FileIO(place, "x")  # not through a link that somebody left in a folder of everybody
        self._made.append(place)
        if place.parent == FOLDER:
            _delete_old()
        return file

    def _leave(self, error: OSError) -> None:
        """Begin anew in the next place, if there is one."""
        self.troubles[self._places[0]] = error.strerror or str(error)
        if len(self._places) > 1:
            self._close()
            self._done = (0, {})
            del self._places[0]

    def _close(self) -> None:
        if self._file:
            with suppress(OSError):
                self._file.close()
        self._file = None


def _lines(results: Mapping[str, Any], done: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for kind, place in KINDS.items():
        found = results[place]
        for content in list(found.items() if isinstance(found, Mapping) else found)[done.get(kind, 0) :]:
            yield {"kind": kind, "content": content}


def _delete_old() -> None:
    """All but the latest, by the time in their names; those of killed runs among them."""
    for path in sorted(FOLDER.glob(PATTERN))[:-LATEST]:
        with suppress(OSError):
            path.unlink()


# --- reading ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovered:
    """What a journal holds: `results` as a results file, and whether the run came to its end.

    `torn` is the number of the last line if that was not finished, and is therefore left out.
    """

    results: dict[str, Any]
    ended: bool
    torn: int | None


def read(text: str) -> Recovered:
    """A journal's text as a results file, of which `datetime` is when the last line was written.

    Raises ValueError, in one line, for what is no journal, has another schema, holds more than one run, or is damaged
    elsewhere than at its end.
    """
    ((_, header), *entries), torn = _entries(text)
    found: dict[str, list[Any]] = {place: [] for place in KINDS.values()}
    for number, (kind, line) in enumerate(entries, 2):
        if kind == HEADER:
            raise ValueError(f"line {number}: a second header: this file holds more than one run")
        if kind in KINDS:
            found[KINDS[kind]].append(line["content"])
        elif kind != END:
            raise ValueError(f"line {number}: unknown kind {kind!r}; known: {', '.join((HEADER, *KINDS, END))}")
    last = entries[-1][1] if entries else header
    try:
        return Recovered(_results(header, found, last["spent_s"]), END in dict(entries), torn)
    except MALFORMED as error:
        raise ValueError(f"no usable journal ({type(error).__name__}: {error})") from None


def _results(header: Mapping[str, Any], found: dict[str, Any], spent_s: Mapping[str, float]) -> dict[str, Any]:
    top = header["content"]
    found = {**found, "evidence": dict(found["evidence"]), "spent_s": spent_s}
    written = datetime.fromisoformat(top["datetime"]) + timedelta(seconds=spent_s["all"] - header["spent_s"]["all"])
    return {
        "machine_info": top["machine_info"],
        "commit_info": top["commit_info"],
        "benchmarks": found["benchmarks"],
        "datetime": written.isoformat(),
        "version": top["version"],
        "suite": suite_info(top["suite"], found),
    }


def _entries(text: str) -> tuple[list[tuple[str, dict[str, Any]]], int | None]:
    """Kind and line of each, a header first; and the number of the last one if it was not finished."""
    if not text:
        raise ValueError("is empty")
    *whole, rest = text.split("\n")
    entries = [_header(whole[0] if whole else rest)]
    for number, line in enumerate(whole[1:], 2):
        try:
            entries.append(_entry(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if whole and rest:
        try:
            entries.append(_entry(rest))
        except ValueError:
            return entries, len(whole) + 1
    return entries, None


def _header(line: str) -> tuple[str, dict[str, Any]]:
    try:
        kind, found = _entry(line)
        schema = found["content"]["suite"]["schema"] if kind == HEADER else None
    except (ValueError, *MALFORMED):
        schema = None
    if schema is None:
        raise ValueError("is no journal: its first line is no header")
    if schema != SCHEMA:
        raise ValueError(f"has schema {schema!r}; this suite reads schema {SCHEMA}")
    return kind, found


def _entry(line: str) -> tuple[str, dict[str, Any]]:
    try:
        found = json.loads(line, parse_constant=_refuse, parse_float=_finite)
    except json.JSONDecodeError:
        raise ValueError("is not JSON") from None
    if not isinstance(found, dict) or not {"kind", "content", "spent_s"} <= found.keys():
        raise ValueError("lacks kind, content or spent_s")
    return str(found["kind"]), found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of a results file")


def _finite(number: str) -> float:
    return float(number) if math.isfinite(float(number)) else _refuse(number)
