"""Planted slowdowns are as large as they are asked for, where they are asked for, and said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benches.harness.medians import median
from benches.harness.planting import Plant, parse, planted
from benches.harness.stopwatch import REGIMES, CpuStopwatch, Limits, Stopwatch
from correctness.suite.fake_timeline import MS, TICK, FakeTimeline, Step
from correctness.suite.test_options import PLUGINS
from shapes.program import Program, Segment

ROOT = Path(__file__).parents[2]
NAMES = {"forward": ["layer/tiny/torch/bf16/eager/rested/forward"], "backward": ["layer/.../rested/backward"]}


def sizes(plant: Plant) -> tuple[float, float, float]:
    return plant.share, plant.device_s, plant.host_s


def test_a_plant_is_a_share_device_time_or_host_time() -> None:
    """After the last equals sign, since an expression may have one."""
    assert sizes(parse("te_layer.*forward$=3%")) == (0.03, 0.0, 0.0)
    assert sizes(parse("gemm=+2us")) == pytest.approx((0.0, 2e-6, 0.0))
    assert sizes(parse("(?=gemm)=host+50us")) == pytest.approx((0.0, 0.0, 50e-6))
    assert parse("(?=gemm)=host+50us").pattern.pattern == "(?=gemm)"


@pytest.mark.parametrize("text", ["", "3%", "=3%", "x=", "x=3", "x=-3%", "x=2us", "x=host2us", "x=nan%", "(=3%"])
def test_anything_else_is_one_line(text: str) -> None:
    """That names the option and, unless the expression is at fault, the form."""
    with pytest.raises(ValueError, match=r"^--plant .*(must be REGEX=3%|no regular expression)[^\n]*$"):
        parse(text)


def medians(timeline: FakeTimeline, program: Program) -> dict[str, float]:
    """Device time of each segment."""
    names = tuple(segment.name for segment in program.segments)
    times = Stopwatch(program, timeline).time(REGIMES["rested"], [names], Limits(max_time_s=0.2))
    return {name: median(times.device_s[name]) for name in names}


class TestOnADevice:
    """A simulated one: forward takes 100 ticks, backward 300."""

    def program(self, timeline: FakeTimeline) -> Program:
        return Step(timeline, {"forward": (TICK, 100 * TICK), "backward": (TICK, 300 * TICK)}).program()

    def test_a_share_is_of_the_segment_s_own_time(self) -> None:
        """And of no other's."""
        timeline = FakeTimeline()
        slow = planted(self.program(timeline), [parse("backward=10%")], NAMES, timeline)
        assert medians(timeline, slow) == pytest.approx({"forward": 100 * TICK, "backward": 330 * TICK}, rel=0.005)

    def test_microseconds_are_added_to_each_segment_that_matches(self) -> None:
        """Plants add up."""
        timeline = FakeTimeline()
        slow = planted(self.program(timeline), [parse("layer=+10us"), parse("forward=+20us")], NAMES, timeline)
        expected = {"forward": 100 * TICK + 30e-6, "backward": 300 * TICK + 10e-6}
        assert medians(timeline, slow) == pytest.approx(expected, abs=2 * TICK)

    def test_what_a_spin_costs_by_itself_is_a_part_of_it(self) -> None:
        """A tenth is a tenth, although launching the kernel that spins takes 5 ticks more; 2 ticks cannot be had."""
        timeline = FakeTimeline(spin_s=5 * TICK)
        plants = [parse("backward=10%"), parse("forward=2%")]
        slow = planted(self.program(timeline), plants, NAMES, timeline)
        assert medians(timeline, slow) == pytest.approx({"forward": 105 * TICK, "backward": 330 * TICK}, abs=TICK)

    def test_what_does_not_match_stays_as_it_is(self) -> None:
        """The same program, not a copy of it."""
        timeline = FakeTimeline()
        program = self.program(timeline)
        assert planted(program, [parse("te_layer=50%")], NAMES, timeline) is program


def test_host_time_is_the_host_s() -> None:
    """On a CPU it is in the time of the case, 5 ms here of next to nothing, or more where the core is shared."""
    program = Program((Segment("forward", lambda: None),))
    slow = planted(program, [parse("forward=host+5000us")], NAMES, None)
    times = CpuStopwatch(slow).time(REGIMES["sustained"], [("forward",)], Limits(max_time_s=0.3))
    assert 0.005 <= min(times.device_s["forward"]) < 0.006
    assert MS < 0.005


@pytest.mark.parametrize("size", ["+1000001us", "host+9999999us", "1001%"])
def test_what_would_never_end_is_refused(size: str) -> None:
    """A second in each round is long enough to be seen."""
    with pytest.raises(ValueError, match="is the most"):
        parse(f"x={size}")


def test_a_run_with_a_plant_says_so(tmp_path: Path) -> None:
    """In the header, at the end and in the file; and a plant that matches nothing is refused."""
    command = [sys.executable, "-m", "pytest", "benches", *PLUGINS, "--device=cpu", "--model=tiny"]
    command += ["--stage=torch_sdpa", "--recipe=bf16", "--benchmark-max-time=0.02", "--benchmark-quiet"]
    file = tmp_path / "out.json"
    options = [f"--benchmark-json={file}", "--plant=sustained/forward$=+200000us"]
    done = subprocess.run([*command, *options], cwd=ROOT, env=dict(os.environ), text=True, capture_output=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PLANTED") == 2
    results = json.loads(file.read_text())
    assert results["suite"]["planted"] == ["sustained/forward$=+200000us"]
    times = {one["extra_info"]["case"].split("/", 2)[2]: one["stats"]["median"] for one in results["benchmarks"]}
    assert times["torch_sdpa/bf16/eager/sustained/forward"] > 0.2
    assert times["torch_sdpa/bf16/eager/sustained/backward"] < 0.2
    missed = subprocess.run([*command, "--plant=no_such_case=3%"], cwd=ROOT, text=True, capture_output=True)
    assert missed.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--plant 'no_such_case=3%' matches no selected case" in missed.stderr + missed.stdout
    unrun = subprocess.run(
        [*command, "--stage=te_layer", "--plant=te_layer=3%"], cwd=ROOT, text=True, capture_output=True
    )
    assert unrun.returncode == pytest.ExitCode.USAGE_ERROR, "a CPU runs no te_layer"
