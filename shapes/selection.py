"""What a run measures: models, stages, recipes and modes chosen by name. Everything is checked here, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shapes.cases import MODES, GemmCase, LayerCase, gemm_cases, layer_cases
from shapes.gemms import LinearGroup, layer_linears, parse_shapes
from shapes.models import MODELS, ModelConfig, resolve
from shapes.recipes import RECIPES
from shapes.stages import EXECUTIONS, STAGES

DEFAULT_MODELS = {"cuda": ("codonfm_5b", "llama3_8b"), "cpu": ("tiny",)}


@dataclass(frozen=True)
class Selection:
    """Models and shapes to measure, in which stages, recipes, executions and modes of GEMMs, on `cuda` or `cpu`."""

    device: str
    models: tuple[ModelConfig, ...]
    shapes: LinearGroup | None
    stages: tuple[str, ...]
    recipes: tuple[str, ...]
    modes: tuple[str, ...]
    executions: tuple[str, ...]

    @property
    def groups(self) -> dict[str, LinearGroup]:
        """The linears of each model, and the shapes given by hand."""
        groups = [layer_linears(model) for model in self.models] + ([self.shapes] if self.shapes else [])
        return {group.name: group for group in groups}

    def model(self, name: str) -> ModelConfig:
        """A selected model by its name. Raises KeyError for another."""
        return {model.name: model for model in self.models}[name]

    def layer_cases(self) -> list[LayerCase]:
        """Cases of all layers, those that share a layer next to each other."""
        return [
            case
            for model in self.models
            for case in layer_cases(model.name, self.stages, self.recipes, self.device, self.executions)
        ]

    def gemm_cases(self) -> list[GemmCase]:
        """Cases of all GEMMs, those that share operands next to each other."""
        return [
            case for group in self.groups.values() for case in gemm_cases(group, self.recipes, self.modes, self.device)
        ]


def _known(kind: str, names: Sequence[str], table: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in table:
            raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(table)}")
    return tuple(name for name in table if name in names)


def _models(names: Sequence[str], named: bool, hyperparameters: Mapping[str, int | None]) -> tuple[ModelConfig, ...]:
    given = {key: value for key, value in hyperparameters.items() if value is not None}
    if not named and {"hidden_size", "num_attention_heads"} <= given.keys():
        return (resolve(None, given),)
    if given and not names:
        raise ValueError(f"{', '.join(given)} would change a model, but shapes without a model select none")
    return tuple(resolve(name, given) for name in _known("model", names, tuple(MODELS)))


def select(
    device: str,
    models: Sequence[str] = (),
    hyperparameters: Mapping[str, int | None] | None = None,
    shapes: str | None = None,
    stages: Sequence[str] = (),
    recipes: Sequence[str] = (),
    without: Sequence[str] = (),
    modes: Sequence[str] = MODES,
    graphs: bool = False,
    cached_weights: bool = False,
) -> Selection:
    """A selection; whatever is left empty gets its default. `without` names recipes to leave out.

    Hyperparameters change the models; hidden size and heads without a named model define a new one. Shapes without
    a model select no layer. `graphs` and `cached_weights` add layers executed so to those that are not.

    Raises ValueError, in one line that names what is known, for anything that cannot be.
    """
    default_recipes = [recipe.id for recipe in RECIPES.values() if recipe.default]
    chosen = _known("recipe", recipes or default_recipes, tuple(RECIPES))
    if not set(chosen) - set(without):
        raise ValueError(f"no recipe is left: {', '.join(chosen)} was asked for and left out")
    known_stages = _known("stage", stages or tuple(STAGES), tuple(STAGES))
    if stages and recipes and device == "cuda" and not any(layer_cases("", known_stages, chosen, device)):
        raise ValueError(f"on a GPU {', '.join(known_stages)} run unquantized recipes only, not {', '.join(chosen)}")
    for option, asked in (("--graphs", graphs), ("--weights cached", cached_weights)):
        if asked and device != "cuda":
            raise ValueError(f"{option} needs Transformer Engine and a GPU; this run is on the CPU")
    return Selection(
        device=device,
        models=_models(models or (() if shapes else DEFAULT_MODELS[device]), bool(models), hyperparameters or {}),
        shapes=parse_shapes(shapes) if shapes is not None else None,
        stages=known_stages,
        recipes=tuple(name for name in chosen if name not in without),
        modes=tuple(modes),
        executions=tuple(
            execution.id
            for execution in EXECUTIONS.values()
            if (graphs or not execution.graph) and (cached_weights or not execution.cached_weights)
        ),
    )
