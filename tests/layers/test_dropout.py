"""Dropout beyond the table: the mask by step, node and seed, the mean, refused settings."""

import math

import pytest
import torch

from stepgraph.errors import ArgumentError
from stepgraph.layers.dropout import DropoutLayer
from stepgraph.layers.layer import Scope

X = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)).abs() + 0.1  # no zeros of its own


def run(layer: DropoutLayer, *, seed: int = 5, step: int = 0, salt: int = 1, training: bool = True) -> torch.Tensor:
    scope = Scope({}, training=training, stream=torch.tensor([seed, step]), salt=salt)
    return layer.forward(X, scope=scope)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_kept_elements_are_scaled_and_the_rest_is_zero(rate: float) -> None:
    y = run(DropoutLayer(rate))
    kept = y != 0
    torch.testing.assert_close(y[kept], X[kept] / (1 - rate))
    sigma = math.sqrt(rate * (1 - rate) / X.numel())
    assert abs(kept.double().mean().item() - (1 - rate)) < 4 * sigma


def test_gradient_is_the_mask_of_the_forward_pass() -> None:
    x = X.clone().requires_grad_()
    y = DropoutLayer(0.3).forward(x, scope=Scope({}, training=True, stream=torch.tensor([5, 0]), salt=1))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, (y.detach() != 0) / 0.7)


def test_mask_repeats_for_one_step_and_differs_between_steps_nodes_and_seeds() -> None:
    layer = DropoutLayer(0.5, seed=3)
    base = run(layer)
    assert torch.equal(base, run(DropoutLayer(0.5, seed=3)))
    others = [run(layer, step=1), run(layer, salt=2), run(layer, seed=6), run(DropoutLayer(0.5, seed=4))]
    for other in others:
        both = ((base != 0) & (other != 0)).double().mean().item()
        assert both == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / X.numel()))


def test_inference_and_rate_zero_pass_the_source_on() -> None:
    assert torch.equal(run(DropoutLayer(0.5), training=False), X)
    assert torch.equal(run(DropoutLayer(0.0)), X)


@pytest.mark.parametrize("seed", [-1, 0, 2**31, 2**63, 10**30])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert 0.4 < (run(DropoutLayer(0.5, seed=seed)) != 0).double().mean().item() < 0.6


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_rate_outside_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ArgumentError, match=f"rate is {rate}"):
        DropoutLayer(rate)


@pytest.mark.parametrize("seed", [1.5, True, None])
def test_seed_that_is_no_whole_number_is_refused(seed: object) -> None:
    with pytest.raises(ArgumentError, match="not an integer"):
        DropoutLayer(0.5, seed=seed)  # type: ignore[arg-type]


def test_label_is_that_of_the_original() -> None:
    assert DropoutLayer(0.5).label == "Dropout"
    assert DropoutLayer(0.5, label="rest").label == "rest"
