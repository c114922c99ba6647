"""One call of a model on arrays without memory, recorded at the boundaries of its modules.

`nn.Module.__call__` is replaced while the model runs: the call of a module that becomes one node is one event, and
nothing inside it is looked at. A function mode records what is called in between. Python runs as always, on
concrete shapes.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stepgraph.errors import ArgumentError, StateError, StepgraphError, raised_line, reason
from stepgraph.interop.example import WHERE, Example
from stepgraph.layers.failures import OWN_SEED, explained
from stepgraph.layers.glue import OFF, Named, Place, Rest, Slice, Value
from stepgraph.layers.torch_functions import name_of
from stepgraph.layers.torch_grouped import grouped_product
from stepgraph.layers.torch_state import Entry, Role, entries, flattened, holding, names_of, noting_assigned
from stepgraph.random import require_no_python_draws
from stepgraph.system import surroundings, torch_private

_capturing = threading.RLock()
_BELOW = (torch.Tensor.lt, torch.Tensor.__lt__, torch.lt)
_PLAIN = (bool, int, float, str, type(None))
_UNSEEN = {  # what a recording of arrays does not show
    torch.Tensor.register_hook: "registers a hook on an array",
    torch.Tensor.data.__set__: "assigns the data of an array",  # type: ignore[attr-defined]
}


@dataclass(frozen=True)
class Opaque:
    """An argument that a program cannot hold, such as an object of the model."""

    kind: str


@dataclass(frozen=True)
class Held:
    """An argument that is an array with memory, which the model keeps besides its parameters and buffers."""

    number: int


class Known(NamedTuple):
    """What is known of a value: its shape, type and memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: int


@dataclass(frozen=True)
class Event:
    """One call: of a module that becomes a node, or of a function.

    Args:
        path: the path of the module whose forward calls the function; of a module, its own.
        called: the function's name, or the module.
        arguments: positional and keyword arguments, with a `Value` for every array.
        results: the numbers of the arrays it returns.
        changed: numbers of values that it changes in place, each with its new number.
        differentiable: False inside `no_grad`.
        autocast: the type of the surrounding autocast, or `OFF`.
        names: of a module, the paths of its results.
        returns_more: whether it has more results, or has them in another order.
    """

    path: str
    called: str | nn.Module | None
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    results: tuple[int, ...]
    changed: tuple[tuple[int, int], ...] = ()
    differentiable: bool = True
    autocast: str | None = None
    names: tuple[str, ...] = ()
    returns_more: bool = False

    @property
    def is_module(self) -> bool:
        """Whether a module was called."""
        return isinstance(self.called, nn.Module)


@dataclass
class Capture:
    """One recorded call.

    Args:
        rows: its batch size.
        inputs: the number of each input.
        state: the number of each parameter and buffer, by name; tied ones share one.
        held: arrays with memory that the model keeps elsewhere.
        events: the calls, in order.
        known: what is known of each value.
        output: what the model returned, with a `Value` for every array.
        reached: the numbers of the parameters that a gradient reaches, by the path of the result it starts at.
        problems: paths of modules that must become one node, and why.
        assigned: attributes that the call gave another value, by path.
    """

    rows: int
    inputs: dict[str, int] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=dict)
    held: list[torch.Tensor] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    known: dict[int, Known] = field(default_factory=dict)
    output: Any = None
    reached: dict[str, frozenset[int]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    assigned: tuple[str, ...] = ()


def capture(model: nn.Module, example: Example, rows: int, is_node: Callable[[str, nn.Module], bool]) -> Capture:
    """Records one call of the model in its current mode.

    Args:
        model: what to call; it is left as it was.
        example: its inputs.
        rows: the batch size.
        is_node: whether the module with a path becomes one node.
    """
    where = f"{WHERE} ({type(model).__name__})"
    return require_no_python_draws(where, lambda: _captured(model, example, rows, is_node))


def _captured(model: nn.Module, example: Example, rows: int, is_node: Callable[[str, nn.Module], bool]) -> Capture:
    mode = torch_private.FakeTensorMode(allow_non_fake_inputs=True)
    with (
        _capturing,
        surroundings.tracing(),
        torch_private.without_checkpointing(),
        torch_private.nothing_compiled(),
        torch_private.nothing_validated(),
        torch_private.nothing_logged(),
    ):
        found = Capture(rows)
        recorder = _Recorder(model, found, is_node)
        try:
            with mode:
                state = recorder.state(mode)
                values = {name: recorder.input(name, example, rows) for name in example.descriptors}
                arguments, settings = example.call(values)
                with holding(model, state, {}):
                    recorder.keep(model)
                    with noting_assigned(model) as assigned, recorder.intercepting(), recorder:
                        returned = model(*arguments, **settings)
                    recorder.finish(returned)
                found.assigned = names_of(model, assigned)
        except StepgraphError:
            raise
        except Exception as error:
            raise _explained(model, error) from error
    return found


class _Recorder(TorchFunctionMode):
    """Turns calls into events; arrays get numbers, and another one when they change."""

    def __init__(self, model: nn.Module, found: Capture, is_node: Callable[[str, nn.Module], bool]) -> None:
        super().__init__()
        self._model, self._found, self._is_node = model, found, is_node
        self._paths = {module: path for path, module in model.named_modules()}
        self._stack: list[str] = []
        self._inside = 0  # the depth of calls inside a node
        self._autocast: list[bool] = []  # whether it is on, in each region that the model opens
        self._numbers: dict[int, int] = {}  # by the identity of an array
        self._versions: dict[int, int] = {}
        self._alive: list[Any] = []  # identities stay unique while their objects live
        self._thread = threading.get_ident()
        self._fakes: dict[int, tuple[Entry, torch.Tensor]] = {}  # by the identity of the model's own array
        self._state = set[int]()  # their numbers
        self._memories = set[int]()  # and the memory of each
        self._modes = {module: module.training for module in model.modules()}
        self._own = set[int]()  # identities of all arrays that the model's modules hold themselves
        self._uniform = set[int]()  # identities of random numbers in [0, 1)
        self._seed = torch.initial_seed()

    # Arrays

    def state(self, mode: Any) -> dict[int, torch.Tensor]:
        """The model's own arrays without memory, by the identity of those they stand for."""
        for entry in entries(self._model):
            self._fakes[id(entry.array)] = (entry, mode.from_tensor(entry.array))
        for name, tensor in state_of(self._model).items():
            self._found.state[name] = self._number(self._fakes[id(tensor)][1])
        self._state = set(self._found.state.values())
        self._memories = {self._found.known[one].memory for one in self._state}
        return {one: fake for one, (_, fake) in self._fakes.items()}

    def keep(self, module: nn.Module) -> None:
        """Notes what a module holds: its own arrays, and what it has assigned to itself."""
        held = [*_held(module)]
        self._own.update(map(id, held))
        self._alive.append(held)

    def input(self, name: str, example: Example, rows: int) -> torch.Tensor:
        """An input without memory."""
        descriptor = example.descriptors[name].at(rows)
        device = next((fake.device for _, fake in self._fakes.values()), torch.device("cpu"))
        made = torch.empty(descriptor.shape, dtype=descriptor.data_type.torch, device=device)
        self._found.inputs[name] = self._number(made)
        return made

    def _number(self, array: torch.Tensor) -> int:
        if id(array) not in self._numbers:
            self._new_number(array)
            self._alive.append(array)
        return self._numbers[id(array)]

    def _new_number(self, array: torch.Tensor) -> int:
        number = self._numbers[id(array)] = len(self._found.known)
        memory = torch_private.identity(array.untyped_storage()) if array.layout is torch.strided else 0
        self._found.known[number] = Known(tuple(array.shape), array.dtype, memory)
        self._versions[id(array)] = torch_private.version(array)
        return number

    def _changed(self) -> tuple[tuple[int, int], ...]:
        """Gives new numbers to all arrays that were written to, also through `data`, which counts its changes apart."""
        alive = [one for one in self._alive if isinstance(one, torch.Tensor) and id(one) in self._versions]
        written = {self._memory(one) for one in alive if torch_private.version(one) != self._versions[id(one)]}
        return tuple(
            (self._numbers[id(one)], self._new_number(one))
            for one in alive
            if torch_private.version(one) != self._versions[id(one)] or self._memory(one) in written - {0}
        )

    def _memory(self, array: torch.Tensor) -> int:
        return self._found.known[self._numbers[id(array)]].memory

    def _described(self, tree: Any) -> Any:
        """Arguments as plain values."""
        kind = type(tree)
        if kind in _PLAIN:
            return tree
        if isinstance(tree, torch.Tensor):
            return self._described_array(tree)
        if kind is slice:
            return Slice(*map(self._described, (tree.start, tree.stop, tree.step)))
        if tree is ...:
            return Rest()
        if isinstance(tree, torch.dtype | torch.memory_format | torch.layout):
            return Named(str(tree).removeprefix("torch."))
        if isinstance(tree, torch.device):
            return Place()
        if kind is list:
            return [self._described(one) for one in tree]
        if kind in (tuple, torch.Size):
            return tuple(map(self._described, tree))
        if kind is dict and all(isinstance(key, str) for key in tree):
            return {key: self._described(one) for key, one in tree.items()}
        return Opaque(kind.__qualname__)

    def _described_array(self, array: torch.Tensor) -> Any:
        if id(array) in self._numbers:
            if self._numbers[id(array)] in self._state and not array.numel():
                self._problem("uses a parameter or a buffer without elements")
            return Value(self._numbers[id(array)])
        if not isinstance(array, torch_private.FakeTensor):
            position = next((n for n, one in enumerate(self._found.held) if one is array), len(self._found.held))
            if position == len(self._found.held):
                self._found.held.append(array)
            return Held(position)
        self._problem("reads an array that no recorded call returned")
        return Value(self._number(array))

    def _problem(self, why: str, path: str | None = None) -> None:
        self._found.problems.setdefault(self._stack[-1] if path is None else path, why)

    # Calls

    def __torch_function__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Without memory, products of groups take one type only.
        run = partial(grouped_product, called) if called is torch_private.grouped_mm else called
        if self._inside:
            return run(*args, **kwargs)
        if called in _UNSEEN:
            self._problem(_UNSEEN[called])
        if torch.initial_seed() != self._seed:
            raise RuntimeError(OWN_SEED)
        certain = self._certain(called, args)
        if certain is not None:
            return torch.tensor(certain)
        given = [*arrays_in((args, kwargs))]
        if any(map(torch_private.is_transformed, given)):
            self._problem("transforms functions with torch.func")
            return called(*args, **kwargs)
        before = [*map(torch_private.version, given)]
        # Dropout does not change the shape, but many more operators would run to find it.
        returned = run(*args, **{**kwargs, "dropout_p": 0.0} if kwargs.get("dropout_p") else kwargs)
        moved = before != [*map(torch_private.version, given)]
        if moved or any(True for _ in arrays_in(returned)):
            self._add(called, args, kwargs, returned, moved)
            if called is torch.rand:
                self._uniform.add(id(returned))
        return returned

    def _certain(self, called: Any, args: Any) -> bool | None:
        """Whether a random number in [0, 1) is below a bound, if that is certain: layers are dropped this way."""
        if called not in _BELOW or id(args[0]) not in self._uniform or isinstance(args[1], torch.Tensor):
            return None
        return False if args[1] <= 0 else True if args[1] >= 1 else None

    def _add(self, called: Any, args: Any, kwargs: Any, returned: Any, moved: bool) -> None:
        arguments = self._described(args), self._described(kwargs)
        found = flattened(returned) if isinstance(called, nn.Module) else dict(enumerate(arrays_in(returned)))
        is_module, path = isinstance(called, nn.Module), self._stack[-1] if self._stack else ""
        name = called if is_module else name_of(called)
        around = path.rpartition(".")[0] if is_module else path
        if name is None:
            self._problem(f"calls {getattr(called, '__name__', called)}, which has no name in a file")
        if _has_opaque(arguments):
            self._problem("passes an object that is not an array or a number", around)
        self._alive.append((args, kwargs, returned))
        changed = self._changed() if moved else ()
        if any(self._found.known[old].memory in self._memories for old, _ in changed):
            self._problem("changes a parameter or a buffer in place")
        type_name = OFF if self._autocast and not self._autocast[-1] else None
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
            type_name = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        self._found.events.append(
            Event(
                path,
                name,
                arguments,
                tuple(map(self._number, found.values())),
                changed,
                torch.is_grad_enabled(),
                type_name,
                tuple(map(str, found)) if is_module else (),
            )
        )

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Calls of modules, and of functions with a gradient of their own, in this thread become events."""
        call, apply = nn.Module.__call__, vars(torch.autograd.Function)["apply"]
        recorder = self

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != recorder._thread:
                return call(module, *args, **kwargs)
            return recorder._call(call, module, args, kwargs)

        def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == recorder._thread and not recorder._inside:
                recorder._problem(f"uses {kind.__name__}, which has its own gradient")
            return apply.__func__(kind, *args, **kwargs)

        nn.Module.__call__ = called  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment]
        try:
            with self._watching_autocast():
                yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]

    @contextmanager
    def _watching_autocast(self) -> Iterator[None]:
        """Notes the regions in which the model switches autocast on or off."""
        enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
        recorder = self

        def entered(region: torch.autocast) -> Any:
            found = enter(region)
            if threading.get_ident() == recorder._thread:
                recorder._autocast.append(torch.is_autocast_enabled(region.device))
            return found

        def left(region: torch.autocast, *error: Any) -> Any:
            if threading.get_ident() == recorder._thread:
                recorder._autocast.pop()
            return leave(region, *error)

        torch.autocast.__enter__, torch.autocast.__exit__ = entered, left  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]

    def _call(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self._paths.get(module)
        if path is None or self._inside or not self._is_node(path, module):
            self._stack.append(self._stack[-1] if path is None and self._stack else path or "")
            try:
                return call(module, *args, **kwargs)
            finally:
                self._stack.pop()
        why = self._prevents(path, module)
        if why:
            self._problem(why, path.rpartition(".")[0])
        given = [*arrays_in((args, kwargs))]
        is_transformed = any(map(torch_private.is_transformed, given))
        before = [*map(torch_private.version, given)]
        self._inside += 1
        try:
            returned = call(module, *args, **kwargs)
            if is_transformed:
                self._problem("transforms functions with torch.func", path.rpartition(".")[0])
                return returned
            moved = before != [*map(torch_private.version, given)]
            returned = returned if moved else _distinct(returned, {id(array) for array in given})
        finally:
            self._inside -= 1
        for array in (*module.parameters(), *module.buffers()):  # what a node changes in itself is its own matter
            self._versions[id(array)] = torch_private.version(array)
        self.keep(module)
        self._stack.append(path)
        try:
            self._add(module, args, kwargs, returned, moved)
        finally:
            self._stack.pop()
        return returned

    def _prevents(self, path: str, module: nn.Module) -> str | None:
        """What the code around a module does to it that a node of its own would not see."""
        if not path:
            return None
        name = f"'{path}' ({type(module).__name__})"
        if any(one.training != self._modes.get(one, one.training) for one in module.modules()):
            return f"switches {name} between training and eval mode"
        if any(id(array) not in self._own for array in _held(module)):
            return f"replaces an array of {name}"
        return f"calls {name} inside autocast" if self._autocast else None

    def finish(self, returned: Any) -> None:
        """Notes what the model returned, which parameters its gradient reaches, and what it assigned to itself."""
        self._stack.append("")
        self._found.output = {path or "output": self._described_array(x) for path, x in flattened(returned).items()}
        for entry, fake in self._fakes.values():
            path = self._paths[entry.owner]
            is_nested = entry.role is Role.ATTRIBUTE and entry.key not in vars(entry.owner)  # inside a list
            if not is_nested and entry.now() is not fake and not self._in_node(path):
                self._problem("assigns a new array to a buffer or an attribute", path)
        numbers = {id(fake): self._numbers[id(fake)] for _, fake in self._fakes.values()}
        self._found.reached = {
            path or "output": frozenset(numbers[one] for one in _reached(array) if one in numbers)
            for path, array in flattened(returned).items()
        }

    def _in_node(self, path: str) -> bool:
        """Whether a module is a node, or part of one."""
        by_path = {path: module for module, path in self._paths.items()}
        return any(self._is_node(one, by_path[one]) for one in enclosing(path))


def enclosing(path: str) -> list[str]:
    """A module's path and those of the modules around it, innermost first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _reached(array: torch.Tensor) -> set[int]:
    """The identities of the arrays that a gradient of a result reaches."""
    stack = [] if array.grad_fn is None else [array.grad_fn]
    seen, found = set(stack), set[int]()
    while stack:
        function = stack.pop()
        if hasattr(function, "variable"):
            found.add(id(function.variable))
        for following, _ in function.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


def _distinct(returned: Any, given: set[int]) -> Any:
    """What a module returned, with views in the place of arrays it was given: each array is the result of one call."""
    if isinstance(returned, torch.Tensor):
        return returned.view_as(returned) if id(returned) in given else returned
    if type(returned) in (list, tuple):
        return type(returned)(_distinct(one, given) for one in returned)
    if type(returned) is dict:
        return {name: _distinct(one, given) for name, one in returned.items()}
    return returned


def _held(module: nn.Module) -> Iterator[torch.Tensor]:
    """The arrays that a module holds at the moment, without those in its lists and dictionaries."""
    yield from module.parameters()
    yield from module.buffers()
    for one in module.modules():
        yield from (value for value in vars(one).values() if isinstance(value, torch.Tensor))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All arrays of a model by all their names: parameters, buffers and plain attributes."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **{entry.name: entry.array for entry in entries(model) if entry.role is Role.ATTRIBUTE},
    }


def arrays_in(tree: Any) -> Iterator[torch.Tensor]:
    """The arrays in nested arguments or results, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from arrays_in(one)
    elif isinstance(tree, Mapping):
        for one in tree.values():
            yield from arrays_in(one)
    elif hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        for name in tree.__dataclass_fields__:
            yield from arrays_in(getattr(tree, name))
    elif type(tree) is slice:
        yield from arrays_in((tree.start, tree.stop, tree.step))


def _has_opaque(tree: Any) -> bool:
    if isinstance(tree, Opaque):
        return True
    if isinstance(tree, list | tuple):
        return any(map(_has_opaque, tree))
    return isinstance(tree, dict) and any(map(_has_opaque, tree.values()))


def _explained(model: nn.Module, error: Exception) -> StepgraphError:
    where, line = f"{WHERE} ({type(model).__name__})", raised_line(error, "torch")
    place = {"line": line} if line else {}
    known = explained(where, _with_scope, error)
    if known is not None and OWN_SEED in str(error):
        known.facts.update(place)
        return known
    if known is not None:
        return StateError(
            where,
            "the model's Python depends on the data (item, tolist, numpy, if, a mask as index)",
            **place,
            raised=reason(error)[:200],
            fix="compute with arrays: torch.where instead of if, x * mask instead of x[mask]",
        )
    problem = f"the model does not run on the example: {type(error).__name__}: {reason(error)[:300]}"
    takes = f"forward{inspect.signature(model.forward)}".replace("torch.Tensor", "Tensor")
    return ArgumentError(where, problem, **place, takes=takes[:200], fix="pass the arguments that its forward takes")


def _with_scope(**scope: Any) -> None:
    """Stands for a forward that takes a scope."""
