"""What the cases next to each other share is built once, and whatever goes wrong is said in one sentence."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any

import pytest


class Memo:
    """Things by key, each made once; a failure is remembered in its one line."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._failures: dict[Hashable, str] = {}

    def get(self, key: Hashable, make: Callable[[], Any], keep_trace: bool = False) -> Any:
        """The thing of this key, made if it is not there, or its failure."""
        if key in self._failures:
            pytest.fail(self._failures[key], pytrace=False)
        if key not in self._made:
            try:
                self._made[key] = attempt(make, keep_trace)
            except pytest.fail.Exception as failure:
                self._failures[key] = str(failure.msg)
                raise
        return self._made[key]


class Workbench(Memo):
    """Keeps the thing that was made last and nothing else, so that GPU memory holds one layer at a time."""

    def get(self, key: Hashable, make: Callable[[], Any], keep_trace: bool = False) -> Any:
        """The thing of this key; a new one is made when the last one is gone."""
        if key not in self._made:
            self._made.clear()
            free_memory()
        return super().get(key, make, keep_trace)


def keeps_traces(config: pytest.Config) -> bool:
    """Whether the user asked for whole tracebacks instead of one line."""
    return config.getoption("tbstyle", "auto") in ("long", "native")


def attempt(action: Callable[[], Any], keep_trace: bool) -> Any:
    """The action's result, or a failed test with one line of what went wrong.

    The exception is let go of before the test fails, since its frames hold the tensors that used up the memory.
    """
    try:
        return action()
    except Exception as error:
        if keep_trace:
            raise
        sentence = in_one_line(error)
    free_memory()
    pytest.fail(sentence, pytrace=False)


def in_one_line(error: BaseException) -> str:
    """The error's kind and its first line, of which the first 300 characters have to do."""
    line = " ".join(": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]]).split())
    return line if len(line) <= 300 else f"{line[:296]} ..."


def free_memory() -> str | None:
    """Give back memory that nothing uses any more. Returns the error of doing so where the CUDA context is dead."""
    import torch

    gc.collect()
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return in_one_line(error)
    return None
