"""What training and inference graphs share: adopted nodes, names for data, compilation, running, keeping results."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch

from stepgraph import draw
from stepgraph.checkpoint import restoring, saving
from stepgraph.checkpoint.report import RestoreReport
from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.program import Part
from stepgraph.compiler.step import Key, Step, layer_tensors, value
from stepgraph.device import Device
from stepgraph.errors import (
    ArgumentError,
    DataError,
    DataTypeError,
    ExecutionError,
    NumericsError,
    StateError,
    UnknownNameError,
)
from stepgraph.graph import Graph
from stepgraph.graphs.declared import DeclaredGraph
from stepgraph.graphs.settings import ChosenDevice, chosen, fusion_of, require_options
from stepgraph.layers.layer import Layer
from stepgraph.layers.node import Node
from stepgraph.optimizers import Optimizer
from stepgraph.runtime import execution as executions
from stepgraph.runtime.executable import Binding, Executable
from stepgraph.runtime.execution import Completion, Execution, turn
from stepgraph.runtime.feeds import MOST, Data, Names, merged
from stepgraph.runtime.indices import Indices
from stepgraph.runtime.losses import Loss
from stepgraph.runtime.profile import profile
from stepgraph.runtime.programs import Programs
from stepgraph.runtime.state import Progress
from stepgraph.system import surroundings
from stepgraph.system.interrupts import Uninterrupted
from stepgraph.system.surroundings import Precision
from stepgraph.tensors import buffers
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import DataType, ExecutionOptions, GraphCompilationOptions

logger = logging.getLogger("stepgraph")
Found = dict[Key, torch.Tensor]
# What a call results in: for which tensor, its array, and the loss.
Answer = tuple[Tensor | None, executions.Found | None, torch.Tensor | Loss | None]
NOTHING: Answer = (None, None, None)
current = attrgetter("current")


@dataclass(slots=True)
class Call:
    """What is known about the last call: batch size, number of its step, data, whether its random numbers are past."""

    batch: int
    step: int | None
    feeds: Found
    drew: bool = False


class CompiledGraph(DeclaredGraph):
    """A graph made from other graphs that can be compiled and executed.

    Args:
        graphs: the graphs whose nodes are adopted, in order; they stay usable and may be shared.
    """

    # What training graphs have; an inference graph has none of it.
    trains: ClassVar[bool] = False
    _loss_layer: Layer | None = None
    _loss_node: Node | None = None
    _optimizer: Optimizer | None = None
    _parameters: tuple[Tensor, ...] = ()
    _compute_type: torch.dtype | None = None

    def __init__(self, graphs: Sequence[Graph] = ()) -> None:
        super().__init__(graphs)
        # Replaced as a whole, never changed in place, as what is declared.
        self._constants: dict[Tensor, torch.Tensor] = {}
        self._options, self._checks_numerics = GraphCompilationOptions.NONE, False
        self._compute_type: torch.dtype | None = None
        self._tf32: bool | None = None
        self._precision = Precision()
        self._memory_limit: int | None = None
        self._compiled: tuple[Node, ...] = ()
        self._last_loss: Node | None = None
        self._held: tuple[Tensor, ...] = ()
        self._programs = self._new_programs()
        self._written: Found = {}
        self._last: Call | None = None
        self._given: list[torch.Tensor | None] = []
        self._changing: ExitStack | None = None
        self._call = ""  # what changes the graph, while it does
        self._checks_indices = False
        self._index_feeds: dict[int, Indices] = {}
        self._raising: set[int] = set()  # batch sizes for which operators find indices out of range by themselves
        self._holding: tuple[tuple[Tensor, Key], ...] = ()

    def add_outputs(self, outputs: Names) -> None:
        """Names tensors that stay readable after a call, and that `outputs_data` may ask for.

        On a graph that is compiled this makes a new plan, which is refused where it exceeds the memory limit.
        """
        declared = merged("output", self._outputs, outputs)
        self._check_outputs(declared)
        with self._all_or_nothing("add_outputs"):
            dropped = self.device is not None and any(tensor not in self._kept() for tensor in outputs.values())
            self._outputs = declared
            if dropped:  # executables were made to drop it
                self._programs = self._programs.keeping_anew()
                self._programs.executable("step" if self.trains else "inference", self._feeds.batch)

    # Saving

    def save(
        self, path: str | os.PathLike[str], *, keep: int | None = None, notes: Mapping[str, Any] | None = None
    ) -> Path:
        """Writes a checkpoint: everything needed to go on, and the graph itself. Returns its directory.

        A checkpoint that is there is replaced in one moment: killed at any time, the path holds the old one or the new.

        Args:
            path: the directory of the checkpoint; with `keep`, a folder for a series of them.
            keep: write `path/checkpoint-000001`, `…2` and so on, and keep the newest `keep` of them.
            notes: your own JSON values (an epoch, a score), given back by `restore`.
        """
        return saving.save(self, path, keep, notes)

    def restore(
        self, path: str | os.PathLike[str], *, partial: bool = False, only_parameters: bool = False
    ) -> RestoreReport:
        """Takes over what a checkpoint holds; afterwards training goes on as if it had never stopped.

        The graph may be compiled or not yet, for the device of the checkpoint or another. Tensors are matched by name.
        Nothing is changed unless the files are whole and everything fits.

        Args:
            path: a checkpoint, or a folder with a series of them, of which the latest is taken.
            partial: take what fits; the report tells what did not.
            only_parameters: leave optimizer, step counts and random numbers as they are.
        """
        return restoring.restore(self, path, partial, only_parameters)

    def _progress(self) -> Progress:
        """How far the graph has come."""
        return Progress()

    def _resume(self, progress: Progress) -> None:
        """Goes on from there."""

    # Compiling

    @contextmanager
    def _all_or_nothing(self, call: str) -> Iterator[None]:
        """A failed call leaves the graph as it was; what it makes does not depend on the caller's modes.

        No other call runs meanwhile. From `_commit` on, an interrupt waits until the change is complete.
        """
        with turn(None) if self.device is None else nullcontext(), turn(self.device):
            if self._changing is not None:  # a part of a larger change
                yield
                return
            before, changing = dict(self.__dict__), ExitStack()
            with changing:
                try:
                    self._changing, self._call = changing, call
                    with surroundings.tracing():
                        yield
                except BaseException:
                    with Uninterrupted():
                        self.__dict__.update(before)
                        for name in self.__dict__.keys() - before.keys():
                            del self.__dict__[name]
                    raise
                self._changing, self._call = None, ""

    def _commit(self) -> None:
        """Nothing can be refused any more: what follows in this change is done as a whole."""
        assert self._changing is not None
        self._changing.enter_context(Uninterrupted())

    def _new_programs(self, channels_last: bool | None = None) -> Programs:
        return Programs(self._step, self._kept_keys, self._require_fit, channels_last)

    def _require_fit(self, plan: MemoryPlan, part: str, batch: int) -> None:
        """Refuses a plan that needs more than the graph may."""

    def _prepare(
        self,
        device: ChosenDevice,
        options: GraphCompilationOptions,
        constants: Names | None,
        constants_data: Data | None,
        parameters: Sequence[Tensor] = (),
    ) -> None:
        """Everything about a compilation that is not tracing: device, nodes, constants, feeds, held tensors.

        Nothing but this graph changes: tensors move with `_settle`, when nothing can be refused any more.
        """
        self.device = chosen(f"{type(self).__name__}.compile", device, self.device)
        require_options(options, GraphCompilationOptions)
        self._options, self._checks_numerics = options, GraphCompilationOptions.CHECK_NUMERICS in options
        self._compiled = self._all_nodes()
        self._last_loss = next((node for node in reversed(self._compiled) if node.is_loss), None)
        if not self._compiled:
            raise StateError(f"{type(self).__name__}.compile", "the graph has no layers", fix="add nodes first")
        self._constants = self._read_constants(self.device, constants or {}, constants_data or {})
        self._feeds = self._feeds.find(self._compiled, {*self._constants, *parameters})
        # Others raise an error where an index is out of range, and go on with the next call.
        fused = GraphCompilationOptions.FUSE_LAYERS in options
        self._checks_indices = fused or self.device.torch.type != "cpu"
        self._index_feeds, self._raising = {}, set()
        self._check_outputs(self._outputs)
        self._held = self._find_held()
        self._programs, self._last = self._new_programs(), None

    def _settle(self) -> None:
        """What a compilation changes outside of the graph: tensors are on the device, and know it."""
        device = self._require_compiled("compile")
        arrays = [tensor.on(device) for tensor in self._held]  # the last that may fail: memory may run out
        self._commit()
        for tensor, array in zip(self._held, arrays, strict=True):
            tensor.settle(array, device)
        self._tell_device(device)

    def _tell_device(self, device: Device) -> None:
        """Every layer and tensor of a graph that has been compiled knows its device."""
        for node in self._compiled:
            node.layer.device_type = device.actual_device_type  # type: ignore[misc]
            for tensor in (*node.arguments, *node.results):
                tensor.device = device

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
                        fix="create it with data, fill or random, or give it data with bind_and_write_data",
                    )
                if tensor not in other:
                    found[tensor] = None
        return tuple(found)

    def _linkable(self, graphs: Sequence[CompiledGraph]) -> tuple[Any, ...]:
        """This graph and the others, with all they are linked with already, each once, if they can be linked."""
        if not isinstance(graphs, Sequence):
            raise DataTypeError(
                f"{type(self).__name__}.link", f"{type(graphs).__name__} is not a list", fix="pass a list of graphs"
            )
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
        return tuple(dict.fromkeys(one for graph in (self, *graphs) for one in graph._linked))

    def _require_compiled(self, call: str) -> Device:
        if self.device is None:
            raise StateError(
                f"{type(self).__name__}.{call}", "the graph is not compiled", fix="call compile(device) first"
            )
        return self.device

    # Running

    def _refresh(self) -> None:
        """Brings in what was assigned since the last call."""

    def _fed(self, given: Mapping[Tensor, object], batch: int, options: ExecutionOptions) -> Found:
        """Arrays of this call's feeds; with `SKIP_WRITING…` those of the last call."""
        if type(options) is not ExecutionOptions:
            require_options(options, ExecutionOptions)
        if options and ExecutionOptions.SKIP_WRITING_INPUT_DATA_TO_DEVICE in options:
            # What was bound since the last call was written later.
            then = zip(self._written.items(), self._given, strict=True)
            given = {key.owner: array for (key, array), bound in then if key.owner.current is bound}
        indices = self._indices(batch) if self._checks_indices and batch not in self._raising else None
        assert self.device is not None
        return self._feeds.arrays(given, batch, self.device, indices)

    def _indices(self, batch: int) -> Indices:
        """Which feeds are indices, and of what, for a batch size."""
        found = self._index_feeds.get(batch)
        if found is None:
            if len(self._index_feeds) >= MOST:
                self._index_feeds.clear()
            found = self._index_feeds[batch] = Indices(self._step(batch, False), self._feeds.spoken)
            known = self._programs.executables.get(("step" if self.trains else "inference", batch))
            if known is not None and known.runs_alone:  # in one thread an index out of range is an ordinary error
                self._raising.add(batch)
        return found

    def _accept(self, feeds: Found, batch: int, options: ExecutionOptions) -> None:
        """Remembers the data of a call that nothing refuses any more."""
        if not options or ExecutionOptions.SKIP_WRITING_INPUT_DATA_TO_DEVICE not in options:
            self._written, self._given = feeds, [*map(current, self._feeds.tensors)]
        step = None if self._optimizer is None else self._optimizer.time_step
        self._last = Call(batch, step, feeds)

    def _batch_size(self, given: int | None) -> int:
        """The batch size of a call, refused where it is another than declared and the result has other rows."""
        declared = self._feeds.batch
        if given is None:
            return declared
        batch = self._feeds.batch_size(given)
        if batch == declared:
            return batch
        ends = [node.sources[0] for node in self._compiled if node.is_loss] or self._compiled[-1].results
        rows = {tensor.shape[0] for tensor in ends}
        if not rows & {declared, 1}:
            raise ArgumentError(
                "execute",
                f"batch_size is {batch}, but the first input has {declared} rows and the result {rows.pop()}",
                fix="declare an input first whose first extent is the batch, or pass batch_size=None",
            )
        return batch

    def _bound(self, part: str, batch: int) -> Binding:
        """A part with the arrays that stay between calls, looked up anew where a tensor was bound to other memory."""
        return self._programs.executable(part, batch).bound(self._memory, self._arrays)

    def _memory(self) -> Iterable[Any]:
        """What `_arrays` depends on: if none of it changed, the arrays are the same. Checked in every call."""
        return map(current, self._held)

    def _arrays(self) -> Found:
        """Arrays that stay between calls."""
        return {**{value(tensor): tensor.torch() for tensor in self._held}, **self._constant_arrays()}

    def _constant_arrays(self) -> Found:
        return {value(tensor): array for tensor, array in self._constants.items()}

    def _launch(
        self,
        binding: Binding,
        arrays: Mapping[Key, torch.Tensor],
        options: ExecutionOptions,
        completion: Completion | None,
        keep: Callable[[Found], Answer],
    ) -> Execution:
        """Runs an executable and lets `keep` store what it found; the handle tells the rest.

        The caller has its turn on the device since it took its data, so that a call of another thread sees nothing of
        this one. An interrupt comes before or after, never in between.
        """
        assert self.device is not None
        timed = bool(options) and ExecutionOptions.PROFILING in options
        execution = Execution(self.device, timed, announced=completion is not None)
        with Uninterrupted():
            try:
                execution.finish(*keep(self._run(binding, arrays, options, execution)))
            except (ExecutionError, NumericsError) as error:
                self._indices(binding.executable.step.batch[1]).require_all(arrays)
                execution.fail(error)
                if completion is None:
                    raise
        return execution

    def _announced(self, execution: Execution, options: ExecutionOptions, completion: Completion | None) -> Execution:
        """Waits for the work where that was asked for, and tells who wants to know; not while others wait for it."""
        if not options and completion is None:
            return execution
        synchronous = ExecutionOptions.SYNCHRONOUS in options
        if synchronous and execution.error is None:
            execution.wait()
        if completion is not None:
            execution.announce(completion, waited=synchronous)
        return execution

    def _run(
        self, binding: Binding, arrays: Mapping[Key, torch.Tensor], options: ExecutionOptions, execution: Execution
    ) -> Found:
        """What one run of an executable gives."""
        executable = binding.executable
        if not options or ExecutionOptions.PER_LAYER_PROFILING not in options:
            return executable(binding, arrays)
        found, execution.profile = profile(executable.part, binding.filled(arrays), executable.step.device)
        return found

    # Keeping results

    def _step(self, batch: int, training: bool) -> Step:
        """What to compute for a batch size: the forward pass, here."""
        device = self._require_compiled("compile").torch
        return Step(
            self._compiled,
            self._feeds.tensors,
            device,
            (self._feeds.batch, batch),
            compute_type=self._compute_type,
            chooses_kernels=GraphCompilationOptions.DETERMINISTIC not in self._options,
            # The matrix units of GPUs read channels; the other order would be turned around before each convolution.
            channels_last=device.type == "cuda" and GraphCompilationOptions.DETERMINISTIC not in self._options,
            fusion=fusion_of(self._options, device, planned=self._memory_limit is not None),
            precision=self._precision,
            memory_limit=self._memory_limit,
            names=draw.parameter_names(self._compiled),
        )

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

    def _hold(self, executable: Executable, found: Found) -> None:
        """Makes results readable through their tensors, and those of earlier calls unreadable."""
        if self._holding is not executable.results:
            for tensor in dict(self._holding).keys() - dict(executable.results).keys():
                tensor.hold(None, "a whole call keeps its loss, last result and outputs; declare it with add_outputs")
            self._holding = executable.results
        for tensor, key in self._holding:
            tensor.hold(found[key])

    def _answer(self, executable: Executable, found: Found) -> Answer:
        """The loss, or the last result without a loss."""
        if self._last_loss is None:
            last = self._compiled[-1].results[0]
            return last, executable.result(found, value(last)), None
        loss = executable.loss(found)
        return self._last_loss.results[0], loss, loss

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


def require_completion(completion: Any) -> None:
    """Refuses what cannot be called when the work is done."""
    if completion is not None and not callable(completion):
        raise DataTypeError(
            "execute", f"completion is {type(completion).__name__}, not a function", fix="pass a function"
        )


def results_of(found: Mapping[Key, torch.Tensor]) -> dict[Tensor, torch.Tensor]:
    """The results among what was found, by tensor."""
    return {key.owner: array for key, array in found.items() if key.kind == "value"}
