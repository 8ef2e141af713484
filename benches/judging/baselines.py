"""Results files as runs of their cases: read, pooled into a baseline, and where the baselines of a machine lie.

A baseline is a results file that pools runs of fresh processes: `suite.runs` says when, on which board and with what
each of them ran, `extra_info.runs` of a case what it took in each. A file without them is one run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime as Moment
from datetime import timezone
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import Any, NoReturn

from packaging.version import InvalidVersion, Version  # pytest has it too

from benches.harness.medians import median_interval
from benches.report.analysis import MALFORMED, launches_of, suite_of
from shapes.cases import KINDS

AXES = {name: kind.axes for name, kind in KINDS.items()}
# Runs go together that have one version of what runs on the device. Drivers come with the hosts; numpy times nothing.
PINNED = ("torch", "transformer_engine", "cuda_runtime", "cublas", "cudnn")
CONTROLS = ("gemm", "fp8_gemm", "copy", "short_kernels", "python")  # others are of another version of this suite
HOST_CONTROL = "python"
NEVER = Moment.min.replace(tzinfo=timezone.utc)  # before any run
OF_THE_RUNS = ("runs", "selected", "left_out")  # of a suite: what a pooled file has of its own, or not at all


@dataclass(frozen=True)
class Machine:
    """What times can be compared on: `cuda` or `cpu`, the model of GPU or CPU, and the GPU's compute capability."""

    device: str
    model: str
    compute_capability: str = ""

    def __str__(self) -> str:
        return f"{self.model} ({self.compute_capability or self.device})"


@dataclass(frozen=True)
class Run:
    """A process that measured: when, on which board, with what. `controls` are their seconds by name."""

    datetime: str
    uuid: str | None
    driver: str | None
    versions: Mapping[str, str]
    sources: str | None
    controls: Mapping[str, float]

    @property
    def when(self) -> tuple[str, str | None]:
        """What tells it from other runs."""
        return self.datetime, self.uuid

    @property
    def moment(self) -> Moment:
        """When, to be compared; without a zone it is taken as UTC. Raises ValueError for what is no date."""
        try:
            found = Moment.fromisoformat(re.sub("Z$", "+00:00", self.datetime))  # as Python 3.10 reads it
        except ValueError:
            raise ValueError(f"{self.datetime!r} is not when a run was") from None
        return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


@dataclass(frozen=True)
class Sample:
    """A case in one run, by the run's index: median seconds of the device and, where known, of the host."""

    run: int
    median_s: float
    host_median_s: float | None


@dataclass(frozen=True)
class Timed:
    """A case that has a time. `benchmark` and `evidence` are the newest file's."""

    case: str
    samples: tuple[Sample, ...]
    benchmark: Mapping[str, Any]
    evidence: Mapping[str, Any]

    @property
    def extra(self) -> Mapping[str, Any]:
        """The newest extra_info."""
        return dict(self.benchmark["extra_info"])

    def axis(self, name: str) -> str | None:
        """The case's value on an axis; None where its kind has no such axis."""
        return axes_of(self.case).get(name)


@dataclass(frozen=True)
class Results:
    """One results file, or several together. `raw` is the newest.

    `selected` are the cases that were to run, None where a file does not say; `left_out` those that the options
    offered and -k, -m or a path left out; `lost` those without a time: outcome and reason; `failing` those with a time
    that failed in another of the runs: the reason.
    """

    name: str
    machine: Machine
    runs: tuple[Run, ...]
    timed: Mapping[str, Timed]
    selected: frozenset[str] | None
    left_out: frozenset[str]
    lost: Mapping[str, tuple[str, str]]
    not_run: int
    planted: bool
    raw: Mapping[str, Any]
    failing: Mapping[str, str] = field(default_factory=dict)


def axes_of(case: str) -> dict[str, str]:
    """A case's values by axis, from its id. Raises ValueError for what is no id of a case."""
    kind, *values = case.split("/")
    if kind not in AXES or len(values) != len(AXES[kind]):
        raise ValueError(f"{case!r} is not the name of a case")
    return dict(zip(AXES[kind], values, strict=True))


def folder(machine_info: Mapping[str, Any]) -> Path:
    """Where the baselines of a machine lie, from the repository's root.

    Of a GPU they are kept with the sources, by its model and compute capability; of a CPU they are nobody else's and
    lie where pytest-benchmark stores its files.
    """
    machine = _machine_of({"device": "cuda" if machine_info.get("gpu") else "cpu"}, machine_info)
    plain = re.sub(r"\((?:R|TM|C)\)", "", machine.model, flags=re.IGNORECASE)
    slug = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-") or "unknown"
    if machine.device == "cpu":
        return Path(".benchmarks") / f"cpu-{slug}"
    return Path("benches") / "baselines" / f"{slug}-sm{machine.compute_capability.replace('.', '')}"


def default_file(raw: Mapping[str, Any]) -> Path:
    """The baseline that a results file's runs would be pooled into, from the repository's root."""
    machine_info = raw["machine_info"]
    version = (machine_info.get("versions") or {}).get("transformer_engine")
    return folder(machine_info) / (f"te-{version}.json" if version else "baseline.json")


def stored(machine_info: Mapping[str, Any], root: Path = Path()) -> Path | None:
    """A machine's stored baseline; of several that of TE's newest release, by name. None without one.

    Builds of a commit and pre-releases count where there is no release: somebody's own build moves nobody's default.
    """

    def age(path: Path) -> tuple[bool, Version]:
        try:
            version = Version(path.stem.removeprefix("te-"))
        except InvalidVersion:
            return False, Version("0")
        return not (version.is_prerelease or version.local), version

    return max((root / folder(machine_info)).glob("*.json"), key=age, default=None)


# --- reading -----------------------------------------------------------------------------------------------------


def load(path: Path) -> Results:
    """Read a results file or a baseline. Raises ValueError, in one line that names the file, for anything else."""
    return read(read_json(path), str(path))


def read_json(path: Path) -> Any:
    """What a file says. Raises ValueError, in one line that names it, where it is not JSON or has no finite numbers."""
    try:
        if path.is_char_device():  # some have no end
            raise ValueError("is not a file")
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("is empty")
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is not JSON, or cut off: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is in it, where a number should be")


def read(raw: Any, name: str) -> Results:
    """Understand a parsed results file. Raises ValueError, in one line that begins with the name, where it is none."""
    try:
        return _read(raw, name)
    except ValueError as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from None
    except MALFORMED as error:
        raise ValueError(f"{name}: not a usable results file ({type(error).__name__}: {error})") from None


def _read(raw: Any, name: str) -> Results:
    suite = suite_of(raw)
    runs = tuple(_run(one) for one in suite["runs"]) if "runs" in suite else (_own_run(raw),)
    if not runs:
        raise ValueError("has no runs")
    for run in runs:
        _ = run.moment  # refused now rather than when it is compared
    timed: dict[str, Timed] = {}
    for benchmark in raw["benchmarks"]:
        if (benchmark.get("extra_info") or {}).get("kind") not in AXES:
            continue  # somebody's own benchmark
        found = _timed(benchmark, suite.get("evidence") or {}, len(runs))
        if found.case in timed:
            raise ValueError(f"case {found.case} is there twice")
        timed[found.case] = found
    lost = {str(one["case"]): (str(one["outcome"]), str(one["reason"])) for one in suite.get("not_measured") or ()}
    return Results(
        name=name,
        machine=_machine_of(suite, raw["machine_info"]),
        runs=runs,
        timed=timed,
        selected=frozenset(map(str, suite["selected"])) if suite.get("selected") is not None else None,
        left_out=frozenset(map(str, suite.get("left_out") or ())),
        lost=lost,
        not_run=int(suite.get("not_run") or 0),
        planted=bool(suite.get("planted")),
        raw=raw,
    )


def _machine_of(suite: Mapping[str, Any], machine_info: Mapping[str, Any]) -> Machine:
    if suite.get("device") == "cuda":
        gpu = machine_info["gpu"]
        return Machine("cuda", str(gpu["name"]), str(gpu["compute_capability"]))
    cpu = machine_info.get("cpu") or {}
    return Machine("cpu", str(cpu.get("brand_raw") or machine_info.get("processor") or "unknown CPU"))


def _run(entry: Mapping[str, Any]) -> Run:
    run = Run(**{field: entry[field] for field in Run.__dataclass_fields__})
    return replace(run, controls={name: _seconds(time, f"control {name}") for name, time in run.controls.items()})


def _own_run(raw: Mapping[str, Any]) -> Run:
    """The one run of a file that pools none."""
    suite, machine_info = raw["suite"], raw["machine_info"]
    gpu = machine_info.get("gpu") or {}
    taken: dict[str, list[float]] = {}
    for control in suite.get("controls") or ():
        name = str(control["name"])
        if name in CONTROLS and "absent" not in control:
            taken.setdefault(name, []).append(_seconds(control["median_s"], f"control {name}"))
    return Run(
        datetime=str(raw["datetime"]),
        uuid=gpu.get("uuid"),
        driver=gpu.get("driver"),
        versions=dict(machine_info.get("versions") or {}),
        sources=suite.get("sources"),
        # On a core that it shares Python takes twice as long, now and then: the least of its times is the machine's.
        controls={name: min(times) if name == HOST_CONTROL else median(times) for name, times in taken.items()},
    )


def _timed(benchmark: Mapping[str, Any], evidence: Mapping[str, Any], runs: int) -> Timed:
    extra, case = benchmark["extra_info"], str(benchmark["extra_info"]["case"])
    axes_of(case)
    launches_of(extra)
    for category, time_s in (extra.get("category_s") or {}).items():
        if not 0 <= float(time_s) < 1e12:
            raise ValueError(f"{case}: {time_s} s of {category} kernels is no time")
    if "runs" in extra:
        entries = [(one["run"], one["median_s"], one["host_median_s"]) for one in extra["runs"]]
    else:
        # A suspect was measured again, with new tensors: two of three decide.
        entries = [(0, median([benchmark["stats"]["median"], *extra.get("again_s", ())]), extra.get("host_median_s"))]
    samples = tuple(
        Sample(run, _seconds(time, f"{case}: median"), None if host is None else _seconds(host, f"{case}: host time"))
        for run, time, host in entries
    )
    if not samples:
        raise ValueError(f"{case}: has no runs")
    indices = [sample.run for sample in samples]
    if len(set(indices)) < len(indices) or not set(indices) <= set(range(runs)):
        raise ValueError(f"{case}: its runs are {indices}, of {runs}")
    return Timed(case, samples, benchmark, evidence.get(extra.get("evidence")) or {})


def _seconds(value: Any, what: str) -> float:
    number = float(value)
    if not 1e-12 < number < 1e12:  # also false for NaN
        raise ValueError(f"{what} {value} s is no time")
    return number


# --- together ----------------------------------------------------------------------------------------------------


def together(files: Sequence[Results]) -> Results:
    """Files as one: all their runs, and of each case the newest file's evidence.

    Raises ValueError, in one line, for none, for files of different machines or versions of what runs, and for the same
    run twice.
    """
    if not files:
        raise ValueError("no runs")
    for file in files:
        if file.machine != files[0].machine:
            raise ValueError(f"{file.name}: of {file.machine}, and {files[0].name} of {files[0].machine}")
    when = [run.when for file in files for run in file.runs]
    if twice := next((one for one in when if when.count(one) > 1), None):
        raise ValueError(f"the run of {twice[0]} is there twice: nothing can be learned from it again")
    _check_versions([run for file in files for run in file.runs])
    by_age = sorted(files, key=lambda file: max((run.moment for run in file.runs), default=NEVER))
    offsets = {id(file): sum(len(other.runs) for other in files[:index]) for index, file in enumerate(files)}
    timed: dict[str, Timed] = {}
    for file in reversed(by_age):
        for case, found in file.timed.items():
            moved = tuple(replace(sample, run=sample.run + offsets[id(file)]) for sample in found.samples)
            newest = timed.get(case, replace(found, samples=()))
            samples = sorted((*newest.samples, *moved), key=lambda sample: sample.run)
            timed[case] = replace(newest, samples=tuple(samples))
    without = [(case, why) for file in by_age for case, why in file.lost.items()]
    lost = {case: why for case, why in without if case not in timed}
    failing = {case: reason for case, (outcome, reason) in without if case in timed and outcome == "failed"}
    selected = [file.selected for file in files if file.selected is not None]
    chosen = frozenset[str]().union(*selected) if len(selected) == len(files) else None
    return replace(
        by_age[-1],
        name=files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more",
        runs=tuple(run for file in files for run in file.runs),
        timed=timed,
        selected=chosen,
        left_out=frozenset[str]().union(*(file.left_out for file in files)) - (chosen or frozenset()),
        lost=lost,
        not_run=sum(file.not_run for file in files) if chosen is None else len(chosen - timed.keys() - lost.keys()),
        planted=any(file.planted for file in files),
        failing=failing,
    )


def of_runs(results: Results, chosen: Sequence[int]) -> Results:
    """Some of the runs, by their indices, and the cases that these have."""
    places = {old: new for new, old in enumerate(chosen)}
    timed = {}
    for case, found in results.timed.items():
        samples = [replace(sample, run=places[sample.run]) for sample in found.samples if sample.run in places]
        if samples:
            timed[case] = replace(found, samples=tuple(samples))
    return replace(results, runs=tuple(results.runs[index] for index in chosen), timed=timed)


def _without(results: Results, cases: Collection[str]) -> Results:
    """All but these cases, and but the runs that have no others; what runs took is not known of some of them alone."""
    rest = {case: found for case, found in results.timed.items() if case not in cases}
    used = sorted({sample.run for found in rest.values() for sample in found.samples})
    raw = results.raw
    if len(used) < len(results.runs):
        raw = {**raw, "suite": {**raw["suite"], "spent_s": {}}}
    return of_runs(replace(results, timed=rest, raw=raw), used)


def pool(
    runs: Sequence[Mapping[str, Any]],
    onto: Mapping[str, Any] | None = None,
    renew: bool = False,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Parsed results files as one baseline, or added to one; each may itself pool several runs.

    With `renew`, the cases that the runs have forget their earlier runs. A case's `stats` are of its runs' medians, so
    that pytest-benchmark compares with the median of these. What ran, the machine and what was not measured are the
    newest file's; `names` are what errors call the runs. Raises ValueError, in one line, for runs that do not belong
    together: of another GPU or CPU model, schema or version of what runs; planted ones; the same run twice.
    """
    names = names or [f"run {number}" for number in range(1, len(runs) + 1)]
    files = [read(raw, name) for raw, name in zip(runs, names, strict=True)]
    if onto is not None:
        old = read(onto, "the baseline")
        files.insert(0, _without(old, {case for file in files for case in file.timed}) if renew else old)
    if planted := next((file for file in files if file.planted), None):
        raise ValueError(f"{planted.name}: work was planted in it, so it is no baseline")
    if ended := next((file for file in files if file.not_run), None):
        raise ValueError(f"{ended.name}: it was ended early, and {ended.not_run} cases were not run: it is no baseline")
    whole = together(files)
    if not whole.timed:
        raise ValueError(f"{whole.name}: no case has a time")
    return {
        **whole.raw,
        "benchmarks": [_pooled(found) for found in whole.timed.values()],
        "suite": _pooled_suite(whole, files),
    }


def _pooled_suite(whole: Results, files: Sequence[Results]) -> dict[str, Any]:
    """What a baseline has besides its cases: the newest file's, with the runs, the models and the evidence of all."""
    suite = {key: value for key, value in whole.raw["suite"].items() if key not in OF_THE_RUNS}
    models: dict[str, Any] = {}
    for file in (*files, whole):
        models |= file.raw["suite"]["models"]
    return suite | {
        "models": models,
        "not_measured": [
            {"case": case, "outcome": outcome, "reason": reason} for case, (outcome, reason) in whole.lost.items()
        ],
        # The newest cases come first, and theirs is the evidence that several cases share.
        "evidence": {
            found.extra["evidence"]: found.evidence for found in reversed(list(whole.timed.values())) if found.evidence
        },
        "runs": [asdict(run) for run in whole.runs],
        "spent_s": _spent(file.raw["suite"].get("spent_s") or {} for file in files),
    }


def _spent(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of all runs by what they went into."""
    spent: dict[str, float] = {}
    for part in parts:
        for what, seconds in part.items():
            spent[what] = spent.get(what, 0.0) + seconds
    return spent


def _check_versions(runs: Sequence[Run]) -> None:
    for name in PINNED:
        versions = sorted({str(run.versions.get(name)) for run in runs})
        if len(versions) > 1:
            raise ValueError(f"runs with {name} {' and '.join(versions)}: only those of one version go together")


def _pooled(found: Timed) -> dict[str, Any]:
    """A benchmark of pytest-benchmark's whose rounds are the runs."""
    medians = [sample.median_s for sample in found.samples]
    extra = {
        **found.extra,
        "interval_s": _interval(medians) or found.extra.get("interval_s"),
        "runs": [asdict(sample) for sample in found.samples],
    }
    return {**found.benchmark, "extra_info": extra, "stats": _stats(medians)}


def _interval(medians: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the median of runs' medians; of two to five, which have none, their range."""
    return median_interval(medians) or ((min(medians), max(medians)) if len(medians) > 1 else None)


def _stats(times: Sequence[float]) -> dict[str, Any]:
    """What pytest-benchmark keeps of rounds, in seconds; `outliers` as it writes them: by deviations; by quartiles."""
    middle, mean = median(times), fmean(times)
    low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (middle,) * 3
    deviation = stdev(times) if len(times) > 1 else 0.0
    inner = [time for time in times if low - 1.5 * (high - low) <= time <= high + 1.5 * (high - low)]
    beyond = sum(abs(time - mean) > deviation for time in times)
    return {
        "min": min(times),
        "max": max(times),
        "mean": mean,
        "stddev": deviation,
        "rounds": len(times),
        "median": middle,
        "iqr": high - low,
        "q1": low,
        "q3": high,
        "iqr_outliers": len(times) - len(inner),
        "stddev_outliers": beyond,
        "outliers": f"{beyond};{len(times) - len(inner)}",
        "ld15iqr": min(inner),
        "hd15iqr": max(inner),
        "ops": 1 / mean,
        "total": math.fsum(times),
        "iterations": 1,
    }
