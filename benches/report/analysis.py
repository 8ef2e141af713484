"""What a results file says: times, speedups, sums and shares per model, and notes on what to be careful with.

Pure functions of the parsed JSON. A value that cannot be known, because a case it needs has no time, is None.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

from shapes.cases import KINDS, LAYER_PASSES, MODES, GemmCase, LayerCase
from shapes.gemms import PASSES, QUANTIZATIONS, Gemm, LinearGroup, layer_linears, parse_shapes
from shapes.models import ModelConfig
from shapes.recipes import RECIPES
from shapes.stages import EXECUTIONS, STAGES

SCHEMA = 2  # 1 had neither executions of layers nor evidence
MALFORMED = (AttributeError, TypeError, LookupError, ArithmeticError, RecursionError)  # from JSON of another shape
REFERENCE_RECIPE = "bf16"
EAGER = "eager"
REFERENCE_STAGES = ("torch", "torch_sdpa")
SAME_STAGE = "same_stage"  # as what a recipe's speedup is over: what quantization alone brings
# Training runs back to back, so that regime is preferred. A table is of one regime only.
PREFERRED_LAYER_REGIMES = ("sustained", "rested")
PREFERRED_GEMM_REGIMES = ("in_layer", "rested")
REGIMES = tuple(dict.fromkeys((*PREFERRED_LAYER_REGIMES, *PREFERRED_GEMM_REGIMES)))
GEMM_MODES = ("autocast", "prequantized")  # the GEMM is in the time
KNOWN = {
    "stage": tuple(STAGES),
    "recipe": tuple(RECIPES),
    "execution": tuple(EXECUTIONS),
    "regime": REGIMES,
    "mode": MODES,
    "pass_name": (*LAYER_PASSES, *PASSES),
}

Case = TypeVar("Case", LayerCase, GemmCase)
Seconds = dict[str, "float | None"]


@dataclass(frozen=True)
class Proof:
    """What an untimed round of a case did. None where it could not be seen.

    `launches` counts kernels, copies and memsets; `category_s` are their seconds by harness.kernels.CATEGORIES. The
    peak and what is saved for the backward pass are in bytes. `relative_error` is that of its worst result.
    """

    launches: int | None = None
    category_s: Mapping[str, float] | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    relative_error: float | None = None


@dataclass(frozen=True)
class Measurement(Generic[Case]):
    """The time of one case. `gemm` is the shape that ran, None for a layer; `throttled` says why it may be too long."""

    case: Case
    median_s: float
    interval_s: tuple[float, float] | None
    stopped: str
    launch_bound: bool
    gemm: Gemm | None
    host_s: float | None = None
    proof: Proof = Proof()
    throttled: str | None = None

    @property
    def uncertainty(self) -> float | None:
        """Half of the median's 95 % interval, as a fraction of the median; None without an interval.

        Of a case that two to five runs have, this interval is what their medians span.
        """
        if self.interval_s is None:
            return None
        low, high = self.interval_s
        return (high - low) / 2 / self.median_s


@dataclass(frozen=True)
class LayerRow:
    """One stage in one recipe: seconds per pass, speedups of forward_backward over bf16 stages.

    These are the reference stages and, for quantized recipes, SAME_STAGE. `host_s` is what launching forward_backward
    takes the host, `proof` what it ran, `errors` are by pass.
    """

    stage: str
    recipe: str
    execution: str
    seconds: Seconds
    speedups: dict[str, float | None]
    launch_bound: frozenset[str]  # passes
    uncertainty: float | None  # of forward_backward: half the 95 % interval of its median, relative
    host_s: float | None = None
    proof: Proof = Proof()
    errors: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The recipe, and how it was executed where that is not eager."""
        return self.recipe if self.execution == EAGER else f"{self.recipe} {self.execution}"


@dataclass(frozen=True)
class LayerTable:
    """A model's layer, stage by stage, all in one regime."""

    regime: str
    rows: tuple[LayerRow, ...]

    @property
    def references(self) -> list[str]:
        """What speedups are over, as far as any row has one."""
        return [over for over in self.rows[0].speedups if any(row.speedups[over] for row in self.rows)]


@dataclass(frozen=True)
class GemmRow:
    """One GEMM: seconds per recipe."""

    gemm: Gemm
    seconds: Seconds
    launch_bound: frozenset[str]  # recipes
    errors: Mapping[str, float | None] = field(default_factory=dict)  # relative, by recipe


@dataclass(frozen=True)
class GemmTable:
    """A layer's GEMMs in one mode and regime. Recipes without quantization are the same in both modes.

    Sums are None unless each of their GEMMs has a time.
    """

    mode: str
    regime: str
    recipes: tuple[str, ...]
    rows: tuple[GemmRow, ...]
    repeats: int

    def pass_s(self, pass_name: str, recipe: str) -> float | None:
        """Seconds of a layer's GEMMs of one pass."""
        return total(row.seconds.get(recipe) for row in self.rows if row.gemm.pass_name == pass_name)

    def layer_s(self, recipe: str) -> float | None:
        """Seconds of all GEMMs of a layer."""
        return total(row.seconds.get(recipe) for row in self.rows)

    def pass_error(self, pass_name: str, recipe: str) -> float | None:
        """The worst relative error of the GEMMs of one pass; None unless all are known."""
        errors = [row.errors.get(recipe) for row in self.rows if row.gemm.pass_name == pass_name]
        return None if not errors or None in errors else max(errors)  # type: ignore[type-var]

    def model_s(self, recipe: str) -> float | None:
        """Seconds of all GEMMs of the model's layers."""
        layer_s = self.layer_s(recipe)
        return None if layer_s is None else layer_s * self.repeats

    def speedup(self, seconds: Callable[[str], float | None], recipe: str) -> float | None:
        """How many times faster than bf16 a recipe is in what `seconds` gives for a recipe, as `layer_s`."""
        return ratio(seconds(REFERENCE_RECIPE), seconds(recipe))

    def layer_tflops(self, recipe: str) -> float | None:
        """Achieved 1e12 floating-point operations per second over all GEMMs of a layer."""
        return ratio(sum(row.gemm.flops for row in self.rows) / 1e12, self.layer_s(recipe))


@dataclass(frozen=True)
class GemmSplit:
    """Seconds of a layer's GEMMs in one recipe by pass, and of the quantizations they need.

    `quantization_s` is None where the modes needed to tell it apart were not both measured;
    `mode` then says which mode the passes are in.
    """

    recipe: str
    mode: str
    pass_s: dict[str, float]
    quantization_s: float | None


@dataclass(frozen=True)
class ModelReport:
    """All there is about one model. `config` is None for shapes given by hand."""

    name: str
    config: ModelConfig | None
    layers: LayerTable | None
    gemms: dict[str, GemmTable]  # by mode; only modes that were measured

    def quantization_share(self, recipe: str) -> float | None:
        """(autocast - prequantized) / autocast of a layer's GEMMs: the fraction that quantization takes."""
        both = [_layer_s(self.gemms.get(mode), recipe) for mode in GEMM_MODES]
        if not RECIPES[recipe].quantized or None in both:
            return None
        autocast, prequantized = both
        return (autocast - prequantized) / autocast  # type: ignore[operator]

    def gemm_splits(self) -> list[GemmSplit]:
        """Per recipe that has all GEMMs of a layer in some mode: passes and quantization, alone where possible."""
        splits = [_split(self.gemms, recipe) for recipe in _in_order(RECIPES, self._gemm_recipes())]
        return [split for split in splits if split]

    def _gemm_recipes(self) -> set[str]:
        return {recipe for table in self.gemms.values() for recipe in table.recipes}


@dataclass(frozen=True)
class Notes:
    """What to be careful with: case ids, in the file's order except `imprecise`, where the worst comes first."""

    imprecise: tuple[tuple[str, float | None], ...]  # stopped at the time limit: case, uncertainty of its median
    launch_bound: tuple[str, ...]
    throttled: dict[str, tuple[str, ...]]  # reason -> cases
    unknown_kernels: tuple[str, ...]  # names of category other, the longest first
    unseen_kernels: dict[str, int]  # reason -> how many layers or groups of GEMMs
    failed: dict[str, tuple[str, ...]]  # reason -> cases
    skipped: dict[str, int]  # reason -> how many cases


@dataclass(frozen=True)
class Analysis:
    """A results file, understood. `gpu` is None where there was none; a baseline pools several runs."""

    device: str
    gpu: str | None
    versions: dict[str, str]
    measured: int
    not_run: int  # selected, and the run ended before them
    spent_s: dict[str, float]  # seconds of the run by what they went into, and `all`
    models: tuple[ModelReport, ...]
    notes: Notes
    runs: int = 1
    boards: int = 1


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """numerator / denominator, or None when either is not known."""
    return None if numerator is None or denominator is None else numerator / denominator


def total(parts: Iterable[float | None]) -> float | None:
    """The sum, or None when there is no part or one is not known."""
    known = list(parts)
    return None if not known or None in known else sum(known)  # type: ignore[arg-type]


def analyse(results: Mapping[str, Any], regime: str | None = None) -> Analysis:
    """Analyse a results file, parsed from JSON; with a regime, only the times of that one.

    Raises ValueError, in one line, for something that is not a results file of this suite or of another schema.
    """
    suite = _reportable(results)
    not_measured = suite.get("not_measured") or []
    layers, gemms = _measurements(results["benchmarks"])
    if regime:
        layers = {case: found for case, found in layers.items() if case.regime == regime}
        gemms = {case: found for case, found in gemms.items() if case.regime == regime}
    models = suite["models"]
    for model in (*(case.model for case in layers), *(case.model for case in gemms)):
        if model not in models:
            raise ValueError(f"results file: there are cases of model {model!r}, which suite.models lacks")
    machine = results.get("machine_info") or {}
    versions = machine.get("versions") or {}
    return Analysis(
        device=suite.get("device") or "cpu",
        gpu=(machine.get("gpu") or {}).get("name"),
        versions={name: str(version) for name, version in versions.items() if version},
        measured=len(layers) + len(gemms),
        not_run=int(suite.get("not_run") or 0),
        spent_s={name: float(seconds) for name, seconds in (suite.get("spent_s") or {}).items()},
        models=tuple(_model_report(name, models[name], layers, gemms, not_measured) for name in models),
        notes=_notes([*layers.values(), *gemms.values()], not_measured, suite.get("evidence") or {}),
        runs=len(suite.get("runs") or ()) or 1,
        boards=len({run.get("uuid") for run in suite.get("runs") or ()}) or 1,
    )


def timed_cases(results: Mapping[str, Any]) -> list[Measurement[Any]]:
    """Every case of a results file that has a time. Raises as `analyse` does."""
    _reportable(results)
    layers, gemms = _measurements(results["benchmarks"])
    return [*layers.values(), *gemms.values()]


def suite_of(results: Any) -> Mapping[str, Any]:
    """What a parsed results file has from this suite. Raises ValueError where it has nothing, or another schema."""
    suite = results.get("suite") if isinstance(results, Mapping) else None
    if not isinstance(suite, Mapping):
        raise ValueError("not a results file of this suite: it has no top-level object 'suite'")
    if suite.get("schema") != SCHEMA:
        raise ValueError(f"has schema {suite.get('schema')!r}, not {SCHEMA}")
    return suite


def _reportable(results: Any) -> Mapping[str, Any]:
    suite = suite_of(results)
    if not isinstance(results.get("benchmarks"), list) or not isinstance(suite.get("models"), Mapping):
        raise ValueError("results file: 'benchmarks' must be a list and 'suite.models' an object")
    return suite


def _measurements(
    benchmarks: Sequence[Mapping[str, Any]],
) -> tuple[dict[LayerCase, Measurement[LayerCase]], dict[GemmCase, Measurement[GemmCase]]]:
    """Layers and GEMMs that have a time. Benchmarks that are no cases of this suite are left out."""
    layers: dict[LayerCase, Measurement[LayerCase]] = {}
    gemms: dict[GemmCase, Measurement[GemmCase]] = {}
    tables: dict[str, Any] = {LayerCase.kind: layers, GemmCase.kind: gemms}
    for benchmark in benchmarks:
        extra = benchmark.get("extra_info") or {}
        if extra.get("kind") not in tables:
            continue
        table = tables[extra["kind"]]
        try:
            measurement: Measurement[Any] = _measurement(KINDS[extra["kind"]], extra, benchmark["stats"])
        except (KeyError, TypeError, ValueError) as error:
            problem = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"results file: benchmark {benchmark.get('name')!r}: {problem}") from None
        if measurement.case in table:
            raise ValueError(f"results file: case {measurement.case.id} is there twice")
        table[measurement.case] = measurement
    return layers, gemms


def _measurement(kind: type[Case], extra: Mapping[str, Any], stats: Mapping[str, Any]) -> Measurement[Case]:
    if wrong := [axis for axis in kind.axes if not isinstance(extra[axis], str)]:
        raise ValueError(f"{wrong[0]} {extra[wrong[0]]!r} is no name")
    case = kind(**{axis: extra[axis] for axis in kind.axes})
    for axis, known in KNOWN.items():
        if axis in kind.axes and extra[axis] not in known:
            raise ValueError(f"unknown {axis} {extra[axis]!r}; known: {', '.join(known)}")
    median_s = float(stats["median"])
    if not 1e-12 < median_s < 1e12:  # seconds; also false for NaN
        raise ValueError(f"median {median_s} s is no time")
    interval = extra.get("interval_s")
    gemm = None
    if isinstance(case, GemmCase):
        gemm = Gemm(case.linear, case.pass_name, int(extra["m"]), int(extra["n"]), int(extra["k"]))
    return Measurement(
        case=case,
        median_s=median_s,
        interval_s=(float(interval[0]), float(interval[1])) if interval else None,
        stopped=extra.get("stopped") or "",
        launch_bound=bool(extra.get("launch_bound")),
        gemm=gemm,
        host_s=extra.get("host_median_s"),
        proof=Proof(**{one.name: extra.get(one.name) for one in fields(Proof)} | {"launches": launches_of(extra)}),
        throttled=(extra.get("gpu_state") or {}).get("throttled"),
    )


def launches_of(extra: Mapping[str, Any]) -> int | None:
    """How many kernels, copies and memsets a case launches, None if not known. Raises ValueError for no count."""
    launches = extra.get("launches")
    if launches is None or (type(launches) is int and 0 <= launches < 1e9):
        return launches
    raise ValueError(f"launches {launches!r} is no count")


def _model_report(
    name: str,
    entry: Mapping[str, Any],
    layers: Mapping[LayerCase, Measurement[LayerCase]],
    gemms: Mapping[GemmCase, Measurement[GemmCase]],
    not_measured: Sequence[Mapping[str, Any]],
) -> ModelReport:
    config = _config(name, entry)
    own_gemms = {case: found for case, found in gemms.items() if case.model == name}
    tables: dict[str, GemmTable] = {}
    if own_gemms:
        group = layer_linears(config) if config else _given_shapes(name, own_gemms, not_measured)
        candidates = {mode: _gemm_table(mode, group, own_gemms) for mode in MODES}
        tables = {mode: table for mode, table in candidates.items() if table}
    layer_table = _layer_table({case: found for case, found in layers.items() if case.model == name})
    return ModelReport(name, config, layer_table, tables)


def _config(name: str, entry: Mapping[str, Any]) -> ModelConfig | None:
    """None for shapes given by hand: they have no hidden size. Keys that are no field are left out."""
    if not entry.get("hidden_size"):
        return None
    known = {one.name: entry[one.name] for one in fields(ModelConfig) if one.name in entry}
    try:
        return ModelConfig(**(known | {"name": name}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"results file: model {name!r}: {error}") from None


def _layer_table(measured: Mapping[LayerCase, Measurement[LayerCase]]) -> LayerTable | None:
    """Rows are the combinations measured in any regime, so that one lost in the table's regime stays visible."""
    regime = _first(PREFERRED_LAYER_REGIMES, {case.regime for case in measured})
    if regime is None:
        return None
    model = next(iter(measured)).model

    def find(stage: str, recipe: str, execution: str, name: str) -> Measurement[LayerCase] | None:
        return measured.get(LayerCase(model, stage, recipe, execution, regime, name))

    whole = {stage: find(stage, REFERENCE_RECIPE, EAGER, "forward_backward") for stage in REFERENCE_STAGES}
    references = {stage: found.median_s if found else None for stage, found in whole.items()}
    there = {(case.stage, case.recipe, case.execution) for case in measured}
    rows = []
    for key in itertools.product(STAGES, RECIPES, EXECUTIONS):
        if key in there:
            stage, recipe, execution = key
            own = find(stage, REFERENCE_RECIPE, execution, "forward_backward") if RECIPES[recipe].quantized else None
            over = references | {SAME_STAGE: own.median_s if own else None}
            rows.append(_layer_row(key, {name: find(*key, name) for name in LAYER_PASSES}, over))
    return LayerTable(regime, tuple(rows))


def _layer_row(
    key: tuple[str, str, str], passes: Mapping[str, Measurement[LayerCase] | None], references: Seconds
) -> LayerRow:
    whole = passes["forward_backward"]
    times = {name: found.median_s if found else None for name, found in passes.items()}
    return LayerRow(
        *key,
        seconds=times,
        speedups={stage: ratio(time, times["forward_backward"]) for stage, time in references.items()},
        launch_bound=frozenset(name for name, found in passes.items() if found and found.launch_bound),
        uncertainty=whole.uncertainty if whole else None,
        host_s=whole.host_s if whole else None,
        proof=whole.proof if whole else Proof(),
        errors={name: found.proof.relative_error if found else None for name, found in passes.items()},
    )


def _given_shapes(name: str, measured: Iterable[GemmCase], not_measured: Sequence[Mapping[str, Any]]) -> LinearGroup:
    """Shapes given by hand, measured or not: each linear is named by its shape."""
    ids = [case.id for case in measured] + [str(lost.get("case")) for lost in not_measured]
    own = dict.fromkeys(id.rsplit("/", 1)[-1] for id in ids if id.startswith(f"{GemmCase.kind}/{name}/"))
    return parse_shapes(",".join(own))


def _gemm_table(mode: str, group: LinearGroup, measured: Mapping[GemmCase, Measurement[GemmCase]]) -> GemmTable | None:
    """None when no recipe was measured in this mode; unquantized ones alone make no second table.

    One of quantizations has no lines of passes, and no recipes, that have none.
    """
    regime = _first(PREFERRED_GEMM_REGIMES, {case.regime for case in measured})
    recipes = {case.recipe for case in measured if (case.mode, case.regime) == (mode, regime)}
    quantized = {case.recipe for case in measured if RECIPES[case.recipe].quantized}
    if regime is None or not recipes or (quantized and not quantized & recipes):
        return None

    def find(recipe: str, gemm: Gemm) -> Measurement[GemmCase] | None:
        in_mode = mode if RECIPES[recipe].quantized or mode == "quantization" else "autocast"
        return measured.get(GemmCase(group.name, recipe, regime, in_mode, gemm.pass_name, gemm.linear))

    rows = []
    for planned in (gemm for gemm in group.gemms() if mode in GEMM_MODES or QUANTIZATIONS[gemm.pass_name]):
        found = {recipe: find(recipe, planned) for recipe in _in_order(RECIPES, {case.recipe for case in measured})}
        # The shape that ran wins over the one that this version of the suite would run.
        gemm = next((one.gemm for one in found.values() if one and one.gemm), planned)
        slow = frozenset(recipe for recipe, one in found.items() if one and one.launch_bound)
        seconds = {recipe: one.median_s if one else None for recipe, one in found.items()}
        errors = {recipe: one.proof.relative_error if one else None for recipe, one in found.items()}
        rows.append(GemmRow(gemm, seconds, slow, errors))
    shown = [recipe for recipe in rows[0].seconds if any(row.seconds[recipe] is not None for row in rows)]
    return GemmTable(mode, regime, tuple(shown), tuple(rows), group.repeats)


def _layer_s(table: GemmTable | None, recipe: str) -> float | None:
    return table.layer_s(recipe) if table else None


def _split(gemms: Mapping[str, GemmTable], recipe: str) -> GemmSplit | None:
    autocast, prequantized = GEMM_MODES
    layer_s = {mode: _layer_s(gemms.get(mode), recipe) for mode in GEMM_MODES}
    complete = [mode for mode in (prequantized, autocast) if layer_s[mode] is not None]
    if not complete:
        return None
    mode = complete[0]
    pass_s = {name: gemms[mode].pass_s(name, recipe) or 0.0 for name in PASSES}
    quantization_s = None if RECIPES[recipe].quantized else 0.0
    if len(complete) == len(GEMM_MODES):
        quantization_s = layer_s[autocast] - layer_s[prequantized]  # type: ignore[operator]
    return GemmSplit(recipe, mode, pass_s, quantization_s)


def _notes(
    measured: Sequence[Measurement[Any]],
    not_measured: Sequence[Mapping[str, Any]],
    evidence: Mapping[str, Mapping[str, Any]],
) -> Notes:
    imprecise = [(found.case.id, found.uncertainty) for found in measured if found.stopped == "max_time"]
    failed = _by_reason((_reason(lost), str(lost.get("case"))) for lost in _with_outcome("failed", not_measured))
    return Notes(
        imprecise=tuple(sorted(imprecise, key=lambda one: -math.inf if one[1] is None else -one[1])),
        launch_bound=tuple(found.case.id for found in measured if found.launch_bound),
        throttled=_by_reason((found.throttled, found.case.id) for found in measured if found.throttled),
        unknown_kernels=_unknown_kernels(evidence),
        unseen_kernels=dict(
            Counter(one["kernels_absent"] for one in evidence.values() if one.get("kernels_absent")).most_common()
        ),
        failed=failed,
        skipped=dict(Counter(map(_reason, _with_outcome("skipped", not_measured))).most_common()),
    )


def _by_reason(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    cases: dict[str, tuple[str, ...]] = {}
    for reason, case in pairs:
        cases[reason] = (*cases.get(reason, ()), case)
    return cases


def _unknown_kernels(evidence: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    seconds: Counter[str] = Counter()
    for found in evidence.values():
        for part in found["segments"].values():
            for use in part["kernels"] or ():
                if use["category"] == "other":
                    seconds[use["name"]] += use["device_s"]
    return tuple(name for name, _ in seconds.most_common())


def _with_outcome(outcome: str, not_measured: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [lost for lost in not_measured if lost.get("outcome") == outcome]


def _reason(lost: Mapping[str, Any]) -> str:
    """The reason on one line."""
    return " ".join(str(lost.get("reason") or "no reason given").split())


def _first(preferred: Sequence[str], there: set[str]) -> str | None:
    return next((name for name in preferred if name in there), None)


def _in_order(table: Iterable[str], there: set[str]) -> list[str]:
    """Names in the table's order."""
    return [name for name in table if name in there]
