"""The GPU's state is sampled as often as it is new, said in a few words, and never stands in the way."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benches.harness.gpu_state import GAUGES, INTERVAL_S, REASONS, GpuWatch, throttled
from correctness.suite.fake_nvml import UUID, FakeNvml, NVMLError

MAX_MHZ = 1980


class Clock:
    """A clock that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """The pynvml that is imported."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def clock() -> Clock:
    """The watch's clock."""
    return Clock()


@pytest.fixture
def watch(nvml: FakeNvml, clock: Clock) -> GpuWatch:
    """A watch that has just begun, of the fake GPU."""
    watch = GpuWatch(UUID, clock)
    watch.begin()
    return watch


def look_on(watch: GpuWatch, clock: Clock, nvml: FakeNvml, states: list[dict[str, Any]]) -> dict[str, Any]:
    """The report after a sample in each of these states."""
    for state in states:
        vars(nvml).update(state)
        watch.glance()
        clock.now_s += INTERVAL_S * 1.01
    return watch.report()


class TestSampling:
    """When NVML is asked, and what is made of it."""

    def test_the_first_glance_takes_a_sample_and_the_next_one_when_there_are_new_values(
        self, watch: GpuWatch, clock: Clock
    ) -> None:
        """Glances every 10 ms over a second give a sample every 50 ms."""
        begin = clock.now_s
        counts = []
        for step in range(101):
            clock.now_s = begin + 0.01 * step + 1e-6 * (step % 5 == 0)
            watch.glance()
            counts.append(watch.report()["samples"])
        assert counts[0] == 1
        assert {later - sooner for sooner, later in pairwise(counts)} == {0, 1}
        assert counts[-1] == pytest.approx(1 + 1 / INTERVAL_S, abs=4)
        assert all(counts[step + 4] - counts[step] <= 1 for step in range(97))

    def test_a_beginning_forgets_samples_and_takes_the_next_at_once(
        self, watch: GpuWatch, clock: Clock, nvml: FakeNvml
    ) -> None:
        """What was seen while another case ran is not this one's."""
        look_on(watch, clock, nvml, [{"temperature_c": 90}, {"temperature_c": 91}])
        clock.now_s -= INTERVAL_S
        nvml.temperature_c = 40
        watch.begin()
        assert watch.report() == {"absent": "no sample was taken"}
        watch.glance()
        assert watch.report()["samples"] == 1
        assert watch.report()["temperature_c"] == {"min": 40, "median": 40, "max": 40}

    def test_a_report_has_extremes_medians_and_shares(self, watch: GpuWatch, clock: Clock, nvml: FakeNvml) -> None:
        """Of each gauge in the unit of its name; a reason that was never seen is not listed."""
        states = [
            {"clocks_mhz": {1: 1980, 2: 3201}, "power_mw": 250_500, "temperature_c": 40, "reasons": 0x1},
            {"clocks_mhz": {1: 1500, 2: 3201}, "power_mw": 690_000, "temperature_c": 44, "reasons": 0x4 | 0x40},
            {"clocks_mhz": {1: 1965, 2: 2600}, "power_mw": 300_000, "temperature_c": 41, "reasons": 0x4},
            {"clocks_mhz": {1: 1975, 2: 3201}, "power_mw": 400_000, "temperature_c": 43, "reasons": 0x0},
        ]
        assert look_on(watch, clock, nvml, states) == {
            "samples": 4,
            "sm_clock_mhz": {"min": 1500, "median": 1970, "max": 1980},
            "memory_clock_mhz": {"min": 2600, "median": 3201, "max": 3201},
            "power_w": {"min": 250.5, "median": 350, "max": 690},
            "temperature_c": {"min": 40, "median": 42, "max": 44},
            "throttle_reasons": {"gpu_idle": 0.25, "sw_power_cap": 0.5, "hw_thermal_slowdown": 0.25},
        }

    @given(masks=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=8), clocks=st.lists(st.integers(0, 9999)))
    def test_any_state_gives_a_report_of_finite_numbers(self, masks: list[int], clocks: list[int]) -> None:
        """JSON-able, with shares above 0 and up to 1, also of reasons that NVML may add."""
        nvml, clock = FakeNvml(), Clock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "pynvml", nvml)
            watch = GpuWatch(UUID, clock)
        states: list[dict[str, Any]] = [
            {"reasons": mask, "clocks_mhz": {1: mhz, 2: mhz}} for mask, mhz in zip(masks, clocks, strict=False)
        ]
        report = look_on(watch, clock, nvml, states)
        assert json.loads(json.dumps(report, allow_nan=False)) == report
        if states:
            used = [state["clocks_mhz"][1] for state in states]
            assert report["sm_clock_mhz"] == {"min": min(used), "median": median(used), "max": max(used)}
            assert report["throttle_reasons"] == {
                name: share
                for name, bit in REASONS.items()
                if (share := sum(bool(mask & bit) for mask in masks[: len(states)]) / len(states))
            }

    def test_the_maximum_is_asked_for_once_and_nvml_opened_once(
        self, watch: GpuWatch, clock: Clock, nvml: FakeNvml
    ) -> None:
        """It takes a millisecond."""
        asked = nvml.asked["nvmlDeviceGetMaxClockInfo"]
        look_on(watch, clock, nvml, [{}] * 5)
        assert watch.max_sm_clock_mhz == MAX_MHZ
        assert nvml.asked["nvmlDeviceGetMaxClockInfo"] == asked
        assert nvml.asked["nvmlInit"] == nvml.asked["nvmlDeviceGetHandleByUUID"] == 1


class TestAbsence:
    """Nothing depends on NVML."""

    @pytest.mark.parametrize(
        ("refused", "uuid", "reason"),
        [
            ({"nvmlInit"}, UUID, "NVMLError: Insufficient Permissions"),
            ({"nvmlDeviceGetHandleByUUID"}, UUID, "NVMLError: Insufficient Permissions"),
            (set(), "another", "NVMLError: Not Found"),
            (set(), "", "NVMLError: Not Found"),
        ],
    )
    def test_where_the_gpu_cannot_be_reached_nothing_is_asked_again(
        self, nvml: FakeNvml, refused: set[str], uuid: str, reason: str
    ) -> None:
        """Whatever is called afterwards."""
        nvml.refused, nvml.error = refused, NVMLError("Insufficient\nPermissions")
        watch = GpuWatch(uuid)
        asked = nvml.asked.copy()
        watch.begin()
        watch.glance()
        assert nvml.asked == asked
        assert watch.absent == reason
        assert watch.report() == {"absent": reason}
        assert watch.max_sm_clock_mhz is None

    def test_without_nvidia_ml_py_the_reason_is_that(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As Python words it."""
        monkeypatch.setitem(sys.modules, "pynvml", None)
        watch = GpuWatch(UUID)
        watch.glance()
        assert list(watch.report()) == ["absent"]
        assert watch.report()["absent"].startswith("ModuleNotFoundError: import of pynvml")

    @pytest.mark.parametrize(
        ("function", "missing"),
        [
            ("nvmlDeviceGetPowerUsage", {"power_w"}),
            ("nvmlDeviceGetTemperature", {"temperature_c"}),
            ("nvmlDeviceGetClockInfo", {"sm_clock_mhz", "memory_clock_mhz"}),
            ("nvmlDeviceGetCurrentClocksEventReasons", {"throttle_reasons"}),
        ],
    )
    def test_a_query_that_is_not_supported_is_left_out_and_the_others_stay(
        self, nvml: FakeNvml, clock: Clock, function: str, missing: set[str]
    ) -> None:
        """It is asked once, to find that out."""
        nvml.refused = {function}
        watch = GpuWatch(UUID, clock)
        asked = nvml.asked[function]
        report = look_on(watch, clock, nvml, [{}, {}])
        assert report.keys() == {"samples", *GAUGES, "throttle_reasons"} - missing
        assert (watch.absent, report["samples"], nvml.asked[function]) == (None, 2, asked)

    def test_a_query_that_an_older_nvidia_ml_py_does_not_have_is_left_out(
        self, nvml: FakeNvml, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Versions before 12.535 call the reasons otherwise."""
        monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksEventReasons")
        report = look_on(GpuWatch(UUID, clock), clock, nvml, [{}])
        assert report.keys() == {"samples", *GAUGES}

    def test_where_nothing_can_be_asked_the_reason_is_said_once(self, nvml: FakeNvml) -> None:
        """Not once per query."""
        nvml.refused = {name for name in dir(FakeNvml) if name.startswith("nvmlDeviceGet")} - {
            "nvmlDeviceGetHandleByUUID"
        }
        absent = GpuWatch(UUID).absent
        assert absent is not None
        assert absent.count("NVMLError: Not Supported") == 1
        assert absent.startswith("sm_clock_mhz, ")

    def test_an_error_in_the_middle_ends_the_watching(self, watch: GpuWatch, clock: Clock, nvml: FakeNvml) -> None:
        """For good, also after a new beginning; what was seen before is not the whole of it."""
        assert look_on(watch, clock, nvml, [{}])["samples"] == 1
        nvml.refused, nvml.error = {"nvmlDeviceGetPowerUsage"}, NVMLError("GPU is lost")
        reason = "power_w: NVMLError: GPU is lost"
        assert look_on(watch, clock, nvml, [{}]) == {"absent": reason}
        asked = nvml.asked.copy()
        nvml.refused = set()
        watch.begin()
        assert look_on(watch, clock, nvml, [{}, {}]) == {"absent": reason}
        assert nvml.asked == asked


def report_of(clock_mhz: float | None = 1975, **reasons: float) -> dict[str, Any]:
    """A report with this median clock and these shares of reasons."""
    report: dict[str, Any] = {
        "samples": 20,
        "power_w": {"min": 200.0, "median": 259.6, "max": 300.0},
        "temperature_c": {"min": 41, "median": 42, "max": 42},
        "throttle_reasons": reasons,
    }
    return report | ({"sm_clock_mhz": {"min": 1000, "median": clock_mhz, "max": 1980}} if clock_mhz else {})


class TestThrottled:
    """When times are to be taken again."""

    @pytest.mark.parametrize("short", [True, False])
    @pytest.mark.parametrize("reason", ["hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"])
    def test_heat_and_the_hardwares_slowdowns_count_in_any_sample(self, reason: str, short: bool) -> None:
        """However fast the clock was in the middle."""
        report = report_of(1980, **{reason: 0.05}, sw_power_cap=1.0)
        assert throttled(report, MAX_MHZ, short) == f"{reason} in 5 % of samples"

    @pytest.mark.parametrize(
        ("clock_mhz", "short", "again"),
        [
            (1480, True, True),
            (1959, True, True),
            (1961, True, False),  # less than 1 % below
            (1980, True, False),
            (1480, False, False),  # a pause does not help a long step
            (None, True, False),  # unknown
        ],
    )
    def test_the_power_cap_counts_for_short_steps_with_a_low_clock(
        self, clock_mhz: float | None, short: bool, again: bool
    ) -> None:
        """More than 1 % below the maximum."""
        reason = throttled(report_of(clock_mhz, sw_power_cap=0.3), MAX_MHZ, short)
        expected = f"sw_power_cap in 30 % of samples, at {clock_mhz} instead of 1980 MHz"
        assert reason == (expected if again else None)

    def test_one_percent_below_the_maximum_is_not_more_than_that(self) -> None:
        """1980 of 2000 MHz."""
        assert throttled(report_of(1980, sw_power_cap=1.0), 2000, short=True) is None

    @pytest.mark.parametrize("reason", ["gpu_idle", "applications_clocks", "display_clock", "sync_boost"])
    def test_a_low_clock_for_another_reason_does_not_count(self, reason: str) -> None:
        """A pause would not change it: somebody set it so."""
        assert throttled(report_of(1200, **{reason: 1.0}), MAX_MHZ, short=True) is None

    @pytest.mark.parametrize(
        ("report", "max_mhz"),
        [
            pytest.param({"absent": "no sample was taken"}, MAX_MHZ, id="no samples"),
            pytest.param({"samples": 1, "sm_clock_mhz": {"min": 1, "median": 1, "max": 1}}, MAX_MHZ, id="no reasons"),
            pytest.param(report_of(1200, sw_power_cap=1.0), None, id="no maximum"),
        ],
    )
    def test_what_is_not_known_does_not_count(self, report: dict[str, Any], max_mhz: float | None) -> None:
        """There is nothing that a pause would be for."""
        assert throttled(report, max_mhz, short=True) is None


def test_reasons_are_nvidias_bits() -> None:
    """By the constants of nvidia-ml-py, which need no GPU."""
    pynvml = pytest.importorskip("pynvml")
    names = {"applications_clocks": "ApplicationsClocksSetting", "display_clock": "DisplayClockSetting"}
    names["hw_power_brake"] = "HwPowerBrakeSlowdown"
    theirs = {name: names.get(name, name.title().replace("_", "")) for name in REASONS}
    assert {name: getattr(pynvml, f"nvmlClocksEventReason{suffix}") for name, suffix in theirs.items()} == REASONS


def test_the_stand_in_has_nvidias_names() -> None:
    """Functions and constants, by nvidia-ml-py, which need no GPU."""
    pynvml = pytest.importorskip("pynvml")
    ours = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(ours) > 10
    assert [name for name in ours if not hasattr(pynvml, name)] == []
    constants = {name: getattr(FakeNvml, name) for name in ours if name.startswith("NVML_")}
    assert constants == {name: getattr(pynvml, name) for name in constants}
