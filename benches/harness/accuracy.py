"""How far a recipe's results are from BF16's: one untimed step on the same weights and data, beside every speed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from benches.harness.evidence import EvidenceError
from benches.harness.workbench import free_memory
from shapes.models import ModelConfig
from shapes.recipes import RECIPES, Recipe

if TYPE_CHECKING:  # it imports torch, which collecting must not
    from torch import Tensor

    from shapes.backends.build import GemmSteps

REFERENCE_STAGE = "torch_sdpa"  # independent of Transformer Engine, and what a PyTorch user runs
PLAIN_RECIPES = {"bfloat16": "bf16", "float16": "fp16"}  # by compute dtype


class References:
    """Results of a model's unquantized layer: output and gradients. Those of the latest model are kept."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._kept: tuple[object, dict[str, Tensor]] | None = None

    def of(self, config: ModelConfig, recipe: Recipe) -> Mapping[str, Tensor]:
        """Output and gradients of one step, by the names of LayerStep.results, in the recipe's compute dtype."""
        from shapes.backends.build import build_layer

        key = (config, recipe.compute_dtype)
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            step = build_layer(config, REFERENCE_STAGE, RECIPES[PLAIN_RECIPES[recipe.compute_dtype]], self.device)
            step.program().run_once()
            self._kept = key, step.results()
            del step
            free_memory()
        return self._kept[1]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm, in float32.

    Raises EvidenceError where that is no finite number.
    """
    error = float((actual.float() - expected.float()).norm() / expected.float().norm())
    if not math.isfinite(error):
        raise EvidenceError(f"a result is not finite: its relative error is {error}")
    return error


def layer_errors(results: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Relative errors by segment: of the output, and of the gradients of the input and of each linear's weight.

    Gradients of biases and norms are sums over all tokens, small against their terms: their relative errors say
    little of a recipe.
    """
    names = [name for name in reference if name == "dx" or (name.endswith(".weight") and "norm" not in name)]
    errors = {}
    for segment, wanted in {"forward": ["y"], "backward": names}.items():
        errors[segment] = {name: relative_error(results[name], reference[name]) for name in wanted}
    return errors


def gemm_errors(steps: GemmSteps) -> dict[str, dict[str, float]]:
    """Relative errors by segment: of each GEMM's output against the product of its operands before quantization."""
    errors = {}
    for linear, gemms in steps.gemms.items():
        x, w, dy = (gemms.tensors[name] for name in ("x", "w", "dy"))
        products = {"fprop": (x, w.T, "y"), "dgrad": (dy, w, "dx"), "wgrad": (dy.T, x, "dw")}
        for pass_name, (a, b, name) in products.items():
            actual = getattr(gemms, pass_name)()
            errors[f"{linear}/{pass_name}"] = {name: relative_error(actual, a @ b)}
    return errors
