"""The optimizers of the specification in NumPy float64, and a small network to try them on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import stepgraph as sg

STEPS, BATCH = 30, 6
VALUE, NORM, GLOBAL = sg.GradientClippingType
L1, L2 = sg.RegularizationType.L1, sg.RegularizationType.L2
STATE = {  # how many buffers each parameter has; their order is that of `Rule`
    **{"sgd": 0, "sgd momentum": 1, "sgd nesterov": 1, "adam": 2, "adam amsgrad": 3, "adam later": 2},
    **{"adamw": 2, "adamw amsgrad": 3, "rmsprop": 1, "rmsprop momentum": 2, "rmsprop centered": 2, "rmsprop both": 3},
    **{"sgd torch": 1, "adam torch": 2, "adamw torch": 3, "rmsprop torch": 2, "lion": 1, "muon": 1, "muon original": 1},
}
DECOUPLED = ("adamw", "lion", "muon")  # the decay is not part of the gradient


def buffers_of(name: str, weights: np.ndarray) -> int:
    """How many buffers a parameter has: with Muon, two if it is not a matrix."""
    return 2 if name.startswith("muon") and weights.ndim < 2 else STATE[name]


class Rule:
    """The optimizers of the specification in NumPy float64; reads its numbers from a live optimizer."""

    def __init__(self, name: str, optimizer: Any) -> None:
        self.name, self.o, self.time, self.state = name, optimizer, optimizer.time_step, {}

    def prepare(self, weights: list[np.ndarray], gradients: list[np.ndarray]) -> list[np.ndarray]:
        o = self.o
        if o.applies_gradient_clipping and o.gradient_clipping_type == VALUE:
            gradients = [np.clip(g, o.gradient_clip_min, o.gradient_clip_max) for g in gradients]
        elif o.applies_gradient_clipping:
            norms = [np.sqrt((g**2).sum()) for g in gradients]
            if o.gradient_clipping_type == GLOBAL:
                norms = [o.custom_global_norm or np.sqrt(sum(n**2 for n in norms))] * len(gradients)
            most = o.maximum_clipping_norm
            gradients = [g * most / n if n > most else g for g, n in zip(gradients, norms, strict=True)]
        gradients = [g * o.gradient_rescale for g in gradients]
        kind = None if self.name.startswith(DECOUPLED) else o.regularization_type  # these ignore the type
        pull = {L1: np.sign, L2: lambda w: w}.get(kind, np.zeros_like)
        return [g + o.regularization_scale * pull(w) for g, w in zip(gradients, weights, strict=True)]

    def step(self, weights: list[np.ndarray], gradients: list[np.ndarray]) -> None:
        family = {"sgd": self._sgd, "adam": self._adam, "adamw": self._adam, "rmsprop": self._rmsprop}
        family |= {"lion": self._lion, "muon": self._muon}
        for i, (w, g) in enumerate(zip(weights, self.prepare(weights, gradients), strict=True)):
            state = self.state.setdefault(i, [np.zeros_like(w) for _ in range(buffers_of(self.name, w))])
            if self.name.startswith(DECOUPLED):
                w -= self.o.learning_rate * self.o.regularization_scale * w
            w -= family[self.name.split()[0]](state, g)
        self.time += 1

    def _sgd(self, state: list[np.ndarray], g: np.ndarray) -> np.ndarray:
        rate = self.o.learning_rate
        if not state:
            return rate * g
        if self.name == "sgd torch":
            state[0] = g if self.time == 1 else self.o.momentum_scale * state[0] + (1 - self.o.dampening) * g
            return rate * state[0]
        if self.name == "sgd momentum":
            state[0] = self.o.momentum_scale * state[0] + rate * g
            return state[0]
        state[0] = self.o.momentum_scale * state[0] + g
        return rate * (g + self.o.momentum_scale * state[0])

    def _adam(self, state: list[np.ndarray], g: np.ndarray) -> np.ndarray:
        o = self.o
        rate = o.learning_rate * np.sqrt(1 - o.beta2**self.time) / (1 - o.beta1**self.time)
        if not self.name.startswith("adam") or "torch" in self.name:  # ε after the correction
            return self._adam_in_torch(state, g)
        state[0] = o.beta1 * state[0] + (1 - o.beta1) * g
        state[1] = o.beta2 * state[1] + (1 - o.beta2) * g**2
        if len(state) == 3:
            state[2] = np.maximum(state[2], state[1])
        return rate * state[0] / (np.sqrt(state[-1]) + o.epsilon)

    def _adam_in_torch(self, state: list[np.ndarray], g: np.ndarray) -> np.ndarray:
        o = self.o
        state[0] = o.beta1 * state[0] + (1 - o.beta1) * g
        state[1] = o.beta2 * state[1] + (1 - o.beta2) * g**2
        if len(state) == 3:
            state[2] = np.maximum(state[2], state[1])
        momentum, velocity = state[0] / (1 - o.beta1**self.time), state[-1] / (1 - o.beta2**self.time)
        return o.learning_rate * momentum / (np.sqrt(velocity) + o.epsilon)

    def _lion(self, state: list[np.ndarray], g: np.ndarray) -> np.ndarray:
        o = self.o
        direction = np.sign(o.beta1 * state[0] + (1 - o.beta1) * g)
        state[0] = o.beta2 * state[0] + (1 - o.beta2) * g
        return o.learning_rate * direction

    def _muon(self, state: list[np.ndarray], g: np.ndarray) -> np.ndarray:
        """By singular values: the iteration is an odd polynomial of the matrix, so it acts on each of them."""
        if len(state) == 2:
            return self._adam_in_torch(state, g)
        o, mu = self.o, self.o.momentum_scale
        state[0] = mu * state[0] + (1 - mu) * g
        used = mu * state[0] + (1 - mu) * g if o.uses_nesterov_momentum else state[0]
        left, values, right = np.linalg.svd(used, full_matrices=False)
        values = values / max(np.sqrt((values**2).sum()), 1e-7)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        rows, columns = g.shape
        scale = np.sqrt(max(1, rows / columns)) if o.scale == "original" else 0.2 * np.sqrt(max(rows, columns))
        return o.learning_rate * scale * (left * values) @ right

    def _rmsprop(self, state: list[np.ndarray], g: np.ndarray) -> np.ndarray:
        o = self.o
        state[0] = spread = o.alpha * state[0] + (1 - o.alpha) * g**2
        if o.is_centered:
            state[1] = o.alpha * state[1] + (1 - o.alpha) * g
            spread = spread - state[1] ** 2
        if self.name == "rmsprop torch":
            state[-1] = o.momentum_scale * state[-1] + g / (np.sqrt(spread) + o.epsilon)
            return o.learning_rate * state[-1]
        change = o.learning_rate * g / (np.sqrt(spread) + o.epsilon)
        if o.momentum_scale:
            state[-1] = o.momentum_scale * state[-1] - change
            return -state[-1]
        return change


class Net:
    """`W₂ tanh(W₁ x + b₁) + b₂` with the mean squared error: in NumPy float64, in stepgraph, in PyTorch."""

    def __init__(self, seed: int = 3) -> None:
        generator = np.random.default_rng(seed)
        shapes = ((5, 3), (5,), (2, 5), (2,))
        self.start = [generator.normal(0, 0.7, shape).astype(np.float32) for shape in shapes]
        self.x = generator.normal(size=(STEPS, BATCH, 3)).astype(np.float32)
        self.y = generator.normal(size=(STEPS, BATCH, 2)).astype(np.float32)

    def numpy(self, rule: Rule, change: Callable[[int], None] = lambda step: None) -> tuple[list, list[np.ndarray]]:
        weights, losses = [w.astype(np.float64) for w in self.start], []
        for step in range(STEPS):
            change(step)
            x, y = self.x[step].astype(np.float64), self.y[step].astype(np.float64)
            hidden = np.tanh(x @ weights[0].T + weights[1])
            error = hidden @ weights[2].T + weights[3] - y
            losses.append((error**2).mean())
            out = 2 * error / error.size
            inner = (out @ weights[2]) * (1 - hidden**2)
            rule.step(weights, [inner.T @ x, inner.sum(0), out.T @ hidden, out.sum(0)])
        return losses, weights

    def graph(
        self,
        optimizer: sg.Optimizer | None,
        *,
        average: float | None = None,
        compute_type: Any = None,
        device: sg.Device | None = None,
        **frozen: bool,
    ) -> sg.TrainingGraph:
        self.inputs, self.labels = sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 2))
        w1, b1, w2, b2 = self.tensors = [sg.Tensor(w.shape, data=w.copy()) for w in self.start]
        self.layers = [
            sg.FullyConnectedLayer(w1, b1, sg.ConvolutionDescriptor(1, 3, 5)),
            sg.FullyConnectedLayer(w2, b2, sg.ConvolutionDescriptor(1, 5, 2)),
        ]
        self.wired = graph = sg.Graph()
        hidden = graph.node(self.layers[0], self.inputs, **frozen)
        graph.node(self.layers[1], graph.node(sg.ActivationLayer.tanh(), hidden))
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), optimizer, average=average)
        training.add_inputs({"x": self.inputs}, {"y": self.labels})
        training.compile(device or sg.Device.cpu(), compute_type=compute_type)
        return training

    def stepgraph(
        self, optimizer: sg.Optimizer, change: Callable[[int], None] = lambda step: None
    ) -> tuple[list, list]:
        training, losses = self.graph(optimizer), []
        for step in range(STEPS):
            change(step)
            losses.append(training.execute({"x": self.x[step]}, {"y": self.y[step]}).loss)
        return losses, [tensor.numpy() for tensor in self.tensors]

    def torch(self, make: Callable[..., torch.optim.Optimizer]) -> tuple[list, list[np.ndarray]]:
        weights, losses = [torch.from_numpy(w.copy()).requires_grad_() for w in self.start], []
        optimizer = make(weights)
        for x, y in zip(torch.from_numpy(self.x), torch.from_numpy(self.y), strict=True):
            hidden = torch.tanh(torch.nn.functional.linear(x, weights[0], weights[1]))
            loss = torch.nn.functional.mse_loss(torch.nn.functional.linear(hidden, weights[2], weights[3]), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [w.detach().numpy() for w in weights]
