"""What a results file says of the machine: as it is in this process, whatever NVML tells, and nothing private."""

from __future__ import annotations

import ctypes
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benches.harness import device as devices
from benches.harness.plugin import pytest_benchmark_update_machine_info
from benches.harness.stash import RESULTS, new_results
from correctness.suite.fake_nvml import UUID, FakeNvml, NVMLError

BY_NVML = {
    "driver": "580.159.04",
    "power_limit_w": 700.0,
    "max_sm_clock_mhz": 1980,
    "max_memory_clock_mhz": 3202,
    "ecc": True,
    "mig": False,
    "persistence": True,
}


class TestGpu:
    """gpu_facts"""

    @pytest.fixture
    def nvml(self, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
        """A GPU for torch, and the pynvml that knows it."""
        properties = SimpleNamespace(
            name="NVIDIA H200", uuid=UUID, major=9, minor=0, multi_processor_count=132, total_memory=150109880320
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: [properties][index])
        fake = FakeNvml()
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    def facts(self) -> dict[str, Any]:
        """Those by NVML, after a look at the others."""
        facts = devices.gpu_facts()
        assert facts is not None
        assert (facts.pop("name"), facts.pop("uuid"), facts.pop("compute_capability")) == ("NVIDIA H200", UUID, "9.0")
        assert (facts.pop("multiprocessors"), facts.pop("memory_bytes")) == (132, 150109880320)
        return facts

    @pytest.mark.usefixtures("nvml")
    def test_all_facts_are_there_where_nvml_answers(self) -> None:
        """Modes as they are now, not as they will be after a reboot."""
        assert self.facts() == BY_NVML

    @pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
    def test_without_nvml_its_facts_are_none_and_the_reason_is_said(self, nvml: FakeNvml, refused: str) -> None:
        """The facts that torch gives stay."""
        nvml.refused, nvml.error = {refused}, NVMLError("Driver Not Loaded")
        assert self.facts() == {**dict.fromkeys(BY_NVML), "nvml": "NVMLError: Driver Not Loaded"}

    @pytest.mark.usefixtures("nvml")
    def test_without_nvidia_ml_py_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is an extra of the installation."""
        monkeypatch.setitem(sys.modules, "pynvml", None)
        facts = self.facts()
        assert facts.pop("nvml").startswith("ModuleNotFoundError: import of pynvml")
        assert facts == dict.fromkeys(BY_NVML)

    @pytest.mark.parametrize(
        ("function", "fields"),
        [
            ("nvmlSystemGetDriverVersion", ["driver"]),
            ("nvmlDeviceGetEnforcedPowerLimit", ["power_limit_w"]),
            ("nvmlDeviceGetMaxClockInfo", ["max_sm_clock_mhz", "max_memory_clock_mhz"]),
            ("nvmlDeviceGetEccMode", ["ecc"]),
            ("nvmlDeviceGetMigMode", ["mig"]),
            ("nvmlDeviceGetPersistenceMode", ["persistence"]),
        ],
    )
    def test_a_query_that_nvml_forbids_takes_no_other_with_it(
        self, nvml: FakeNvml, function: str, fields: list[str]
    ) -> None:
        """Its fields are None, and the reason names them."""
        nvml.refused, nvml.error = {function}, NVMLError("Insufficient Permissions")
        reason = f"{', '.join(fields)}: NVMLError: Insufficient Permissions"
        assert self.facts() == {**BY_NVML, **dict.fromkeys(fields), "nvml": reason}

    def test_a_reason_of_several_queries_is_said_once(self, nvml: FakeNvml) -> None:
        """With the fields that it concerns."""
        nvml.refused = {"nvmlDeviceGetEccMode", "nvmlDeviceGetMigMode"}
        assert self.facts()["nvml"] == "ecc, mig: NVMLError: Not Supported"

    def test_without_a_gpu_there_are_no_facts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As on the CPU."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert devices.gpu_facts() is None


def test_te_is_loaded_before_anything_else_that_loads_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an environment has two copies, TE could not be imported after the other, and its version would be wrong."""
    from shapes.backends import te

    asked: list[str] = []
    monkeypatch.setattr(te, "unsupported_reason", lambda _: asked.append("TE"))
    monkeypatch.setattr(devices, "gpu_facts", lambda: asked.append("GPU"))
    monkeypatch.setattr(devices, "loaded_versions", lambda: asked.append("versions"))
    devices.machine_info("cuda")
    assert asked == ["TE", "GPU", "versions"]


def test_pytest_benchmark_asks_for_the_machine_before_te_is_loaded() -> None:
    """At its start, for --benchmark-compare: then there is nothing to say of the GPU and of versions yet."""
    config = SimpleNamespace(stash={RESULTS: new_results()})
    machine_info: dict[str, Any] = {}
    pytest_benchmark_update_machine_info(cast(pytest.Config, config), machine_info)
    assert machine_info == {"node": "", "release": ""}


def numbered(number: int) -> Callable[[], int]:
    """A function that returns a version, as cuBLAS's and cuDNN's do."""
    return lambda: number


def stored(number: int, code: int = 0) -> Callable[[Any], int]:
    """A function that writes a version to where it is told and returns an error code, as the runtime's does."""

    def write(address: Any) -> int:
        ctypes.cast(address, ctypes.POINTER(ctypes.c_int))[0] = number
        return code

    return write


class TestLibraries:
    """loaded_versions"""

    @pytest.fixture
    def load(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, Any]], dict[str, str]]:
        """load(libraries by path): the versions of those that torch and packages do not give."""

        def versions(libraries: dict[str, Any]) -> dict[str, str]:
            line = "7f3eb5c00000-7f3eb5cbf000 r-xp 00000000 fe:00 2482191                    "
            mapped = ["7ffd1c5f2000-7ffd1c613000 rw-p 00000000 00:00 0                          [stack]"]
            mapped += [line + path for path in libraries for _ in range(3)]  # one line per section
            (tmp_path / "maps").write_text("\n".join(mapped) + "\n")
            monkeypatch.setattr(devices, "MAPS", tmp_path / "maps")
            monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(**libraries[path]))
            found = devices.loaded_versions()
            return {name: found[name] for name in ("cuda_runtime", "cublas", "cudnn") if name in found}

        return versions

    def test_numbers_are_read_as_each_library_means_them(self, load: Callable[..., dict[str, str]]) -> None:
        """Three libraries, two schemes; what only begins like one of them is not one."""
        libraries = {
            "/cuda/lib/libcudart.so.13": {"cudaRuntimeGetVersion": stored(13000)},
            "/a b/lib/libcublasLt.so.13": {"cublasLtGetVersion": numbered(130100)},
            "/cuda/lib/libcublasLt.so.13.py": {},
            "/cuda/lib/libcudnn.so.9.14.0": {"cudnnGetVersion": numbered(91400)},
            "/cuda/lib/libcudnn_graph.so.9": {},
        }
        assert load(libraries) == {"cuda_runtime": "13.0", "cublas": "13.1.0", "cudnn": "9.14.0"}

    def test_copies_of_two_versions_are_both_named(self, load: Callable[..., dict[str, str]]) -> None:
        """And copies of one version once."""
        libraries = {
            "/torch/libcudart.so.12": {"cudaRuntimeGetVersion": stored(12090)},
            "/te/libcudart.so.13": {"cudaRuntimeGetVersion": stored(13000)},
            "/torch/libcudnn.so.9": {"cudnnGetVersion": numbered(91400)},
            "/te/libcudnn.so.9": {"cudnnGetVersion": numbered(91400)},
        }
        assert load(libraries) == {"cuda_runtime": "12.9 and 13.0", "cudnn": "9.14.0"}

    def test_a_library_that_does_not_tell_is_left_out(self, load: Callable[..., dict[str, str]]) -> None:
        """An error code is no version, nor is a missing function."""
        libraries = {
            "/cuda/libcudart.so.13": {"cudaRuntimeGetVersion": stored(13000, code=3)},
            "/cuda/libcublasLt.so.13": {},
            "/cuda/libcudnn.so.9": {"cudnnGetVersion": numbered(91400)},
        }
        assert load(libraries) == {"cudnn": "9.14.0"}

    def test_without_a_list_of_what_is_loaded_there_are_packages_only(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Where there is no /proc."""
        monkeypatch.setattr(devices, "MAPS", tmp_path / "none")
        assert devices.loaded_versions().keys() <= {*devices.PACKAGES, "cuda"}

    @pytest.mark.skipif(not devices.MAPS.exists(), reason="needs /proc")
    def test_libraries_of_this_process_are_found(self) -> None:
        """torch is loaded, and one of its libraries lies in its folder."""
        folder = Path(torch.__file__).parent
        assert folder in Path(devices.copies("libtorch_cpu")[0]).parents
        assert devices.copies("libtorch") != devices.copies("libtorch_cpu")


class TestSources:
    """source_digest"""

    @pytest.fixture
    def project(self, tmp_path: Path) -> Path:
        """A copy of what measures, and a baseline."""
        for folder in ("shapes", "benches"):
            ignored = shutil.ignore_patterns("__pycache__", "baselines")
            shutil.copytree(devices.ROOT / folder, tmp_path / folder, ignore=ignored)
        shutil.copy(devices.ROOT / "conftest.py", tmp_path)
        (tmp_path / "benches/baselines").mkdir()
        return tmp_path

    def test_it_is_that_of_the_same_sources_elsewhere(self, project: Path) -> None:
        """16 hex digits."""
        digest = devices.source_digest()
        assert devices.source_digest(project) == digest
        assert len(digest) == 16
        assert int(digest, 16) > 0

    @pytest.mark.parametrize("name", ["conftest.py", "shapes/backends/te.py", "benches/harness/stopwatch.py"])
    def test_a_change_of_a_source_changes_it(self, project: Path, name: str) -> None:
        """However small."""
        before = devices.source_digest(project)
        with open(project / name, "a") as file:
            file.write("#\n")
        assert devices.source_digest(project) != before

    def test_a_new_or_renamed_source_changes_it(self, project: Path) -> None:
        """Also where no text changes."""
        digests = [devices.source_digest(project)]
        (project / "benches/bench_new.py").touch()
        digests.append(devices.source_digest(project))
        (project / "benches/bench_new.py").rename(project / "benches/bench_newer.py")
        digests.append(devices.source_digest(project))
        assert len(set(digests)) == 3

    @pytest.mark.parametrize(
        "name", ["benches/baselines/run.json", "benches/report/plot.png", "shapes/__pycache__/a.pyc", "README.md"]
    )
    def test_other_files_do_not_change_it(self, project: Path, name: str) -> None:
        """Baselines, pictures, caches, and what is said about it."""
        before = devices.source_digest(project)
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_bytes(b"\xff")
        (project / "correctness").mkdir()
        (project / "correctness/test_new.py").touch()
        assert devices.source_digest(project) == before

    def test_line_endings_do_not_change_it(self, project: Path) -> None:
        """A checkout on another system has others."""
        before = devices.source_digest(project)
        path = project / "conftest.py"
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
        assert devices.source_digest(project) == before


class TestEnvironment:
    """relevant_environment"""

    @pytest.fixture(autouse=True)
    def _somebodys_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """None of the variables of this one."""
        for name in devices.relevant_environment():
            monkeypatch.delenv(name)
        monkeypatch.setattr(platform, "node", lambda: "gpu-7.example.org")
        monkeypatch.setenv("USER", "max")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("NVTE_FLASH_ATTN", "0"),
            ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
            ("CUBLASLT_LOG_LEVEL", "5"),
            ("CUDA_LAUNCH_BLOCKING", "1"),
            ("CUDNN_LOGINFO_DBG", "1"),
            ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1"),
            ("TORCHDYNAMO_DISABLE", "1"),
            ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128"),
            ("OMP_NUM_THREADS", "4"),
        ],
    )
    def test_what_changes_what_runs_or_how_fast_is_kept(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        """With its value; a word that contains the user's name does not name the user."""
        monkeypatch.setenv(name, value)
        assert devices.relevant_environment() == {name: value}

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("CUDA_VERSION", "13.0.2"),
            ("TORCH_CUDA_ARCH_LIST", "9.0a"),
            ("PYTORCH_BUILD_NUMBER", "0"),
            ("CUDA_VISIBLE_DEVICES", "3"),
            ("NCCL_DEBUG", "INFO"),
            ("NVIDIA_TF32_OVERRIDE", "0"),
            ("OMP_NUM_THREADS_NOTE", "4"),
        ],
    )
    def test_what_changes_neither_is_left_out(self, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
        """It would look like a difference between runs."""
        monkeypatch.setenv(name, value)
        assert devices.relevant_environment() == {}

    @pytest.mark.parametrize(
        "value",
        ["/usr/lib", "logs/a.txt", "~", "a:/b", "C:\\cuda", "gpu-7.example.org:29500", "run-on-gpu-7", "by max", "max"],
    )
    def test_values_that_name_a_path_the_host_or_the_user_are_left_out(
        self, monkeypatch: pytest.MonkeyPatch, value: str
    ) -> None:
        """Whatever the variable."""
        monkeypatch.setenv("NVTE_SOMETHING", value)
        assert devices.relevant_environment() == {}
