"""What the benchmarks share while their parameters stay the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from benches.harness.accuracy import References
from benches.harness.controls import Controls
from benches.harness.plugin import now
from benches.harness.safety import measures
from benches.harness.stash import GATE, PLANTS, RESULTS, SELECTION, spending
from benches.harness.stopwatch import FEWEST_ROUNDS, Limits
from benches.harness.timeline import CudaTimeline, Timeline
from benches.harness.workbench import Workbench, keeps_traces
from benches.judging.gatekeeper import PAUSE_S
from shapes.cases import support

if TYPE_CHECKING:  # it imports torch, which collecting must not
    from benches.harness.measurements import GemmMeasurement, LayerMeasurement


@pytest.fixture(scope="session")
def limits(pytestconfig: pytest.Config) -> Limits:
    """When a measurement ends: pytest-benchmark's options."""
    option = pytestconfig.getoption
    limits = Limits(
        min_rounds=max(option("benchmark_min_rounds"), FEWEST_ROUNDS), max_time_s=float(option("benchmark_max_time"))
    )
    precision = option("benchmark_precision", None)  # pytest-benchmark has it since 5.3, of the mean; here the median's
    return replace(limits, precision=precision, confidence=option("benchmark_confidence")) if precision else limits


@pytest.fixture(scope="session")
def timeline(pytestconfig: pytest.Config) -> Timeline | None:
    """The GPU's stream, or None on the CPU."""
    return CudaTimeline() if pytestconfig.stash[SELECTION].device == "cuda" else None


@pytest.fixture(scope="session")
def workbench() -> Workbench:
    """Holds the layer, or the operands, that the cases at hand share."""
    return Workbench()


@pytest.fixture(scope="session")
def references(pytestconfig: pytest.Config) -> References:
    """Unquantized results, against which errors are reported."""
    return References(pytestconfig.stash[SELECTION].device)


@pytest.fixture(scope="session")
def controls(pytestconfig: pytest.Config, timeline: Timeline | None, limits: Limits) -> Iterator[Controls]:
    """Times what TE has no part in: before the first case, every half minute, and after the last one."""
    device, taken = pytestconfig.stash[SELECTION].device, pytestconfig.stash[RESULTS]["controls"]
    controls = Controls(device, timeline, limits, taken)
    yield controls
    if controls.taken:
        with spending(pytestconfig, "controls"):
            controls.take()


@pytest.fixture(scope="session")
def second_look(pytestconfig: pytest.Config, workbench: Workbench, timeline: Timeline | None) -> Iterator[None]:
    """After the last case, measures again what seems slower than the baseline."""
    yield
    rest = partial(timeline.rest if timeline else time.sleep, PAUSE_S)
    with spending(pytestconfig, "second_look"):
        pytestconfig.stash[GATE].measure_again(now(pytestconfig), workbench, rest)


def _shared(request: pytest.FixtureRequest, key: tuple[str, ...], reason: str | None, build: Any) -> Any:
    if reason:
        pytest.skip(reason)
    build = partial(_with_plants, build, request.config.stash[PLANTS])
    if measures(request.config):
        controls = request.getfixturevalue("controls")
        with spending(request.config, "controls"):
            controls.take_if_due()
    with spending(request.config, "building"):
        shared = request.getfixturevalue("workbench").get(key, build, keeps_traces(request.config))
    keeper = request.config.stash[GATE]
    if keeper.judges and measures(request.config):
        keeper.builders[shared.key] = build
        request.getfixturevalue("second_look")
    return shared


def _with_plants(build: Any, plants: Any) -> Any:
    shared = build()
    shared.plants = plants
    return shared


@pytest.fixture
def layer(
    request: pytest.FixtureRequest,
    timeline: Timeline | None,
    limits: Limits,
    references: References,
    model: str,
    stage: str,
    recipe: str,
    execution: str,
) -> LayerMeasurement:
    """A layer in one stage, recipe and execution."""
    from benches.harness.measurements import LayerMeasurement

    selection = request.config.stash[SELECTION]
    reason = support(recipe, selection.groups[model], selection.device, stage)
    build = partial(
        LayerMeasurement,
        selection.model(model),
        stage,
        recipe,
        execution,
        selection.device,
        timeline,
        limits,
        references,
    )
    return _shared(request, ("layer", model, stage, recipe, execution), reason, build)


@pytest.fixture
def gemms(
    request: pytest.FixtureRequest,
    timeline: Timeline | None,
    limits: Limits,
    model: str,
    recipe: str,
) -> GemmMeasurement:
    """The GEMMs of a layer, or of shapes given by hand, in one recipe."""
    from benches.harness.measurements import GemmMeasurement

    selection = request.config.stash[SELECTION]
    group = selection.groups[model]
    build = partial(GemmMeasurement, group, recipe, selection.device, timeline, limits)
    return _shared(request, ("gemm", model, recipe), support(recipe, group, selection.device), build)
