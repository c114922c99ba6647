"""The table of the page *From PyTorch*: every row of layers, losses and optimizers gives PyTorch's numbers."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph as sg

PAGE = Path(__file__).parent.parent / "docs" / "from-pytorch.md"
BATCH, CHANNELS, OUTPUTS, SIZE, WORDS, WIDTH = 4, 3, 6, 8, 11, 5
NAMES = {"a": CHANNELS, "b": OUTPUTS, "d": WIDTH, "words": WORDS, "nn": nn, "torch": torch, "sg": sg}


def rows(heading: str) -> list[tuple[str, str]]:
    """The code of both columns of the first table after some text."""
    lines = PAGE.read_text().split(heading, 1)[1].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    table = lines[first + 1 : next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))]
    return [tuple(re.findall(r"`([^`]+)`", cell)[0] for cell in line.strip("| ").split(" | ", 1)) for line in table]


LAYERS, TRAINED = rows("Layers, as functions"), rows("Losses and optimizers, also")


def source(theirs: str) -> np.ndarray:
    random = np.random.default_rng(0)
    if "Embedding" in theirs:
        return random.integers(0, WORDS, (BATCH, 7))
    images = "2d" in theirs or "GroupNorm" in theirs
    shape = (BATCH, OUTPUTS if "Norm" in theirs else CHANNELS, SIZE, SIZE) if images else (BATCH, 7, WIDTH)
    shape = (BATCH, CHANNELS) if "Linear" in theirs else shape
    return random.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("theirs", "ours"), LAYERS, ids=[theirs for theirs, _ in LAYERS])
def test_a_layer_gives_pytorchs_numbers(theirs: str, ours: str) -> None:
    values = source(theirs)
    x = torch.from_numpy(values)
    found: Any = eval(theirs, {**NAMES, "x": x})
    parameters = {}
    if isinstance(found, nn.Module):
        parameters = {name: one.detach().normal_() for name, one in found.named_parameters()}
        found = found(x)
    graph = sg.Graph()
    tensor = sg.Tensor((sg.BATCH, *values.shape[1:]), "int64" if values.dtype.kind == "i" else "float32")
    operates = ours.startswith(("x.", "x +"))  # results have operators, inputs do not
    eval(ours, {**NAMES, "graph": graph, "x": graph.linear(tensor, 1.0, 0.0) if operates else tensor})
    layer = graph.layers[-1]
    for name, own in (("weight", ("weights", "gamma")), ("bias", ("biases", "beta"))):
        if name in parameters:
            target = next(getattr(layer, one) for one in own if getattr(layer, one, None) is not None)
            given = parameters[name]
            if name == "weight" and "Transpose" in theirs:
                given = given.transpose(0, 1)
            target.torch().copy_(given.reshape(target.shape))
    training = sg.TrainingGraph([graph], None)
    training.add_inputs({"x": tensor})
    training.add_outputs({"y": graph.nodes[-1].results[0]})
    training.compile("cpu", deterministic=True)
    result = training.execute_forward({"x": values})["y"].numpy()
    np.testing.assert_allclose(result.reshape(found.shape), found.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("theirs", "ours"), TRAINED[:2], ids=[theirs for theirs, _ in TRAINED[:2]])
def test_a_loss_gives_pytorchs_numbers(theirs: str, ours: str) -> None:
    random = np.random.default_rng(0)
    classes = "Entropy" in theirs
    prediction = random.standard_normal((BATCH, WIDTH)).astype(np.float32)
    labels = random.integers(0, WIDTH, BATCH) if classes else random.standard_normal((BATCH, WIDTH)).astype(np.float32)
    wanted = eval(theirs, NAMES)(torch.from_numpy(prediction), torch.from_numpy(labels))
    x, y = sg.Tensor(prediction.shape), sg.Tensor(labels.shape, "int64" if classes else "float32")
    graph = sg.Graph()
    graph.linear(x, 1.0, 0.0)
    training = sg.TrainingGraph([graph], eval(ours, NAMES))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu")
    assert training.execute_forward({"x": prediction}, {"y": labels}).loss == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize(("theirs", "ours"), TRAINED[2:], ids=[theirs for theirs, _ in TRAINED[2:]])
def test_an_optimizer_updates_as_pytorchs(theirs: str, ours: str) -> None:
    random = np.random.default_rng(0)
    x, y = (random.standard_normal(shape).astype(np.float32) * 3 for shape in ((BATCH, 5), (BATCH, 2)))
    module = nn.Linear(5, 2)
    clips = theirs.startswith("clip")
    text = "SGD(p, lr=0.1)" if clips else theirs
    optimizer = eval(f"torch.optim.{text}", {"torch": torch, "p": module.parameters()})
    mine = eval(f"sg.SGDOptimizer(0.1, {ours})" if clips else ours, NAMES)
    tensor, labels, graph = sg.Tensor((BATCH, 5)), sg.Tensor((BATCH, 2)), sg.Graph()
    graph.dense(tensor, 2)
    layer = graph.layers[0]
    layer.weights.torch().copy_(module.weight.detach())
    layer.biases.torch().copy_(module.bias.detach())
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), mine)
    training.add_inputs({"x": tensor}, {"y": labels})
    training.compile("cpu")
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        if clips:
            name, limit = re.match(r"(\w+)\(p, (.+)\)", theirs).groups()
            getattr(nn.utils, name)(module.parameters(), float(limit))
        optimizer.step()
        training.execute({"x": x}, {"y": y})
    np.testing.assert_allclose(layer.weights.numpy(), module.weight.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_every_row_was_found() -> None:
    assert (len(LAYERS), len(TRAINED)) == (21, 6)
