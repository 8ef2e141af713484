"""Hypothesis strategies: shapes of linears, layer configs, what tensors are filled with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from correctness.bounds import Input
from correctness.distributions import DISTRIBUTIONS
from correctness.tensors import FINITE, tensor
from shapes.gemms import Linear
from shapes.models import ACTIVATIONS, ATTENTION_MASKS, NORMALIZATIONS, ModelConfig
from shapes.recipes import Recipe

SIZES = ("tokens", "in_features", "out_features")

# Elements of a linear's three matrices together. Ten copies of them in float64 are 5 MB, and 160 MB.
BUDGET, NIGHTLY_BUDGET = 2**16, 2**21

seeds = st.integers(0, 2**32 - 1)


def budget() -> int:
    """The most elements of a linear's matrices in the profile at hand: more where many examples are drawn."""
    return NIGHTLY_BUDGET if settings().max_examples >= 100 else BUDGET


def elements(linear: Linear) -> int:
    """Of x, w and dy together."""
    tokens, in_features, out_features = linear.tokens, linear.in_features, linear.out_features
    return tokens * in_features + in_features * out_features + tokens * out_features


# ------------------------------------------------------------------------------------------------------------ shapes


def alignment(recipe: Recipe) -> tuple[int, int, int]:
    """What tokens, in_features and out_features must be multiples of, forward and backward."""
    tokens, in_features, out_features = map(math.lcm, recipe.align_forward, recipe.align_backward)
    return tokens, in_features, out_features


def _block(recipe: Recipe) -> int:
    return max(max(operand.block or (1, 1)) for operand in (recipe.activation, recipe.weight)) or 16


def _multiples(step: int, most: int) -> st.SearchStrategy[int]:
    """1 to `most` times a number."""
    return st.integers(1, most).map(lambda times: times * step)


def _odd_multiples(step: int) -> st.SearchStrategy[int]:
    """1, 3, 5, 7 or 9 times a number."""
    return st.integers(0, 4).map(lambda half: (2 * half + 1) * step)


def _aligned(recipe: Recipe) -> st.SearchStrategy[tuple[int, ...]]:
    """Multiples of the recipe's blocks: no block is cut."""
    steps = [math.lcm(align, _block(recipe)) for align in alignment(recipe)]
    return st.tuples(*(_multiples(step, max(96 // step, 1)) for step in steps))


def _barely_aligned(recipe: Recipe) -> st.SearchStrategy[tuple[int, ...]]:
    """Odd multiples of what the recipe needs: blocks are cut, and nothing larger divides a size."""
    return st.tuples(*map(_odd_multiples, alignment(recipe)))


def _tiny(recipe: Recipe) -> st.SearchStrategy[tuple[int, ...]]:
    """The smallest that the recipe takes, or twice that."""
    return st.tuples(*(st.sampled_from([align, 2 * align]) for align in alignment(recipe)))


def _thin(recipe: Recipe) -> st.SearchStrategy[tuple[int, ...]]:
    """One side as short as the recipe takes it, another long."""
    shortest = alignment(recipe)

    def sizes(order: list[int], times: int) -> tuple[int, ...]:
        factors = dict(zip(order, (1, times, 2), strict=True))
        return tuple(factors[index] * align for index, align in enumerate(shortest))

    return st.builds(sizes, st.permutations(range(3)), st.integers(8, 32))


def _large(recipe: Recipe) -> st.SearchStrategy[tuple[int, ...]]:
    """Near the budget, of any proportions."""
    steps = alignment(recipe)

    def sizes(ratios: tuple[float, float]) -> tuple[int, ...]:
        relative = (1.0, *ratios)
        unit = math.sqrt(budget() / (ratios[0] + ratios[1] + ratios[0] * ratios[1]))
        return tuple(max(int(unit * each / step) * step, step) for each, step in zip(relative, steps, strict=True))

    ratio = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0])
    return st.tuples(ratio, ratio).map(sizes)


def _unaligned(recipe: Recipe) -> st.SearchStrategy[tuple[int, ...]]:
    """At least one size that the recipe refuses, forward or backward."""
    sizes = st.tuples(*(st.integers(1, 200) for _ in SIZES))
    return sizes.filter(lambda each: recipe.misaligned(*each) is not None)


def _thin_unaligned(recipe: Recipe) -> st.SearchStrategy[tuple[int, ...]]:
    """1 x k, and tokens of 8, 16 and 24, of which some pass forward and not backward: the recipe refuses them."""
    tokens = st.sampled_from([1, 8, 16, 24])
    features = st.sampled_from([8, 16, 24, 32, 48, 64, 96])
    return st.tuples(tokens, features, features).filter(lambda each: recipe.misaligned(*each) is not None)


RUNNABLE: dict[str, Callable[[Recipe], st.SearchStrategy[tuple[int, ...]]]] = {
    "aligned": _aligned,
    "barely aligned": _barely_aligned,
    "tiny": _tiny,
    "thin": _thin,
    "large": _large,
}
REFUSED: dict[str, Callable[[Recipe], st.SearchStrategy[tuple[int, ...]]]] = {
    "unaligned": _unaligned,
    "thin": _thin_unaligned,
}


def _linear(sizes: tuple[int, ...]) -> Linear:
    return Linear("linear", *sizes)


def linears(recipe: Recipe, *kinds: str) -> st.SearchStrategy[Linear]:
    """Linears that a recipe can run, of some of the kinds of RUNNABLE (default: any)."""
    return st.one_of([RUNNABLE[kind](recipe) for kind in kinds or RUNNABLE]).map(_linear)


def refused_linears(recipe: Recipe) -> st.SearchStrategy[Linear]:
    """Linears that a recipe refuses: `Recipe.misaligned` says why."""
    return st.one_of([kind(recipe) for kind in REFUSED.values()]).map(_linear)


def matrix_shapes(rows: int = 1, columns: int = 1, most: int = 160) -> st.SearchStrategy[tuple[int, int]]:
    """Shapes of matrices whose sides are multiples of two numbers, and mostly no multiples of a block."""
    return st.tuples(_multiples(rows, max(most // rows, 1)), _multiples(columns, max(most // columns, 1)))


# ------------------------------------------------------------------------------------------------------------ values


def inputs(*names: str, smallest: int = -12, largest: int = 12) -> st.SearchStrategy[Input]:
    """A distribution among some (default: all) and a size with any mantissa, 2^smallest to 2^largest."""
    sizes = st.floats(smallest, largest, allow_nan=False).map(lambda exponent: 2.0**exponent)
    return st.builds(Input, st.sampled_from(names or tuple(DISTRIBUTIONS)), sizes)


class Values(NamedTuple):
    """What a tensor is filled with: one of correctness.tensors.FINITE, and a seed. Printed short when a test fails."""

    kind: str
    seed: int

    def tensor(self, shape: tuple[int, int]) -> Tensor:
        """A tensor in bfloat16."""
        return tensor(self.kind, shape, self.seed)


# Whose squares and products stay far from the limits of float32.
MODERATE = ("normal", "outlier", "constant", "regions", "eighths", "zeros")


def values(*kinds: str) -> st.SearchStrategy[Values]:
    """Values of some of the kinds of correctness.tensors.FINITE (default: all)."""
    return st.builds(Values, st.sampled_from(kinds or tuple(FINITE)), seeds)


# ----------------------------------------------------------------------------------------------------------- configs


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Small layers of every kind: heads, groups, head_dim, gating, norms, biases, masks; any recipe can run them."""
    head_dim = draw(st.sampled_from([32, 64]))
    groups, per_group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    # Sizes are multiples of 32, MXFP8's block; 2 sequences of 32 or 64 tokens, or one.
    return ModelConfig(
        "drawn",
        hidden_size=draw(st.sampled_from([64, 96, 128])),
        num_attention_heads=groups * per_group,
        num_key_value_heads=groups,
        head_dim=head_dim,
        intermediate_size=draw(st.sampled_from([96, 128, 224])),
        micro_batch_size=draw(st.sampled_from([1, 2])),
        sequence_length=draw(st.sampled_from([32, 64])),
        normalization=draw(st.sampled_from(NORMALIZATIONS)),
        hidden_act=draw(st.sampled_from(ACTIVATIONS)),
        gated_mlp=draw(st.booleans()),
        bias=draw(st.booleans()),
        rope_theta=draw(st.sampled_from([0.0, 1e4, 5e5])),
        attn_mask_type=draw(st.sampled_from(ATTENTION_MASKS)),
    )
