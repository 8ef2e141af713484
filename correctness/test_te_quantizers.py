"""TE's quantizers against the emulation, bit by bit: codes, scales, maxima, and delayed scaling's state.

Runs wherever TE runs, MXFP8 and NVFP4 on the GPUs that have them. Besides, the same checks run on a stand-in for TE:
the emulation, with its copies arranged in memory as TE arranges them. That says nothing of TE, but that the checks do
what they say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from correctness import tensors
from correctness.strategies import matrix_shapes, values
from shapes.backends import te
from shapes.backends.emulation.formats import FORMATS, decode
from shapes.backends.emulation.hadamard import hadamard_matrix
from shapes.backends.emulation.linear import EmulatedLinear
from shapes.backends.emulation.scaling import DelayedScale, Quantized, Quantizer
from shapes.recipes import RECIPES, Recipe

DRAWN = 200  # tensors that Hypothesis draws for each case
SEEDS = 3  # times shapes, times kinds of tensors: 240 tensors for each case
_ANY = [(128, 256), (256, 384), (130, 200), (16, 48), (8, 1024), (24, 64), (1, 128), (257, 33)]
_OF_32 = [(32, 32), (64, 96), (128, 256), (32, 1024), (1024, 32), (160, 64), (256, 128), (96, 352)]
_OF_16 = [(16, 16), (48, 80), (64, 128), (128, 256), (16, 1024), (1024, 16), (80, 48), (192, 128)]
SHAPES = {"mxfp8": _OF_32, "nvfp4": _OF_16}  # what TE can quantize: others take any size


@dataclass(frozen=True)
class Case:
    """A quantizer of TE: of a recipe and a role, with options of TE's, and the scale format that they lead to."""

    name: str
    recipe: Recipe
    role: str
    options: dict[str, Any] = field(default_factory=dict)
    scale_format: str = ""

    def emulated(self, x: Tensor, scale: Tensor | None = None) -> dict[int, Quantized]:
        """The same quantization by the emulation; with delayed scaling the scale is given, shape (1,)."""
        recipe = replace(self.recipe, scale=self.scale_format or self.recipe.scale)
        epsilon = self.options.get("amax_epsilon", 0.0)
        quantizer = Quantizer(getattr(recipe, self.role), recipe, x.device, epsilon=epsilon)
        if quantizer.delayed and scale is not None:
            quantizer.delayed.scale = scale.reshape(())
        return quantizer(x)


CASES = [
    Case("delayed", RECIPES["fp8_delayed_scaling"], "activation"),
    Case("delayed_gradient", RECIPES["fp8_delayed_scaling"], "gradient"),
    Case("current", RECIPES["fp8_current_scaling"], "activation"),
    Case("current_gradient", RECIPES["fp8_current_scaling"], "gradient"),
    Case(
        "current_power_of_two",
        RECIPES["fp8_current_scaling"],
        "activation",
        {"force_pow_2_scales": True},
        "power of two",
    ),
    Case("current_epsilon", RECIPES["fp8_current_scaling"], "activation", {"amax_epsilon": 0.5}),
    Case("block_1d", RECIPES["fp8_block_scaling"], "activation"),
    Case("block_2d", RECIPES["fp8_block_scaling"], "weight"),
    Case("block_1d_float32", RECIPES["fp8_block_scaling"], "gradient", {"force_pow_2_scales": False}, "float32"),
    Case("block_2d_float32", RECIPES["fp8_block_scaling"], "weight", {"force_pow_2_scales": False}, "float32"),
    Case("block_1d_epsilon", RECIPES["fp8_block_scaling"], "activation", {"amax_epsilon": 0.5}),
    Case("mxfp8", RECIPES["mxfp8"], "activation"),
    Case("nvfp4", RECIPES["nvfp4"], "activation"),
    Case("nvfp4_weight", RECIPES["nvfp4"], "weight"),
    Case("nvfp4_gradient_to_nearest", RECIPES["nvfp4"], "gradient", {"stochastic_rounding": False}),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


# ------------------------------------------------------------------------------------------------------ the stand-in


def stored(kind: str, metadata: dict[str, Any]) -> Any:
    """An object that TE's storage of this name is, to those who read it."""
    return type(kind, (), {"get_metadata": lambda self: metadata})()


def padded(x: Tensor, lines: int, columns: int) -> Tensor:
    """x with rows and columns filled up to multiples by what no one must read."""
    missing = (0, -x.shape[1] % columns, 0, -x.shape[0] % lines)
    return torch.nn.functional.pad(x, missing, value=123)


def packed(codes: Tensor) -> Tensor:
    """Two E2M1 codes per byte, the first in the lower half."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def per_line(copy: Quantized, dim: int) -> Tensor:
    """Scale codes of NVFP4 as TE stores them: one for each line that is quantized, square blocks repeat them."""
    return copy.scale_codes().repeat_interleave(copy.block[1 - dim], dim=1 - dim)


def as_per_tensor(row: Quantized, column: Quantized) -> Any:
    """TE's Float8TensorStorage on a GPU of Hopper's generation."""
    metadata = {"data": row.codes(), "data_transpose": column.codes().T.contiguous(), "fp8_scale_inv": row.factor[None]}
    return stored("Float8TensorStorage", metadata)


def as_blocks(row: Quantized, column: Quantized) -> Any:
    """TE's Float8BlockwiseQTensorStorage."""
    square = row.block[0] > 1
    row_scales, column_scales = row.scale_codes(), column.scale_codes()
    metadata = {
        "rowwise_data": row.codes(),
        "columnwise_data": column.codes().T.contiguous(),
        "rowwise_scale_inv": padded(row_scales if square else row_scales.T, 1, 4),
        "columnwise_scale_inv": padded(column_scales.T if square else column_scales, 1, 4),
        "is_2D_scaled": square,
    }
    return stored("Float8BlockwiseQTensorStorage", metadata)


def as_mxfp8(row: Quantized, column: Quantized) -> Any:
    """TE's MXFP8TensorStorage, scales not rearranged for a GEMM."""
    metadata = {
        "rowwise_data": row.codes(),
        "columnwise_data": column.codes(),
        "rowwise_scale_inv": padded(row.scale_codes(), 128, 4),
        "columnwise_scale_inv": padded(column.scale_codes(), 4, 128),
    }
    return stored("MXFP8TensorStorage", metadata)


def as_nvfp4(row: Quantized, column: Quantized) -> Any:
    """TE's NVFP4TensorStorage, scales not rearranged for a GEMM."""
    assert row.amax is not None
    assert column.amax is not None
    metadata = {
        "rowwise_data": packed(row.codes()),
        "columnwise_data": packed(column.codes().T),
        "rowwise_scale_inv": padded(per_line(row, 1), 128, 4),
        "columnwise_scale_inv": padded(per_line(column, 0).T, 128, 4),
        "amax_rowwise": row.amax[None],
        "amax_columnwise": column.amax[None],
    }
    return stored("NVFP4TensorStorage", metadata)


STORED = {"mxfp8": as_mxfp8, "nvfp4": as_nvfp4, "fp8_block_scaling": as_blocks}


_SCALE_FORMATS = {None: "", True: "power of two", False: "float32"}  # of force_pow_2_scales


class StandIn:
    """Has those functions of the backend that the checks below call. Stochastic rounding has a new seed each time."""

    def __init__(self) -> None:
        self.seeds = count()

    def quantized(self, recipe: Recipe, role: str, data: Tensor, **options: Any) -> dict[int, te.Copy]:
        """What the emulation makes of the data, through TE's layouts and the functions that read them."""
        case = Case("", recipe, role, options, _SCALE_FORMATS[options.get("force_pow_2_scales")])
        copies = case.emulated(data, options.get("scale"))
        if options.get("stochastic_rounding"):
            copies = Quantizer(recipe.gradient, recipe, data.device, stochastic=True, seed=next(self.seeds))(data)
        read = te.copies_of(STORED.get(recipe.id, as_per_tensor)(copies[1], copies[0]), *data.shape)
        return {dim: replace(copy, amax=amax_of(data)) if recipe.history else copy for dim, copy in read.items()}


class StandInLinear:
    """The emulated layer, with te.DelayedLinear's methods."""

    def __init__(self, in_features: int, out_features: int, device: str, **options: Any) -> None:
        self.layer = EmulatedLinear(in_features, out_features, False, RECIPES["fp8_delayed_scaling"], device)
        for quantizer in self.layer.quantizers.values():
            quantizer.delayed = emulated_scale(quantizer.operand.element, device, **options)
        self.weight = self.layer.weight

    def step(self, x: Tensor, dy: Tensor) -> Tensor:
        """Forward and backward."""
        y = self.layer(x.detach().requires_grad_())
        y.backward(dy)
        return y.detach()

    def scales(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By operand."""
        states = {name: quantizer.delayed for name, quantizer in self.layer.quantizers.items()}
        return {name: (state.scale, state.amax_history) for name, state in states.items() if state}


# ------------------------------------------------------------------------------------------------------- the checks


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude, NaN aside."""
    return x.float().abs().nan_to_num(nan=0.0, posinf=float("inf")).amax()


def same_nan(codes: Tensor, like: Quantized) -> Tensor:
    """Codes with one NaN for all: which one a conversion writes is no matter of arithmetic."""
    nan = decode(codes.contiguous(), like.element).isnan()
    return torch.where(nan, like.element.nan_code or 0, codes)


def exact_groups(x: Tensor) -> Tensor:
    """Which groups of 16 rows, in each column, have a Hadamard transform that float32 represents exactly.

    Elsewhere it depends on how tensor cores add, which is not published; see `hadamard.transform`.
    """
    groups = x.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).view(-1, 16, x.shape[1])
    exact = hadamard_matrix(x.device).double().T @ groups
    return (exact.float().double() == exact).all(dim=1)


def assert_same(actual: te.Copy, expected: Quantized, dim: int, x: Tensor, where: str) -> None:
    """Equal codes, scales and maxima; of a transformed copy in the groups that can be compared."""
    scales = expected.scale_codes() if expected.amax is None else per_line(expected, dim)
    equal_codes = same_nan(actual.codes, expected) == expected.codes()
    equal_scales = actual.inverse_scale == scales
    compared = exact_groups(x) if expected.transformed else torch.ones((), dtype=torch.bool)
    if expected.transformed:
        equal_codes |= ~compared.repeat_interleave(16, dim=0)
        equal_scales |= ~compared
    assert equal_codes.all(), f"{where}: {(~equal_codes).sum()} of {equal_codes.numel()} codes differ"
    assert equal_scales.all(), f"{where}: {(~equal_scales).sum()} of {equal_scales.numel()} scales differ"
    if expected.amax is not None and actual.amax is not None and compared.all():
        assert actual.amax == expected.amax, where


def earlier_scale(x: Tensor) -> Tensor:
    """Of any mantissa, shape (1,): as an earlier step may have left it, so that some elements are too large for it."""
    amax = amax_of(x)
    return torch.where((amax > 0) & amax.isfinite(), 1000 / amax, 0.7).clamp(max=1e38).reshape(1)


def check_copies(source: Any, case: Case, x: Tensor, where: str) -> None:
    """Row- and column-wise copies of a tensor, and with delayed scaling the maximum that was noted."""
    given = {"scale": earlier_scale(x)} if case.recipe.history else {}
    copies = source.quantized(case.recipe, case.role, x, **case.options, **given)
    expected = case.emulated(x, **given)
    for dim in (1, 0):
        assert_same(copies[dim], expected[dim], dim, x, f"{where}, contracting {dim}")
    if case.recipe.history:
        assert copies[1].amax == amax_of(x), where


def check_drawn(source: Any, case: Case, data: st.DataObject, device: str) -> None:
    """The copies of one tensor that Hypothesis draws."""
    step = {"mxfp8": 32, "nvfp4": 16}.get(case.recipe.id, 1)
    shape = data.draw(matrix_shapes(step, step, most=320))
    drawn = data.draw(values())
    check_copies(source, case, drawn.tensor(shape).to(device), f"{drawn} {shape}")


def check_stochastic_rounding(source: Any, x: Tensor, draws: int = 25) -> None:
    """Scales as without; each value one of the two neighbours; the mean nearer to x than rounding to nearest."""
    recipe = RECIPES["nvfp4"]
    expected = Quantizer(recipe.gradient, recipe, x.device)(x)
    drawn = [source.quantized(recipe, "gradient", x, stochastic_rounding=True) for _ in range(draws)]
    for dim, nearest in expected.items():
        values = torch.stack([decode(copies[dim].codes.contiguous(), nearest.element) for copies in drawn])
        order = decode(torch.arange(16, dtype=torch.uint8, device=x.device), nearest.element).unique()
        places, nearest_place = torch.searchsorted(order, values), torch.searchsorted(order, nearest.values)
        assert all(torch.equal(copies[dim].inverse_scale, per_line(nearest, dim)) for copies in drawn)
        assert ((places - nearest_place).abs() <= 1).all()
        assert (values != values[0]).any()
        mean = replace(nearest, values=values.mean(dim=0)).dequantize()
        assert (mean - x).norm() < (nearest.dequantize() - x).norm() / 2


def emulated_scale(element: str, device: str, **options: Any) -> DelayedScale:
    """The state of one operand for options of TE's DelayedScaling."""
    most_recent = options.get("amax_compute_algo") == "most_recent"
    length, margin = options.get("amax_history_len", 1024), options.get("margin", 0)
    return DelayedScale(FORMATS[element], length, device, margin=margin, most_recent=most_recent)


# Sizes of x and dy, step by step: growing, shrinking, nothing at all, and beyond what the scale so far can hold.
STEPS = [(1.0, 1e-3), (100.0, 1e-6), (0.01, 1e-2), (0.0, 0.0), (1e4, 1e3), (1e4, 1e-3), (2.0, 1e-3), (1.0, 1e-4)]
DELAYED_OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "short_history": {"amax_history_len": 3},
    "most_recent": {"amax_history_len": 3, "amax_compute_algo": "most_recent"},
    "margin": {"margin": 2},
}


def check_delayed_scaling(make: Any, device: str, options: dict[str, Any]) -> None:
    """Scale and history of x, w and dy after every step of a linear; the first has scale 1.

    The output shows which scale a step used: it is the emulated layer's, within 2**-6 for what cuBLAS accumulates.
    """
    linear, oracle = make(128, 96, device, **options), StandInLinear(128, 96, device, **options)
    states = {name: emulated_scale("e5m2" if name == "dy" else "e4m3", device, **options) for name in ("x", "w", "dy")}
    for number, (x_size, dy_size) in enumerate(STEPS):
        generator = torch.Generator().manual_seed(number)
        x = (x_size * torch.randn(64, 128, generator=generator)).bfloat16().to(device)
        dy = (dy_size * torch.randn(64, 96, generator=generator)).bfloat16().to(device)
        with torch.no_grad():
            linear.weight.mul_(1.25)
            oracle.weight.copy_(linear.weight)
        for state, tensor in zip(states.values(), (x, linear.weight.detach(), dy), strict=True):
            state.record(tensor)
        y, expected = linear.step(x, dy).float(), oracle.step(x, dy).float()
        assert (y - expected).norm() <= 2**-6 * expected.norm(), f"step {number}"
        for name, (scale, history) in linear.scales().items():
            states[name].update()
            assert scale == states[name].scale, f"step {number}, scale of {name}"
            assert torch.equal(history, states[name].amax_history), f"step {number}, history of {name}"


# ------------------------------------------------------------------------------------------------ Transformer Engine


@pytest.fixture
def on_gpu(device: str) -> None:
    """Skip where there is none."""
    if device == "cpu":
        pytest.skip("needs Transformer Engine and a GPU; this run is on the CPU")


def skip_unsupported(recipe: str) -> None:
    """Skip with TE's reason."""
    if reason := te.unsupported_reason(recipe):
        pytest.skip(f"{recipe}: {reason}")


@each_case
def test_codes_and_scales_are_the_emulation_s(on_gpu: None, case: Case) -> None:
    """Row- and column-wise copies of 240 tensors aligned, unaligned and thin, from the usual ones to the extremes."""
    skip_unsupported(case.recipe.id)
    for kind in tensors.KINDS:
        for seed, shape in product(range(SEEDS), SHAPES.get(case.recipe.id, _ANY)):
            x = tensors.tensor(kind, shape, seed).to("cuda")
            check_copies(te, case, x, f"{kind} {shape} seed {seed}")


@each_case
@settings(max_examples=max(DRAWN, settings().max_examples))
@given(data=st.data())
def test_codes_and_scales_of_drawn_tensors_are_the_emulation_s(device: str, case: Case, data: st.DataObject) -> None:
    """Of 200 tensors that Hypothesis draws: any size that the recipe takes, values and scale, seed and all."""
    if device == "cpu":
        pytest.skip("needs Transformer Engine and a GPU; this run is on the CPU")
    skip_unsupported(case.recipe.id)
    check_drawn(te, case, data, device)


@pytest.mark.parametrize("name", ["current", "block_1d", "block_2d", "block_1d_float32", "block_2d_float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_types_of_input_are_quantized_alike(on_gpu: None, name: str, dtype: torch.dtype) -> None:
    """float32 and float16: where a scale would be infinite, the largest number of the type takes its place."""
    case = next(case for case in CASES if case.name == name)
    skip_unsupported(case.recipe.id)
    for kind in tensors.FINITE:
        check_copies(te, case, tensors.tensor(kind, (130, 200), 0, dtype).to("cuda"), kind)


@pytest.mark.parametrize("shape", [(64, 128), (48, 80)], ids=["one_kernel", "two_kernels"])
def test_gradients_of_nvfp4_are_rounded_stochastically(on_gpu: None, shape: tuple[int, int]) -> None:
    """As TE's modules ask for it."""
    skip_unsupported("nvfp4")
    check_stochastic_rounding(te, tensors.tensor("normal", shape, 0).to("cuda"))


@pytest.mark.parametrize("options", DELAYED_OPTIONS)
def test_delayed_scaling_follows_the_emulation_step_by_step(on_gpu: None, options: str) -> None:
    """A te.Linear in eight steps."""
    skip_unsupported("fp8_delayed_scaling")
    check_delayed_scaling(te.DelayedLinear, "cuda", DELAYED_OPTIONS[options])


def test_an_option_that_te_s_quantizer_lacks_is_refused(on_gpu: None) -> None:
    """Setting an attribute that nobody reads would go unnoticed."""
    skip_unsupported("fp8_current_scaling")
    with pytest.raises(AttributeError):
        te.quantized(RECIPES["fp8_current_scaling"], "activation", torch.ones(16, 16, device="cuda"), epsilon=1)


# ----------------------------------------------------------------------------------------------- with the stand-in


@each_case
@given(data=st.data())
def test_copies_of_drawn_tensors_survive_te_s_layouts(case: Case, data: st.DataObject) -> None:
    """The check itself."""
    check_drawn(StandIn(), case, data, "cpu")


@each_case
def test_copies_survive_te_s_layouts(case: Case) -> None:
    """Transposed, padded and packed, and read again."""
    small = [shape for shape in SHAPES.get(case.recipe.id, _ANY) if math.prod(shape) < 2**15]
    for shape in small[:3]:
        for kind in ("regions", "not_finite"):
            check_copies(StandIn(), case, tensors.tensor(kind, shape, 0), f"{kind} {shape}")


@each_case
@pytest.mark.parametrize("dim", [0, 1])
def test_one_wrong_code_or_scale_is_noticed(case: Case, dim: int) -> None:
    """In either copy."""
    x = tensors.tensor("eighths", (64, 96), 0)
    expected = case.emulated(x)
    copy = StandIn().quantized(case.recipe, case.role, x, **case.options)[dim]
    assert_same(copy, expected[dim], dim, x, "")
    codes, scales = copy.codes.clone(), copy.inverse_scale.contiguous().clone()
    codes[5, 7] ^= 1
    scales.view(-1)[-1] += 1
    for wrong in (replace(copy, codes=codes), replace(copy, inverse_scale=scales)):
        with pytest.raises(AssertionError, match="differ"):
            assert_same(wrong, expected[dim], dim, x, "")


def test_the_stand_in_rounds_stochastically() -> None:
    """The check itself, on a shape that TE takes to two kernels."""
    check_stochastic_rounding(StandIn(), tensors.tensor("normal", (48, 80), 0))


@pytest.mark.parametrize("options", DELAYED_OPTIONS)
def test_the_stand_in_follows_delayed_scaling(options: str) -> None:
    """The check itself."""
    check_delayed_scaling(StandInLinear, "cpu", DELAYED_OPTIONS[options])


def test_a_history_rolled_one_step_late_is_noticed() -> None:
    """By the scale after the first step."""

    class Late(StandInLinear):
        def scales(self) -> dict[str, tuple[Tensor, Tensor]]:
            now, self.before = super().scales(), getattr(self, "before", None)
            found = self.before or {
                name: (torch.ones(()), torch.zeros_like(history)) for name, (_, history) in now.items()
            }
            self.before = now
            return found

    with pytest.raises(AssertionError, match="step 0, scale of x"):
        check_delayed_scaling(Late, "cpu", {})


def test_every_granularity_has_a_case() -> None:
    """The table of cases names all quantized recipes, one scale per tensor, and every block."""
    quantized = [recipe for recipe in RECIPES.values() if recipe.quantized]
    assert {case.recipe for case in CASES} == set(quantized)
    blocks = {operand.block for recipe in quantized for operand in (recipe.activation, recipe.weight, recipe.gradient)}
    assert {getattr(case.recipe, case.role).block for case in CASES} == blocks
