"""The results of operators on arrays without memory, which PyTorch is asked for once if arguments are alike.

A result without memory depends only on the operator, its settings and the layouts of the arrays that it reads. A
network repeats its blocks, so most results are like an earlier one, in other memory. To ask PyTorch takes ten times as
long as to repeat what it has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from stepgraph.system import torch_private

NAMESPACES = ("aten", "prims", "stepgraph")  # operators of others may depend on anything
_VARYING = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
SIMPLE = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Known:
    """The results that are known for arrays of one mode, as layouts: it keeps neither arrays nor the mode alive."""

    def __init__(self, mode: Any) -> None:
        self._mode = ref(mode)
        self._known: dict[Any, _Form | None] = {}

    @staticmethod
    def of(mode: Any) -> Known:
        """What is known for the arrays of a mode, as long as the mode lives."""
        found = _of_modes.get(mode)
        return _of_modes.setdefault(mode, Known(mode)) if found is None else found

    def result(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operator, or any other function, returns for arrays without memory."""
        given = *args, *kwargs.values()
        asked = _question(function, kwargs, given)
        form = self._known.get(asked)
        if form is not None:
            return form.repeat(self._mode(), given)
        with self._mode():  # type: ignore[union-attr]
            result = function(*args, **kwargs)
        if asked is not None and asked not in self._known:
            self._known[asked] = _form(result, given, self._mode())
        return result


_of_modes: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()


class _Array(NamedTuple):
    """An array among the results of an operator, without its memory."""

    layout: torch_private.Layout
    viewed: int | None  # the place of the argument whose memory it has


class _Form(NamedTuple):
    """A result with `_Array`s in the places of arrays."""

    result: Any

    def repeat(self, mode: Any, given: Sequence[Any]) -> Any:
        """New arrays like those of the result, in new memory or that of these arguments."""
        sources = list(_arrays(given))

        def another(one: _Array) -> torch.Tensor:
            storage = None if one.viewed is None else sources[one.viewed].untyped_storage()
            return torch_private.laid_out(one.layout, mode, storage)

        return mapped(another, _Array, self.result)


def mapped(function: Callable[[Any], Any], kind: type, value: Any) -> Any:
    """A value, or several, with a function applied to those of a kind."""
    if isinstance(value, kind):
        return function(value)
    return type(value)(mapped(function, kind, one) for one in value) if isinstance(value, list | tuple) else value


@cache
def _depends_on_layouts(operator: torch_private.OpOverload) -> bool:
    """Whether what an operator returns depends on nothing but layouts, as far as we know; no change of an argument."""
    schema = torch_private.schema(operator)
    changes = schema.is_mutable and schema.returns
    return operator.namespace in NAMESPACES and not changes and _VARYING.isdisjoint(operator.tags)


def _question(function: Any, kwargs: Mapping[str, Any], given: Sequence[Any]) -> Any:
    """All that a result depends on; None if that cannot be compared, or if more decides."""
    if not isinstance(function, torch_private.OpOverload) or not _depends_on_layouts(function):
        return None
    kinds = _kind(given)
    settings = torch.get_default_dtype(), torch.is_inference_mode_enabled()  # a default device becomes an argument
    return None if kinds is None else (function, *settings, *kwargs, kinds)


def _kind(argument: Any) -> Any:
    """What a result's layout can depend on in an argument: not the numbers in arrays. 1, 1.0 and True are different.

    None for what cannot be compared, such as an array of another kind.
    """
    if isinstance(argument, torch.Tensor):
        return torch_private.layout(argument) if is_plain(argument) else None
    if isinstance(argument, list | tuple):
        kinds = tuple(map(_kind, argument))
        return None if None in kinds else kinds
    return (type(argument), argument) if isinstance(argument, SIMPLE) else None


def _form(result: Any, given: Sequence[Any], mode: Any) -> _Form | None:
    """What is known about a result: how to repeat it for arguments like these.

    None if that cannot be known: arrays of another kind, or that share memory with several others, and numbers, on
    which settings of the process may decide.
    """
    arrays, sources = list(_arrays([result])), list(_arrays(given))
    if result is not None and not (arrays and all(map(is_plain, arrays))):
        return None
    read, made = list(map(_memory, sources)), list(map(_memory, arrays))
    if any(read.count(one) > 1 or (one not in read and made.count(one) > 1) for one in made):
        return None

    def described(one: torch.Tensor) -> _Array:
        return _Array(torch_private.layout(one), read.index(_memory(one)) if _memory(one) in read else None)

    found = _Form(mapped(described, torch.Tensor, result))
    is_new = not any(one is source for one in arrays for source in sources)
    return found if is_new and all(map(_are_alike, arrays, _arrays([found.repeat(mode, given)]))) else None


def _arrays(arguments: Any) -> Iterator[torch.Tensor]:
    """The arrays among the arguments of an operator, in order."""
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _arrays(one)


def is_plain(array: torch.Tensor) -> bool:
    """Whether an array has no memory, but a layout with strides."""
    return isinstance(array, torch_private.FakeTensor) and array.layout is torch.strided


def _memory(array: torch.Tensor) -> int:
    return torch_private.identity(array.untyped_storage())


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    sizes = {array.untyped_storage().nbytes() for array in (one, other)}
    return torch_private.layout(one) == torch_private.layout(other) and len(sizes) == 1
