"""A PyTorch module as one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from stepgraph.errors import ArgumentError, DataTypeError, ShapeError, StateError, UnknownNameError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.torch_call import ModuleCall
from stepgraph.layers.torch_state import Entry, Role, evaluating, overlap, require_usable
from stepgraph.system import torch_private
from stepgraph.tensors.tensor import MAX_DIMENSIONS, Tensor, TensorDescriptor
from stepgraph.types import DataType


class TorchLayer(Layer):
    """Any `torch.nn.Module` as one layer: its own code and its parameters, trained by the graph.

    Its parameters are the layer's parameters, under their own names; tied ones are one tensor. Those with
    `requires_grad=False` are frozen in this layer; another layer around the module can train them. Buffers that a
    forward pass changes are statistics, other buffers are constants. On the CPU the layer uses the module's memory, so
    the module sees every update at once; elsewhere, and for arrays that are not contiguous, call `copy_to_module`.
    Calls never change the module in any other way.

    Random numbers come from the graph's stream. Training runs the module in train mode, inference in eval mode;
    submodules that are in eval mode when the layer is created stay in it. In mixed precision it runs under PyTorch's
    autocast, so regions that switch it off keep float32.

    Shapes: those of the module. Results may be arrays, or tuples, dictionaries and dataclasses of arrays, which are
    flattened in order; scalars get shape `[1]`, and whatever is not an array is dropped.

    Args:
        module: the module.
        call: how the sources become arguments, with `Source(i)` in the place of each: keywords as a dictionary, or
            a pair of positional arguments and keywords. By default, each source is one positional argument.
        tensors: tensors to use for the module's parameters and buffers, by name; others are created.
        share: whether tensors that are created use the module's memory.
        evaluated: paths of submodules that stay in eval mode; by default, those that are in it now.
        results: paths of the results that the node has, such as `["logits"]`; by default, all. A module that returns
            other results in training than in inference needs it.
        frozen: names of parameters that are not trained; by default, those with `requires_grad=False` now.

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
    results: Sequence[str] | None = field(default=None, kw_only=True)
    frozen: Sequence[str] | None = field(default=None, kw_only=True)
    code: ModuleCall = field(init=False)

    source_counts = (0, None)
    own_precision = True  # in mixed precision, PyTorch's autocast decides
    copies_what_it_changes = True
    may_stop_gradients = True

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            kind = type(self.module).__name__
            raise DataTypeError(self.where, f"{kind} is not a torch.nn.Module", fix="pass an instance of a module")
        if self.label == type(self).__name__:
            self.label = type(self.module).__name__
        require_usable(self.where, self.module)
        paths = evaluating(self.module) if self.evaluated is None else tuple(self.evaluated)
        self.code = ModuleCall(self.module, self.call, paths, self.results)
        self.__dict__.update(evaluated=paths, tensors=_tensors(self), frozen=_frozen(self))

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
        return self._with(lambda one: one.name in self.code.moving)

    @property
    def constants(self) -> dict[str, Tensor]:
        """All other arrays of the module."""
        others = {**self.parameters, **self.statistics}
        return self._with(lambda one: one.name not in others)

    @property
    def frozen_tensors(self) -> frozenset[Tensor]:
        """The parameters under the names in `frozen`."""
        return frozenset(self.tensors[name] for name in self.frozen or ())

    @property
    def given_tensors(self) -> dict[str, Tensor]:
        """All of its tensors."""
        return dict(self.tensors)

    def _with(self, belongs: Callable[[Entry], bool]) -> dict[str, Tensor]:
        held = (one for one in self.code.entries if one.name in self.tensors)
        return {one.name: self.tensors[one.name] for one in held if belongs(one)}

    @classmethod
    def supports_data_type(cls, data_type: DataType, device: Any = None) -> bool:
        """Whether sources of this type are accepted: the module decides."""
        return True

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the call has a place for every source."""
        used = self.code.places()
        if used is not None and used != list(range(len(sources))):
            problem = f"its call uses the sources {used}, but the node has {len(sources)}"
            raise ArgumentError(self.where, problem, fix="use Source(0), Source(1), …, one for every source")

    def keeps_type(self, position: int, result: torch.Tensor) -> bool:
        """Whether a result is not rounded in mixed precision: one number may be a loss."""
        return result.numel() == 1

    @contextmanager
    def without_memory(self) -> Iterator[Callable[[TensorDescriptor], torch.Tensor]]:
        """Fake arrays: a module cannot tell them from others, as it can those on the meta device."""
        with torch_private.nothing_logged(), torch_private.FakeTensorMode(allow_non_fake_inputs=True):
            yield lambda one: torch.empty(tuple(map(int, one.shape)), dtype=one.data_type.torch)

    def forward(self, *arrays: torch.Tensor, scope: Scope) -> tuple[torch.Tensor, ...]:
        """Runs the module's own code on these arrays."""
        state = {name: scope.array(tensor) for name, tensor in self.tensors.items()}
        results, moved = self.code.run(self.where, arrays, state, scope)
        if scope.training:
            for name, array in moved.items():
                scope.update(self.tensors[name], array.reshape(self.tensors[name].shape))
        return results

    def infer(
        self, *sources: TensorDescriptor, batch: tuple[int, int] = (0, 0), training: bool = True
    ) -> tuple[TensorDescriptor, ...]:
        """Descriptors of the results; what the module assigns gets memory of its own."""
        found = super().infer(*sources, batch=batch, training=training)
        for name in self.code.moving:
            _part_from_parameters(self, name)
        return found

    def copy_to_module(self) -> None:
        """Copies the current values into the module: after training on a GPU, or with `share=False`."""
        with torch.no_grad():
            for one in self.code.entries:
                if one.name in self.tensors:
                    one.array.copy_(self.tensors[one.name].array().reshape(one.array.shape))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label!r}, {type(self.module).__name__})"


def _part_from_parameters(layer: TorchLayer, name: str) -> None:
    """Gives an array its own memory if it lies in that of a parameter, as `self.scaled = self.weight.data` does."""
    tensor = layer.tensors[name]
    for other, parameter in layer.parameters.items():
        if tensor.has_data and parameter.has_data and overlap(tensor.array(), parameter.array()):
            if layer.code.writes_into(name):
                problem = f"its module changes the parameter '{other}' in place, as '{name}'"
                raise StateError(layer.where, problem, fix="let the attribute hold a copy: weight.detach().clone()")
            tensor.hold(tensor.array().clone())


class _Made(NamedTuple):
    """The tensor made for a module's array, and where that array was then."""

    tensor: Tensor
    address: int


_made: Any = WeakIdKeyDictionary()  # by array: a module that is wired twice has one set of tensors


def _tensors(layer: TorchLayer) -> dict[str, Tensor]:
    """A tensor for each array of the module, by its first name: one that was passed, or made before, or a new one."""
    found, names = layer.code.entries, _first_names(layer)
    given = {_known(layer, names, name): tensor for name, tensor in layer.tensors.items()}
    return {
        one.name: _fitting(layer.where, one, given[one.name]) if one.name in given else _tensor(one, layer.share)
        for one in found
        if one.array.numel()
    }


def _frozen(layer: TorchLayer) -> tuple[str, ...]:
    """The first names of parameters that the layer does not train: those passed, or those PyTorch would not train."""
    parameters = [one for one in layer.code.entries if one.role is Role.PARAMETER and one.array.numel()]
    if layer.frozen is None:
        return tuple(one.name for one in parameters if not one.array.requires_grad)
    names = {name: first for name, first in _first_names(layer).items() if first in {one.name for one in parameters}}
    return tuple(dict.fromkeys(_known(layer, names, name) for name in layer.frozen))


def _first_names(layer: TorchLayer) -> dict[str, str]:
    """The first name of each of the module's arrays, by all its names."""
    module, found = layer.module, layer.code.entries
    first = {id(one.array): one.name for one in found}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: first[id(array)] for name, array in every} | {one.name: one.name for one in found}


def _known(layer: TorchLayer, names: Mapping[str, str], name: str) -> str:
    """The first name of an array that was named; raises an error if there is none."""
    if name not in names:
        known = ", ".join(names) or "none"
        raise UnknownNameError(layer.where, f"its module has no array '{name}'", known=known, fix="use those names")
    return names[name]


def _fitting(where: str, one: Entry, tensor: Tensor) -> Tensor:
    """A tensor that was passed, after a check."""
    wanted = TensorDescriptor(_shape(one.array), DataType.of(one.array.dtype))
    if (tensor.shape, tensor.data_type) != (wanted.shape, wanted.data_type):
        problem = f"the tensor for '{one.name}' is {tensor.descriptor}, but the module's is {wanted}"
        raise ShapeError(where, problem, fix="pass a tensor of that shape and type")
    return tensor


def _tensor(one: Entry, share: bool) -> Tensor:
    """The tensor over a module's array, the same for every layer that shares it."""
    known, address = _made.get(one.array), one.array.data_ptr()
    if share and known is not None and known.address == address:
        tensor: Tensor = known.tensor
    else:
        data = one.array.detach().to("cpu", copy=not share).contiguous().reshape(_shape(one.array))
        tensor = Tensor(_shape(one.array), DataType.of(one.array.dtype), data=data, label=one.name)
        if share:
            _made[one.array] = _Made(tensor, address)
    return tensor


def _shape(array: torch.Tensor) -> tuple[int, ...]:
    """The shape of an array's tensor: its own, or flat where tensors do not have as many dimensions."""
    return tuple(array.shape) if 1 <= array.ndim <= MAX_DIMENSIONS else (array.numel(),)
