"""`python -m shapes`: the GEMMs that a model runs, and the models there are.

With --json, one object for a model or for --shapes:

    model   the fields of ModelConfig and `tokens`; null with --shapes
    gemms   a list, in the order of the table; of each
            linear, pass        `qkv`, `fprop`
            m, n, k             output rows, output columns, contraction
            mkn                 the shape as printed, M x K x N; of wgrad the transposed one, n x k x m
            flops               multiplications and additions
            share               of the layer's FLOPs; null for the LM head, which is outside the layers
            min_bytes           each operand read once, the output written once, in BF16
            flops_per_byte      arithmetic intensity: flops / min_bytes
    sums    FLOPs: fprop, dgrad, wgrad and layer of one layer, layers (layer x `repeats`), lm_head (0 without), model
    repeats how many layers there are; 1 with --shapes

and for --list {"models": [the fields of each]}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shapes.commands import Parser, print_text
from shapes.gemms import PASSES, Gemm, LinearGroup, layer_linears, lm_head, parse_shapes
from shapes.models import HYPERPARAMETERS, MODELS, ModelConfig, resolve

GEMM_HEADER = ("linear", "pass", "M x K x N", "GFLOP", "share", "FLOP/byte")
MODEL_HEADER = ("model", "hidden", "intermediate", "heads", "kv heads", "head dim", "layers", "tokens", "vocabulary")


def _parser() -> Parser:
    parser = Parser(
        prog="python -m shapes",
        description="Print the GEMMs of a model's layer with their FLOPs. Without arguments, list the models.",
        epilog="A model of your own needs no name, but at least --hidden-size and --num-attention-heads.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    for key in HYPERPARAMETERS:
        parser.add_argument(f"--{key.replace('_', '-')}", type=int, metavar="N", help=f"set {key}")
    parser.add_argument("--shapes", metavar="MxKxN,...", help="linears by hand: tokens x in_features x out_features")
    parser.add_argument("--lm-head", action="store_true", help="add the projection to the vocabulary")
    parser.add_argument("--list", action="store_true", help="list the models with their sizes and sources")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _model_entry(config: ModelConfig) -> dict[str, Any]:
    return asdict(config) | {"tokens": config.tokens}


def _gemm_entry(gemm: Gemm, share: float | None) -> dict[str, Any]:
    return {
        "linear": gemm.linear,
        "pass": gemm.pass_name,
        "m": gemm.m,
        "n": gemm.n,
        "k": gemm.k,
        "mkn": gemm.mkn,
        "flops": gemm.flops,
        "share": share,
        "min_bytes": gemm.min_bytes(),
        "flops_per_byte": gemm.flops / gemm.min_bytes(),
    }


def describe(config: ModelConfig | None, group: LinearGroup, with_lm_head: bool = False) -> dict[str, Any]:
    """The GEMMs of a group of linears as one JSON object; the module's docstring lists its keys.

    `config` is the model of the linears, None for shapes given by hand.
    Raises ValueError if an LM head is wanted and there is none.
    """
    head = lm_head(config) if with_lm_head and config else None
    if with_lm_head and head is None:
        known = ", ".join(name for name, model in MODELS.items() if model.vocab_size)
        raise ValueError(f"{group.name} has no LM head; models with one: {known}")
    of_layer = group.gemms()
    of_head = [head.gemm(pass_name) for pass_name in PASSES] if head else []
    sums = {name: sum(gemm.flops for gemm in of_layer if gemm.pass_name == name) for name in PASSES}
    layer = sum(sums.values())
    layers = layer * group.repeats
    head_flops = sum(gemm.flops for gemm in of_head)
    return {
        "model": _model_entry(config) if config else None,
        "gemms": [_gemm_entry(gemm, gemm.flops / layer) for gemm in of_layer]
        + [_gemm_entry(gemm, None) for gemm in of_head],
        "sums": sums | {"layer": layer, "layers": layers, "lm_head": head_flops, "model": layers + head_flops},
        "repeats": group.repeats,
    }


def _align(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows of text as lines with columns two spaces apart; the first `left` columns flush left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _gflop(flops: int, description: dict[str, Any]) -> str:
    smallest = min(gemm["flops"] for gemm in description["gemms"])
    return f"{flops / 1e9:,.{1 if smallest >= 1e9 else 3}f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _sum_rows(description: dict[str, Any]) -> list[tuple[str, ...]]:
    sums, repeats, is_model = description["sums"], description["repeats"], description["model"] is not None
    rows: list[tuple[str, str, int, float | None]]
    rows = [("sum", name, sums[name], sums[name] / sums["layer"]) for name in PASSES]
    rows.append(("layer" if is_model else "all shapes", "", sums["layer"], 1.0))
    if is_model:
        rows.append((f"{repeats} layers" if repeats > 1 else "1 layer", "", sums["layers"], None))
    if sums["lm_head"]:
        rows += [("lm_head", "", sums["lm_head"], None), ("model", "", sums["model"], None)]
    return [(name, which, "", _gflop(flops, description), _percent(share), "") for name, which, flops, share in rows]


def _title(model: dict[str, Any] | None) -> list[str]:
    if model is None:
        return ["shapes given by hand, as tokens x in_features x out_features of each linear"]
    batch = f"{model['micro_batch_size']} x {model['sequence_length']} = {model['tokens']} tokens"
    return [f"{model['name']}: {batch}", *([f"source: {model['source']}"] if model["source"] else [])]


def table(description: dict[str, Any]) -> str:
    """What `describe` returns, as aligned text."""
    gemms = [
        (
            gemm["linear"],
            gemm["pass"],
            gemm["mkn"],
            _gflop(gemm["flops"], description),
            _percent(gemm["share"]),
            f"{gemm['flops_per_byte']:,.0f}",
        )
        for gemm in description["gemms"]
    ]
    lines = _align([GEMM_HEADER, *gemms, *_sum_rows(description)], left=3)
    first_sum = 1 + len(gemms)
    note = "M x K x N: K is contracted; wgrad is printed as in x tokens x out. FLOP/byte: per minimum byte, in BF16."
    return "\n".join([*_title(description["model"]), "", *lines[:first_sum], "", *lines[first_sum:], "", note])


def model_list() -> str:
    """The named models, their sizes, and where each comes from, as aligned text."""
    rows = [
        (
            config.name,
            *map(str, (config.hidden_size, config.intermediate_size, config.num_attention_heads)),
            *map(str, (config.num_key_value_heads, config.head_dim, config.num_hidden_layers)),
            f"{config.micro_batch_size} x {config.sequence_length}",
            str(config.vocab_size or "-"),
        )
        for config in MODELS.values()
    ]
    sources = [f"{config.name}: {config.source}" for config in MODELS.values()]
    return "\n".join([*_align([MODEL_HEADER, *rows], left=1), "", "sources", *sources])


def run(arguments: Sequence[str]) -> str:
    """The text that the command prints. Wrong arguments exit with code 4 and one line on stderr."""
    parser = _parser()
    options = parser.parse_args(arguments)
    overrides = {key: getattr(options, key) for key in HYPERPARAMETERS if getattr(options, key) is not None}
    asks_for_model = options.name is not None or bool(overrides) or options.lm_head
    if options.shapes is not None and (asks_for_model or options.list):
        parser.error("--shapes stands alone: no model, no hyperparameters, no --lm-head, no --list")
    if options.list and asks_for_model:
        parser.error("--list stands alone: no model, no hyperparameters, no --lm-head")
    try:
        if options.shapes is not None:
            description = describe(None, parse_shapes(options.shapes))
        elif asks_for_model:
            config = resolve(options.name, overrides)
            description = describe(config, layer_linears(config), options.lm_head)
        elif options.json:
            description = {"models": [_model_entry(config) for config in MODELS.values()]}
        else:
            return model_list()
    except ValueError as error:
        parser.error(str(error))
    return json.dumps(description, indent=2) if options.json else table(description)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    return print_text(run(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())
