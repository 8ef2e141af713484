"""Scales: codes and scales of every granularity bit by bit against NumPy, hand-computed examples, delayed scaling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard
from torch import Tensor

from correctness import oracles, tensors
from shapes.backends.emulation.formats import FORMATS, power_of_two_below, round_to
from shapes.backends.emulation.hadamard import hadamard_matrix, inverse_transform, transform
from shapes.backends.emulation.linear import EmulatedLinear
from shapes.backends.emulation.scaling import DelayedScale, Quantized, Quantizer, gemm_factor, quantize
from shapes.recipes import RECIPES, TENSOR, Operand

QUANTIZED = [recipe for recipe in RECIPES.values() if recipe.quantized]
OPERANDS = sorted(
    {(recipe.scale, operand) for recipe in QUANTIZED for operand in (recipe.activation, recipe.weight, recipe.gradient)}
)
# What TE's quantizers can do besides: other scales, and E5M2 in blocks (its HYBRID format).
VARIANTS = [
    *OPERANDS,
    ("power of two", Operand("e4m3", TENSOR)),
    ("power of two", Operand("e5m2", (1, 128))),
    ("float32", Operand("e4m3", (1, 128))),
    ("float32", Operand("e5m2", (128, 128))),
    ("e8m0", Operand("e5m2", (1, 32))),
]
NVFP4 = RECIPES["nvfp4"]
FLOAT32_MAX = float(np.finfo(np.float32).max)

each_operand = pytest.mark.parametrize(("scale_format", "operand"), OPERANDS, ids=str)
each_variant = pytest.mark.parametrize(("scale_format", "operand"), VARIANTS, ids=str)


def randn(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers with a seed of their own."""
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def uneven(*shape: int) -> Tensor:
    """Numbers that span so many powers of two that the maxima of blocks differ."""
    return randn(*shape) * torch.exp2(6 * randn(*shape, seed=1))


def assert_equals_oracle(quantized: Quantized, x: Tensor, operand: Operand) -> None:
    """Codes and scales of x, as it was quantized, are NumPy's."""
    largest = torch.finfo(torch.float32 if operand.block == TENSOR else x.dtype).max
    expected = oracles.quantized(
        x.float().numpy(), operand.element, quantized.block, quantized.scale_format, float(largest)
    )
    np.testing.assert_array_equal(quantized.codes().numpy(), expected[0])
    np.testing.assert_array_equal(quantized.scale_codes().reshape(expected[1].shape).numpy(), expected[1])
    if quantized.amax is not None:
        assert quantized.amax.item() == expected[2]


# ----------------------------------------------------------------------------------------------------------- oracle


@each_variant
@pytest.mark.parametrize("kind", tensors.KINDS)
def test_codes_and_scales_equal_numpy_s(scale_format: str, operand: Operand, kind: str) -> None:
    """Bit by bit, for both contractions, whole blocks and partial ones at the edges, three types of input.

    Among the tensors are outliers, zeros, one value everywhere, denormals, the largest numbers, NaN and infinity.
    """
    for seed, (dtype, shape) in enumerate(
        [(torch.bfloat16, (128, 128)), (torch.bfloat16, (130, 200)), (torch.float32, (24, 8)), (torch.float16, (1, 48))]
    ):
        x = tensors.tensor(kind, shape, seed, dtype)
        for dim in (0, 1):
            assert_equals_oracle(quantize(x, operand, dim, scale_format), x, operand)


@each_variant
def test_quantized_values_are_values_of_the_format(scale_format: str, operand: Operand) -> None:
    """Rounding the quantized values again changes nothing."""
    values = quantize(randn(64, 256), operand, 1, scale_format).values
    assert torch.equal(values, round_to(values, FORMATS[operand.element]))


@each_operand
@pytest.mark.parametrize("dim", [0, 1])
def test_dequantized_values_are_codes_times_scales(scale_format: str, operand: Operand, dim: int) -> None:
    """Every element times the inverse scale of its own block, and of the tensor, in float64."""
    quantized = quantize(uneven(130, 200), operand, dim, scale_format)
    rows, columns = quantized.block if operand.block != TENSOR else (130, 200)
    inverse = quantized.inverse_scale.reshape(-(-130 // rows), -(-200 // columns)).double().numpy()
    inverse = inverse.repeat(rows, axis=0).repeat(columns, axis=1)[:130, :200]
    expected = quantized.values.double().numpy() * inverse * quantized.tensor_inverse_scale.item()
    np.testing.assert_allclose(quantized.dequantize().numpy(), expected, rtol=2**-23, atol=0)


# -------------------------------------------------------------------------------------------------- zeros and NaN


@each_operand
def test_zero_blocks_stay_zero(scale_format: str, operand: Operand) -> None:
    """Zeros beside other blocks, and nothing but zeros, dequantize to zeros."""
    x = randn(256, 256)
    x[:128, :128] = 0
    assert quantize(x, operand, 1, scale_format).dequantize()[:128, :128].abs().max() == 0
    assert quantize(torch.zeros(64, 64), operand, 1, scale_format).dequantize().abs().max() == 0


@pytest.mark.parametrize(
    ("scale_format", "operand", "inverse_scale"),
    [
        ("float32", Operand("e4m3", TENSOR), 1.0),
        ("power of two", Operand("e4m3", (1, 128)), 1.0),
        ("e8m0", Operand("e4m3", (1, 32)), 2.0**-127),  # code 0, as TE stores it
        ("e4m3 and float32", Operand("e2m1", (1, 16)), 0.0),
    ],
    ids=lambda value: str(value),
)
def test_zero_blocks_have_the_scale_that_te_stores(scale_format: str, operand: Operand, inverse_scale: float) -> None:
    """A float32 scale of zeros is 1; a scale in E8M0 or E4M3 has that format's smallest value."""
    assert (quantize(torch.zeros(16, 256), operand, 1, scale_format).inverse_scale == inverse_scale).all()


@pytest.mark.parametrize("operand", [Operand("e4m3", TENSOR), Operand("e4m3", (1, 128))], ids=str)
def test_a_float32_scale_is_one_when_the_maximum_is_infinite(operand: Operand) -> None:
    """Infinity saturates, and the other values are quantized as they are."""
    quantized = quantize(torch.tensor([[1.0, math.inf, -math.inf]]), operand, 1, "float32")
    assert (quantized.inverse_scale == 1).all()
    assert quantized.values.tolist() == [[1.0, 448.0, -448.0]]


@each_operand
def test_nan_leaves_the_scales_alone(scale_format: str, operand: Operand) -> None:
    """CUDA's maxima ignore it, so that scales and all other elements are those of the same tensor with 0 there."""
    x = randn(256, 256)
    x[3, 5] = 0
    with_nan = x.clone()
    with_nan[3, 5] = math.nan
    clean, dirty = (quantize(each, operand, 1, scale_format) for each in (x, with_nan))
    assert torch.equal(clean.scale_codes(), dirty.scale_codes())
    others = torch.arange(256 * 256) != 3 * 256 + 5
    assert torch.equal(clean.codes().flatten()[others], dirty.codes().flatten()[others])
    assert dirty.codes()[3, 5] == (0x7 if operand.element == "e2m1" else 0x7F)


def test_a_tensor_of_nothing_but_nan_has_the_scale_of_zeros() -> None:
    """Its maximum is 0."""
    x = torch.full((16, 128), math.nan)
    assert quantize(x, Operand("e4m3", TENSOR), 1, "float32").inverse_scale == 1
    assert (quantize(x, Operand("e4m3", (1, 32)), 1, "e8m0").scale_codes() == 0).all()


# ------------------------------------------------------------------------------------------- one scale, and blocks


def test_per_tensor_scale_maps_the_maximum_to_the_largest_value() -> None:
    """scale = max_finite / amax, both formats."""
    x = randn(32, 32)
    for name in ("e4m3", "e5m2"):
        quantized = quantize(x, Operand(name, TENSOR), 1, "float32")
        assert quantized.values.abs().max() == FORMATS[name].max_finite
        scale = np.float32(FORMATS[name].max_finite) / np.float32(x.abs().max().item())
        assert quantized.inverse_scale.item() == np.float32(1) / scale


@given(exponent=st.integers(-60, 60), seed=st.integers(0, 1000))
def test_per_tensor_current_scaling_does_not_see_powers_of_two(exponent: int, seed: int) -> None:
    """x times a power of two has the same quantized values, and an inverse scale larger by that power."""
    x, factor = randn(16, 32, seed=seed), 2.0**exponent
    operand = Operand("e4m3", TENSOR)
    plain, multiplied = (quantize(matrix, operand, 1, "float32") for matrix in (x, x * factor))
    assert torch.equal(multiplied.values, plain.values)
    assert multiplied.inverse_scale == plain.inverse_scale * factor


@pytest.mark.parametrize(
    ("operand", "dtype", "scale"),
    [
        (Operand("e4m3", TENSOR), torch.bfloat16, FLOAT32_MAX),
        (Operand("e4m3", (1, 128)), torch.float32, FLOAT32_MAX),
        (Operand("e4m3", (1, 128)), torch.bfloat16, torch.finfo(torch.bfloat16).max),
    ],
    ids=str,
)
def test_a_scale_that_would_be_infinite_is_the_largest_number_of_its_type(
    operand: Operand, dtype: torch.dtype, scale: float
) -> None:
    """448 / 2**-130 is beyond float32. Per tensor its largest value stands in, for blocks that of the input's type."""
    quantized = quantize(torch.full((1, 128), 2.0**-130, dtype=dtype), operand, 1, "float32")
    assert quantized.inverse_scale.item() == np.float32(1) / np.float32(scale)
    expected = oracles.rounded(np.array([2.0**-130 * scale], np.float32), "e4m3")
    assert quantized.values.unique().tolist() == expected.tolist()
    assert quantize(torch.full((1, 128), 2.0**-130), operand, 1, "power of two").inverse_scale.item() == 2.0**-127


@pytest.mark.parametrize("block", [TENSOR, (1, 128), (128, 128)], ids=str)
def test_epsilon_is_the_least_maximum(block: tuple[int, int]) -> None:
    """A smaller largest magnitude counts as epsilon, zero included; a larger one is not touched."""
    operand = Operand("e4m3", block)
    for value, maximum in ((0.0, 0.25), (0.125, 0.25), (0.5, 0.5)):
        quantized = quantize(torch.full((128, 128), value), operand, 1, "float32", epsilon=0.25)
        assert (quantized.inverse_scale == maximum / 448).all()


@pytest.mark.parametrize(
    ("scale_format", "block"),
    [("power of two", TENSOR), ("power of two", (1, 128)), ("power of two", (128, 128)), ("e8m0", (1, 32))],
    ids=str,
)
def test_power_of_two_scales_use_the_upper_half_of_the_range(scale_format: str, block: tuple[int, int]) -> None:
    """The scale is a power of two, and the largest scaled magnitude lies in (224, 448]: nothing saturates."""
    x = uneven(128, 256)
    quantized = quantize(x, Operand("e4m3", block), 1, scale_format)
    inverse = quantized.inverse_scale
    assert torch.equal(inverse, power_of_two_below(inverse))
    scaled = x.abs() / replace(quantized, values=torch.ones_like(x)).dequantize()
    rows, columns = block if block != TENSOR else x.shape
    blocks = scaled.reshape(128 // rows, rows, 256 // columns, columns).amax(dim=(1, 3))
    assert blocks.min() > 224
    assert blocks.max() <= 448


@each_operand
def test_one_scale_and_square_blocks_share_both_copies(scale_format: str, operand: Operand) -> None:
    """There the column-wise copy is the transpose of the row-wise one; elsewhere it is quantized from x itself."""
    recipe = next(r for r in QUANTIZED if r.scale == scale_format and not r.history)
    copies = Quantizer(operand, recipe, "cpu")(x := uneven(256, 256))
    assert operand.block is not None
    shared = operand.block[0] == operand.block[1]
    assert (copies[0] is copies[1]) == shared
    source = transform(x) if copies[0].transformed else x
    transposed = quantize(source.T.contiguous(), operand, 1, scale_format)
    assert torch.equal(transposed.codes().T, copies[0].codes())
    scales = transposed.scale_codes()
    assert torch.equal(scales.T if scales.dim() else scales, copies[0].scale_codes())
    assert torch.equal(copies[0].dequantize(), copies[1].dequantize()) == shared


@pytest.mark.parametrize(
    ("x", "operand", "message"),
    [
        (torch.ones(2, 2, 2), Operand("e4m3", TENSOR), "only a matrix"),
        (torch.ones(2, 2), Operand("bf16"), "has no scale"),
    ],
    ids=["three_dimensions", "unquantized_operand"],
)
def test_what_cannot_be_quantized_is_refused(x: Tensor, operand: Operand, message: str) -> None:
    """A tensor that is no matrix, and an operand without a scale, raise ValueError."""
    with pytest.raises(ValueError, match=message):
        quantize(x, operand, 1, "float32")


# ------------------------------------------------------------------------------------------------------------ MXFP8


def test_mxfp8_scale_is_rounded_up_so_that_nothing_saturates() -> None:
    """A block of 500 has scale 2 as in TE; the OCP specification's own conversion gives 1, and 500 becomes 448."""
    quantized = quantize(torch.full((1, 32), 500.0), Operand("e4m3", (1, 32)), 1, "e8m0")
    assert quantized.inverse_scale.item() == 2
    assert quantized.dequantize().unique().tolist() == [512.0]  # 250 lies between 240 and 256


@pytest.mark.parametrize(("element", "largest_exponent"), [("e4m3", 8), ("e5m2", 15)])
def test_mxfp8_scale_of_every_bfloat16(element: str, largest_exponent: int) -> None:
    """OCP MX 1.0 (6.3) has 2**(exponent of the maximum - of the format's largest value); TE as much, or twice that.

    Twice, where the maximum's mantissa is above 1.75, that of both formats' largest value. The codes are those that
    TE derives from bfloat16's bits instead of by multiplying (cast/mxfp8/specialized/cast_bidim.cuh).
    """
    bits = np.arange(1, 0x7F80, dtype=np.int32)  # every positive finite bfloat16
    x = torch.from_numpy((bits << 16).view(np.float32))
    quantized = quantize(x[:, None], Operand(element, (1, 32)), 1, "e8m0")
    rounded_up = bits % 128 > 0.75 * 128
    expected = np.clip(bits // 128 - largest_exponent + rounded_up, 0, 254)
    np.testing.assert_array_equal(quantized.scale_codes().flatten().numpy(), expected)


def test_mxfp8_scale_of_infinity_is_the_largest() -> None:
    """2**127, so that of its block only the largest numbers survive."""
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([math.inf, 1.0, FLOAT32_MAX])
    quantized = quantize(x, Operand("e4m3", (1, 32)), 1, "e8m0")
    assert quantized.scale_codes().item() == 254
    assert quantized.values[0, :3].tolist() == [448.0, 0.0, 2.0]


# ------------------------------------------------------------------------------------------------------------ NVFP4


def test_nvfp4_by_hand() -> None:
    """Two blocks of a row, maxima 12 and 3.

    The tensor's factor is 12 / (6 * 448): block scales are 448 and 448 / 4 = 112, elements in units of
    448 * 12 / 2688 = 2 and of 0.5. So 5 is 2.5 units, halfway between 2 and 3, and 2 has the even code; 7 is 3.5
    units, between 3 and 4, and 4 has it. In the second block 0.7 is 1.4 units and becomes 1.5 of them.
    """
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([12.0, 5.0, -7.0, 1.0])
    x[0, 16:19] = torch.tensor([3.0, 0.7, -0.1])
    quantized = quantize(x, Operand("e2m1", (1, 16)), 1, "e4m3 and float32")
    assert quantized.inverse_scale.tolist() == [[448.0, 112.0]]
    assert quantized.scale_codes().tolist() == [[0x7E, 0x6E]]
    assert quantized.values[0, :4].tolist() == [6.0, 2.0, -4.0, 0.5]
    assert quantized.values[0, 16:19].tolist() == [6.0, 1.5, -0.0]
    assert quantized.codes()[0, :4].tolist() == [7, 4, 14, 1]
    torch.testing.assert_close(quantized.dequantize()[0, :4], torch.tensor([12.0, 4.0, -8.0, 1.0]), rtol=2**-22, atol=0)


def test_nvfp4_block_scales_are_e4m3_and_the_largest_is_448() -> None:
    """Block scales are values of E4M3, relative to a float32 factor that makes the largest one 448."""
    inverse = quantize(randn(64, 64), Operand("e2m1", (1, 16)), 1, "e4m3 and float32").inverse_scale
    assert torch.equal(inverse, round_to(inverse, FORMATS["e4m3"]))
    assert inverse.max() == 448


def test_nvfp4_loses_a_block_that_is_too_small_beside_the_largest() -> None:
    """Below half of E4M3's smallest value its scale is 0: elements saturate, and stand for 0."""
    x = torch.ones(1, 32)
    x[0, 16:] = 448 * 2.0**10 * 1.01
    lost = quantize(x, Operand("e2m1", (1, 16)), 1, "e4m3 and float32")
    assert lost.inverse_scale.tolist() == [[0.0, 448.0]]
    assert (lost.values[0, :16] == 6).all()
    assert (lost.dequantize()[0, :16] == 0).all()


def test_nvfp4_weights_have_one_scale_for_16_rows_and_columns() -> None:
    """Both copies are the same 16 x 16 blocks, without Hadamard transform."""
    copies = Quantizer(NVFP4.weight, NVFP4, "cpu")(uneven(64, 32))
    assert copies[0] is copies[1]
    assert copies[0].inverse_scale.shape == (4, 2)
    assert not copies[0].transformed


@pytest.mark.parametrize("shape", [(128, 128), (48, 128)], ids=["one_kernel", "two_kernels"])
def test_nvfp4_activations_with_nan_or_infinity_are_visibly_wrong(shape: tuple[int, int]) -> None:
    """Infinity always; NaN where TE has one kernel for both copies. In its other kernels NaN turns into a number."""
    x = randn(*shape)
    infinite, nan = x.clone(), x.clone()
    infinite[3, 5], nan[3, 5] = math.inf, math.nan
    for dim in (0, 1):
        assert not Quantizer(NVFP4.activation, NVFP4, "cpu")(infinite)[dim].dequantize().isfinite().all()
        row = Quantizer(NVFP4.activation, NVFP4, "cpu")(nan)[dim].dequantize()
        assert row.isnan().any() == (shape == (128, 128))


def test_nvfp4_gemm_applies_the_two_maxima_as_te_does() -> None:
    """Their product times 1 / (6 * 448)**2, three roundings of float32; others multiply two inverse scales."""
    x, w = (quantize(randn(16, 16, seed=seed), NVFP4.activation, 1, str(NVFP4.scale)) for seed in (0, 1))
    assert x.amax is not None
    assert w.amax is not None
    constant = np.float32(1 / 2688**2)
    assert gemm_factor(x, w).item() == np.float32(x.amax.item()) * np.float32(w.amax.item()) * constant
    plain = quantize(randn(16, 16), Operand("e4m3", TENSOR), 1, "float32")
    assert gemm_factor(plain, plain) == plain.inverse_scale**2


# --------------------------------------------------------------------------------------- the random Hadamard transform

SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def test_hadamard_matrix_is_te_s() -> None:
    """SciPy's Hadamard matrix of 16 with a fixed sign for each row, divided by 4: orthogonal."""
    matrix = hadamard_matrix(torch.device("cpu"))
    assert torch.equal(matrix, torch.tensor(SIGNS)[:, None] * torch.from_numpy(hadamard(16)).float() / 4)
    assert torch.equal(matrix @ matrix.T, torch.eye(16))


def test_transform_mixes_16_rows_at_a_time() -> None:
    """A single 4 spreads over its 16 rows, as the signs of one row of the matrix; other groups and columns stay 0."""
    x = torch.zeros(48, 3)
    x[16 + 3, 1] = 4.0
    transformed = transform(x)
    assert transformed[16:32, 1].tolist() == (SIGNS[3] * hadamard(16)[3]).tolist()
    assert transformed.abs().sum() == 16


def test_transform_rounds_to_bfloat16_and_can_be_undone() -> None:
    """The result is that of float64, rounded; the inverse gives x back but for that rounding, 2**-9 of each group."""
    x = randn(64, 40, dtype=torch.bfloat16).float()
    matrix = hadamard_matrix(torch.device("cpu")).double()
    expected = torch.einsum("gic,ij->gjc", x.double().view(4, 16, 40), matrix).reshape(64, 40)
    assert torch.equal(transform(x), expected.float().bfloat16().float())
    error = (inverse_transform(transform(x)) - x).view(4, 16, 40).norm(dim=1) / x.view(4, 16, 40).norm(dim=1)
    assert error.max() < 2**-8
    assert error.mean() > 2**-11


def test_transform_spreads_an_outlier() -> None:
    """Its purpose: one huge element no longer decides the scale of 15 others, and becomes 16 equal ones."""
    x = torch.zeros(16, 1)
    x[5] = 1000.0
    assert transform(x).abs().unique().tolist() == [250.0]


def test_transform_cancels_in_the_product() -> None:
    """dy^T x of the transformed tensors is that of the original ones, but for the rounding to bfloat16."""
    dy, x = randn(64, 24, dtype=torch.bfloat16).float(), randn(64, 40, seed=1, dtype=torch.bfloat16).float()
    product = transform(dy).T @ transform(x)
    assert ((product - dy.T @ x).norm() / (dy.T @ x).norm()) < 2**-8


@pytest.mark.parametrize("role", ["activation", "gradient"])
def test_only_copies_that_contract_tokens_are_transformed(role: str) -> None:
    """The column-wise copies of activations and gradients; their scale is that of the transformed tensor."""
    x = randn(64, 128, dtype=torch.bfloat16)
    copies = Quantizer(getattr(NVFP4, role), NVFP4, "cpu")(x)
    assert (copies[0].transformed, copies[1].transformed) == (True, False)
    assert_equals_oracle(copies[1], x, NVFP4.activation)
    assert_equals_oracle(copies[0], transform(x.float()), NVFP4.activation)
    assert copies[0].amax != copies[1].amax
    error = (copies[0].dequantize() - x).norm() / x.norm()
    assert 0.02 < error < 0.3


def test_transform_needs_groups_of_16() -> None:
    """40 tokens cannot be transformed: ValueError."""
    with pytest.raises(ValueError, match="needs a multiple of 16 rows, got 40"):
        Quantizer(NVFP4.activation, NVFP4, "cpu")(randn(40, 128))


# ----------------------------------------------------------------------------------------- stochastic rounding


def test_stochastic_copies_have_the_scales_of_the_others_and_neighbouring_values() -> None:
    """Scales do not depend on the random numbers; every element is one of the two neighbours of its scaled value."""
    x = randn(64, 128)
    nearest = Quantizer(NVFP4.gradient, NVFP4, "cpu")(x)
    stochastic = Quantizer(NVFP4.gradient, NVFP4, "cpu", stochastic=True)(x)
    for dim in (0, 1):
        assert torch.equal(stochastic[dim].scale_codes(), nearest[dim].scale_codes())
        values = oracles.rounded(np.linspace(-6, 6, 1000, dtype=np.float32), "e2m1")
        order = np.unique(values + 0.0)
        places = [np.searchsorted(order, copy[dim].values.numpy()) for copy in (stochastic, nearest)]
        assert np.abs(places[0] - places[1]).max() == 1


def test_stochastic_copies_average_to_the_tensor() -> None:
    """Their errors have no bias: the mean of 400 is closer to x than rounding to nearest is, eight times at least.

    An element's error has a deviation of at most half a step, so the mean of 400 errors at most a 40th, where rounding
    to nearest has a deviation of a step / sqrt(12). Elements that saturate stay away from this: the scale of a block
    is rounded too, and if it is too small, they are beyond the largest value.
    """
    x = randn(32, 64, dtype=torch.bfloat16).float()
    quantizer = Quantizer(NVFP4.gradient, NVFP4, "cpu", stochastic=True)
    mean = torch.stack([quantizer(x, (1,))[1].dequantize() for _ in range(400)]).double().mean(dim=0)
    nearest = Quantizer(NVFP4.gradient, NVFP4, "cpu")(x, (1,))[1]
    inside = nearest.values.abs() < 6
    assert inside.float().mean() > 0.8
    assert (mean - x)[inside].norm() < (nearest.dequantize() - x)[inside].norm() / 8


def test_stochastic_copies_depend_on_the_seed() -> None:
    """Equal seeds, equal copies; from call to call they differ, and so do the two copies of a call."""
    x = randn(64, 128)
    one, same, other = (Quantizer(NVFP4.gradient, NVFP4, "cpu", stochastic=True, seed=seed) for seed in (1, 1, 2))
    first = one(x)[1].values
    assert torch.equal(first, same(x)[1].values)
    assert not torch.equal(first, other(x)[1].values)
    assert not torch.equal(first, one(x)[1].values)


# --------------------------------------------------------------------------------------------------- delayed scaling


def test_delayed_scale_follows_the_maximum_of_the_history() -> None:
    """It is 1 at first, then 448 over the largest of the last three steps; the oldest step leaves the history."""
    delayed = DelayedScale(FORMATS["e4m3"], history=3, device="cpu")
    scales = []
    for amax in (7.0, 28.0, 14.0, 3.5, 1.75):
        scales.append(delayed.scale.item())
        delayed.record(torch.tensor([[amax, -1.0]]))
        delayed.update()
    assert scales == [1.0, 64.0, 16.0, 16.0, 16.0]
    assert delayed.scale == 32  # of 14, 3.5 and 1.75: 28 is gone
    assert delayed.amax_history.tolist() == [0.0, 3.5, 1.75]  # room for the next step, the oldest, the newest


def steps_by_hand(
    maxima: list[float], length: int, most_recent: bool, limit: float
) -> list[tuple[np.float32, list[float]]]:
    """Scale and history after each step, from TE's description: a list whose oldest entry falls out at the front."""
    scale, entries, found = np.float32(1), [0.0] * (length - 1), []
    for amax in maxima:
        if amax > 0:
            used = amax if most_recent else max([*entries, amax])
            entries = [*entries, amax][1:] if length > 1 else []
            if used < math.inf:
                with np.errstate(over="ignore"):
                    scale = np.minimum(np.float32(limit) / np.float32(used), np.float32(FLOAT32_MAX))
        found.append((scale, [0.0, *entries]))
    return found


@given(
    maxima=st.lists(st.one_of(st.floats(0, 1e4, width=32), st.sampled_from([0.0, math.inf, 1e-40])), max_size=12),
    length=st.integers(1, 4),
    most_recent=st.booleans(),
    margin=st.integers(0, 3),
    element=st.sampled_from(["e4m3", "e5m2"]),
)
def test_delayed_scale_step_by_step(
    maxima: list[float], length: int, most_recent: bool, margin: int, element: str
) -> None:
    """Any sequence of maxima, both ways to use them, margins, short histories: scale and history after every step."""
    maxima = [float(np.float32(amax)) for amax in maxima]
    delayed = DelayedScale(FORMATS[element], length, "cpu", margin=margin, most_recent=most_recent)
    expected = steps_by_hand(maxima, length, most_recent, FORMATS[element].max_finite / 2**margin)
    for amax, (scale, history) in zip(maxima, expected, strict=True):
        delayed.record(torch.tensor([[amax / 2, -amax]]))
        delayed.update()
        assert delayed.scale.item() == scale
        assert delayed.amax_history.tolist() == history


def test_a_step_s_maximum_is_that_of_all_tensors_recorded_in_it() -> None:
    """Several microbatches make one step; NaN does not count."""
    delayed = DelayedScale(FORMATS["e4m3"], history=2, device="cpu")
    for values in ([1.0, -7.0], [math.nan, 3.0], [0.0, 0.5]):
        delayed.record(torch.tensor([values]))
    delayed.update()
    assert delayed.scale == 64
    assert delayed.amax_history.tolist() == [0.0, 7.0]


def test_a_step_of_zeros_does_not_roll_the_history() -> None:
    """TE takes it for a step in which the tensor was not used: neither the scale nor an old maximum is lost."""
    delayed = DelayedScale(FORMATS["e4m3"], history=2, device="cpu")
    for amax in (7.0, 0.0, 0.0, 0.0):
        delayed.record(torch.tensor([[amax]]))
        delayed.update()
    assert delayed.amax_history.tolist() == [0.0, 7.0]
    assert delayed.scale == 64


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_delayed_scale_stays_after_a_step_without_a_usable_maximum(amax: float) -> None:
    """Zeros, infinities and NaN do not change a scale whose history has nothing else."""
    delayed = DelayedScale(FORMATS["e4m3"], history=1, device="cpu")
    for value in (7.0, amax):
        delayed.record(torch.tensor([[value]]))
        delayed.update()
    assert delayed.scale == 64


def test_infinity_keeps_the_scale_as_long_as_it_is_in_the_history() -> None:
    """Two steps with a history of two, and then the scale follows again."""
    delayed = DelayedScale(FORMATS["e4m3"], history=2, device="cpu")
    scales = []
    for amax in (7.0, math.inf, 14.0, 14.0):
        delayed.record(torch.tensor([[amax]]))
        delayed.update()
        scales.append(delayed.scale.item())
    assert scales == [64.0, 64.0, 64.0, 32.0]


def test_delayed_scaling_starts_with_scale_one_and_goes_on_with_the_first_maximum() -> None:
    """A layer's first step has scale 1 for all operands, its second the scale of the first step's maximum."""
    layer = EmulatedLinear(32, 32, False, RECIPES["fp8_delayed_scaling"])
    first, dy = randn(16, 32, dtype=torch.bfloat16), randn(16, 32, seed=1, dtype=torch.bfloat16)
    assert all(quantizer.delayed and quantizer.delayed.scale == 1 for quantizer in layer.quantizers.values())
    assert layer.quantizers["x"](first)[1].inverse_scale == 1
    layer(first.requires_grad_()).backward(dy)
    tensors_seen = {"x": (first, 448), "w": (layer.weight, 448), "dy": (dy, 57344)}
    for name, (tensor, limit) in tensors_seen.items():
        scale = np.float32(limit) / np.float32(tensor.detach().abs().max().item())
        assert layer.quantizers[name](torch.ones(16, 32))[1].inverse_scale.item() == np.float32(1) / scale, name


def test_delayed_scaling_saturates_what_is_larger_than_before() -> None:
    """The scale of a step comes from the steps before: ten times as much is cut off at the earlier maximum."""
    quantizer = Quantizer(RECIPES["fp8_delayed_scaling"].activation, RECIPES["fp8_delayed_scaling"], "cpu")
    x = torch.tensor([[7.0, 1.0]])
    for _ in range(2):
        quantizer(x)
        quantizer.end_step()
    assert quantizer(10 * x)[1].dequantize().tolist() == [[7.0, 7.0]]


def test_delayed_scale_does_not_move_without_gradients() -> None:
    """As in TE, a forward pass under no_grad leaves the scale for the next step alone."""
    layer = EmulatedLinear(32, 32, False, RECIPES["fp8_delayed_scaling"])
    with torch.no_grad():
        layer(randn(16, 32, scale=100.0))
    delayed = layer.quantizers["x"].delayed
    assert delayed is not None
    assert delayed.scale == 1
