"""Selection, gather and scatter: data types, repeated indices, refusals in constructors."""

import pytest
import torch

from stepgraph.errors import ArgumentError
from stepgraph.layers.indexing import GatherLayer, ScatterLayer, SelectionLayer
from stepgraph.layers.layer import Scope
from stepgraph.types import ReductionType

SCOPE = Scope({})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_index_types_give_the_same_gradient(dtype: torch.dtype) -> None:
    x = torch.arange(5.0, requires_grad=True)
    result = GatherLayer(0).forward(x, torch.tensor([3, 3, 1], dtype=dtype), scope=SCOPE)
    assert result.tolist() == [3, 3, 1]
    assert torch.autograd.grad(result.sum(), x)[0].tolist() == [0, 1, 0, 2, 0]


def test_whole_numbers_and_booleans_can_be_chosen() -> None:
    numbers = torch.tensor([[1, 2], [3, 4]])
    assert GatherLayer(1).forward(numbers, torch.tensor([1]), scope=SCOPE).tolist() == [[2], [4]]
    condition = torch.tensor([True, False])
    assert SelectionLayer().forward(condition, numbers, -numbers, scope=SCOPE).tolist() == [[1, 2], [-3, -4]]


def test_index_outside_of_the_source_is_an_error() -> None:
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        GatherLayer(0).forward(torch.zeros(3), torch.tensor([3]), scope=SCOPE)


def test_scatter_leaves_its_source_alone() -> None:
    copy_from = torch.zeros(3)
    result = ScatterLayer(0, ReductionType.SUM).forward(torch.ones(2), torch.tensor([1, 1]), copy_from, scope=SCOPE)
    assert result.tolist() == [0, 2, 0]
    assert copy_from.tolist() == [0, 0, 0]


def test_overwritten_elements_get_no_gradient() -> None:
    updates, copy_from = torch.ones(1, requires_grad=True), torch.zeros(3, requires_grad=True)
    result = ScatterLayer(0).forward(updates, torch.tensor([1]), copy_from, scope=SCOPE)
    by_updates, by_copy = torch.autograd.grad(result.sum(), (updates, copy_from))
    assert by_updates.tolist() == [1]
    assert by_copy.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "kind", [kind for kind in ReductionType if kind not in (ReductionType.NONE, ReductionType.SUM)]
)
def test_scatter_refuses_other_reductions(kind: ReductionType) -> None:
    with pytest.raises(ArgumentError, match=f"reduction_type is {kind.name}"):
        ScatterLayer(0, kind)


def test_refused_dimensions() -> None:
    for make in (GatherLayer, ScatterLayer):
        with pytest.raises(ArgumentError, match="dimension is -1"):
            make(-1)


def test_labels() -> None:
    assert [layer.label for layer in (SelectionLayer(), GatherLayer(0), ScatterLayer(0))] == [
        "Selection",
        "Gather",
        "Scatter",
    ]
    assert ScatterLayer(0).reduction_type is ReductionType.NONE
