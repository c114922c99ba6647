"""A PyTorch module as one layer.

The module's Python code runs whenever a step is recorded, on arrays that stand for its own; what it would change in
itself (running statistics, counters, caches) becomes an update of the layer's statistics or is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from stepgraph.errors import (
    ArgumentError,
    DataTypeError,
    ShapeError,
    StateError,
    StepgraphError,
    UnknownNameError,
    raised_line,
    reason,
)
from stepgraph.layers.failures import explained
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.torch_answers import Answers, Drawn, Refusals
from stepgraph.layers.torch_state import Entry, Role, entries, evaluating, flattened, holding, path_of
from stepgraph.system import surroundings, torch_private
from stepgraph.tensors.tensor import MAX_DIMENSIONS, Tensor, TensorDescriptor
from stepgraph.types import DataType

# A module holds other arrays while its code runs: one call at a time.
_running = threading.RLock()


class _Made:
    """The tensor made for a module's array, and where that array was then."""

    def __init__(self, tensor: Tensor, address: int) -> None:
        self.tensor, self.address = tensor, address


_made: Any = WeakIdKeyDictionary()  # by array: a module that is wired twice has one set of tensors


@dataclass(frozen=True)
class Source:
    """In the call of a `TorchLayer`, the place of a source.

    Args:
        index: the position of the source among those of the node.

    Example:
        >>> TorchLayer(torch.nn.MultiheadAttention(8, 2), call=([Source(0)] * 3, {"need_weights": False})).label
        'MultiheadAttention'
    """

    index: int


@dataclass
class _Noted:
    """What was seen when the module ran for shapes.

    Args:
        moving: names of arrays that it changes, or assigns anew.
        in_place: those of them that it changes in place.
        written: positions of sources that it changes in place.
        sources: the descriptors of its sources.
        leaves_autocast: whether it opens a region without autocast; None if nobody asked yet.
    """

    moving: set[str] = field(default_factory=set)
    in_place: set[str] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    sources: tuple[TensorDescriptor, ...] = ()
    leaves_autocast: bool | None = None


class TorchLayer(Layer):
    """Any `torch.nn.Module` as one layer: its own code, its parameters, trained by the graph.

    Its parameters are the layer's parameters, under their own names; tied ones are one tensor, and those with
    `requires_grad=False` are frozen. Buffers that a forward pass changes are statistics, other buffers are constants.
    On the CPU the layer uses the module's memory, so the module sees every update at once; elsewhere, and for arrays
    that are not contiguous, call `copy_to_module`. Calls never change the module in any other way.

    Random numbers come from the graph's stream. Training runs the module in train mode, inference in eval mode;
    submodules that are in eval mode when the layer is created stay in it.

    Shapes: those of the module. Results may be arrays, or tuples, dictionaries and dataclasses of arrays, which are
    flattened in order; scalars get shape `[1]`, and whatever is not an array is dropped.

    Args:
        module: the module.
        call: how the sources become arguments, with `Source(i)` in the place of each: keywords as a dictionary, or
            a pair of positional arguments and keywords. By default, each source is one positional argument.
        tensors: tensors to use for the module's parameters and buffers, by name; others are created.
        share: whether tensors that are created use the module's memory.
        evaluated: paths of submodules that stay in eval mode; by default, those that are in it now.

    Example:
        >>> graph = Graph()
        >>> network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> graph.node(TorchLayer(network), Tensor((4, 3))).shape
        (4, 2)
        >>> list(graph.layers[0].parameters)
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    module: nn.Module
    call: Any = field(default=None, kw_only=True)
    tensors: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    share: bool = field(default=True, kw_only=True)
    evaluated: Sequence[str] | None = field(default=None, kw_only=True)

    source_counts = (0, None)
    may_stop_gradients = True

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            kind = type(self.module).__name__
            raise DataTypeError(self.where, f"{kind} is not a torch.nn.Module", fix="pass an instance of a module")
        if self.label == type(self).__name__:
            self.label = type(self.module).__name__
        _require_usable(self.where, self.module)
        found = entries(self.module)
        made = _tensors(self, found)
        paths = evaluating(self.module) if self.evaluated is None else tuple(self.evaluated)
        self.__dict__.update(tensors=made, evaluated=paths, _entries=found, _noted=_Noted())

    @property
    def shown_kind(self) -> str:
        """The module's class."""
        return f"Torch {type(self.module).__name__}"

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The module's floating-point parameters, by name; tied ones once."""
        return self._with(lambda one: one.role is Role.PARAMETER and one.array.is_floating_point())

    @property
    def statistics(self) -> dict[str, Tensor]:
        """The arrays that the module's forward changes; known once the layer is wired."""
        return self._with(lambda one: one.role is not Role.PARAMETER and one.name in self._noted.moving)

    @property
    def constants(self) -> dict[str, Tensor]:
        """All other arrays of the module."""
        others = {**self.parameters, **self.statistics}
        return self._with(lambda one: one.name not in others)

    @property
    def given_tensors(self) -> dict[str, Tensor]:
        """All of its tensors."""
        return dict(self.tensors)

    def _with(self, belongs: Callable[[Entry], bool]) -> dict[str, Tensor]:
        return {one.name: self.tensors[one.name] for one in self._entries if one.name in self.tensors and belongs(one)}

    @property
    def own_precision(self) -> bool:  # type: ignore[override]
        """Whether, in mixed precision, the module keeps its types: it opens a region without autocast.

        It then runs under autocast as in PyTorch. Others run with sources and parameters in the compute type.
        """
        if self._noted.leaves_autocast is None:
            self._noted.leaves_autocast = _leaves_autocast(self, self._noted.sources)
        return self._noted.leaves_autocast

    @classmethod
    def supports_data_type(cls, data_type: DataType, device: Any = None) -> bool:
        """Whether sources of this type are accepted: the module decides."""
        return True

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the call has a place for every source."""
        if self.call is None:
            return
        used = sorted(set(_places(self.call)))
        if used != list(range(len(sources))):
            problem = f"its call uses the sources {used}, but the node has {len(sources)}"
            raise ArgumentError(self.where, problem, fix="use Source(0), Source(1), … once each, one for every source")

    @contextmanager
    def without_memory(self) -> Iterator[Callable[[TensorDescriptor], torch.Tensor]]:
        """Fake arrays: unlike those on the meta device, a module cannot tell them from others."""
        with torch_private.FakeTensorMode(allow_non_fake_inputs=True):
            yield lambda one: torch.empty(tuple(map(int, one.shape)), dtype=one.data_type.torch)

    def infer(self, *sources: TensorDescriptor, batch: tuple[int, int] = (0, 0)) -> tuple[TensorDescriptor, ...]:
        """Descriptors of the results; also finds which buffers the module changes."""
        self._noted.sources = sources
        return super().infer(*sources, batch=batch)

    def forward(self, *arrays: torch.Tensor, scope: Scope) -> tuple[torch.Tensor, ...]:
        """Runs the module's own code on these arrays."""
        modes = []
        if scope.compute_type is not None and self.own_precision:
            modes.append(_autocast(arrays[0].device.type if arrays else "cpu", scope.compute_type))
        with _running:
            return _call(self, arrays, scope, *modes)

    def copy_to_module(self) -> None:
        """Copies the current values into the module: after training on a GPU, or with `share=False`."""
        with torch.no_grad():
            for one in self._entries:
                if one.name in self.tensors:
                    one.array.copy_(self.tensors[one.name].torch().reshape(one.array.shape))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label!r}, {type(self.module).__name__})"


# Running


def _call(
    layer: TorchLayer, arrays: Sequence[torch.Tensor], scope: Scope, *modes: AbstractContextManager[Any]
) -> tuple[torch.Tensor, ...]:
    """One call of the module, as a pure function: its results, and updates of its statistics."""
    noted: _Noted = layer._noted
    given = [array.clone() if i in noted.written else array for i, array in enumerate(arrays)]
    held = _held(layer, scope, given)
    versions = {name: torch_private.version(array) for name, array in held.items()}
    entered = [torch_private.version(array) for array in given]
    args, kwargs = _arguments(layer.call, given)
    answers = Answers(scope)
    settings = {
        one: {"training": scope.training and path not in layer.evaluated}
        for path, one in layer.module.named_modules()
    }
    by_id = {id(one.array): held[one.name] for one in layer._entries if one.name in held}
    try:
        with holding(layer.module, by_id, settings):
            with answers, Refusals(), torch_private.without_checkpointing(), torch_private.nothing_compiled():
                output = _under(modes, lambda: layer.module(*args, **kwargs))
            moved = _moved(layer, answers, held, versions)
    except StepgraphError:
        raise
    except Exception as error:  # whatever the module's code raises, the error names the layer and the line
        raise _failure(layer, arrays, error) from error
    noted.written |= {i for i, array in enumerate(given) if torch_private.version(array) != entered[i]}
    noted.moving |= moved.keys()
    noted.in_place |= {name for name in moved if torch_private.version(held[name]) != versions[name]}
    if scope.training:
        for name, array in moved.items():
            scope.update(layer.tensors[name], array.reshape(layer.tensors[name].shape))
    return _results(layer, output, held.values())


def _held(layer: TorchLayer, scope: Scope, given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arrays that the module holds during a call, by name; those it changes in place are copies."""
    found = {}
    for one in layer._entries:
        if one.name in layer.tensors:
            array = scope.array(layer.tensors[one.name]).reshape(one.array.shape)
            found[one.name] = array.clone() if one.name in layer._noted.in_place else array
        elif given:  # an array without elements is the same everywhere but on another device
            found[one.name] = torch.empty(one.array.shape, dtype=one.array.dtype, device=given[0].device)
    return found


def _under(modes: Sequence[AbstractContextManager[Any]], function: Callable[[], Any]) -> Any:
    with ExitStack() as stack:
        for one in modes:
            stack.enter_context(one)
        return function()


def _autocast(kind: str, compute_type: torch.dtype) -> AbstractContextManager[Any]:
    """PyTorch's own mixed precision; a cast that it remembered would outlive the recording."""
    return torch.autocast(kind, compute_type, cache_enabled=False)


def _moved(
    layer: TorchLayer, answers: Answers, held: Mapping[str, torch.Tensor], versions: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """New values of arrays that the module changed in place or assigned, by name."""
    found = {}
    for one in layer._entries:
        if one.name not in held:
            continue
        ours, now = held[one.name], one.now()
        if one.role is Role.PARAMETER:
            if torch_private.version(ours) != versions[one.name]:
                problem = f"its forward changes the parameter '{one.name}' in place, which only an optimizer may do"
                raise StateError(layer.where, problem, fix="register it as a buffer, or remove max_norm of an embedding")
        elif id(ours) in answers.moved:
            found[one.name] = answers.moved[id(ours)]
        elif isinstance(now, torch.Tensor) and now is not ours:
            if now.shape == ours.shape:
                found[one.name] = now
            elif one.role is Role.BUFFER:
                problem = f"its forward gives the buffer '{one.name}' the shape {list(now.shape)}"
                raise ShapeError(
                    layer.where, problem, was=list(ours.shape), fix="give the buffer its final shape when it is created"
                )
        elif torch_private.version(ours) != versions[one.name]:
            found[one.name] = ours
    return found


def _results(layer: TorchLayer, output: Any, held: Any) -> tuple[torch.Tensor, ...]:
    """The arrays of a module's result, as a node can return them."""
    found = flattened(output)
    if not found:
        kind = type(output).__name__
        raise DataTypeError(layer.where, f"its module returns {kind} without any array", fix="return an array")
    memory = {torch_private.identity(array.untyped_storage()) for array in held}
    return tuple(_result(layer, path, array, memory) for path, array in found.items())


def _result(layer: TorchLayer, path: str, array: torch.Tensor, memory: set[int]) -> torch.Tensor:
    name = f"result '{path}'" if path else "result"
    if array.layout is not torch.strided or not _is_supported(array.dtype):
        kind = str(array.dtype if array.layout is torch.strided else array.layout).removeprefix("torch.")
        raise DataTypeError(layer.where, f"its {name} is {kind}", fix=f"convert it in the module to one of {_types()}")
    if array.ndim > MAX_DIMENSIONS or not array.numel():
        fix = f"return 1 to {MAX_DIMENSIONS} dimensions with at least one element each"
        raise ShapeError(layer.where, f"its {name} has shape {list(array.shape)}", fix=fix)
    array = array.reshape(1) if array.ndim == 0 else array
    # An update writes into the memory of parameters, which a result must not show.
    return array.clone() if torch_private.identity(array.untyped_storage()) in memory else array


def _failure(layer: TorchLayer, arrays: Sequence[torch.Tensor], error: Exception) -> StepgraphError:
    """What to raise for an exception of the module's code: the submodule and the line of the model are facts."""
    line, path = raised_line(error, "torch"), _path(layer.module, error)
    facts = {"line": line} if line else {}
    facts |= {"module": f"{path} ({type(layer.module.get_submodule(path)).__name__})"} if path else {}
    if isinstance(error, Drawn):
        problem = f"its module calls PyTorch's random operator {error}, which a step cannot reproduce"
        fix = "use torch.rand, torch.randn or F.dropout, which draw from the graph's stream"
        return ArgumentError(layer.where, problem, fix=fix, **facts)
    known = explained(layer.where, layer.forward, error)
    if known is not None:
        known.facts.update(facts)
        return known
    shapes = ", ".join(f"{list(array.shape)} {str(array.dtype).removeprefix('torch.')}" for array in arrays)
    problem = f"its module does not accept these sources: {reason(error)}"
    return ShapeError(layer.where, problem, sources=shapes, fix="pass sources that its forward accepts", **facts)


def _path(module: nn.Module, error: Exception) -> str:
    """The path of the innermost submodule that an exception passed through."""
    found, trace = "", error.__traceback__
    while trace is not None:
        found = path_of(module, trace.tb_frame.f_locals.get("self")) or found
        trace = trace.tb_next
    return found


class _Autocast(TorchFunctionMode):
    """Notes whether anything is called outside of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.is_left = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_left |= not torch.is_autocast_enabled("cpu")
        return function(*args, **(kwargs or {}))


def _leaves_autocast(layer: TorchLayer, sources: Sequence[TensorDescriptor]) -> bool:
    """Whether a module opens a region without autocast; found by running it for shapes."""
    watch = _Autocast()
    with surroundings.tracing(), torch_private.disable_modes(), torch.no_grad(), layer.without_memory() as array:
        own = {tensor: array(tensor.descriptor) for tensor in layer.tensors.values()}
        scope = Scope(own, training=True, stream=array(TensorDescriptor((2,), DataType.INT64)))
        with _running:
            _call(layer, [array(one) for one in sources], scope, _autocast("cpu", torch.bfloat16), watch)
    return watch.is_left


# Arguments


def _arguments(call: Any, given: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if call is None:
        return given, {}
    args, kwargs = ((), call) if isinstance(call, Mapping) else call
    return _placed(args, given), _placed(kwargs, given)


def _placed(value: Any, given: Sequence[torch.Tensor]) -> Any:
    """A tree of arguments with arrays in the places of sources."""
    if isinstance(value, Source):
        return given[value.index]
    if isinstance(value, Mapping):
        return {key: _placed(one, given) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_placed(one, given) for one in value)
    return value


def _places(value: Any) -> Iterator[int]:
    if isinstance(value, Source):
        yield value.index
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _places(one)
    elif type(value) in (list, tuple):
        for one in value:
            yield from _places(one)


# Tensors


def _tensors(layer: TorchLayer, found: Sequence[Entry]) -> dict[str, Tensor]:
    """A tensor for each array of the module, by its first name: one that was passed, or made before, or a new one."""
    first = {id(one.array): one.name for one in found}
    module = layer.module
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = {name: first[id(array)] for name, array in every} | {one.name: one.name for one in found}
    given: dict[str, Tensor] = {}
    for name, tensor in layer.tensors.items():
        if name not in names:
            known = ", ".join(names) or "none"
            raise UnknownNameError(layer.where, f"its module has no array '{name}'", known=known, fix="use those names")
        given[names[name]] = tensor
    made = {}
    for one in found:
        if one.array.numel():
            made[one.name] = _fitting(layer, one, given[one.name]) if one.name in given else _tensor(layer, one)
    return made


def _fitting(layer: TorchLayer, one: Entry, tensor: Tensor) -> Tensor:
    """A tensor that was passed, after a check."""
    wanted = TensorDescriptor(_shape(one.array), DataType.of(one.array.dtype))
    if (tensor.shape, tensor.data_type) != (wanted.shape, wanted.data_type):
        problem = f"the tensor for '{one.name}' is {tensor.descriptor}, but the module's is {wanted}"
        raise ShapeError(layer.where, problem, fix="pass a tensor of that shape and type")
    return tensor


def _tensor(layer: TorchLayer, one: Entry) -> Tensor:
    """The tensor over a module's array, the same for every layer that shares it."""
    address, known = one.array.data_ptr(), _made.get(one.array)
    if layer.share and known is not None and known.address == address:
        tensor = known.tensor
    else:
        kind = DataType.of(one.array.dtype)
        data = one.array.detach().cpu().contiguous() if layer.share else one.array.detach().cpu().clone().contiguous()
        tensor = Tensor(_shape(one.array), kind, data=data.reshape(_shape(one.array)), label=one.name)
        if layer.share:
            _made[one.array] = _Made(tensor, address)
    if one.role is Role.PARAMETER:
        tensor.is_updatable = one.array.requires_grad
    return tensor


def _shape(array: torch.Tensor) -> tuple[int, ...]:
    """The shape of an array's tensor: its own, or flat where tensors do not have as many dimensions."""
    return tuple(array.shape) if 1 <= array.ndim <= MAX_DIMENSIONS else (array.numel(),)


# Modules that cannot be layers


def _require_usable(where: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        problem = "a scripted module has no Python code to record"
        raise DataTypeError(where, problem, fix="pass the module that it was made from")
    for one in entries(module):
        name = f"{one.role.value} '{one.name}'"
        if is_lazy(one.array):
            raise StateError(where, f"its {name} has no shape yet", fix="call the module once: module(example)")
        if one.array.is_meta:
            fix = "give it memory first: module.to_empty(device='cpu'), then load its weights"
            raise StateError(where, f"its {name} is on the meta device and holds no numbers", fix=fix)
        if one.array.layout is not torch.strided or not _is_supported(one.array.dtype):
            kind = str(one.array.dtype if one.array.layout is torch.strided else one.array.layout)
            fix = f"convert it to one of {_types()}"
            raise DataTypeError(where, f"its {name} is {kind.removeprefix('torch.')}", fix=fix)
    for path, one in module.named_modules():
        if getattr(one, "track_running_stats", False) and getattr(one, "momentum", 0.1) is None:
            name = f"'{path}' ({type(one).__name__})" if path else type(one).__name__
            problem = f"{name} has momentum=None: a cumulative average reads the number of batches"
            raise ArgumentError(where, problem, fix="pass a momentum, such as 0.1")


def _is_supported(dtype: torch.dtype) -> bool:
    return dtype in {one.torch for one in DataType}


def _types() -> str:
    return ", ".join(one.debug_description for one in DataType)
