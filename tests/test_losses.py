"""Losses that a captured step writes by itself: each stays readable, however many come after it."""

import pytest
import torch

from stepgraph.runtime import loss_slots as losses
from stepgraph.runtime.loss_slots import Losses


def test_every_loss_stays_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "SLOTS", 3)
    written, kept = Losses(torch.empty(1), torch.device("cpu")), []
    for step in range(10):
        written.expect()
        written.capture(torch.tensor([float(step)]))  # what a replay does
        kept.append(written.latest())
    assert [one.array.item() for one in kept] == [float(step) for step in range(10)]


def test_places_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "SLOTS", 2)
    written = Losses(torch.empty(1), torch.device("cpu"))
    slots = written._slots
    for step in range(5):
        written.expect()
        written.capture(torch.tensor(float(step)))
        written.latest()
    assert slots.tolist() == [4.0, 3.0]
