"""Large outputs of imported models, which a training step does not keep unless somebody asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph as sg

ROWS, WORDS = 8, 12  # the scores have 8 × 12 numbers, the hidden results 8 × 3
X = np.random.default_rng(0).standard_normal((ROWS, 5)).astype(np.float32)
Y = np.arange(ROWS) % WORDS


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of more than 40 numbers are large."""
    monkeypatch.setattr("stepgraph.graphs.compilation.LARGEST", 40)


class Model(nn.Module):
    """Returns scores, and what they were computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, WORDS)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        return {"scores": self.second(hidden), "hidden": hidden}


def imported() -> Any:
    torch.manual_seed(0)
    return sg.from_torch(Model(), torch.zeros(2, 5))


def trained(model: Any, **settings: Any) -> sg.TrainingGraph:
    sg.set_seed(0)
    labels = sg.Tensor((sg.BATCH,), "int64")
    training = model.training(sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(0.01), labels)
    training.compile("cpu", **settings)
    return training


def step(training: sg.TrainingGraph, **more: Any) -> sg.Execution:
    return training.execute({"x": X}, {"labels": Y}, **more)


@pytest.mark.parametrize(
    "settings", [{}, {"parallel": sg.Parallel(shards=2)}, pytest.param({"fuse": True}, marks=pytest.mark.deep)]
)
def test_a_training_step_drops_them(settings: dict[str, Any]) -> None:
    found = step(trained(imported(), **settings))
    assert found.outputs == ("hidden",) and found["hidden"].shape == (ROWS, 3)
    with pytest.raises(sg.UnknownNameError, match=r"this call has kept no output 'scores'(.|\n)*add_outputs"):
        found["scores"]


def test_the_step_computes_the_same_with_them() -> None:
    model, other = imported(), imported()
    dropping, keeping = trained(model), trained(other)
    keeping.add_outputs(other.outputs)
    for _ in range(3):
        assert step(dropping).loss == step(keeping).loss
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("settings", [{}, {"parallel": sg.Parallel(shards=2)}])
def test_whoever_declares_them_gets_them(settings: dict[str, Any]) -> None:
    model = imported()
    training = trained(model, **settings)
    before = sg.predict(training, {"x": X})["scores"]
    step(training, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE)
    training.add_outputs({"scores": model.outputs["scores"]})
    found = step(training)
    assert found.outputs == ("scores", "hidden")
    np.testing.assert_allclose(found["scores"].numpy(), before, rtol=1e-6)
    training.add_outputs(model.outputs, kept=False)
    assert step(training).outputs == ("hidden",)


def test_evaluation_and_prediction_have_them() -> None:
    training = trained(imported())
    assert step(training, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE)["scores"].shape == (ROWS, WORDS)
    assert {name: one.shape for name, one in sg.predict(training, {"x": X}).items()} == {
        "scores": (ROWS, WORDS),
        "hidden": (ROWS, 3),
    }


def test_metrics_read_them() -> None:
    training = trained(imported())
    history = sg.fit(training, ({"x": X}, {"labels": Y}), batch_size=ROWS, metrics=["accuracy"], progress="quiet")
    assert 0 <= history["accuracy"][-1] <= 1
    assert step(training)["scores"].shape == (ROWS, WORDS)


def test_memory_for_them_is_refused_with_the_fix() -> None:
    training = trained(imported())
    with pytest.raises(sg.DataError, match=r"does not keep an output of this size unasked(.|\n)*add_outputs"):
        step(training, outputs_data={"scores": np.empty((ROWS, WORDS), np.float32)})


def test_the_plan_has_no_room_for_them() -> None:
    torch.manual_seed(0)
    model = sg.from_torch(nn.Linear(5, 100_000), torch.zeros(2, 5))
    training = trained(model)
    dropping = training.memory_plan_for(ROWS).total
    training.add_outputs(model.outputs)
    assert training.memory_plan_for(ROWS).total > dropping + 0.9 * 4 * ROWS * 100_000


def test_a_loaded_graph_drops_them_too(tmp_path: Path) -> None:
    training = trained(imported())
    training.save(tmp_path / "model")
    again = sg.load(tmp_path / "model", sg.Device.cpu())
    found = step(again)
    assert found.outputs == ("hidden",)
    assert list(sg.predict(again, {"x": X})) == ["scores", "hidden"]


def test_an_output_that_somebody_asks_for_is_there_from_the_next_step_on() -> None:
    model = imported()
    training = trained(model)
    for _ in range(3):
        found = step(training)
    assert found.outputs == ("hidden",)
    training.add_outputs({"scores": model.outputs["scores"]})
    assert step(training)["scores"].shape == (ROWS, WORDS)
