"""An analysis as tables for a terminal: plain ASCII, legible without colour."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import NamedTuple

from benches.report.analysis import (
    REFERENCE_RECIPE,
    Analysis,
    GemmTable,
    LayerTable,
    ModelReport,
)
from shapes.cases import LAYER_PASSES, MODES
from shapes.gemms import PASSES
from shapes.recipes import RECIPES

NO_RICH = "`pip install rich` shows the results as tables here"
CPU_NOTICE = "CPU times: PyTorch layers and emulated recipes; they say nothing about a GPU"
HALF_INTERVAL = "half the 95 % interval of forward_backward's median"
MODE_MEANING = {
    "autocast": "GEMMs with the quantizations done for them",
    "prequantized": "GEMMs alone, operands quantized beforehand",
    "quantization": "what is quantized for these GEMMs, x and w for fprop and dy for dgrad",
}
WORK = {  # columns of the table of what a step runs: names of harness.kernels.CATEGORIES
    "GEMM": ("gemm_fp8", "gemm_fp4", "gemm_bf16", "gemm_other"),
    "quant": ("quantize",),
    "attn": ("attention",),
    "norm": ("norm",),
    "act": ("activation",),
    "rest": ("elementwise", "copy", "memset", "other"),
}
NARROWEST = 80  # columns: below, the terminal may break lines, but no digit is cut off
ERRORS = {"forward": "y", "backward": "grad"}  # passes and the heading of their errors
ERROR_MEANING = (
    f"Errors: relative, in the Frobenius norm, of the output and of the worst gradient, against torch_sdpa in "
    f"{REFERENCE_RECIPE}."
)
UNITS = {"us": 1e6, "ms": 1e3}  # per second
DASH = "-"
MARK = "*"  # launch-bound
TIME_DIGITS = 4  # a rested median is known to about 0.25 %; the column +- says how well a layer's is
RATIO_DIGITS = 3
FEW = 4  # names that a sentence lists
NARROW = 90  # below it, columns of a table stand one blank apart instead of two


class Cell(NamedTuple):
    """A number, whether it is of a launch-bound case, and a speedup or nothing."""

    number: str
    marked: bool = False
    speedup: str = ""


class Line(NamedTuple):
    """A line of a table: its labels, then its numbers. `total` lines are sums of others."""

    labels: tuple[str, ...]
    cells: tuple[Cell, ...]
    total: bool = False


@dataclass(frozen=True)
class Page:
    """Where tables are printed: columns, and whether escape codes may be used."""

    width: int
    color: bool

    @property
    def gap(self) -> int:
        """Blanks between two columns of a table."""
        return 1 if self.width < NARROW else 2

    def wrap(self, text: str, indent: str = "") -> str:
        """Text in lines that fit, all but the first indented. Long words, as case ids, are not cut."""
        return textwrap.fill(text, self.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def significant(value: float | None, digits: int) -> str:
    """The value with that many significant digits, never in exponent form; a dash for None."""
    if value is None:
        return DASH
    exponent = int(f"{value:.{digits - 1}e}".split("e")[1])  # of the rounded value: 9.9999 has that of 10.00
    decimals = digits - 1 - exponent
    return f"{round(value, decimals):.{max(decimals, 0)}f}"


def times(ratio: float | None) -> str:
    """A speedup, as `1.98x`."""
    return DASH if ratio is None else f"{significant(ratio, RATIO_DIGITS)}x"


def percent(fraction: float | None, digits: int | None = None) -> str:
    """A fraction, as `12.3 %`; with that many significant digits, if so asked, and 0 as it is."""
    if fraction is None:
        return DASH
    return f"{significant(100 * fraction, digits) if digits and fraction else f'{100 * fraction:.1f}'} %"


def unit_for(seconds: Iterable[float | None]) -> str:
    """The unit in which to print these times: that of the longest."""
    return "ms" if max((time for time in seconds if time), default=0.0) >= 1e-3 else "us"


def device_line(analysis: Analysis) -> str:
    """What the times are of: the GPU and the versions, or that they are only of a CPU."""
    device = CPU_NOTICE if analysis.device == "cpu" else analysis.gpu or "unknown GPU"
    return ", ".join([device, *(f"{name} {version}" for name, version in analysis.versions.items())])


def model_line(model: ModelReport) -> str:
    """A model's name and the sizes that decide its times."""
    config = model.config
    if config is None:
        return f"{model.name} given by hand"
    return (
        f"{model.name}: {config.micro_batch_size} x {config.sequence_length} = {config.tokens} tokens, "
        f"hidden {config.hidden_size}, intermediate {config.intermediate_size}, "
        f"{config.num_attention_heads} heads, {config.num_hidden_layers} layers"
    )


def render(analysis: Analysis, width: int | None = None, color: bool = False) -> str:
    """The tables and notes as text of at most `width` columns (default: the terminal's), or of NARROWEST.

    Without `color` it has no escape codes. Without rich installed it is one line that says what to install.
    """
    try:
        import rich.table  # noqa: F401
    except ImportError:
        return NO_RICH + "\n"
    page = Page(max(width or shutil.get_terminal_size((120, 24)).columns, NARROWEST), color)
    blocks = [_heading(analysis, page)]
    for model in analysis.models:
        blocks.append(_model_heading(model, page))
        if model.layers:
            blocks += _layer_tables(model.layers, page, analysis.runs)
            blocks += _proof_tables(model.layers, page)
        for mode in (mode for mode in MODES if mode in model.gemms):
            blocks += _gemm_tables(model, model.gemms[mode], page)
    blocks += _notes(analysis, page)
    return "\n\n".join(blocks) + "\n"


def _heading(analysis: Analysis, page: Page) -> str:
    failed = sum(map(len, analysis.notes.failed.values()))
    counts = {"measured": analysis.measured, "failed": failed, "skipped": sum(analysis.notes.skipped.values())}
    if analysis.not_run:
        counts["not run"] = analysis.not_run
    summary = "Cases: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    if analysis.runs > 1:
        summary += f". {analysis.runs} runs, boards: {analysis.boards}"
    spent = dict(analysis.spent_s)
    if whole := spent.pop("all", None):
        spent["other"] = whole - sum(spent.values())
        summary += f". {whole:.0f} s: " + ", ".join(f"{seconds:.0f} {what}" for what, seconds in spent.items())
    return f"{page.wrap(device_line(analysis))}\n{page.wrap(summary)}"


def _model_heading(model: ModelReport, page: Page) -> str:
    text = page.wrap(model_line(model))
    rule = "=" * max(map(len, text.splitlines()))
    nothing = "" if model.layers or model.gemms else "\nNo case of this model has a time."
    return f"{text}\n{rule}{nothing}"


def _layer_tables(table: LayerTable, page: Page, runs: int) -> list[str]:
    unit = unit_for(time for row in table.rows for time in row.seconds.values())
    lines, ends = [], set()
    with_errors = any(error is not None for row in table.rows for error in row.errors.values())
    for index, row in enumerate(table.rows):
        passes = [
            Cell(significant(_scaled(row.seconds[name], unit), TIME_DIGITS), name in row.launch_bound)
            for name in LAYER_PASSES
        ]
        speedups = [Cell(times(row.speedups[stage])) for stage in table.references]
        errors = [Cell(percent(row.errors.get(name), 2)) for name in ERRORS] if with_errors else []
        lines.append(Line((row.stage, row.label), (*passes, Cell(percent(row.uncertainty)), *speedups, *errors)))
        if row.stage != (table.rows[index - 1].stage if index else row.stage):
            ends.add(index - 1)
    headers = [
        *(f"{name.replace('_', '_~')}~{unit}" for name in LAYER_PASSES),
        "+-",
        *(f"over~{stage.replace('_', '_~')}~{REFERENCE_RECIPE}" for stage in table.references),
        *(f"error~{label}" for label in (ERRORS.values() if with_errors else ())),
    ]
    of_few = ", of 2 to 5 runs half of what they span" if runs > 1 else ""
    parts = [f"Layer in {unit}, regime {table.regime}. +-: {HALF_INTERVAL}{of_few}."]
    if table.references:
        parts.append(f"Speedups: of forward_backward over {REFERENCE_RECIPE} stages.")
    if with_errors:
        parts.append(ERROR_MEANING)
    return _tables(" ".join(parts), ("stage", "recipe"), headers, lines, ends, page)


def _proof_tables(table: LayerTable, page: Page) -> list[str]:
    """What the layer's steps ran, unless nothing could be seen of it."""
    seen = [row for row in table.rows if row.proof.category_s]
    if not seen:
        return []
    longest_s = max(sum((row.proof.category_s or {}).values()) for row in seen)
    unit = "ms" if longest_s >= 0.01 else "us"  # of short steps most parts are far below a millisecond
    lines = []
    for row in seen:
        proof, category_s = row.proof, row.proof.category_s or {}
        parts = [sum(category_s.get(name, 0.0) for name in names) for names in WORK.values()]
        times = [Cell(significant(seconds * UNITS[unit], RATIO_DIGITS) if seconds else DASH) for seconds in parts]
        sizes = [Cell(significant(_scaled_gib(size), RATIO_DIGITS)) for size in (proof.peak_bytes, proof.saved_bytes)]
        host = Cell(significant(_scaled(row.host_s, unit), RATIO_DIGITS), "forward_backward" in row.launch_bound)
        lines.append(Line((row.stage, row.label), (*times, host, Cell(str(proof.launches)), *sizes)))
    headers = [*(f"{name}~{unit}" for name in WORK), f"host~{unit}", "launches", "peak~GiB", "saved~GiB"]
    title = (
        f"What forward_backward runs: {unit} of kernels by kind in one untimed step, host time, launches, memory above "
        "what rests, and what forward saves for backward."
    )
    ends = {index for index, row in enumerate(seen[:-1]) if row.stage != seen[index + 1].stage}
    return _tables(title, ("stage", "recipe"), headers, lines, ends, page)


def _scaled_gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def _gemm_tables(model: ModelReport, table: GemmTable, page: Page) -> list[str]:
    unit = unit_for(time for row in table.rows for time in row.seconds.values())
    lines, ends = _gemm_lines(model, table, unit)
    title = f"{table.mode}: {MODE_MEANING[table.mode]}, in {unit}, regime {table.regime}."
    if REFERENCE_RECIPE in table.recipes:
        title += f" x: speedup over {REFERENCE_RECIPE}."
    headers = [recipe.replace("_", "~") for recipe in table.recipes]
    return _tables(title, ("GEMM", "M x K x N"), headers, lines, ends, page)


def _gemm_lines(model: ModelReport, table: GemmTable, unit: str) -> tuple[list[Line], set[int]]:
    """The lines of a GEMM table and the indices of those that end a section."""
    lines: list[Line] = []
    ends: set[int] = set()
    line = partial(_time_line, table)
    for name in dict.fromkeys(row.gemm.pass_name for row in table.rows):
        for row in (row for row in table.rows if row.gemm.pass_name == name):
            labels = (f"{name} {row.gemm.linear}", row.gemm.mkn)
            lines.append(line(labels, row.seconds.get, unit, marked=row.launch_bound))
        lines.append(line((name, "sum"), partial(table.pass_s, name), unit, total=True))
        ends.add(len(lines) - 1)
    lines.append(line(("layer", "sum"), table.layer_s, unit, total=True))
    if table.repeats > 1:
        lines.append(line((f"{table.repeats} layers", "in ms"), table.model_s, "ms", total=True))
    if table.mode != "quantization":
        rates = tuple(Cell(significant(table.layer_tflops(recipe), RATIO_DIGITS)) for recipe in table.recipes)
        lines.append(Line(("layer", "TFLOP/s"), rates))
    for name in PASSES:
        errors = [table.pass_error(name, recipe) for recipe in table.recipes]
        if any(errors):
            lines.append(Line((f"{name} error", "worst"), tuple(Cell(percent(error, 2)) for error in errors)))
    if table.mode == "autocast" and "prequantized" in model.gemms:
        shares = tuple(
            Cell(percent(model.quantization_share(recipe)) if RECIPES[recipe].quantized else "")
            for recipe in table.recipes
        )
        lines.append(Line(("quantization", "share"), shares))
    return lines, ends


def _time_line(
    table: GemmTable,
    labels: tuple[str, str],
    seconds: Callable[[str], float | None],
    unit: str,
    marked: frozenset[str] = frozenset(),
    total: bool = False,
) -> Line:
    """A line of times per recipe with their speedups; `seconds` gives a recipe's time."""
    cells = tuple(
        Cell(
            significant(_scaled(seconds(recipe), unit), TIME_DIGITS),
            recipe in marked,
            times(table.speedup(seconds, recipe)) if _has_speedup(table, recipe) else "",
        )
        for recipe in table.recipes
    )
    return Line(labels, cells, total)


def _has_speedup(table: GemmTable, recipe: str) -> bool:
    return recipe != REFERENCE_RECIPE and REFERENCE_RECIPE in table.recipes


def _scaled(seconds: float | None, unit: str) -> float | None:
    return None if seconds is None else seconds * UNITS[unit]


def _columns(rows: Sequence[Sequence[Cell]]) -> list[list[str]]:
    """Each column's cells as text, numbers, marks and speedups below each other."""
    columns = []
    for cells in zip(*rows, strict=True):
        number, speedup = (max(len(cell[part]) for cell in cells) for part in (0, 2))
        mark = any(cell.marked for cell in cells)
        columns.append(
            [
                cell.number.rjust(number)
                + (MARK if cell.marked else " " if mark else "")
                + (f" {cell.speedup.rjust(speedup)}" if speedup else "")
                for cell in cells
            ]
        )
    return columns


def _parts(widths: Sequence[int], room: int) -> list[list[int]]:
    """Indices of columns in groups of at most `room` columns of text; a group has one at least."""
    parts: list[list[int]] = [[]]
    for index, width in enumerate(widths):
        if parts[-1] and sum(widths[one] for one in parts[-1]) + width > room:
            parts.append([])
        parts[-1].append(index)
    return parts


def _tables(
    title: str, labels: Sequence[str], headers: Sequence[str], lines: Sequence[Line], ends: set[int], page: Page
) -> list[str]:
    """One table, or several with some of the columns each where the page is too narrow for all."""
    columns = _columns([line.cells for line in lines])
    widths = [
        page.gap + max(map(len, [*header.split("~"), *column])) for header, column in zip(headers, columns, strict=True)
    ]
    left = sum(page.gap + max(len(line.labels[side]) for line in lines) for side in range(len(labels))) - page.gap
    parts = _parts(widths, page.width - left)
    texts = []
    for number, part in enumerate(parts, start=1):
        partial_lines = [line._replace(cells=tuple(line.cells[index] for index in part)) for line in lines]
        part_title = f"{title} Part {number} of {len(parts)}." if len(parts) > 1 else title
        texts.append(_table(part_title, [*labels, *(headers[index] for index in part)], partial_lines, ends, page))
    return texts


def _table(title: str, headers: Sequence[str], lines: Sequence[Line], ends: set[int], page: Page) -> str:
    """A table below its title. `~` breaks a header's line; `ends` are lines with a rule below them."""
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table

    rules = Box("    \n    \n -- \n    \n -- \n -- \n    \n    \n", ascii=True)  # below header and sections only
    table = Table(box=rules, show_edge=False, padding=(0, page.gap - 1, 0, 0), pad_edge=False, header_style="bold")
    left = len(lines[0].labels)
    columns = _columns([line.cells for line in lines])
    for index, header in enumerate(headers):
        # Padded by hand: right justification would strip the blanks that keep marks and speedups below each other.
        size = 0 if index < left else max(map(len, [*header.split("~"), *columns[index - left]]))
        padded = "\n".join(part.rjust(size) for part in header.split("~"))
        table.add_column(padded, no_wrap=True, overflow="crop", vertical="bottom", min_width=size)
    for index, line in enumerate(lines):
        cells = (*line.labels, *(column[index] for column in columns))
        table.add_row(*cells, style="bold" if line.total else None, end_section=index in ends)
    stream = StringIO()
    colors = "standard" if page.color else None
    console = Console(
        file=stream,
        width=page.width,
        force_terminal=page.color,
        color_system=colors,  # type: ignore[arg-type]
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(page.wrap(title), style="bold")
    console.print(table)
    return "\n".join(text.rstrip() for text in stream.getvalue().rstrip().splitlines())


def _notes(analysis: Analysis, page: Page) -> list[str]:
    """Paragraphs, none for what did not happen."""
    notes, paragraphs = analysis.notes, []
    if notes.launch_bound:
        paragraphs.append(
            f"{MARK} {len(notes.launch_bound)} launch-bound cases: the host takes longer to launch the work than the "
            "GPU to do it, so in training the host sets their pace."
        )
    if notes.imprecise:
        case, uncertainty = notes.imprecise[0]
        worst = f"unknown, {case}" if uncertainty is None else f"{significant(100 * uncertainty, 2)} % of {case}"
        paragraphs.append(
            f"{len(notes.imprecise)} of {analysis.measured} cases ran into the time limit before the 95 % interval of "
            f"their median was as narrow as asked. Worst: {worst}."
        )
    for reason, cases in notes.throttled.items():
        paragraphs.append("\n".join([f"{len(cases)} throttled: {reason}", *(f"  {case}" for case in cases)]))
    if notes.unknown_kernels:
        shown = ", ".join(notes.unknown_kernels[:FEW])
        more = f", and {len(notes.unknown_kernels) - FEW} more" if len(notes.unknown_kernels) > FEW else ""
        paragraphs.append(f"{len(notes.unknown_kernels)} kernels of no known kind, counted as rest: {shown}{more}.")
    for reason, count in notes.unseen_kernels.items():
        if analysis.device != "cpu":
            paragraphs.append(f"{count} layers and groups of GEMMs without a list of kernels: {reason}")
    for reason, cases in notes.failed.items():
        paragraphs.append("\n".join([f"{len(cases)} failed: {reason}", *(f"  {case}" for case in cases)]))
    if notes.skipped:
        paragraphs.append("\n".join(f"{count} skipped: {reason}" for reason, count in notes.skipped.items()))
    return ["\n".join(page.wrap(line, "  ") for line in paragraph.splitlines()) for paragraph in paragraphs]
