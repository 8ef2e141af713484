"""Sessions that set themselves up: `nox -s bench`, `nox -s tests`, `nox -s lint`. What follows `--` goes to the tool.

Where there is a GPU, sessions see the packages of the interpreter that nox runs on, since NVIDIA's containers bring
PyTorch and Transformer Engine. With `--no-venv` they use that interpreter itself and install nothing.
"""

from __future__ import annotations

import argparse
import shutil

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests", "lint"]
nox.options.reuse_venv = "yes"

MEASURING = ["pytest>=8.4", "pytest-benchmark>=5.1", "hypothesis>=6.100", "numpy>=1.26"]
REPORTING = ["rich>=13", "matplotlib>=3.8", "nvidia-ml-py>=12"]
JUDGING = ["scipy>=1.11"]
CHECKING = [*JUDGING, "ml_dtypes>=0.5", "jsonschema>=4.18"]  # but for the first only tests use them
LINTING = ["ruff==0.17.6", "mypy==2.4.1"]
TORCH = "torch==2.13.0"
TRANSFORMER_ENGINE = "transformer_engine[pytorch]>=2.9"

HAS_GPU = shutil.which("nvidia-smi") is not None
VENV = ["--system-site-packages"] if HAS_GPU else []


def _finds(session: nox.Session, module: str) -> bool:
    code = f"import importlib.util; print(importlib.util.find_spec({module!r}) is not None)"
    return str(session.run("python", "-c", code, silent=True, log=False)).strip() == "True"


def _set_up(session: nox.Session, *packages: str) -> None:
    """Packages, PyTorch if there is none, and on a GPU Transformer Engine if there is none."""
    if session.venv_backend == "none":
        return
    session.install(*packages)
    if not _finds(session, "torch"):
        session.install(TORCH)
    if HAS_GPU and not _finds(session, "transformer_engine"):
        session.log("Transformer Engine is not installed: its PyTorch extension will be compiled, which takes minutes")
        session.install("--no-build-isolation", TRANSFORMER_ENGINE)


@nox.session(venv_params=VENV)
def bench(session: nox.Session) -> None:
    """Benchmarks: the GPU suite where a GPU and Transformer Engine are, else the CPU suite; keeps the results."""
    _set_up(session, *MEASURING, *REPORTING)
    session.run("python", "-m", "pytest", "benches", "--benchmark-autosave", *session.posargs)


def _fresh_runs(session: nox.Session, count: int, options: list[str]) -> list[str]:
    """Results files of the benchmarks in that many fresh processes; the options select them."""
    files = [f"{session.create_tmp()}/run{number}.json" for number in range(1, count + 1)]
    for file in files:
        session.run("python", "-m", "pytest", "benches", "-q", f"--benchmark-json={file}", *options)
    return files


@nox.session(venv_params=VENV, default=False)
def noise(session: nox.Session) -> None:
    """Run-to-run spread: the benchmarks in six fresh processes; also as noise.json. What follows `--` selects them."""
    _set_up(session, *MEASURING, *REPORTING)
    session.run("python", "-m", "benches.noise", *_fresh_runs(session, 6, session.posargs), "--json=noise.json")


@nox.session(venv_params=VENV, default=False)
def baseline(session: nox.Session) -> None:
    """A baseline of five fresh processes, and what it changes; `-- --replace` stores it, `--add` or `--renew` adds."""
    _set_up(session, *MEASURING, *REPORTING, *JUDGING)
    asked = [option for option in session.posargs if option in ("--add", "--renew", "--replace")]
    files = _fresh_runs(session, 5, [option for option in session.posargs if option not in asked])
    session.run("python", "-m", "benches.baseline", *files, *asked)


@nox.session(venv_params=VENV, default=False)
def check(session: nox.Session) -> None:
    """Three fresh processes judged together against the stored baseline; `-- --strict` for the strict gate.

    --baseline, --json, --noise and --strict are the gate's, all else is pytest's.
    """
    _set_up(session, *MEASURING, *REPORTING, *JUDGING)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--baseline", "--json", "--noise"):
        parser.add_argument(name)
    parser.add_argument("--strict", action="store_true")
    gate, options = parser.parse_known_args(session.posargs)
    asked = [f"--{name}={value}" for name, value in vars(gate).items() if value and name != "strict"]
    # Is there a baseline, and are there such cases? Better said now than after minutes of measuring.
    compare = f"--benchmark-compare={gate.baseline}" if gate.baseline else "--benchmark-compare"
    session.run("python", "-m", "pytest", "benches", "-q", "--collect-only", compare, *options, silent=True)
    files = _fresh_runs(session, 3, options)
    session.run("python", "-m", "benches.gate", *files, *asked, *(["--strict"] if gate.strict else []))


@nox.session(venv_params=VENV, default=False)
def calibrate(session: nox.Session) -> None:
    """How often the gate raises a false alarm and what it finds: `-- --baseline FILE --target REGEX -- OPTIONS`."""
    _set_up(session, *MEASURING, *REPORTING, *JUDGING)
    session.run("python", "-m", "benches.calibrate", *session.posargs)


@nox.session(venv_params=VENV)
def tests(session: nox.Session) -> None:
    """Tests: accuracy, and the suite itself. Those that need a GPU say so and are skipped without one."""
    _set_up(session, *MEASURING, *REPORTING, *CHECKING)
    session.run("python", "-m", "pytest", "correctness", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff (format and rules) and mypy."""
    session.install(*LINTING, *MEASURING, "rich", "nox", TORCH)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("mypy")
