"""Models that compute their own loss, against the usual loop of PyTorch."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph as sg

STEPS, ROWS = 5, 6


class Model(nn.Module):
    """Returns its loss with its scores, as models of transformers do."""

    def __init__(self, how: str = "mean") -> None:
        super().__init__()
        self.body, self.head, self.how = nn.Linear(4, 8), nn.Linear(8, 3), how

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(torch.tanh(self.body(features)))
        penalty = scores.square().sum(1)
        loss = F.cross_entropy(scores, labels, reduction=self.how) + 0.1 * getattr(penalty, self.how)()
        return {"loss": loss, "logits": scores}


def model(how: str = "mean") -> Model:
    torch.manual_seed(0)
    return Model(how)


def batches(count: int = STEPS, rows: int = ROWS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "features": torch.randn(rows, 4, generator=generator),
            "labels": torch.randint(3, (rows,), generator=generator),
        }
        for _ in range(count)
    ]


def in_pytorch(one: nn.Module, data: list[dict[str, torch.Tensor]], rate: float = 0.1) -> list[float]:
    optimizer, losses = torch.optim.SGD(one.parameters(), rate), []
    for batch in data:
        optimizer.zero_grad()
        loss = one(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(one: nn.Module, loss: str | None = None, **settings: Any) -> sg.TrainingGraph:
    imported = sg.from_torch(one, batches()[0])
    training = imported.training(loss, sg.SGDOptimizer(0.1), **settings)
    training.compile("cpu", deterministic=True)
    return training


def close(one: nn.Module, other: nn.Module) -> None:
    for name, value in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_it_trains_as_in_pytorch(how: str) -> None:
    mine, theirs = model(how), model(how)
    training = trained(mine, reduction_type=sg.ReductionType[how.upper()])
    losses = [training.execute(batch).loss for batch in batches()]
    np.testing.assert_allclose(losses, in_pytorch(theirs, batches()), rtol=1e-5)
    close(mine, theirs)


def test_other_outputs_and_names() -> None:
    training = trained(model(), "loss")
    assert list(training.inputs) == ["features", "labels"] and list(training.outputs) == ["logits"]
    assert training.execute(batches()[0])["logits"].shape == (ROWS, 3)


def test_inference_needs_no_labels() -> None:
    mine = model()
    training = trained(mine)
    features = batches()[0]["features"]
    found = training.inference().execute({"features": features})["logits"]
    torch.testing.assert_close(torch.as_tensor(found), mine(features, torch.zeros(ROWS, dtype=torch.int64))["logits"])


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_fit_accumulates_batches_and_reports_the_loss_of_all_rows(how: str) -> None:
    mine, theirs = model(how), model(how)
    training = trained(mine, reduction_type=sg.ReductionType[how.upper()])
    data = batches(1, 14)[0]
    arrays = {name: array.numpy() for name, array in data.items()}
    expected = in_pytorch(theirs, [data], 0.1)
    evaluated = sg.evaluate(training, arrays, batch_size=4)["loss"]
    history = sg.fit(training, arrays, epochs=1, batch_size=4, accumulate=4, shuffle=False, progress="quiet")
    assert [evaluated, history.losses[0]] == pytest.approx([expected[0]] * 2, rel=1e-5)
    close(mine, theirs)


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_shards_are_weighted_by_their_rows(how: str, caplog: pytest.LogCaptureFixture) -> None:
    mine, theirs = model(how), model(how)
    imported = sg.from_torch(mine, batches()[0])
    training = imported.training(None, sg.SGDOptimizer(0.1), reduction_type=sg.ReductionType[how.upper()])
    training.compile("cpu", parallel=sg.Parallel(shards=4))
    losses = [training.execute(batch).loss for batch in batches()]  # 6 rows: two shards have 2 of them
    np.testing.assert_allclose(losses, in_pytorch(theirs, batches()), rtol=1e-5)
    close(mine, theirs)
    assert "combines the rows" not in caplog.text


def test_a_file_keeps_it(tmp_path: Path) -> None:
    training = trained(model("sum"), reduction_type=sg.ReductionType.SUM)
    training.save(tmp_path / "model")
    loaded = sg.load(tmp_path / "model", "cpu")
    (loss,) = [node.layer for node in loaded.nodes if node.is_loss]
    assert loss.reduction_type is sg.ReductionType.SUM
    assert [loaded.execute(one).loss for one in batches()] == [training.execute(one).loss for one in batches()]


def test_any_graph_can_compute_its_loss() -> None:
    x = sg.Tensor((ROWS, 4), label="x")
    graph = sg.Graph()
    y = graph.dense(x, 3)
    graph.mean(graph.mean(y * y, 1), 0)
    training = sg.TrainingGraph([graph], sg.ComputedLossLayer(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x})
    training.compile("cpu")
    data = batches()[0]["features"].numpy()
    weights, biases = (one.numpy().copy() for one in graph.layers[0].parameters.values())
    first, second = (training.execute({"x": data}).loss for _ in range(2))
    assert second < first == pytest.approx(np.square(data @ weights.T + biases).mean(), rel=1e-5)


# ------------------------------------------------------------------------------------------------------- refusals


def test_metrics_are_refused_because_there_are_no_labels() -> None:
    data = {name: array.numpy() for name, array in batches()[0].items()}
    with pytest.raises(sg.StateError, match="no labels for metrics"):
        sg.fit(trained(model()), data, epochs=1, metrics=[sg.accuracy], progress="quiet")


def test_an_output_that_is_not_one_number() -> None:
    imported = sg.from_torch(model(), batches()[0])
    with pytest.raises(sg.ShapeError, match=r"the output 'logits' has shape \[BATCH, 3\], but a loss is one number"):
        imported.training("logits", sg.SGDOptimizer(0.1))
    with pytest.raises(sg.ShapeError, match="must be one number"):
        imported.graph.computed_loss(imported.outputs["logits"])
    with pytest.raises(sg.ArgumentError, match="cannot be reduced by"):
        sg.ComputedLossLayer(sg.ReductionType.NONE)


def test_names_that_do_not_exist() -> None:
    imported = sg.from_torch(model(), batches()[0])
    with pytest.raises(sg.UnknownNameError, match="no output 'los'"):
        imported.training("los", sg.SGDOptimizer(0.1))
    plain = sg.from_torch(nn.LSTM(3, 4), torch.zeros(2, 5, 3))
    with pytest.raises(sg.UnknownNameError, match="none of the model's outputs is called 'loss'"):
        plain.training(None, sg.SGDOptimizer(0.1))


def test_labels_belong_to_the_inputs() -> None:
    imported = sg.from_torch(model(), batches()[0])
    with pytest.raises(sg.ArgumentError, match="the model computes its loss 'loss' from its inputs"):
        imported.training(None, sg.SGDOptimizer(0.1), sg.Tensor((sg.BATCH,), "int64"))
    with pytest.raises(sg.DataTypeError, match="labels is NoneType"):
        imported.training(sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))


@pytest.mark.parametrize("cause", ["frozen", "detached"])
def test_a_loss_that_trains_nothing(cause: str) -> None:
    mine = model().requires_grad_(cause != "frozen")
    if cause == "detached":
        forward = mine.forward

        def detached(features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            found = forward(features, labels)
            return {**found, "loss": found["loss"].detach()}

        mine.forward = detached  # type: ignore[method-assign]
    imported = sg.from_torch(mine, batches()[0])
    with pytest.raises(sg.StateError, match="the output 'loss' depends on no parameter that is trained"):
        imported.training(None, sg.SGDOptimizer(0.1))


def test_a_language_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=20, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    mine = transformers.GPT2LMHeadModel(config)
    theirs = copy.deepcopy(mine).train()
    ids = torch.randint(20, (4, 6))
    labels = ids.clone()
    labels[:, 3] = -100
    training = sg.from_torch(mine, {"input_ids": ids, "labels": labels}).training(None, sg.SGDOptimizer(0.1))
    training.compile("cpu", deterministic=True)
    data = [{"input_ids": ids, "labels": labels}] * 3
    losses = [training.execute(batch).loss for batch in data]
    np.testing.assert_allclose(losses, in_pytorch(theirs, data), rtol=1e-4)
