"""Every command-line option of the suite, and what is built from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benches.harness import device as devices
from benches.harness import planting
from benches.harness.safety import check_options
from benches.harness.stash import GATE, PLANTS, RESULTS, SELECTION, new_results
from benches.judging.gatekeeper import Gatekeeper, choose_baseline
from shapes.cases import MODES
from shapes.models import HYPERPARAMETERS, MODELS
from shapes.recipes import RECIPES
from shapes.selection import select
from shapes.stages import STAGES

pytest_plugins = ["benches.harness.plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options; their help says what they take."""
    group = parser.getgroup("Transformer Engine suite")
    add = group.addoption
    add("--device", choices=("auto", *devices.DEVICES), default="auto", help="auto: the GPU if it and TE are there")
    for name, table in (("model", MODELS), ("stage", STAGES), ("recipe", RECIPES)):
        known = f"{name} to measure; repeatable; one of {', '.join(table)}"
        add(f"--{name}", action="append", default=[], metavar="NAME", help=known)
    for name in HYPERPARAMETERS:
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{name} of the models, or of a new one")
    shapes_help = "linears to measure: tokens x in_features x out_features; repeatable"
    add("--shapes", action="append", default=[], metavar="MxKxN,...", help=shapes_help)
    add(
        "--pre-quantize",
        action="store_true",
        help="GEMMs alone, quantized beforehand; default: with, without, and quantizations",
    )
    add("--graphs", action="store_true", help="layers also as CUDA graphs")
    weights_help = "cached: quantized layers also with weights quantized in an earlier microbatch"
    add("--weights", choices=("requantized", "cached"), default="requantized", help=weights_help)
    strict_help = "with --benchmark-compare: fail for unresolved and changed cases and for skips too"
    add("--gate-strict", action="store_true", help=strict_help)
    plant_help = f"slow matching cases down, to see what a comparison catches; repeatable; {planting.FORM}"
    add("--plant", action="append", default=[], metavar="REGEX=SIZE", help=plant_help.replace("%", "%%"))
    add("--no-fp8", action="store_true", help="leave out mxfp8")
    add("--no-fp4", action="store_true", help="leave out nvfp4")
    journal_help = "new file for the journal; default: in .benchmarks, and deleted once the results are saved"
    add("--journal", type=Path, metavar="FILE", help=journal_help)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """`cuda` or `cpu`, as --device says."""
    return pytestconfig.stash[SELECTION].device


def pytest_configure(config: pytest.Config) -> None:
    """Turn options into a selection, or end with one line that says what is wrong."""
    option = config.getoption
    device = option("device")
    if device == "auto":
        device = "cpu" if devices.why_not_cuda() else "cuda"
    try:
        config.stash[SELECTION] = select(
            device=device,
            models=option("model"),
            hyperparameters={name: option(name) for name in HYPERPARAMETERS},
            shapes=",".join(option("shapes")) if option("shapes") else None,
            stages=option("stage"),
            recipes=option("recipe"),
            without=[recipe for recipe, flag in (("mxfp8", "no_fp8"), ("nvfp4", "no_fp4")) if option(flag)],
            modes=("prequantized",) if option("pre_quantize") else MODES,
            graphs=option("graphs"),
            cached_weights=option("weights") == "cached",
        )
        config.stash[PLANTS] = [planting.parse(text) for text in option("plant")]
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    check_options(config)
    config.stash[RESULTS] = new_results()
    choose_baseline(config, device)
    config.stash[GATE] = Gatekeeper(option("gate_strict"))
    config.stash[GATE].load(config)
