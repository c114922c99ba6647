"""Inference graphs: the forward pass of layers that may be in training elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.step import STREAM, value
from stepgraph.graphs.compiled import Answer, Found, require_completion, results_of
from stepgraph.graphs.inspected import InspectedGraph
from stepgraph.graphs.settings import SAME_DEVICE, ChosenDevice, mixed, tf32_allowed
from stepgraph.runtime.execution import Completion, Execution, turn
from stepgraph.runtime.feeds import Data, Names
from stepgraph.system.surroundings import Precision
from stepgraph.types import DataType, ExecutionOptions, GraphCompilationOptions


class InferenceGraph(InspectedGraph):
    """A compiled forward pass. It shares the parameters of its layers: after a training step it sees the new values.

    Dropout passes its source on; normalization uses running statistics. Nodes may be added to the inference graph
    itself, for example a softmax that training does not want.

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
        """Compiles for `device`, if it is left out for that of before.

        Inputs in `input_tensors` become constants with the data given here.

        With `compute_type` layers compute in bfloat16 or float16; what you read stays in its declared type. `tf32`
        is that of `TrainingGraph.compile`.
        """
        with self._all_or_nothing("compile"):
            self._compute_type, self._tf32 = mixed(compute_type), tf32_allowed(tf32)
            self._precision = Precision.of(self._tf32)
            self._prepare(device, options, input_tensors, input_tensors_data)
            self._programs.executable("inference", self._feeds.batch)
            self._settle()

    def memory_plan_for(self, batch_size: int) -> MemoryPlan:
        """What the forward pass would need with so many rows; nothing is run or kept."""
        self._require_compiled("memory_plan_for")
        planned = self._new_programs(self._programs.channels_last)
        return planned.plan_for("inference", self._batch_size(batch_size))

    def link(self, graphs: Sequence[InferenceGraph]) -> None:
        """Joins sub-graphs compiled with `LINK_GRAPHS`: what one makes and another reads needs no data."""
        group = self._linkable(graphs)
        for graph in group:
            graph._linked = group

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
            inputs_data: data by input name; longer than needed is fine.
            loss_labels_data: labels by name, for a graph that holds a loss node.
            loss_label_weights_data: label weights by name.
            outputs_data: memory by output name, to be written.
            batch_size: rows of this call; the tensors' own if not given.
            options: `SYNCHRONOUS`, `PROFILING`, `PER_LAYER_PROFILING`, `SKIP_WRITING_INPUT_DATA_TO_DEVICE`.
            completion: called once with (result tensor, error, seconds).
        """
        device = self._require_compiled("execute")
        if completion is not None:
            require_completion(completion)
        with turn(device):
            batch = self._batch_size(batch_size)
            given = self._feeds.named(inputs_data, loss_labels_data, loss_label_weights_data)
            feeds = self._fed(given, batch, options)
            binding = self._bound("inference", batch)
            self._check_destinations(outputs_data, binding.executable.part)

            def keep(found: Found) -> Answer:
                self._hold(binding.executable, found)
                self._write_outputs(outputs_data, results_of(found))
                last = self._compiled[-1].results[0]
                loss = None if self._last_loss is None else binding.executable.loss(found)
                return last, binding.executable.result(found, value(last)), loss

            self._accept(feeds, batch, options)
            execution = self._launch(binding, feeds, options, completion, keep)
        return self._announced(execution, options, completion)

    def _prepare(self, *arguments: Any, **settings: Any) -> None:
        super()._prepare(*arguments, **settings)
        device = self._require_compiled("compile")
        self._stream = {STREAM: torch.zeros(2, dtype=torch.int64, device=device.torch)}

    def _arrays(self) -> Found:
        return {**super()._arrays(), **self._stream}
