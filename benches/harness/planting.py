"""Planted slowdowns: real work added to chosen cases, so that anyone can see on their machine what a gate catches."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benches.harness.medians import median
from benches.harness.stopwatch import REGIMES, CpuStopwatch, Limits, Stopwatch
from benches.harness.timeline import Timeline
from shapes.program import Program, Segment

FORM = "REGEX=3%, REGEX=+2us or REGEX=host+50us"
_SIZE = re.compile(r"(?P<percent>\d+(\.\d+)?)%|(?P<host>host)?\+(?P<us>\d+(\.\d+)?)us")
MOST_PERCENT = 1000
MOST_S = 1.0
LOOK = Limits(max_time_s=0.3)  # how long a segment takes, to within a percent of what is planted


@dataclass(frozen=True)
class Plant:
    """Work that matching segments get: a share of their device time, seconds of the device, or seconds of the host."""

    text: str
    pattern: re.Pattern[str]
    size: str  # as it was given
    share: float = 0.0
    device_s: float = 0.0
    host_s: float = 0.0


def parse(text: str) -> Plant:
    """A plant from its option. Raises ValueError, in one line, for anything of another form."""
    pattern, equals, size = text.rpartition("=")
    match = _SIZE.fullmatch(size)
    if not (equals and pattern and match):
        raise ValueError(f"--plant {text!r}: must be {FORM}")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--plant {text!r}: {pattern!r} is no regular expression: {error}") from None
    if match["percent"]:
        if float(match["percent"]) > MOST_PERCENT:
            raise ValueError(f"--plant {text!r}: {MOST_PERCENT} % is the most")
        return Plant(text, compiled, size, share=float(match["percent"]) / 100)
    seconds = float(match["us"]) * 1e-6
    if seconds > MOST_S:
        raise ValueError(f"--plant {text!r}: {MOST_S * 1e6:.0f} us is the most")
    if match["host"]:
        return Plant(text, compiled, size, host_s=seconds)
    return Plant(text, compiled, size, device_s=seconds)


def planted(
    program: Program, plants: Sequence[Plant], names: Mapping[str, Sequence[str]], timeline: Timeline | None
) -> Program:
    """The program with the work of those plants that match one of a segment's names.

    The host's comes before the segment's own, the device's after it.

    On a GPU device work is a kernel that spins; on a CPU, where `timeline` is None, the host is kept busy. What a spin
    of no length costs, some 2 us on an H200, is a part of what was asked for: less than that cannot be planted.
    """
    chosen = {
        segment.name: [plant for plant in plants if any(plant.pattern.search(name) for name in names[segment.name])]
        for segment in program.segments
    }
    if not any(chosen.values()):
        return program
    host_s = {name: sum(plant.host_s for plant in found) for name, found in chosen.items()}
    delayed = [name for name, found in chosen.items() if any(plant.share or plant.device_s for plant in found)]
    own = _seconds(program, timeline) if delayed else {}
    bare = _slower(program, timeline, dict.fromkeys(delayed, 0.0), {})
    cost = _seconds(bare, timeline) if delayed and timeline else own
    device_s = {
        name: sum(plant.share * own[name] + plant.device_s for plant in chosen[name]) - (cost[name] - own[name])
        for name in delayed
    }
    return _slower(program, timeline, device_s, host_s)


def _slower(
    program: Program, timeline: Timeline | None, device_s: Mapping[str, float], host_s: Mapping[str, float]
) -> Program:
    """The program with seconds of the device and of the host added to its segments, by their names."""
    delay = timeline.spin if timeline else _busy
    segments = [
        Segment(one.name, partial(_run, one.run, delay, device_s.get(one.name), host_s.get(one.name, 0.0)))
        for one in program.segments
    ]
    return Program(tuple(segments), program.reset)


def _seconds(program: Program, timeline: Timeline | None) -> dict[str, float]:
    """Device time of each segment."""
    watch = Stopwatch(program, timeline) if timeline else CpuStopwatch(program)
    times = watch.time(REGIMES["rested"], [(segment.name,) for segment in program.segments], LOOK)
    return {name: median(samples) for name, samples in times.device_s.items()}


def _run(run: Callable[[], object], delay: Callable[[float], None], device_s: float | None, host_s: float) -> None:
    if host_s:
        _busy(host_s)
    run()
    if device_s is not None:
        delay(max(0.0, device_s))


def _busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
