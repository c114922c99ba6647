"""What an update in shards does besides running its programs: few operators, since a GPU waits for each of them."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.ranks.news import Layout
from stepgraph.graphs.telling import Telling
from stepgraph.runtime import world as worlds
from stepgraph.runtime.executable import Executable
from stepgraph.system.torch_private import DispatchMode
from tests.parallel_runs import batch, compiled, together

# Operators around the programs of a network with three layers, views included.
MOST_OF_TWO, MOST_PER_SHARD, MOST_OF_AN_EXCHANGE = 45, 18, 36


class Outside(DispatchMode):
    """Counts the operators that no program calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.runs = Counter[str](), 0
        self._inside = False

    @contextmanager
    def watching(self) -> Any:
        run = Executable.run

        def inside(executable: Executable, *given: Any) -> Any:
            self.runs, self._inside = self.runs + 1, True
            try:
                return run(executable, *given)
            finally:
                self._inside = False

        Executable.run = inside  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            Executable.run = run  # type: ignore[method-assign]

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(operator)] += not self._inside
        return operator(*args, **(kwargs or {}))


def plain(layers: int, dropout: bool) -> sg.TrainingGraph:
    """Fully connected layers; nothing but dropout is random, and all labels count."""
    x, y, graph = sg.Tensor((sg.BATCH, 6), label="x"), sg.Tensor((sg.BATCH,), "int64", label="y"), sg.Graph()
    h = x
    for _ in range(layers):
        h = graph.tanh(graph.dense(h, 8))
    graph.dense(graph.dropout(h, 0.5) if dropout else h, 3)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(0.01))
    training.add_inputs({"x": x}, {"y": y})
    return training


def outside(shards: int | None, layers: int = 2, dropout: bool = False, exchanges: bool = False) -> tuple[int, int]:
    """The operators around the programs of an update, and how many programs it runs."""
    worlds.ALWAYS_EXCHANGES = exchanges
    training = compiled(plain(layers, dropout), shards)
    assert training.world.is_alone is not exchanges
    given = [{name: torch.from_numpy(one) for name, one in part.items()} for part in batch("mlp", 16, 0)]
    given[1]["y"].clamp_(min=0)
    for _ in range(3):
        training.execute(*given)
    counted = Outside()
    with counted.watching():
        training.execute(*given)
    return counted.found.total(), counted.runs


@pytest.mark.parametrize("shards", [None, 1])
def test_one_shard_of_one_process_needs_no_operators_around_it(shards: int | None) -> None:
    assert outside(shards) == (0, 1)


def test_shards_of_one_process_need_few_operators_each() -> None:
    two, runs = outside(2)
    four, more = outside(4)
    assert (runs, more) == (3, 5) and two <= MOST_OF_TWO and four - two <= 2 * MOST_PER_SHARD


def test_only_random_shards_move_the_stream() -> None:
    found = [outside(2, dropout=dropout)[0] for dropout in (False, True)]
    assert found[1] - found[0] == 2 + 4  # one for each shard; a copy before them, and three when it moves on


def test_the_sample_of_a_batch_does_not_depend_on_its_order_in_memory() -> None:
    images = torch.randn(4, 3, 5, 5)
    told = Telling(Layout((), (), 1), 4, images.device)
    found = []
    for one in (images, images.contiguous(memory_format=torch.channels_last), images.flip(0)):
        told.tell_header(False, 0.0, False, [one, torch.arange(4)])
        found.append(told.header.tolist())
    assert found[0] == found[1] != found[2]


def test_an_exchange_needs_few_operators() -> None:
    ((found, runs),) = together(1, outside, 1, 2, False, True)
    assert runs == 2 and found <= MOST_OF_AN_EXCHANGE
