"""How the suite and pytest meet: cases as parameters, the header, pytest-benchmark's files, the tables at the end."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict
from datetime import datetime, timezone
from shlex import quote
from typing import Any

import pytest

from benches.harness import device as devices
from benches.harness.journal import Journal, suite_info
from benches.harness.medians import median
from benches.harness.planting import Plant
from benches.harness.replay import REPLAY
from benches.harness.safety import end_in_order, file_storage, measures, undisturbed
from benches.harness.stash import GATE, JOURNAL, PLANTS, RESULTS, SELECTION, spending, until_now
from benches.harness.stopwatch import Figure
from benches.harness.workbench import attempt, free_memory, in_one_line, keeps_traces
from benches.report.analysis import SCHEMA, analyse
from shapes.cases import KINDS, GemmCase, LayerCase, support
from shapes.selection import Selection

# --- cases -----------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for all axes of a kind of case gets every selected case of that kind."""
    selection = metafunc.config.stash[SELECTION]
    for kind in KINDS.values():
        if set(kind.axes) <= set(metafunc.fixturenames):
            cases: Sequence[LayerCase | GemmCase] = (
                selection.layer_cases() if kind is LayerCase else selection.gemm_cases()
            )
            metafunc.parametrize(
                kind.axes,
                [pytest.param(*case.values, marks=getattr(pytest.mark, case.regime)) for case in cases],
                ids=["-".join(case.values) for case in cases],
            )


def case_of(item: pytest.Item) -> LayerCase | GemmCase | None:
    """The case that a test measures, from its parameters."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    for kind in KINDS.values():
        values: dict[str, Any] = {axis: parameters.get(axis) for axis in kind.axes}
        if all(isinstance(value, str) for value in values.values()):  # pytest's placeholder for "no case" is not
            return kind(**values)
    return None


# --- results ---------------------------------------------------------------------------------------------------


def extra_info(
    case: LayerCase | GemmCase, figure: Figure, evidence: dict[str, Any], selection: Selection
) -> dict[str, Any]:
    """What a results file says of a case besides pytest-benchmark's statistics; seconds, bytes."""
    info: dict[str, Any] = {"case": case.id, "kind": case.kind, **dict(zip(case.axes, case.values, strict=True))}
    info |= {
        "interval_s": figure.interval_s,
        "stopped": "precise" if figure.precise else "max_time",
        "host_min_s": min(figure.host_s) if figure.host_s else None,
        "host_median_s": median(figure.host_s) if figure.host_s else None,
        "launch_bound": figure.launch_bound,
        "gpu_state": figure.gpu_state or {"absent": "only on a GPU"},
        **evidence,
    }
    if isinstance(case, GemmCase):
        linear = next(linear for linear in selection.groups[case.model].linears if linear.name == case.linear)
        gemm = linear.gemm(case.pass_name)
        info |= {"m": gemm.m, "n": gemm.n, "k": gemm.k, "flops": gemm.flops}
    return info


def _selected(config: pytest.Config) -> dict[str, Any]:
    """The part of a results file that says what was asked for."""
    selection = config.stash[SELECTION]
    models: dict[str, Any] = {model.name: {**asdict(model), "tokens": model.tokens} for model in selection.models}
    if selection.shapes:
        models[selection.shapes.name] = {"num_hidden_layers": 1, "tokens": None}
    selected = config.stash[RESULTS]["selected"]
    offered = [case.id for case in (*selection.layer_cases(), *selection.gemm_cases())] if selected else []
    return {
        "schema": SCHEMA,
        "sources": devices.source_digest(),  # not in machine_info, of which pytest-benchmark prints each change
        "device": selection.device,
        "models": models,
        "selected": selected,
        "left_out": sorted(set(offered) - set(selected), key=offered.index),
        "planted": [plant.text for plant in config.stash[PLANTS]],
    }


def _suite_info(config: pytest.Config) -> dict[str, Any]:
    """The suite's own part of a results file: what was asked for, what ran, and what has no time."""
    return suite_info(_selected(config), until_now(config))


def _machine_info(config: pytest.Config) -> dict[str, Any]:
    """The GPU and versions: nothing before the cases are collected, since pytest-benchmark asks at the very start."""
    return dict(config.stash[RESULTS].get("machine_info") or {})


def _results(config: pytest.Config) -> dict[str, Any]:
    """What was measured until now, as a results file."""
    found = config.stash[RESULTS]["benchmarks"]
    return {"benchmarks": found, "machine_info": _machine_info(config) if found else {}, "suite": _suite_info(config)}


def now(config: pytest.Config) -> dict[str, Any]:
    """The same, with what is known of the host."""
    known = config.stash[RESULTS].get("host_info") or {}
    return _results(config) | {"machine_info": {**known, **_machine_info(config)}}


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_generate_machine_info(config: pytest.Config) -> dict[str, Any] | None:
    """What the journal's header has already, if there is one: asking the CPU takes a while."""
    return deepcopy(config.stash[RESULTS].get("host_info"))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Add the GPU and versions; leave out what names the host, since baselines are published."""
    machine_info["node"] = ""
    machine_info["release"] = str(machine_info.get("release", "")).split("-")[0]
    machine_info.update(_machine_info(config))


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Add what was selected, and the cases that have no time."""
    output_json["suite"] = _suite_info(config)
    config.stash[RESULTS]["saved"] = True  # if writing fails, pytest_sessionfinish takes it back


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_compare_machine_info(
    config: pytest.Config, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    """What pytest-benchmark compares with is also what the gate judges against, and says the differences of.

    pytest-benchmark would print both machines in full, each flag of their CPUs: it finds them equal.
    """
    if file_storage(config) is None:  # else it is loaded
        config.stash[GATE].add(compared_benchmark, str(config.getoption("benchmark_compare")))
    machine_info.clear()
    machine_info.update(compared_benchmark["machine_info"])


@pytest.hookimpl(trylast=True)  # after pytest-benchmark's, which loads what is compared with
def pytest_configure(config: pytest.Config) -> None:
    """Where Elasticsearch has nothing to compare with, pytest-benchmark would only warn, and the run pass.

    Of files the gate has said so by now.
    """
    config.stash[GATE].check_found(config.getoption("benchmark_compare"))


def _begin_journal(config: pytest.Config) -> None:
    """Have what is measured from now on outlive the process."""
    hook = config.hook
    machine_info = hook.pytest_benchmark_generate_machine_info(config=config)
    config.stash[RESULTS]["host_info"] = deepcopy(machine_info)
    hook.pytest_benchmark_update_machine_info(config=config, machine_info=machine_info)
    commit_info = hook.pytest_benchmark_generate_commit_info(config=config)
    hook.pytest_benchmark_update_commit_info(config=config, commit_info=commit_info)
    header = {
        "suite": _selected(config),
        "machine_info": machine_info,
        "commit_info": commit_info,
        "datetime": datetime.now(timezone.utc).isoformat(),
        "version": devices.declared_versions()["pytest-benchmark"],
        "options": list(config.invocation_params.args),
    }
    config.stash[JOURNAL] = Journal(header, until_now(config), config.getoption("journal"))


def _keep(config: pytest.Config) -> None:
    if journal := config.stash.get(JOURNAL, None):
        journal.keep(until_now(config))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note each case that was skipped or failed, and keep what has come since the last one."""
    report = yield
    _note_lost(item, report)
    _keep(item.config)
    return report


def _note_lost(item: pytest.Item, report: Any) -> None:
    """Note why a case has no time; a failure that killed the GPU ends the run."""
    case = case_of(item)
    if case is None or report.passed or report.when == "teardown":
        return
    if report.failed and (death := free_memory()):
        item.session.shouldfail = f"the GPU can no longer be used in this process: {death}"
    skipped = report.skipped and isinstance(report.longrepr, tuple)  # of (file, line, reason)
    reason = report.longrepr[2] if skipped else getattr(report.longrepr, "reprcrash", None) or report.longrepr
    text = str(getattr(reason, "message", reason)).removeprefix("Skipped: ").removeprefix("Failed: ").strip()
    item.config.stash[RESULTS]["not_measured"].append(
        {"case": case.id, "outcome": report.outcome, "reason": (text.splitlines() or [""])[0]}
    )


@pytest.fixture
def measure(request: pytest.FixtureRequest, benchmark: Any) -> Callable[[Any], None]:
    """measure(source): the test's case, checked and measured by `source` and recorded; run once where disabled."""
    case, config = case_of(request.node), request.config
    assert case is not None, "a test that measures has all parameters of a kind of case"

    def run(source: Any) -> None:
        keep_trace = keeps_traces(config)
        with spending(config, "evidence"):  # before any time: what ran must be what the case says
            evidence = source.evidence(keep_trace)
        if benchmark.disabled:
            benchmark.pedantic(lambda: attempt(lambda: source.run_once(case), keep_trace))
            return
        with spending(config, "measuring"):
            figure = source.figure(case, keep_trace)
        config.stash[RESULTS]["evidence"].setdefault(source.key, evidence.as_dict())
        proof = {"evidence": source.key, **evidence.summary(source.segments(case))}
        benchmark.group = case.group
        benchmark.extra_info.update(extra_info(case, figure, proof, config.stash[SELECTION]))
        REPLAY.play(benchmark, figure.samples_s)
        config.stash[RESULTS]["benchmarks"].append(benchmark.stats.as_dict())

    return run


# --- what the terminal shows -----------------------------------------------------------------------------------


def pytest_report_header(config: pytest.Config) -> str:
    """Versions by metadata, and the device: no heavy import before there is something to run."""
    versions = ", ".join(f"{name} {version}" for name, version in devices.declared_versions().items())
    selection = config.stash[SELECTION]
    reason = "" if selection.device == "cuda" else f" ({devices.why_not_cuda() or 'as asked for'})"
    return "\n".join([f"suite: device {selection.device}{reason}; {versions}", *_planted(config)])


def _planted(config: pytest.Config) -> list[str]:
    """A line that nobody overlooks, if anything was planted."""
    texts = [plant.text for plant in config.stash[PLANTS]]
    return [f"PLANTED, so these are no true times: {' '.join(texts)}"] if texts else []


def _will_run(config: pytest.Config) -> bool:
    listing = ("collectonly", "showfixtures", "show_fixtures_per_test")
    return not any(config.getoption(name, False) for name in listing)


@pytest.hookimpl(tryfirst=True)  # the report of the collection, below, loads cuDNN
def pytest_collection_finish(session: pytest.Session) -> None:
    """Before anything runs: end with one line where cases cannot use the device, load TE, begin the journal."""
    config = session.config
    if not session.items or not _will_run(config):
        return
    device = config.stash[SELECTION].device
    cases = list(dict.fromkeys(case.id for case in map(case_of, session.items) if case))
    if not cases:
        return
    end_in_order()
    if reason := devices.unusable(device):
        raise pytest.UsageError(reason)
    config.stash[RESULTS]["machine_info"] = devices.machine_info(device)  # nothing can have gone wrong with it
    if missed := _plants_that_miss(session):
        raise pytest.UsageError(f"--plant {missed[0].text!r} matches no selected case that can run here")
    gc.freeze()  # hundreds of thousands of objects that live on; each new layer collects what the last one left
    if measures(config):
        config.stash[RESULTS]["selected"] = cases
        _begin_journal(config)
        config.stash[GATE].check(now(config))


def _plants_that_miss(session: pytest.Session) -> list[Plant]:
    plants, selection = session.config.stash[PLANTS], session.config.stash[SELECTION]
    found = [
        case.id
        for case in (map(case_of, session.items) if plants else ())
        if case
        and not support(case.recipe, selection.groups[case.model], selection.device, getattr(case, "stage", None))
    ]
    return [plant for plant in plants if not any(map(plant.pattern.search, found))]


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """GPU, libraries as loaded, and which recipes will run: before the first case, and only if there is one."""
    if not _will_run(config) or not any(case_of(item) for item in items):
        return []
    selection, info = config.stash[SELECTION], _machine_info(config)
    lines = []
    if gpu := info["gpu"]:
        watts = f", {gpu['power_limit_w']:.0f} W" if gpu["power_limit_w"] else ""
        lines.append(f"GPU: {gpu['name']}{watts}, driver {gpu['driver'] or 'unknown'}, uuid {gpu['uuid']}")
    lines.append("loaded: " + ", ".join(f"{name} {version}" for name, version in info["versions"].items()))
    reasons = {recipe: _recipe_reason(selection, recipe) for recipe in selection.recipes}
    lines.append("recipes: " + (", ".join(name for name, reason in reasons.items() if not reason) or "none"))
    lines += [f"  not here: {reason}" for reason in reasons.values() if reason]
    if info["environment"]:
        lines.append("environment: " + " ".join(f"{name}={value}" for name, value in info["environment"].items()))
    if journal := config.stash.get(JOURNAL, None):
        lines.append(f"journal: {journal.path or 'none'}{journal.why}")
    return lines


def _recipe_reason(selection: Selection, recipe: str) -> str | None:
    """Why no selected stage and no GEMM can run a recipe here."""
    reasons = [
        support(recipe, group, selection.device, stage)
        for group in selection.groups.values()
        for stage in (*selection.stages, None)
    ]
    return None if None in reasons else reasons[-1]


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """The analysis of this run, after pytest-benchmark's table, and also where that fails or finds a regression."""
    try:
        return (yield)
    finally:
        results = _results(config)
        if results["benchmarks"] or results["suite"]["not_measured"]:
            from benches.report.terminal import render

            width = shutil.get_terminal_size((110, 24)).columns
            terminalreporter.ensure_newline()
            terminalreporter.write_line(render(analyse(json.loads(json.dumps(results))), width=width))
        if (keeper := config.stash[GATE]).judges and config.stash[RESULTS]["selected"]:
            terminalreporter.section("gate")
            terminalreporter.write_line(keeper.report())
        for line in _planted(config):
            terminalreporter.write_line(line, red=True)
        _tell(config, terminalreporter)


def _tell(config: pytest.Config, terminal: pytest.TerminalReporter) -> None:
    """What could not be saved, and where it is."""
    if trouble := config.stash[RESULTS].get("trouble"):
        terminal.write_line(f"ERROR: {trouble}", red=True)
    if place := _where_it_is(config):
        terminal.write_line(place)


def _is_unsaved(config: pytest.Config) -> bool:
    results = config.stash[RESULTS]
    return bool(results["benchmarks"]) and not results["saved"]


def _where_it_is(config: pytest.Config) -> str | None:
    """Where what was measured is, if pytest-benchmark did not save it; or the journal, if not where it should be."""
    if not (journal := config.stash.get(JOURNAL, None)):
        return None
    if _is_unsaved(config) and journal.path:
        command = f"python -m benches.journal {quote(str(journal.path))} -o RESULTS.json"
        return f"not saved: `{command}` makes a results file of it{journal.why}"
    misplaced = journal.troubles and (journal.chosen or _is_unsaved(config))
    return f"journal: {journal.path or 'none'}{journal.why}" if misplaced else None


@pytest.hookimpl(wrapper=True)  # around pytest-benchmark's, within the terminal's
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Where pytest-benchmark cannot save, say so in one line; the journal is kept unless it could."""
    results = session.config.stash[RESULTS]
    with undisturbed():
        try:
            if (keeper := session.config.stash[GATE]).judges and results["selected"]:
                keeper.judge(now(session.config))
                session.exitstatus = session.exitstatus or keeper.exit_code()
            return (yield)
        except Exception as error:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
            results["trouble"] = f"pytest-benchmark could not finish: {in_one_line(error)}"
            results["saved"] = False
        finally:
            if journal := session.config.stash.get(JOURNAL, None):
                journal.close(until_now(session.config), wanted=_is_unsaved(session.config))
            terminal = session.config.pluginmanager.get_plugin("terminalreporter")
            if terminal and session.exitstatus == pytest.ExitCode.INTERNAL_ERROR:  # then there is no summary
                _tell(session.config, terminal)
