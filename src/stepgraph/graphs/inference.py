"""Inference graphs: the forward pass of layers that may be in training elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepgraph.compiler.program import PartName
from stepgraph.compiler.settings import SAME_DEVICE, ChosenDevice, Settings
from stepgraph.compiler.step import value
from stepgraph.graphs.compilation import Arrays
from stepgraph.graphs.compiled import CompiledGraph, require_completion
from stepgraph.graphs.session import Answer, announced, results_of
from stepgraph.runtime.execution import Completion, Execution, turn
from stepgraph.runtime.feeds import Data, Names
from stepgraph.types import DataType, ExecutionOptions, GraphCompilationOptions


class InferenceGraph(CompiledGraph):
    """A compiled forward pass. It shares the parameters of its layers, so it sees the updates of every training step.

    Dropout passes its source through; normalization uses running statistics. Nodes can be added to the inference graph
    itself, for example a softmax that training does not need.

    Example:
        >>> x = Tensor((1, 2))
        >>> graph = Graph()
        >>> y = graph.node(ActivationLayer.relu(), x)
        >>> inference = InferenceGraph([graph])
        >>> inference.add_inputs({"x": x})
        >>> inference.compile(Device.cpu())
        >>> inference.execute({"x": [[-1.0, 2.0]]}).result.numpy()
        array([[0., 2.]], dtype=float32)
    """

    def compile(
        self,
        device: ChosenDevice = SAME_DEVICE,
        options: GraphCompilationOptions = GraphCompilationOptions.NONE,
        input_tensors: Names | None = None,
        input_tensors_data: Data | None = None,
        *,
        compute_type: DataType | torch.dtype | str | None = None,
        tf32: bool | None = None,
    ) -> None:
        """Compiles for `device`; by default, for the previous device.

        Inputs in `input_tensors` become constants with the data passed here.

        With `compute_type`, layers compute in bfloat16 or float16; what you read keeps its declared type. `tf32`
        is the same as in `TrainingGraph.compile`.
        """
        settings = Settings.checked(options, compute_type, tf32)
        self._compile(device, settings, input_tensors, input_tensors_data)

    def link(self, graphs: Sequence[InferenceGraph]) -> None:
        """Connects sub-graphs compiled with `LINK_GRAPHS`: a result of one that another reads needs no data."""
        group = self._linkable(graphs)
        for graph in group:
            graph.linked = group

    def execute(
        self,
        inputs_data: Data,
        loss_labels_data: Data | None = None,
        loss_label_weights_data: Data | None = None,
        *,
        outputs_data: Data | None = None,
        batch_size: int | None = None,
        options: ExecutionOptions = ExecutionOptions.NONE,
        completion: Completion | None = None,
    ) -> Execution:
        """Runs the forward pass.

        Args:
            inputs_data: data by input name; it may have more rows than needed.
            loss_labels_data: labels by name, for a graph with a loss node.
            loss_label_weights_data: label weights by name.
            outputs_data: memory by output name, which is overwritten.
            batch_size: rows of this call; by default, the tensors' own.
            options: `SYNCHRONOUS`, `PROFILING`, `PER_LAYER_PROFILING`, `SKIP_WRITING_INPUT_DATA_TO_DEVICE`.
            completion: called once with (result tensor, error, seconds).
        """
        device = self.require_session("execute").device
        if completion is not None:
            require_completion(completion)
        with turn(device):
            session = self.require_session("execute")
            compiled = session.compilation
            batch = compiled.batch_size(batch_size)
            given = session.feeds.named(inputs_data, loss_labels_data, loss_label_weights_data)
            feeds = session.fed(given, batch, options)
            binding = session.bound(PartName.INFERENCE, batch)
            session.check_destinations(outputs_data, binding.executable.part)

            def keep(found: Arrays) -> Answer:
                session.hold(binding.executable, found)
                session.write_outputs(outputs_data, results_of(found))
                last = compiled.nodes[-1].results[0]
                loss = binding.executable.loss(found) if compiled.losses else None
                return last, binding.executable.result(found, value(last)), loss, compiled.loss_names

            session.accept(feeds, batch, options)
            execution = session.launch(binding, feeds, options, completion, keep, session.discard_results)
        return announced(execution, options, completion)
