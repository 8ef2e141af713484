"""The stopwatch reports what the device did, on a simulated device whose true times are known."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from benches.harness import stopwatch
from benches.harness.medians import interval_ranks, median
from benches.harness.stopwatch import (
    HOST_ROUNDS,
    HOST_WORK_S,
    REGIMES,
    WARM_UP_ROUNDS,
    CpuStopwatch,
    Figure,
    HostTooSlowError,
    Limits,
    Regime,
    Stopwatch,
    Times,
)
from correctness.suite.fake_timeline import MS, TICK, FakeTimeline, Step, Throttle, naive_seconds
from shapes.program import Program, Segment

RESTED, SUSTAINED, IN_LAYER = REGIMES["rested"], REGIMES["sustained"], REGIMES["in_layer"]
PLAIN = Regime(busy_s=0.0)  # one round after the other, nothing else
SHORT = Limits(max_time_s=0.2)
FEWEST = next(count for count in range(1, 100) if interval_ranks(count))  # rounds that give an interval at all


def measure(step: Step, regime: Regime = PLAIN, limits: Limits = SHORT) -> Times:
    """Times of all segments of a step, which together make the one figure."""
    return Stopwatch(step.program(), step.timeline).time(regime, [list(step.costs)], limits)


class TestLaunchesHidden:
    """A device that waits for its host is never what is reported."""

    HOST_S, DEVICE_S = 5 * MS, 1 * MS

    @pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES)
    def test_the_device_time_is_exact_though_the_host_needs_five_times_as_long(self, regime: Regime) -> None:
        """Every round of every regime is the device's own time."""
        times = measure(Step(FakeTimeline(), {"step": (self.HOST_S, self.DEVICE_S)}), regime)
        assert set(times.device_s["step"]) == {self.DEVICE_S}

    def test_a_synchronized_loop_would_report_the_host(self) -> None:
        """The same step by a naive loop: host and device time one after the other."""
        step = Step(FakeTimeline(), {"step": (self.HOST_S, self.DEVICE_S)})
        assert set(naive_seconds(step.timeline, step.program(), 10)) == {self.HOST_S + self.DEVICE_S}

    def test_marks_that_cost_host_time_change_nothing(self) -> None:
        """Marks, spins and flushes that take longer to enqueue than the step does are not in its time."""
        step = Step(FakeTimeline(call_s=8 * TICK), {"step": (4 * TICK, 6 * TICK)})
        times = measure(step, Regime(busy_s=MS, cold_cache=True))
        assert set(times.device_s["step"]) == {6 * TICK}
        assert times.rounds >= FEWEST

    def test_a_host_that_only_its_marks_make_slower_than_the_device_gets_a_time(self) -> None:
        """A step of 20 ticks whose launch takes 14, and 26 with its three marks, back to back."""
        times = measure(Step(FakeTimeline(call_s=4 * TICK), {"step": (14 * TICK, 20 * TICK)}), SUSTAINED)
        assert set(times.device_s["step"]) == {20 * TICK}
        assert times.rounds >= FEWEST

    @pytest.mark.parametrize("regime", [SUSTAINED, RESTED], ids=["sustained", "rested"])
    def test_a_full_launch_queue_changes_nothing(self, regime: Regime) -> None:
        """Where the driver lets 1024 launches wait and then blocks the host, times stay exact."""
        step = Step(FakeTimeline(call_s=2 * TICK, queue_depth=1024), {"step": (10 * TICK, 5 * TICK)})
        times = measure(step, regime)
        assert set(times.device_s["step"]) == {5 * TICK}
        assert times.rounds >= FEWEST

    @pytest.mark.parametrize("host_s", [MS / 4, MS], ids=["unbroken stream", "batches"])
    def test_rounds_that_were_not_enqueued_in_time_are_not_counted(self, host_s: float) -> None:
        """Where the host stalls for 100 ms within a round, that round is left out and no other shows a gap."""
        step = Step(
            FakeTimeline(),
            {"first": (host_s, MS), "second": (host_s, MS)},
            extra_host_s=lambda number: 100 * MS if number % 7 == 0 else 0.0,
        )
        watch = Stopwatch(step.program(), step.timeline)
        before = step.rounds
        times = watch.time(Regime(busy_s=8 * MS), [["first", "second"]], Limits(min_rounds=40, max_time_s=0.5))
        assert set(times.device_s["first"]) == set(times.device_s["second"]) == {MS}
        still_queued = int(HOST_WORK_S / (2 * MS))
        assert 40 <= times.rounds < step.rounds - before - still_queued

    def test_a_fast_host_leaves_no_gap_between_rounds(self) -> None:
        """Back to back, from the spin at the beginning to the last round, the device never waits."""
        step = Step(FakeTimeline(), {"step": (MS, 2 * MS)})
        watch = Stopwatch(step.program(), step.timeline)
        log, spins, rounds, start_s = (
            step.timeline.log,
            step.timeline.log.count("spin"),
            step.rounds,
            step.timeline.now(),
        )
        watch.time(SUSTAINED, [["step"]], SHORT)
        assert log.count("spin") == spins + 1
        work_s = (step.rounds - rounds) * 2 * MS
        # A spin for one round of one millisecond is shorter than two rounds; any gap would be an end later than that.
        assert work_s <= step.timeline.end_s - start_s < work_s + 4 * MS

    def test_the_spin_grows_where_the_host_was_slower_than_at_first(self) -> None:
        """A host that needs thrice as long after warm-up is given more time, until its rounds count."""
        measured = WARM_UP_ROUNDS + 2 * HOST_ROUNDS + 1
        step = Step(
            FakeTimeline(), {"step": (MS, MS)}, extra_host_s=lambda number: 2 * MS if number > measured else 0.0
        )
        times = measure(step)
        assert set(times.device_s["step"]) == {MS}
        assert times.rounds >= FEWEST

    @pytest.mark.parametrize("host_s", [MS / 2, 5 * MS], ids=["fast host", "slow host"])
    def test_no_round_is_lost_to_a_host_that_is_a_little_slower_than_at_first(self, host_s: float) -> None:
        """By a quarter. However many rounds are in a batch, the first spin is long enough."""
        measured = WARM_UP_ROUNDS + 2 * HOST_ROUNDS + 1
        step = Step(
            FakeTimeline(), {"step": (host_s, MS)}, extra_host_s=lambda number: (number > measured) * host_s / 4
        )
        times = measure(step, Regime(busy_s=5 * MS, rest_s=MS), Limits(min_rounds=40, max_time_s=1e6))
        assert step.rounds == measured + times.rounds

    def test_the_gpu_is_looked_at_in_an_unbroken_stream_too(self) -> None:
        """While the device is busy and the host ahead."""
        step = Step(FakeTimeline(), {"step": (TICK, MS)})
        watch = Stopwatch(step.program(), step.timeline)
        step.timeline.glances = 0
        watch.time(SUSTAINED, [["step"]], SHORT)
        assert step.timeline.log.count("spin") < step.timeline.glances

    def test_a_step_that_waits_for_the_device_is_refused_in_a_sentence(self) -> None:
        """No round of it is enqueued in time, whatever the spin."""
        timeline = FakeTimeline()
        step = Step(timeline, {"step": (MS, MS)}, before=timeline.synchronize)
        with pytest.raises(HostTooSlowError, match=r"'step'.*must not wait for") as caught:
            Stopwatch(step.program(), timeline)
        assert "\n" not in str(caught.value)

    def test_a_step_that_begins_to_wait_later_is_refused_too(self) -> None:
        """A step that was asynchronous when the stopwatch was made, and no longer is, gets no time."""
        timeline = FakeTimeline()
        waits: list[bool] = []
        step = Step(timeline, {"step": (MS, MS)}, before=lambda: timeline.synchronize() if waits else None)
        watch = Stopwatch(step.program(), timeline)
        waits.append(True)
        with pytest.raises(HostTooSlowError):
            watch.time(PLAIN, [["step"]], SHORT)

    @pytest.mark.parametrize("regime", [PLAIN, RESTED], ids=["plain", "rested"])
    def test_a_step_that_begins_to_wait_after_some_rounds_is_given_up(self, regime: Regime) -> None:
        """The rounds before that are reported, fewer than asked for and not precise; it does not go on for ever."""
        timeline = FakeTimeline(noise=0.01)
        step = Step(timeline, {"step": (TICK, MS)})
        watch = Stopwatch(step.program(), timeline)
        begin = timeline.now() + regime.settle_s + 3 * (regime.rest_s + MS)
        step.before = lambda: timeline.synchronize() if timeline.now() > begin else None
        figure = watch.time(regime, [["step"]], Limits(min_rounds=1000, max_time_s=0.2)).figure(["step"])
        assert 0 < len(figure.samples_s) < 1000
        assert not figure.precise
        assert timeline.now() < begin + 3 * 0.2


class TestSegments:
    """Times of the pieces of a round."""

    COSTS: ClassVar = {"qkv": (TICK, 400 * TICK), "attention": (900 * TICK, 110 * TICK), "mlp": (2 * TICK, 970 * TICK)}

    def test_segments_sum_to_the_whole(self) -> None:
        """Each has its own time, and a figure of several is their sum, round by round."""
        times = measure(Step(FakeTimeline(), self.COSTS), IN_LAYER)
        assert {name: set(samples) for name, samples in times.device_s.items()} == {
            name: {device_s} for name, (_, device_s) in self.COSTS.items()
        }
        assert set(times.figure(list(self.COSTS)).samples_s) == {1480 * TICK}
        assert set(times.figure(["qkv", "mlp"]).samples_s) == {1370 * TICK}

    def test_the_sum_is_taken_round_by_round(self) -> None:
        """Noisy segments are added within their round, not median to median."""
        times = measure(Step(FakeTimeline(noise=0.05), self.COSTS))
        parts = zip(times.device_s["qkv"], times.device_s["mlp"], strict=True)
        assert times.figure(["qkv", "mlp"]).samples_s == [qkv + mlp for qkv, mlp in parts]

    def test_host_times_are_per_segment_and_apart(self) -> None:
        """What launching a segment takes is another figure, and the median of equal costs is that cost."""
        times = measure(Step(FakeTimeline(), self.COSTS))
        assert times.host_s == {name: [host_s] * HOST_ROUNDS for name, (host_s, _) in self.COSTS.items()}
        assert set(times.figure(["qkv", "attention"]).host_s) == {901 * TICK}

    @pytest.mark.parametrize(("host_s", "expected"), [(2 * MS, True), (MS / 2, False)])
    def test_launch_bound_is_a_step_whose_host_time_exceeds_its_device_time(
        self, host_s: float, expected: bool
    ) -> None:
        """Of a step of one millisecond."""
        assert measure(Step(FakeTimeline(), {"step": (host_s, MS)})).figure(["step"]).launch_bound is expected

    def test_launch_bound_is_a_step_that_mostly_is(self) -> None:
        """By the medians: one fast launch of three is not enough."""
        assert Figure([1.0] * 9, [0.5, 2.0, 2.0], precise=True).launch_bound
        assert not Figure([1.0] * 9, [0.5, 0.5, 2.0], precise=True).launch_bound

    def test_launch_bound_is_said_of_a_figure_and_not_of_the_program(self) -> None:
        """One segment may be launch-bound and another of the same round not."""
        times = measure(Step(FakeTimeline(), self.COSTS))
        assert [times.figure([name]).launch_bound for name in self.COSTS] == [False, True, False]

    def test_reset_runs_once_before_each_round_and_outside_its_time(self) -> None:
        """Its device work is in no segment, and nothing but marks and a flush lies between it and the first segment."""
        step = Step(FakeTimeline(flush_s=MS), {"a": (TICK, MS), "b": (TICK, MS)}, reset_cost=(3 * TICK, 5 * MS))
        times = measure(step, RESTED)
        assert set(times.device_s["a"]) == set(times.device_s["b"]) == {MS}
        order = [event for event in step.timeline.log if event in ("reset", "a", "b")]
        assert order == ["reset", "a", "b"] * step.rounds


class TestRegimes:
    """How rounds follow each other."""

    @pytest.mark.parametrize("device_s", [MS / 16, MS / 2, 2 * MS, 12 * MS, 40 * MS])
    def test_rested_does_not_see_the_throttle(self, device_s: float) -> None:
        """Right after a sustained measurement, steps of any length have the time of a rested device in every round."""
        timeline = FakeTimeline(throttle=Throttle(), flush_s=MS / 4)
        step = Step(timeline, {"step": (MS / 8, device_s)})
        watch = Stopwatch(step.program(), timeline)
        watch.time(Regime(busy_s=256 * MS), [["step"]], Limits(max_time_s=0.0))
        samples = watch.time(RESTED, [["step"]], SHORT).device_s["step"]
        assert set(samples) == {device_s}

    def test_sustained_does_see_it(self) -> None:
        """Back to back the throttled time is reported, with nothing left of the time before it settled."""
        throttle = Throttle()
        times = measure(Step(FakeTimeline(throttle=throttle), {"step": (MS / 8, 2 * MS)}), SUSTAINED)
        assert times.figure(["step"]).samples_s[0] == 2 * MS * throttle.slowdown
        assert median(times.device_s["step"]) == 2 * MS * throttle.slowdown

    def test_rounds_are_not_counted_before_the_device_settled(self) -> None:
        """A device that is fast for its first 300 ms is not reported as fast."""
        timeline = FakeTimeline()
        step = Step(timeline, {"step": (MS / 8, 2 * MS)})
        watch = Stopwatch(step.program(), timeline)
        slow_from = timeline.now() + 0.3
        step.before = lambda: step.costs.update(step=(MS / 8, 3 * MS)) if timeline.end_s > slow_from else None
        assert set(watch.time(SUSTAINED, [["step"]], SHORT).device_s["step"]) == {3 * MS}

    def test_a_device_that_just_woke_up_is_not_measured(self) -> None:
        """Rounds of the first 0.4 s after the warm-up, in which the device is slower, are not in the times."""
        step = Step(FakeTimeline(waking_s=400 * MS), {"work": (0.0, 2 * MS)})
        times = Stopwatch(step.program(), step.timeline).time(REGIMES["rested"], [("work",)], Limits())
        assert set(times.device_s["work"]) == {2 * MS}

    def test_a_device_that_has_only_just_been_measured_is_awake(self) -> None:
        """The next measurement with gaps counts from its first round on; after a second of nothing it does not.

        Nor if its rounds are long: the pauses of the warm-up are too short for them.
        """
        timeline = FakeTimeline()
        short, long = (
            Stopwatch(Step(timeline, {"work": (0.0, time_s)}).program(), timeline) for time_s in (MS, 5 * MS)
        )

        def uncounted(watch: Stopwatch) -> int:
            before = timeline.log.count("rest")
            counted = watch.time(RESTED, [("work",)], Limits()).rounds
            return timeline.log.count("rest") - before - counted

        assert uncounted(short) > 0
        assert uncounted(short) == 0
        assert uncounted(long) > 0
        assert uncounted(short) == 0
        timeline.host_s += 1.0
        assert uncounted(short) > 0
        again = Stopwatch(Step(timeline, {"work": (0.0, 3 * MS)}).program(), timeline)
        assert uncounted(again) == 0, "making a stopwatch let the device fall asleep"
        timeline.host_s += 1.0
        again = Stopwatch(Step(timeline, {"work": (0.0, MS)}).program(), timeline)
        assert uncounted(again) > 0

    def test_the_device_rests_between_the_rounds_of_the_warm_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For 6 ms, or twice what it did since the last rest, but at most for 16 ms: three rounds, five pairs, one."""
        step = Step(FakeTimeline(), {"step": (0.0, 5 * MS)})
        rested: list[float] = []

        def rest(seconds: float) -> None:
            rested.append(seconds)
            step.timeline.host_s += seconds

        monkeypatch.setattr(step.timeline, "rest", rest)
        Stopwatch(step.program(), step.timeline)
        one, two = [2 * 5 * MS] * 3, [0.016] * 5
        assert rested == pytest.approx([0.006, *one, *two])
        assert step.rounds == 3 + 2 * 5 + 1

    def test_warming_up_is_no_burst_of_work(self) -> None:
        """A device that is slower after 10 ms of work within 20 ms is not when the first round counts."""
        timeline = FakeTimeline(throttle=Throttle(window_s=20 * MS, share=0.5, slowdown=1.01))
        step = Step(timeline, {"work": (TICK, 2 * MS)})
        timeline.awake_s = timeline.now()
        watch = Stopwatch(step.program(), timeline)
        timeline.log.clear()
        times = watch.time(RESTED, [["work"]], Limits())
        assert timeline.log.count("rest") == times.rounds, "the first rounds were not counted"
        assert set(times.device_s["work"]) == {2 * MS}

    def test_every_segment_of_a_rested_round_finds_a_cold_cache(self) -> None:
        """A GEMM is as cold after its quantizations as one that has none, and their times add up without flushes."""
        step = Step(FakeTimeline(cold=1.5, flush_s=MS), {"quantize": (TICK, MS), "gemm": (TICK, 2 * MS)})
        figure = measure(step, RESTED).figure(["quantize", "gemm"])
        assert set(figure.samples_s) == {1.5 * 3 * MS}

    def test_a_cold_cache_is_flushed_before_each_round_and_outside_its_time(self) -> None:
        """Work takes 1.5 times as long cold; rested reports that and sustained does not, and no flush is timed."""
        step = Step(FakeTimeline(cold=1.5, flush_s=MS), {"step": (TICK, 2 * MS)})
        watch = Stopwatch(step.program(), step.timeline)
        log = step.timeline.log
        log.clear()
        assert set(watch.time(RESTED, [["step"]], SHORT).device_s["step"]) == {3 * MS}
        assert log.count("flush") == log.count("step")
        log.clear()
        assert set(watch.time(SUSTAINED, [["step"]], SHORT).device_s["step"]) == {2 * MS}
        assert log.count("flush") == 0

    @pytest.mark.parametrize(
        ("device_s", "rest_s"),
        [
            pytest.param(MS, RESTED.rest_s, id="a fixed rest for a short step"),
            pytest.param(64 * MS, RESTED.rest_ratio * 64 * MS, id="in proportion to a long step"),
        ],
    )
    def test_the_device_rests_before_each_batch(
        self, device_s: float, rest_s: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The device idles for the regime's rest, or for longer where the batch takes long."""
        step = Step(FakeTimeline(), {"step": (TICK, device_s)})
        watch = Stopwatch(step.program(), step.timeline)
        rested: list[float] = []
        monkeypatch.setattr(step.timeline, "rest", rested.append)
        times = watch.time(RESTED, [["step"]], SHORT)
        assert set(rested) == {rest_s}
        assert len(rested) >= times.rounds, "a round was counted without a rest before it"

    @pytest.mark.parametrize(
        ("regime", "host_s", "device_s", "rounds"),
        [
            pytest.param("rested", TICK, MS / 4, 2, id="rested: 0.6 ms of device work"),
            pytest.param("rested", TICK, 10 * MS, 1, id="rested: at least one"),
            pytest.param("rested", 10 * MS, MS / 16, 2, id="rested: 25 ms of host work"),
            pytest.param("sustained", TICK, 2 * MS, 128, id="sustained: 0.25 s of device work"),
            pytest.param("sustained", 10 * MS, MS, 2, id="sustained, launch-bound: 25 ms of host work"),
            pytest.param("sustained", 3 * MS, 4 * MS, 64, id="sustained, not launch-bound: any host work"),
            pytest.param("in_layer", TICK, 1.0, 1, id="in layer: at least one"),
        ],
    )
    def test_a_batch_holds_what_fits(self, regime: str, host_s: float, device_s: float, rounds: int) -> None:
        """As many rounds as fit into the regime's device time and, behind one spin, into the host's time."""
        step = Step(FakeTimeline(), {"step": (host_s, device_s)})
        assert Stopwatch(step.program(), step.timeline).rounds_per_batch(REGIMES[regime]) == rounds

    def test_a_step_without_device_work_makes_no_endless_batch(self) -> None:
        """Its rounds are limited by the host's work."""
        step = Step(FakeTimeline(), {"step": (MS, 0.0)})
        assert Stopwatch(step.program(), step.timeline).rounds_per_batch(SUSTAINED) == int(HOST_WORK_S / MS)


class TestStopping:
    """When a measurement ends, and what is then said of it."""

    def test_a_steady_step_ends_as_soon_as_there_is_an_interval(self) -> None:
        """Equal rounds are precise once there are six, whatever time is left."""
        times = measure(Step(FakeTimeline(), {"step": (TICK, MS)}), limits=Limits(min_rounds=1, max_time_s=1e6))
        assert times.rounds == FEWEST
        assert times.figure(["step"]).precise

    @pytest.mark.parametrize("min_rounds", [5, 8, 50, 333])
    def test_it_does_not_end_before_min_rounds(self, min_rounds: int) -> None:
        """Precise or not; even when time is up, and then not a round more."""
        step = Step(FakeTimeline(), {"step": (TICK, MS)})
        watch = Stopwatch(step.program(), step.timeline)
        early = watch.time(PLAIN, [["step"]], Limits(min_rounds=min_rounds, max_time_s=1e6))
        late = watch.time(PLAIN, [["step"]], Limits(min_rounds=min_rounds, max_time_s=0.0))
        assert (early.rounds, late.rounds) == (max(min_rounds, FEWEST), min_rounds)

    def test_it_ends_with_the_first_look_that_finds_it_precise(self) -> None:
        """Looks are at most an eighth of the rounds apart; the one before the last found it imprecise."""
        step = Step(FakeTimeline(noise=0.01), {"step": (TICK, MS)})
        times = measure(step, limits=Limits(max_time_s=1e6))
        samples = times.device_s["step"]
        look = next(n for n in range(5, len(samples) + 1) if n + 1 + n // 8 >= len(samples))
        assert times.figure(["step"]).precise
        assert not Times(times.limits, {"step": samples[:look]}).figure(["step"]).precise
        # 95 % of a normal median's distribution lie within 1.96 x 1.2533 deviations / sqrt(n); half of it is generous.
        assert times.rounds > (1.96 * 1.2533 * 0.01 / 0.0025) ** 2 / 4

    def test_it_looks_less_often_the_longer_it_takes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each look is a chance to err: no more than steps of an eighth that lead from the first rounds to the last."""
        looks: list[int] = []

        class Counting(Times):
            def suffice(self, figures: Any) -> bool:
                looks.append(self.rounds)
                return super().suffice(figures)

        monkeypatch.setattr(stopwatch, "Times", Counting)
        times = measure(Step(FakeTimeline(noise=0.02), {"step": (TICK, MS)}), limits=Limits(max_time_s=1e6))
        assert times.rounds > 200
        assert len(looks) <= 8 + math.log(times.rounds / 8, 1 + 1 / 8)

    def test_less_confidence_takes_less_time(self) -> None:
        """pytest-benchmark's --benchmark-confidence."""
        rounds = [
            measure(
                Step(FakeTimeline(noise=0.02), {"step": (TICK, MS)}),
                limits=Limits(max_time_s=1e6, confidence=confidence),
            ).rounds
            for confidence in (0.5, 0.95)
        ]
        assert 3 * rounds[0] < rounds[1]

    def test_a_noisy_step_may_need_thousands_of_rounds(self) -> None:
        """As kernels of microseconds do."""
        step = Step(FakeTimeline(noise=0.1), {"step": (TICK, 100 * TICK)})
        times = measure(step, limits=Limits(max_time_s=1e6, precision=0.005))
        assert times.rounds > 1023

    def test_no_time_is_known_better_than_a_launch_takes(self) -> None:
        """0.2 us are enough of a kernel of 10 us, whatever share of it that is."""
        step = Step(FakeTimeline(noise=0.03), {"step": (TICK, 10 * TICK)})
        figure = measure(step, limits=Limits(max_time_s=1e6, precision=0.0)).figure(["step"])
        assert figure.precise
        assert figure.interval_s is not None
        assert 0.02 < (figure.interval_s[1] - figure.interval_s[0]) / (10 * TICK) < 0.042

    def test_a_figure_with_slack_need_not_be_known_as_well(self) -> None:
        """It ends the measurement earlier, and counts as precise where another would not; a long one must be known."""
        names = ("step",)

        def rounds(step_s: float, slack: dict[tuple[str, ...], float]) -> int:
            step = Step(FakeTimeline(noise=0.05), {"step": (TICK, step_s)})
            watch = Stopwatch(step.program(), step.timeline)
            times = watch.time(PLAIN, [names], Limits(max_time_s=1e6, precision=0.005), slack)
            assert times.figure(names).precise
            return times.rounds

        slack: dict[tuple[str, ...], float] = {names: 10.0}
        assert rounds(0.09 * MS, {}) > 10 * rounds(0.09 * MS, slack)
        assert rounds(0.11 * MS, {}) == rounds(0.11 * MS, slack)

    def test_it_ends_when_time_is_up_and_says_so(self) -> None:
        """A noisy step gets the time it was given, one round more or less, and is not called precise."""
        step = Step(FakeTimeline(noise=0.2), {"step": (TICK, MS)})
        watch = Stopwatch(step.program(), step.timeline)
        start = step.timeline.now()
        figure = watch.time(PLAIN, [["step"]], SHORT).figure(["step"])
        spent = step.timeline.now() - start
        assert not figure.precise
        # A round is the step, at most doubled by 5 deviations of noise, and a spin that is no longer than a step.
        assert SHORT.max_time_s <= spent <= SHORT.max_time_s + 3 * MS

    def test_every_figure_must_be_precise(self) -> None:
        """One steady segment does not end the measurement of a noisy one."""
        timeline = FakeTimeline()
        step = Step(timeline, {"steady": (TICK, MS), "noisy": (TICK, MS)})
        steady_only = Stopwatch(step.program(), timeline).time(PLAIN, [["steady"]], SHORT)
        numbers = iter(range(1_000_000))
        step.before = lambda: step.costs.update(noisy=(TICK, MS * (1 + next(numbers) % 5)))
        both = Stopwatch(step.program(), timeline).time(PLAIN, [["steady"], ["noisy"]], SHORT)
        assert steady_only.rounds == FEWEST
        assert both.rounds > 2 * FEWEST
        assert both.figure(["steady"]).precise
        assert not both.figure(["noisy"]).precise

    def test_the_interval_encloses_the_truth_of_a_noisy_device(self) -> None:
        """Of 200 measurements of a step with 1 % noise, nine in ten contain its true time, less three deviations.

        A fixed number of rounds would give 95 %. Each look at the interval is a chance to stop by luck.
        """
        hits = 0
        for seed in range(200):
            figure = measure(
                Step(FakeTimeline(noise=0.01, seed=seed), {"step": (TICK, MS)}), limits=Limits(max_time_s=1.0)
            ).figure(["step"])
            assert figure.interval_s is not None
            hits += figure.interval_s[0] <= MS <= figure.interval_s[1]
        assert hits >= 200 * 0.90 - 3 * math.sqrt(200 * 0.90 * 0.10)


@pytest.fixture
def collector() -> Iterator[None]:
    """Garbage collection is again as it was, whatever the test does."""
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


def fake_watch(before: Any) -> tuple[Stopwatch, list[str]]:
    """A stopwatch on a fake device whose step calls `before`, and the step's segments."""
    step = Step(FakeTimeline(), {"step": (TICK, MS)}, before=before)
    return Stopwatch(step.program(), step.timeline), ["step"]


def cpu_watch(before: Any) -> tuple[CpuStopwatch, list[str]]:
    """A stopwatch on the CPU whose step calls `before`, and the step's segments."""
    return CpuStopwatch(Program([Segment("step", before)])), ["step"]


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("make", [fake_watch, cpu_watch])
class TestGarbageCollection:
    """Collections happen between measurements and not in them."""

    @pytest.mark.parametrize("enabled", [True, False])
    def test_it_is_off_while_measuring_and_as_before_afterwards(self, make: Any, enabled: bool) -> None:
        """Whether it was on or off before."""
        (gc.enable if enabled else gc.disable)()
        seen: list[bool] = []
        watch, names = make(lambda: seen.append(gc.isenabled()))
        seen.clear()
        watch.time(PLAIN, [names], Limits(max_time_s=0.01))
        assert set(seen) == {False}
        assert gc.isenabled() is enabled

    def test_it_is_as_before_after_an_exception(self, make: Any) -> None:
        """A step that fails while it is timed leaves collection on."""
        gc.enable()
        armed: list[bool] = []

        def step() -> None:
            if armed:
                raise ZeroDivisionError

        watch, names = make(step)
        armed.append(True)
        with pytest.raises(ZeroDivisionError):
            watch.time(PLAIN, [names], SHORT)
        assert gc.isenabled()


class TestCpuStopwatch:
    """Rounds that run where they are called, by a real clock."""

    def test_sleeping_takes_as_long_as_it_says(self) -> None:
        """Segments of 2 and 4 ms: never shorter; the fastest round is not twice as long, however loaded the machine."""
        program = Program(
            [Segment("short", lambda: time.sleep(0.002)), Segment("long", lambda: time.sleep(0.004))],
            reset=lambda: time.sleep(0.001),
        )
        figures = [["short"], ["long"], ["short", "long"]]
        times = CpuStopwatch(program).time(SUSTAINED, figures, Limits(max_time_s=0.3))
        for names, seconds in zip(figures, (0.002, 0.004, 0.006), strict=True):
            fastest = min(times.figure(names).samples_s)
            # A sleep is at least what was asked for; clocks may differ in their last microseconds.
            assert seconds * 0.99 <= fastest < 2 * seconds

    def test_it_counts_the_least_rounds_when_a_round_takes_longer_than_there_is_time(self) -> None:
        """min_rounds, each after one reset, beside the rounds of warm-up."""
        calls: list[str] = []
        program = Program([Segment("step", lambda: calls.append("step"))], reset=lambda: calls.append("reset"))
        times = CpuStopwatch(program).time(SUSTAINED, [["step"]], Limits(min_rounds=7, max_time_s=0.0, precision=0.0))
        assert times.rounds == 7
        assert calls == ["reset", "step"] * (WARM_UP_ROUNDS + 7)

    def test_there_are_no_host_times(self) -> None:
        """Nothing is launched on a CPU, so nothing is launch-bound."""
        times = CpuStopwatch(Program([Segment("step", lambda: None)])).time(SUSTAINED, [["step"]], SHORT)
        assert times.figure(["step"]).host_s == []
        assert not times.figure(["step"]).launch_bound
