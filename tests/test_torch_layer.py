"""`TorchLayer` against PyTorch: losses and states over training steps, and everything a graph does with a layer."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph as sg
from tests import torch_modules
from tests.torch_modules import MODULES

CPU, STEPS = sg.Device.cpu(), 20
EPSILON = 1e-3  # large enough that gradients which are 0 but for rounding, as that of a key's bias, change nothing
OPTIMIZERS: dict[str, tuple[Callable[[], sg.Optimizer], Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": (lambda: sg.SGDOptimizer(0.05), lambda p: torch.optim.SGD(p, 0.05)),
    "AdamW": (
        lambda: sg.AdamWOptimizer(0.01, weight_decay=0.1, epsilon=EPSILON, formula="torch"),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, eps=EPSILON),
    ),
}


def made(row: torch_modules.Row, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return row.make()


def data(row: torch_modules.Row, steps: int = STEPS) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if row.indices:
        return [[torch.randint(10, shape, generator=generator) for shape in row.shapes] for _ in range(steps)]
    return [[torch.randn(shape, generator=generator) for shape in row.shapes] for _ in range(steps)]


def call(tree: Any, place: Callable[[int], Any]) -> Any:
    """The call of a row, with something in the places of its sources."""
    if isinstance(tree, str) and tree.startswith("source "):
        return place(int(tree.split()[1]))
    if isinstance(tree, dict):
        return {key: call(one, place) for key, one in tree.items()}
    return type(tree)(call(one, place) for one in tree) if isinstance(tree, list | tuple) else tree


def first(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    return first(next(iter(output.values())) if isinstance(output, Mapping) else output[0])


def trained(
    module: nn.Module,
    *shapes: Sequence[int],
    optimizer: sg.Optimizer | None = None,
    indices: bool = False,
    call: Any = None,
    **settings: Any,
) -> sg.TrainingGraph:
    """A training graph around one module: the mean of its squared results is the loss."""
    kind = sg.DataType.INT64 if indices else sg.DataType.FLOAT32
    sources = [sg.Tensor(tuple(shape), kind, label=f"x{i}") for i, shape in enumerate(shapes)]
    graph = sg.Graph()
    y = graph.node(sg.TorchLayer(module, call=call), *sources)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), optimizer or sg.SGDOptimizer(0.05))
    training.add_inputs({f"x{i}": one for i, one in enumerate(sources)}, {"y": sg.Tensor(y.shape)})
    training.compile(CPU, **settings)
    return training


def step(training: sg.TrainingGraph, arrays: Sequence[torch.Tensor], y: torch.Tensor | None = None) -> float:
    label = training.declaration.feeds.labels["y"]
    rows = arrays[0].shape[0] if training.declaration.is_batched(label) else label.shape[0]
    zeros = torch.zeros(rows, *label.shape[1:]) if y is None else y
    return float(training.execute({f"x{i}": one for i, one in enumerate(arrays)}, {"y": zeros}).loss)


def distance(one: nn.Module, other: nn.Module) -> float:
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


CASES = [
    pytest.param(name, kind, marks=[] if (i + j) % 2 == 0 else pytest.mark.deep, id=f"{name}-{kind}")
    for i, name in enumerate(MODULES)
    for j, kind in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_losses_and_state_are_those_of_pytorch(name: str, kind: str) -> None:
    row = MODULES[name]
    module, batches = made(row), data(row)
    reference = copy.deepcopy(module)
    ours, theirs = OPTIMIZERS[kind]
    where = None if row.call is None else call(row.call, sg.Source)
    training = trained(
        module, *row.shapes, optimizer=ours(), indices=row.indices, call=where, deterministic=True
    )
    optimizer = theirs([p for p in reference.parameters() if p.requires_grad])
    bound = 0.0 if row.bits and kind == "SGD" else 2e-6
    for arrays in batches:
        args, kwargs = (arrays, {}) if row.call is None else call(row.call, arrays.__getitem__)
        loss = first(reference(*args, **kwargs)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert step(training, arrays) == pytest.approx(loss.item(), rel=bound or 1e-7, abs=bound)
    assert distance(module, reference) <= bound
