"""Which device this is: found without importing torch, described with it."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benches.harness.gpu_state import LIMITS, Query, ask, one_line, open_gpu, together

DEVICES = ("cuda", "cpu")
PACKAGES = ("torch", "transformer_engine", "pytest-benchmark", "numpy")
ROOT = Path(__file__).parents[2]
MAPS = Path("/proc/self/maps")  # the files that this process has in memory


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


def gpu_model() -> dict[str, str] | None:
    """Name and compute capability of the GPU, from the CUDA driver: nothing heavy is imported. None without one."""
    if not gpu_count():
        return None
    driver, name = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    # 75 and 76: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR (CUDA driver API, CUdevice_attribute).
    failed = driver.cuDeviceGetName(name, len(name), 0)
    failed |= driver.cuDeviceGetAttribute(ctypes.byref(major), 75, 0)
    failed |= driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0)
    if failed:
        return None
    return {"name": name.value.decode(), "compute_capability": f"{major.value}.{minor.value}"}


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


def copies(library: str) -> list[str]:
    """Paths of a shared library's copies in this process, of whatever version; raises OSError where none can tell."""
    found = re.findall(rf"^(?:\S+ +){{5}}(/.*/{library}\.so[.\d]*)$", MAPS.read_text(errors="replace"), re.MULTILINE)
    return sorted(set(found))


def _cuda_runtime(library: ctypes.CDLL) -> str:
    """13.0 of 13000 (CUDA Runtime API, cudaRuntimeGetVersion: 1000 major + 10 minor). No GPU is needed."""
    number = ctypes.c_int()
    if code := library.cudaRuntimeGetVersion(ctypes.byref(number)):
        raise OSError(f"cudaRuntimeGetVersion returned {code}")
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _of_function(name: str) -> Callable[[ctypes.CDLL], str]:
    """Of cuBLASLt 13 and cuDNN 9, whose functions return 10000 major + 100 minor + patch: 13.1.0 of 130100."""

    def version(library: ctypes.CDLL) -> str:
        function = getattr(library, name)
        function.restype = ctypes.c_size_t
        number = function()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    return version


_LIBRARIES = {
    "cuda_runtime": ("libcudart", _cuda_runtime),
    "cublas": ("libcublasLt", _of_function("cublasLtGetVersion")),
    "cudnn": ("libcudnn", _of_function("cudnnGetVersion")),
}


def _loaded_version(library: str, version: Callable[[ctypes.CDLL], str]) -> str | None:
    """What a CUDA library in this process says of itself; several, where copies of several versions are loaded."""
    try:
        return " and ".join(sorted({version(ctypes.CDLL(path)) for path in copies(library)})) or None
    except (OSError, AttributeError):
        return None


def loaded_versions() -> dict[str, str]:
    """Versions of packages, and of CUDA's libraries as loaded in this process. Imports torch.

    `cuda` is what torch was built for, `cuda_runtime` the runtime that is loaded. What is not loaded is left out.
    """
    import torch

    versions: dict[str, str | None] = {
        **declared_versions(),
        "cuda": torch.version.cuda,
        **{name: _loaded_version(*how) for name, how in _LIBRARIES.items()},
    }
    return {name: str(version) for name, version in versions.items() if version}


_NVML_FACTS: dict[str, Query] = {
    "driver": lambda nvml, gpu: nvml.nvmlSystemGetDriverVersion(),
    "power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    **LIMITS,
    "ecc": lambda nvml, gpu: bool(nvml.nvmlDeviceGetEccMode(gpu)[0]),  # as it is; [1] is after the next reboot
    "mig": lambda nvml, gpu: bool(nvml.nvmlDeviceGetMigMode(gpu)[0]),
    "persistence": lambda nvml, gpu: bool(nvml.nvmlDeviceGetPersistenceMode(gpu)),
}


def _nvml_facts(uuid: str) -> dict[str, Any]:
    """What NVML tells of a GPU; None where it does not, with the reason under `nvml`."""
    facts = dict.fromkeys(_NVML_FACTS)
    try:
        nvml, gpu = open_gpu(uuid)
    except Exception as error:  # NVML is missing, or a container forbids it; nothing depends on it
        return {**facts, "nvml": one_line(error)}
    answers, failures = ask(_NVML_FACTS, nvml, gpu)
    return {**facts, **answers, **({"nvml": together(failures)} if failures else {})}


def gpu_facts() -> dict[str, Any] | None:
    """The current GPU: name, uuid, compute capability, SMs, memory; by NVML driver, limits and modes. None without one.

    Modes (`ecc`, `mig`, `persistence`) are on (True) or off. What NVML does not tell is None.
    """
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
        **_nvml_facts(uuid),
    }


def machine_info(device: str) -> dict[str, Any]:
    """The GPU, versions, and variables that matter, for a results file.

    TE comes before anything else that loads cuDNN: in an environment with two of them, both must use TE's.
    """
    if device == "cuda":
        from shapes.backends.te import unsupported_reason

        unsupported_reason("bf16")
    return {
        "gpu": gpu_facts() if device == "cuda" else None,
        "versions": loaded_versions(),
        "environment": relevant_environment(),
    }


def source_digest(root: Path = ROOT) -> str:
    """First 16 hex digits of a SHA-256 over the sources that measure: shapes/, benches/ and the root conftest.py.

    Neither line endings nor where the sources lie make a difference, nor do files other than Python's.
    """
    paths = [
        root / "conftest.py",
        *(path for folder in ("shapes", "benches") for path in (root / folder).rglob("*.py")),
    ]
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        digest.update(f"{name}\0{path.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()[:16]


_EFFECTIVE = re.compile(
    r"(NVTE_|CUBLAS|CUDA_|CUDNN|TORCH_|PYTORCH_"
    r"|TORCHDYNAMO_|TORCHINDUCTOR_"  # TE compiles its fused element-wise functions with torch.compile
    r"|(OMP|MKL)_NUM_THREADS$)"  # times on the CPU
)
# What an image holds, what something is built for, and which of a host's GPUs this is: its uuid says it better.
_WITHOUT_EFFECT = re.compile(r".*(VERSION|_ARCH_LIST|_ARCHS|_BUILD(_\w+)?|VISIBLE_DEVICES)$")


def _is_private(value: str) -> bool:
    """Whether a value holds a path, the host's name or the user's: results files are published."""
    names = {platform.node(), platform.node().split(".")[0], os.environ.get("USER"), os.environ.get("LOGNAME")}
    named = "|".join(re.escape(name) for name in names if name)
    return bool(re.search(rf"[/\\~]|(?<!\w)({named or '(?!)'})(?!\w)", value))


def relevant_environment() -> dict[str, str]:
    """Environment variables that change what runs or how fast, except where the value is somebody's own.

    Not NCCL's, since nothing communicates, nor NVIDIA_TF32_OVERRIDE, since no product of FP32 matrices is timed.
    """
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if _EFFECTIVE.match(name) and not _WITHOUT_EFFECT.match(name) and not _is_private(value)
    }
