"""`python -m correctness.emulate`: the errors of a recipe's three GEMMs, emulated on the CPU, and what they should be.

For whoever has no GPU with a recipe, and wants to know what it would cost. With --json, one object:

    shape          {tokens, in_features, out_features}
    distribution   of x and dy; w is normal
    seed           of all random numbers
    hadamard, stochastic_rounding   whether nvfp4 has them
    gemms          a list, in the order of the table; of each
                   recipe, pass        `mxfp8`, `fprop`
                   m, n, k, mkn        output rows, output columns, contraction; as printed
                   operands            two, `e4m3:1x32`
                   error               relative to the exact product (Frobenius); null if it is not finite
                   lower, expected, upper   what correctness/bounds.py derives; null where `reason` says why
                   within              whether lower <= error <= upper; null without limits
                   reason              why the recipe refuses the shape, or why there is no expectation; else null
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import numpy as np
    import torch
    from torch import Tensor, nn
except ImportError as error:
    if __name__ != "__main__":
        raise
    print(f"python -m correctness.emulate: `pip install numpy torch` lets it compute ({error})", file=sys.stderr)
    sys.exit(4)  # as of wrong arguments

from correctness.bounds import AS_TE, Extras, Input, Limits, gemm_limits, tensor_shape, usual_inputs
from correctness.distributions import DISTRIBUTIONS
from shapes.backends.emulation.linear import EmulatedLinear
from shapes.commands import Parser, print_text, write_text
from shapes.gemms import PASSES, Linear, parse_shapes
from shapes.recipes import RECIPES, Recipe

MOST_ELEMENTS = 2**28  # of the six matrices together: with float64 copies some 8 GB
HEADER = ("recipe", "GEMM", "M x K x N", "operands", "error", "expected", "error /", "from", "to", "")
UNITS = ("", "", "", "", "", "", "expected", "", "", "")


# ------------------------------------------------------------------------------------------------------------ errors


def draw(linear: Linear, inputs: Mapping[str, Input], seed: int) -> dict[str, Tensor]:
    """x, w and dy in bfloat16. Outliers of x and dy are half of all tokens apart: if they met, little else counted."""
    generator = np.random.default_rng(seed)
    tensors = {
        role: inputs[role].size * DISTRIBUTIONS[inputs[role].distribution].draw(generator, tensor_shape(role, linear))
        for role in ("x", "w", "dy")
    }
    if all(DISTRIBUTIONS[inputs[role].distribution].outlier for role in ("x", "dy")):
        rows = [int(np.abs(tensors[role]).max(axis=1).argmax()) for role in ("x", "dy")]
        tensors["dy"] = np.roll(tensors["dy"], rows[0] + linear.tokens // 2 - rows[1], axis=0)
    return {role: torch.from_numpy(tensor).to(torch.bfloat16) for role, tensor in tensors.items()}


def emulated_linear(recipe: Recipe, weight: Tensor, extras: Extras = AS_TE, seed: int = 0) -> nn.Module:
    """A linear with this weight (out, in) whose GEMMs are a recipe's; torch's own for one that does not quantize."""
    out_features, in_features = weight.shape
    dtype = getattr(torch, recipe.compute_dtype)
    layer: nn.Module
    if not recipe.quantized:
        layer = nn.Linear(in_features, out_features, bias=False, dtype=dtype)
    else:
        layer = EmulatedLinear(in_features, out_features, False, recipe, seed=seed)
        for quantizer in layer.quantizers.values():
            quantizer.transforms &= extras.hadamard
            quantizer.generator = quantizer.generator if extras.stochastic else None
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def emulated_gemms(
    recipe: Recipe, tensors: Mapping[str, Tensor], extras: Extras = AS_TE, seed: int = 0
) -> dict[str, Tensor]:
    """fprop, dgrad and wgrad of x, w and dy in a recipe; a delayed scale has seen them once.

    Raises ValueError for sizes that the recipe cannot run.
    """
    layer = emulated_linear(recipe, tensors["w"], extras, seed)
    dtype = getattr(torch, recipe.compute_dtype)
    x = tensors["x"].detach().to(dtype, copy=True).requires_grad_()
    for _ in range(2 if recipe.history else 1):
        x.grad = layer.weight.grad = None
        y = layer(x)
        y.backward(tensors["dy"].to(dtype))
    assert x.grad is not None
    assert isinstance(layer.weight.grad, Tensor)
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": layer.weight.grad}


def exact_gemms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """fprop, dgrad and wgrad in float64."""
    x, w, dy = (tensors[role].double() for role in ("x", "w", "dy"))
    return {"fprop": x @ w.T, "dgrad": dy @ w, "wgrad": dy.T @ x}


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """||actual - exact|| / ||exact|| (Frobenius); 0 where both are zero."""
    difference, norm = (actual.double() - exact.double()).norm().item(), exact.double().norm().item()
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


def gemm_errors(
    recipe: Recipe, tensors: Mapping[str, Tensor], extras: Extras = AS_TE, seed: int = 0
) -> dict[str, float]:
    """The relative error of each GEMM against the exact product of the same operands, not quantized."""
    dtype = getattr(torch, recipe.compute_dtype)
    exact = exact_gemms({role: tensor.to(dtype) for role, tensor in tensors.items()})
    actual = emulated_gemms(recipe, tensors, extras, seed)
    return {name: relative_error(actual[name], exact[name]) for name in PASSES}


# ------------------------------------------------------------------------------------------------------- the command


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:  # what torch takes
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**63 - 1, got {value}")
    return value


def _parser() -> Parser:
    parser = Parser(
        prog="python -m correctness.emulate",
        description="Errors of a linear's three GEMMs in a recipe, emulated on the CPU, beside what they should be.",
    )
    recipes = f"repeatable; default: all; one of {', '.join(RECIPES)}"
    parser.add_argument("--recipe", action="append", choices=RECIPES, metavar="NAME", help=recipes)
    parser.add_argument("--shape", required=True, metavar="MxKxN", help="tokens x in_features x out_features")
    parser.add_argument(
        "--distribution",
        choices=DISTRIBUTIONS,
        default="normal",
        metavar="NAME",
        help=f"of x and dy, w is normal; default: normal; one of {', '.join(DISTRIBUTIONS)}",
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="default: 0")
    parser.add_argument("--no-hadamard", action="store_true", help="nvfp4 without its random Hadamard transform")
    parser.add_argument("--no-stochastic-rounding", action="store_true", help="nvfp4 rounds gradients to the nearest")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")
    return parser


def one_linear(text: str) -> Linear:
    """The linear of a shape 'MxKxN'. Raises ValueError for anything else, and for one too large to emulate."""
    linears = parse_shapes(text).linears
    if len(linears) > 1:
        raise ValueError(f"shape {text!r}: one at a time")
    (linear,) = linears
    gemms = [linear.gemm(name) for name in PASSES]
    elements = sum(2 * gemm.m * gemm.n for gemm in gemms)
    if elements > MOST_ELEMENTS:
        raise ValueError(f"shape {text!r}: its matrices have {elements:.2g} elements, at most {MOST_ELEMENTS:.2g} fit")
    return linear


def _limits(recipe: Recipe, name: str, linear: Linear, inputs: Mapping[str, Input], extras: Extras) -> Limits | str:
    try:
        return gemm_limits(recipe, name, linear, inputs, extras)
    except ValueError as error:
        return str(error)


def _entry(recipe: Recipe, name: str, linear: Linear, error: float | None, limits: Limits | str) -> dict[str, Any]:
    gemm = linear.gemm(name)
    known = limits if isinstance(limits, Limits) else None
    return {
        "recipe": recipe.id,
        "pass": name,
        "m": gemm.m,
        "n": gemm.n,
        "k": gemm.k,
        "mkn": gemm.mkn,
        "operands": [str(operand) for operand in recipe.gemm_operands(name)],
        "error": error if error is not None and math.isfinite(error) else None,
        **{part: getattr(known, part, None) for part in Limits._fields},
        "within": None if known is None or error is None else error in known,
        "reason": None if known else limits,
    }


def describe(
    linear: Linear, recipes: Sequence[Recipe], distribution: str, seed: int, extras: Extras = AS_TE
) -> dict[str, Any]:
    """Everything that is printed: see the module's docstring."""
    usual = usual_inputs(linear)
    inputs = {
        role: given._replace(distribution=distribution) if role != "w" else given for role, given in usual.items()
    }
    tensors = draw(linear, inputs, seed)
    gemms = []
    for recipe in recipes:
        refusal = recipe.misaligned(linear.tokens, linear.in_features, linear.out_features)
        errors: Mapping[str, float | None]
        errors = dict.fromkeys(PASSES) if refusal else gemm_errors(recipe, tensors, extras, seed)
        for name in PASSES:
            limits = refusal or _limits(recipe, name, linear, inputs, extras)
            gemms.append(_entry(recipe, name, linear, errors[name], limits))
    return {
        "shape": {key: getattr(linear, key) for key in ("tokens", "in_features", "out_features")},
        "distribution": distribution,
        "seed": seed,
        "hadamard": extras.hadamard,
        "stochastic_rounding": extras.stochastic,
        "gemms": gemms,
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}" if value >= 1e-3 or value == 0 else f"{value:.3g}"


def _row(gemm: Mapping[str, Any]) -> tuple[str, ...]:
    error, expected = gemm["error"], gemm["expected"]
    verdict = {True: "within", False: "OUTSIDE", None: "not finite" if error is None and not gemm["reason"] else ""}
    return (
        gemm["recipe"],
        gemm["pass"],
        gemm["mkn"],
        " x ".join(gemm["operands"]),
        _number(error),
        _number(expected),
        f"{error / expected:.3f}" if error is not None and expected else "-",
        _number(gemm["lower"]),
        _number(gemm["upper"]),
        verdict[gemm["within"]],
    )


def table(description: Mapping[str, Any]) -> str:
    """What `describe` returns, as aligned text; each reason once below it."""
    rows = [HEADER, UNITS, *(_row(gemm) for gemm in description["gemms"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if 4 <= index < 9 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    shape = "x".join(str(size) for size in description["shape"].values())
    title = f"linear {shape}: x and dy {description['distribution']}, w normal, seed {description['seed']}"
    reasons = [(f"{gemm['recipe']} ", gemm["pass"], gemm["reason"]) for gemm in description["gemms"] if gemm["reason"]]
    notes = dict.fromkeys(  # a refusal begins with the recipe and holds for all of its GEMMs
        reason if reason.startswith(recipe) else f"{recipe}{name}: {reason}" for recipe, name, reason in reasons
    )
    explained = "error: relative to the exact product (Frobenius). expected, from, to: correctness/bounds.py."
    return "\n".join([title, "", *lines, "", *notes, explained])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code. Wrong arguments exit with code 4 and one line on stderr."""
    parser = _parser()
    options = parser.parse_args(arguments)
    recipes = [RECIPES[name] for name in dict.fromkeys(options.recipe or RECIPES)]
    extras = Extras(not options.no_hadamard, not options.no_stochastic_rounding)
    try:
        linear = one_linear(options.shape)
        if len(recipes) == 1 and (
            reason := recipes[0].misaligned(linear.tokens, linear.in_features, linear.out_features)
        ):
            raise ValueError(reason)
        description = describe(linear, recipes, options.distribution, options.seed, extras)
        if options.json:
            write_text(Path(options.json), json.dumps(description, indent=2, allow_nan=False) + "\n")
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--json={options.json}: {error.strerror}")
    return print_text(table(description))


if __name__ == "__main__":
    sys.exit(main())
