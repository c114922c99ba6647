"""Records the operators that a function calls on arrays without memory: the graph of `make_fx` in half of the time.

`make_fx` also records open shapes, constants and operators that contain functions. What needs one of these raises
`Unsupported`, and the caller leaves it to `make_fx`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx import traceback
from torch.utils.weak import WeakTensorKeyDictionary

from stepgraph.compiler.alike import SIMPLE, Known, is_plain, mapped
from stepgraph.compiler.modules import Module
from stepgraph.compiler.program import set_fake, set_tag
from stepgraph.system import torch_private

_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)


class Unsupported(BaseException):
    """Only `make_fx` can record a function; no layer may catch this and describe it as its own failure."""


def record(function: Callable[..., Sequence[torch.Tensor]], arrays: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The operators of a function of arrays without memory, as a graph with one placeholder for each array."""
    recorder = _Recorder(arrays)
    with arrays[0].fake_mode, recorder:  # type: ignore[attr-defined]
        results = function(*arrays)
    recorder.graph.output([recorder.node(one) for one in results])
    return Module(torch.nn.Module(), recorder.graph)


class _Recorder(torch_private.DispatchMode):
    """Adds a node for every operator that runs, with its result and the current tag."""

    supports_higher_order_operators = True  # to be asked about them

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        # It does not keep arrays alive: PyTorch copies a new array instead of returning it if somebody else holds it.
        self._nodes = WeakTensorKeyDictionary()
        self._known = Known.of(arrays[0].fake_mode)  # type: ignore[attr-defined]
        for index, array in enumerate(arrays):
            self._keep(self.graph.placeholder(f"arg{index}_1"), array)

    def node(self, array: torch.Tensor) -> fx.Node:
        """The operator whose result an array is, or the last that wrote to it."""
        found: fx.Node | None = self._nodes.get(array)
        if found is None:
            raise Unsupported("an array is not the result of a recorded operator")
        return found

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator is torch_private.device_of and isinstance(args[0], torch_private.FakeTensor):
            return args[0].fake_device
        if not isinstance(operator, torch_private.OpOverload) or _reads_numbers(operator):
            raise Unsupported(operator)
        if torch_private.is_composed(operator, _device(args)):
            with self:
                return operator.decompose(*args, **kwargs)
        given = self._argument(args), {key: self._argument(one) for key, one in kwargs.items()}
        node = self.graph.create_node("call_function", operator, *given, name=_name(operator))
        try:
            result = self._known.result(operator, args, kwargs)
        except Exception:  # a layer may try another operator
            self.graph.erase_node(node)
            raise
        self._keep(node, result)
        return result

    def _argument(self, value: Any) -> Any:
        """An argument of an operator as an argument of its node."""
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self._argument, value))
        if isinstance(value, SIMPLE):
            return value
        raise Unsupported(value)

    def _keep(self, node: fx.Node, result: Any) -> None:
        """Notes an operator's result, and makes nodes for the elements of several."""
        if tag := traceback.get_current_meta().get("custom"):
            set_tag(node, dict(tag))
        if isinstance(result, torch.Tensor):
            if not is_plain(result):
                raise Unsupported(result)
            self._nodes[result] = node
            set_fake(node, torch_private.snapshot(result))
        elif isinstance(result, list | tuple):
            set_fake(node, mapped(torch_private.snapshot, torch.Tensor, result))
            for index, one in enumerate(result):
                self._keep(self.graph.create_node("call_function", getitem, (node, index), name="getitem"), one)
        elif not isinstance(result, SIMPLE):
            raise Unsupported(result)


@cache
def _name(operator: torch_private.OpOverload) -> str:
    return torch_private.node_name(fx.Graph(), operator)


@cache
def _reads_numbers(operator: torch_private.OpOverload) -> bool:
    """Whether a recording depends on the numbers in arrays: an operator returns one of them, or reads a constant."""
    return torch.Tag.data_dependent_output in operator.tags or operator in _CONSTANTS


def _device(arguments: Any) -> str | None:
    """The device of the first array among the arguments of an operator; None if there is none."""
    for one in arguments:
        if isinstance(one, torch_private.FakeTensor):
            return one.fake_device.type
        if isinstance(one, list | tuple) and (found := _device(one)) is not None:
            return found
    return None
