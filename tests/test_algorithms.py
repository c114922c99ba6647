"""Convolutions are run ahead, each kind once in another thread, and once in the one that steps."""

import threading

import pytest
import torch
from torch import fx
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


@pytest.mark.parametrize("is_fused", [False, True])
def test_each_kind_of_convolution_runs_ahead(is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithms are loaded in another thread, and chosen in this one before a step fills the memory."""
    seen: list[tuple[int, int]] = []
    run = algorithms._run

    def noted(convolutions: list[fx.Node], device: torch.device) -> None:
        seen.append((len(convolutions), threading.get_ident()))
        run(convolutions, device)

    monkeypatch.setattr(algorithms, "_run", noted)
    algorithms.load(part(), torch.device("cpu"), is_fused)
    assert [count for count, _ in seen] == [2 + 2] * (1 if is_fused else 2)
    assert [thread == threading.get_ident() for _, thread in seen] == [False, True][: len(seen)]


def test_a_device_that_is_full_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def full(*_: object, **__: object) -> torch.Tensor:
        asked.append(1)
        raise torch.OutOfMemoryError("no more")

    convolutions = [node for node in part().nodes if node.target in algorithms.CONVOLUTIONS]
    monkeypatch.setattr(torch, "empty_strided", full)
    algorithms._run(convolutions, torch.device("cpu"))
    assert len(asked) == 1 < len(convolutions)  # the others would not fit either
