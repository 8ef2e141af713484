"""The interval of a median has the confidence it claims, by the binomial distribution and by trying it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benches.harness.medians import interval_ranks, is_precise, median, median_interval

scipy_stats = pytest.importorskip("scipy.stats")

FEWEST = 6  # 2 x (1/2)^6 = 0.031 is the first to be below 0.05
durations = st.lists(st.floats(min_value=1e-7, max_value=1e3), min_size=1, max_size=200)


class TestRanks:
    """interval_ranks"""

    @pytest.mark.parametrize("count", range(FEWEST))
    def test_too_few_samples_have_no_interval(self, count: int) -> None:
        """Not even smallest to largest encloses the median with 95 %."""
        assert interval_ranks(count) is None
        assert median_interval([1.0] * count) is None

    @pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99, 0.999])
    def test_ranks_are_the_narrowest_with_that_confidence(self, confidence: float) -> None:
        """The rank below has too little in its tails, the rank above too much, by scipy's binomial distribution."""
        for count in range(1, 400):
            below = scipy_stats.binom(count, 0.5).cdf  # P(at most r samples lie below the median)
            ranks = interval_ranks(count, confidence)
            if ranks is None:
                assert 2 * below(0) > 1 - confidence
                continue
            low, high = ranks
            assert high == count - 1 - low
            assert 2 * below(low) <= 1 - confidence
            assert low + 1 > (count - 1) // 2 or 2 * below(low + 1) > 1 - confidence

    @pytest.mark.parametrize(("count", "ranks"), [(6, (0, 5)), (9, (1, 7)), (20, (5, 14)), (100, (39, 60))])
    def test_ranks_are_those_of_published_tables(self, count: int, ranks: tuple[int, int]) -> None:
        """For 95 %; counted from zero."""
        assert interval_ranks(count) == ranks

    def test_of_many_samples_they_are_the_narrowest_or_the_next_wider(self) -> None:
        """Kernels of microseconds have thousands of rounds; there an approximation may err on the safe side by one."""
        for count in (*range(501, 2501), 5000, 20000, 100_000):
            exact = int(scipy_stats.binom(count, 0.5).ppf(0.025)) - 1  # the last rank with at most 2.5 % below it
            low, high = interval_ranks(count) or (0, 0)
            assert low in (exact, exact - 1), count
            assert high == count - 1 - low


class TestCoverage:
    """How often the interval contains the true median."""

    TRIALS = 2000

    @pytest.mark.parametrize("count", [6, 11, 40, 101])
    @pytest.mark.parametrize(
        ("draw", "truth"),
        [
            pytest.param(lambda chance: chance.gauss(1.0, 0.01), 1.0, id="normal"),
            pytest.param(lambda chance: chance.lognormvariate(0.0, 1.0), 1.0, id="skewed"),
            pytest.param(lambda chance: 1.0 + chance.expovariate(1.0), 1.0 + math.log(2), id="bounded below"),
            pytest.param(lambda chance: math.tan(math.pi * (chance.random() - 0.5)), 0.0, id="without a mean"),
        ],
    )
    def test_it_contains_the_true_median_at_least_as_often_as_claimed(
        self, count: int, draw: Callable[[random.Random], float], truth: float
    ) -> None:
        """In 95 % of trials, less three standard deviations of a binomial. The seed is fixed: this does not flake."""
        chance = random.Random(count)
        hits = 0
        for _ in range(self.TRIALS):
            interval = median_interval([draw(chance) for _ in range(count)])
            assert interval is not None
            hits += interval[0] <= truth <= interval[1]
        assert hits >= 0.95 * self.TRIALS - 3 * math.sqrt(self.TRIALS * 0.95 * 0.05)

    @given(durations, st.randoms())
    def test_the_interval_encloses_the_samples_median_and_ignores_their_order(
        self, samples: list[float], chance: random.Random
    ) -> None:
        """Both ends are samples."""
        interval = median_interval(samples)
        shuffled = chance.sample(samples, len(samples))
        assert median_interval(shuffled) == interval
        if interval is not None:
            assert interval[0] <= median(samples) <= interval[1]
            assert set(interval) <= set(samples)


class TestPrecision:
    """is_precise"""

    @pytest.mark.parametrize("count", range(FEWEST))
    def test_too_few_samples_are_never_precise(self, count: int) -> None:
        """However equal they are."""
        assert not is_precise([1.0] * count, 0.5)

    @pytest.mark.parametrize(
        ("samples", "expected"),
        [
            pytest.param([1.0] * 6, True, id="equal"),
            pytest.param([0.98, 1.0, 1.0, 1.0, 1.0, 1.02], True, id="within on both sides"),
            pytest.param([0.96, 1.0, 1.0, 1.0, 1.0, 1.0], False, id="beyond below"),
            pytest.param([1.0, 1.0, 1.0, 1.0, 1.0, 1.04], False, id="beyond above"),
            pytest.param([0.5, *[1.0] * 18, 9.0], True, id="outliers beyond the interval do not count"),
        ],
    )
    def test_the_interval_must_lie_within_the_tolerance_on_both_sides(
        self, samples: list[float], expected: bool
    ) -> None:
        """Of 3 %."""
        assert is_precise(samples, 0.03) is expected

    @given(durations)
    def test_the_tolerance_is_relative(self, samples: list[float]) -> None:
        """Microseconds or milliseconds make no difference (1024 keeps floating point exact)."""
        assert is_precise([1024 * sample for sample in samples], 0.01) == is_precise(samples, 0.01)
