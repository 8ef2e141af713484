"""Which device this is: found without importing torch, described with it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
from functools import cache
from typing import Any

DEVICES = ("cuda", "cpu")
PACKAGES = ("torch", "transformer_engine", "pytest-benchmark", "numpy")


@cache
def gpu_count() -> int:
    """GPUs that the CUDA driver offers to this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def why_not_cuda() -> str | None:
    """Why the GPU suite cannot run here, or None if it can. Imports nothing heavy."""
    if not gpu_count():
        return "no GPU"
    if not importlib.util.find_spec("torch"):
        return "no PyTorch"
    if not importlib.util.find_spec("transformer_engine"):
        return "a GPU, but no Transformer Engine (pip install transformer_engine[pytorch])"
    return None


def unusable(device: str) -> str | None:
    """Why nothing can run on the device, or None. Imports torch."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"PyTorch cannot be imported: {error}"
    if device == "cpu":
        return None
    if not gpu_count():
        return "--device cuda: the CUDA driver offers no GPU"
    return None if torch.cuda.is_available() else f"--device cuda: PyTorch {torch.__version__} cannot use the GPU"


def declared_versions() -> dict[str, str]:
    """Versions of installed packages, by their metadata."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _loaded_version(library: str, function: str) -> str | None:
    """What a CUDA library in this process says of itself; several, where several copies are loaded."""
    try:
        with open("/proc/self/maps") as maps:
            paths = sorted(set(re.findall(rf"(/\S*/{library}\.so[.\d]*)$", maps.read(), re.MULTILINE)))
        versions = set()
        for path in paths:
            ask = getattr(ctypes.CDLL(path), function)
            ask.restype = ctypes.c_size_t
            number = ask()
            versions.add(f"{number // 10000}.{number // 100 % 100}.{number % 100}")
    except (OSError, AttributeError):
        return None
    return " and ".join(sorted(versions)) or None


def loaded_versions() -> dict[str, str]:
    """Versions of packages, and of CUDA's libraries as loaded in this process. Imports torch."""
    import torch

    versions: dict[str, str | None] = {
        **declared_versions(),
        "cuda": torch.version.cuda,
        "cublas": _loaded_version("libcublasLt", "cublasLtGetVersion"),
        "cudnn": _loaded_version("libcudnn", "cudnnGetVersion"),
    }
    return {name: str(version) for name, version in versions.items() if version}


def _driver_facts(uuid: str) -> dict[str, Any]:
    """Driver version and power limit by NVML, where it can be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return {
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "power_limit_w": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        }
    except Exception as error:  # NVML is missing, or a container forbids it; nothing depends on it
        return {"driver": None, "power_limit_w": None, "nvml": f"{type(error).__name__}: {error}"}


def gpu_facts() -> dict[str, Any] | None:
    """The current GPU: name, uuid, compute capability, SMs, memory, driver, power limit. None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = str(getattr(properties, "uuid", ""))
    return {
        "name": properties.name,
        "uuid": uuid,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        **_driver_facts(uuid),
    }


def relevant_environment() -> dict[str, str]:
    """Environment variables that change what runs; paths are left out, since they differ on every machine."""
    prefixes = ("NVTE_", "CUBLAS", "CUDA_", "CUDNN", "TORCH_", "PYTORCH_")
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefixes) and not value.startswith(os.sep)
    }
