"""The GPU's clocks, power, temperature and throttling while something is measured, asked through NVML."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from benches.harness.medians import median

INTERVAL_S = 0.05  # NVML has new values every 50 to 100 ms (H200, driver 580)

# Why clocks are lower than they could be: bits of nvmlDeviceGetCurrentClocksEventReasons, as nvml.h has them
# (NVML API Reference, group NvmlClocksEventReasons).
REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
    "display_clock": 0x100,
}
DISTURBANCES = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake")
FULL_CLOCK = 0.99  # of the maximum: an H200 that nothing holds back runs at 1965 to 1980 of 1980 MHz

Query = Callable[[Any, Any], Any]  # of pynvml and the GPU's handle

# Power is an average over the last second on GPUs since Ampere, GA100 excepted (NVML API, nvmlDeviceGetPowerUsage).
GAUGES: dict[str, Query] = {
    "sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
}
_SAMPLED = GAUGES | {"reasons": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)}
LIMITS: dict[str, Query] = {  # about 1 ms each
    "max_sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "max_memory_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM),
}


def open_gpu(uuid: str) -> tuple[Any, Any]:
    """pynvml and its handle of a GPU, whose uuid is as torch gives it, without "GPU-".

    Raises ImportError without nvidia-ml-py, pynvml.NVMLError where NVML or the GPU cannot be reached.
    """
    import pynvml

    pynvml.nvmlInit()
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def one_line(error: Exception) -> str:
    """The error's kind and text."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def ask(queries: Mapping[str, Query], nvml: Any, gpu: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """What NVML answers to each query, and of those that it does not answer, why. Raises nothing."""
    answers, failures = {}, {}
    for name, query in queries.items():
        try:
            answers[name] = query(nvml, gpu)
        except Exception as error:  # not supported, forbidden, or not in this pynvml: the other queries still are
            failures[name] = one_line(error)
    return answers, failures


def together(failures: Mapping[str, str]) -> str:
    """Why queries failed, in one line: each reason once, with the queries that it concerns."""
    queries: dict[str, list[str]] = {}
    for name, reason in failures.items():
        queries.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in queries.items())


class GpuWatch:
    """Samples of one GPU's state, taken whenever there is time to.

    A glance costs about 60 us each 50 ms, and nothing in between. `absent` says why there are none, if so: then
    nothing is asked any more. `max_sm_clock_mhz` is None where NVML does not say. Queries that NVML refuses in the
    beginning are left out; one that fails later ends the watching. Nothing here raises.
    """

    def __init__(self, uuid: str, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._samples: list[dict[str, Any]] = []
        self._taken_s: float | None = None
        self.absent: str | None = None
        self.max_sm_clock_mhz: int | None = None
        try:
            self._nvml, self._gpu = open_gpu(uuid)
        except Exception as error:  # no nvidia-ml-py, no permission, no such GPU: nothing depends on it
            self.absent = one_line(error)
            return
        answers, failures = ask(_SAMPLED | LIMITS, self._nvml, self._gpu)
        self.max_sm_clock_mhz = answers.get("max_sm_clock_mhz")
        self._queries = {name: query for name, query in _SAMPLED.items() if name in answers}
        if not self._queries:
            self.absent = together(failures)

    def begin(self) -> None:
        """Forget all samples."""
        self._samples, self._taken_s = [], None

    def glance(self) -> None:
        """Take a sample, unless the last one since the beginning is less than INTERVAL_S old."""
        if self.absent:
            return
        now = self._now()
        if self._taken_s is not None and now - self._taken_s < INTERVAL_S:
            return
        answers, failures = ask(self._queries, self._nvml, self._gpu)
        if failures:
            self.absent = together(failures)
            return
        self._samples.append(answers)
        self._taken_s = now

    def report(self) -> dict[str, Any]:
        """What was seen since the beginning, for a results file.

        `samples`; min, median and max of each of GAUGES; `throttle_reasons`, the share of samples with each reason
        that was seen. What NVML does not tell is left out. Without samples only `absent`, the reason.
        """
        if self.absent or not self._samples:
            return {"absent": self.absent or "no sample was taken"}
        report: dict[str, Any] = {"samples": len(self._samples)}
        for name in (name for name in GAUGES if name in self._queries):
            values = [sample[name] for sample in self._samples]
            report[name] = {"min": min(values), "median": median(values), "max": max(values)}
        if "reasons" in self._queries:
            seen = {
                name: sum(bool(sample["reasons"] & bit) for sample in self._samples) for name, bit in REASONS.items()
            }
            report["throttle_reasons"] = {name: count / len(self._samples) for name, count in seen.items() if count}
        return report


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} in {100 * share:.3g} % of samples" for name, share in shares.items())


def throttled(report: Mapping[str, Any], max_sm_clock_mhz: float | None, short: bool) -> str | None:
    """Why times of the rested regime should be taken again after a pause, or None.

    Heat, a power brake and slowdowns by the hardware pass. The software's power cap counts only where steps are
    `short`, less than the power limit's own time scale, and only with a clock below FULL_CLOCK: a long step runs into
    the cap by itself, after each pause again. Without samples, or without a maximum for the clock, nothing is known.
    """
    reasons = report.get("throttle_reasons", {})
    if disturbed := {name: reasons[name] for name in DISTURBANCES if reasons.get(name)}:
        return _shares(disturbed)
    capped, clock = reasons.get("sw_power_cap"), report.get("sm_clock_mhz")
    if not (short and capped and clock and max_sm_clock_mhz) or clock["median"] >= FULL_CLOCK * max_sm_clock_mhz:
        return None
    return f"{_shares({'sw_power_cap': capped})}, at {clock['median']:.0f} instead of {max_sm_clock_mhz:.0f} MHz"
