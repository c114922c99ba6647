"""Models of PyTorch, imported: the same losses and tensors as PyTorch's own loop."""

from __future__ import annotations

import pytest

from tests.interop.models import CASES
from tests.interop.training import OPTIMIZERS, compared

CLOSE = 1e-6  # of the largest element; products of the same numbers differ by where in memory they are


@pytest.mark.parametrize("name", ["unet", "generator", "discriminator"])
def test_a_model_trains_like_pytorch(name: str) -> None:
    losses, tensors, worst = compared(CASES[name], "sgd", steps=3)
    assert losses <= CLOSE and tensors <= CLOSE, worst


@pytest.mark.deep
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_are_pytorchs(name: str, optimizer: str) -> None:
    losses, tensors, worst = compared(CASES[name], optimizer, steps=20)
    assert losses <= CLOSE and tensors <= CLOSE, (losses, tensors, worst)


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{"native": False}, {"whole": True}, {"depth": 1}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "resnet", "encoder"])
def test_however_it_is_divided(name: str, settings: dict[str, object]) -> None:
    losses, tensors, worst = compared(CASES[name], "sgd", steps=3, **settings)
    assert losses <= CLOSE and tensors <= CLOSE, worst
