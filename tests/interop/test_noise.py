"""Imported models that draw random numbers, in training and in inference: a variational autoencoder and the like."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import distributions, nn

import stepgraph as sg

Draw = Callable[[torch.Tensor], torch.Tensor]

DRAWS: dict[str, Draw] = {
    "randn_like": lambda x: x + torch.randn_like(x),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.size(0), 6, device=x.device, dtype=x.dtype),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "normal_": lambda x: x + torch.zeros_like(x).normal_(),
    "uniform_": lambda x: x + x.new_empty(x.shape).uniform_(-1, 1),
    "normal": lambda x: torch.normal(x, torch.ones_like(x)),
    "dropout in both modes": lambda x: F.dropout(x, 0.3),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "Normal": lambda x: distributions.Normal(x, torch.exp(x.clamp(-1, 1))).rsample(),
    "Bernoulli": lambda x: x * distributions.Bernoulli(logits=x).sample(),
}


class Noisy(nn.Module):
    """Draws between two layers, whatever its mode."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.enter, self.leave, self.draw = nn.Linear(4, 6), nn.Linear(6, 4), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.draw(self.enter(x)))


def model(draw: Draw) -> Noisy:
    torch.manual_seed(0)
    return Noisy(draw)


def results(draw: Draw, seed: int, calls: int = 2, **settings: Any) -> list[np.ndarray]:
    """What training steps that change nothing compute from the same data."""
    imported = sg.from_torch(model(draw), torch.zeros(4, 4), **settings)
    assert len(imported.rows) == (1 if settings else 3)
    training = imported.training(sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.0), sg.Tensor((sg.BATCH, 4)))
    sg.set_seed(seed)
    training.compile("cpu")
    x, y = torch.ones(64, 4), torch.zeros(64, 4)
    return [training.execute({"x": x}, {"labels": y})["output"] for _ in range(calls)]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("settings", [{}, {"whole": True}], ids=["divided", "whole"])
def test_every_step_draws_new_numbers_and_a_seed_repeats_them(name: str, settings: dict[str, Any]) -> None:
    first, second = results(DRAWS[name], 1, **settings)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(results(DRAWS[name], 1, **settings), [first, second])
    assert not np.array_equal(results(DRAWS[name], 2, 1, **settings)[0], first)


def test_inference_draws_new_numbers_in_every_call_and_a_new_graph_the_same_ones() -> None:
    imported = sg.from_torch(model(DRAWS["randn_like"]), torch.zeros(4, 4))
    found = []
    for _ in range(2):
        inference = sg.InferenceGraph([imported.graph])
        inference.add_inputs(imported.inputs)
        inference.compile("cpu")
        found.append([inference.execute({"x": torch.ones(4, 4)}).result.numpy().copy() for _ in range(2)])
    assert not np.array_equal(found[0][0], found[0][1])
    np.testing.assert_array_equal(found[0], found[1])


def test_a_model_that_draws_is_still_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sg.FullyConnectedLayer, "forward", lambda self, x, *, scope: x @ scope.array(self.weights).T)
    with pytest.raises(sg.StateError, match="differs from the model's") as raised:
        sg.from_torch(model(DRAWS["randn_like"]), torch.zeros(4, 4))
    assert "'enter'" in str(raised.value)


class Autoencoder(nn.Module):
    """A variational autoencoder with its own loss; it also returns the noise it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def given(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        again = self.decoder(mean + torch.exp(0.5 * log_variance) * noise)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.mse_loss(again, x) + 0.1 * divergence

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        noise = torch.randn_like(x[:, :4])
        return {"loss": self.given(x, noise), "noise": noise}


@pytest.mark.parametrize("settings", [{}, {"whole": True}], ids=["divided", "whole"])
def test_a_variational_autoencoder_trains_as_in_pytorch_with_the_same_noise(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    mine, theirs = Autoencoder(), Autoencoder()
    theirs.load_state_dict(mine.state_dict())
    imported = sg.from_torch(mine, torch.zeros(8, 6), **settings)
    training = imported.training(None, imported.optimizer(torch.optim.SGD(mine.parameters(), 0.1)))
    training.compile("cpu", deterministic=True)
    reference, drawn = torch.optim.SGD(theirs.parameters(), 0.1), []
    for _ in range(10):
        x = torch.randn(256, 6)
        step = training.execute({"x": x})
        drawn.append(torch.tensor(step["noise"]))
        loss = theirs.given(x, drawn[-1])
        reference.zero_grad()
        loss.backward()
        reference.step()
        assert step.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    noise = torch.cat(drawn)  # 10,240 numbers
    assert abs(float(noise.mean())) < 0.05 and float(noise.std()) == pytest.approx(1, abs=0.05)


def test_shards_draw_apart() -> None:
    """The rows of one shard are not those of another, and a seed decides all of them."""
    found = []
    for _ in range(2):
        imported = sg.from_torch(model(DRAWS["randn_like"]), torch.zeros(4, 4))
        loss = sg.LossLayer.mean_squared_error()
        training = imported.training(loss, sg.SGDOptimizer(0.0), sg.Tensor((sg.BATCH, 4)))
        sg.set_seed(3)
        training.compile("cpu", parallel=sg.Parallel(shards=2))
        found.append(training.execute({"x": torch.ones(8, 4)}, {"labels": torch.zeros(8, 4)})["output"])
    np.testing.assert_array_equal(*found)
    first, second = np.split(np.asarray(found[0]), 2)
    assert not np.array_equal(first, second)


class Reconstruction(nn.Module):
    """An autoencoder of images, whose loss accepts pixels from 0 to 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(torch.sigmoid(self.dense(x)), x)


def test_a_model_that_takes_only_probabilities_is_compared_on_such_numbers() -> None:
    imported = sg.from_torch(Reconstruction(), torch.zeros(8, 4))
    training = imported.training(None, sg.SGDOptimizer(0.1))
    training.compile("cpu")
    assert float(training.execute({"x": torch.rand(8, 4)}).loss) > 0  # type: ignore[arg-type]
