"""What is compared is the same work: each model, made small, has the same first losses in every library.

And it is the same as without all that makes it fast: 20 losses in a row are those of PyTorch's own kernels.
"""

import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from benchmarks.in_pytorch import ChannelsLast, Eager
from benchmarks.in_stepgraph import Stepgraph
from benchmarks.models import MODELS, SMALL

SLOW_IN_JAX = {name: pytest.mark.deep for name in ("resnet18", "transformer")}  # it compiles for long


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


class Plain(Stepgraph):
    """The reference: PyTorch's own kernels, nothing chosen or fused."""

    options: Mapping[str, sg.GraphCompilationOptions] = {"cpu": sg.GraphCompilationOptions.DETERMINISTIC}


def curve(step: Stepgraph) -> list[float]:
    """The losses of 20 steps."""
    losses = []
    for _ in range(20):
        step.step()
        losses.append(step.loss)
    return losses


@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_learns_as_its_reference(name: str) -> None:
    ours, reference = (curve(made(SMALL[name], "cpu", dropout=False)) for made in (Stepgraph, Plain))
    assert ours == pytest.approx(reference, rel=1e-4)


# Rounding grows from step to step: after 20, two orders of images in PyTorch's own kernels are 5e-5 apart.
AT_THE_LIMIT = {"resnet18": pytest.mark.xfail(reason="by the kernels chosen, its last losses are just beyond")}


@pytest.mark.deep
@pytest.mark.parametrize("name", [pytest.param(name, marks=AT_THE_LIMIT.get(name, ())) for name in MODELS])
def test_a_model_learns_as_its_reference(name: str) -> None:
    ours, reference = (curve(made(MODELS[name], "cpu", dropout=False)) for made in (Stepgraph, Plain))
    assert ours == pytest.approx(reference, rel=1e-4)


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
