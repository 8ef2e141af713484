"""What error a recipe must have, from below and from above, derived from its formats, its scales and its data.

The derivation. A GEMM contracts a and b, whose elements are independent and, in at least one of the two, have random
signs. Quantized they are a' and b'. Products of different elements then average to nothing, and for the expected
squares of what is summed

    E (a'b' - ab)^2 / E (ab)^2  =  A B - 2 U V + 1      A = E a'^2 / E a^2, U = E a'a / E a^2; B and V likewise of b

which holds for any error, also one as large as the value itself. Rounding the output is independent of it and adds
its own square. A and U follow from the format, the scale and the distribution of the elements by summing over
everything that an element can be: inputs are in bfloat16, so there are finitely many magnitudes, each with a
probability, and the largest magnitude of a block of n has a distribution known from theirs (`_Blocks`). Where elements
of a block depend on each other (a Hadamard transform of what is not normal), blocks are drawn instead (`_drawn`).

Nothing here is taken from the emulation, formats included: it is NumPy on float64, so that a fault there shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from correctness.distributions import DISTRIBUTIONS, Array
from shapes.gemms import Linear
from shapes.recipes import TENSOR, Operand, Recipe

FLOAT32_MAX = float(np.finfo(np.float32).max)

# By how many standard deviations an error may be off: 1 in 16000 is, if they are normal. _deviation is more than one,
# since it adds up what the norms of the error and of the product vary, which they do together.
DEVIATIONS = 4.0
# What the derivation leaves out: float32 where this has float64, the distribution of an output that is rounded.
SYSTEMATIC = 0.02

# With more room than this, in exponents of e, so few numbers are rounded that all may happen to be exact.
MOST_ROOM = 2.5

_CASES = 5  # equally likely largest magnitudes of a tensor, where scales of blocks depend on it
_SCALES = 48  # equally likely scales of a tensor


class Element(NamedTuple):
    """A format: its largest finite value, smallest normal value, bits behind the binary point."""

    max_finite: float
    smallest_normal: float
    mantissa_bits: int


# OCP 8-bit Floating Point Specification 1.0, OCP Microscaling Formats Specification 1.0, IEEE 754 and bfloat16.
ELEMENTS = {
    "e4m3": Element(448.0, 2.0**-6, 3),
    "e5m2": Element(57344.0, 2.0**-14, 2),
    "e2m1": Element(6.0, 1.0, 1),
    "bf16": Element((2 - 2.0**-7) * 2.0**127, 2.0**-126, 7),
    "fp16": Element(65504.0, 2.0**-14, 10),
}


def _power_of_two_below(x: Array) -> Array:
    return np.ldexp(1.0, np.frexp(x)[1] - 1)


def step(x: Array, element: Element) -> Array:
    """The distance between the format's neighbours around each magnitude, constant below the smallest normal one."""
    return _power_of_two_below(np.maximum(np.abs(x), element.smallest_normal)) * 2.0**-element.mantissa_bits


def rounded(x: Array, element: Element) -> Array:
    """Each value as the format has it: to the nearest, ties to even, what is too large to the largest finite one."""
    clipped = np.clip(x, -element.max_finite, element.max_finite)
    each = step(clipped, element)
    return np.asarray(np.rint(clipped / each) * each)


def scales(amax: Array, element: Element, scale_format: str, tensor_amax: float) -> tuple[Array, Array]:
    """What blocks are multiplied with, and what undoes it, from their largest magnitudes.

    `scale_format` is the recipe's; `tensor_amax` matters for NVFP4 only. A block of zeros is multiplied with 1. NVFP4's
    are computed in float32, in TE's order: where elements have few magnitudes, the scales of many blocks are halfway
    between two values of E4M3.
    """
    known = np.where(amax > 0, amax, element.max_finite)
    if scale_format == "e4m3 and float32":
        whole = np.float32(ELEMENTS["e4m3"].max_finite * element.max_finite)
        tensor_scale = min(whole / np.float32(tensor_amax), np.float32(FLOAT32_MAX)) if tensor_amax else np.float32(1)
        stored = amax.astype(np.float32) * (tensor_scale * np.float32(1 / element.max_finite))
        inverse = rounded(stored.astype(np.float64), ELEMENTS["e4m3"]) / float(tensor_scale)
        with np.errstate(divide="ignore"):
            return np.minimum(1.0 / inverse, FLOAT32_MAX), inverse
    if scale_format == "e8m0":
        mantissa, exponent = np.frexp(known / element.max_finite)
        inverse = np.ldexp(1.0, np.clip(exponent - (mantissa == 0.5), -127, 127))
        return 1.0 / inverse, inverse
    scale = np.minimum(element.max_finite / known, FLOAT32_MAX)
    scale = _power_of_two_below(scale) if scale_format == "power of two" else scale
    return scale, 1.0 / scale


# ---------------------------------------------------------------------------------------------- one operand's error


class Moments(NamedTuple):
    """A quantized tensor against the tensor, elements x and x'.

    square    E x^2
    energy    E x'^2 / E x^2
    overlap   E x'x / E x^2
    peaks     E x^4 / (E x^2)^2, and the same of the error x' - x: how far single elements make up the norm
    wobble    relative variance of the error's square over tensors, from the scales that they happen to get
    outlier   what an outlier adds to each of square, energy and overlap, relative to `square`
    """

    square: float
    energy: float = 1.0
    overlap: float = 1.0
    peaks: tuple[float, float] = (3.0, 3.0)
    wobble: float = 0.0
    outlier: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def error(self) -> float:
        """The relative error (Frobenius) of the tensor itself."""
        return math.sqrt(max(self.energy - 2 * self.overlap + 1, 0.0))

    @property
    def outlier_in_error(self) -> float:
        """The share of the outlier in the square of the error."""
        square, energy, overlap = self.outlier
        return _ratio(max(square + energy - 2 * overlap, 0.0), self.error**2)


class _Sums(NamedTuple):
    """Averages over elements, or over the elements of each of several blocks."""

    square: Array  # x^2
    fourth: Array  # x^4
    energy: Array  # x'^2
    overlap: Array  # x'x
    error_square: Array  # (x' - x)^2
    error_fourth: Array


_NOTHING = _Sums(*(np.zeros(()) for _ in _Sums._fields))


def _quantized(x: Array, scale: Array, inverse: Array, element: Element, stochastic: bool) -> _Sums:
    """What each magnitude x contributes, with the scale of its block. Stochastic rounding: its expectation."""
    scaled = np.minimum(x * scale, element.max_finite)
    if stochastic:  # up with the probability that makes the expectation right
        each = step(scaled, element)
        fraction = np.modf(scaled / each)[0]
        value, variance = scaled * inverse, (each * inverse) ** 2 * fraction * (1 - fraction)
    else:
        value, variance = rounded(scaled, element) * inverse, np.zeros_like(scaled)
    error_square = (value - x) ** 2 + variance
    return _Sums(x**2, x**4, value**2 + variance, value * x, error_square, error_square**2)


@lru_cache(64)
def _magnitudes(distribution: str, size: float) -> tuple[Array, Array]:
    """The magnitudes in bfloat16 that elements can have, ascending, and the probability of each.

    Below 2^-28 of the largest they count as zero: they are 10^-17 of the square, and most of the work.
    """
    grid = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    ends = np.append((grid[:-1] + grid[1:]) / 2, np.inf)
    probability = np.diff(DISTRIBUTIONS[distribution].below(ends / size), prepend=0.0)
    grid, probability = grid[probability > 0], probability[probability > 0]
    small = grid < 2.0**-28 * grid[-1]
    if not small.any():
        return grid, probability
    return np.append(0.0, grid[~small]), np.append(probability[small].sum(), probability[~small])


def _outlier(distribution: str, size: float) -> float:
    """The magnitude of a tensor's outlier in bfloat16, 0 without one."""
    return float(_bfloat16(np.asarray(DISTRIBUTIONS[distribution].outlier * size)))


def _bfloat16(x: Array) -> Array:
    return rounded(x, ELEMENTS["bf16"])


@dataclass(frozen=True)
class _Format:
    """How a tensor is quantized: `block` elements share a scale, and there are `blocks` of them."""

    element: Element
    scale: str
    block: int
    blocks: int
    stochastic: bool = False


class _Blocks:
    """Averages over a tensor whose elements are independent, from the probability of each magnitude."""

    def __init__(self, how: _Format, distribution: str, size: float, tensor_amax: float) -> None:
        self.how, self.tensor_amax = how, tensor_amax
        self.x, self.probability = _magnitudes(distribution, size)
        self.below = np.cumsum(self.probability)
        self.below /= self.below[-1]

    def regular(self) -> tuple[_Sums, float]:
        """Averages over all blocks, and the relative variance of a block's error around its average."""
        below = self.below**self.how.block  # the probability of a block's largest magnitude to be no larger
        if self.how.scale == "float32":  # each magnitude makes another scale: some equally likely ones
            largest = np.searchsorted(below, (np.arange(_SCALES) + 0.5) / _SCALES)
            weight = np.full(_SCALES, 1 / _SCALES)
        else:
            (largest,) = np.nonzero(np.diff(below, prepend=0.0) > 1e-9)
            weight = np.diff(below, prepend=0.0)[largest]
            weight /= weight.sum()
        blocks = self._given_largest(largest)
        mean = _Sums(*(np.asarray(weight @ each) for each in blocks))
        spread = float(weight @ (blocks.error_square - mean.error_square) ** 2)
        return mean, spread / max(float(mean.error_square) ** 2, 1e-300)

    def _given_largest(self, largest: NDArray[np.intp]) -> _Sums:
        """Averages over the elements of blocks whose largest magnitude is x[largest]."""
        scale, inverse = scales(self.x[largest], self.how.element, self.how.scale, self.tensor_amax)
        distinct, which = np.unique(np.stack([scale, inverse]), axis=1, return_inverse=True)
        x = self.x[: largest[-1] + 1]
        contributed = self._contributed(x, distinct[0][:, None], distinct[1][:, None])
        sums = np.cumsum(np.broadcast_arrays(*contributed) * self.probability[: len(x)], axis=2)
        others = sums[:, which.ravel(), largest] / self.below[largest]
        own = self._contributed(self.x[largest], scale, inverse)
        share = 1.0 / self.how.block
        return _Sums(*(share * one + (1 - share) * rest for one, rest in zip(own, others, strict=True)))

    def with_outlier(self, regular: _Sums, outlier: float) -> tuple[_Sums, _Sums]:
        """Averages over a tensor one of whose blocks has an outlier: over all other elements, and what it adds."""
        magnitude, (block, blocks) = np.asarray(outlier), (self.how.block, self.how.blocks)
        scale, inverse = scales(magnitude, self.how.element, self.how.scale, self.tensor_amax)
        beside = self._contributed(self.x, scale, inverse)
        alone = self._contributed(magnitude, scale, inverse)
        mean = [
            ((blocks - 1) * block * each + (block - 1) * (part @ self.probability)) / (block * blocks)
            for each, part in zip(regular, beside, strict=True)
        ]
        return _Sums(*mean), _Sums(*(part / (block * blocks) for part in alone))

    def _contributed(self, x: Array, scale: Array, inverse: Array) -> _Sums:
        return _quantized(x, scale, inverse, self.how.element, self.how.stochastic)


def _largest_of_tensor(how: _Format, distribution: str, size: float) -> list[float]:
    """Equally likely magnitudes of a tensor's largest element; one where nothing depends on it, or it is known."""
    if outlier := _outlier(distribution, size):
        return [outlier]
    x, probability = _magnitudes(distribution, size)
    if how.scale != "e4m3 and float32":
        return [float(x[-1])]
    below = np.cumsum(probability) ** (how.block * how.blocks)
    return [float(x[np.searchsorted(below, (index + 0.5) / _CASES)]) for index in range(_CASES)]


@lru_cache(1024)
def _independent(how: _Format, distribution: str, size: float) -> Moments:
    """Moments of a tensor of independent elements."""
    outlier = _outlier(distribution, size)
    cases, spreads = [], []
    for tensor_amax in _largest_of_tensor(how, distribution, size):
        blocks = _Blocks(how, distribution, size, tensor_amax)
        mean, spread = blocks.regular()
        cases.append(blocks.with_outlier(mean, outlier) if outlier else (mean, _NOTHING))
        spreads.append(0.0 if outlier and how.blocks == 1 else spread)  # then the scale is known
    return _moments(cases, float(np.mean(spreads)) / how.blocks)


def _moments(cases: list[tuple[_Sums, _Sums]], wobble: float) -> Moments:
    """Moments from averages, and from what an outlier adds to each, in equally likely cases."""
    mean = _Sums(*np.mean([regular for regular, _ in cases], axis=0))
    alone = _Sums(*np.mean([outlier for _, outlier in cases], axis=0))
    square, error = (float(mean[index] + alone[index]) for index in (0, 4))
    if square == 0:
        return Moments(0.0)
    errors = [float(regular.error_square + outlier.error_square) for regular, outlier in cases]
    return Moments(
        square=square,
        energy=float(mean.energy + alone.energy) / square,
        overlap=float(mean.overlap + alone.overlap) / square,
        peaks=(_ratio(mean.fourth, mean.square**2), _ratio(mean.error_fourth, mean.error_square**2)),
        wobble=wobble + _ratio(float(np.var(errors)), error**2),
        outlier=(float(alone.square) / square, float(alone.energy) / square, float(alone.overlap) / square),
    )


def _ratio(part: float | Array, whole: float | Array) -> float:
    return float(part) / float(whole) if float(whole) > 0 else 0.0


# -------------------------------------------------------------------------------------- blocks with dependent elements


HADAMARD = 16  # elements that TE transforms together, and the block of NVFP4
_DRAWN = 2**14  # blocks


@cache
def hadamard_matrix() -> Array:
    """An orthogonal matrix whose entries are all 1/4 or -1/4, with random signs: a random Hadamard transform."""
    matrix = np.ones((1, 1))
    while len(matrix) < HADAMARD:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.default_rng(0).choice([-1.0, 1.0], HADAMARD)
    return signs[:, None] * matrix / math.sqrt(HADAMARD)


@lru_cache(1024)
def _drawn(how: _Format, distribution: str, size: float) -> Moments:
    """Moments after a random Hadamard transform of blocks, from many drawn ones.

    An outlier's block is drawn as often as others and counts as the one block that it is. Raises ValueError for
    elements without random signs: then all depends on the transform's own signs.
    """
    kind = DISTRIBUTIONS[distribution]
    if not kind.signs:
        raise ValueError(f"no expectation for {distribution} elements after a Hadamard transform")
    generator, shape = np.random.default_rng(0), (_DRAWN, HADAMARD)
    draw = DISTRIBUTIONS["normal"].draw if kind.outlier else kind.draw  # an outlier is put in below
    regular = _bfloat16(size * draw(generator, shape))
    special = regular.copy()
    if kind.outlier:
        special[:, 0] = _outlier(distribution, size)
    transformed = [_bfloat16(np.abs(blocks @ hadamard_matrix())) for blocks in (regular, special)]
    cases, wobbles = [], []
    for tensor_amax in _quantiles(transformed[1].max(axis=1), 1 if kind.outlier else how.blocks):
        ordinary, peculiar = (_block_sums(np.minimum(blocks, tensor_amax), how, tensor_amax) for blocks in transformed)
        share = 1 / how.blocks if kind.outlier else 0.0
        mean = _Sums(*(np.asarray((1 - share) * each.mean()) for each in ordinary))
        cases.append((mean, _Sums(*(np.asarray(share * each.mean()) for each in peculiar))))
        wobbles.append(_ratio(ordinary.error_square.var(), ordinary.error_square.mean() ** 2) / how.blocks)
    return _moments(cases, float(np.mean(wobbles)))


def _quantiles(largest: Array, blocks: int) -> list[float]:
    """Equally likely largest magnitudes of so many blocks, from those of drawn blocks."""
    chance = ((np.arange(len(largest)) + 1) / len(largest)) ** blocks
    return [float(np.sort(largest)[np.searchsorted(chance, (index + 0.5) / _CASES)]) for index in range(_CASES)]


def _block_sums(blocks: Array, how: _Format, tensor_amax: float) -> _Sums:
    """Averages over the elements of each block: magnitudes (blocks, elements)."""
    scale, inverse = scales(blocks.max(axis=1), how.element, how.scale, tensor_amax)
    each = _quantized(blocks, scale[:, None], inverse[:, None], how.element, how.stochastic)
    return _Sums(*(part.mean(axis=1) for part in each))


# ------------------------------------------------------------------------------------------------------- one operand


class Input(NamedTuple):
    """What a tensor is filled with: a distribution by its name, and the size that multiplies it."""

    distribution: str = "normal"
    size: float = 1.0


def usual_inputs(linear: Linear) -> dict[str, Input]:
    """x, w and dy as shapes.backends.emulation.linear.EmulatedGemms draws them."""
    return {"x": Input(), "w": Input(size=linear.in_features**-0.5), "dy": Input(size=1e-3)}


@dataclass(frozen=True)
class Extras:
    """What NVFP4 does besides: a Hadamard transform of both operands of wgrad, stochastic rounding of gradients."""

    hadamard: bool = True
    stochastic: bool = True


AS_TE = Extras()


# The operands of each GEMM, and the dimension of each that is contracted; x (tokens, in), w (out, in), dy (tokens,
# out). The order is that of Recipe.gemm_operands.
CONTRACTED = {
    "fprop": (("x", 1), ("w", 1)),
    "dgrad": (("dy", 1), ("w", 0)),
    "wgrad": (("dy", 0), ("x", 0)),
}


def tensor_shape(role: str, linear: Linear) -> tuple[int, int]:
    """Rows and columns of `x`, `w` or `dy` of a linear."""
    sizes = {"x": (linear.tokens, linear.in_features), "dy": (linear.tokens, linear.out_features)}
    return sizes.get(role, (linear.out_features, linear.in_features))


def operand_moments(
    operand: Operand, recipe: Recipe, role: str, dim: int, linear: Linear, given: Input, extras: Extras = AS_TE
) -> Moments:
    """A tensor of a linear (`x`, `w` or `dy`) as it enters a GEMM that contracts its dimension `dim`.

    Raises ValueError for a combination without an expectation: a Hadamard transform of elements that have one sign.
    """
    rows, columns = tensor_shape(role, linear)
    if recipe.scale is None or operand.block is None:
        return _unquantized(given, rows * columns)
    if _magnitudes(*given)[0][-1] == 0:
        return Moments(0.0)
    across, along = (rows, columns) if dim == 1 else (columns, rows)
    block = (across, along) if operand.block == TENSOR else operand.block
    block = (min(block[0], across), min(block[1], along))  # a partial block at the edge counts as a whole one
    nvfp4 = recipe.id == "nvfp4"
    how = _Format(
        ELEMENTS[operand.element],
        recipe.scale,
        block=block[0] * block[1],
        blocks=-(-across // block[0]) * -(-along // block[1]),
        stochastic=nvfp4 and extras.stochastic and role == "dy",
    )
    transformed = nvfp4 and extras.hadamard and role != "w" and dim == 0
    if transformed and given.distribution != "normal":  # normal elements stay normal
        return _drawn(how, *given)
    return _independent(how, *given)


@lru_cache(1024)
def _unquantized(given: Input, elements: int) -> Moments:
    x, probability = _magnitudes(*given)
    square, fourth = float(probability @ x**2), float(probability @ x**4)
    outlier = _outlier(*given) ** 2 / elements
    if square == 0:
        return Moments(0.0)
    share = outlier / (square + outlier)
    return Moments(square + outlier, peaks=(fourth / square**2, 0.0), outlier=(share, share, share))


# -------------------------------------------------------------------------------------------------------- one GEMM


class Limits(NamedTuple):
    """A relative error (Frobenius): what is expected, and what it may be."""

    lower: float
    expected: float
    upper: float

    def __contains__(self, error: object) -> bool:
        return isinstance(error, float) and self.lower <= error <= self.upper


@cache
def _output_error(dtype: str) -> float:
    """Relative error of rounding normally distributed numbers, of about 1, to an unscaled format."""
    x = np.linspace(0, 6, 2**20)[1:]
    density = np.exp(-(x**2) / 2)
    return math.sqrt(float((step(x, ELEMENTS[dtype]) ** 2 / 12) @ density) / float(x**2 @ density))


class _Side(NamedTuple):
    """How a matrix of a product can vary: see _variance."""

    outer: int  # rows or columns that are not contracted
    peaks: float
    outlier: float  # its share in the matrix's square
    signs: bool


def _variance(a: _Side, b: _Side, contracted: int) -> float:
    """Relative variance of the squared norm of a product of two matrices of independent elements.

    With A = a^T a and B = b^T b the squared norm is the sum over k, l of A_kl B_kl. On the diagonal A varies by
    (peaks - 1) / (outer rows), which averages out over the contraction unless an outlier of b is met by one k only; off
    the diagonal are 2 / (outer rows of a x those of b). For normal elements the sum is the variance of the trace of a
    product of two Wishart matrices, 2 (m + n + k + 1) / mnk. Equal rows count as one. Two outliers do not meet.
    """
    if not (a.signs or b.signs):
        return 0.0
    regular = [(1 - side.outlier) ** 2 for side in (a, b)]
    along = [side.outlier**2 + part / contracted for side, part in zip((a, b), regular, strict=True)]
    across = [(1 - side.outlier**2) / side.outer if side.signs else 1.0 for side in (a, b)]
    diagonal = [max(side.peaks - 1, 0.0) * part / side.outer for side, part in zip((a, b), regular, strict=True)]
    both = diagonal[0] * diagonal[1] / contracted
    total = diagonal[0] * along[1] + diagonal[1] * along[0] + both + 2 * across[0] * across[1]
    return total / max(1 - a.outlier * b.outlier, 1e-6) ** 2


def gemm_limits(
    recipe: Recipe,
    pass_name: str,
    linear: Linear,
    inputs: Mapping[str, Input] | None = None,
    extras: Extras = AS_TE,
) -> Limits:
    """The relative error (Frobenius) of a GEMM against the exact product of its unquantized operands.

    `inputs` tells what x, w and dy are filled with (default: usual_inputs). The limits leave room for DEVIATIONS
    standard deviations of the two norms, which follow from the sizes, for the scales that a tensor happens to get, and
    for what the derivation leaves out. A delayed scale is one that has seen a tensor like this one.

    Raises ValueError for a combination without an expectation, KeyError for an unknown pass or distribution.
    """
    given = {**usual_inputs(linear), **(inputs or {})}
    roles = CONTRACTED[pass_name]
    gemm = linear.gemm(pass_name)
    moments = [
        operand_moments(operand, recipe, role, dim, linear, given[role], extras)
        for operand, (role, dim) in zip(recipe.gemm_operands(pass_name), roles, strict=True)
    ]
    if any(each.square == 0 for each in moments):
        return Limits(0.0, 0.0, 0.0)  # zero, without any rounding
    signs = [DISTRIBUTIONS[given[role].distribution].signs for role, _ in roles]
    output = "fp16" if recipe.compute_dtype == "float16" else "bf16"
    _require_range(moments, gemm.k, output)
    if all(each.outlier[0] for each in moments) and gemm.k < 2 * HADAMARD:
        raise ValueError(f"no expectation for outliers that meet: the contraction has only {gemm.k} elements")
    operands, rounding = _operand_error(*moments), _output_error(output)
    expected = math.hypot(operands, rounding)
    room = DEVIATIONS * _deviation(moments, signs, (gemm.m, gemm.n), gemm.k, rounding) + SYSTEMATIC
    if _outputs_are_structured(moments, gemm.k):
        most = 2.0 ** -(ELEMENTS[output].mantissa_bits + 1)
        return Limits(max(operands * math.exp(-room) - most, 0.0), expected, operands * math.exp(room) + most)
    lower = expected * math.exp(-room) if room < MOST_ROOM else 0.0
    return Limits(lower, expected, expected * math.exp(room))


def _outputs_are_structured(moments: list[Moments], contracted: int) -> bool:
    """Whether outputs do not lie anywhere in a binade, so that rounding them may cost nothing, or the most there is.

    Elements of one magnitude make them so with others of one magnitude, with an outlier that they all meet, and where
    so few are added that no bits are lost.
    """
    single = [each.peaks[0] < 1.001 for each in moments]
    return all(single) or (any(single) and (contracted < 16 or any(each.outlier[0] for each in moments)))


def _require_range(moments: list[Moments], contracted: int, output: str) -> None:
    """Raise ValueError where outputs of six deviations are beyond the format."""
    deviation = math.sqrt(contracted * math.prod(each.square for each in moments))
    if 6 * deviation > ELEMENTS[output].max_finite:
        raise ValueError(f"no expectation for outputs that {output} does not have: they are about {deviation:.2g}")


def _operand_error(a: Moments, b: Moments) -> float:
    """Relative error of the product from both operands. Two outliers are at different places of the contraction."""
    (square, energy, overlap), (other_square, other_energy, other_overlap) = a.outlier, b.outlier
    met = energy * other_energy - 2 * overlap * other_overlap + square * other_square
    error = a.energy * b.energy - 2 * a.overlap * b.overlap + 1 - met
    return math.sqrt(max(error, 0.0) / (1 - square * other_square))


def _deviation(
    moments: list[Moments], signs: list[bool], outer: tuple[int, int], contracted: int, rounding: float
) -> float:
    """Relative standard deviation of a GEMM's error, at most: half that of its square."""
    plain = [_Side(m, each.peaks[0], each.outlier[0], s) for m, each, s in zip(outer, moments, signs, strict=True)]
    wrong = [
        _Side(m, each.peaks[1], each.outlier_in_error, s) for m, each, s in zip(outer, moments, signs, strict=True)
    ]
    product = math.sqrt(_variance(plain[0], plain[1], contracted))
    parts = [  # the square of each part of the error, and the standard deviation of that relative to it
        (moments[0].error ** 2, math.sqrt(_variance(wrong[0], plain[1], contracted) + moments[0].wobble)),
        (moments[1].error ** 2, math.sqrt(_variance(plain[0], wrong[1], contracted) + moments[1].wobble)),
        (rounding**2, product),
    ]
    error = sum(square * deviation for square, deviation in parts) / sum(square for square, _ in parts)
    return (error + product) / 2


# ------------------------------------------------------------------------------------------------------ each element


def _per_element(per_block: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    spread = per_block.repeat(block[0], axis=0).repeat(block[1], axis=1)
    return np.asarray(spread[: shape[0], : shape[1]])


def _block_largest(magnitudes: Array, block: tuple[int, int]) -> Array:
    rows, columns = (np.arange(0, size, each) for size, each in zip(magnitudes.shape, block, strict=True))
    return np.asarray(np.maximum.reduceat(np.maximum.reduceat(magnitudes, rows, axis=0), columns, axis=1))


def _element_scales(
    magnitude: Array, operand: Operand, dim: int, scale_format: str, nudge: float = 1.0
) -> tuple[Array, Array]:
    """What each element (rows, columns) is multiplied with, and what undoes it; largest magnitudes times `nudge`."""
    assert operand.block is not None
    block = operand.block if dim == 1 else operand.block[::-1]
    block = (magnitude.shape[0], magnitude.shape[1]) if block == TENSOR else block
    largest = nudge * _block_largest(magnitude, block)
    scale, inverse = scales(largest, ELEMENTS[operand.element], scale_format, float(magnitude.max()))
    return _per_element(scale, block, magnitude.shape), _per_element(inverse, block, magnitude.shape)


def quantization_limit(x: Array, operand: Operand, dim: int, scale_format: str, stochastic: bool = False) -> Array:
    """How far each element of x (rows, columns) may be from what it becomes in a GEMM that contracts `dim`.

    Half a step of the format where the element lies (a whole one if rounding is stochastic), in units of its block's
    scale, and what is beyond the largest finite value; 2^-20 of the element more is for float32 and its inverses. Where
    a block's scale is rounded to E4M3 and about halfway between two values, it may have either.
    """
    magnitude, element = np.abs(x), ELEMENTS[operand.element]
    limits = []
    for nudge in (1 - 2.0**-20, 1 + 2.0**-20) if scale_format == "e4m3 and float32" else (1.0,):
        scale, inverse = _element_scales(magnitude, operand, dim, scale_format, nudge)
        scaled = np.minimum(magnitude * scale, element.max_finite)
        missed = np.maximum(magnitude - scaled * inverse, 0.0)
        limits.append((1.0 if stochastic else 0.5) * step(scaled, element) * inverse + missed)
    return np.asarray(np.max(limits, axis=0) + 2.0**-20 * magnitude)


def measured_moments(x: Array, operand: Operand, dim: int, scale_format: str, stochastic: bool = False) -> Moments:
    """Energy and overlap of this very tensor (rows, columns), contracted along `dim`; with its latest scales."""
    magnitude = np.abs(x)
    if not magnitude.any():
        return Moments(0.0)
    scale, inverse = _element_scales(magnitude, operand, dim, scale_format)
    sums = _quantized(magnitude, scale, inverse, ELEMENTS[operand.element], stochastic)
    square, energy, overlap = (float(np.mean(each)) for each in (sums.square, sums.energy, sums.overlap))
    return Moments(square, energy / square, overlap / square)


def product_limit(a: Array, a_limit: Array, b: Array, b_limit: Array) -> Array:
    """How far each element of a b^T may be off, (m, n): from limits of a (m, k) and of b (n, k), exactly summed."""
    a, b = np.abs(a), np.abs(b)
    return np.asarray(a_limit @ b.T + a @ b_limit.T + a_limit @ b_limit.T)


# ------------------------------------------------------------------------------------------------------ accumulation


def float32_limit(a: Array, b: Array) -> Array:
    """How far each element of a b^T (m, n) may be off for being summed in float32, in any order.

    k roundings of at most 2^-24 of the sum of magnitudes, and four more for scales and bias (Higham, Accuracy and
    Stability of Numerical Algorithms, section 3.1).
    """
    return np.asarray((a.shape[1] + 4) * 2.0**-24 * (np.abs(a) @ np.abs(b).T))


_TERMS = 32  # products of FP8 values that one instruction of a Hopper tensor core adds up
_KEPT_BITS = 14  # of each of them, counted from the top of the largest
PROMOTED = 128  # products after which split accumulation goes on in float32


def tensor_core_product(a: Array, b: Array, promoted: int | None, toward_zero: bool) -> Array:
    """a b^T (m, n) as Hopper's FP8 tensor cores add it up, by what is known publicly.

    32 products and the sum so far are shifted to the exponent of the largest, and 14 bits of each are kept; what is
    shifted out is cut off, toward zero or toward minus infinity: that is not known. With `promoted`, after so many
    products the sum is added to one in float32 and starts anew (split accumulation; without it, fast). Sources:
    DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.5.2; SageAttention2 (arXiv 2411.10958), section 3.2: 13
    bits behind the point of the accumulator; CUTLASS, GmmaFP8Accumulation: promoted every four instructions.
    """
    cut = np.trunc if toward_zero else np.floor
    total = np.zeros((len(a), len(b)))
    for start in range(0, a.shape[1], promoted or a.shape[1]):
        part = np.zeros_like(total)
        for first in range(start, min(start + (promoted or a.shape[1]), a.shape[1]), _TERMS):
            products = a[:, None, first : first + _TERMS] * b[None, :, first : first + _TERMS]
            terms = np.concatenate([products, part[..., None]], axis=2)
            largest = np.abs(terms).max(axis=2, keepdims=True)
            unit = _power_of_two_below(np.where(largest > 0, largest, 1.0)) * 2.0 ** (1 - _KEPT_BITS)
            part = (cut(terms / unit) * unit).sum(axis=2)
        total = (total + part).astype(np.float32).astype(np.float64)
    return total


@cache
def accumulation_limits(first: str, second: str, contracted: int, split: bool) -> Limits:
    """The relative error (Frobenius) that Hopper's FP8 GEMMs have for how they add up, outputs in float32.

    From `tensor_core_product` of normal elements in two formats. Cut off toward minus infinity, errors are all of one
    sign and add up with the contraction; toward zero, they average out: the truth is between the two, or at one of
    them. Half more is for groups of products that differ from 32. The lower limit, an eighth of the smaller, is for the
    case that only the sum so far is cut off and products are added exactly: 1 in place of 33 terms. With split
    accumulation there is none: kernels may be exact.
    """
    generator = np.random.default_rng(0)
    a, b = (_normal_in(element, generator, (32, contracted)) for element in (first, second))
    exact = a @ b.T
    promoted = PROMOTED if split else None
    errors = [
        float(np.linalg.norm(tensor_core_product(a, b, promoted, toward_zero) - exact) / np.linalg.norm(exact))
        for toward_zero in (True, False)
    ]
    return Limits(0.0 if split else min(errors) / 8, min(errors), 1.5 * max(errors) + 2.0**-24 * math.sqrt(contracted))


def _normal_in(name: str, generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Normal numbers, scaled to the whole range of a format and rounded to it."""
    x, element = generator.standard_normal(shape), ELEMENTS[name]
    return rounded(x * (element.max_finite / np.abs(x).max()), element)
