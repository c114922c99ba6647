"""Models whose Python looks at the number of rows: the graph computes what they do for every number, or says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph as sg
from tests.interop.test_odd_models import model
from tests.interop.training import apart


def limited(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x) - self.a(x)[: min(8, len(x))].mean(0))


def half(self: Any, x: torch.Tensor) -> torch.Tensor:
    first = (len(x) + 1) // 2
    return self.b(self.a(x) + x[:first].mean(0))


def from_ten_on(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x) * 2 if len(x) > 10 else self.a(x))


def several(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    return self.b(y - y.mean(0) if len(x) > 1 else y)


def capped(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x)) * min(len(x), 5)


def padded(self: Any, x: torch.Tensor) -> torch.Tensor:
    missing = -len(x) % 4
    y = torch.cat([self.a(x), x.new_zeros(missing, 6)]) if missing else self.a(x)
    return self.b(y.view(-1, 4, 6).mean(1, keepdim=True).expand(-1, 4, -1).reshape(-1, 6)[: len(x)])


def in_a_part(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.part(self.a(x)))


def part(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 3 if len(x) == 1 else x


def plain(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x).view(len(x), 2, 3).transpose(1, 2).reshape(len(x), 6))


def expanded_if_needed(self: Any, x: torch.Tensor) -> torch.Tensor:
    start = self.start if len(x) == 1 else self.start.expand(len(x), 6)
    return self.b(self.a(x) + start)


def normalized_from(rows: int, in_training: bool) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(y - y.mean(0) if len(x) >= rows and self.training is in_training else y)

    return forward


def in_pieces(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(torch.cat([self.a(one) - one.mean() for one in x.split(1024)]))


class Part(nn.Module):
    forward = part


FORWARDS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], dict[str, Any], str | None]] = {
    # name: forward, parts, how 'a' is imported
    "limited": (limited, {}, None),
    "half": (half, {}, None),
    "other functions from ten on": (from_ten_on, {}, None),
    "other functions for one": (several, {}, None),
    "a factor": (capped, {}, None),
    "padding": (padded, {}, None),
    "in a part": (in_a_part, {"part": [Part()]}, None),
    "all rows": (plain, {}, "native"),
    "other functions for one with the same numbers": (
        expanded_if_needed,
        {"start": nn.Parameter(torch.ones(1, 6))},
        "native",
    ),
}


@pytest.mark.parametrize(
    "forward",
    [
        normalized_from(256, in_training=False),
        normalized_from(4096, in_training=False),
        lambda self, x: self.b(self.a(x)) - x[: min(3000, len(x))].mean(0),
        in_pieces,
    ],
)
def test_what_a_model_does_with_many_rows_is_seen(forward: Any) -> None:
    made = model(forward).eval()
    imported = sg.from_torch(made, torch.randn(4, 6))
    graph = sg.InferenceGraph([imported.graph])
    graph.add_inputs(imported.inputs)
    graph.compile("cpu")
    for rows in (3, 4096, 5000):
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))
        assert apart(graph.execute({"x": x}).result.torch(), made(x).detach()) < 1e-5, rows


def test_what_a_model_does_with_many_rows_in_training_is_seen() -> None:
    made = model(normalized_from(256, in_training=True)).train()
    x = torch.randn(300, 6)
    wanted = made(x).square().mean().item()
    labels = sg.Tensor((sg.BATCH, 6))
    training = sg.from_torch(made, x[:4]).training(sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1), labels)
    training.compile("cpu")
    assert training.execute({"x": x}, {"labels": torch.zeros(300, 6)}).loss == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("examples", [1, 4, 32])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_graph_computes_what_the_model_does_for_every_number_of_rows(name: str, examples: int) -> None:
    forward, parts, how = FORWARDS[name]
    made = model(forward, **parts).eval()
    imported = sg.from_torch(made, torch.randn(examples, 6))
    assert how is None or {row.path: row.how for row in imported.rows}["a"] == how, imported
    graph = sg.InferenceGraph([imported.graph])
    graph.add_inputs(imported.inputs)
    graph.compile("cpu")
    for rows in (1, 2, 3, 5, 11, 16, 40):
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))
        assert apart(graph.execute({"x": x}).result.torch(), made(x).detach()) < 1e-5, rows


def test_a_model_of_multiples_keeps_its_rows_free() -> None:
    """Frames of four each: no other number of rows can be recorded."""

    def of_four(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).view(len(x) // 4, 4, 6)
        return self.b((y - y.mean(1, keepdim=True)).view(len(x), 6))

    imported = sg.from_torch(model(of_four), torch.randn(8, 6))
    assert imported.inputs["x"].shape[0] == sg.BATCH
    assert {row.path: row.how for row in imported.rows}["a"] == "native"


def test_a_graph_that_fails_where_the_model_runs_is_an_error_with_a_fix() -> None:
    def in_parts(self: Any, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            raise ValueError("one row")
        return self.b(x) + self.a(x).view(8 if len(x) >= 4 else len(x), -1).mean(0).max()

    with pytest.raises(sg.StateError, match="runs on 2 rows, but the graph does not") as raised:
        sg.from_torch(model(in_parts), torch.randn(4, 6))
    assert "whole=True" in str(raised.value)
