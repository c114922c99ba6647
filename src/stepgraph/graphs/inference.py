"""Inference graphs: the forward pass of layers that may be in training elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stepgraph.checkpoint.kept import Kept
from stepgraph.compiler.program import PartName
from stepgraph.compiler.ranks.parallel import Parallel
from stepgraph.compiler.settings import SAME_DEVICE, ChosenDevice, Settings
from stepgraph.compiler.step import value
from stepgraph.graphs.averaging import AverageTensors
from stepgraph.graphs.compilation import Arrays, Compilation
from stepgraph.graphs.compiled import CompiledGraph, require_completion
from stepgraph.graphs.session import Answer, announced, results_of
from stepgraph.interop import onnx_export
from stepgraph.interop.module import GraphModule, Prediction, module_of
from stepgraph.layers.layer import Layer
from stepgraph.layers.node import Node
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

    follows: AverageTensors | None = None  # averages that some of its parameters share
    divided: Parallel | None = None  # how ranks train its layers; they must predict the same, so a rule chooses kernels

    def compile(
        self,
        device: ChosenDevice = SAME_DEVICE,
        options: GraphCompilationOptions = GraphCompilationOptions.NONE,
        input_tensors: Names | None = None,
        input_tensors_data: Data | None = None,
        *,
        compute_type: DataType | torch.dtype | str | None = None,
        tf32: bool | None = None,
        deterministic: bool | None = None,
        check_numerics: bool | None = None,
        fuse: bool | None = None,
        debug_layers: bool | None = None,
        link_graphs: bool | None = None,
    ) -> None:
        """Compiles for `device`, a `Device` or a name such as `"cuda"`; by default, for the previous device.

        Inputs in `input_tensors` become constants with the data passed here.

        With `compute_type`, layers compute in bfloat16 or float16; what you read keeps its declared type. The other
        settings are the same as in `TrainingGraph.compile`.
        """
        settings = Settings.checked(
            options,
            compute_type,
            tf32,
            deterministic=deterministic,
            check_numerics=check_numerics,
            fuse=fuse,
            debug_layers=debug_layers,
            link_graphs=link_graphs,
        )
        self._compile(device, replace(settings, parallel=self.divided), input_tensors, input_tensors_data)

    def link(self, graphs: Sequence[InferenceGraph]) -> None:
        """Connects sub-graphs compiled with `LINK_GRAPHS`: a result of one that another reads needs no data."""
        group = self._linkable(graphs)
        for graph in group:
            graph.linked = group

    def execute(
        self,
        inputs_data: Data | None = None,
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
            inputs_data: data by input name; with `batch_size`, it may have more rows than needed.
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
            self._follow()
            session = self.require_session("execute")
            compiled = session.compilation
            data = inputs_data, loss_labels_data, loss_label_weights_data
            feeds, batch = session.read(data, batch_size, options)
            binding = session.bound(PartName.INFERENCE, batch)
            session.check_destinations(outputs_data, binding.executable.part.results)

            def keep(found: Arrays) -> Answer:
                session.hold(binding.executable.results, found)
                session.write_outputs(outputs_data, results_of(found))
                last = compiled.nodes[-1].results[0]
                *_, loss, names, outputs = session.answer(binding.executable, found, evaluated=True)
                return last, binding.executable.result(found, value(last)), loss, names, outputs

            session.accept(feeds, batch, options)
            execution = session.launch(binding, feeds, options, completion, keep, session.discard_results)
        return announced(execution, options, completion)

    def to_torch(self) -> GraphModule:
        """What this graph computes, as a PyTorch module in inference mode, with copies of the current values.

        It has one submodule per layer, under the layer's name, and takes any number of rows that the graph takes.
        Parameters have the names of `state_dict`. Inputs are passed in their order or by name; several outputs are
        returned as a tuple. The module computes in the declared types, whatever `compute_type` is.

        Example:
            >>> x = Tensor((BATCH, 2))
            >>> inference = InferenceGraph()
            >>> y = inference.dense(x, 3, label="head")
            >>> module = inference.to_torch()
            >>> module(torch.zeros(5, 2)).shape, list(module.state_dict())
            (torch.Size([5, 3]), ['head.weights', 'head.biases'])
        """
        return module_of(self.prediction("InferenceGraph.to_torch"))

    def save_onnx(
        self,
        path: str | os.PathLike[str],
        *,
        opset: int = 20,
        optimize: bool = False,
        check: bool = True,
        batch_size: int | None = None,
    ) -> Path:
        """Writes this graph and its current values as an ONNX file, atomically. Returns the path.

        Inputs, outputs and results keep their names, weights are named as in `state_dict`, and operators start with
        the name of their layer. Needs `pip install 'stepgraph[onnx]'`.

        Args:
            path: the file, such as `"model.onnx"`; weights over 2 GiB are written beside it.
            opset: the version of ONNX's operators.
            optimize: let PyTorch's exporter merge operators; ONNX Runtime does so when it loads the file.
            check: run the file with ONNX Runtime, if it is installed, with two numbers of rows. If a number is off by
                more than 1e-5 of the largest, an error names the first layer that differs, and nothing is written.
            batch_size: a fixed number of rows, for layers that need one; by default the file accepts any.

        Example:
            >>> training.inference().save_onnx("model.onnx")  # doctest: +SKIP
        """
        request = onnx_export.Request(self.prediction(onnx_export.WHERE), batch_size, opset, optimize)
        return onnx_export.save(request, path, check)

    def kept(self) -> Kept:
        self._follow()
        return super().kept()

    def _follow(self) -> None:
        """Takes over the averages that it computes with."""
        if self.follows is not None and self.device is not None:
            self.follows.refresh(self.device)

    def prediction(self, call: str) -> Prediction:
        """What this graph computes, without losses, as a value."""
        self._follow()
        now, declared = self.compilation, self.declaration
        constants = {t: t.torch() for t in self._constants} if now is None else now.constants
        return Prediction.of(declared, constants, self.named_tensors(), call)


def inference_of(graph: CompiledGraph, averages: AverageTensors | None = None, **settings: Any) -> InferenceGraph:
    """An inference graph over what a graph predicts, without its losses; compiled as the graph is.

    Args:
        graph: the graph.
        averages: what takes the place of parameters.
        settings: settings of `compile`, which replace those of the graph.
    """
    declared = graph.declaration
    found = InferenceGraph()
    found.follows = averages
    for node in declared.predicting if averages is None else _averaged(declared.predicting, averages):
        found.append(node)
    found.set_origin(graph.origin)
    read = {tensor for node in found.nodes for tensor in node.arguments}
    made = {tensor for node in found.nodes for tensor in node.results}
    kinds = declared.feeds.inputs, declared.feeds.labels, declared.feeds.weights
    found.add_inputs(*({name: t for name, t in names.items() if t in read} for names in kinds))
    found.add_outputs({name: tensor for name, tensor in declared.predictions.items() if tensor in made})
    now = graph.compilation
    if now is not None:
        found.divided = now.settings.parallel
        if averages is not None:
            averages.refresh(now.device)
        constants = {f"{tensor.tensor_id}": tensor for tensor in now.constants if tensor in read}
        data = {name: now.constants[tensor].cpu() for name, tensor in constants.items()}
        found.compile(now.device, input_tensors=constants, input_tensors_data=data, **(settings or _settings(now)))
    return found


def _averaged(nodes: Iterable[Node], averages: AverageTensors) -> Iterator[Node]:
    """The nodes with averages for parameters; nodes that share a layer still do."""
    layers: dict[Layer, Layer] = {}
    for node in nodes:
        layer = layers.setdefault(node.layer, node.layer.with_tensors(averages.of))
        sources = tuple(averages.of.get(tensor, tensor) for tensor in node.sources)
        frozen = frozenset(averages.of.get(tensor, tensor) for tensor in node.frozen)
        yield replace(node, layer=layer, sources=sources, frozen=frozen)


def _settings(compilation: Compilation) -> dict[str, Any]:
    """The settings of a compilation that also apply to inference."""
    training_only = GraphCompilationOptions.COMPUTE_ALL_GRADIENTS | GraphCompilationOptions.LINK_GRAPHS
    settings = compilation.settings
    return {
        "options": settings.options & ~training_only,
        "compute_type": settings.compute_type,
        "tf32": settings.tf32,
    }
