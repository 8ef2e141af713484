"""What the strategies draw is what they say."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from correctness import strategies
from correctness.strategies import RUNNABLE, SIZES, alignment, budget, elements
from shapes.cases import support
from shapes.gemms import layer_linears
from shapes.models import ModelConfig
from shapes.recipes import RECIPES, Recipe

QUANTIZED = [recipe for recipe in RECIPES.values() if recipe.quantized]

each_recipe = pytest.mark.parametrize("recipe", QUANTIZED, ids=lambda recipe: recipe.id)


@each_recipe
@pytest.mark.parametrize("kind", RUNNABLE)
@given(data=st.data())
def test_runnable_linears_are_not_refused(recipe: Recipe, kind: str, data: st.DataObject) -> None:
    """Of every kind; and none is much larger than the budget."""
    linear = data.draw(strategies.linears(recipe, kind))
    assert recipe.misaligned(*(getattr(linear, size) for size in SIZES)) is None
    assert elements(linear) <= 4 * budget()


@each_recipe
@given(data=st.data())
def test_aligned_linears_cut_no_block(recipe: Recipe, data: st.DataObject) -> None:
    """Whichever dimension is contracted."""
    linear = data.draw(strategies.linears(recipe, "aligned"))
    blocks = {side for operand in (recipe.activation, recipe.weight) for side in operand.block or () if side}
    assert all(getattr(linear, size) % block == 0 for size in SIZES for block in blocks)


@each_recipe
@given(data=st.data())
def test_barely_aligned_linears_have_no_larger_divisor(recipe: Recipe, data: st.DataObject) -> None:
    """Twice what the recipe needs divides no size."""
    linear = data.draw(strategies.linears(recipe, "barely aligned"))
    needed = alignment(recipe)
    assert all(getattr(linear, size) % (2 * align) for size, align in zip(SIZES, needed, strict=True))


@each_recipe
@given(data=st.data())
def test_thin_linears_have_a_side_as_short_as_can_be(recipe: Recipe, data: st.DataObject) -> None:
    """And another at least four times as many steps long as any other."""
    linear = data.draw(strategies.linears(recipe, "thin"))
    steps = sorted(getattr(linear, size) // align for size, align in zip(SIZES, alignment(recipe), strict=True))
    assert steps[0] == 1
    assert steps[2] >= 4 * steps[1]


@each_recipe
@given(data=st.data())
def test_large_linears_are_near_the_budget(recipe: Recipe, data: st.DataObject) -> None:
    """Within a factor of 4: sizes are rounded to what the recipe needs."""
    assert budget() / 4 < elements(data.draw(strategies.linears(recipe, "large"))) < 4 * budget()


@each_recipe
@given(data=st.data())
def test_refused_linears_are_refused(recipe: Recipe, data: st.DataObject) -> None:
    """In words that name a size."""
    linear = data.draw(strategies.refused_linears(recipe))
    reason = recipe.misaligned(*(getattr(linear, size) for size in SIZES))
    assert reason is not None
    assert any(size in reason for size in SIZES)


@each_recipe
def test_thin_refused_linears_have_one_token_or_a_few(recipe: Recipe) -> None:
    """1 x k is among them, and tokens of 8 or 24, which some recipes refuse in the backward pass only."""
    drawn = set()

    @settings(max_examples=60, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def collect(data: st.DataObject) -> None:
        drawn.add(data.draw(strategies.refused_linears(recipe)).tokens)

    collect()
    assert {1, 8, 24} <= drawn


@given(config=strategies.configs())
def test_every_recipe_runs_a_drawn_config(config: ModelConfig) -> None:
    """On the CPU, where all are emulated."""
    group = layer_linears(config)
    assert [reason for recipe in RECIPES if (reason := support(recipe, group, "cpu", "torch"))] == []


@given(values=strategies.values(), shape=strategies.matrix_shapes(4, 8, 64))
def test_values_are_finite_and_the_same_each_time(values: strategies.Values, shape: tuple[int, int]) -> None:
    """Of the shape asked for, whose sides are multiples of what was asked for; a seed gives one tensor."""
    x = values.tensor(shape)
    assert (x.shape[0] % 4, x.shape[1] % 8) == (0, 0)
    assert x.isfinite().all()
    assert torch.equal(x, values.tensor(shape))


@given(one=strategies.inputs(smallest=-3, largest=3))
def test_inputs_have_a_size_within_what_was_asked_for(one: strategies.Input) -> None:
    """In powers of two."""
    assert -3 <= math.log2(one.size) <= 3


@pytest.mark.parametrize("profile", ["ci", "dev", "nightly"])
def test_profiles_are_registered_and_have_no_deadline(profile: str) -> None:
    """A slow machine is no failure; only `ci` draws the same each time."""
    chosen = settings.get_profile(profile)
    assert chosen.deadline is None
    assert chosen.derandomize == (profile == "ci")


@pytest.mark.parametrize(
    ("options", "environment", "examples", "derandomized"),
    [
        (["--hypothesis-profile=nightly"], {}, 300, False),
        (["--hypothesis-profile=nightly"], {"CI": "true"}, 300, False),
        ([], {"CI": "true"}, 12, True),
        ([], {}, 12, True),
        (["--hypothesis-profile=dev"], {}, 12, False),
    ],
    ids=["option", "option_in_ci", "ci", "default", "dev"],
)
def test_the_profile_of_a_run_is_chosen_on_the_command_line(
    tmp_path: Path, options: list[str], environment: dict[str, str], examples: int, derandomized: bool
) -> None:
    """With correctness/conftest.py, --hypothesis-profile takes their names; without it examples are always the same."""
    shutil.copy(Path(strategies.__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_it.py").write_text(
        "from hypothesis import settings\n"
        "def test_it():\n"
        f"    assert (settings().max_examples, settings().derandomize) == ({examples}, {derandomized})\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_it.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "CI"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
