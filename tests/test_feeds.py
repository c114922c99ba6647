"""The arrays of one call: what the last call has shown saves work, and never changes what is read."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.step import value
from stepgraph.errors import DataTypeError
from stepgraph.runtime.feeds import Feeds, Usual


def test_every_reader_gets_the_order_of_channels_that_it_asks_for() -> None:
    x, cpu = sg.Tensor((2, 3, 4, 4)), sg.Device.cpu()
    feeds = Feeds(inputs={"x": x}, tensors=(x,))
    image = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    images = frozenset({x})
    for _ in range(2):
        (as_given,) = feeds.arrays({x: image}, 2, cpu, channels_last=images).values()
        assert as_given is image
        found = feeds.arrays({x: image}, 2, cpu)
        assert found[value(x)].is_contiguous() and found[value(x)].equal(image)


def test_arrays_like_those_of_the_last_call_are_read_as_they_are() -> None:
    x, cpu = sg.Tensor((2, 3)), sg.Device.cpu()
    feeds = Feeds(inputs={"x": x}, tensors=(x,))
    for _ in range(3):
        given = torch.rand(2, 3)
        assert feeds.arrays({x: given}, 2, cpu)[value(x)] is given
    turned = torch.rand(3, 2).T
    found = feeds.arrays({x: turned}, 2, cpu)[value(x)]
    assert found.is_contiguous() and found.equal(turned)
    with pytest.raises(DataTypeError, match="float64"):
        feeds.arrays({x: torch.rand(2, 3, dtype=torch.float64)}, 2, cpu)


def test_data_is_compared_with_that_of_the_last_call() -> None:
    x, y = sg.Tensor((2, 3)), sg.Tensor((2,), "int64")
    feeds = Feeds(inputs={"x": x}, labels={"y": y}, tensors=(y, x))
    data = ({"x": torch.rand(2, 3)}, {"y": torch.zeros(2, dtype=torch.int64)}, None)
    named = feeds.named(*data)
    usual = Usual.of(data, named, feeds.arrays(named, 2, sg.Device.cpu()), 2)
    assert usual is not None
    alike = ({"x": torch.rand(2, 3)}, {"y": torch.ones(2, dtype=torch.int64)}, {})
    assert usual.arrays(alike) == {value(x): alike[0]["x"], value(y): alike[1]["y"]}
    inputs, labels, _ = alike
    others = [
        (None, labels, None),
        (inputs, None, None),
        (inputs, {"y": labels["y"], "w": inputs["x"]}, None),
        (labels, inputs, None),
        (inputs, labels, {"w": inputs["x"]}),
        ([inputs["x"]], labels, None),
        (OrderedDict(inputs), labels, None),
        ({"x": inputs["x"].numpy()}, labels, None),
        ({"x": inputs["x"].double()}, labels, None),
        ({"x": torch.rand(3, 2).T}, labels, None),
        ({"x": torch.rand(3, 3)}, labels, None),
        ({"x": torch.rand(2, 3, requires_grad=True)}, labels, None),
        ({"x": torch.nn.Parameter(torch.rand(2, 3), requires_grad=False)}, labels, None),
        ({"x": torch.rand(2, 3, dtype=torch.complex64).imag}, labels, None),
    ]
    for one in others:
        assert usual.arrays(one) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("x", [torch.rand(4, 3), torch.rand(2, 3, requires_grad=True), torch.rand(3, 2).T])
def test_data_that_was_not_read_as_it_is_is_compared_with_nothing(x: torch.Tensor) -> None:
    tensor = sg.Tensor((2, 3))
    feeds = Feeds(inputs={"x": tensor}, tensors=(tensor,))
    named = feeds.named({"x": x}, None, None)
    assert Usual.of(({"x": x}, None, None), named, feeds.arrays(named, 2, sg.Device.cpu()), 2) is None
