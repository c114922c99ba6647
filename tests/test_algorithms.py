"""Convolutions are run once ahead, each kind in a thread of its own."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.program import Part
from stepgraph.runtime import algorithms


def part() -> Part:
    """Three convolutions, two of them alike, and their gradients."""

    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        y = torch.conv2d(leaves[0], leaves[1], padding=1)
        y = torch.conv2d(torch.conv2d(y, leaves[1], padding=1), leaves[1], stride=2)
        return list(torch.autograd.grad(y.sum(), leaves))

    given = torch.randn(2, 4, 9, 9).contiguous(memory_format=torch.channels_last), torch.randn(4, 4, 3, 3)
    return Part(make_fx(function, tracing_mode="fake")(*given), (), ())


class Noted(algorithms.Loading):
    """Notes the convolutions that it runs, and in which thread."""

    def __init__(self, part: Part, device: torch.device, most: int = 100) -> None:
        super().__init__(part, device)
        self.ran, self.most = list[int](), most
        for node in self._convolutions:
            node.target = partial(self._note, node.target)

    def _note(self, target: Any, *given: Any) -> Any:
        self.ran.append(threading.get_ident())
        if len(self.ran) == self.most:
            self.cancel()
        return target(*given)


@pytest.mark.parametrize("is_fused", [False, True])
def test_each_kind_of_convolution_runs_ahead(is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithms are loaded in another thread, and chosen in this one before a step fills the memory."""
    made: list[Noted] = []
    monkeypatch.setattr(algorithms, "Loading", lambda *given: made.append(Noted(*given)) or made[-1])
    algorithms.load(part(), torch.device("cpu"), is_fused)
    (loading,) = made
    here = [thread == threading.get_ident() for thread in loading.ran]
    assert here == [False] * 4 + [True] * (0 if is_fused else 4)


def test_loading_can_be_cancelled() -> None:
    loading = Noted(part(), torch.device("cpu"), most=1)
    loading.start()
    loading.join()
    assert len(loading.ran) == 1


def test_a_device_that_is_full_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def full(*_: object, **__: object) -> torch.Tensor:
        asked.append(1)
        raise torch.OutOfMemoryError("no more")

    loading = Noted(part(), torch.device("cpu"))
    monkeypatch.setattr(torch, "empty_strided", full)
    loading.run()
    assert len(asked) == 1 and not loading.ran  # the others would not fit either
