"""What neighbouring cases share is built once, kept one at a time, and fails in one sentence."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest
import torch

from benches.harness.workbench import Memo, Workbench, attempt, free_memory
from shapes.backends import build
from shapes.models import MODELS


class Thing:
    """Something that uses up memory, as a layer does."""

    itself: Thing | None = None


def make_cycle() -> Thing:
    """A thing that refers to itself, so that only a collection frees it."""
    thing = Thing()
    thing.itself = thing
    return thing


def failing(error: Exception) -> Callable[[], NoReturn]:
    """A builder that raises."""

    def build() -> NoReturn:
        raise error

    return build


class TestSharing:
    """One thing at a time, by its key."""

    def test_the_same_key_gives_the_same_thing_without_building_again(self) -> None:
        """However often it is asked for."""
        bench, built = Workbench(), []

        def build() -> Thing:
            built.append(Thing())
            return built[-1]

        assert bench.get("a", build) is bench.get("a", build) is built[0]
        assert len(built) == 1

    def test_a_key_that_was_left_is_built_again(self) -> None:
        """a, b, a are three things."""
        bench = Workbench()
        built: list[str] = []
        for key in "aba":
            bench.get(key, partial(built.append, key))
        assert built == ["a", "b", "a"]

    def test_the_old_thing_is_gone_before_the_new_one_is_built(self) -> None:
        """Also where it refers to itself, as modules with hooks do: two layers may not fit into memory."""
        bench = Workbench()
        alive = weakref.ref(bench.get("a", make_cycle))
        gc.disable()  # only the workbench collects
        try:
            assert bench.get("b", lambda: alive() is None) is True
        finally:
            gc.enable()


class TestMemo:
    """All things by their keys."""

    def test_it_keeps_what_was_made_for_every_key(self) -> None:
        """Each is made once."""
        memo, made = Memo(), []

        def make(key: str) -> str:
            made.append(key)
            return key.upper()

        assert [memo.get(key, partial(make, key)) for key in "abab"] == ["A", "B", "A", "B"]
        assert made == ["a", "b"]

    def test_a_failure_stays_with_its_key(self) -> None:
        """It is not tried again, and the others go on."""
        memo, tries = Memo(), []

        def fail() -> NoReturn:
            tries.append(1)
            raise RuntimeError("out of memory")

        for _ in range(2):
            with pytest.raises(pytest.fail.Exception, match="RuntimeError: out of memory"):
                memo.get("a", fail)
        assert memo.get("b", lambda: 5) == 5
        assert len(tries) == 1


class TestFailing:
    """What goes wrong while building or measuring."""

    def test_a_failure_is_remembered(self) -> None:
        """Every case that shares the thing fails with the same sentence, and it is tried once."""
        bench, tries = Workbench(), []

        def build() -> NoReturn:
            tries.append(1)
            raise RuntimeError("out of memory")

        messages = []
        for _ in range(3):
            with pytest.raises(pytest.fail.Exception) as caught:
                bench.get("a", build)
            messages.append(caught.value.msg)
        assert messages == ["RuntimeError: out of memory"] * 3
        assert len(tries) == 1

    def test_the_next_thing_is_built_after_a_failure(self) -> None:
        """A failure belongs to its key."""
        bench = Workbench()
        with pytest.raises(pytest.fail.Exception):
            bench.get("a", failing(RuntimeError()))
        assert bench.get("b", lambda: 5) == 5

    @pytest.mark.parametrize(
        ("error", "sentence"),
        [
            pytest.param(ValueError("too wide\nat line 1\nat line 2"), "ValueError: too wide", id="first line"),
            pytest.param(ValueError("\n  \n too wide\n"), "ValueError: too wide", id="blank lines before it"),
            pytest.param(NotImplementedError(), "NotImplementedError", id="without a message"),
        ],
    )
    def test_it_is_one_line_without_a_traceback(self, error: Exception, sentence: str) -> None:
        """What was done, the kind of error, and the first line of its message."""
        with pytest.raises(pytest.fail.Exception) as caught:
            attempt(failing(error), keep_trace=False)
        assert caught.value.msg == sentence
        assert caught.value.pytrace is False

    @pytest.mark.parametrize("get", [partial(Workbench().get, "a"), attempt], ids=["workbench", "attempt"])
    def test_nothing_stays_alive_after_a_failure(self, get: Callable[..., Any]) -> None:
        """What the failing frames held is gone, while the failure itself is still at hand."""
        alive: list[weakref.ref[Thing]] = []

        def build() -> NoReturn:
            big = Thing()
            alive.append(weakref.ref(big))
            raise RuntimeError("out of memory")

        with pytest.raises(pytest.fail.Exception) as caught:
            get(build, keep_trace=False)
        assert alive[0]() is None
        assert caught.value.__cause__ is None

    def test_where_traces_are_kept_the_error_itself_is_raised(self) -> None:
        """With --tb=long a developer sees where it came from."""
        error = ZeroDivisionError("here")
        with pytest.raises(ZeroDivisionError) as caught:
            Workbench().get("a", failing(error), keep_trace=True)
        assert caught.value is error

    def test_where_traces_are_kept_the_next_case_fails_too(self) -> None:
        """With the error again, or with its sentence."""
        bench = Workbench()
        for _ in range(2):
            with pytest.raises((ZeroDivisionError, pytest.fail.Exception)):
                bench.get("a", failing(ZeroDivisionError("here")), keep_trace=True)

    def test_a_long_line_is_cut(self) -> None:
        """An error of CUDA or of a compiler may go on for pages."""
        with pytest.raises(pytest.fail.Exception) as caught:
            attempt(failing(RuntimeError("w" * 5000)), keep_trace=False)
        assert len(caught.value.msg or "") <= 300
        assert (caught.value.msg or "").endswith("www ...")

    def test_a_dead_gpu_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Freeing memory says why it cannot be freed."""
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", failing(RuntimeError("CUDA error: illegal access\nmore")))
        assert free_memory() == "RuntimeError: CUDA error: illegal access"


def test_each_model_is_compiled_for_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch.compile makes code for any size of all that it sees after the first; it is slower."""
    monkeypatch.setattr(build, "_compiled_for", [])
    inputs: list[list[Any]] = []

    def keep(graph: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        inputs.append(given)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=keep)
    for name in ("tiny", "tiny", "tiny", "gpt2_medium", "gpt2_medium", "gpt2_medium", "tiny"):
        build.compile_anew_for(MODELS[name])
        rows = len(name)
        assert torch.equal(double(torch.ones(rows, 4)), torch.full((rows, 4), 2.0))
    assert len(inputs) == 3, "equal sizes of one model are compiled once"
    assert not any(isinstance(one, torch.SymInt) for given in inputs for one in given)
    double(torch.ones(5, 4))
    assert any(isinstance(one, torch.SymInt) for one in inputs[-1]), "a test that could not have failed"
