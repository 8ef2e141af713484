"""An analysis as figures, one per model: the layer stage by stage, and where its GEMM time goes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benches.report.analysis import (
    REFERENCE_RECIPE,
    REFERENCE_STAGES,
    SAME_STAGE,
    Analysis,
    GemmSplit,
    LayerRow,
    LayerTable,
    ModelReport,
)
from benches.report.terminal import MARK, TIME_DIGITS, UNITS, device_line, model_line, significant, times, unit_for
from shapes.gemms import PASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with any colour vision; the lightness differs as well, for print.
BLUE, SKY, GREEN, ORANGE, GREY = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#BBBBBB"
LAYER_COLORS = {"forward": BLUE, "backward": SKY, "forward_backward": GREY}
GEMM_COLORS = {**dict(zip(PASSES, (BLUE, SKY, GREEN), strict=True)), "quantization": ORANGE}
REFERENCE_NAMES = {SAME_STAGE: "the same stage"}
STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
TITLE: dict[str, Any] = {"fontsize": 9, "loc": "left", "pad": 24}  # pad: a row for the legend
ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "columnspacing": 1.2}
BESIDE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}


def plot(analysis: Analysis, path: str | Path) -> list[Path]:
    """Draw one figure per model that has a time and return the paths written.

    With one model the path is `path`; with several, the model's name is put before its suffix, and characters
    that a file name should not have become `_`. Raises ImportError without matplotlib, ValueError for a format
    that it does not know or when there is nothing to draw, OSError for a path that cannot be written.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error

    models = [model for model in analysis.models if model.layers or model.gemm_splits()]
    if not models:
        raise ValueError("nothing to draw: no layer and no complete set of GEMMs was measured")
    path = Path(path)
    if path.is_dir():
        raise ValueError("a folder; name a file in it")
    path = path if path.suffix else path.with_suffix(".png")
    paths = [_path(path, model.name, len(models) > 1) for model in models]
    with mpl.rc_context(STYLE):
        for model, out in zip(models, paths, strict=True):
            _figure(analysis, model).savefig(out, dpi=150)
    return paths


def _path(path: Path, model: str, several: bool) -> Path:
    safe = "".join(char if char.isalnum() or char in "._-" else "_" for char in model)
    return path.with_name(f"{path.stem}-{safe}{path.suffix}") if several else path


def _figure(analysis: Analysis, model: ModelReport) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    splits = model.gemm_splits()
    bars = len(model.layers.rows) if model.layers else 0
    figure = Figure(figsize=(12, max(4.6, 1.9 + 0.3 * bars)), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    ratios = [1.25, 1] if model.layers and splits else [1]
    axes = list(figure.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0])
    if model.layers:
        _draw_layers(axes[0], model.layers)
    if splits:
        _draw_gemms(axes[-1], model, splits)
    lines = textwrap.wrap(model_line(model), 120) + textwrap.wrap(device_line(analysis), 130)
    figure.suptitle("\n".join(lines), fontsize=10)
    return figure


def _draw_layers(axes: Axes, table: LayerTable) -> None:
    """Horizontal bars, backward behind forward; the numbers beside them are of forward_backward."""
    unit = unit_for(time for row in table.rows for time in row.seconds.values())
    reference = _reference_stage(table)
    position, ticks, drawn = 0.0, {}, {}
    for index, row in enumerate(table.rows):
        position += 1.0 if not index or table.rows[index - 1].stage == row.stage else 1.5
        ticks[position] = f"{row.stage}  {row.label}"
        end = 0.0
        for name, time in _layer_parts(row).items():
            drawn[name] = axes.barh(position, time * UNITS[unit], 0.8, left=end, color=LAYER_COLORS[name])
            end += time * UNITS[unit]
        axes.annotate(_layer_label(row, reference, unit), (end, position), (4, 0), **BESIDE, va="center")
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(position + 0.8, 0.2)
    axes.margins(x=0.2)  # room for the labels
    over = f", speedup over {REFERENCE_NAMES.get(reference, reference)} in {REFERENCE_RECIPE}" if reference else ""
    axes.set_title(f"Layer, regime {table.regime}\nforward_backward in {unit}{over}", **TITLE)
    launch_bound = any("forward_backward" in row.launch_bound for row in table.rows)
    axes.set_xlabel(f"time, {unit}" + (f" ({MARK} launch-bound)" if launch_bound else ""))
    _legend(axes, drawn)


def _layer_parts(row: LayerRow) -> dict[str, float]:
    """Seconds of a row's bars: forward and backward, or both as one where they were not timed apart."""
    known = {name: time for name, time in row.seconds.items() if time is not None}
    both = {name: time for name, time in known.items() if name == "forward_backward"}
    apart = {name: time for name, time in known.items() if name not in both}
    return apart if len(apart) == 2 or not both else both


def _layer_label(row: LayerRow, reference: str | None, unit: str) -> str:
    both = row.seconds["forward_backward"]
    speedup = row.speedups[reference] if reference else None
    texts = [significant(both * UNITS[unit], TIME_DIGITS)] if both else []
    texts += [times(speedup)] if speedup else []
    return "  ".join(texts) + (MARK if "forward_backward" in row.launch_bound else "")


def _reference_stage(table: LayerTable) -> str | None:
    """What a PyTorch user would run, if it was measured; otherwise the other reference, the same stage, or none."""
    return next((stage for stage in (*reversed(REFERENCE_STAGES), SAME_STAGE) if stage in table.references), None)


def _draw_gemms(axes: Axes, model: ModelReport, splits: list[GemmSplit]) -> None:
    """Stacked bars per recipe; above them their sum and its speedup."""
    unit = unit_for(time for split in splits for time in split.pass_s.values())
    sums = {split.recipe: sum(split.pass_s.values()) + (split.quantization_s or 0.0) for split in splits}
    drawn = {}
    for position, split in enumerate(splits):
        end = 0.0
        # Where quantization is lost in the noise, its difference of two times can be negative.
        parts = {**split.pass_s, "quantization": max(split.quantization_s or 0.0, 0.0)}
        for name, time in parts.items():
            if time:
                drawn[name] = axes.bar(position, time * UNITS[unit], 0.7, bottom=end, color=GEMM_COLORS[name])
                end += time * UNITS[unit]
        text = significant(sums[split.recipe] * UNITS[unit], TIME_DIGITS)
        if split.recipe != REFERENCE_RECIPE and REFERENCE_RECIPE in sums:
            text += f"\n{times(sums[REFERENCE_RECIPE] / sums[split.recipe])}"
        axes.annotate(text, (position, end), (0, 3), **BESIDE, ha="center", va="bottom")
    axes.set_xticks(range(len(splits)), [_recipe_label(split) for split in splits])
    axes.set_xlim(-0.6, max(len(splits), 3) - 0.4)
    axes.margins(y=0.14)  # room for the labels
    regime = next(iter(model.gemms.values())).regime
    over = f", speedup over {REFERENCE_RECIPE}" if REFERENCE_RECIPE in sums else ""
    axes.set_title(f"All GEMMs of a layer, regime {regime}\nsum in {unit}{over}", **TITLE)
    axes.set_ylabel(f"time, {unit}")
    _legend(axes, drawn)


def _recipe_label(split: GemmSplit) -> str:
    name = split.recipe.replace("_", "\n")
    return name if split.quantization_s is not None else f"{name}\n({split.mode} only)"


def _legend(axes: Axes, drawn: dict[str, Any]) -> None:
    """In one row between title and axes: nothing is drawn there, however high the figure is."""
    axes.legend(drawn.values(), drawn.keys(), ncols=4, **ABOVE)
