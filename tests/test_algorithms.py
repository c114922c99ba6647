"""Convolutions run once ahead, each kind once in a thread."""

import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.program import Part
from stepgraph.compiler.step import Fusion
from stepgraph.runtime import algorithms
from stepgraph.runtime.executable import Executable

CPU = torch.device("cpu")


def part() -> Part:
    """Three convolutions, two of them alike, and their gradients."""

    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        y = torch.conv2d(leaves[0], leaves[1], padding=1)
        y = torch.conv2d(torch.conv2d(y, leaves[1], padding=1), leaves[1], stride=2)
        return list(torch.autograd.grad(y.sum(), leaves))

    given = torch.randn(2, 4, 9, 9).contiguous(memory_format=torch.channels_last), torch.randn(4, 4, 3, 3)
    return Part(make_fx(function, tracing_mode="fake")(*given), (), ())


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, bool]]]:
    """Of each convolution that runs: whether in this thread, and whether algorithms must be deterministic."""
    found: list[tuple[bool, bool]] = []
    here = threading.get_ident()

    def noting(target: Any, *given: Any) -> Any:
        found.append((threading.get_ident() == here, torch.are_deterministic_algorithms_enabled()))
        return target(*given)

    real = algorithms._left

    def left(*given: Any) -> Any:
        kinds = real(*given)
        for node in kinds.values():
            if not isinstance(node.target, partial):
                node.target = partial(noting, node.target)
        return kinds

    monkeypatch.setattr(algorithms, "_left", left)
    monkeypatch.setattr(algorithms, "_chosen", algorithms._Chosen())
    yield found


def test_each_kind_of_convolution_is_loaded_in_another_thread(ran: list[tuple[bool, bool]]) -> None:
    algorithms.load(part(), CPU)
    assert ran == [(False, False)] * 4


def test_each_kind_of_convolution_is_chosen_once_in_a_thread(ran: list[tuple[bool, bool]]) -> None:
    algorithms.choose(part(), CPU)
    assert ran == [(True, False)] * 4
    algorithms.choose(part(), CPU)
    algorithms.load(part(), CPU)
    assert len(ran) == 4  # PyTorch would use what it has chosen
    other = threading.Thread(target=algorithms.choose, args=(part(), CPU))
    other.start()
    other.join()
    assert [here for here, _ in ran] == [True] * 4 + [False] * 4  # each thread has choices of its own


def test_a_choice_belongs_to_its_settings(ran: list[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    algorithms.choose(part(), CPU)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", not torch.backends.cudnn.deterministic)
    algorithms.choose(part(), CPU)
    assert len(ran) == 8


def test_the_modes_of_the_caller_have_no_effect(ran: list[tuple[bool, bool]]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        algorithms.choose(part(), CPU)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ran == [(True, False)] * 4


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no more"), RuntimeError("no engine")])
def test_what_fails_is_left_to_the_step(
    error: RuntimeError, ran: list[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, recorded = [], part()

    def full(*_: object, **__: object) -> torch.Tensor:
        asked.append(1)
        raise error

    with monkeypatch.context() as during:
        during.setattr(torch, "empty_strided", full)
        algorithms.choose(recorded, CPU)
    assert len(asked) == 1 and not ran  # the others would not fit either
    algorithms.choose(part(), CPU)
    assert len(ran) == 4


@pytest.mark.parametrize(
    ("fusion", "asked"),
    [
        (Fusion.LATER, []),  # training starts at once
        (Fusion.NEVER, ["load", "choose"]),
        (Fusion.FIRST, ["load", "choose"]),
    ],
)
def test_a_step_that_is_fused_later_tries_nothing(
    fusion: Fusion, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    for name in ("choose", "load"):
        monkeypatch.setattr(algorithms, name, lambda *_, name=name: found.append(name))
    executable = Executable.__new__(Executable)
    executable.part = part()
    executable.step = SimpleNamespace(  # type: ignore[assignment]
        device=CPU, fusion=fusion, chooses_kernels=True, measures_kernels=True
    )
    executable.choose_algorithms()
    assert found == asked
