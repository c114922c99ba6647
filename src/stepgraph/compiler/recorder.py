"""Records the operators that a function calls on arrays without memory: the graph of `make_fx` in half of the time.

`make_fx` also records open shapes, constants and operators that contain functions. What needs one of these raises
`Unsupported`, and the caller leaves it to `make_fx`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import traceback
from torch.utils.weak import WeakTensorKeyDictionary

from stepgraph.compiler.modules import Module
from stepgraph.compiler.program import set_fake, set_tag
from stepgraph.system import torch_private

_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
_OURS = ("aten", "prims", "stepgraph")
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
    """Adds a node for every operator that runs, with its result and the current tag.

    PyTorch is asked for a result only once for all arguments that are alike, which most layers of a model repeat.
    """

    supports_higher_order_operators = True  # to be asked about them

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        # It does not keep arrays alive: PyTorch copies a new array instead of returning it if somebody else holds it.
        self._nodes = WeakTensorKeyDictionary()
        self._known: dict[Any, Callable[..., Any]] = {}
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
        result = self._result(operator, args, kwargs)
        self._keep(node, result)
        return result

    def _result(self, operator: torch_private.OpOverload, args: Any, kwargs: Any) -> Any:
        """What an operator returns."""
        given = *args, *kwargs.values()
        asked = operator, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs, _kind(given)
        known = self._known.get(asked)
        if known is not None:
            return known(*args, **kwargs)
        result = operator(*args, **kwargs)
        self._known[asked] = (_repetition(result, given) if _depends_on_layouts(operator) else None) or operator
        return result

    def _argument(self, value: Any) -> Any:
        """An argument of an operator as an argument of its node."""
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self._argument, value))
        if isinstance(value, _PLAIN):
            return value
        raise Unsupported(value)

    def _keep(self, node: fx.Node, result: Any) -> None:
        """Notes an operator's result, and makes nodes for the elements of several."""
        if tag := traceback.get_current_meta().get("custom"):
            set_tag(node, dict(tag))
        if isinstance(result, torch.Tensor):
            if not isinstance(result, torch_private.FakeTensor):
                raise Unsupported(result)
            self._nodes[result] = node
            set_fake(node, torch_private.snapshot(result))
        elif isinstance(result, list | tuple):
            set_fake(node, _mapped(torch_private.snapshot, torch.Tensor, result))
            for index, one in enumerate(result):
                self._keep(self.graph.create_node("call_function", getitem, (node, index), name="getitem"), one)
        elif not isinstance(result, _PLAIN):
            raise Unsupported(result)


class _Array(NamedTuple):
    """An array among the results of an operator, without its memory."""

    layout: torch_private.Layout
    viewed: int | None  # the place of the argument whose memory it has


def _repetition(result: Any, given: Any) -> Callable[..., Any] | None:
    """A function that returns new arrays like a result, for arguments like those given.

    None if that cannot be known: arrays of another kind, or that share memory with several others, and numbers, on
    which settings of the process may decide.
    """
    arrays, sources = list(_arrays([result])), list(_arrays(given))
    if result is not None and not (arrays and all(map(_is_plain, arrays))):
        return None
    read, made = list(map(_memory, sources)), list(map(_memory, arrays))
    if any(read.count(one) > 1 or (one not in read and made.count(one) > 1) for one in made):
        return None

    def described(one: torch.Tensor) -> _Array:
        return _Array(torch_private.layout(one), read.index(_memory(one)) if _memory(one) in read else None)

    found = _mapped(described, torch.Tensor, result)

    def repeat(*args: Any, **kwargs: Any) -> Any:
        sources = list(_arrays((*args, *kwargs.values())))

        def another(one: _Array) -> torch.Tensor:
            storage = None if one.viewed is None else sources[one.viewed].untyped_storage()
            return torch_private.laid_out(one.layout, storage)

        return _mapped(another, _Array, found)

    is_new = not any(one is source for one in arrays for source in sources)
    return repeat if is_new and all(map(_are_alike, arrays, _arrays([repeat(*given)]))) else None


def _mapped(function: Callable[[Any], Any], kind: type, value: Any) -> Any:
    """A value, or several, with a function applied to those of a kind."""
    if isinstance(value, kind):
        return function(value)
    return type(value)(_mapped(function, kind, one) for one in value) if isinstance(value, list | tuple) else value


@cache
def _name(operator: torch_private.OpOverload) -> str:
    return torch_private.node_name(fx.Graph(), operator)


def _depends_on_layouts(operator: torch_private.OpOverload) -> bool:
    """Whether what an operator returns depends on nothing but layouts, as far as we know; no change of an argument."""
    schema = torch_private.schema(operator)
    return operator.namespace in _OURS and not (schema.is_mutable and schema.returns)


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


def _arrays(arguments: Any) -> Iterator[torch.Tensor]:
    """The arrays among the arguments of an operator, in order."""
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _arrays(one)


def _is_plain(array: torch.Tensor) -> bool:
    return isinstance(array, torch_private.FakeTensor) and array.layout is torch.strided


def _memory(array: torch.Tensor) -> int:
    return torch_private.identity(array.untyped_storage())


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    sizes = {array.untyped_storage().nbytes() for array in (one, other)}
    return torch_private.layout(one) == torch_private.layout(other) and len(sizes) == 1


def _kind(argument: Any) -> Any:
    """What a result's layout can depend on in an argument: not the numbers in arrays. 1, 1.0 and True are different."""
    if isinstance(argument, torch.Tensor):
        if not _is_plain(argument):
            raise Unsupported(argument)
        return torch_private.layout(argument)
    if isinstance(argument, list | tuple):
        return type(argument), *map(_kind, argument)
    return type(argument), argument
