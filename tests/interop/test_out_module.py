"""`to_torch`: a graph as a PyTorch module with the same numbers, names and uses."""

import copy
from typing import Any

import pytest
import torch

import stepgraph as sg
from stepgraph.interop.module import module_of
from tests.interop.cases import ALL, prediction, wire
from tests.layers.case import Case


@pytest.mark.parametrize("case", [pytest.param(one, id=one.name) for one in ALL])
def test_every_layer_computes_the_same(case: Case) -> None:
    graph = sg.InferenceGraph()
    one = wire(graph, case, "layer")
    module = module_of(prediction(graph, [one]))
    found = module(*one.data.values())
    for ours, wanted in zip(found if isinstance(found, tuple) else (found,), one.expected(), strict=True):
        assert ours.shape == wanted.shape
        torch.testing.assert_close(ours.double(), wanted.double(), rtol=2e-4, atol=2e-5, equal_nan=True)
