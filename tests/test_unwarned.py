"""Warnings in one thread are ignored, and the program's filters stay what they are."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

from stepgraph.compiler import fusion
from stepgraph.system.unwarned import without_warnings


def raises() -> bool:
    try:
        warnings.warn("anything", DeprecationWarning, stacklevel=2)
    except DeprecationWarning:
        return True
    return False


def test_a_warning_is_no_error_inside() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        with without_warnings():
            assert not raises()
            with without_warnings():
                pass
            assert not raises()
        assert raises() and warnings.filters == before


def test_other_threads_keep_their_warnings() -> None:
    found: list[bool] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with without_warnings():
            other = threading.Thread(target=lambda: found.append(raises()))
            other.start()
            other.join()
    assert found == [True]


def test_filters_of_another_thread_that_end_later_leave_nothing_behind() -> None:
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with without_warnings():
            entered.set()
            leave.wait()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = threading.Thread(target=work)
        other.start()
        entered.wait()
        with warnings.catch_warnings():  # copies the filters with the thread's own
            leave.set()
            other.join()
        assert raises()


def test_fusing_does_not_depend_on_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(*_: Any) -> str:
        warnings.warn("of PyTorch's compiler", DeprecationWarning, stacklevel=1)
        return "fused"

    monkeypatch.setattr(fusion, "_candidates", lambda part: [part])
    monkeypatch.setattr(fusion, "_fused", fused)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fusion.fuse(None, None) == "fused"  # type: ignore[arg-type,comparison-overlap]
