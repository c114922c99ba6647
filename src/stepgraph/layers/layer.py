"""The contract of every layer: one class that holds settings and tensors, one pure `forward`.

Subclassing `Layer` creates a dataclass. A custom layer needs only its fields and `forward`:

    class Swish(sg.Layer):
        beta: float = 1.0

        def forward(self, x, *, scope):
            return x * torch.sigmoid(self.beta * x)

Shapes are inferred by running `forward` on arrays without memory, gradients by differentiating it; names and
checkpoint keys come from the fields. Tensors in fields are parameters unless the field is a `statistic()` or
`constant()`.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, dataclass_transform

import torch

from stepgraph.errors import ArgumentError, DataTypeError, ShapeError, StateError, StepgraphError, reason, user_line
from stepgraph.layers.failures import explained
from stepgraph.layers.likeness import likeness
from stepgraph.layers.over_ranks import sum_over_ranks
from stepgraph.random import Drawn, Refusals, keep_mask, refusal, require_no_python_draws, uniform
from stepgraph.system import surroundings, torch_private
from stepgraph.system.interrupts import Uninterrupted
from stepgraph.tensors.extents import BATCH, PROBES, BatchExtent, joined
from stepgraph.tensors.tensor import Tensor, TensorDescriptor, TensorParameter
from stepgraph.types import DataType, DeviceType

_LIVE = {"label", "is_debugging_enabled", "device_type", "layer_id", "owner"}
_ROLE = "stepgraph.role"
MOST_KNOWN = 10_000  # layers whose results are remembered
_known: dict[Any, tuple[TensorDescriptor, ...]] = {}  # a network repeats its blocks
_NEXT_DRAW = 0x9E3779B9  # the distance between the draws of one node, far larger than nodes and seeds


def statistic(**settings: Any) -> Any:
    """A field whose tensor the forward pass updates (a running mean); no optimizer changes it.

    Args:
        settings: those of `dataclasses.field`.

    Example:
        >>> class Counted(Layer):
        ...     count: Tensor = statistic()
        >>> list(Counted(Tensor((1,), fill=0)).statistics)
        ['count']
    """
    return field(metadata={_ROLE: "statistic"}, **settings)


def constant(**settings: Any) -> Any:
    """A field whose tensor is read but never changed.

    Args:
        settings: those of `dataclasses.field`.
    """
    return field(metadata={_ROLE: "constant"}, **settings)


@dataclass
class Scope:
    """What a layer needs besides its sources: its tensors' arrays, the mode, random numbers, updates of statistics.

    Args:
        arrays: the arrays of the layer's tensors; read them with `array`.
        training: whether this is training.
        stream: seed and position of the random stream; drawn from with `keep_mask` and `random`.
        salt: distinguishes this node's random numbers from those of others.
        batch: the declared batch size and that of this call.
        updates: new values of statistics; written with `update`.
        draws: how often the layer has drawn random numbers, by seed.
        compute_type: the type layers compute in, in mixed precision.
        shards: the parts that the batch was cut into; 0 if it is whole.
    """

    arrays: Mapping[Tensor, torch.Tensor]
    training: bool = False
    stream: torch.Tensor | None = None
    salt: int = 0
    batch: tuple[int, int] = (0, 0)
    updates: dict[Tensor, torch.Tensor] = field(default_factory=dict)
    draws: dict[int, int] = field(default_factory=dict)
    compute_type: torch.dtype | None = None
    shards: int = 0

    def array(self, tensor: Tensor, *shape: int) -> torch.Tensor:
        """The array of one of the layer's tensors, in `shape` if passed; packed and natural shapes share memory."""
        if tensor not in self.arrays:
            raise StateError(
                tensor.where,
                "the layer that reads it has no field with it",
                fix="annotate the field: name: sg.Tensor",
            )
        array = self.arrays[tensor]
        return array.reshape(shape) if shape else array

    def keep_mask(self, x: torch.Tensor, rate: float, seed: int = 0) -> torch.Tensor:
        """A mask shaped like `x`, True with probability `1 - rate`: new in every step, the same in both passes.

        Each call draws another mask.
        """
        stream = torch.zeros(2, dtype=torch.int64, device=x.device) if self.stream is None else self.stream
        return keep_mask(stream, self._next_salt(seed), x.shape, rate)

    def random(self, shape: Sequence[int]) -> torch.Tensor:
        """Uniform numbers in `[0, 1)`, float32: new in every step and call, the same in both passes."""
        stream = torch.zeros(2, dtype=torch.int64) if self.stream is None else self.stream
        return uniform(stream, self._next_salt(0), tuple(shape))

    @property
    def drew(self) -> bool:
        """Whether the layer has drawn random numbers."""
        return bool(self.draws)

    def _next_salt(self, seed: int) -> int:
        """Distinguishes a draw from those of other nodes and seeds, and from earlier ones of this node."""
        earlier = self.draws.get(seed, 0)
        self.draws[seed] = earlier + 1
        return (self.salt + 7919 * seed + _NEXT_DRAW * earlier) % 2**32

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of an array over all ranks, each of which has one part of the batch; `x` if the batch is whole.

        Its gradient is that of the sum of all losses. Only a layer with `is_synchronized` may call it.
        """
        found: torch.Tensor = x if self.shards < 2 else sum_over_ranks(x)
        return found

    def update(self, statistic: Tensor, value: torch.Tensor) -> None:
        """Sets a statistic's new value; the graph stores it once the node has run."""
        self.updates[statistic] = value.detach()

    def batched(self, extent: int) -> int:
        """`extent`, or this call's batch size if `extent` is the declared one or `BATCH`."""
        declared, actual = self.batch
        if isinstance(extent, BatchExtent):
            if not isinstance(declared, BatchExtent):
                fix = f"declare the graph's inputs with {extent} rows, or pass the number"
                raise ShapeError("BATCH", f"the layer's {extent} is unknown: its source has a declared number", fix=fix)
            return extent.at(actual)
        return actual if extent == declared else extent


@dataclass_transform(eq_default=False, field_specifiers=(field, statistic, constant))
@dataclass(eq=False, repr=False)
class Layer:
    """Base of all layers. A layer does not change after construction, except for its label and debugging flag.

    Args:
        label: name; by default, the kind of layer.
        is_debugging_enabled: with `DEBUG_LAYERS`, keep the results and gradients of this layer readable after each
            step.

    Example:
        >>> class Scaled(Layer):
        ...     factor: Tensor
        ...
        ...     def forward(self, x, *, scope):
        ...         return scope.array(self.factor) * x
        >>> Scaled(Tensor((1,), fill=2.0)).infer(TensorDescriptor((8, 3)))[0].shape
        (8, 3)
    """

    label: str = field(default="", kw_only=True)
    is_debugging_enabled: bool = field(default=False, kw_only=True)

    default_label: ClassVar[str] = ""
    source_counts: ClassVar[tuple[int, int | None]] = (1, 1)  # minimum and maximum number of sources; None: no limit
    is_loss: ClassVar[bool] = False
    takes_labels: ClassVar[bool] = True  # a loss compares its source with labels
    full_precision: ClassVar[bool] = False  # compute in float32 even in mixed precision
    own_precision: ClassVar[bool] = False  # in mixed precision, read sources and tensors in the types they declare
    moves: ClassVar[bool] = False  # returns elements of its sources unchanged
    copies_what_it_changes: ClassVar[bool] = False  # once its forward was seen to change an array in place
    may_stop_gradients: ClassVar[bool] = False  # its forward may detach what depends on a parameter, as it was written
    layer_id: ClassVar[int] = 0  # an instance gets its 1-based position when it joins a graph
    device_type: ClassVar[DeviceType | None] = None  # an instance gets its device when its graph is compiled

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        dataclass(eq=False, repr=False)(cls)

    def __new__(cls, *_: Any, **__: Any) -> Layer:
        layer = object.__new__(cls)
        object.__setattr__(layer, "_line", user_line())
        object.__setattr__(layer, "owner", None)
        object.__setattr__(layer, "label", "")
        return layer

    @classmethod
    def deferred(cls, make: Callable[..., Layer], label: str = "") -> Self:
        """A layer whose tensors are created when it is wired.

        Args:
            make: returns the complete layer for the descriptors of its sources.
            label: name; by default, the kind of layer.
        """
        layer = cls.__new__(cls)
        layer.__dict__["_make"] = make
        layer.label = label
        object.__setattr__(layer, "__class__", _waiting(cls))  # type: ignore[arg-type]
        return layer  # type: ignore[return-value]

    @property
    def is_deferred(self) -> bool:
        """Whether its tensors do not exist yet."""
        return "_make" in self.__dict__

    @contextmanager
    def completed(self, sources: Sequence[TensorDescriptor]) -> Iterator[None]:
        """Creates the tensors of a deferred layer for its first sources; if wiring fails, it is deferred again."""
        before, kind = dict(self.__dict__), type(self)
        if self.is_deferred:
            self._check_count(len(sources))
            made = self.__dict__["_make"](*sources)
            self.__dict__.update({**made.__dict__, **{name: before[name] for name in ("_line", "owner", "label")}})
            del self.__dict__["_make"]
            object.__setattr__(self, "__class__", type(made))
        try:
            yield
        except BaseException:
            if "_make" in before:
                self.__dict__.clear()
                self.__dict__.update(before)
                object.__setattr__(self, "__class__", kind)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and name not in _LIVE:
            raise StateError(self.where, f"{name} cannot change after construction", fix="create a new layer")
        if name == "label" and not value:
            value = self.default_label or type(self).__name__
        kinds = _kinds(type(self)).get(name)  # type: ignore[arg-type]
        if kinds and not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
            raise DataTypeError(
                self.where,
                f"its {name} is {type(value).__name__}, not {wanted}",
                fix=f"pass a {wanted}, or use create(...)",
            )
        object.__setattr__(self, name, value)

    def forward(self, *arrays: Any, **scope: Any) -> Any:
        """The layer's equation: takes arrays in source order and `scope=`; returns an array or a tuple of arrays."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def check(self, *sources: TensorDescriptor) -> None:
        """Raises an error for sources with unsupported shapes or types; the base accepts all floating sources."""
        for source in sources:
            self.require_floating(source)

    @property
    def line(self) -> str:
        """The line of the user's program that created this layer."""
        return str(self.__dict__["_line"])

    @property
    def where(self) -> str:
        """The name of this layer in messages."""
        return f"{type(self).__name__} '{self.label}' ({self.line})"

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The tensors an optimizer may update, by field name (`name.index` in a sequence of tensors)."""
        return self._tensors("parameter")

    @property
    def statistics(self) -> dict[str, Tensor]:
        """The tensors that the forward pass updates."""
        return self._tensors("statistic")

    @property
    def constants(self) -> dict[str, Tensor]:
        """The tensors that are only read."""
        return self._tensors("constant")

    @property
    def frozen_tensors(self) -> frozenset[Tensor]:
        """The parameters that nodes of this layer do not train."""
        return frozenset()

    def with_tensors(self, others: Mapping[Tensor, Tensor]) -> Self:
        """A layer of the same settings, with some of its tensors replaced; it belongs to no graph yet."""

        def swapped(value: Any) -> Any:
            if isinstance(value, Tensor):
                return others.get(value, value)
            if isinstance(value, dict):
                return {name: swapped(one) for name, one in value.items()}
            return type(value)(map(swapped, value)) if type(value) in (tuple, list) else value

        new = copy.copy(self)
        new.__dict__ |= {"owner": None} | {
            one.name: swapped(getattr(self, one.name)) for one in dataclasses.fields(self)
        }
        return new

    @property
    def is_synchronized(self) -> bool:
        """Whether its forward sums over ranks, so that each rank must run exactly one part of the batch."""
        return False

    @property
    def shown_kind(self) -> str:
        """The kind of the layer in tables and drawings: its class without `Layer`."""
        return type(self).__name__.removesuffix("Layer")

    @property
    def given_tensors(self) -> dict[str, Tensor]:
        """Its tensors without those that it derives from others; a checkpoint names them."""
        given = {one.name for one in dataclasses.fields(self) if one.init}
        every = {**self.parameters, **self.statistics, **self.constants}
        return {name: tensor for name, tensor in every.items() if name.partition(".")[0] in given}

    @property
    def parameter_count(self) -> int:
        """Number of trainable elements."""
        return sum(tensor.descriptor.element_count for tensor in set(self.parameters.values()))

    @classmethod
    def supports_data_type(cls, data_type: DataType, device: Any = None) -> bool:
        """Whether sources of this type are accepted; the answer is the same on every device."""
        return data_type.is_floating

    def keeps_type(self, position: int, result: torch.Tensor) -> bool:
        """Whether, in mixed precision, a result keeps the type that `forward` gave it instead of the compute type."""
        return False

    def infer(
        self, *sources: TensorDescriptor, batch: tuple[int, int] = (0, 0), training: bool = True
    ) -> tuple[TensorDescriptor, ...]:
        """Descriptors of the results, found by running `forward` on arrays without memory."""
        self._check_count(len(sources))
        if not any(source.is_open for source in sources):
            return self._inferred(sources, batch, training)
        try:
            first = self._inferred(sources, (BATCH, PROBES[0]), training)
        except StepgraphError as error:
            if str(BATCH) not in str(error):  # raised by code that sees only numbers
                error.facts["BATCH"] = f"counts as {PROBES[0]} here"
            raise
        try:
            second = self._inferred([source.at(PROBES[1]) for source in sources], (BATCH, PROBES[1]), training)
        except StepgraphError as error:
            problem = f"does not run with every number of rows: {error.problem}"
            fix = "declare the number of rows instead of BATCH, or give every source BATCH rows"
            raise ShapeError(self.where, problem, sources=", ".join(map(str, sources)), fix=fix) from error
        if len(first) != len(second):
            problem = f"returns {len(first)} or {len(second)} results, depending on the number of rows"
            raise ShapeError(self.where, problem, fix="declare the number of rows instead of BATCH")
        pairs = zip(first, second, strict=True)
        return tuple(TensorDescriptor(joined(a.shape, b.shape, self.where), a.data_type) for a, b in pairs)

    def _inferred(
        self, sources: Sequence[TensorDescriptor], batch: tuple[int, int], training: bool
    ) -> tuple[TensorDescriptor, ...]:
        """The same for sources of fixed shapes; those with `BATCH` count as their first probe."""
        self.check(*sources)
        alike = likeness(self)
        asked = alike, tuple(sources), batch, training
        if asked in _known:
            return _known[asked]
        found = self._returned(sources, batch, training)
        if alike is not None:
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[asked] = found
        return found

    def _returned(
        self, sources: Sequence[TensorDescriptor], batch: tuple[int, int], training: bool
    ) -> tuple[TensorDescriptor, ...]:
        """What `forward` returns for arrays without memory."""
        tensors = {**self.parameters, **self.statistics, **self.constants}
        try:
            with surroundings.tracing(), Uninterrupted(), torch.no_grad(), self.without_memory() as array:
                own = {tensor: array(tensor.descriptor) for tensor in tensors.values()}
                stream = array(TensorDescriptor((2,), DataType.INT64))
                scope = Scope(own, training=training, stream=stream, batch=batch)
                arrays = [*map(array, sources)]
                given = {f"source {number}": one for number, one in enumerate(arrays, 1)}
                with self._unchanged(given | {f"'{name}'": own[tensor] for name, tensor in tensors.items()}):
                    results = require_no_python_draws(self.where, lambda: self._called(arrays, scope))
        except StepgraphError:
            raise
        except Drawn as error:
            raise refusal(self.where, error) from error
        except Exception as error:  # whatever a layer's torch code raises, the error names the layer
            known = explained(self.where, self.forward, error)
            if known is not None:
                raise known from error
            shapes = ", ".join(str(source) for source in sources)
            raise ShapeError(
                self.where,
                f"does not accept these sources: {reason(error)}",
                sources=shapes,
                fix="pass sources that its forward accepts",
            ) from error
        found = _as_tuple(results)
        if not found or not all(isinstance(array, torch.Tensor) for array in found):
            raise DataTypeError(
                self.where,
                f"its forward returns {results!r}, not arrays",
                fix="return a torch.Tensor, or a tuple of them",
            )
        if any(array.ndim == 0 for array in found):
            raise ShapeError(
                self.where,
                "its forward returns a scalar, shape []",
                fix="keep one dimension, as in x.mean().reshape(1)",
            )
        return tuple(TensorDescriptor(tuple(array.shape), DataType.of(array.dtype)) for array in found)

    def _called(self, arrays: Sequence[torch.Tensor], scope: Scope) -> Any:
        try:
            return self.forward(*arrays, scope=scope)
        except StepgraphError:
            raise
        except Exception as error:
            drawn = self._drawn(arrays, scope)
            if drawn is not None:
                raise drawn from error
            raise

    def _drawn(self, arrays: Sequence[torch.Tensor], scope: Scope) -> Drawn | None:
        """The first draw from PyTorch's generator: such numbers have memory, and do not fit the sources."""
        with suppress(Exception), Refusals():
            try:
                self.forward(*arrays, scope=scope)
            except Drawn as error:
                return error
        return None

    @contextmanager
    def _unchanged(self, arrays: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Rejects a change in place meanwhile: others read these arrays too, and they may be the user's own."""
        before = {name: torch_private.version(array) for name, array in arrays.items()}
        yield
        for name, array in arrays.items():
            if torch_private.version(array) != before[name] and not self.copies_what_it_changes:
                raise ArgumentError(
                    self.where,
                    f"its forward changes {name} in place",
                    fix="compute a new array, as in x + 1 or torch.relu(x); pass a new statistic to scope.update",
                )

    @contextmanager
    def without_memory(self) -> Iterator[Callable[[TensorDescriptor], torch.Tensor]]:
        """Creates the arrays without memory on which shapes are inferred."""
        yield lambda descriptor: descriptor.meta()

    def index_limits(self, *sources: TensorDescriptor) -> dict[int, int]:
        """The sources that are indices, by position, and the exclusive upper bound of each; most layers have none."""
        return {}

    def ignored_indices(self) -> frozenset[int]:
        """Indices that the layer skips, whether they are in range or not."""
        return frozenset()

    def require_floating(self, source: TensorDescriptor) -> None:
        """Rejects sources that are not floating-point."""
        if not source.data_type.is_floating:
            raise DataTypeError(
                self.where,
                f"the source is {source.data_type.debug_description}, but a floating type is needed",
                source=source,
                fix="declare the source with a floating type",
            )

    def require_type(self, source: TensorDescriptor, tensor: Tensor) -> None:
        """Rejects a source whose type differs from that of a tensor of the layer."""
        if source.data_type is not tensor.data_type:
            kinds = f"{source.data_type.debug_description}, but its weights are {tensor.data_type.debug_description}"
            raise DataTypeError(self.where, f"the source is {kinds}", source=source, fix="use the same type for both")

    def _check_count(self, given: int) -> None:
        fewest, most = self.source_counts
        if given < fewest or (most is not None and given > most):
            wanted = f"{fewest}" if fewest == most else f"{fewest} or more" if most is None else f"{fewest} to {most}"
            compares = self.is_loss and self.takes_labels
            fix = "pass a prediction and its loss_labels" if compares else "check the node's sources"
            raise ShapeError(self.where, f"{given} sources were passed, but {wanted} are needed", fix=fix)

    def _tensors(self, role: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.metadata.get(_ROLE, "parameter") != role:
                continue
            if isinstance(value, Tensor):
                found[one.name] = value
            elif isinstance(value, tuple | list):
                found |= {f"{one.name}.{i}": item for i, item in enumerate(value) if isinstance(item, Tensor)}
        return found

    def __repr__(self) -> str:
        if self.is_deferred:
            return f"{type(self).__name__}({self.label!r}, not wired yet)"
        settings = (
            f"{one.name}={getattr(self, one.name)!r}"
            for one in dataclasses.fields(self)
            if one.name not in _LIVE and getattr(self, one.name) is not None
        )
        return f"{type(self).__name__}({', '.join([repr(self.label), *settings])})"


@cache
def _kinds(layer: type[Layer]) -> dict[str, tuple[type, ...]]:
    """The classes each field may hold, for fields with tensors, descriptors or None."""
    try:
        hints = typing.get_type_hints(layer)
    except NameError:  # a user's annotation that only a type checker can resolve
        return {}
    found = {}
    for name, hint in hints.items():
        kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
        plain = tuple(kind for kind in kinds if isinstance(kind, type))
        named = [kind for kind in plain if kind is Tensor or kind.__name__.endswith("Descriptor")]
        if named and len(plain) == len(kinds):
            found[name] = plain
    return found


@cache
def _waiting(layer: type[Layer]) -> type[Layer]:
    """The class of a deferred layer: reading its settings and tensors raises an error."""

    def missing(name: str) -> property:
        def refuse(self: Layer) -> Any:
            problem = f"'{name}' does not exist before the layer is wired, since it finds its inputs then"
            raise StateError(self.where, problem, fix="call graph.node first, or pass the inputs to create")

        return property(refuse)

    names = {one.name for one in dataclasses.fields(layer)} - _LIVE
    named = {name: getattr(layer, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(layer.__name__, (layer,), {**{name: missing(name) for name in names}, **named})


class ParameterOf:
    """A read-only attribute with the `TensorParameter` of the tensor in another field, or of each of its tensors."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, layer: Layer | None, owner: type | None = None) -> Any:
        if layer is None:
            return self
        held = getattr(layer, self.name)
        if isinstance(held, tuple):
            return tuple(TensorParameter(tensor) for tensor in held)
        return None if held is None else TensorParameter(held)


def join(layer: Layer, owner: object, layer_id: int) -> None:
    """Records that `layer` is a node of `owner`, unless it is already a node of another live graph."""
    if first_graph(layer) is None:
        object.__setattr__(layer, "owner", weakref.ref(owner))
        object.__setattr__(layer, "layer_id", layer_id)


def first_graph(layer: Layer) -> Any:
    """The first graph that has this layer as a node and still exists."""
    return None if layer.owner is None else layer.owner()  # type: ignore[attr-defined]


def _as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)
