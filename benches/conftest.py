"""What the benchmarks share while their parameters stay the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from benches.harness.stash import SELECTION
from benches.harness.stopwatch import FEWEST_ROUNDS, Limits
from benches.harness.timeline import CudaTimeline, Timeline
from benches.harness.workbench import Workbench, keeps_traces
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


def _shared(config: pytest.Config, workbench: Workbench, key: tuple[str, ...], reason: str | None, build: Any) -> Any:
    if reason:
        pytest.skip(reason)
    return workbench.get(key, build, keeps_traces(config))


@pytest.fixture
def layer(
    pytestconfig: pytest.Config,
    workbench: Workbench,
    timeline: Timeline | None,
    limits: Limits,
    model: str,
    stage: str,
    recipe: str,
) -> LayerMeasurement:
    """A layer in one stage and recipe."""
    from benches.harness.measurements import LayerMeasurement

    selection = pytestconfig.stash[SELECTION]
    reason = support(recipe, selection.groups[model], selection.device, stage)
    build = partial(LayerMeasurement, selection.model(model), stage, recipe, selection.device, timeline, limits)
    return _shared(pytestconfig, workbench, ("layer", model, stage, recipe), reason, build)


@pytest.fixture
def gemms(
    pytestconfig: pytest.Config,
    workbench: Workbench,
    timeline: Timeline | None,
    limits: Limits,
    model: str,
    recipe: str,
) -> GemmMeasurement:
    """The GEMMs of a layer, or of shapes given by hand, in one recipe."""
    from benches.harness.measurements import GemmMeasurement

    selection = pytestconfig.stash[SELECTION]
    group = selection.groups[model]
    build = partial(GemmMeasurement, group, recipe, selection.device, timeline, limits)
    return _shared(pytestconfig, workbench, ("gemm", model, recipe), support(recipe, group, selection.device), build)
