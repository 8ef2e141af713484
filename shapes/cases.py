"""What is measured: model x stage x recipe x execution x regime x pass -> Case, its id, and whether it can run here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shapes.gemms import PASSES, QUANTIZATIONS, LinearGroup
from shapes.recipes import RECIPES
from shapes.stages import EXECUTIONS, STAGES

LAYER_PASSES = ("forward", "backward", "forward_backward")
MODES = ("autocast", "prequantized", "quantization")

# How rounds follow each other. `rested`: the GPU idles before each short batch, so that its power limit does not
# matter. `sustained` and `in_layer`: back to back, as in training, a layer as a whole and its GEMMs one by one.
LAYER_REGIMES = {"cuda": ("rested", "sustained"), "cpu": ("sustained",)}
GEMM_REGIMES = {"cuda": ("rested", "in_layer"), "cpu": ("in_layer",)}


class _Case:
    kind: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]
    compared: ClassVar[tuple[str, ...]]  # axes along which people compare times

    @property
    def values(self) -> tuple[str, ...]:
        """The case's value on each of its axes."""
        return tuple(getattr(self, axis) for axis in self.axes)

    @property
    def id(self) -> str:
        """The case's name in every file, independent of the test that measures it."""
        return "/".join((self.kind, *self.values))

    @property
    def group(self) -> str:
        """What it has in common with the cases it is compared with."""
        return " ".join((self.kind, *(getattr(self, axis) for axis in self.axes if axis not in self.compared)))


@dataclass(frozen=True)
class LayerCase(_Case):
    """The time of one pass of one layer."""

    kind = "layer"
    axes = ("model", "stage", "recipe", "execution", "regime", "pass_name")
    compared = ("stage", "recipe", "execution")

    model: str
    stage: str
    recipe: str
    execution: str
    regime: str
    pass_name: str


@dataclass(frozen=True)
class GemmCase(_Case):
    """The time of one GEMM: with the quantizations done for it (autocast), alone (prequantized), or of those alone.

    Without quantization there is nothing to tell apart, and the only mode is autocast.
    """

    kind = "gemm"
    axes = ("model", "recipe", "regime", "mode", "pass_name", "linear")
    compared = ("recipe", "mode")

    model: str
    recipe: str
    regime: str
    mode: str
    pass_name: str
    linear: str


KINDS: dict[str, type[LayerCase | GemmCase]] = {kind.kind: kind for kind in (LayerCase, GemmCase)}


def _only_emulated(stage: str, recipe: str, device: str) -> bool:
    """Emulation stands in for a GPU; on one its times would say nothing."""
    return device == "cuda" and STAGES[stage].backend == "torch" and RECIPES[recipe].quantized


def layer_cases(
    model: str, stages: Sequence[str], recipes: Sequence[str], device: str, executions: Sequence[str] = ("eager",)
) -> Iterator[LayerCase]:
    """Cases of a model's layer. On a GPU, PyTorch's stages have no quantized recipes; on a CPU they emulate them.

    Weights that are not quantized, or not by Transformer Engine, cannot be cached: there is no case of it.
    """
    for stage, recipe, execution in itertools.product(stages, recipes, executions):
        can_cache = RECIPES[recipe].quantized and STAGES[stage].backend == "te"
        if _only_emulated(stage, recipe, device) or (EXECUTIONS[execution].cached_weights and not can_cache):
            continue
        for regime, pass_name in itertools.product(LAYER_REGIMES[device], LAYER_PASSES):
            yield LayerCase(model, stage, recipe, execution, regime, pass_name)


def gemm_cases(group: LinearGroup, recipes: Sequence[str], modes: Sequence[str], device: str) -> Iterator[GemmCase]:
    """Cases of a group's GEMMs, and of their quantizations where a pass has any."""
    for recipe, regime in itertools.product(recipes, GEMM_REGIMES[device]):
        for mode, pass_name in itertools.product(modes if RECIPES[recipe].quantized else MODES[:1], PASSES):
            if mode == "quantization" and not QUANTIZATIONS[pass_name]:
                continue
            for linear in group.linears:
                yield GemmCase(group.name, recipe, regime, mode, pass_name, linear.name)


def _ask_te(recipe: str) -> str | None:
    from shapes.backends.te import unsupported_reason

    return unsupported_reason(recipe)


def support(
    recipe: str,
    group: LinearGroup,
    device: str,
    stage: str | None = None,
    te_reason: Callable[[str], str | None] | None = None,
) -> str | None:
    """Why a recipe cannot run on these linears here, in words a person can act on; None if it can.

    `device` is `cuda` or `cpu`; `te_reason` says why Transformer Engine cannot run a recipe (default: ask it).
    Without a stage the GEMMs alone are meant.
    """
    needs_te = STAGES[stage].backend == "te" if stage else device == "cuda"
    if needs_te and device == "cpu":
        return f"stage {stage} needs Transformer Engine and a GPU; this run is on the CPU"
    if needs_te:
        if reason := (te_reason or _ask_te)(recipe):
            return f"{recipe}: {reason}"
    elif stage and _only_emulated(stage, recipe, device):
        return f"on a GPU {recipe} needs a stage of Transformer Engine; PyTorch's stages emulate it on the CPU only"
    for linear in group.linears:
        if reason := RECIPES[recipe].misaligned(linear.tokens, linear.in_features, linear.out_features):
            return f"linear {linear.name}: {reason}"
    return None
