"""Training graphs: compiled once, then executed as whole iterations or phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from stepgraph.compiler.step import gradient
from stepgraph.errors import ArgumentError, DataTypeError, StateError, UnknownNameError
from stepgraph.graph import Graph
from stepgraph.graphs.compiled import NOTHING, Answer, Found, current, logger, require_completion, results_of
from stepgraph.graphs.differentiated import DifferentiatedGraph
from stepgraph.graphs.recipe import checked, require_tensor
from stepgraph.graphs.settings import SAME_DEVICE, ChosenDevice, limited, mixed, tf32_allowed
from stepgraph.layers.layer import Layer
from stepgraph.optimizers import Optimizer, number
from stepgraph.runtime.execution import Completion, Execution, turn
from stepgraph.runtime.feeds import Data, Names
from stepgraph.runtime.gradients import added, summed
from stepgraph.runtime.state import Progress, TrainingState, bound_buffers
from stepgraph.system.surroundings import Precision
from stepgraph.tensors.tensor import Tensor, TensorOptimizerDeviceData, TensorParameter
from stepgraph.types import DataType, ExecutionOptions, GraphCompilationOptions

_NONE = ExecutionOptions.NONE
_is_updatable = attrgetter("is_updatable")


class TrainingGraph(DifferentiatedGraph):
    """A graph that learns: forward, gradient and update, in one call or three.

    Args:
        graphs: graphs whose nodes are adopted, in order. Further nodes may be added to the training graph itself.
        loss_layer: compares the last result with the labels. None where loss nodes or outside code do.
        optimizer: updates the parameters. None computes gradients only; `compile_optimizer` may add one later.

    Example:
        >>> x, y = Tensor((4, 1)), Tensor((4, 1))
        >>> graph = Graph()
        >>> prediction = graph.node(FullyConnectedLayer.create(1, 1), x)
        >>> training = TrainingGraph([graph], LossLayer.mean_squared_error(), SGDOptimizer(learning_rate=0.1))
        >>> training.add_inputs({"x": x}, {"y": y})
        >>> training.compile(Device.cpu())
        >>> losses = [training.execute({"x": [0, 1, 2, 3]}, {"y": [5, 7, 9, 11]}).loss for _ in range(100)]
        >>> losses[-1] < 0.1
        True
    """

    def __init__(
        self, graphs: Sequence[Graph] = (), loss_layer: Layer | None = None, optimizer: Optimizer | None = None
    ) -> None:
        super().__init__(graphs, loss_layer, optimizer)
        self._updatable: list[bool] = []
        self._takes_seeds = False
        self._state: TrainingState | None = None
        self._pending: Progress | None = None

    # Preparing

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer given at creation or with `compile_optimizer`; assign its numbers at any time."""
        if self._state is not None:
            self._state.count_steps()
        return self._optimizer

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied with before the gradient pass, in float16; None otherwise. May be assigned."""
        return None if self._state is None else self._state.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if self._state is None or self._state.loss_scale is None:
            raise StateError(
                "loss_scale", "the graph does not scale its loss", fix='compile with compute_type="float16"'
            )
        if not number("loss_scale", "loss_scale", scale) > 0:
            raise ArgumentError("loss_scale", f"the scale is {scale}", fix="give a positive number")
        self._state.loss_scale = scale

    def set_training_tensor_parameters(self, parameters: Sequence[TensorParameter]) -> None:
        """Makes input tensors trainable: they keep their data in the graph and the optimizer updates them."""
        own = {tensor for node in self.nodes for tensor in node.layer.parameters.values()}
        for parameter in parameters:
            if not isinstance(parameter, TensorParameter):
                raise DataTypeError(
                    "set_training_tensor_parameters",
                    f"{type(parameter).__name__} is not a TensorParameter",
                    fix="wrap the tensor: TensorParameter(tensor)",
                )
            if parameter.tensor in own:
                raise ArgumentError(
                    "set_training_tensor_parameters",
                    f"{parameter.tensor!r} belongs to a layer and is trained already",
                    fix="leave it out",
                )
        with self._all_or_nothing("set_training_tensor_parameters"):
            self._parameters = tuple(dict.fromkeys(parameter.tensor for parameter in parameters))
            if self.device is not None:
                constants = {str(t.tensor_id): t for t in self._constants if t not in self._parameters}
                data = {name: self._constants[t].cpu() for name, t in constants.items()}
                self.compile(self.device, self._options, constants, data, **self._settings())

    def compile(
        self,
        device: ChosenDevice = SAME_DEVICE,
        options: GraphCompilationOptions = GraphCompilationOptions.NONE,
        input_tensors: Names | None = None,
        input_tensors_data: Data | None = None,
        *,
        compute_type: DataType | torch.dtype | str | None = None,
        tf32: bool | None = None,
        memory_limit: int | None = None,
    ) -> None:
        """Compiles the whole step for `device`; afterwards its memory is known and `execute` compiles nothing.

        Separate phases, evaluation and other batch sizes are compiled when they are first asked for, which is logged.

        Args:
            device: where to run; left out, a graph that was compiled before keeps its device.
            options: `DEBUG_LAYERS`, `DISABLE_LAYER_FUSION`, `LINK_GRAPHS`, `COMPUTE_ALL_GRADIENTS`, `DETERMINISTIC`,
                `FUSE_LAYERS`, `CHECK_NUMERICS`.
            input_tensors: inputs that are constant; they need no data when executing.
            input_tensors_data: their data; a tensor's own data if not given.
            compute_type: mixed precision: layers compute in bfloat16 or float16, while parameters, optimizer state,
                losses and what you read stay float32. float16 scales the loss and skips updates that are not finite.
            tf32: whether a GPU may multiply float32 matrices on its TF32 units, with 10 bits of mantissa; None takes
                what `torch.backends` says now (PyTorch's default: convolutions may, matrix products may not).
            memory_limit: bytes the step may need, as `memory_plan.total` counts them. Results that would not fit are
                dropped and computed again, at the cost of time; what still does not fit is refused.
        """
        with _all_or_none(self._linked, "compile"):
            self._compute_type, self._tf32 = mixed(compute_type), tf32_allowed(tf32)
            self._memory_limit, self._precision = limited(memory_limit), Precision.of(self._tf32)
            for tensor in self._parameters:
                tensor.torch()  # raises, by name, where there is nothing to train
            self._prepare(device, options, input_tensors, input_tensors_data, self._parameters)
            _rebuild(self._others())
            self._build()
            for graph in self._linked:
                graph._settle()
            if self._pending is not None:
                self._resume(self._pending)

    def bind_optimizer_data(
        self, data: Sequence[Any], tensor: Tensor, device_data: Sequence[TensorOptimizerDeviceData] | None = None
    ) -> None:
        """Gives one parameter optimizer buffers to start from, in the optimizer's order (Adam: momentum, velocity)."""
        require_tensor("bind_optimizer_data", tensor)
        if self.device is not None and tensor not in self._trainable():
            raise UnknownNameError(
                "bind_optimizer_data", f"{tensor!r} is not trained by this graph", fix="pass a layer's parameter"
            )
        if self.device is not None and self._optimizer is not None and len(data) != len(self._optimizer.slots):
            slots = ", ".join(self._optimizer.slots) or "none"
            raise ArgumentError(
                "bind_optimizer_data",
                f"{len(data)} buffers were given, {self._optimizer.rule} takes {slots}",
                fix="give one buffer for each",
            )
        tensor.bind_optimizer_data(data, device_data)
        if self.device is not None and self._optimizer is not None:
            self._training_state.adopt(tensor)

    def compile_optimizer(self, optimizer: Optimizer) -> None:
        """Gives a compiled graph an optimizer, or another one."""
        self._require_compiled("compile_optimizer")
        with self._all_or_nothing("compile_optimizer"):
            self._optimizer = checked(optimizer)
            self._restart()

    def link(self, graphs: Sequence[TrainingGraph]) -> None:
        """Joins sub-graphs compiled with `LINK_GRAPHS`.

        A result of one that another reads is handed over, and its gradient handed back. A parameter of several
        sub-graphs is one parameter: the first graph that has it updates it with the sum of the gradients.
        """
        group = self._linkable(graphs)
        with _all_or_none(group, "link"):
            for graph in group:
                graph._linked = group
            _rebuild(group)
            for graph in group:
                graph._settle()

    # Executing

    def execute(
        self,
        inputs_data: Data,
        loss_labels_data: Data | None = None,
        loss_label_weights_data: Data | None = None,
        *,
        outputs_data: Data | None = None,
        batch_size: int | None = None,
        options: ExecutionOptions = _NONE,
        completion: Completion | None = None,
    ) -> Execution:
        """One training iteration: forward, gradient, update. The loss is that of the parameters before the update.

        Args:
            inputs_data: data by input name; longer than needed is fine.
            loss_labels_data: labels by name.
            loss_label_weights_data: label weights by name.
            outputs_data: memory by output name, to be written.
            batch_size: rows of this call, fewer or more than declared; None or 0 uses the tensors' own.
            options: with `FORWARD_FOR_INFERENCE` only the forward pass runs, in inference mode.
            completion: called once with (loss or last result, error, seconds).
        """
        device = self._require_compiled("execute")
        if completion is not None:
            require_completion(completion)
        with turn(device):
            self._refresh()
            batch = self._batch_size(batch_size)
            given = self._feeds.named(inputs_data, loss_labels_data, loss_label_weights_data)
            feeds = self._fed(given, batch, options)
            evaluating = bool(options) and ExecutionOptions.FORWARD_FOR_INFERENCE in options
            learning = not evaluating and (self._last_loss is not None or self._has_seed(batch))
            if learning and len(self._linked) > 1 and self._exchanges():
                raise StateError(
                    "TrainingGraph.execute",
                    "a linked graph would miss the gradients of this one",
                    fix="run execute_forward, execute_gradient and execute_optimizer_update on each linked graph",
                )
            binding = self._bound("evaluation" if evaluating else "step" if learning else "forward only", batch)
            if outputs_data:
                self._check_destinations(outputs_data, binding.executable.part)

            def keep(found: Found) -> Answer:
                self._hold(binding.executable, found)
                if not evaluating:  # an evaluation leaves the passes before it alone
                    self._has_drawn()
                    self._forget_passes(found)
                if learning and binding.executable.counts_steps:
                    self._training_state.updated()
                if outputs_data:
                    self._write_outputs(outputs_data, results_of(found) | self._gradients.by_handle(found))
                return self._answer(binding.executable, found)

            seeds = self._seeds(batch) if learning and self._takes_seeds else {}
            self._accept(feeds, batch, options)
            execution = self._launch(binding, feeds | seeds if seeds else feeds, options, completion, keep)
        return execution if completion is None and not options else self._announced(execution, options, completion)

    def execute_forward(
        self,
        batch_size: int | None = None,
        options: ExecutionOptions = _NONE,
        *,
        outputs_data: Data | None = None,
        completion: Completion | None = None,
    ) -> Execution:
        """The forward pass on data written with `bind_and_write_data`; every result stays readable."""
        device = self._require_compiled("execute_forward")
        if completion is not None:
            require_completion(completion)
        with turn(device):
            self._refresh()
            batch = self._batch_size(batch_size)
            feeds = self._fed({}, batch, options)
            evaluating = ExecutionOptions.FORWARD_FOR_INFERENCE in options
            binding = self._bound("evaluation" if evaluating else "forward", batch)
            self._check_destinations(outputs_data, binding.executable.part)

            def keep(found: Found) -> Answer:
                self._hold(binding.executable, found)
                if not evaluating:  # an evaluation leaves the passes before it alone
                    self._has_drawn()
                    self._saved, self._forward_batch = feeds | found, batch
                self._write_outputs(outputs_data, results_of(found))
                return self._answer(binding.executable, found)

            self._accept(feeds, batch, options)
            execution = self._launch(binding, feeds, options, completion, keep)
        return self._announced(execution, options, completion)

    def execute_gradient(
        self,
        batch_size: int | None = None,
        options: ExecutionOptions = _NONE,
        *,
        outputs_data: Data | None = None,
        completion: Completion | None = None,
    ) -> Execution:
        """The gradient pass after `execute_forward`; every gradient that is computed stays readable.

        It replaces the gradients of the last pass. With `ACCUMULATE_GRADIENTS` it adds to those that no update has
        used yet.
        """
        device = self._require_compiled("execute_gradient")
        if completion is not None:
            require_completion(completion)
        with turn(device):
            self._refresh()
            batch = self._check_forward(batch_size)
            binding = self._bound("gradient", batch)
            self._check_destinations(outputs_data, binding.executable.part)
            adding = ExecutionOptions.ACCUMULATE_GRADIENTS in options
            kept = self._gradients.to_add_to([gradient(t) for t in self._trainable()]) if adding else {}

            def keep(found: Found) -> Answer:
                self._gradients.replace(added(kept, found))
                self._write_outputs(outputs_data, self._gradients.by_handle(self._gradients.found))
                return NOTHING

            execution = self._launch(binding, self._saved | self._seeds(batch), options, completion, keep)
        return self._announced(execution, options, completion)

    def execute_optimizer_update(
        self, options: ExecutionOptions = _NONE, *, completion: Completion | None = None
    ) -> Execution:
        """Updates the parameters with the gradients of the last gradient pass, as often as it is called."""
        device = self._require_compiled("execute_optimizer_update")
        if completion is not None:
            require_completion(completion)
        with turn(device):
            self._refresh()
            if self._optimizer is None:
                raise StateError(
                    "execute_optimizer_update", "the graph has no optimizer", fix="call compile_optimizer(optimizer)"
                )
            if not self._gradients.are_known:
                raise StateError(
                    "execute_optimizer_update",
                    "there are no gradients",
                    fix="call execute_forward and execute_gradient first",
                )

            binding = self._bound("update", self._feeds.batch)
            gradients = summed(self._gradients, self._found_elsewhere(), self._trainable())
            for _, key in binding.opened:
                if key not in gradients:
                    raise StateError(
                        "execute_optimizer_update",
                        f"{key.owner!r} has no gradient: it was not trained when the last gradient pass ran",
                        fix="call execute_forward and execute_gradient again",
                    )

            def keep(found: Found) -> Answer:
                if binding.executable.counts_steps:
                    self._training_state.updated()
                self._gradients.used = True
                self._saved, self._forward_batch = {}, None  # they belong to the parameters before the update
                return NOTHING

            execution = self._launch(binding, gradients, options, completion, keep)
        return self._announced(execution, options, completion)

    def synchronize_updates(self) -> None:
        """Brings parameters and statistics home: afterwards the caller's own memory holds the new values."""
        self._require_compiled("synchronize_updates")
        for tensor in self._held:
            tensor.synchronize_data()

    # Compiling again, resuming, and between the calls

    def _progress(self) -> Progress:
        if self._state is None:
            time = None if self._optimizer is None else self._optimizer.time_step
            return self._pending or Progress(time_step=time, buffers=bound_buffers(self.nodes))
        found, unused = self._state.progress(), {} if self._gradients.used else self._gradients.found
        found.gradients = {key.owner: array for key, array in unused.items() if key.kind == "gradient"}
        return found

    def _resume(self, progress: Progress) -> None:
        """Goes on from there; a graph that is not compiled yet does so when it is."""
        self._pending = progress if self._state is None else None
        if self._state is not None:
            self._state.resume(progress)
            self._forget_passes()
            if progress.gradients:
                place = self._state.device.torch
                self._gradients.replace({gradient(t): a.to(place) for t, a in progress.gradients.items()})

    def _build(self) -> None:
        """Traces and plans the step; refuses it where it does not fit. Nothing but this graph changes."""
        self._updatable = [*map(_is_updatable, self._held)]
        step = self._programs.executable("step", self._feeds.batch).step
        self._takes_seeds = bool(step.seeded)

    def _settle(self, saved: Found | None = None) -> None:
        """Takes over what was built: optimizer buffers, tensors on the device, no passes but those that are `saved`."""
        device, before = self._require_compiled("compile"), self._state
        kept = before if before is not None and before.device == device else TrainingState(device)
        scaled = self._compute_type is torch.float16
        state = kept.attached(self._optimizer, self._trainable() if self._optimizer else (), scaled)
        super()._settle()
        state.begin(fresh=kept is not before)
        self._state = state
        if saved is None:
            self._forget_passes()
        else:
            self._saved = saved

    def _restart(self) -> None:
        """Builds and settles anew."""
        _rebuild([self])
        self._settle()

    def _again(self, reason: str, keeps_passes: bool = False) -> None:
        if self.device is not None:
            logger.info("compiling again: %s", reason)
            with _all_or_none(self._linked, "execute"):
                _rebuild(self._linked)
                for graph in self._linked:
                    graph._settle(graph._repeated_forward() if keeps_passes else None)

    @property
    def _training_state(self) -> TrainingState:
        assert self._state is not None
        return self._state

    def _refresh(self) -> None:
        if self._updatable != [*map(_is_updatable, self._held)]:
            self._again("other parameters are updatable", keeps_passes=True)
        self._training_state.refresh()

    def _memory(self) -> Iterable[Any]:
        return chain((self._training_state.arrays,), map(current, self._held))

    def _arrays(self) -> Found:
        return super()._arrays() | self._training_state.arrays

    def _check_forward(self, batch_size: int | None) -> int:
        if self._forward_batch is None:
            raise StateError(
                "execute_gradient",
                "there is no forward pass to go back through",
                fix="call execute_forward first, not for inference; again after each update",
            )
        if batch_size and batch_size != self._forward_batch:
            raise ArgumentError(
                "execute_gradient",
                f"batch_size is {batch_size}, the forward pass ran with {self._forward_batch}",
                fix="leave it out",
            )
        return self._forward_batch


@contextmanager
def _all_or_none(graphs: Sequence[TrainingGraph], call: str) -> Iterator[None]:
    """Several graphs change together, or none does."""
    with ExitStack() as stack:
        for graph in graphs:
            stack.enter_context(graph._all_or_nothing(call))
        yield


def _rebuild(graphs: Sequence[TrainingGraph]) -> None:
    """Compiles linked graphs again: each takes gradients from the new programs of the others."""
    for graph in graphs:
        graph._programs = graph._new_programs(graph._programs.channels_last)
    for graph in graphs:
        graph._build()
