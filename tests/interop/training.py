"""One model trained twice: by the usual loop of PyTorch, and by a graph that was imported from it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import stepgraph as sg
from tests.interop.models import Case

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, eps=1e-3, fused=True),
}


def find(output: Any, path: str) -> torch.Tensor:
    """The array at a path of a model's result."""
    if path == "output":
        return output
    for key in path.split("."):
        output = output[int(key) if key.isdigit() else key]
    return output


def targets(case: Case, output: torch.Tensor) -> torch.Tensor:
    """Labels for one batch."""
    if case.classes is None:
        return torch.randn(output.shape)
    return torch.randint(0, case.classes, output.shape[:-1])


def reference_loss(case: Case, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if case.classes is None:
        return F.mse_loss(output, labels)
    return F.cross_entropy(output.reshape(-1, case.classes), labels.reshape(-1))


def loss_layer(case: Case) -> sg.Layer:
    if case.classes is None:
        return sg.LossLayer.mean_squared_error(reduction_type=sg.ReductionType.MEAN)
    return sg.LossLayer.softmax_cross_entropy(reduction_type=sg.ReductionType.MEAN, axis=-1)


def batches(case: Case, model: nn.Module, count: int) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    inputs = [case.inputs() for _ in range(count)]
    with torch.no_grad():
        output = find(copy.deepcopy(model).eval()(**inputs[0]), case.output)
    return [(one, targets(case, output)) for one in inputs]


def prepared(case: Case, optimizer: Any, **settings: Any) -> tuple[nn.Module, sg.Imported, sg.TrainingGraph]:
    """A model, imported and compiled."""
    torch.manual_seed(0)
    model = case.make().train()
    imported = sg.from_torch(model, case.inputs(), outputs=[case.output], share=False, **settings)
    shape = imported.outputs[case.output].shape
    labels = sg.Tensor(shape) if case.classes is None else sg.Tensor(shape[:-1], "int64")
    converted = sg.optimizers.from_torch(optimizer([p for p in model.parameters() if p.requires_grad]))
    training = imported.training(loss_layer(case), converted, labels)
    training.compile("cpu", deterministic=True)
    return model, imported, training


def apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """The largest difference, relative to the largest element, or to 0.05 where all are smaller."""
    one, two = one.detach().double(), two.detach().double()
    return float((one - two).abs().max() / two.abs().max().clamp_min(0.05)) if one.numel() else 0.0


def compared(case: Case, optimizer: str, steps: int, **settings: Any) -> tuple[float, float, str]:
    """The largest differences of losses and of tensors after some steps, and the tensor that differs most."""
    model, imported, training = prepared(case, OPTIMIZERS[optimizer], **settings)
    data = batches(case, model, steps)
    trained = [p for p in model.parameters() if p.requires_grad]
    reference = OPTIMIZERS[optimizer](trained)
    losses = []
    for inputs, labels in data:
        ours = float(training.execute(inputs, {"labels": labels}).loss)
        theirs = reference_loss(case, find(model(**inputs), case.output), labels)
        reference.zero_grad()
        theirs.backward()
        reference.step()
        losses.append(apart(torch.tensor(ours), theirs))
    state, expected = imported.state_dict(), model.state_dict()
    assert list(state) == list(expected)
    differences = {name: apart(state[name], expected[name]) for name in expected}
    worst = max(differences, key=differences.__getitem__)
    return max(losses), differences[worst], worst
