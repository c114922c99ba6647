"""What training and inference graphs share: adopted nodes, names for data, compilation, running, keeping results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from rich.console import Group, RenderableType

from stepgraph import buffers, draw
from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.phases import Part
from stepgraph.compiler.step import Key, Step, layer_tensors, value
from stepgraph.device import Device
from stepgraph.errors import (
    ArgumentError,
    DataError,
    DataTypeError,
    DeviceError,
    ExecutionError,
    StateError,
    UnknownNameError,
)
from stepgraph.graph import Graph, Node
from stepgraph.runtime.executable import Executable
from stepgraph.runtime.execution import Completion, Execution, turn
from stepgraph.runtime.feeds import Data, Feeds, Names, merged
from stepgraph.runtime.profile import profile
from stepgraph.runtime.programs import Programs
from stepgraph.tensor import Tensor
from stepgraph.types import DataType, ExecutionOptions, GraphCompilationOptions

logger = logging.getLogger("stepgraph")
Found = dict[Key, torch.Tensor]


class CompiledGraph(Graph):
    """A graph made from other graphs that can be compiled and executed.

    Args:
        graphs: the graphs whose nodes are adopted, in order; they stay usable and may be shared.
    """

    def __init__(self, graphs: Sequence[Graph] = ()) -> None:
        super().__init__()
        if not isinstance(graphs, Sequence):
            raise DataTypeError(
                type(self).__name__, f"graphs is {type(graphs).__name__}, not a list", fix="give a list of Graph"
            )
        for graph in graphs:
            if not isinstance(graph, Graph):
                raise DataTypeError(
                    type(self).__name__, f"{type(graph).__name__} is not a graph", fix="give a list of Graph"
                )
        if len(set(graphs)) != len(graphs):
            raise ArgumentError(type(self).__name__, "a graph was given twice", fix="give each graph once")
        self._graphs = tuple(graphs)
        # Replaced as a whole, never changed in place, so that a failed call can put back what was there.
        self._feeds = Feeds()
        self._outputs: Names = {}
        self._constants: dict[Tensor, torch.Tensor] = {}
        self._linked: tuple[Any, ...] = (self,)
        self._options = GraphCompilationOptions.NONE
        self._compiled: tuple[Node, ...] = ()
        self._held: tuple[Tensor, ...] = ()
        self._programs = Programs(self._step, self._kept_keys)
        self._written: Found = {}
        self._bound: dict[Tensor, torch.Tensor | None] = {}
        self._holding: set[Tensor] = set()
        self._plan = MemoryPlan()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The adopted nodes, then the graph's own."""
        return tuple(node for graph in self._graphs for node in graph.nodes) + tuple(self._nodes)

    @property
    def memory_plan(self) -> MemoryPlan:
        """What the compiled graph needs, by kind; all zero before `compile`."""
        return self._plan

    @property
    def device_memory_size(self) -> int:
        """Bytes of all intermediates and optimizer state; known after `compile`, 0 before."""
        return self._plan.device_memory_size

    @property
    def executables(self) -> list[tuple[str, int]]:
        """What has been compiled so far, as (part, batch size): it grows only when something new is asked for."""
        return list(self._programs.executables)

    @property
    def inputs(self) -> Names:
        """The inputs by name: declared ones and, once compiled, those that were found."""
        return dict(self._feeds.inputs)

    @property
    def loss_labels(self) -> Names:
        """The loss labels declared so far, by name."""
        return dict(self._feeds.labels)

    def add_inputs(
        self, inputs: Names, loss_labels: Names | None = None, loss_label_weights: Names | None = None
    ) -> None:
        """Names the tensors that `execute` is given data for: inputs, labels, label weights. Calls accumulate."""
        self._feeds = self._feeds.declare(inputs, loss_labels, loss_label_weights)

    def add_outputs(self, outputs: Names) -> None:
        """Names tensors that stay readable after a call, and that `outputs_data` may ask for."""
        declared = merged("output", self._outputs, outputs)
        self._check_outputs(declared)
        if self.device is not None and any(tensor not in self._kept() for tensor in outputs.values()):
            self._programs = self._programs.keeping_anew()  # executables were made to drop it
        self._outputs = declared

    def __rich__(self) -> RenderableType:
        title = f"{type(self).__name__} on {self.device}" if self.device else f"{type(self).__name__}, not compiled"
        parts: list[RenderableType] = [draw.table(self._compiled or self.nodes, title)]
        if self.device:
            parts += ["", str(self._plan)]
        return Group(*parts)

    # Compiling

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A failed call leaves the graph as it was."""
        before = dict(self.__dict__)
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _prepare(
        self,
        device: Device | None,
        options: GraphCompilationOptions,
        constants: Names | None,
        constants_data: Data | None,
        parameters: Sequence[Tensor] = (),
    ) -> None:
        """Everything about a compilation that is not tracing: device, nodes, constants, feeds, held tensors."""
        self.device = self._chosen(device)
        require_options(options, GraphCompilationOptions)
        self._options = options
        self._compiled = self._all_nodes()
        if not self._compiled:
            raise StateError(f"{type(self).__name__}.compile", "the graph has no layers", fix="add nodes first")
        self._constants = self._read_constants(self.device, constants or {}, constants_data or {})
        self._feeds = self._feeds.find(self._compiled, {*self._constants, *parameters})
        self._check_outputs(self._outputs)
        self._held = self._find_held()
        self._programs = Programs(self._step, self._kept_keys)
        for tensor in self._held:
            tensor.place(self.device)
        for node in self._compiled:
            node.layer.device_type = self.device.actual_device_type  # type: ignore[misc]

    def _tell_device(self) -> None:
        """Every tensor of a graph that has been compiled knows its device."""
        for node in self._compiled:
            for tensor in (*node.arguments, *node.results):
                tensor.device = self.device

    def _chosen(self, device: Device | None) -> Device:
        chosen = device or self.device
        if chosen is None:
            raise DeviceError(
                f"{type(self).__name__}.compile",
                "there is no device to compile for",
                fix="pass Device.any() or Device.cpu()",
            )
        if not isinstance(chosen, Device):
            raise DataTypeError(
                f"{type(self).__name__}.compile", f"{chosen!r} is not a Device", fix="pass Device.any()"
            )
        return chosen

    def _all_nodes(self) -> tuple[Node, ...]:
        return self.nodes

    def _read_constants(self, device: Device, tensors: Names, data: Data) -> dict[Tensor, torch.Tensor]:
        found = {}
        for name, tensor in merged("constant input", {}, tensors).items():
            where, values = f"Tensor '{tensor.label}' ('{name}')", data.get(name, tensor.data)
            if values is None:
                raise DataError(where, "the constant input has no data", fix="pass it in input_tensors_data")
            found[tensor] = buffers.read(values, tensor.shape, tensor.data_type, where).to(device.torch, copy=True)
        return found

    def _find_held(self) -> tuple[Tensor, ...]:
        """Parameters, statistics and constants of the layers; each must hold data."""
        other = {*self._feeds.tensors, *self._constants, *(t for node in self._compiled for t in node.results)}
        found: dict[Tensor, None] = {}
        for node in self._compiled:
            for tensor in (*node.arguments, *layer_tensors(node)):
                if tensor not in other and not tensor.has_data:
                    raise DataError(
                        node.where,
                        "one of its tensors holds no data",
                        tensor=repr(tensor),
                        fix="create it with data, fill or random",
                    )
                if tensor not in other:
                    found[tensor] = None
        return tuple(found)

    def _require_linkable(self, graphs: Sequence[CompiledGraph]) -> None:
        for graph in (self, *graphs):
            if not isinstance(graph, type(self)):
                raise DataTypeError(
                    f"{type(self).__name__}.link", f"{type(graph).__name__} is not a {type(self).__name__}"
                )
            graph._require_compiled("link")
            if GraphCompilationOptions.LINK_GRAPHS not in graph._options:
                raise StateError(
                    f"{type(self).__name__}.link",
                    "a graph was compiled without LINK_GRAPHS",
                    fix="compile each with it",
                )

    def _require_compiled(self, call: str) -> Device:
        if self.device is None:
            raise StateError(
                f"{type(self).__name__}.{call}", "the graph is not compiled", fix="call compile(device) first"
            )
        return self.device

    # Running

    def _fed(self, given: Mapping[Tensor, object], batch: int, options: ExecutionOptions) -> Found:
        """Arrays of this call's feeds; with `SKIP_WRITING…` those of the last call."""
        require_options(options, ExecutionOptions)
        if ExecutionOptions.SKIP_WRITING_INPUT_DATA_TO_DEVICE in options:
            # What was bound since the last call was written later.
            written = {k.owner: a for k, a in self._written.items() if self._bound[k.owner] is _current(k.owner)}
            return self._feeds.arrays(written, batch, self._require_compiled("execute"))
        self._written = self._feeds.arrays(given, batch, self._require_compiled("execute"))
        self._bound = {tensor: _current(tensor) for tensor in self._feeds.tensors}
        return self._written

    def _batch_size(self, given: int | None) -> int:
        """The batch size of a call, refused where it is another than declared and the result has other rows."""
        batch, declared = self._feeds.batch_size(given), self._feeds.batch
        ends = [node.sources[0] for node in self._compiled if node.is_loss] or self._compiled[-1].results
        rows = {tensor.shape[0] for tensor in ends}
        if batch != declared and not rows & {declared, 1}:
            raise ArgumentError(
                "execute",
                f"batch_size is {batch}, but the first input has {declared} rows and the result {rows.pop()}",
                fix="declare an input first whose first extent is the batch, or pass batch_size=None",
            )
        return batch

    def _arrays(self) -> Found:
        """Arrays that stay between calls. Fetched anew, since a parameter may have been bound to other memory."""
        return {**{value(tensor): tensor.torch() for tensor in self._held}, **self._constant_arrays()}

    def _constant_arrays(self) -> Found:
        return {value(tensor): array for tensor, array in self._constants.items()}

    def _launch(
        self,
        executable: Executable,
        arrays: Mapping[Key, torch.Tensor],
        options: ExecutionOptions,
        completion: Completion | None,
        keep: Callable[[Found], tuple[Tensor | None, torch.Tensor | None]],
    ) -> Execution:
        """Runs an executable and lets `keep` store what it found; the handle tells the rest."""
        device = self._require_compiled("execute")
        if completion is not None and not callable(completion):
            raise DataTypeError(
                "execute", f"completion is {type(completion).__name__}, not a function", fix="pass a function"
            )
        with turn(device), _current_device(device):
            execution = Execution(device, timed=ExecutionOptions.PROFILING in options)
            try:
                if ExecutionOptions.PER_LAYER_PROFILING in options:
                    found, execution.profile = profile(executable.part, arrays, device.torch)
                else:
                    found = executable(arrays)
                execution.finish(*keep(found))
            except ExecutionError as error:
                execution.fail(error)
                if completion is None:
                    raise
        synchronous = ExecutionOptions.SYNCHRONOUS in options
        if synchronous and execution.error is None:
            execution.wait()
        execution.announce(completion, waited=synchronous)
        return execution

    # Keeping results

    def _step(self, batch: int, training: bool) -> Step:
        """What to compute for a batch size."""
        raise NotImplementedError

    def _kept_keys(self) -> list[Key]:
        return [value(tensor) for tensor in self._kept()]

    def _kept(self) -> list[Tensor]:
        """Results that stay readable after one whole call."""
        nodes = self._compiled
        watched = [t for node in self._watched_nodes() for t in node.results]
        losses = [t for node in nodes if node.is_loss for t in (*node.results, *node.sources)]
        made = {t for node in nodes for t in node.results}
        return [t for t in dict.fromkeys([*self._outputs.values(), *nodes[-1].results, *losses, *watched]) if t in made]

    def _watched_nodes(self) -> list[Node]:
        debugging = GraphCompilationOptions.DEBUG_LAYERS in self._options
        return [node for node in self._compiled if debugging and node.layer.is_debugging_enabled]

    def _hold(self, results: Mapping[Tensor, torch.Tensor]) -> None:
        """Makes results readable through their tensors, and those of earlier calls unreadable."""
        for tensor in self._holding - results.keys():
            tensor.hold(None, "a whole call keeps its loss, last result and outputs; declare it with add_outputs")
        for tensor, array in results.items():
            tensor.hold(array)
        self._holding = set(results)

    def _answer(self, found: Mapping[Key, torch.Tensor]) -> tuple[Tensor, torch.Tensor | None]:
        """The loss, or the last result without a loss. The number is copied: the next call may write over it."""
        node = next((node for node in reversed(self._compiled) if node.is_loss), self._compiled[-1])
        result = node.results[0]
        return result, found[value(result)].clone() if node.is_loss else None

    def _check_outputs(self, outputs: Names) -> None:
        made = {tensor for node in self._compiled for tensor in node.results}
        for name, tensor in outputs.items() if self._compiled else ():
            if tensor not in made and not self._is_gradient(tensor):
                raise UnknownNameError(
                    "add_outputs", f"no layer makes the output '{name}' ({tensor!r})", fix="pass what node() returned"
                )

    def _is_gradient(self, tensor: Tensor) -> bool:
        return False

    def _key(self, tensor: Tensor) -> Key:
        """The array behind an output."""
        return value(tensor)

    def _check_destinations(self, outputs_data: Data | None, part: Part) -> None:
        """Refuses, before anything runs, memory for outputs that are not declared, not computed or do not fit."""
        for name, destination in (outputs_data or {}).items():
            if name not in self._outputs:
                known = ", ".join(f"'{one}'" for one in self._outputs) or "none"
                raise UnknownNameError(
                    "execute",
                    f"'{name}' is not an output of this graph",
                    known=known,
                    fix="declare it with add_outputs",
                )
            tensor, like = self._outputs[name], part.results.get(self._key(self._outputs[name]))
            where = f"Tensor '{tensor.label}' (output '{name}')"
            if like is None:
                raise DataError(where, "this pass does not compute it", fix="leave it out")
            buffers.destination(destination, like.shape, DataType.of(like.dtype), where)

    def _write_outputs(self, outputs_data: Data | None, found: Mapping[Tensor, torch.Tensor]) -> None:
        for name, destination in (outputs_data or {}).items():
            tensor = self._outputs[name]
            buffers.write(found[tensor], destination, f"Tensor '{tensor.label}' (output '{name}')")


def mixed(compute_type: DataType | torch.dtype | str | None) -> torch.dtype | None:
    """The type layers compute in, or None where it is what tensors declare."""
    if compute_type is None:
        return None
    kind = DataType.of(compute_type)
    if kind not in (DataType.FLOAT16, DataType.BFLOAT16):
        raise ArgumentError(
            "compile", f"compute_type is {kind.debug_description}", fix='use "bfloat16" or "float16", or leave it out'
        )
    return kind.torch


def _current_device(device: Device) -> AbstractContextManager[Any]:
    """Streams and events belong to the device that is current."""
    return torch.cuda.device(device.torch) if device.torch.type == "cuda" else nullcontext()


def _current(tensor: Tensor) -> torch.Tensor | None:
    return tensor.torch() if tensor.has_data else None


def require_options(options: Any, kind: type) -> None:
    """Refuses options of another kind."""
    if not isinstance(options, kind):
        raise DataTypeError("options", f"the options are {options!r}", fix=f"use {kind.__name__}")


def results_of(found: Mapping[Key, torch.Tensor]) -> dict[Tensor, torch.Tensor]:
    """The results among what was found, by tensor."""
    return {key.owner: array for key, array in found.items() if key.kind == "value"}
