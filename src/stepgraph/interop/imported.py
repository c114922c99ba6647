"""The result of an import: a graph, the names of its inputs, outputs, layers and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import RenderableType
from torch import nn

from stepgraph import draw
from stepgraph.errors import ArgumentError, DataTypeError, ShapeError, StateError, UnknownNameError
from stepgraph.graph import Graph
from stepgraph.graphs.training import TrainingGraph
from stepgraph.interop.capture import state_of
from stepgraph.interop.wiring import NATIVE, WRAPPED, Row
from stepgraph.layers.computed_loss import ComputedLossLayer
from stepgraph.layers.layer import Layer
from stepgraph.layers.node import untrained
from stepgraph.optimizers import Optimizer
from stepgraph.optimizers.conversion import converted, require_known
from stepgraph.tensors import writes
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import ReductionType

WHERE, CONVERTING = "Imported.training", "Imported.optimizer"
LOSS = "loss"  # what models of transformers call theirs


@dataclass(frozen=True, eq=False)
class Imported:
    """A PyTorch model as a graph, made by `from_torch`.

    Args:
        graph: the graph; pass it to `TrainingGraph` or `InferenceGraph`.
        inputs: the model's inputs by name, as `add_inputs` takes them.
        outputs: the model's results by path, as `add_outputs` takes them.
        tensors: the tensor of every parameter and buffer, by all the names that the model has for it.
        rows: one per node: layer, path, class, how it was imported and why.
        model: the model.
        reached: by output, the parameters that it trains.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> imported = from_torch(model, torch.zeros(4, 3))
        >>> imported.inputs, imported.outputs["output"].shape
        ({'input': Tensor('input', [BATCH, 3] float32)}, (BATCH, 2))
        >>> list(imported.layers), list(imported.state_dict())
        (['0', '1', '2'], ['0.weight', '0.bias', '2.weight', '2.bias'])
    """

    graph: Graph
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    tensors: dict[str, Tensor] = field(repr=False)
    rows: tuple[Row, ...] = field(repr=False)
    model: nn.Module = field(repr=False)
    reached: dict[str, frozenset[Tensor]] = field(repr=False)

    @property
    def layers(self) -> dict[str, Layer]:
        """The layers of modules by path; functions between modules have none."""
        return {row.path: row.layer for row in self.rows if row.how in (NATIVE, WRAPPED)}

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the parameters that this graph does not train, whatever other graphs do.

        They had `requires_grad=False` when the model was imported, or no gradient reaches them.

        Example:
            >>> model = torch.nn.Linear(3, 2)
            >>> model.bias.requires_grad_(False)
            Parameter containing:
            ...
            >>> from_torch(model, torch.zeros(1, 3)).frozen
            ('bias',)
        """
        left = untrained(self.graph.nodes)
        return tuple(name for name, tensor in self.tensors.items() if tensor in left)

    def training(
        self,
        loss: Layer | str | None,
        optimizer: Optimizer,
        labels: Mapping[str, Tensor] | Tensor | None = None,
        *,
        reduction_type: ReductionType = ReductionType.MEAN,
    ) -> TrainingGraph:
        """A training graph with the model's inputs and outputs by name.

        A training step drops outputs of more than 16 million numbers, such as the scores of a language model, unless
        metrics read them; `add_outputs(imported.outputs)` keeps them.

        Args:
            loss: compares the first output with the labels. For a model that computes its own loss, the path of that
                output, or None: the output `loss`, or the only one.
            optimizer: updates the parameters.
            labels: what the loss compares with, by name; one tensor is named `labels`. A model that computes its own
                loss has them among its inputs.
            reduction_type: whether the model's own loss is the mean or the sum over the rows of a batch; see
                `ComputedLossLayer`.

        Example:
            >>> class Model(torch.nn.Linear):
            ...     def forward(self, x, labels):
            ...         return {"loss": torch.nn.functional.mse_loss(super().forward(x), labels)}
            >>> imported = from_torch(Model(3, 2), {"x": torch.zeros(4, 3), "labels": torch.zeros(4, 2)})
            >>> training = imported.training(None, SGDOptimizer(0.1))
            >>> list(training.inputs)
            ['x', 'labels']
        """
        if isinstance(optimizer, torch.optim.Optimizer):
            fix = "pass imported.optimizer(optimizer)"
            raise DataTypeError(WHERE, f"the optimizer is PyTorch's {type(optimizer).__name__}", fix=fix)
        if isinstance(loss, str) or loss is None:
            return self._computing(self._path(loss), optimizer, labels, reduction_type)
        if not isinstance(loss, Layer):
            fix = "pass a LossLayer; or compute the loss in the model, and pass None"
            raise DataTypeError(WHERE, f"the loss is {getattr(loss, '__name__', type(loss).__name__)}", fix=fix)
        if not isinstance(labels, Tensor | Mapping):
            fix = "pass sg.Tensor with the shape of a batch of labels; the arrays are passed to execute or fit"
            kind = f"{type(labels).__module__}.{type(labels).__name__}".removeprefix("builtins.")
            raise DataTypeError(WHERE, f"labels is {kind}", fix=fix)
        named = {"labels": labels} if isinstance(labels, Tensor) else dict(labels)
        graph = TrainingGraph([self.graph], loss, optimizer)
        graph.add_inputs(self.inputs, named)
        graph.add_outputs(self.outputs, kept=False)
        return graph

    def _path(self, path: str | None) -> str:
        """The output that is the model's own loss."""
        if path is None and len(self.outputs) == 1:
            return next(iter(self.outputs))
        if (path or LOSS) in self.outputs:
            return path or LOSS
        known = ", ".join(self.outputs)
        problem = f"the model has no output '{path}'" if path else f"none of the model's outputs is called '{LOSS}'"
        raise UnknownNameError(
            WHERE, problem, outputs=known, fix="pass the path of the loss, or a loss layer and labels"
        )

    def _computing(self, path: str, optimizer: Optimizer, labels: Any, how: ReductionType) -> TrainingGraph:
        """A training graph that minimizes an output."""
        if labels is not None:
            problem = f"labels were passed, but the model computes its loss '{path}' from its inputs"
            raise ArgumentError(WHERE, problem, inputs=", ".join(self.inputs), fix="leave labels out")
        loss, output = ComputedLossLayer(how), self.outputs[path]
        if output.descriptor.is_open or output.descriptor.element_count != 1:
            problem = f"the output '{path}' has shape {list(output.shape)}, but a loss is one number"
            fix = "pass a loss layer and labels; a model that computes its loss from labels needs them in the example"
            raise ShapeError(WHERE, problem, fix=fix)
        if not self.reached[path]:
            problem = f"the output '{path}' depends on no parameter that is trained"
            raise StateError(
                WHERE, problem, frozen=f"{len(self.frozen)} parameters", fix="check requires_grad and detach"
            )
        graph = TrainingGraph([self.graph], None, optimizer)
        graph.node(loss, output)
        graph.add_inputs(self.inputs)
        graph.add_outputs({name: one for name, one in self.outputs.items() if name != path}, kept=False)
        return graph

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> Optimizer:
        """The same optimizer as one of `torch.optim` over the model's parameters: SGD, Adam, AdamW or RMSprop.

        Its groups become groups, with their own learning rates as multiples of the first one's. Parameters of the model
        that it does not have are frozen. It must not have made a step: moments are not carried over.

        Args:
            optimizer: PyTorch's.
            clip_norm: what the loop passes to `clip_grad_norm_` before each step.
            clip_value: what it passes to `clip_grad_value_`.

        Example:
            >>> model = torch.nn.Linear(3, 2)
            >>> theirs = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1)
            >>> ours = from_torch(model, torch.zeros(1, 3)).optimizer(theirs, clip_norm=1.0)
            >>> ours.learning_rate, ours.groups[0].learning_rate_factor, ours.clip_norm
            (0.1, 2.0, 1.0)
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind, fix = type(optimizer).__name__, "pass one of torch.optim; one of stepgraph's needs no conversion"
            raise DataTypeError(CONVERTING, f"{kind} is not an optimizer of PyTorch", fix=fix)
        require_known(optimizer, CONVERTING)
        if any(value is not None for one in optimizer.state.values() for value in one.values()):
            problem = "the optimizer has made steps, and its moments cannot be carried over"
            raise StateError(CONVERTING, problem, fix="create a new one over the same parameters")
        members = self._members(optimizer.param_groups)
        trained = dict.fromkeys(tensor for node in self.graph.nodes for tensor in node.trained)
        used = [[tensor for tensor in own if tensor in trained] for own in members]
        others = [tensor for tensor in trained if not any(tensor in own for own in members)]
        return converted(optimizer, used, others, {"clip_norm": clip_norm, "clip_value": clip_value})

    def _members(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[Tensor, None]]:
        """The tensors of each group of an optimizer over the model's parameters."""
        own = self.model.named_parameters(remove_duplicate=False)
        known = {id(one): self.tensors[name] for name, one in own if name in self.tensors}
        for one in (one for group in groups for one in group["params"] if id(one) not in known and one.numel()):
            problem = f"a parameter of shape {list(one.shape)} is not one of the model's"
            fix = "create the optimizer from the parameters of the imported model"
            raise ArgumentError(CONVERTING, problem, fix=fix)
        return [{known[id(one)]: None for one in group["params"] if id(one) in known} for group in groups]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The current values under all names of the model's own `state_dict`, in its order; not copied.

        Example:
            >>> model = torch.nn.Linear(3, 2)
            >>> model.load_state_dict(from_torch(model, torch.zeros(1, 3)).state_dict())
            <All keys matched successfully>
        """
        own = state_of(self.model)
        return {
            name: self.tensors[name].torch().reshape(own[name].shape) if name in self.tensors else value
            for name, value in self.model.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Copies values into the graph's tensors; nothing changes if a name or a shape does not fit.

        Args:
            state: arrays by the names of the model's `state_dict`.
            strict: whether every name must be there, and no other.
        """
        if not isinstance(state, Mapping):
            kind = type(state).__name__
            raise DataTypeError("load_state_dict", f"{kind} is not a dictionary", fix="pass model.state_dict()")
        wanted, given = set(self.model.state_dict()) & self.tensors.keys(), set(state)
        missing, unknown = sorted(wanted - given), sorted(given - set(self.model.state_dict()))
        if strict and (missing or unknown):
            raise UnknownNameError(
                "load_state_dict",
                "the names do not match the model's",
                missing=", ".join(missing) or "none",
                unknown=", ".join(unknown) or "none",
                fix="pass a state_dict of the same model, or strict=False",
            )
        own = state_of(self.model)
        values = {name: torch.as_tensor(state[name]) for name in wanted & given}
        for name, value in values.items():
            if value.shape != own[name].shape:
                problem = f"'{name}' has shape {list(value.shape)}, but the model's has {list(own[name].shape)}"
                raise ShapeError("load_state_dict", problem, fix="pass a state_dict of the same model")
        with torch.no_grad():
            for name, value in values.items():
                self.tensors[name].expect_writes()
                target = self.tensors[name].array()
                target.copy_(value.reshape(target.shape))
            writes.note()

    def __rich__(self) -> RenderableType:
        table = draw.Listing(title=f"{type(self.model).__name__}, imported", title_justify="left", show_edge=False)
        for title in ("path", "class or functions", "how", "parameters", "why"):
            table.add_column(title, justify="right" if title == "parameters" else "left")
        seen, frozen = set[Tensor](), {self.tensors[name] for name in self.frozen}
        for row in self.rows:
            new = set(row.layer.parameters.values()) - seen
            seen |= new
            table.add_row(row.path, row.kind, row.how, _counts(new, frozen), row.why)
        return table

    def __str__(self) -> str:
        return draw.text(self.__rich__())

    def __repr__(self) -> str:
        counts = {how: sum(row.how == how for row in self.rows) for how in (NATIVE, WRAPPED, "glue")}
        return f"<{type(self.model).__name__} imported: " + ", ".join(f"{n} {how}" for how, n in counts.items()) + ">"


def _counts(tensors: Set[Tensor], frozen: Set[Tensor]) -> str:
    """The number of elements of some parameters, and how many of them are frozen."""
    count, still = (sum(t.descriptor.element_count for t in some) for some in (tensors, tensors & frozen))
    if not count:
        return ""
    return f"{count:,}{' frozen' if still == count else f' ({still:,} frozen)' if still else ''}"
