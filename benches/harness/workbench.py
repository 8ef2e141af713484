"""What the cases next to each other share is built once, and whatever goes wrong is said in one sentence."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Callable, Hashable
from typing import Any

import pytest


class Workbench:
    """Keeps the thing that was built last and nothing else, so that GPU memory holds one layer at a time."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._value: Any = None
        self._failure: str | None = None

    def get(self, key: Hashable, build: Callable[[], Any], keep_trace: bool = False) -> Any:
        """The thing of this key, built if it is not there; its failure is remembered like itself."""
        if key != self._key:
            self._key, self._value, self._failure = None, None, None
            free_memory()
            try:
                self._value = attempt(build, keep_trace)
            except pytest.fail.Exception as failure:
                self._failure = str(failure.msg)
            self._key = key
        if self._failure:
            pytest.fail(self._failure, pytrace=False)
        return self._value


def attempt(action: Callable[[], Any], keep_trace: bool) -> Any:
    """The action's result, or a failed test with one line of what went wrong.

    The exception is let go of before the test fails, since its frames hold the tensors that used up the memory.
    """
    try:
        return action()
    except Exception as error:
        if keep_trace:
            raise
        sentence = _in_one_line(error)
    free_memory()
    pytest.fail(sentence, pytrace=False)


def _in_one_line(error: BaseException) -> str:
    """The error's kind and its first line, of which the first 300 characters have to do."""
    lines = str(error).strip().splitlines()
    return textwrap.shorten(": ".join([type(error).__name__, *lines[:1]]), 300, placeholder=" ...")


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
        return _in_one_line(error)
    return None
