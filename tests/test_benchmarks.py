"""What is compared is the same work: each model, made small, has the same first losses in every library."""

import importlib.util
from functools import cache
from typing import Any

import numpy as np
import pytest

from benchmarks.in_pytorch import ChannelsLast, Eager
from benchmarks.in_stepgraph import Stepgraph
from benchmarks.models import MODELS, SMALL

COMPILED_LONG = ("resnet18", "transformer", "separable", "dense", "unet", "bilstm", "encoder")
SLOW_IN_JAX = dict.fromkeys(COMPILED_LONG, pytest.mark.deep)


def first_losses(peer: Any) -> list[float]:
    losses = []
    for _ in range(3):
        peer.step()
        losses.append(peer.loss)
    return losses


@cache
def our_losses(name: str) -> list[float]:
    return first_losses(Stepgraph(SMALL[name], "cpu", dropout=False))


@pytest.mark.parametrize("name", SMALL)
def test_a_model_is_the_same_in_pytorch(name: str) -> None:
    losses = our_losses(name)
    assert losses == pytest.approx(first_losses(Eager(SMALL[name], "cpu", dropout=False)), rel=1e-4)
    assert losses[2] < losses[0]  # it trains


@pytest.mark.parametrize("name", [name for name in SMALL if SMALL[name].has_images])
def test_a_model_is_the_same_with_channels_last(name: str) -> None:
    assert first_losses(ChannelsLast(SMALL[name], "cpu", dropout=False)) == pytest.approx(our_losses(name), rel=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="JAX and optax are not installed")
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW_IN_JAX.get(name, ())) for name in SMALL])
def test_a_model_is_the_same_in_jax(name: str) -> None:
    from benchmarks.in_jax import Jax

    assert first_losses(Jax(SMALL[name], "cpu", dropout=False)) == pytest.approx(our_losses(name), rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_a_small_twin_and_a_batch_for_each_device(name: str) -> None:
    model, small = MODELS[name], SMALL[name]
    assert model.on("cpu").batch_size == model.batch_size and model.on("cuda").batch_size == model.cuda_batch
    assert model.of_batch(5).batch()[0].shape == (5, *model.inputs[1:])
    assert len(model.inputs) == len(small.inputs) and len(small.batch()[1]) == small.label_count
    starts = [model.parameters() for _ in range(2)]
    assert all(np.array_equal(value, starts[1][key]) for key, value in starts[0].items())


def test_the_standing_set_has_the_sizes_it_is_known_for() -> None:
    counts = {name: MODELS[name].parameter_count for name in ("mlp", "resnet18", "lstm")}
    assert counts == {"mlp": 669_706, "resnet18": 11_173_962, "lstm": 4 * 256 * (64 + 256 + 1) + 2_570}
