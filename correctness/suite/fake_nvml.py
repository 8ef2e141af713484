"""A stand-in for nvidia-ml-py's module `pynvml`: one GPU in a state that a test sets."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

UUID = "4bbfeeea-f1a9-baff-b83f-7d6771b82fd0"


class NVMLError(Exception):
    """What NVML raises."""


class FakeNvml(ModuleType):
    """Answers as NVML does, in its units; counts what it is asked, and refuses the functions in `refused`."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, refused: set[str] | None = None) -> None:
        super().__init__("pynvml")
        self.refused = refused or set()
        self.error: Exception = NVMLError("Not Supported")
        self.asked: Counter[str] = Counter()
        self.clocks_mhz = {self.NVML_CLOCK_SM: 1965, self.NVML_CLOCK_MEM: 3201}
        self.power_mw, self.temperature_c, self.reasons = 260_000, 42, 0
        self.ecc, self.mig = [1, 0], [0, 1]  # now, and after the next reboot

    def _ask(self, function: str, gpu: str | None = None) -> None:
        self.asked[function] += 1
        assert gpu in (None, "handle")
        if function in self.refused:
            raise self.error

    def nvmlInit(self) -> None:
        self._ask("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._ask("nvmlDeviceGetHandleByUUID")
        if uuid != f"GPU-{UUID}":
            raise NVMLError("Not Found")
        return "handle"

    def nvmlSystemGetDriverVersion(self) -> str:
        self._ask("nvmlSystemGetDriverVersion")
        return "580.159.04"

    def nvmlDeviceGetClockInfo(self, gpu: str, clock: int) -> int:
        self._ask("nvmlDeviceGetClockInfo", gpu)
        return self.clocks_mhz[clock]

    def nvmlDeviceGetMaxClockInfo(self, gpu: str, clock: int) -> int:
        self._ask("nvmlDeviceGetMaxClockInfo", gpu)
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3202}[clock]

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        self._ask("nvmlDeviceGetPowerUsage", gpu)
        return self.power_mw

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: str) -> int:
        self._ask("nvmlDeviceGetEnforcedPowerLimit", gpu)
        return 700_000

    def nvmlDeviceGetTemperature(self, gpu: str, sensor: int) -> int:
        self._ask("nvmlDeviceGetTemperature", gpu)
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self.temperature_c

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: str) -> int:
        self._ask("nvmlDeviceGetCurrentClocksEventReasons", gpu)
        return self.reasons

    def nvmlDeviceGetEccMode(self, gpu: str) -> list[int]:
        self._ask("nvmlDeviceGetEccMode", gpu)
        return self.ecc

    def nvmlDeviceGetMigMode(self, gpu: str) -> list[int]:
        self._ask("nvmlDeviceGetMigMode", gpu)
        return self.mig

    def nvmlDeviceGetPersistenceMode(self, gpu: str) -> int:
        self._ask("nvmlDeviceGetPersistenceMode", gpu)
        return 1
