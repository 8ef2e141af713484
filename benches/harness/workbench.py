"""What the cases next to each other share is built once, and whatever goes wrong is said in one sentence."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any

import pytest


class Workbench:
    """Keeps the thing that was built last and nothing else, so that GPU memory holds one layer at a time."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._value: Any = None
        self._failure: str | None = None

    def get(self, key: Hashable, what: str, build: Callable[[], Any], keep_trace: bool = False) -> Any:
        """The thing of this key, built if it is not there; its failure is remembered like itself."""
        if key != self._key:
            self._key, self._value, self._failure = None, None, None
            _free_memory()
            try:
                self._value = attempt(what, build, keep_trace)
            except pytest.fail.Exception as failure:
                self._failure = str(failure.msg)
            self._key = key
        if self._failure:
            pytest.fail(self._failure, pytrace=False)
        return self._value


def attempt(what: str, action: Callable[[], Any], keep_trace: bool) -> Any:
    """The action's result, or a failed test with one sentence; a dead GPU ends the run.

    The exception is let go of before the test fails, since its frames hold the tensors that used up the memory.
    """
    try:
        return action()
    except Exception as error:
        if keep_trace:
            raise
        lines = str(error).strip().splitlines() or [""]
        sentence = f"{what}: {type(error).__name__}: {lines[0]}"
    if reason := _free_memory():
        pytest.exit(f"{sentence} -- the GPU can no longer be used in this process ({reason})", returncode=1)
    pytest.fail(sentence, pytrace=False)


def _free_memory() -> str | None:
    """Gives back memory that nothing uses any more; the error of doing so when the CUDA context is dead."""
    import torch

    gc.collect()
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None
