"""What ran before and what runs now: compared exactly where it can be, and kernel by kernel where a case got slower.

From the untimed rounds that a results file keeps as evidence. Nothing here is a time that is judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benches.judging.baselines import Results, Timed

GREW = 0.02  # a kernel's time in one profiled round is known to a percent or two
FEW = 4  # that a list names
GPU_FACTS = ("driver", "power_limit_w", "max_sm_clock_mhz", "max_memory_clock_mhz", "ecc", "mig", "persistence")


@dataclass(frozen=True)
class Change:
    """What is not as it was, in words."""

    what: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.now}"


@dataclass(frozen=True)
class Kernel:
    """A kernel of a case: how often it ran and for how many seconds, in one round."""

    name: str
    category: str
    count: int
    device_s: float


@dataclass(frozen=True)
class Kernels:
    """Which kernels are others: pairs of what did the same work before and does now, and what has no counterpart.

    `seen` says whether both sides' are known. `grew` ran before and now, and take longer in all; the largest first.
    """

    replaced: tuple[tuple[Kernel, Kernel], ...] = ()
    added: tuple[Kernel, ...] = ()
    removed: tuple[Kernel, ...] = ()
    grew: tuple[tuple[Kernel, Kernel], ...] = ()
    seen: bool = True


@dataclass(frozen=True)
class Parts:
    """What a case's segments did, together. None where it could not be seen."""

    kernels: Mapping[str, Kernel] | None
    operands: tuple[tuple[str, ...], ...] | None
    backend: str | None
    sizes: Mapping[str, int | None] = field(default_factory=dict)


def parts_of(timed: Timed) -> Parts:
    """What the newest evidence says of a case."""
    extra, evidence = timed.extra, timed.evidence
    segments = [evidence.get("segments", {})[name] for name in extra.get("segments") or ()] if evidence else []
    seen = bool(segments) and all(segment.get("kernels") is not None for segment in segments)
    uses = [use for segment in segments for use in segment["kernels"]] if seen else []
    gemms = tuple(tuple(gemm["operands"]) for segment in segments for gemm in segment.get("gemms") or ())
    return Parts(
        kernels=_summed(uses) if seen else None,
        operands=gemms if segments else None,
        backend=(evidence.get("attention") or {}).get("backend"),
        sizes={name: extra.get(name) for name in ("launches", "peak_bytes", "saved_bytes")},
    )


def _summed(uses: Iterable[Mapping[str, Any]]) -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {}
    for use in uses:
        name, count, device_s = str(use["name"]), int(use["count"]), float(use["device_s"])
        known = kernels.get(name, Kernel(name, str(use["category"]), 0, 0.0))
        kernels[name] = Kernel(name, known.category, known.count + count, known.device_s + device_s)
    return kernels


def changes(before: Timed, now: Timed) -> tuple[Change, ...]:
    """Launches, kernels, formats of operands, attention backend, and bytes that are not exactly as they were.

    Without noise: all of them were equal in every one of several processes. What was not seen is not compared.
    """
    was, found = parts_of(before), parts_of(now)
    return tuple(change for compare in (_sizes, _kernels, _operands, _backend) for change in compare(was, found))


def _sizes(was: Parts, now: Parts) -> Iterator[Change]:
    for name, before in was.sizes.items():
        after = now.sizes.get(name)
        if before is not None and after is not None and before != after:
            yield Change(name.replace("_", " "), str(before), str(after))


def _kernels(was: Parts, now: Parts) -> Iterator[Change]:
    if was.kernels is None or now.kernels is None:
        return
    counts = [Counter({kernel.name: kernel.count for kernel in part.values()}) for part in (was.kernels, now.kernels)]
    gone, new = counts[0] - counts[1], counts[1] - counts[0]
    if gone or new:
        yield Change("kernels", _listed(gone), _listed(new))


def _listed(counts: Counter[str]) -> str:
    names = [f"{count} x {name}" for name, count in counts.most_common()]
    return ", ".join(names[:FEW]) + (f", {len(names) - FEW} more" if len(names) > FEW else "") or "none"


def _operands(was: Parts, now: Parts) -> Iterator[Change]:
    if was.operands is None or now.operands is None:
        return
    counts = [Counter(" x ".join(pair) for pair in part) for part in (was.operands, now.operands)]
    gone, new = counts[0] - counts[1], counts[1] - counts[0]
    if gone or new:
        yield Change("precision", _listed(gone), _listed(new))


def _backend(was: Parts, now: Parts) -> Iterator[Change]:
    if was.backend and now.backend and was.backend != now.backend:
        yield Change("attention", was.backend, now.backend)


def kernel_changes(before: Timed, now: Timed, least_s: float = 0.0) -> Kernels:
    """Which kernels were replaced, by others of their category, added or removed; which grew, by `least_s` at least."""
    was, found = parts_of(before).kernels, parts_of(now).kernels
    if was is None or found is None:
        return Kernels(seen=False)
    gone = _longest(kernel for name, kernel in was.items() if name not in found)
    new = _longest(kernel for name, kernel in found.items() if name not in was)
    pairs = []
    for kernel in gone:
        if other := next((one for one in new if one.category == kernel.category), None):
            pairs.append((kernel, other))
            new.remove(other)
    paired = [kernel for kernel, _ in pairs]
    both = [(kernel, found[name]) for name, kernel in was.items() if name in found]
    grew = [(old, one) for old, one in both if one.device_s > old.device_s + max(GREW * old.device_s, least_s)]
    return Kernels(
        replaced=tuple(pairs),
        added=tuple(new),
        removed=tuple(kernel for kernel in gone if kernel not in paired),
        grew=tuple(sorted(grew, key=lambda pair: pair[0].device_s - pair[1].device_s)),
    )


def _longest(kernels: Iterable[Kernel]) -> list[Kernel]:
    return sorted(kernels, key=lambda kernel: -kernel.device_s)


def machine_changes(before: Results, now: Results) -> tuple[Change, ...]:
    """Versions, driver, limits, environment and sources that differ between the newest runs, and new boards."""
    facts = [_machine_facts(one) for one in (before, now)]
    names = dict.fromkeys(name for part in facts for name in part)
    found = [Change(name, facts[0].get(name, "none"), facts[1].get(name, "none")) for name in names]
    if _boards(now) <= _boards(before):
        found = [change for change in found if change.what != "boards"]
    return tuple(change for change in found if change.before != change.now)


def _boards(results: Results) -> set[str]:
    return {str(run.uuid) for run in results.runs if run.uuid}


def _machine_facts(results: Results) -> dict[str, str]:
    machine, suite = results.raw["machine_info"], results.raw["suite"]
    gpu = machine.get("gpu") or {}
    known: dict[str, Any] = {
        **(machine.get("versions") or {}),
        **{name: gpu.get(name) for name in GPU_FACTS},
        **{f"${name}": value for name, value in (machine.get("environment") or {}).items()},
        "Python": machine.get("python_version"),
        "sources": suite.get("sources"),
        "boards": " and ".join(sorted(_boards(results))) or None,
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def state_changes(before: Timed, now: Timed) -> tuple[Change, ...]:
    """The GPU while the case was measured: its median SM clock, and where it differs, why it was throttled."""
    read: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "SM clock": lambda state: _mhz((state.get("sm_clock_mhz") or {}).get("median")),
        "throttled": lambda state: state.get("throttled") or "no",
        "throttle reasons": lambda state: ", ".join(sorted(state.get("throttle_reasons") or ())) or "none",
    }
    states = [one.extra.get("gpu_state") or {} for one in (before, now)]
    found = [Change(what, *(str(ask(state)) for state in states)) for what, ask in read.items()]
    return tuple(change for change in found if change.before != change.now or change.what == "SM clock")


def _mhz(clock: float | None) -> str:
    return "unknown" if clock is None else f"{clock:.0f} MHz"
