"""A recipe as stepgraph's objects, and ways to run them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

import stepgraph as sg
from tests.fuzz.data import DTYPES, input_data, parameter_data, user_gradient_data
from tests.fuzz.recipe import Input, Op, Recipe, filled, is_loss
from tests.fuzz.table import TABLE

Options = sg.GraphCompilationOptions
SCALE = 128.0  # of a loss in float16, small enough for the first gradients to be finite
FED = ("input", "label", "weight")


class Built:
    """A compiled recipe: one training graph, or two linked ones where it is cut.

    Args:
        recipe: what to build.
        options: of the compilation.
        device: the CPU if not given.
        linked: whether a cut of the recipe counts.
        settings: further settings of `compile`.
    """

    def __init__(
        self,
        recipe: Recipe,
        options: Options = Options.NONE,
        *,
        device: sg.Device | None = None,
        linked: bool = False,
        **settings: Any,
    ) -> None:
        sg.set_seed(recipe.seed)
        self.recipe, self.device = recipe, device or sg.Device.cpu()
        self.held = {
            one.number: sg.Tensor(one.shape, data=parameter_data(recipe, one), label=f"p{one.number}")
            for one in recipe.parameters
        }
        for one in recipe.parameters:
            self.held[one.number].is_updatable = one.updatable
        self.tensors = {one.number: self._input(one) for one in recipe.inputs}
        self.layers: dict[int, sg.Layer] = {}
        self.makers: dict[int, int] = {}  # which graph makes a value
        self.cut = recipe.cut if linked else 0
        parts = [part for part in (recipe.ops[: self.cut], recipe.ops[self.cut :]) if part]
        self.graphs = [sg.Graph() for _ in parts]
        self.trainings = [self._training(i, part) for i, part in enumerate(parts)]
        self.given = {n: self.trainings[self.makers[n]].allocate_user_gradient(self.tensors[n]) for n in self.outside}
        options |= Options.LINK_GRAPHS if len(parts) > 1 else Options.NONE
        for training, part in zip(self.trainings, parts, strict=True):
            self._compile(training, part, options, settings)
        if len(parts) > 1:
            self.trainings[0].link(self.trainings[1:])
        if recipe.compute_type == "float16":
            for training in self.trainings:
                training.loss_scale = SCALE

    @property
    def training(self) -> sg.TrainingGraph:
        """The only training graph."""
        (one,) = self.trainings
        return one

    @property
    def outside(self) -> tuple[int, ...]:
        """Values that get gradients from outside."""
        return self.recipe.user_gradients

    # Building

    def _input(self, one: Input) -> sg.Tensor:
        shape, recipe = filled(one.shape, self.recipe.batch), self.recipe
        data = input_data(recipe, one, 0, recipe.batch) if one.role in ("constant", "trained") else None
        return sg.Tensor(shape, DTYPES.get(one.kind, "float32"), data=data, label=f"v{one.number}")

    def _training(self, index: int, ops: tuple[Op, ...]) -> sg.TrainingGraph:
        is_last = self.recipe.by_constructor and ops[-1] is self.recipe.ops[-1] and len(ops) > 1
        constructed = ops[-1] if is_last else None
        for op in ops if constructed is None else ops[:-1]:
            self._node(index, op)
        loss = None
        if constructed is not None:
            loss = self.layers[constructed.results[0]] = TABLE[constructed.kind].build(constructed.settings, {})
        return sg.TrainingGraph([self.graphs[index]], loss, optimizer_of(self.recipe.optimizer))

    def _node(self, index: int, op: Op) -> None:
        layer = self._layer(index, op)
        given = [self.tensors[n] for n in op.sources]
        if is_loss(op):
            self.graphs[index].node(layer, given[0], loss_labels=given[1:])
        else:
            self.graphs[index].node(layer, *given, disable_update=op.frozen)
        self.tensors |= dict(zip(op.results, self.graphs[index].nodes[-1].results, strict=True))
        self.makers |= dict.fromkeys(op.results, index)

    def _layer(self, index: int, op: Op) -> sg.Layer:
        """The layer, or that of an earlier node; in another graph it is a second layer over the same tensors."""
        if op.layer is not None and self.makers.get(op.layer) == index:
            return self.layers[op.layer]
        settings = dict(op.settings)
        for name in ("shape", "end"):
            if op.kind in ("reshape", "slice") and name in settings:
                settings[name] = filled(settings[name], self.recipe.batch)
        layer = TABLE[op.kind].build(settings, {name: self.held[n] for name, n in op.parameters.items()})
        layer.is_debugging_enabled = True
        self.layers[op.results[0]] = layer
        return layer

    def _compile(
        self, training: sg.TrainingGraph, ops: tuple[Op, ...], options: Options, settings: dict[str, Any]
    ) -> None:
        read = {n for op in ops for n in op.sources}
        by_role = {role: self._named(role, read) for role in (*FED, "constant", "trained")}
        training.add_inputs(by_role["input"], by_role["label"], by_role["weight"])
        if by_role["trained"]:
            training.set_training_tensor_parameters([sg.TensorParameter(t) for t in by_role["trained"].values()])
        made = {n for op in ops for n in op.results} | read
        training.stop_gradient([self.tensors[n] for n in self.recipe.stops if n in made])
        settings = {"compute_type": self.recipe.compute_type, **settings}
        training.compile(self.device, options, by_role["constant"], **settings)

    def _named(self, role: str, read: Iterable[int]) -> dict[str, sg.Tensor]:
        numbers = [one.number for one in self.recipe.inputs if one.role == role and one.number in read]
        return {f"v{n}": self.tensors[n] for n in numbers}

    # Running

    def data(self, step: int, rows: int | None = None) -> list[dict[str, np.ndarray]]:
        """What a step is fed with: inputs, labels, label weights."""
        count = rows or self.recipe.batch
        return [
            {f"v{one.number}": input_data(self.recipe, one, step, count) for one in self.recipe.inputs if one.role == r}
            for r in FED
        ]

    def give(self, step: int, rows: int | None = None) -> dict[int, np.ndarray]:
        """Writes the gradients from outside."""
        found = {}
        for number, handle in self.given.items():
            shape = self.tensors[number].shape
            shape = (rows, *shape[1:]) if rows and shape[0] == self.recipe.batch else shape
            found[number] = user_gradient_data(self.recipe, number, step, shape)
            full = np.zeros(handle.shape, np.float32) if rows and rows < self.recipe.batch else found[number]
            if full is not found[number]:
                full[: len(found[number])] = found[number]
            handle.bind_and_write_data(full.copy(), self.device)
        return found

    def whole(self, step: int, rows: int | None = None) -> list[np.ndarray]:
        """A training step in one call; what its losses came to."""
        self.give(step, rows)
        execution = self.training.execute(*self.data(step, rows), batch_size=rows)
        return self.losses(execution)

    def losses(self, execution: sg.Execution) -> list[np.ndarray]:
        """The losses of the last call."""
        found = []
        for op in self.recipe.losses:
            tensor = self.tensors.get(op.results[0])
            given = [*execution.losses.values()][-1] if tensor is None else None  # that of the constructor is the last
            value = given if tensor is None else tensor.torch().cpu().numpy()
            found.append(np.array(value, np.float32).reshape(-1))
        return found

    def forward(self, step: int, rows: int | None = None) -> list[sg.Execution]:
        """The forward pass of each graph."""
        tensors = {f"v{one.number}": self.tensors[one.number] for one in self.recipe.inputs if one.role in FED}
        data = {name: array for part in self.data(step, rows) for name, array in part.items()}
        for batched in (True, False):
            some = {k: array for k, array in data.items() if (tensors[k].shape[0] == self.recipe.batch) is batched}
            self.trainings[0].bind_and_write_data(some, tensors, self.device, batch_size=rows if batched else None)
        self.give(step, rows)
        return [training.execute_forward(rows) for training in self.trainings]

    def phases(self, step: int) -> list[np.ndarray]:
        """A training step in three calls per graph."""
        executions = self.forward(step)
        for training in reversed(self.trainings):
            training.execute_gradient()
        losses = self.losses(executions[-1])
        for training in self.trainings:
            training.execute_optimizer_update()
        return losses

    # Reading

    def values(self) -> dict[int, np.ndarray]:
        """Every result, after a forward pass."""
        made = [n for op in self.recipe.ops for n in op.results if n in self.tensors]
        return {n: self.tensors[n].torch().cpu().numpy().copy() for n in made}

    def gradients(self) -> dict[int, np.ndarray]:
        """Every trained gradient that the gradient pass has found."""
        found = {}
        for op in self.recipe.ops:
            layer = self.layers.get(op.results[0])
            for name, number in op.parameters.items():
                if layer is not None and name not in TABLE[op.kind].statistics:
                    got = self.training.gradient_data(self.held[number], layer)
                    found |= {} if got is None else {number: got.copy()}
        for number, tensor in self.trained_inputs().items():
            handle = self.training.gradient_tensor(tensor)
            found |= {} if handle is None else {number: handle.torch().cpu().numpy().copy()}
        return found

    def trained_inputs(self) -> dict[int, sg.Tensor]:
        """Inputs that are trained like parameters."""
        return {one.number: self.tensors[one.number] for one in self.recipe.inputs if one.role == "trained"}

    def snapshot(self) -> dict[str, np.ndarray]:
        """Parameters, statistics and optimizer state, by name."""
        found = {}
        for training in self.trainings:
            training.synchronize_updates()
        for number, tensor in (self.held | self.trained_inputs()).items():
            tensor.synchronize_optimizer_data()
            found[f"parameter {number}"] = tensor.torch().cpu().numpy().copy()
            for i, data in enumerate(tensor.optimizer_data):
                state = np.frombuffer(bytes(data.bytes), np.float32)[: tensor.descriptor.element_count]
                found[f"state {number}.{i}"] = state.reshape(tensor.shape).copy()
        return found


def group_of(settings: dict[str, Any]) -> sg.ParameterGroup:
    """The group of parameters whose shape sums to an even number, or to an odd one."""
    numbers = {name: value for name, value in settings.items() if name != "remainder"}
    return sg.ParameterGroup(lambda _, tensor: sum(tensor.shape) % 2 == settings["remainder"], **numbers)


def optimizer_of(settings: dict[str, Any]) -> sg.Optimizer:
    """The optimizer with these settings."""
    own = ("momentum_scale", "uses_nesterov_momentum", "beta1", "beta2", "epsilon", "alpha")
    own += ("uses_ams_grad", "is_centered", "groups")
    enums = {"gradient_clipping_type": sg.GradientClippingType, "regularization_type": sg.RegularizationType}
    shared = {k: v for k, v in settings.items() if k not in own and k != "kind"}
    shared |= {name: kind[shared[name]] for name, kind in enums.items() if name in shared}
    kinds = {
        "SGD": sg.SGDOptimizer,
        "Adam": sg.AdamOptimizer,
        "AdamW": sg.AdamWOptimizer,
        "RMSProp": sg.RMSPropOptimizer,
    }
    rest = {k: v for k, v in settings.items() if k in own}
    rest["groups"] = [group_of(group) for group in settings.get("groups", ())]
    return kinds[settings["kind"]](sg.OptimizerDescriptor(**shared), **rest)
