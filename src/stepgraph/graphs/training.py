"""Training graphs: forward, gradient and update as one compiled step, or separately."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from numbers import Integral
from typing import Any, overload

import numpy as np
import torch

from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.program import PartName
from stepgraph.compiler.ranks.parallel import Parallel
from stepgraph.compiler.settings import SAME_DEVICE, ChosenDevice, Settings, chosen, require_options
from stepgraph.compiler.step import SHARE, KeyKind, gradient, source_gradient, user_gradient, value
from stepgraph.device import Device
from stepgraph.errors import ArgumentError, DataTypeError, StateError, UnknownNameError
from stepgraph.graph import Graph
from stepgraph.graphs import synchronized
from stepgraph.graphs.agreement import compiling, require_divisible, require_same, share_state, warn_of_shared_rows
from stepgraph.graphs.averaging import AverageTensors, averages_of, checked_decay, exchange, require_own
from stepgraph.graphs.compilation import Arrays, Compilation
from stepgraph.graphs.compiled import CompiledGraph, require_completion
from stepgraph.graphs.inference import InferenceGraph, inference_of
from stepgraph.graphs.planning import Plans
from stepgraph.graphs.repetition import Before, Read, Repetition
from stepgraph.graphs.session import NOTHING, Answer, Session, announced, results_of
from stepgraph.graphs.sharded import Shards
from stepgraph.layers.layer import Layer
from stepgraph.layers.node import Node
from stepgraph.optimizers import Optimizer, number
from stepgraph.runtime.declaration import Declaration
from stepgraph.runtime.execution import Completion, Execution, turn
from stepgraph.runtime.feeds import Data, Names, Passed
from stepgraph.runtime.gradients import Gradients, added, summed
from stepgraph.runtime.rank_calls import RankCall
from stepgraph.runtime.state import Progress, TrainingState, bound_buffers
from stepgraph.runtime.world import ALONE, World, joined, own_device
from stepgraph.tensors.arrivals import Arrivals
from stepgraph.tensors.tensor import Tensor, TensorOptimizerDeviceData, TensorParameter
from stepgraph.types import DataType, ExecutionOptions, GraphCompilationOptions

# Every step reads these; looking up a member of an enumeration takes longer.
_NONE, _STEP = ExecutionOptions.NONE, PartName.STEP
logger = logging.getLogger("stepgraph")


class TrainingGraph(CompiledGraph):
    """A graph that learns: forward, gradient and update, in one call or three.

    Args:
        graphs: graphs whose nodes are adopted, in order. You can add more nodes to the training graph itself.
        loss_layer: compares the last result with the labels. None if loss nodes or outside code do so.
        optimizer: updates the parameters. None computes gradients only; `compile_optimizer` can add one later.
        average: the decay `d` of a moving average of the trained parameters, `A = d A + (1 - d) W` after each update,
            which starts from the first parameters. See `averages` and `averaged`.

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

    trains = True

    def __init__(
        self,
        graphs: Sequence[Graph] = (),
        loss_layer: Layer | None = None,
        optimizer: Optimizer | None = None,
        *,
        average: float | None = None,
    ) -> None:
        super().__init__(graphs)
        if loss_layer is not None and not isinstance(loss_layer, Layer):
            raise DataTypeError(
                "TrainingGraph", f"loss_layer is {type(loss_layer).__name__}, not a layer", fix="use a LossLayer"
            )
        checked = None if optimizer is None else _checked(optimizer)
        decay = None if average is None else checked_decay(average)
        self._declared = replace(self._declared, loss_layer=loss_layer, optimizer=checked, average=decay)
        self._pending: Progress | None = None  # restored before the graph is compiled
        self._shards: Shards | None = None
        self._plans = Plans()
        self._repetition: Repetition | None = None  # of the last plain step of this session

    # Preparing

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer passed at creation or to `compile_optimizer`; assign its hyperparameters at any time."""
        if self._state is not None:
            self._state.count_steps()
        return self._declared.optimizer

    @property
    def loss_scale(self) -> float | None:
        """The factor applied to the loss before the gradient pass in float16; None otherwise. Can be assigned."""
        return None if self._state is None else self._state.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if self._state is None or self._state.loss_scale is None:
            raise StateError(
                "loss_scale", "the graph does not scale its loss", fix='compile with compute_type="float16"'
            )
        if not number("loss_scale", "loss_scale", scale) > 0:
            raise ArgumentError("loss_scale", f"the scale is {scale}", fix="pass a positive number")
        self._state.loss_scale = scale

    @property
    def average(self) -> float | None:
        """The decay of the parameters' moving averages; None if there are none. Assign another for later updates."""
        return self._declared.average

    @average.setter
    def average(self, decay: float) -> None:
        if self._declared.average is None:
            raise StateError("average", "the graph keeps no averages", fix="create it with average=0.999")
        self._declared = replace(self._declared, average=checked_decay(decay))
        if self._state is not None and SHARE in self._state.arrays:
            self._state.set_decay(decay)

    @property
    def averages(self) -> dict[Tensor, torch.Tensor]:
        """The moving averages of the trained parameters: copies, on the graph's device."""
        session = self.require_session("averages")
        with turn(session.device), torch.no_grad():
            self._meet_for_averages()
            return {tensor: array.clone() for tensor, array in averages_of(session, "averages").items()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the block, parameters hold their moving averages, for every graph that has these layers.

        Evaluate and run inference graphs there. Training and saving are refused; afterwards the parameters are back.

        Example:
            >>> with training.averaged():  # doctest: +SKIP
            ...     scores = evaluate(training, test_data)
        """
        session = self.require_session("averaged")
        if session.state is not None:
            require_own(session.state, "averaged")
        self._meet_for_averages()
        exchange(session)
        try:
            yield
        finally:
            exchange(self.require_session("averaged"))

    def _meet_for_averages(self) -> None:
        """Makes sure that every rank reads averages, if each has only a part of them.

        Which is so only behind the first update, if that has been accepted.
        """
        if self.session is not None:
            self.session.require_accepted()
        if self._state is not None and self._state.averages_are_sliced and not self._state.is_averaged:
            self.meet("averages")

    def set_training_tensor_parameters(self, parameters: Sequence[TensorParameter]) -> None:
        """Makes input tensors trainable: the graph keeps their data and the optimizer updates them."""
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
                    f"{parameter.tensor!r} belongs to a layer, which already trains it",
                    fix="leave it out",
                )
        declared = replace(self.declaration, parameters=tuple(dict.fromkeys(one.tensor for one in parameters)))
        now = self.compilation
        if now is None:
            self._declared = declared
            return
        constants = {str(t.tensor_id): t for t in now.constants if t not in declared.parameters}
        data = {name: now.constants[t].cpu() for name, t in constants.items()}
        self._compile(now.device, now.settings, constants, data, declared)

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
        deterministic: bool | None = None,
        check_numerics: bool | None = None,
        fuse: bool | None = None,
        all_gradients: bool | None = None,
        debug_layers: bool | None = None,
        link_graphs: bool | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        """Compiles the whole step for `device`; afterwards its memory is known and `execute` compiles nothing.

        Separate phases, evaluation and other batch sizes are compiled on first use, which is logged.

        Args:
            device: where to run: a `Device`, or a name such as `"cuda"` or `"cpu"`. By default, a graph that was
                compiled before keeps its device.
            options: flags that the keywords below also set: `DETERMINISTIC`, `CHECK_NUMERICS`, `FUSE_LAYERS`,
                `DISABLE_LAYER_FUSION`, `COMPUTE_ALL_GRADIENTS`, `DEBUG_LAYERS`, `LINK_GRAPHS`.
            input_tensors: inputs that are constant; `execute` needs no data for them.
            input_tensors_data: their data; by default, each tensor's own.
            compute_type: mixed precision: layers compute in bfloat16 or float16, while parameters, optimizer state,
                losses and what you read stay float32. float16 scales the loss and skips non-finite updates.
            tf32: whether a GPU may multiply float32 matrices in TF32, with a 10-bit mantissa; None uses the current
                setting of `torch.backends` (PyTorch's default allows TF32 for convolutions, not for matrix products).
            memory_limit: bytes the step may need, as counted by `memory_plan.total`. Results that would not fit are
                recomputed, which takes time; a step that still does not fit is rejected.
            deterministic: use PyTorch's own kernels, none chosen by measurement, and fuse nothing.
            check_numerics: roll back a step that produces a NaN or an infinity, and say which layer produced it.
            fuse: fuse layers before the first step (True) or never (False); by default, on CUDA while steps run, and on
                the CPU tiny steps from step 20,000 on.
            all_gradients: also compute gradients that no update needs: of inputs and of frozen layers.
            debug_layers: keep results and gradients of layers with `is_debugging_enabled` readable.
            link_graphs: prepare the graph for `link`.
            parallel: train with all processes that torchrun started, or in this one as they would. Kernels are then
                not chosen by measurement, and operators fused only with `fuse=True`.
        """
        device = own_device(chosen("TrainingGraph.compile", device, self.device), parallel is not None)
        with self.telling_failures(), self._comparing_first(device, parallel):
            settings = Settings.checked(
                options,
                compute_type,
                tf32,
                memory_limit,
                deterministic=deterministic,
                check_numerics=check_numerics,
                fuse=fuse,
                all_gradients=all_gradients,
                debug_layers=debug_layers,
                link_graphs=link_graphs,
                parallel=parallel,
            )
            self._compile(device, settings, input_tensors, input_tensors_data)
        if self._shards is not None:
            share_state(self._shards.session, self._shards.world)
            self._shards.forget_changes()

    @property
    def world(self) -> World:
        """The ranks that train this graph together, as `world.rank` and `world.size`: 0 and 1 without `parallel`."""
        return ALONE if self._shards is None else self._shards.world

    def memory_plan_for(
        self,
        batch_size: int,
        *,
        ranks: int | None = None,
        parallel: Parallel | None = None,
        device: ChosenDevice = SAME_DEVICE,
        compute_type: DataType | torch.dtype | str | None = None,
        memory_limit: int | None = None,
    ) -> MemoryPlan:
        """The memory that an update would need with this many rows; nothing is run or kept.

        A graph that is not compiled can be planned, too, with or without memory for its tensors. With `ranks`, the
        plan is that of the rank that needs the most, and includes what it sends to the others.

        Args:
            batch_size: the rows of an update.
            ranks: the number of processes that train together; they need not exist.
            parallel: how they divide the batch; by default, as the graph is compiled.
            device: where it would run; by default, where the graph is compiled for.
            compute_type: as in `compile`; by default, as the graph is compiled.
            memory_limit: as in `compile`; by default, as the graph is compiled.

        Example:
            >>> training.memory_plan_for(512, ranks=64, parallel=Parallel(shards=64)).sent  # doctest: +SKIP
            979894272
        """
        given = {"compute_type": compute_type, "memory_limit": memory_limit, "parallel": parallel}
        asked = self._to_plan(device, **given)
        return asked.memory_plan_for(batch_size) if ranks is None else self._plans.of_rank(asked, batch_size, ranks)

    @property
    def bytes_sent(self) -> int:
        """The bytes of gradients and parameters that this rank sends to others in each update; 0 if it is alone."""
        return 0 if self._shards is None else self._shards.session.compilation.traffic.total

    def inference(self, *, weights: str = "current", **settings: Any) -> InferenceGraph:
        """An inference graph over the same layers, which sees every update.

        It leaves out losses and labels, and inputs that only they need. If this graph is compiled, it is compiled, too,
        with the same settings.

        Args:
            weights: `"current"`, or `"average"` for the moving averages of the parameters, which it follows, too.
            settings: settings of `InferenceGraph.compile`, which replace those of this graph.

        Example:
            >>> training.inference().execute({"image": pictures}).result  # doctest: +SKIP
        """
        if weights not in ("current", "average"):
            raise ArgumentError("inference", f"weights is {weights!r}", fix='pass "current" or "average"')
        averages = None if weights == "current" else self._average_tensors()
        return inference_of(self, averages, **settings)

    def _average_tensors(self) -> AverageTensors:
        return AverageTensors(lambda: self.require_session("inference"), self._meet_for_averages)

    def bind_optimizer_data(
        self, data: Sequence[Any], tensor: Tensor, device_data: Sequence[TensorOptimizerDeviceData] | None = None
    ) -> None:
        """Sets the initial optimizer buffers of one parameter, in the optimizer's order (Adam: momentum, velocity)."""
        _require_tensor("bind_optimizer_data", tensor)
        now, optimizer = self.compilation, self._declared.optimizer
        if now is not None and tensor not in now.trainable:
            raise UnknownNameError(
                "bind_optimizer_data", f"{tensor!r} is not trained by this graph", fix="pass a layer's parameter"
            )
        own = self._declared.slots(tensor)
        if now is not None and optimizer is not None and len(data) != len(own):
            slots = ", ".join(own) or "none"
            raise ArgumentError(
                "bind_optimizer_data",
                f"{len(data)} buffers were passed, but {optimizer.rule} takes {slots}",
                fix="pass one array per buffer",
            )
        tensor.bind_optimizer_data(data, device_data)
        if self._state is not None and optimizer is not None:
            self._state.adopt(tensor)

    def compile_optimizer(self, optimizer: Optimizer) -> None:
        """Sets or replaces the optimizer of a compiled graph."""
        self.require_session("compile_optimizer")
        with self.telling_failures():
            self._again("compile_optimizer", replace(self._declared, optimizer=_checked(optimizer)))

    def link(self, graphs: Sequence[TrainingGraph]) -> None:
        """Connects sub-graphs compiled with `LINK_GRAPHS`.

        A result of one that another reads is passed on, and its gradient is passed back. A parameter of several
        sub-graphs is a single parameter: the first graph that has it updates it with the sum of the gradients.
        """
        group = self._linkable(graphs)
        now = self.require_session("link").compilation
        with self._changing():
            self._replace("link", lambda others: now.renewed(others, now.declaration), graphs=group)

    def stop_gradient(self, tensors: Sequence[Tensor]) -> None:
        """Stops gradients at these tensors."""
        with self.telling_failures():
            if not isinstance(tensors, Iterable):
                kind = type(tensors).__name__
                raise DataTypeError("stop_gradient", f"{kind} is not a list of tensors", fix="pass a list of tensors")
            for tensor in tensors:
                _require_tensor("stop_gradient", tensor)
            declared = replace(self._declared, stopped=self._declared.stopped | frozenset(tensors))
            if self.session is None:
                self._declared = declared
            else:
                self._again("stop_gradient", declared, "gradients stop at other tensors")

    def keep_predictions(self) -> None:
        """Keeps what losses compare readable after every step, however large it is: for metrics."""
        if self._declared.keeps_predictions:
            return
        declared, session = replace(self._declared, keeps_predictions=True), self.session
        if session is None:
            self._declared = declared
            return
        old = session.compilation
        with self._changing(), self.telling_failures():
            dropped = not all(old.programs.keep(value(tensor)) for tensor in old.unasked)
            new = old.redeclared(keeps_predictions=True, rebuilds=dropped)
            new.prepare("keep_predictions")
            self.meet("keep_predictions")
            self._redeclare(new, declared)

    # Gradients

    def allocate_user_gradient(self, tensor: Tensor) -> Tensor:
        """A gradient tensor for a result that outside code uses; write dL/dresult to it before the pass.

        It is added to the gradients from layers. Unwritten, it counts as zero.
        """
        _require_tensor("allocate_user_gradient", tensor)
        if tensor not in {result for node in self._looked_at() for result in node.results}:
            raise UnknownNameError(
                "allocate_user_gradient", f"{tensor!r} is not a result of this graph", fix="pass what node() returned"
            )
        if tensor not in self._declared.user_gradients:
            handle = Tensor(tensor.descriptor, label=f"gradient of {tensor.label}")
            handle.device = self.device
            known = self._declared.user_gradients
            self._take_user_gradient(tensor, replace(self._declared, user_gradients={**known, tensor: handle}))
        return self._declared.user_gradients[tensor]

    def _take_user_gradient(self, tensor: Tensor, declared: Declaration) -> None:
        session = self.session
        if session is None:
            self._declared = declared
        elif tensor not in session.compilation.seeded():
            reason = f"{tensor.label} takes a gradient from outside"
            self._again("allocate_user_gradient", declared, reason, keeps_passes=True)
        else:
            with self._changing():
                self._redeclare(session.compilation.redeclared(user_gradients=declared.user_gradients), declared)

    def _user_gradients(self, given: Mapping[Tensor | str, Any]) -> dict[Tensor, Any]:
        """Gradients from outside, by the result they are for."""
        if not isinstance(given, Mapping):
            kind = type(given).__name__
            raise DataTypeError("execute_gradient", f"{kind} is not a dictionary", fix="pass {result: gradient}")
        found = {}
        for name, values in given.items():
            tensor = self._declared.outputs.get(name) if isinstance(name, str) else name
            if tensor is None:
                known = ", ".join(f"'{one}'" for one in self._declared.outputs) or "none"
                problem = f"'{name}' is not an output of this graph"
                raise UnknownNameError("execute_gradient", problem, known=known, fix="pass the result itself")
            _require_tensor("execute_gradient", tensor)
            found[tensor] = values
        return found

    def gradient_tensor(self, input: Tensor) -> Tensor | None:
        """The gradient of an input, or None if it is not computed (not compiled, or not needed)."""
        _require_tensor("gradient_tensor", input)
        now = self.compilation
        if now is None or input not in {*now.feeds.tensors, *now.constants, *now.declaration.parameters}:
            return None
        if input in now.trainable and gradient(input) not in self.gradients.handles:
            self.meet("gradient_tensor", now.numbered([input]))  # ranks have parts of it, which updates then exchange
        known = now.programs.outline(now.feeds.batch).outputs
        return self.gradients.handle(gradient(input), input) if gradient(input) in known else None

    def source_gradient_tensors(self, layer: Layer) -> list[Tensor]:
        """The layer's own contributions to its sources' gradients, one per source; empty for other graphs' layers."""
        nodes = [node for node in self._compiled_nodes if node.layer is layer]
        return [
            self.gradients.handle(source_gradient(node, i), t) for node in nodes for i, t in enumerate(node.sources)
        ]

    def result_gradient_tensors(self, layer: Layer) -> list[Tensor]:
        """The gradients of the layer's results, summed over their consumers; empty if there are none."""
        now = self.compilation
        if now is None:
            return []
        results = [t for node in now.nodes if node.layer is layer for t in node.results]
        known = now.programs.outline(now.feeds.batch).outputs if results else {}
        return [self.gradients.handle(gradient(t), t) for t in results if gradient(t) in known]

    def gradient_data(self, parameter: Tensor, layer: Layer) -> np.ndarray | None:
        """The gradient of a layer's parameter, before clipping, rescaling and regularization.

        On the CPU the array is the graph's own: a pass that accumulates keeps adding to it. None if the layer is
        not trainable, or if the step was not run as separate forward and gradient passes.
        """
        nodes = [node for node in self._compiled_nodes if node.layer is layer]
        mine = bool(nodes) and parameter in nodes[0].trained
        found = self.gradients.found.get(gradient(parameter)) if mine and parameter.is_updatable else None
        return None if found is None else found.cpu().numpy()

    # Executing

    def execute(
        self,
        inputs_data: Data | None = None,
        loss_labels_data: Data | None = None,
        loss_label_weights_data: Data | None = None,
        *,
        outputs_data: Data | None = None,
        batch_size: int | None = None,
        options: ExecutionOptions = _NONE,
        completion: Completion | None = None,
    ) -> Execution:
        """Runs one training iteration: forward, gradient, update. The loss belongs to the parameters before the update.

        Args:
            inputs_data: data by input name; with `batch_size`, it may have more rows than needed.
            loss_labels_data: labels by name.
            loss_label_weights_data: label weights by name.
            outputs_data: memory by output name, which is overwritten.
            batch_size: rows of this call, fewer or more than declared; None or 0 uses the tensors' own.
            options: with `FORWARD_FOR_INFERENCE` only the forward pass runs, in inference mode.
            completion: called once with (loss or last result, error, seconds).
        """
        data, session = (inputs_data, loss_labels_data, loss_label_weights_data), self.session
        if session is None:
            session = self.require_session("execute")
        is_plain = options is _NONE and completion is None and outputs_data is None
        repetition, read = self._repetition, None
        if is_plain and repetition is not None:
            with turn(session.device):
                if repetition is self._repetition:
                    execution, read = repetition.run(data, batch_size)
                    if execution is not None:
                        return execution
        if completion is not None:
            require_completion(completion)
        if options:
            require_options(options, ExecutionOptions)
        evaluating = bool(options) and ExecutionOptions.FORWARD_FOR_INFERENCE in options
        if self._shards is None or evaluating:
            return self._executed(data, outputs_data, batch_size, options, completion, evaluating, read)
        with self.telling_failures(is_update=True):
            return self._executed(data, outputs_data, batch_size, options, completion, evaluating)

    def _executed(
        self,
        data: Passed,
        outputs_data: Data | None,
        batch_size: int | None,
        options: ExecutionOptions,
        completion: Completion | None,
        evaluating: bool,
        read: Read | None = None,
    ) -> Execution:
        """One whole call, with data that may have been read."""
        with turn(self.require_session("execute").device):
            switches = Tensor.switches
            session = self.refreshed("execute", updates=not evaluating)
            before = Before.of(session, switches)
            feeds, batch = session.read(data, batch_size, options) if read is None else read
            is_plain = options is _NONE and completion is None and outputs_data is None
            learning = not evaluating and (bool(session.compilation.losses) or session.has_seed(batch))
            if learning and session.state is not None and session.state.is_averaged:
                require_own(session.state, "execute")
            if learning:
                self._require_no_exchange(session)
            if learning and self._shards is not None:
                self._shards.world.place.step += 1
                return self._shards.execute(feeds, batch, options, outputs_data, completion)
            part = _STEP if learning else PartName.EVALUATION if evaluating else PartName.FORWARD_ONLY
            binding = session.bound(part, batch)
            if outputs_data:
                session.check_destinations(outputs_data, binding.executable.part.results)

            def keep(found: Arrays) -> Answer:
                if evaluating:  # it does not affect earlier passes
                    session.hold(binding.executable.results, found)
                else:
                    session.store(binding.executable, found)
                if outputs_data:
                    session.write_outputs(outputs_data, results_of(found) | session.gradients.by_handle(found))
                return session.answer(binding.executable, found, evaluating)

            seeds = session.seeds(batch) if learning and session.takes_seeds else {}
            session.accept(feeds, batch, options)
            arrays = feeds | seeds if seeds else feeds
            if is_plain and learning and session.starts_at_losses:
                self._repetition = Repetition(before, batch, binding)
            discard = session.discard_results if evaluating else session.discard_everything
            execution = session.launch(binding, arrays, options, completion, keep, discard)
        return execution if completion is None and not options else announced(execution, options, completion)

    def add_gradients(self, *data: Data, batch_size: int, adding: bool) -> Execution:
        """Runs a batch forward and back as one program, for an update of several batches.

        Unlike after separate passes, only what a whole call keeps is readable, besides the gradients.

        Args:
            data: inputs, labels and label weights, by name.
            batch_size: rows of the batch.
            adding: whether its gradients are added to those of the batches before it.
        """
        with turn(self.require_session("execute").device):
            session = self.refreshed("execute")
            self._require_no_exchange(session)
            feeds, batch = session.read(data, batch_size, _NONE)  # type: ignore[arg-type]
            binding = session.bound(PartName.SHARD, batch)
            kept = session.gradients.to_add_to([gradient(t) for t in session.compilation.trainable]) if adding else {}

            def keep(found: Arrays) -> Answer:
                session.hold(binding.executable.results, found)
                session.has_drawn()
                session.saved, session.forward_batch = {}, None
                new = {key: array for key, array in found.items() if key.kind is KeyKind.GRADIENT}
                session.gradients.replace(added(kept, new))
                return session.answer(binding.executable, found)

            session.accept(feeds, batch, _NONE)
            arrays = feeds | session.seeds(batch)
            return session.launch(binding, arrays, _NONE, None, keep, session.discard_results)

    def _require_no_exchange(self, session: Session) -> None:
        """Rejects a whole call of a graph whose gradients a linked one needs."""
        if len(self.linked) > 1 and session.compilation.exchanges:
            raise StateError(
                "TrainingGraph.execute",
                "a linked graph would not receive the gradients of this one",
                fix="run execute_forward, execute_gradient and execute_optimizer_update on each linked graph",
            )

    @overload
    def execute_forward(
        self,
        inputs_data: Data | None = None,
        loss_labels_data: Data | None = None,
        loss_label_weights_data: Data | None = None,
        *,
        outputs_data: Data | None = None,
        batch_size: int | None = None,
        options: ExecutionOptions = _NONE,
        completion: Completion | None = None,
    ) -> Execution: ...

    @overload
    def execute_forward(
        self,
        inputs_data: int,
        loss_labels_data: ExecutionOptions = _NONE,
        *,
        outputs_data: Data | None = None,
        completion: Completion | None = None,
    ) -> Execution: ...

    def execute_forward(
        self,
        inputs_data: Data | int | None = None,
        loss_labels_data: Data | ExecutionOptions | None = None,
        loss_label_weights_data: Data | None = None,
        *,
        outputs_data: Data | None = None,
        batch_size: int | None = None,
        options: ExecutionOptions = _NONE,
        completion: Completion | None = None,
    ) -> Execution:
        """Runs the forward pass; every result stays readable.

        Args:
            inputs_data: data by input name, unchanged until the gradient pass has read it. What is not passed must
                have been bound. A number is the batch size, followed by the options: ML Compute's order.
            loss_labels_data: labels by name.
            loss_label_weights_data: label weights by name.
            outputs_data: memory by output name, which is overwritten.
            batch_size: rows of this call, as in `execute`.
            options: with `FORWARD_FOR_INFERENCE`, in inference mode.
            completion: called once with (loss or last result, error, seconds).
        """
        if isinstance(loss_labels_data, ExecutionOptions):
            options, loss_labels_data = loss_labels_data, None
        if isinstance(inputs_data, Integral):
            batch_size, inputs_data = int(inputs_data), None
        device = self.require_session("execute_forward").device
        if completion is not None:
            require_completion(completion)
        with turn(device):
            session = self.refreshed("execute_forward")
            if ExecutionOptions.FORWARD_FOR_INFERENCE not in options:
                self._require_passes("execute_forward")
            data = inputs_data, loss_labels_data, loss_label_weights_data
            feeds, batch = session.read(data, batch_size, options)  # type: ignore[arg-type]
            evaluating = ExecutionOptions.FORWARD_FOR_INFERENCE in options
            binding = session.bound(PartName.EVALUATION if evaluating else PartName.FORWARD, batch)
            session.check_destinations(outputs_data, binding.executable.part.results)

            def keep(found: Arrays) -> Answer:
                session.hold(binding.executable.results, found)
                if not evaluating:  # an evaluation does not affect earlier passes
                    session.has_drawn()
                    session.saved, session.forward_batch = feeds | found, batch
                session.write_outputs(outputs_data, results_of(found))
                return session.answer(binding.executable, found, evaluating)

            session.accept(feeds, batch, options)
            discard = session.discard_results if evaluating else session.discard_passes
            execution = session.launch(binding, feeds, options, completion, keep, discard)
        return announced(execution, options, completion)

    def execute_gradient(
        self,
        user_gradients_data: Mapping[Tensor | str, Any] | int | None = None,
        options: ExecutionOptions = _NONE,
        *,
        outputs_data: Data | None = None,
        batch_size: int | None = None,
        completion: Completion | None = None,
    ) -> Execution:
        """Runs the gradient pass after `execute_forward`; every computed gradient stays readable.

        It replaces the gradients of the last pass. With `ACCUMULATE_GRADIENTS` it adds to those not yet used by
        an update.

        Args:
            user_gradients_data: gradients from outside code, dL/dresult by result or by output name. They are for this
                pass only; one of a result that has none yet recompiles the graph. A number is the batch size.
            options: `ACCUMULATE_GRADIENTS`, `SYNCHRONOUS`, `PROFILING`.
            outputs_data: memory by output name, which is overwritten.
            batch_size: rows of the forward pass; by default, as many as it had.
            completion: called once with (None, error, seconds).
        """
        if isinstance(user_gradients_data, Integral):
            user_gradients_data, batch_size = None, int(user_gradients_data)
        device = self.require_session("execute_gradient").device
        if completion is not None:
            require_completion(completion)
        with turn(device):
            session = self.refreshed("execute_gradient")
            self._require_passes("execute_gradient")
            batch = _forward_batch(session, batch_size)
            given = self._user_gradients(user_gradients_data or {})  # type: ignore[arg-type]
            passed = {user_gradient(tensor): session.seed(tensor, array, batch) for tensor, array in given.items()}
            for tensor in given:
                self.allocate_user_gradient(tensor)
            session = self.require_session("execute_gradient")
            binding = session.bound(PartName.GRADIENT, batch)
            session.check_destinations(outputs_data, binding.executable.part.results)
            adding = ExecutionOptions.ACCUMULATE_GRADIENTS in options
            kept = session.gradients.to_add_to([gradient(t) for t in session.compilation.trainable]) if adding else {}

            def keep(found: Arrays) -> Answer:
                session.gradients.replace(added(kept, found))
                session.write_outputs(outputs_data, session.gradients.by_handle(session.gradients.found))
                names = session.compilation.declaration.outputs
                # The next pass may add to gradients in place.
                whole = (
                    {key: kept[key].clone() if key in kept else array for key, array in found.items()} if names else {}
                )
                return *NOTHING[:4], session.outputs(binding.executable, whole, names)

            arrays = session.saved | session.seeds(batch) | passed
            execution = session.launch(binding, arrays, options, completion, keep)
        return announced(execution, options, completion)

    def execute_optimizer_update(
        self, options: ExecutionOptions = _NONE, *, completion: Completion | None = None
    ) -> Execution:
        """Updates the parameters with the gradients of the last gradient pass; each call applies them again."""
        device = self.require_session("execute_optimizer_update").device
        if completion is not None:
            require_completion(completion)
        with turn(device):
            session = self.refreshed("execute_optimizer_update")
            self._require_passes("execute_optimizer_update")
            if self._declared.optimizer is None:
                raise StateError(
                    "execute_optimizer_update", "the graph has no optimizer", fix="call compile_optimizer(optimizer)"
                )
            if not session.gradients.are_known:
                raise StateError(
                    "execute_optimizer_update",
                    "there are no gradients",
                    fix="call execute_forward and execute_gradient first",
                )

            if session.state is not None:
                require_own(session.state, "execute_optimizer_update")
            binding = session.bound(PartName.UPDATE, session.compilation.usual_batch)
            program = session.compilation.programs.program(session.compilation.usual_batch)
            gradients = summed(program, session.gradients, session.elsewhere())
            for _, key in binding.opened:
                if key not in gradients:
                    raise StateError(
                        "execute_optimizer_update",
                        f"{key.owner!r} has no gradient: it was not trained when the last gradient pass ran",
                        fix="call execute_forward and execute_gradient again",
                    )

            def keep(found: Arrays) -> Answer:
                if binding.executable.counts_steps and session.state is not None:
                    session.state.updated()
                session.gradients.used = True
                session.saved, session.forward_batch = {}, None  # they belong to the parameters before the update
                return NOTHING

            execution = session.launch(binding, gradients, options, completion, keep)
        return announced(execution, options, completion)

    def _require_passes(self, call: str) -> None:
        """Rejects separate passes of a graph whose updates are divided."""
        if self._shards is not None:
            raise StateError(
                f"TrainingGraph.{call}",
                "the graph was compiled with parallel, which divides whole updates",
                fix="call execute or fit, or compile without parallel",
            )

    def synchronize_updates(self) -> None:
        """Copies parameters and statistics back: afterwards your own arrays hold the new values."""
        session = self.require_session("synchronize_updates")
        session.require_accepted()
        for tensor in session.compilation.held:
            tensor.synchronize_data()

    # Between the calls

    def meet(self, call: str, detail: int = 0) -> None:
        """Makes sure that every rank makes this call, with the same detail; none has changed anything yet."""
        if self._shards is not None:
            self._shards.meet(RankCall.named(call), detail)

    @contextmanager
    def telling_failures(self, is_update: bool = False) -> Iterator[None]:
        """Around a call that all ranks make: if this one fails before they exchange anything, the others hear of it.

        Args:
            is_update: whether the call is an update.
        """
        before = self.world.place.number
        try:
            yield
        except Exception as error:
            if self._shards is not None:  # those that an update has compiled meanwhile
                self._shards.tell_failure(error, before, is_update)
            raise

    def comparing(self) -> AbstractContextManager[None]:
        """Around compiling again: if it fails on this rank, the others hear of it where they compare programs."""
        return compiling(self.world)

    def _comparing_first(self, device: Device, parallel: Parallel | None) -> AbstractContextManager[None]:
        """The same around compiling for the first time, when ranks have not met in another call."""
        if not isinstance(parallel, Parallel) or self._shards is not None:
            return nullcontext()
        return compiling(joined(device.torch, parallel.timeout))

    def refreshed(self, call: str, *, updates: bool = False) -> Session:
        """The state between calls, including what was assigned since the last one.

        Of several ranks, one may look at something by itself. So they only compile again in an update, which all make.
        """
        session = self.session
        if session is None or (session.is_outdated and (updates or self.world.is_alone)):
            self.require_session(call)
            self._again("execute", self._declared, "other parameters are updatable", keeps_passes=True)
            session = self.require_session(call)
        assert session.state is not None
        session.state.refresh()
        return session

    def progress(self) -> Progress:
        """The training state outside the tensors."""
        if self._state is None:
            optimizer = self._declared.optimizer
            time = None if optimizer is None else optimizer.time_step
            return self._pending or Progress(time_step=time, buffers=bound_buffers(self.nodes))
        require_own(self._state, "TrainingGraph")
        self.require_session("TrainingGraph").require_accepted()
        found, unused = self._state.progress(), {} if self.gradients.used else self.gradients.found
        found.gradients = {key.owner: array for key, array in unused.items() if key.kind == KeyKind.GRADIENT}
        return found

    def resume(self, progress: Progress, optimizer: Optimizer | None = None) -> None:
        """Continues from `progress`, with an optimizer's hyperparameters; if not compiled yet, after `compile`."""
        if optimizer is not None and self._declared.optimizer is not None:
            self._declared.optimizer.adopt(optimizer)
        session = self.session
        self._pending = progress if session is None else None
        if session is not None and session.state is not None:
            session.state.resume(progress)
            session.forget_passes()
            if progress.gradients:
                device = session.device.torch
                self.gradients.replace({gradient(t): a.to(device) for t, a in progress.gradients.items()})

    def average_from(self, restored: Collection[Tensor], averages: Mapping[Tensor, torch.Tensor]) -> None:
        """Continues the averages of restored parameters from other arrays, or from the parameters."""
        if self._state is not None:
            self._state.average_from(restored, averages)
        elif self.declaration.average is not None:
            kept = {t: one for t, one in self.progress().averages.items() if t not in restored}
            self._pending = replace(self.progress(), averages={**kept, **averages})

    @property
    def _state(self) -> TrainingState | None:
        return None if self.session is None else self.session.state

    @property
    def _compiled_nodes(self) -> tuple[Node, ...]:
        return () if self.session is None else self.session.compilation.nodes

    def _new_session(self, compilation: Compilation) -> Session:
        before, device, optimizer = self._state, compilation.device, compilation.declaration.optimizer
        kept = before if before is not None and before.device == device else TrainingState(device)
        scaled = compilation.settings.compute_type is torch.float16
        trained = compilation.trainable if optimizer else ()
        slots = {tensor: compilation.declaration.slots(tensor) for tensor in trained}
        state = kept.attached(
            optimizer,
            slots,
            scaled=scaled,
            decay=self._declared.average,
            factors=len(compilation.losses) if compilation.is_divided or len(compilation.losses) > 1 else 0,
            guarded=len(compilation.guarded),
            offsets=compilation.is_divided,
            decides=compilation.decides,
            ownership=compilation.ownership,
            world=compilation.world,
        )
        return Session(compilation, state, self.gradients, self._gradients_elsewhere, self.session)

    def _gradients_elsewhere(self) -> list[Gradients]:
        return [graph.gradients for graph in self.linked if graph is not self]

    def prepared(
        self, compilation: Compilation, arrived: Arrivals, keeps_passes: bool, same_call: bool
    ) -> Callable[[], None]:
        """Creates a session and returns a function that installs it and continues from previously restored state."""
        parallel, world = compilation.settings.parallel, ALONE
        if not same_call:
            _warn_of_nothing_to_train(compilation)
        if parallel is not None:
            require_divisible(compilation)
            world = compilation.world
            synchronized.require_one_shard_each(compilation, world)
            require_same(compilation, world)
            if world.is_first and not same_call:
                warn_of_shared_rows(compilation)
        put_in_place = super().prepared(compilation, arrived, keeps_passes, same_call)

        def put_and_resume() -> None:
            put_in_place()
            assert self.session is not None
            divided = parallel if compilation.is_divided else None
            self._shards = None if divided is None else Shards(self.session, divided, world)
            self._repetition = None
            if self._pending is not None:
                self.resume(self._pending)

        return put_and_resume


def _forward_batch(session: Session, batch_size: int | None) -> int:
    """The batch size of the forward pass that a gradient pass differentiates."""
    if session.forward_batch is None:
        raise StateError(
            "execute_gradient",
            "there is no forward pass to differentiate",
            fix="call execute_forward first, without FORWARD_FOR_INFERENCE, and again after each update",
        )
    if batch_size and batch_size != session.forward_batch:
        raise ArgumentError(
            "execute_gradient",
            f"batch_size is {batch_size}, but the forward pass ran with {session.forward_batch}",
            fix="leave it out",
        )
    return session.forward_batch


def _require_tensor(where: str, given: Any) -> None:
    """Rejects anything but a tensor."""
    if not isinstance(given, Tensor):
        raise DataTypeError(where, f"{type(given).__name__} is not a Tensor", fix="pass a Tensor of this graph")


def _checked(optimizer: Optimizer) -> Optimizer:
    """The optimizer, after a type check."""
    if not isinstance(optimizer, Optimizer) or not optimizer.rule:
        raise DataTypeError(
            "TrainingGraph", f"the optimizer is {type(optimizer).__name__}", fix="use SGDOptimizer or AdamOptimizer"
        )
    return optimizer


def _warn_of_nothing_to_train(compiled: Compilation) -> None:
    """Warns of an optimizer without anything to update, which would train without an effect; links may add to it."""
    declared, alone = compiled.declaration, len(compiled.group) == 1
    has_parameters = any(node.layer.parameters for node in compiled.nodes)
    if declared.optimizer is None or not compiled.losses or not has_parameters or compiled.trainable:
        return
    if alone and GraphCompilationOptions.LINK_GRAPHS not in compiled.settings.options:
        logger.warning("every parameter of the graph is frozen, so that training changes nothing")
