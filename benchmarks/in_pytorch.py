"""The step in PyTorch: eager, and with `torch.compile`. The optimizer is the fused one."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.models import BETAS, EPSILON, LEARNING_RATE, NORMALIZATION_EPSILON, NORMALIZATION_MOMENTUM, Model


class Operators:
    """The operators of `models.py` as functions of tensors."""

    def __init__(self, statistics: dict[str, torch.Tensor], dropout: bool) -> None:
        self.statistics, self.keeps_all = statistics, not dropout
        self.linear, self.relu, self.max_pool = F.linear, F.relu, F.max_pool2d

    def convolution(self, x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weights, biases, padding=weights.shape[-1] // 2)

    def batch_norm(self, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, name: str) -> torch.Tensor:
        mean, variance = self.statistics[f"{name}.mean"], self.statistics[f"{name}.variance"]
        share = 1 - NORMALIZATION_MOMENTUM
        return F.batch_norm(x, mean, variance, gamma, beta, training=True, momentum=share, eps=NORMALIZATION_EPSILON)

    def dropout(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        return x if self.keeps_all else F.dropout(x, rate)

    def flatten(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)


class Eager:
    """The loop everybody writes: forward, `backward`, `optimizer.step`."""

    images = torch.contiguous_format

    def __init__(self, model: Model, device: str, dropout: bool) -> None:
        self.device = device
        on = Operators({name: self.placed(value) for name, value in model.statistics().items()}, dropout)
        parameters = {name: self.placed(value).requires_grad_() for name, value in model.parameters().items()}
        self.inputs, self.labels = (self.placed(array) for array in model.batch())
        self.optimizer = torch.optim.Adam(parameters.values(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)

        def forward(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model.network(on, parameters, inputs), labels)

        self.forward = self.compiled(forward)
        self.last: torch.Tensor | None = None

    def placed(self, array: np.ndarray) -> torch.Tensor:
        order = self.images if array.ndim == 4 else torch.contiguous_format
        return torch.from_numpy(array).to(self.device, memory_format=order)

    def compiled(self, forward: Any) -> Any:
        return forward

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.last = self.forward(self.inputs, self.labels)
        self.last.backward()
        self.optimizer.step()

    def wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    @property
    def loss(self) -> float:
        assert self.last is not None
        return self.last.item()


class ChannelsLast(Eager):
    """The same loop with images and convolution weights in the other order of memory."""

    images = torch.channels_last


class Compiled(Eager):
    """The same loop; forward and gradient are compiled, on a GPU with CUDA graphs."""

    def compiled(self, forward: Any) -> Any:
        forward.__code__ = forward.__code__.replace()  # code of its own, so every instance compiles for itself
        return torch.compile(forward, mode="default" if self.device == "cpu" else "reduce-overhead")
