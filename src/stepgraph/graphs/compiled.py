"""What training and inference graphs share: named data, compilation, saving, inspection."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from rich.console import RenderableType

from stepgraph.checkpoint import restoring, saving
from stepgraph.checkpoint.kept import Kept
from stepgraph.checkpoint.restore_report import RestoreReport
from stepgraph.compiler.kernels import emulated
from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.pipeline import Report
from stepgraph.compiler.settings import SAME_DEVICE, ChosenDevice, Settings, chosen
from stepgraph.errors import ArgumentError, DataTypeError, StateError
from stepgraph.graph import Graph
from stepgraph.graphs import inspection
from stepgraph.graphs.compilation import Compilation, compiled, read_constants
from stepgraph.graphs.planning import to_plan
from stepgraph.graphs.session import Session
from stepgraph.layers import state
from stepgraph.layers.layer import Layer
from stepgraph.layers.node import Node
from stepgraph.optimizers import Optimizer
from stepgraph.runtime.declaration import Declaration
from stepgraph.runtime.execution import turn
from stepgraph.runtime.feeds import Data, Feeds, Names, merged
from stepgraph.runtime.gradients import Gradients
from stepgraph.runtime.numerics import NumericsReport
from stepgraph.runtime.profile import Profile
from stepgraph.runtime.state import Progress
from stepgraph.runtime.world import ALONE, World
from stepgraph.system import surroundings
from stepgraph.system.interrupts import Uninterrupted
from stepgraph.tensors.arrivals import Arrivals, sent
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import DataType, GraphCompilationOptions

logger = logging.getLogger("stepgraph")


class CompiledGraph(Graph):
    """A graph built from other graphs that can be compiled and executed.

    It has a declaration (its wiring and names) and, once compiled, a session (the state between calls) with
    a compilation (what to compute). Each change builds new ones and then swaps them in atomically.

    Args:
        graphs: the graphs whose nodes are adopted, in order; they stay usable and can be shared.

    Attributes:
        linked: the graphs connected with `link`, including this one.
        session: the state between calls; None before `compile`.
        gradients: the gradients of the last gradient pass.
    """

    trains: ClassVar[bool] = False

    def __init__(self, graphs: Sequence[Graph] = ()) -> None:
        super().__init__()
        self._graphs = _adoptable(type(self).__name__, graphs)
        self._declared = Declaration(type(self).__name__, self.trains)
        self.linked: tuple[Any, ...] = (self,)
        self._constants: tuple[Tensor, ...] = ()  # of a loaded graph that is not compiled yet
        self.session: Session | None = None
        self.gradients = Gradients()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses `copy` and `pickle` once compiled: programs and device memory belong to this process."""
        if self.session is not None:
            problem = "a compiled graph cannot be copied or pickled"
            raise StateError(type(self).__name__, problem, fix="save it with sg.save, and load it with sg.load")
        return super().__reduce_ex__(protocol)

    # What is declared

    @property
    def declaration(self) -> Declaration:
        """The current declaration, with the loss attached if it fits."""
        adopted = tuple(graph.nodes for graph in self._graphs)
        self._declared = replace(self._declared, adopted=adopted, own=tuple(self._nodes)).shown()
        return self._declared

    @property
    def compilation(self) -> Compilation | None:
        """The current compilation; None before `compile`."""
        return None if self.session is None else self.session.compilation

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The adopted nodes, followed by the graph's own."""
        return tuple(node for graph in self._graphs for node in graph.nodes) + tuple(self._nodes)

    @property
    def layers(self) -> list[Layer]:
        """Every layer once, in the order of its first node; the loss layer passed at creation comes last."""
        found = self.declaration
        return found.layers if found.wired else []

    @property
    def layer_count(self) -> int:
        """The number of layers added to this graph and to the graphs it adopted."""
        return sum(graph.layer_count for graph in self._graphs) + super().layer_count

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The inputs by name, including those that `compile` found automatically."""
        return dict(self._declared.feeds.inputs)

    @property
    def loss_labels(self) -> dict[str, Tensor]:
        """The labels by name."""
        return dict(self._declared.feeds.labels)

    @property
    def loss_label_weights(self) -> dict[str, Tensor]:
        """The label weights by name."""
        return dict(self._declared.feeds.weights)

    @property
    def outputs(self) -> dict[str, Tensor]:
        """The declared outputs by name."""
        return dict(self._declared.outputs)

    @property
    def linked_graphs(self) -> tuple[Any, ...]:
        """The graphs connected with `link`, including this one."""
        return self.linked

    @property
    def stopped(self) -> frozenset[Tensor]:
        """Tensors that pass no gradient back."""
        return self._declared.stopped

    def shown_nodes(self) -> tuple[Node, ...]:
        """The nodes to display, including the loss passed at creation."""
        return self.declaration.nodes

    def _is_batched(self, tensor: Tensor) -> bool:
        return self._declared.is_batched(tensor)

    def add_inputs(
        self, inputs: Names, loss_labels: Names | None = None, loss_label_weights: Names | None = None
    ) -> None:
        """Names the tensors that receive data in `execute`: inputs, labels, label weights. Calls accumulate."""
        feeds = self._declared.feeds.declare(inputs, loss_labels, loss_label_weights)
        self._declared = replace(self._declared, feeds=feeds)
        if self.session is not None:
            self.session.feeds = feeds

    def add_outputs(self, outputs: Names, *, kept: bool = True) -> None:
        """Names tensors that stay readable after a call and that `outputs_data` can request.

        On a compiled graph this creates a new plan, which is rejected if it exceeds the memory limit.

        Args:
            outputs: tensors by name.
            kept: whether a training step keeps them however large they are. If not, it keeps one of more than 16
                million numbers only for metrics; evaluation, `predict` and inference graphs always have them.
        """
        with self.telling_failures():
            self._add_outputs(outputs, kept)

    def _add_outputs(self, outputs: Names, kept: bool) -> None:
        declared = merged("output", self._declared.outputs, outputs)
        named_only = self._declared.named_only
        named_only = named_only - {*outputs.values()} if kept else named_only | {*outputs.values()}
        session = self.session
        if session is None:
            self._declared = replace(self._declared, outputs=declared, named_only=named_only)
            return
        old = session.compilation
        old.declaration.require_outputs(declared, self.gradients.handles.values())
        with self._changing():
            dropped = not all(old.programs.keep(self.gradients.key(tensor)) for tensor in outputs.values())
            # Existing executables discard what is asked for, or keep what nobody asks for any more.
            new = old.redeclared(outputs=declared, named_only=named_only, rebuilds=dropped or not kept)
            new.prepare("add_outputs")
            self.meet("add_outputs", old.numbered([*declared.values(), *(t for t in outputs.values() if kept)]))
            self._redeclare(new, replace(self._declared, outputs=declared, named_only=named_only))

    def _redeclare(self, compilation: Compilation, declared: Declaration) -> None:
        """Adopts a declaration that needs no new programs."""
        assert self.session is not None
        with Uninterrupted():
            compilation.group[compilation.index] = compilation
            before, self.session.compilation, self._declared = self.session.compilation, compilation, declared
            if before.programs.executables is not compilation.programs.executables:
                before.programs.release()

    def bind(self, data: Data, *, batch_size: int | None = None) -> None:
        """Makes arrays the data of inputs, labels and label weights, by name, until others are bound or passed.

        A later call needs no data for them: bind what stays the same, such as a mask.

        Args:
            data: arrays by input, label or label weight name; they are not copied on the CPU.
            batch_size: rows to read; by default, those that the graph declares or, with `BATCH`, all of them.

        Example:
            >>> training.bind({"mask": mask})  # doctest: +SKIP
            >>> training.execute({"text": text}, {"next": following})  # doctest: +SKIP
        """
        feeds, device = self.require_session("bind").feeds, self.require_session("bind").device
        tensors = {name: tensor for _, name, tensor in feeds}
        self._bind(data, tensors, device, batch_size, exact=not batch_size, where="bind")

    # Names

    @property
    def origin(self) -> Mapping[str, Tensor]:
        """The names that tensors had in imported models; of two models with the same names, the first keeps them."""
        found: dict[str, Tensor] = {}
        for names in (*(graph.origin for graph in self._graphs), self._origin):
            found |= {name: tensor for name, tensor in names.items() if name not in found}
        return found

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters and statistics by the names that `state_dict` uses; trained inputs as `input.name`."""
        found, declared = super().named_tensors(), self.declaration
        called = {tensor: name for _, name, tensor in declared.feeds}
        for tensor in declared.parameters:
            if tensor not in found.values():
                state.add(found, f"input.{called.get(tensor, tensor.label)}", tensor)
        return found

    def write_state(self, found: state.Match) -> None:
        """Writes values that were checked; no other thread runs a step meanwhile."""
        with nullcontext() if self.device is None else turn(self.device):
            super().write_state(found)

    # Saving

    @property
    def world(self) -> World:
        """The ranks that train this graph together, as `world.rank` and `world.size`: 0 and 1 without `parallel`."""
        return ALONE

    def save(
        self, path: str | os.PathLike[str], *, keep: int | None = None, notes: Mapping[str, Any] | None = None
    ) -> Path:
        """Writes a checkpoint: the graph and everything needed to continue training. Returns its directory.

        An existing checkpoint is replaced atomically: if the process is killed, the path holds the old or the new one.
        Of several ranks that train together, every one must call it: the first one writes, the others send it their
        part of the optimizer state.

        Args:
            path: the directory of the checkpoint; with `keep`, a folder for a series of them.
            keep: write `path/checkpoint-000001`, `…2` and so on, and keep the newest `keep` of them.
            notes: your own JSON values (an epoch, a score), returned by `restore`.
        """
        # No other thread may run a step while the arrays are read.
        with nullcontext() if self.device is None else turn(self.device), self.telling_failures():
            group = [graph.kept() for graph in self.linked]
            self.meet("save")
            return saving.save(group, self.linked.index(self), path, keep, notes, self.world)

    def restore(
        self, path: str | os.PathLike[str], *, partial: bool = False, only_parameters: bool = False
    ) -> RestoreReport:
        """Restores a checkpoint; training then continues as if it had never stopped.

        The graph need not be compiled, and its device can differ from the checkpoint's. Tensors are matched by name.
        Nothing changes unless the files are intact and everything fits.

        Args:
            path: a checkpoint, or a folder with a series of them, of which the latest is used.
            partial: restore what fits; the report lists the rest.
            only_parameters: leave the optimizer, step counts and random numbers unchanged. Averages come with their
                parameters, and start from them if the checkpoint has none.
        """
        group = [graph.kept() for graph in self.linked]
        found = restoring.read(group, path, partial, only_parameters, self.trains)
        with nullcontext() if self.device is None else turn(self.device), surroundings.tracing(), Uninterrupted():
            found.write_tensors()
            for graph, taken, averages in zip(self.linked, found.taken, found.averages, strict=True):
                if taken is not None:
                    graph.resume(taken.progress, taken.optimizer)
                elif only_parameters:
                    graph.average_from(found.arrays, averages)
        return found.report

    def kept(self) -> Kept:
        """Everything about this graph that a checkpoint stores."""
        now = self.compilation
        if now is None:
            constants = {tensor: tensor.torch() for tensor in self._constants}
            return Kept(self.declaration, None, constants, self.progress(), self.gradients.handles, self.origin)
        settings = now.settings
        return Kept(self.declaration, settings, now.constants, self.progress(), self.gradients.handles, self.origin)

    def progress(self) -> Progress:
        """The training state outside the tensors."""
        return Progress()

    def resume(self, progress: Progress, optimizer: Optimizer | None = None) -> None:
        """Continues from `progress`, with the hyperparameters of an optimizer."""

    def average_from(self, restored: Collection[Tensor], averages: Mapping[Tensor, torch.Tensor]) -> None:
        """Continues the averages of restored parameters from other arrays, or from the parameters."""

    def hold_constants(self, tensors: Sequence[Tensor]) -> None:
        """Makes inputs constant, with their current data, when the graph is compiled."""
        self._constants = tuple(tensors)

    # Compiling

    def meet(self, call: str, detail: int = 0) -> None:
        """Makes sure that every rank makes this call, with the same detail; none has changed anything yet."""

    def telling_failures(self, is_update: bool = False) -> AbstractContextManager[None]:
        """Around a call that all ranks make: if this one fails before they exchange anything, the others hear of it.

        Args:
            is_update: whether the call is an update.
        """
        return nullcontext()

    def comparing(self) -> AbstractContextManager[None]:
        """Around compiling again: if it fails on this rank, the others hear of it where they compare programs."""
        return nullcontext()

    def require_session(self, call: str) -> Session:
        """The state between calls; raises an error if the graph is not compiled."""
        if self.session is None:
            raise StateError(
                f"{type(self).__name__}.{call}", "the graph is not compiled", fix="call compile(device) first"
            )
        return self.session

    def _compile(
        self,
        device: ChosenDevice,
        settings: Settings,
        tensors: Names | None,
        data: Data | None,
        declared: Declaration | None = None,
    ) -> None:
        """Compiles the declaration for a device."""
        place = chosen(f"{type(self).__name__}.compile", device, self.device)
        if place.torch.type == "cpu" and settings.compute_type is not None:
            emulated.warn_once(settings.compute_type)
        with self._changing():
            constants = read_constants(tensors or {}, data or {}, place)
            wanted = self.declaration if declared is None else declared

            def make(group: list[Compilation]) -> Compilation:
                return compiled(wanted, place, settings, constants, self.gradients.handles, group)

            self._replace("compile", make, compares=settings.parallel is not None)

    def _again(self, call: str, declared: Declaration, reason: str = "", keeps_passes: bool = False) -> None:
        """Recompiles with another declaration; `keeps_passes` continues after the passes that have already run."""
        old = self.require_session(call).compilation
        if reason:
            logger.info("recompiling: %s", reason)
        with self._changing():
            changed = replace(
                old.declaration,
                stopped=declared.stopped,
                user_gradients=declared.user_gradients,
                optimizer=declared.optimizer,
            )

            def make(group: list[Compilation]) -> Compilation:
                return old.renewed(group, changed)

            self._replace(call, make, keeps_passes=keeps_passes, same_call=True)

    def _replace(
        self,
        call: str,
        make: Callable[[list[Compilation]], Compilation],
        *,
        graphs: Sequence[Self] | None = None,
        keeps_passes: bool = False,
        same_call: bool = False,
        compares: bool = True,
    ) -> None:
        """Creates new sessions for this graph and those linked with it, then swaps them in atomically.

        Every error is raised before anything is replaced. Ranks compare their programs if it `compares`.
        """
        together = self.linked if graphs is None else tuple(graphs)
        self.meet(call, int(compares))
        with self.comparing() if compares else nullcontext():
            changes = self._changes(call, make, together, keeps_passes, same_call)
        with Uninterrupted():
            for graph, change in zip(together, changes, strict=True):
                graph.linked = together
                change()
        self.world.place.settled = self.world.place.number

    def _changes(
        self,
        call: str,
        make: Callable[[list[Compilation]], Compilation],
        together: Sequence[Self],
        keeps_passes: bool,
        same_call: bool,
    ) -> list[Callable[[], None]]:
        """What installs a new session for each of some graphs, and cannot fail."""
        group: list[Compilation] = []
        for graph in together:
            if graph is self:
                make(group)
            else:
                known = graph.require_session(call).compilation
                known.renewed(group, known.declaration)
        arrivals = [sent(one.held, one.device) for one in group]  # while the step is recorded
        for one in group:
            one.prepare(call)
        return [
            graph.prepared(one, arrived, keeps_passes, same_call or graph is not self)
            for graph, one, arrived in zip(together, group, arrivals, strict=True)
        ]

    def prepared(
        self, compilation: Compilation, arrived: Arrivals, keeps_passes: bool, same_call: bool
    ) -> Callable[[], None]:
        """Creates a session and returns a function that installs it and cannot fail."""
        session = self._new_session(compilation)
        if same_call and self.session is not None:  # only details differ
            session.last, session.feeds = self.session.last, self.session.feeds
        if keeps_passes and self.session is not None:
            session.forward_batch, session.saved = self.session.forward_batch, self.session.saved
            session.saved = session.repeated_forward()
        arrays = arrived()

        def put_in_place() -> None:
            for tensor, array in zip(compilation.held, arrays, strict=True):
                tensor.settle(array, compilation.device)
            self._set_device(compilation)
            fresh = self.session is None or self.session.state is None or self.session.device != compilation.device
            if session.state is not None:
                session.state.begin(fresh)
            if self.session is not None:
                self.session.compilation.programs.release()
            self.session, self.device = session, compilation.device
            self._declared = self._declared_as(compilation.declaration, session.feeds)
            if not keeps_passes:
                session.forget_passes()

        return put_in_place

    def _declared_as(self, compiled: Declaration, feeds: Feeds) -> Declaration:
        """The declaration after `compiled` has been compiled."""
        names = ("loss_node", "loss_results", "optimizer", "parameters", "stopped", "user_gradients")
        return replace(self._declared, feeds=feeds, **{name: getattr(compiled, name) for name in names})

    def _new_session(self, compilation: Compilation) -> Session:
        return Session(compilation, None, self.gradients, lambda: [], self.session)

    def _set_device(self, compilation: Compilation) -> None:
        """Sets the device of every layer and tensor of a compiled graph."""
        device = compilation.device
        for node in compilation.nodes:
            node.layer.device_type = device.actual_device_type  # type: ignore[misc]
            for tensor in (*node.arguments, *node.results):
                tensor.device = device
        for handle in compilation.declaration.user_gradients.values():
            handle.device = device

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Excludes other calls, and makes the result independent of the caller's modes."""
        with turn(None) if self.device is None else nullcontext(), turn(self.device), surroundings.tracing():
            yield

    def _linkable(self, graphs: Sequence[Self]) -> tuple[Self, ...]:
        """This graph, the others, and everything already linked with them, each once, if they can be linked."""
        where = f"{type(self).__name__}.link"
        if not isinstance(graphs, Sequence):
            raise DataTypeError(where, f"{type(graphs).__name__} is not a list", fix="pass a list of graphs")
        for graph in (self, *graphs):
            if not isinstance(graph, type(self)):
                raise DataTypeError(where, f"{type(graph).__name__} is not a {type(self).__name__}")
            options = graph.require_session("link").compilation.settings.options
            if GraphCompilationOptions.LINK_GRAPHS not in options:
                raise StateError(where, "a graph was compiled without LINK_GRAPHS", fix="compile each with it")
        return tuple(dict.fromkeys(one for graph in (self, *graphs) for one in graph.linked_graphs))

    # Looking inside

    @property
    def memory_plan(self) -> MemoryPlan:
        """The memory that whole calls need, by kind: the maximum over compiled batch sizes; zero before the first.

        A graph with a declared batch size is compiled for it by `compile`, one with `BATCH` by the first call.
        """
        return MemoryPlan() if self.session is None else self.session.compilation.programs.plan

    @property
    def device_memory_size(self) -> int:
        """Bytes of all intermediates and optimizer state; 0 before `compile`."""
        return self.memory_plan.device_memory_size

    def memory_plan_for(
        self,
        batch_size: int,
        *,
        device: ChosenDevice = SAME_DEVICE,
        compute_type: DataType | torch.dtype | str | None = None,
    ) -> MemoryPlan:
        """The memory that a whole call would need with this many rows; nothing is run or kept.

        A graph that is not compiled can be planned, too, with or without memory for its tensors.

        Args:
            batch_size: the rows of a call.
            device: where it would run; by default, where the graph is compiled for.
            compute_type: as in `compile`; by default, as the graph is compiled.

        Example:
            >>> training.memory_plan_for(256).total  # doctest: +SKIP
            48234496
        """
        return self._to_plan(device, compute_type=compute_type).memory_plan_for(batch_size)

    def _to_plan(self, device: ChosenDevice, **settings: Any) -> Compilation:
        """The compilation to plan, which may never run."""
        with surroundings.tracing():
            return to_plan(
                self.declaration, self.compilation, self.gradients.handles, device, before=self.device, **settings
            )

    @property
    def pipeline(self) -> Report:
        """The passes that produced the compiled step and their effects: operators, bytes of intermediates, time.

        It prints as a table. The passes are rerun for it; the graph does not change.
        """
        now = self.require_session("pipeline").compilation
        return now.programs.report(now.whole, now.usual_batch)

    @property
    def executables(self) -> list[tuple[str, int]]:
        """What has been compiled so far, as (part, batch size); grows only when a call needs something new."""
        made = () if self.session is None else self.session.compilation.programs.executables
        return [(str(part), batch) for part, batch in made]

    def check_numerics(
        self,
        inputs_data: Data | None = None,
        loss_labels_data: Data | None = None,
        loss_label_weights_data: Data | None = None,
        *,
        batch_size: int | None = None,
    ) -> NumericsReport:
        """Finds the first layer and phase that produces a NaN or an infinity, and changes nothing.

        Reruns a step operator by operator, on copies of everything it would change. Only what the step leaves
        behind counts: the loss, trained gradients, parameters, optimizer state and statistics. An intermediate infinity
        that does not reach any of these is ignored.

        Args:
            inputs_data: a batch to try. By default, that of the last call, with the current parameters: if its update
                has already made them NaN, the report says so; `CHECK_NUMERICS` catches this in time.
            loss_labels_data: its labels.
            loss_label_weights_data: its label weights.
            batch_size: its rows; by default, the tensors' own.

        Example:
            >>> print(training.check_numerics())  # doctest: +SKIP
            Everything is finite in step 12.
        """
        given = (inputs_data, loss_labels_data, loss_label_weights_data)
        with turn(self.require_session("check_numerics").device):
            return inspection.check_numerics(self.refreshed("check_numerics"), given, batch_size)

    def profile(
        self,
        inputs_data: Data | None = None,
        loss_labels_data: Data | None = None,
        loss_label_weights_data: Data | None = None,
        *,
        batch_size: int | None = None,
        repeat: int = 3,
    ) -> Profile:
        """Time by layer and phase, measured operator by operator; nothing is learned.

        Synchronizing after each operator adds overhead, so the sum exceeds the time of a step, especially on a GPU.
        `execute` with `PER_LAYER_PROFILING` measures a real training step.

        Args:
            inputs_data: a batch; by default, that of the last call.
            loss_labels_data: its labels.
            loss_label_weights_data: its label weights.
            batch_size: its rows; by default, the tensors' own.
            repeat: how often the step runs; the minimum time of each operator counts.

        Example:
            >>> print(training.profile({"image": images}, {"label": labels}))  # doctest: +SKIP
        """
        if isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 1:
            raise ArgumentError("profile", f"repeat is {repeat!r}", fix="pass an integer ≥ 1")
        given = (inputs_data, loss_labels_data, loss_label_weights_data)
        with turn(self.require_session("profile").device):
            return inspection.profiled(self.refreshed("profile"), given, batch_size, repeat)

    def refreshed(self, call: str) -> Session:
        """The state between calls, including what was assigned since the last one."""
        return self.require_session(call)

    def __rich__(self) -> RenderableType:
        return inspection.table(self._title, self._looked_at(), self.compilation)

    def _repr_svg_(self) -> str:
        return inspection.svg(self._looked_at(), self._declared)

    def _repr_html_(self) -> str:
        return inspection.html(self._title, self._looked_at(), self._declared, self.compilation)

    def _looked_at(self) -> tuple[Node, ...]:
        return self.shown_nodes() if self.session is None else self.session.compilation.nodes

    @property
    def _title(self) -> str:
        return f"{type(self).__name__} on {self.device}" if self.device else f"{type(self).__name__}, not compiled"


def _adoptable(where: str, graphs: Sequence[Graph]) -> tuple[Graph, ...]:
    """The graphs to combine, each passed once."""
    if not isinstance(graphs, Sequence):
        raise DataTypeError(where, f"graphs is {type(graphs).__name__}, not a list", fix="pass a list of Graph")
    for graph in graphs:
        if not isinstance(graph, Graph):
            raise DataTypeError(where, f"{type(graph).__name__} is not a graph", fix="pass a list of Graph")
    if len(set(graphs)) != len(graphs):
        raise ArgumentError(where, "a graph was passed twice", fix="pass each graph once")
    return tuple(graphs)


def require_completion(completion: Any) -> None:
    """Rejects a completion handler that is not callable."""
    if completion is not None and not callable(completion):
        raise DataTypeError(
            "execute", f"completion is {type(completion).__name__}, not a function", fix="pass a function"
        )
