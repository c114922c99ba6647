"""The arrays of one call: what the last call has shown saves work, and never changes what is read."""

from __future__ import annotations

import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.step import value
from stepgraph.errors import DataTypeError
from stepgraph.runtime.feeds import Feeds


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
