"""Glue: the functions that a PyTorch model calls between its modules, as one layer.

A `Program` is a list of calls of PyTorch's functions. Values have numbers: first the layer's sources, then its own
tensors, then what the calls return. Everything in it is a plain value, so a glue layer is saved like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from stepgraph.errors import ArgumentError
from stepgraph.layers.layer import Layer, Scope, constant
from stepgraph.layers.torch_answers import Answers
from stepgraph.layers.torch_functions import function
from stepgraph.random import Drawn, Refusals
from stepgraph.system import torch_private
from stepgraph.tensors.extents import BATCH, PROBES, BatchExtent, joined
from stepgraph.tensors.tensor import Tensor, TensorDescriptor

_Found = TypeVar("_Found")
_NAMED = (torch.dtype, torch.memory_format, torch.layout)
_FILLS = {"masked_fill", "masked_fill_", "where", "fill_", "full_like", "new_full", "index_fill", "index_fill_", "pad"}
OFF = "off"  # where a model switches autocast off


class Origin(IntEnum):
    """What a value depends on: the largest of what it is computed from."""

    INPUT = 0  # inputs and buffers alone
    PARAMETER = 1  # parameters, too
    LAYER = 2  # results of layers, too


@dataclass(frozen=True)
class Value:
    """An argument that is computed: the value with this number."""

    number: int


@dataclass(frozen=True)
class Slice:
    """An argument that is a slice."""

    start: Any = None
    stop: Any = None
    step: Any = None


@dataclass(frozen=True)
class Named:
    """An argument that is one of PyTorch's constants: a type, a memory format or a layout."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.name, None), _NAMED):
            raise ArgumentError("Named", f"{self.name!r} is not a type or format of PyTorch", fix="pass a type's name")


@dataclass(frozen=True)
class Place:
    """An argument that is the device of the call."""


@dataclass(frozen=True)
class Rest:
    """An argument that is `...`."""


@dataclass(frozen=True)
class Call:
    """One call of a function.

    Args:
        function: its name, as in `torch_functions`.
        arguments: positional arguments; values, slices and so on stand for themselves in any nesting.
        settings: keyword arguments.
        results: the numbers of the arrays it returns.
        changed: numbers of arrays that it changes in place, each with its new number.
        differentiable: False inside `no_grad`.
        autocast: the type of the surrounding autocast, `OFF` where it is switched off; None outside of one.
    """

    function: str
    arguments: tuple[Any, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[int, ...] = ()
    changed: tuple[tuple[int, int], ...] = ()
    differentiable: bool = True
    autocast: str | None = None

    @property
    def name(self) -> str:
        """The function's name alone."""
        return self.function.rpartition(".")[2]

    @property
    def read(self) -> set[int]:
        """The numbers of the values that it reads."""
        return {one.number for one in found_in((self.arguments, dict(self.settings)), Value)}

    def __post_init__(self) -> None:
        if function(self.function) is None:
            raise ArgumentError(
                "Call", f"'{self.function}' is not a function that a layer may call", fix="use one of PyTorch's"
            )


@dataclass(frozen=True)
class Program:
    """Calls in order.

    Args:
        calls: the calls.
        results: the numbers of what the layer returns.
        written: the sources that a call changes in place; it changes copies.
        scalars: the sources and tensors without dimensions, which a graph holds with one.
    """

    calls: tuple[Call, ...]
    results: tuple[int, ...]
    written: tuple[int, ...] = ()
    scalars: tuple[int, ...] = ()

    def origins(self, first: Sequence[Origin]) -> dict[int, Origin]:
        """What each value depends on, from what the sources and own tensors do."""
        found = dict(enumerate(first))
        for call in self.calls:
            origin = max((found[n] for n in call.read), default=Origin.INPUT)
            found.update(dict.fromkeys((*call.results, *(new for _, new in call.changed)), origin))
        return found

    def run(
        self, arrays: Sequence[torch.Tensor], rows: int, device: torch.device, mixed: Mixed | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The results for the arrays of the sources and own tensors."""
        values = {n: array.reshape(()) if n in self.scalars else array for n, array in enumerate(arrays)}
        values.update({n: values[n].clone() for n in self.written})
        for call in self.calls:
            given = values if mixed is None else mixed.given(call, values)
            with _modes(call, device):
                arguments, settings = read((call.arguments, dict(call.settings)), given, rows, device)
                if call.name in _FILLS:
                    arguments, settings = _in_range(arguments, settings)
                returned = _named(call)(*arguments, **settings)
            values.update(zip(call.results, leaves(returned), strict=True))
            values.update({new: values[old] for old, new in call.changed})
        return tuple(values[n] for n in self.results)


class Mixed(NamedTuple):
    """How the values of a program meet in mixed precision.

    What layers computed has the compute type. A parameter is rounded to it where it meets such a value, and not where
    it meets inputs alone: angles from times and learned rates need all bits.

    Args:
        compute_type: the type in which layers compute.
        origins: what each value depends on.
    """

    compute_type: torch.dtype
    origins: Mapping[int, Origin]

    def given(self, call: Call, values: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """The values as a call reads them."""
        if all(self.origins[n] < Origin.LAYER for n in call.read):
            return values
        rounded = {n for n in call.read if self.origins[n] is Origin.PARAMETER}.difference(n for n, _ in call.changed)
        return {**values, **{n: self._rounded(values[n]) for n in rounded}}

    def _rounded(self, array: torch.Tensor) -> torch.Tensor:
        return array.to(self.compute_type) if array.dtype is torch.float32 else array


def found_in(tree: Any, kind: type[_Found]) -> Iterator[_Found]:
    """The parts of arguments that are of a kind, in order."""
    if isinstance(tree, kind):
        yield tree
    else:
        for one in _parts(tree):
            yield from found_in(one, kind)


def _parts(tree: Any) -> Iterable[Any]:
    if isinstance(tree, list | tuple):
        return tree
    if isinstance(tree, dict):
        return tree.values()
    return (tree.start, tree.stop, tree.step) if isinstance(tree, Slice) else ()


def _in_range(arguments: Sequence[Any], settings: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with numbers no larger than half-precision arrays among them hold: they were recorded for float32."""
    kinds = {one.dtype for one in found_in((arguments, settings), torch.Tensor)} & {torch.float16, torch.bfloat16}
    largest = min((torch.finfo(kind).max for kind in kinds), default=math.inf)

    def limited(value: Any) -> Any:
        is_beyond = isinstance(value, float) and largest < abs(value) < math.inf
        return math.copysign(largest, value) if is_beyond else value

    return [*map(limited, arguments)], {name: limited(one) for name, one in settings.items()}


def _named(call: Call) -> Callable[..., Any]:
    found = function(call.function)
    assert found is not None  # checked when the call was made
    return found


@contextmanager
def _modes(call: Call, device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        if not call.differentiable:
            stack.enter_context(torch.no_grad())
        if call.autocast is not None and call.autocast != OFF:
            stack.enter_context(torch.autocast(device.type, getattr(torch, call.autocast)))
        yield


def read(tree: Any, values: Mapping[int, torch.Tensor], rows: int, device: torch.device) -> Any:
    """An argument with the values of a call in it."""
    match tree:
        case Value():
            return values[tree.number]
        case BatchExtent():
            return tree.at(rows)
        case Place():
            return device
        case Named():
            return getattr(torch, tree.name)
        case Slice():
            return slice(*(read(part, values, rows, device) for part in (tree.start, tree.stop, tree.step)))
        case Rest():
            return ...
        case list() | tuple():
            return type(tree)(read(part, values, rows, device) for part in tree)
        case dict():
            return {name: read(part, values, rows, device) for name, part in tree.items()}
    return tree


def leaves(returned: Any) -> Iterator[torch.Tensor]:
    """The arrays that a function returned, in order."""
    if isinstance(returned, torch.Tensor):
        yield returned
    elif isinstance(returned, list | tuple):
        for one in returned:
            yield from leaves(one)


class GlueLayer(Layer):
    """Functions of PyTorch between modules, made by `from_torch`.

    Args:
        training: what to compute in training.
        inference: what to compute in inference; None if it is the same.
        tensors: parameters that the functions read; they follow the sources in the numbering.
        buffers: the same for tensors that do not change; they follow the parameters.
        rows: the batch size where a call does not say; `BATCH` if every size is possible.
        exact: compute in float32 also in mixed precision. Otherwise PyTorch's autocast decides, as in a `TorchLayer`;
            parameters have the type of layers' results where they meet them.
        origins: what each source depends on; None if that is unknown, so that it may be layers.

    Example:
        >>> double = Program((Call("torch.mul", (Value(0), 2), results=(1,)),), (1,))
        >>> GlueLayer(double).infer(TensorDescriptor((4, 3)))[0].shape
        (4, 3)
    """

    training: Program
    inference: Program | None = None
    tensors: tuple[Tensor, ...] = ()
    buffers: tuple[Tensor, ...] = constant(default=())
    rows: int = 1
    exact: bool = False
    origins: tuple[int, ...] | None = None

    source_counts: ClassVar[tuple[int, int | None]] = (0, None)
    default_label: ClassVar[str] = "Glue"
    copies_what_it_changes: ClassVar[bool] = True
    may_stop_gradients: ClassVar[bool] = True

    @property
    def full_precision(self) -> bool:  # type: ignore[override]
        """Whether it computes in float32 even in mixed precision."""
        return self.exact

    @property
    def own_precision(self) -> bool:  # type: ignore[override]
        """Whether sources keep their types in mixed precision: what no layer computed has not been rounded."""
        return not self.exact

    def keeps_type(self, position: int, result: torch.Tensor) -> bool:
        """Whether a result is not rounded in mixed precision: angles from positions, a loss."""
        return result.numel() == 1 or self.origin(position) < Origin.LAYER

    def origin(self, position: int) -> Origin:
        """What a result depends on, in training or in inference."""
        if self.origins is None:
            return Origin.LAYER
        programs = [one for one in (self.training, self.inference) if one is not None]
        return max(self._origins(one, len(self.origins))[one.results[position]] for one in programs)

    def _origins(self, program: Program, sources: int) -> dict[int, Origin]:
        first = [Origin.LAYER] * sources if self.origins is None else map(Origin, self.origins)
        own = [Origin.PARAMETER] * len(self.tensors) + [Origin.INPUT] * len(self.buffers)
        return program.origins([*first, *own])

    def check(self, *sources: TensorDescriptor) -> None:
        """Accepts sources of every type: the functions were recorded with them."""

    def program(self, training: bool) -> Program:
        """What to compute in a mode."""
        return self.training if training or self.inference is None else self.inference

    def forward(self, *arrays: torch.Tensor, scope: Scope) -> tuple[torch.Tensor, ...]:
        """Calls the functions of this mode in order."""
        draws = dict(scope.draws)
        try:
            with torch_private.nothing_logged():
                results = self._run(arrays, scope, None if self.exact else scope.compute_type)
        except RuntimeError:
            if self.exact or scope.compute_type is None:
                raise
            # Some functions refuse arrays of several types, which autocast lets pass to most of them.
            scope.draws.clear()
            scope.draws.update(draws)
            results = self._run([_single(array) for array in arrays], scope, None)
        return tuple(result.reshape(1) if result.ndim == 0 else result for result in results)

    def _run(
        self, arrays: Sequence[torch.Tensor], scope: Scope, compute_type: torch.dtype | None
    ) -> tuple[torch.Tensor, ...]:
        every = [*arrays, *(scope.array(one) for one in (*self.tensors, *self.buffers))]
        program = self.program(scope.training)
        mixed = None if compute_type is None else Mixed(compute_type, self._origins(program, len(arrays)))
        device = next((array.device for array in every), None) or _device(scope)
        rows = scope.batched(self.rows) if scope.batch[1] else int(self.rows)
        try:
            with ExitStack() as stack:
                for mode in (Answers(scope), Refusals(), torch.device(device)):
                    stack.enter_context(mode)
                if compute_type is not None:
                    stack.enter_context(torch.autocast(device.type, compute_type, cache_enabled=False))
                return program.run(every, rows, device, mixed)
        except Drawn as error:
            problem = f"it calls PyTorch's random operator {error}, which a step cannot reproduce"
            fix = "use torch.rand, torch.randn or F.dropout, which draw from the graph's stream"
            raise ArgumentError(self.where, problem, fix=fix) from error

    def infer(
        self, *sources: TensorDescriptor, batch: tuple[int, int] = (0, 0), training: bool = True
    ) -> tuple[TensorDescriptor, ...]:
        """Descriptors of the results, which may follow the batch even if no source does."""
        if any(source.is_open for source in sources) or batch[1] or not isinstance(self.rows, BatchExtent):
            return super().infer(*sources, batch=batch, training=training)
        first, second = (
            super(GlueLayer, self).infer(*sources, batch=(BATCH, rows), training=training) for rows in PROBES
        )
        pairs = zip(first, second, strict=True)
        return tuple(TensorDescriptor(joined(a.shape, b.shape, self.where), a.data_type) for a, b in pairs)

    @contextmanager
    def without_memory(self) -> Iterator[Callable[[TensorDescriptor], torch.Tensor]]:
        """Fake arrays, which allow more functions than those on the meta device."""
        with torch_private.nothing_logged(), torch_private.FakeTensorMode(allow_non_fake_inputs=True):
            yield lambda one: torch.empty(tuple(map(int, one.shape)), dtype=one.data_type.torch)


def _single(array: torch.Tensor) -> torch.Tensor:
    return array.float() if array.dtype in (torch.bfloat16, torch.float16) else array


def _device(scope: Scope) -> torch.device:
    return torch.device("cpu") if scope.stream is None else scope.stream.device
