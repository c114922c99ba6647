"""The gradients of a training graph: given from outside, read by callers, kept between the passes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from stepgraph.compiler.step import STREAM, Key, gradient, source_gradient, value
from stepgraph.errors import UnknownNameError
from stepgraph.graphs.compiled import Found
from stepgraph.graphs.recipe import TrainingRecipe, require_tensor
from stepgraph.layers.layer import Layer
from stepgraph.runtime.gradients import Gradients, seeds, starts_at
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import GraphCompilationOptions


class DifferentiatedGraph(TrainingRecipe):
    """What a `TrainingGraph` knows about gradients; it adds the passes that compute them."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._gradients = Gradients()
        self._saved: Found = {}
        self._forward_batch: int | None = None

    def allocate_user_gradient(self, tensor: Tensor) -> Tensor:
        """A gradient tensor for a result that outside code goes on with; write dL/dresult there before the pass.

        It is added to the gradients that come from layers. Unwritten, it counts as zero.
        """
        require_tensor("allocate_user_gradient", tensor)
        if tensor not in {result for node in self._compiled or self._shown() for result in node.results}:
            raise UnknownNameError(
                "allocate_user_gradient", f"{tensor!r} is not a result of this graph", fix="pass what node() returned"
            )
        if tensor not in self._user_gradients:
            is_new = tensor not in self._seeded()
            handle = Tensor(tensor.descriptor, label=f"gradient of {tensor.label}")
            handle.device = self.device
            with self._all_or_nothing("allocate_user_gradient"):
                self._user_gradients = {**self._user_gradients, tensor: handle}
                if is_new:
                    self._again(f"{tensor.label} takes a gradient from outside", keeps_passes=True)
        return self._user_gradients[tensor]

    def gradient_tensor(self, input: Tensor) -> Tensor | None:
        """The gradient of an input, or None where it is not computed: not compiled, or nothing asks for it."""
        require_tensor("gradient_tensor", input)
        if self.device is None or input not in {*self._feeds.tensors, *self._constants, *self._parameters}:
            return None
        known = self._programs.program(self._feeds.batch).outputs
        return self._gradients.handle(gradient(input), input) if gradient(input) in known else None

    def source_gradient_tensors(self, layer: Layer) -> list[Tensor]:
        """The layer's own contributions to its sources' gradients, one each; empty for a layer of another graph."""
        nodes = [node for node in self._compiled if node.layer is layer]
        return [
            self._gradients.handle(source_gradient(node, i), t) for node in nodes for i, t in enumerate(node.sources)
        ]

    def result_gradient_tensors(self, layer: Layer) -> list[Tensor]:
        """The gradients of the layer's results, summed over what reads them; empty where nothing does."""
        results = [t for node in self._compiled if node.layer is layer for t in node.results]
        known = self._programs.program(self._feeds.batch).outputs if results else {}
        return [self._gradients.handle(gradient(t), t) for t in results if gradient(t) in known]

    def gradient_data(self, parameter: Tensor, layer: Layer) -> np.ndarray | None:
        """The gradient of a layer's parameter, before clipping, rescaling and regularization.

        On the CPU the array is the graph's own: a pass that accumulates goes on adding to it. None where the layer is
        not trainable, or where the step was not run as separate forward and gradient passes.
        """
        nodes = [node for node in self._compiled if node.layer is layer]
        if (
            not nodes
            or nodes[0].disable_update
            or parameter not in layer.parameters.values()
            or not parameter.is_updatable
        ):
            return None
        found = self._gradients.found.get(gradient(parameter))
        return None if found is None else found.cpu().numpy()

    def _kept_keys(self) -> list[Key]:
        checked = GraphCompilationOptions.CHECK_NUMERICS in self._options
        return super()._kept_keys() + self._watched_gradients() + [gradient(t) for t in self._trainable() if checked]

    def _watched_gradients(self) -> list[Key]:
        """Gradients that stay readable after a whole step: declared as outputs, or of layers under debugging."""
        nodes, declared = self._watched_nodes(), set(self._outputs.values())
        keys = [key for key, handle in self._gradients.handles.items() if handle in declared]
        keys += [source_gradient(node, i) for node in nodes for i in range(len(node.sources))]
        return list(dict.fromkeys([*keys, *(gradient(t) for node in nodes for t in node.results)]))

    def _is_gradient(self, tensor: Tensor) -> bool:
        return tensor in self._gradients.handles.values()

    def _key(self, tensor: Tensor) -> Key:
        return next((key for key, handle in self._gradients.handles.items() if handle is tensor), value(tensor))

    def _found_elsewhere(self) -> list[Gradients]:
        return [graph._gradients for graph in self._others()]

    def _seeds(self, batch: int) -> Found:
        program = self._programs.program(batch)
        return seeds(program, self._user_gradients, self._found_elsewhere()) if program.step.seeded else {}

    def _has_seed(self, batch: int) -> bool:
        """Whether a whole step has something to walk back from: a loss, a written gradient, one number at the end."""
        if self._last_loss is not None or any(t.has_data for t in self._user_gradients.values()):
            return True
        program = self._programs.program(batch)
        return any(starts_at(tensor, program) for tensor in program.step.seeded)

    def _forget_passes(self, found: Mapping[Key, torch.Tensor] = MappingProxyType({})) -> None:
        """Forgets what separate passes have left; the gradients that a whole step `found` are readable instead."""
        self._saved, self._forward_batch = {}, None
        self._gradients.forget(found)

    def _has_drawn(self) -> None:
        if self._last is not None:
            self._last.drew = True

    def _replayed(self, batch: int, again: bool) -> Found:
        """Arrays for the last step once more (`again`), which had the random numbers before these, or for another."""
        stream = self._arrays()[STREAM].clone()
        stream[1] -= int(again and self._last is not None and self._last.drew)
        return super()._replayed(batch, again) | self._seeds(batch) | {STREAM: stream}

    def _repeated_forward(self) -> Found:
        """The last forward pass once more, for a new program: same data, same random numbers, statistics untouched."""
        saved, batch = self._saved, self._forward_batch
        if batch is None:
            return {}
        feeds = {value(t): saved[value(t)] for t in self._feeds.tensors}
        arrays = self._arrays() | feeds
        executable = self._programs.executable("forward", batch)
        moving = {key: arrays[key].clone() for key in {STREAM, *executable.part.written}}
        moving[STREAM][1] -= 1
        return feeds | executable(executable.bind(arrays | moving), {})
