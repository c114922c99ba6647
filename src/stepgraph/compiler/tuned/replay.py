"""The kernels of a part that PyTorch's compiler fused on the CPU, launched without its wrapper code.

That code checks every array and allocates every buffer in each call, which takes longer than the kernels of a tiny
network. Like a CUDA graph, this is a list of kernels with their arguments, recorded in the first call, with
persistent buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MappingProxyType
from typing import Any

import torch

from stepgraph.compiler.launch_record import Kernel, Launch, Place, Record
from stepgraph.compiler.tuned.row import Tuned, on_cpu

Function = Callable[..., Sequence[torch.Tensor]]
Opened = Sequence[tuple[int, Hashable]]
Launcher = Callable[[Mapping[Any, torch.Tensor]], list[torch.Tensor]]
KERNEL, ALLOCATE = "cpp_fused_", "empty_strided_cpu"
# What generated code may use besides kernels: none of these computes anything.
HARMLESS = {ALLOCATE, "assert_size_stride", "assert_alignment", "reinterpret_tensor", "clear", "torch"}
HARMLESS |= {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
_NOTHING: Mapping[Hashable, torch.Tensor] = MappingProxyType({})


class Replay:
    """A fused function that launches its kernels directly from the second call on, if it consists of nothing else.

    Args:
        function: the complete function, with checks and allocations; runs if the code consists of more than kernels.
        generated: the generated code that it calls.
        understood: gets the record, once a call has made one.
        record: what an earlier run has recorded, if it has.

    Attributes:
        is_direct: whether calls now launch kernels directly.
    """

    def __init__(
        self,
        function: Function | None,
        generated: Any,
        understood: Callable[[Record], object] | None = None,
        record: Record | None = None,
    ) -> None:
        self._function, self._understood = function, understood
        self._code = getattr(generated, "__func__", generated)
        self._record = record
        self.is_direct = record is not None
        self._bound: Sequence[torch.Tensor | None] = ()  # what the last call has put among the arguments
        self._opened: Opened | None = None
        self._launch: Launcher = _unbound
        # After one recording, there is nothing more to learn.
        self._to_record = isinstance(self._code, FunctionType) and self._only_launches()

    @classmethod
    def of(cls, record: Record) -> Replay:
        """Launches what an earlier run has recorded."""
        return cls(None, None, record=record)

    def __call__(self, *given: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.is_direct:
            return self.launch(given)
        assert self._function is not None
        return self._first(self._function, given) if self._to_record else self._function(*given)

    def launch(
        self,
        bound: Sequence[torch.Tensor | None],
        opened: Opened = (),
        others: Mapping[Any, torch.Tensor] = _NOTHING,
    ) -> list[torch.Tensor]:
        """Launches the kernels, as `Launching` describes; they must be known."""
        if bound is not self._bound:
            self._bind(bound, opened)
        return self._launch(others)

    def _bind(self, bound: Sequence[torch.Tensor | None], opened: Opened) -> None:
        assert self._record is not None
        for array, places in zip(bound, self._record.given, strict=True):
            for arguments, position in places:
                arguments[position] = array
        if opened != self._opened:
            self._opened, self._launch = opened, _launcher(self._record, opened)
        self._bound = bound

    def _first(self, function: Function, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs the complete function and records it; keeps the record if a replay matches bit for bit."""
        self._to_record = False
        copies = [array.clone() for array in given]
        with self._recording() as (calls, buffers):
            found = function(*given)
        self._record = self._made(calls, buffers, given, found)
        if self._record is not None:
            again = self.launch(copies)
            self.is_direct = all(map(torch.equal, [*given, *found], [*copies, *again]))
            if self.is_direct and self._understood is not None:
                self._understood(self._record)
        self._understood = None  # it refers to the whole step
        return found

    def _only_launches(self) -> bool:
        return set(self._code.__code__.co_names) <= HARMLESS | self._kernels().keys()

    def _kernels(self) -> dict[str, Kernel]:
        return {name: one for name, one in self._code.__globals__.items() if name.startswith(KERNEL)}

    @contextmanager
    def _recording(self) -> Any:
        """Kernel calls and new buffers, in order, while generated code runs."""
        names, calls, buffers = self._code.__globals__, [], []
        plain = {**self._kernels(), ALLOCATE: names[ALLOCATE]}

        def allocate(*arguments: Any) -> torch.Tensor:
            buffers.append(plain[ALLOCATE](*arguments))
            return buffers[-1]

        def recorded(kernel: Kernel) -> Kernel:
            def call(*arguments: Any) -> None:
                calls.append(Launch(kernel, [*arguments]))
                kernel(*arguments)

            return call

        names.update({name: recorded(one) for name, one in self._kernels().items()} | {ALLOCATE: allocate})
        try:
            yield calls, buffers
        finally:
            names.update(plain)

    def _made(
        self,
        calls: list[Launch],
        buffers: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        found: Sequence[torch.Tensor],
    ) -> Record | None:
        """The record, if every array in it is an argument or a buffer, and all results are whole buffers."""
        places = defaultdict[int, list[Place]](list)
        for _, arguments in calls:
            for position, one in enumerate(arguments):
                if isinstance(one, torch.Tensor):
                    places[id(one)].append(Place(arguments, position))
        inputs = [id(array) for array in given]
        owners = {(one.data_ptr(), one.nbytes): index for index, one in enumerate(found)}
        own = [(owners[at], id(one)) for one in buffers if (at := (one.data_ptr(), one.nbytes)) in owners]
        results = dict(own)
        if len({*inputs}) < len(inputs) or not len(own) == len(results) == len(found):
            return None
        kept = {one.untyped_storage().data_ptr() for one in buffers if id(one) not in results.values()}
        views = (one for _, arguments in calls for one in arguments if isinstance(one, torch.Tensor))
        parts = {id(one) for one in views if one.untyped_storage().data_ptr() in kept}  # of persistent buffers
        if not places.keys() <= {*inputs, *results.values(), *parts}:
            return None
        return Record(
            calls,
            [places[one] for one in inputs],
            [places[results[index]] for index in range(len(found))],
            [(tuple(one.shape), one.stride(), one.dtype) for one in found],
            self._code.__globals__[ALLOCATE],
        )


def _unbound(_: Mapping[Any, torch.Tensor]) -> list[torch.Tensor]:
    raise AssertionError("there are no arguments yet")


def _launcher(record: Record, opened: Opened) -> Launcher:
    """What a call does, as code: loops over arguments and results would take longer than a tiny kernel."""
    launches, given, results, like, allocate = record
    lists = {id(one.arguments): index for index, one in enumerate(launches)}
    named: dict[str, Any] = {"allocate": allocate}
    lines = []
    for number, (index, name) in enumerate(opened):
        lines += [f"{_targets(given[index], lists)}others[name{number}]"]
        named[f"name{number}"] = name
    for number, (layout, places) in enumerate(zip(like, results, strict=True)):  # the caller may keep earlier results
        lines += [f"result{number} = {_targets(places, lists)}allocate(*layout{number})"]
        named[f"layout{number}"] = layout
    for number, (kernel, arguments) in enumerate(launches):
        lines += [f"kernel{number}(*arguments{number})"]
        named |= {f"kernel{number}": kernel, f"arguments{number}": arguments}
    lines += [f"return [{', '.join(f'result{number}' for number in range(len(results)))}]"]
    exec("\n    ".join(["def launch(others):", *lines]), named)
    launch: Launcher = named["launch"]
    return launch


def _targets(places: Sequence[Place], lists: Mapping[int, int]) -> str:
    """The places to which a value is assigned, as code."""
    return "".join(f"arguments{lists[id(arguments)]}[{position}] = " for arguments, position in places)


ROW = Tuned(
    name="replay generated code",
    hardware="CPUs, fused steps",
    pattern="steps that PyTorch's compiler turns into its own kernels alone",
    gains={"tiny": 2.75},
    results="rent-cpu-fused",
    condition=on_cpu,
    launches=Replay,
    relaunches=Replay.of,
)
