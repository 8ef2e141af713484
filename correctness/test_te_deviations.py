"""Where TE 2.20 does other than its options say: pinned, so that a version which mends it fails here and is noticed.

Each option has beside it what does work, which shows that the check can tell the two apart.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shapes.backends import te
from shapes.recipes import RECIPES

SIZE = 256


@pytest.fixture(autouse=True)
def on_gpu(device: str) -> None:
    """Skip where there is none, or one without these recipes."""
    if device == "cpu":
        pytest.skip("needs Transformer Engine and a GPU; this run is on the CPU")
    for name in ("fp8_current_scaling", "fp8_block_scaling"):
        if reason := te.unsupported_reason(name):
            pytest.skip(f"{name}: {reason}")


def linear() -> Any:
    """A te.Linear that no recipe has seen."""
    return te.modules().Linear(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cuda")


def scales(module: Any, recipe: Any) -> Tensor:
    """All inverse scales of x, w and dy that a te.Linear's own quantizers give after a step in one of TE's recipes."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, dy = (torch.randn(SIZE, SIZE, generator=generator, device="cuda").bfloat16() for _ in range(2))
    with te.modules().autocast(enabled=True, recipe=recipe):
        y = module(x.requires_grad_())
    y.backward(dy)
    (of_x, of_w), of_dy = module.quantizers["scaling_fwd"][:2], module.quantizers["scaling_bwd"][0]
    found = []
    for quantizer, tensor in ((of_x, x.detach()), (of_w, module.weight.detach()), (of_dy, dy)):
        quantizer.set_usage(rowwise=True, columnwise=True)
        if hasattr(quantizer, "optimize_for_gemm"):
            quantizer.optimize_for_gemm = False
        found += [copy.inverse_scale.reshape(-1) for copy in te.copies_of(quantizer(tensor), *tensor.shape).values()]
    return torch.cat(found)


def powers_of_two(numbers: Tensor) -> Tensor:
    """Which of them are; 1 = 0.5 * 2 is."""
    return numbers.frexp().mantissa == 0.5


def with_power_2_scales(name: str, power_2_scale: bool) -> Any:
    """A recipe of TE whose scales are set where TE's modules read them: in its QParams."""
    recipe = te.te_recipe(RECIPES[name])
    for tensor in ("fwd_inp", "fwd_weight", "bwd_grad"):
        params = getattr(recipe, f"fp8_quant_{tensor}")
        setattr(recipe, f"fp8_quant_{tensor}", type(params)(power_2_scale=power_2_scale))
    return recipe


def test_use_f32_scales_of_block_scaling_has_no_effect() -> None:
    """Scales stay powers of two; the class reads the option once, from the environment, when TE is imported."""
    asked = te.te_recipe(RECIPES["fp8_block_scaling"], use_f32_scales=True)
    assert powers_of_two(scales(linear(), asked)).all()
    assert not powers_of_two(scales(linear(), with_power_2_scales("fp8_block_scaling", False))).all()


def test_use_power_2_scales_of_current_scaling_has_no_effect_in_modules() -> None:
    """Scales keep any mantissa, though the option's own quantizers would make powers of two."""
    asked = te.te_recipe(RECIPES["fp8_current_scaling"], use_power_2_scales=True)
    assert not powers_of_two(scales(linear(), asked)).all()
    assert powers_of_two(scales(linear(), with_power_2_scales("fp8_current_scaling", True))).all()


def test_a_module_keeps_the_options_of_the_first_recipe_of_its_class() -> None:
    """Another recipe of the same class changes nothing: a new configuration needs a new module."""
    module = linear()
    assert powers_of_two(scales(module, te.te_recipe(RECIPES["fp8_block_scaling"]))).all()
    assert powers_of_two(scales(module, with_power_2_scales("fp8_block_scaling", False))).all()


def test_block_scaling_quantizes_what_it_calls_not_quantizable() -> None:
    """is_quantizable() is False for sizes that are no multiples of 128: the quantizer takes them all the same."""
    x = torch.randn(130, 200, device="cuda").bfloat16()
    maker = te.quantizer(RECIPES["fp8_block_scaling"], "activation", x)
    assert not maker.is_quantizable(x)
    copies = te.quantized(RECIPES["fp8_block_scaling"], "activation", x)
    assert copies[1].codes.shape == copies[0].codes.shape == x.shape
