"""The gate: a verdict on every case of a run, or of several together, against a baseline.

    SLOWER      beyond the floor, and significant over the whole suite (`comparison`)
    MISSING     in the baseline, selected, and without a time: skipped, not come to, or renamed; or failed, in most runs
    CHANGED     as fast as before, or too noisy to tell, but with other kernels, launches, formats, attention, memory or
                host time
    UNRESOLVED  neither slower, nor faster, nor surely the same
    NEW         not in the baseline
    FASTER      as SLOWER, the other way
    SAME        the interval of the difference lies within the floor, and within 5 %

What ran is compared exactly. Host time differs by tenths from process to process (measured: 12 % for layers, 43 % for
GEMMs) and hardly follows the control that is a piece of Python, which on a shared core takes once or twice as long. So
it is judged by itself, uncorrected, with a floor of 20 %, and never fails a run unless the gate is strict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benches.harness.kernels import LAUNCHES
from benches.judging.baselines import AXES, Results, Sample, Timed, axes_of, of_runs
from benches.judging.comparison import (
    BOARD_DEVIATION,
    BOARD_DEVIATIONS,
    HOST_BOARD_DEVIATION,
    Comparison,
    Controls,
    Decisions,
    Table,
    centre,
    compare,
    decide,
    host_floor,
    of_the_board,
    time_floor,
    within_boards,
)
from benches.judging.differences import (
    Change,
    Kernels,
    changes,
    kernel_changes,
    machine_changes,
    parts_of,
    state_changes,
)
from benches.judging.moderation import Array, Key, Scatter, rounded, stated_deviation
from benches.noise import Spread, band_of, kind_of
from benches.report.analysis import KNOWN, launches_of

VERDICTS = ("SLOWER", "MISSING", "CHANGED", "UNRESOLVED", "NEW", "FASTER", "SAME")
FAILING = ("SLOWER", "MISSING")
STRICTLY_FAILING = (*FAILING, "UNRESOLVED", "CHANGED")
HOST_DEVIATIONS = {"layer": 0.15, "gemm": 0.45}  # of logs; measured over five processes, rounded up
WORTH_NAMING = 0.1  # of what a case got slower by: kernels that grew by more

FOLLOWED = ("gemm", "fp8_gemm", "copy")  # controls; what launches cost is taken off apart
CONTROL_OF = {
    "gemm_bf16": "gemm",
    "gemm_other": "gemm",
    "gemm_fp8": "fp8_gemm",
    "gemm_fp4": "fp8_gemm",
}
OTHERS_CONTROL = "copy"  # what is no GEMM is bound by memory
# Three H200s whose GEMM controls were 1.1 to 1.9 % apart: GEMMs of 160 us and more were 0.7 to 1 times as far apart,
# those of less than 90 us were not (0 +- 0.5 %), nor were quantizations. In short kernels power does not count.
LEAST_FOLLOWING_S = 100e-6
MOST_OF_LAUNCHES = 0.2  # of a time: beyond, the control must be wrong
UNSEEN = ("gemm", "copy")  # stand for cases whose kernels cannot be seen, half each


@dataclass(frozen=True)
class Judged:
    """A time against the baseline's: seconds, ratios now / before, and fractions of the time.

    `raw` is as measured; `ratio`, its 95 % interval and `p_slower` (over the whole suite) are corrected by `expected`,
    the ratio that the controls foresee. `noise` is the deviation of one run, `floor` what a difference has to exceed,
    `detectable` the smallest slowdown that is found in 95 of 100 such runs.
    """

    before_s: float
    now_s: float
    raw: float
    expected: float
    ratio: float
    interval: tuple[float, float]
    noise: float
    noise_stated: bool
    floor: float
    detectable: float
    p_slower: float
    p_faster: float
    verdict: str


@dataclass(frozen=True)
class Reasons:
    """What may have made a case slower: its kernels, the GPU's state, and whether the host sets its pace."""

    kernels: Kernels
    state: tuple[Change, ...]
    launch_bound: bool


@dataclass(frozen=True)
class Finding:
    """The verdict on a case. `reason` says why it has no time, or failed; `absent_runs` in how many it has none."""

    case: str
    verdict: str
    time: Judged | None = None
    host: Judged | None = None
    changes: tuple[Change, ...] = ()
    reasons: Reasons | None = None
    reason: str = ""
    absent_runs: int = 0


@dataclass(frozen=True)
class Outcome:
    """What the gate says. `controls` are ratios now / before; `lost` are cases that the baseline lacks as well."""

    baseline: str
    runs_before: int
    runs_now: int
    findings: tuple[Finding, ...]
    controls: Mapping[str, float]
    differing: tuple[Change, ...]
    left_out: Mapping[str, int]
    lost: Mapping[str, tuple[str, str]]
    planted: bool
    notes: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many cases have each verdict, in the order of VERDICTS."""
        found = Counter(finding.verdict for finding in self.findings)
        return {verdict: found[verdict] for verdict in VERDICTS}

    @property
    def judged(self) -> tuple[Finding, ...]:
        """Cases with a time before and now."""
        return tuple(finding for finding in self.findings if finding.time)

    def exit_code(self, strict: bool = False) -> int:
        """1 for a SLOWER or MISSING; strictly also for an UNRESOLVED, a CHANGED, or any case or run without a time."""
        failing = STRICTLY_FAILING if strict else FAILING
        absent = bool(self.lost) or any(finding.absent_runs for finding in self.findings)
        return int(any(self.counts[verdict] for verdict in failing) or (strict and absent))


def judge(before: Results, now: Results, others: Scatter | None = None) -> Outcome:
    """Judge `now`, one run or several, against a baseline. `others` say how much else times differ: see `scatter`.

    Raises ValueError, in one line, where the two cannot be compared: of other machines, or without a case in common.
    """
    if before.machine != now.machine:
        raise ValueError(f"{before.name} is of {before.machine}, and {now.name} of {now.machine}")
    if not before.timed:
        raise ValueError(f"{before.name}: no case has a time")
    if now.selected is None and now.not_run:
        raise ValueError(f"{now.name}: {now.not_run} selected cases were not run, and it does not say which")
    if both := {run.when for run in before.runs} & {run.when for run in now.runs}:
        raise ValueError(
            f"{now.name}: the run of {min(both)[0]} is one of {before.name}, and cannot be judged by itself"
        )
    cases = [case for case in now.timed if case in before.timed]
    own = _of_cases(before, cases)
    times, hosts = _times(own, now, cases, others), _host_times(own, now, cases)
    absent = {case: _why_absent(case, now) for case in before.timed if case not in now.timed}
    findings = [_finding(before.timed[case], now, times[case], hosts.get(case)) for case in cases]
    findings += [Finding(case, "MISSING", reason=reason) for case, reason in absent.items() if reason]
    if not findings:
        raise ValueError(f"{before.name} has no case of {now.name}: nothing can be compared")
    findings += [Finding(case, "NEW") for case in now.timed if case not in before.timed]
    left_out = Counter(case.split("/")[1] for case, reason in absent.items() if not reason)
    return Outcome(
        baseline=before.name,
        runs_before=len(before.runs),
        runs_now=len(now.runs),
        findings=tuple(sorted(findings, key=lambda finding: VERDICTS.index(finding.verdict))),
        controls=_control_ratios(own, now),
        differing=machine_changes(own, now),
        left_out=dict(left_out),
        lost={
            case: why for case, why in now.lost.items() if case not in before.timed and not _known(case, before, now)
        },
        planted=now.planted,
        notes=tuple(_notes(own, now, list(times.values()))),
    )


# --- times -------------------------------------------------------------------------------------------------------


def _of_cases(before: Results, cases: Sequence[str]) -> Results:
    """The baseline's runs that have any of these cases: what others measured says nothing of them."""
    runs = sorted({sample.run for case in cases for sample in before.timed[case].samples})
    return of_runs(before, runs) if runs else before


def _times(before: Results, now: Results, cases: Sequence[str], others: Scatter | None) -> dict[str, Judged]:
    if not cases:
        return {}
    measured = [_table(one, cases, lambda sample: sample.median_s, side) for side, one in enumerate((before, now))]
    tables = _without_launches(before, now, cases, measured)
    controls = [_control_table(one, side) for side, one in enumerate((before, now))]
    seconds = np.exp(np.nanmedian(tables[0].logs, axis=1))
    keys = [_key(before.timed[case], time_s) for case, time_s in zip(cases, seconds, strict=True)]
    found = compare(
        tables[0],
        tables[1],
        keys=keys,
        stated=np.array([stated_deviation(key, before.machine.device) for key in keys]),
        apart=np.array([BOARD_DEVIATIONS.get(key[1:], BOARD_DEVIATION) for key in keys]),
        controls=Controls(controls[0], controls[1], _weights(before, now, cases), before.machine.device),
        others=others,
    )
    decisions = decide(found, time_floor(found))
    was, new = (centre(table).log_s for table in (of_the_board(*measured), measured[1]))
    shown = replace(found, before=was, now=new, shift=new - was - found.difference)  # times as they were measured
    return dict(zip(cases, _judged(shown, decisions), strict=True))


def _without_launches(before: Results, now: Results, cases: Sequence[str], tables: Sequence[Table]) -> list[Table]:
    """Times less what each run's launches cost more than those of the baseline's runs do.

    On an H200 a launch costs up to 0.16 us more in one process than in the next, in every case alike. A case stays as
    it is where one of the runs that are compared lacks that control, or it must be wrong: half a correction is worse
    than none.
    """
    costs = [
        np.array([run.controls.get("short_kernels", np.nan) / LAUNCHES for run in one.runs]) for one in (before, now)
    ]
    if not all(np.isfinite(part).any() for part in costs):
        return list(tables)
    launches = np.array([before.timed[case].extra.get("launches") or 0 for case in cases])
    usual = np.nanmedian(costs[0])
    shares = [
        launches[:, None] * (part - usual)[None, :] / np.exp(table.logs)
        for part, table in zip(costs, tables, strict=True)
    ]
    usable = [np.abs(share) <= MOST_OF_LAUNCHES for share in shares]  # which NaN is not
    compared = [np.isfinite(table.logs) for table in (of_the_board(*tables), tables[1])]
    whole = np.all([(good | ~there).all(axis=1) for good, there in zip(usable, compared, strict=True)], axis=0)
    return [
        Table(table.logs + np.log1p(-np.where(good & whole[:, None], share, 0.0)), table.boards)
        for table, share, good in zip(tables, shares, usable, strict=True)
    ]


def _host_times(before: Results, now: Results, cases: Sequence[str]) -> dict[str, Judged]:
    """Of the cases that have a host time on both sides."""
    known = [case for case in cases if all(_host_known(one.timed[case]) for one in (before, now))]
    if not known:
        return {}
    tables = [_table(one, known, lambda sample: sample.host_median_s, side) for side, one in enumerate((before, now))]
    kinds = [case.split("/")[0] for case in known]
    found = compare(
        tables[0],
        tables[1],
        keys=[(kind, f"host of a {kind}", "") for kind in kinds],  # noise of another kind says nothing
        stated=np.array([HOST_DEVIATIONS[kind] for kind in kinds]),
        apart=np.full(len(known), HOST_BOARD_DEVIATION),
    )
    return dict(zip(known, _judged(found, decide(found, host_floor(found))), strict=True))


def _host_known(timed: Timed) -> bool:
    return any(sample.host_median_s is not None for sample in timed.samples)


def _table(results: Results, cases: Sequence[str], seconds: Callable[[Sample], float | None], side: int) -> Table:
    logs = np.full((len(cases), len(results.runs)), np.nan)
    for row, case in enumerate(cases):
        for sample in results.timed[case].samples:
            if (time_s := seconds(sample)) is not None:
                logs[row, sample.run] = np.log(time_s)
    return Table(logs, _boards(results, side))


def _control_table(results: Results, side: int, names: Iterable[str] = FOLLOWED) -> Table:
    times = [[run.controls.get(name, np.nan) for run in results.runs] for name in names]
    return Table(np.log(np.array(times)), _boards(results, side))


def _boards(results: Results, side: int) -> Any:
    """The board of each run. A GPU that does not tell which one it is counts as another one on the other side."""
    unknown = "" if results.machine.device == "cpu" else f"unknown {side}"
    return np.array([run.uuid or unknown for run in results.runs])


def _key(timed: Timed, time_s: float) -> Key:
    kind = kind_of(timed.case.split("/")[0], timed.axis("mode"))
    return kind, str(timed.axis("regime")), band_of(time_s, timed.extra.get("launches"))


def _weights(before: Results, now: Results, cases: Sequence[str]) -> Array:
    """(cases, FOLLOWED): how much of each case a control stands for, by the time of its kernels."""
    has_fp8 = all("fp8_gemm" in run.controls for run in (*before.runs, *now.runs))
    weights = np.zeros((len(cases), len(FOLLOWED)))
    for row, case in enumerate(cases):
        category_s = before.timed[case].extra.get("category_s") or {}
        whole = sum(category_s.values())
        shares = {name: time_s / whole for name, time_s in category_s.items()} if whole else {}
        for control, share in _by_control(shares, _short_shares(before.timed[case]), has_fp8):
            weights[row, FOLLOWED.index(control)] += share
    return weights


def _short_shares(timed: Timed) -> dict[str, float]:
    """By category: how much of its kernels' time is in kernels too short to follow the GEMMs' controls."""
    whole: dict[str, float] = {}
    short: dict[str, float] = {}
    for kernel in (parts_of(timed).kernels or {}).values():
        whole[kernel.category] = whole.get(kernel.category, 0.0) + kernel.device_s
        if kernel.device_s < LEAST_FOLLOWING_S * kernel.count:
            short[kernel.category] = short.get(kernel.category, 0.0) + kernel.device_s
    return {category: seconds / whole[category] for category, seconds in short.items() if seconds}


def _by_control(shares: Mapping[str, float], short: Mapping[str, float], has_fp8: bool) -> Iterator[tuple[str, float]]:
    for category, share in shares.items():
        control = CONTROL_OF.get(category, OTHERS_CONTROL)
        apart = share * short.get(category, 0.0)
        yield "gemm" if control == "fp8_gemm" and not has_fp8 else control, share - apart
        yield OTHERS_CONTROL, apart
    if not shares:
        yield from ((control, 1 / len(UNSEEN)) for control in UNSEEN)


def _judged(found: Comparison, decisions: Decisions) -> Iterator[Judged]:
    for row in range(len(found.before)):
        yield Judged(
            before_s=_ratio(found.before[row]),
            now_s=_ratio(found.now[row]),
            raw=_ratio(found.now[row] - found.before[row]),
            expected=_ratio(found.shift[row]),
            ratio=_ratio(found.difference[row]),
            interval=(_ratio(decisions.low[row]), _ratio(decisions.high[row])),
            noise=float(found.noise[row]),
            noise_stated=bool(found.stated[row]),
            floor=_ratio(decisions.floor[row]) - 1,
            detectable=_ratio(decisions.detectable[row]) - 1,
            p_slower=float(decisions.p_slower[row]),
            p_faster=float(decisions.p_faster[row]),
            verdict=str(decisions.verdicts[row]),
        )


def _ratio(log: float) -> float:
    """e to the power of a log; where next to nothing is known, which a few noisy runs can mean, at most e^50."""
    return float(np.exp(np.clip(log, -50.0, 50.0)))


def scatter(spreads: Sequence[Mapping[str, Any]]) -> Scatter | None:
    """How much the cases of a noise file differ from run to run: of what `python -m benches.noise --json` wrote.

    Raises ValueError where a case has no name or no times of several runs, and whatever a list of another shape raises.
    """
    found: list[Spread] = []
    for entry in spreads:
        case, times_s = str(entry["case"]), tuple(float(time_s) for time_s in entry["runs_s"])
        axes = axes_of(case)
        kind = kind_of(case.split("/")[0], axes.get("mode"))
        boards, launches = tuple(entry.get("boards") or ()), launches_of(entry)
        spread = Spread(case, kind, axes["regime"], times_s, boards, launches)
        if not spread.df or not all(1e-12 < time_s < 1e12 for time_s in times_s):
            raise ValueError(f"{case}: {list(times_s)} are not the times of several runs on a board")
        found.append(spread)
    if not found:
        return None
    parts = [
        within_boards(Table(np.log([one.runs_s]), np.array(one.boards or [""] * len(one.runs_s)))) for one in found
    ]
    variance, df = (np.concatenate(part) for part in zip(*parts, strict=True))
    keys = [(one.kind, one.regime, one.band) for one in found]
    return Scatter(keys, rounded(variance, np.array([one.mean_s for one in found])), df)


# --- verdicts ----------------------------------------------------------------------------------------------------


def _finding(before: Timed, now: Results, time: Judged, host: Judged | None) -> Finding:
    found = now.timed[before.case]
    differing = (*changes(before, found), *_host_change(host))
    absent = len(now.runs) - len(found.samples)
    verdict, reason = time.verdict, ""
    if before.case in now.failing:
        reason = f"failed in {absent} of {len(now.runs)} runs: {now.failing[before.case]}"
    if reason and 2 * absent > len(now.runs):  # as with times, an odd run decides nothing
        verdict = "MISSING"
    elif verdict in ("SAME", "UNRESOLVED") and differing:
        verdict = "CHANGED"
    slower = verdict == "SLOWER"
    return Finding(
        case=before.case,
        verdict=verdict,
        time=time,
        host=host,
        changes=differing,
        reasons=_reasons(before, found, time.now_s - time.before_s) if slower else None,
        reason=reason,
        absent_runs=absent,
    )


def _reasons(before: Timed, now: Timed, slower_s: float) -> Reasons:
    kernels = kernel_changes(before, now, WORTH_NAMING * max(slower_s, 0.0))
    return Reasons(kernels, state_changes(before, now), bool(now.extra.get("launch_bound")))


def _host_change(host: Judged | None) -> Iterator[Change]:
    if host and host.verdict in ("SLOWER", "FASTER"):
        yield Change("host time", f"{host.before_s * 1e6:.0f} us", f"{host.now_s * 1e6:.0f} us ({host.ratio:.2f}x)")


def _why_absent(case: str, now: Results) -> str:
    """Why a case of the baseline has no time; empty where it was not asked for.

    It was not where options, -k, -m or a path left it out. A case that none of them explains exists no more.
    """
    if case in now.lost:
        return ": ".join(now.lost[case])
    if now.selected is None or case in now.left_out:
        return ""
    if case in now.selected:
        return "not run: the run ended before it"
    unknown = []
    kind = case.split("/")[0]
    offered = [one.split("/") for one in (*now.selected, *now.left_out) if one.startswith(f"{kind}/")]
    for position, axis in enumerate(AXES[kind], start=1):
        value = case.split("/")[position]
        if any(one[position] == value for one in offered):
            continue
        if axis == "model" or value in KNOWN.get(axis, ()) or (axis == "linear" and _given(case, now)):
            return ""
        unknown.append(f"{axis} {value!r}")
    what = f"{', '.join(unknown)} cannot" if unknown else "no case of this name can"
    return f"renamed or removed: {what} be selected any more"


def _known(case: str, before: Results, now: Results) -> bool:
    """Whether a case was skipped in the baseline too: this machine cannot run it."""
    return all(one.lost.get(case, ("",))[0] == "skipped" for one in (before, now))


def _given(case: str, now: Results) -> bool:
    """Whether a case is of shapes given by hand: others may be given now."""
    model = now.raw["suite"]["models"].get(case.split("/")[1]) or {}
    return not model.get("hidden_size")


# --- the whole ---------------------------------------------------------------------------------------------------


def _control_ratios(before: Results, now: Results) -> dict[str, float]:
    """Now / before of each control that both have, of the runs that cases are compared with."""
    names = list(dict.fromkeys(name for run in (*before.runs, *now.runs) for name in run.controls))
    if not names:
        return {}
    tables = [_control_table(one, side, names) for side, one in enumerate((before, now))]
    shifts = centre(tables[1]).log_s - centre(of_the_board(*tables)).log_s
    return {name: _ratio(shift) for name, shift in zip(names, shifts, strict=True) if np.isfinite(shift)}


def _notes(before: Results, now: Results, times: Sequence[Judged]) -> Iterator[str]:
    if now.planted:
        yield "WORK WAS PLANTED in this run: it is slower on purpose"
    if before.planted:
        yield "work was planted in the baseline"
    if len(before.runs) == 1:
        yield "the baseline is one run: how much it differs from the next is not in it"
    if stated := sum(time.noise_stated for time in times):
        yield f"noise of {stated} of {len(times)} cases is assumed, not measured: pool more runs, or give --noise"
    boards = [{run.uuid for run in one.runs} for one in (before, now)]
    of_launches = [["short_kernels" in run.controls for run in one.runs] for one in (before, now)]
    if before.machine.device == "cuda" and (None in boards[1] or not boards[1] <= boards[0]):
        yield "another board than the baseline's: judged with what boards differ by beyond their controls"
    if not any(run.controls for run in before.runs) or not any(run.controls for run in now.runs):
        yield "no controls on one side: a shift of the machine cannot be told from one of the cases"
    elif any(of_launches[0]) and not all(of_launches[1]):
        yield "no control of short kernels in this run: launches that cost more or less are not allowed for"
    yield from _absences(now.lost)


def _absences(lost: Mapping[str, tuple[str, str]]) -> Iterable[str]:
    counts = Counter(outcome for outcome, _ in lost.values())
    return [f"{count} selected cases {outcome}" for outcome, count in counts.items()]
