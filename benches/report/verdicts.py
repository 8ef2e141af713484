"""What the gate found, as text: a block for each case that failed, the rest in short, totals last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import TYPE_CHECKING

from benches.report.terminal import TIME_DIGITS, UNITS, significant, unit_for

if TYPE_CHECKING:  # it imports numpy, and this only prints
    from benches.judging.differences import Change, Kernel, Kernels
    from benches.judging.judge import Finding, Judged, Outcome

FEW = 10  # cases that are listed; kernels: a third
HOPELESS = 0.5  # of a slowdown that most cases could have, and it would not be found
MANY = 10.0  # times: beyond them a figure says no more than that nothing is known


def seconds(time_s: float, like_s: float | None = None) -> str:
    """A time with its unit, that of `like_s` if given."""
    unit = unit_for([like_s or time_s])
    return f"{significant(time_s * UNITS[unit], TIME_DIGITS)} {unit}"


def percent(fraction: float) -> str:
    """A fraction in percent, with two significant digits."""
    return f"{significant(100 * fraction, 2)} %" if fraction < MANY else f"more than {MANY:.0f} times"


def change(ratio: float) -> str:
    """A ratio as the percent that it is above or below one."""
    return f"{100 * (ratio - 1):+.2f} %" if ratio < MANY else f"more than {MANY:.0f} times"


def render(outcome: Outcome, strict: bool = False) -> str:
    """All of it. Strictly, UNRESOLVED cases and those without a time in both files are listed too."""
    by_verdict: dict[str, list[Finding]] = {}
    for finding in outcome.findings:
        by_verdict.setdefault(finding.verdict, []).append(finding)
    blocks = [_heading(outcome)]
    blocks += ["\n".join(_slower(finding, outcome.differing)) for finding in by_verdict.get("SLOWER", ())]
    blocks += [_listed("MISSING", by_verdict, lambda one: one.reason, everything=True)]
    blocks += [_listed("CHANGED", by_verdict, _changed, everything=strict)]
    if strict:
        blocks += [_listed("UNRESOLVED", by_verdict, _time_line, everything=True)]
        blocks += ["\n".join(_lost(outcome))]
    blocks += [_listed("NEW", by_verdict, lambda one: "")]
    blocks += [_listed("FASTER", by_verdict, _time_line)]
    blocks += ["\n".join(_totals(outcome))]
    return "\n\n".join(block for block in blocks if block)


def _heading(outcome: Outcome) -> str:
    lines = [f"{counted(outcome.runs_now, 'run')} against {outcome.baseline}, {counted(outcome.runs_before, 'run')}"]
    lines += [f"  {note}" for note in outcome.notes]
    if outcome.differing:
        lines.append("differs from the baseline: " + "; ".join(map(str, outcome.differing)))
    return "\n".join(lines)


def counted(count: int, what: str) -> str:
    """So many of them, with a plural where there is one."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _listed(
    verdict: str, by_verdict: dict[str, list[Finding]], describe: Callable[[Finding], str], everything: bool = False
) -> str:
    findings = by_verdict.get(verdict, [])
    shown = findings if everything else findings[:FEW]
    lines = []
    for finding in shown:
        lines.append(f"{verdict:11} {finding.case}")
        lines += [f"  {line}" for line in describe(finding).splitlines()]
    if len(findings) > len(shown):
        lines.append(f"{verdict:11} {len(findings) - len(shown)} more")
    return "\n".join(lines)


def _lost(outcome: Outcome) -> Iterator[str]:
    """Cases that neither side has a time of, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for case, why in outcome.lost.items():
        by_reason.setdefault(": ".join(why), []).append(case)
    for reason, cases in by_reason.items():
        yield f"NO TIME     {cases[0]}" + (f" and {len(cases) - 1} more" if len(cases) > 1 else "")
        yield f"  {reason}"


def _time_line(finding: Finding) -> str:
    time = finding.time
    return _times(time) if time else ""


def _times(time: Judged) -> str:
    low, high = time.interval
    return (
        f"{seconds(time.before_s)} -> {seconds(time.now_s, time.before_s)}: {change(time.ratio)}, 95 % interval "
        f"{change(low)} to {change(high)}; floor {percent(time.floor)}"
    )


def _changed(finding: Finding) -> str:
    return "\n".join([*map(str, finding.changes), *([_times(finding.time)] if finding.time else [])])


def _slower(finding: Finding, differing: Iterable[Change]) -> Iterator[str]:
    """The block of a case that got slower."""
    time, reasons = finding.time, finding.reasons
    if time is None or reasons is None:
        return
    yield f"SLOWER      {finding.case}"
    yield f"  {_times(time)}"
    yield f"  as measured {change(time.raw)}; the controls account for {change(time.expected)}; p {time.p_slower:.1g}"
    for line in _kernels(reasons.kernels):
        yield f"  {line}"
    yield f"  {_host(finding.host, reasons.launch_bound)}"
    for found in (*finding.changes, *reasons.state):
        if found.what not in ("kernels", "host time"):  # said above
            yield f"  {found}"
    if versions := "; ".join(map(str, differing)):
        yield f"  differs: {versions}"


def _host(host: Judged | None, launch_bound: bool) -> str:
    if host is None:
        return "host time: unknown"
    verdict = {"SLOWER": "slower", "FASTER": "faster"}.get(host.verdict, "not told apart")
    bound = ", launch-bound" if launch_bound else ""
    return f"host time: {seconds(host.before_s)} -> {seconds(host.now_s, host.before_s)} ({verdict}{bound})"


def _kernels(kernels: Kernels) -> Iterator[str]:
    """Which kernels are others or took longer, the largest first."""
    few = FEW // 3
    for before, now in kernels.replaced[:few]:
        yield f"replaced: {_kernel(before)} -> {_kernel(now)}"
    for what, found in (("added", kernels.added), ("removed", kernels.removed)):
        for kernel in found[:few]:
            yield f"{what}: {_kernel(kernel)}"
    for before, now in kernels.grew[:few]:
        yield f"grew: {before.name} {before.count} x -> {now.count} x, {_in_all(before)} -> {_in_all(now)}"
    parts = (kernels.replaced, kernels.added, kernels.removed, kernels.grew)
    if not kernels.seen:
        yield "kernels: not seen"
    elif not any(parts):
        yield "kernels: the same, and none took longer when they were profiled"
    elif more := sum(max(len(part) - few, 0) for part in parts):
        yield f"kernels: {more} more differ"


def _kernel(kernel: Kernel) -> str:
    return f"{kernel.count} x {kernel.name} {_in_all(kernel)}"


def _in_all(kernel: Kernel) -> str:
    return seconds(kernel.device_s) if kernel.device_s else "0 us"


def _totals(outcome: Outcome) -> Iterator[str]:
    if outcome.controls:
        yield "controls: " + ", ".join(f"{name} {change(ratio)}" for name, ratio in outcome.controls.items())
    if outcome.left_out:
        left = ", ".join(f"{count} of {model}" for model, count in outcome.left_out.items())
        yield f"not selected, so not judged: {left}"
    if absent := [one for one in outcome.judged if one.absent_runs and one.verdict != "MISSING"]:
        more = ", ..." if len(absent) > 1 else ""
        yield f"not in all {outcome.runs_now} runs: {counted(len(absent), 'case')}, {absent[0].case}{more}"
        yield from (f"{one.case} {one.reason}" for one in absent if one.reason)
    if found := [finding.time.detectable for finding in outcome.judged if finding.time]:
        half, everything = percent(median(found)), percent(max(found))
        if median(found) > HOPELESS:
            yield "too noisy to be judged: most cases could become half as slow again, and nobody would know"
        yield f"a slowdown that is found 95 times in 100: {half} in half of the cases, {everything} in all of them"
    yield ", ".join(f"{count} {verdict}" for verdict, count in outcome.counts.items() if count)
