"""Tests of our own kernels: which of them are launched or compiled, and steps that have them."""

from typing import Any

import pytest

import stepgraph as sg


def noted(monkeypatch: pytest.MonkeyPatch, tiles: Any) -> list[str]:
    """The names of kernels of a module in `compiler/tuned`, from now on."""
    names: list[str] = []
    launch = tiles.launch

    def noting(kernel: Any, *arguments: Any, **settings: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *arguments, **settings)

    monkeypatch.setattr(tiles, "launch", noting)
    return names


def losses(training: sg.TrainingGraph, *data: dict[str, Any], phases: bool = False) -> list[float]:
    """Of 20 steps with the same inputs and labels, whole or phase by phase."""
    assert training.device is not None
    found = []
    for _ in range(20):
        if phases:
            training.bind_and_write_data(data[0] | data[1], training.inputs | training.loss_labels, training.device)
            found.append(float(training.execute_forward().loss))
            training.execute_gradient()
            training.execute_optimizer_update()
        else:
            found.append(float(training.execute(*data).loss))
    return found
