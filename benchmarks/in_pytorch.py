"""The step in PyTorch: eager, and with `torch.compile`. The optimizer is the fused one."""

from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import BETAS, EPSILON, NORMALIZATION_EPSILON, NORMALIZATION_MOMENTUM, Model


class Operators:
    """The operators of `networks.py` as functions of tensors."""

    def __init__(self, parameters: dict[str, torch.Tensor], statistics: dict[str, torch.Tensor], dropout: bool) -> None:
        self.statistics, self.keeps_all = statistics, not dropout
        self.linear, self.relu, self.max_pool, self.add = F.linear, F.relu, F.max_pool2d, torch.add
        self.add_parameter, self.embedding, self.average_pool = torch.add, F.embedding, F.avg_pool2d
        found = [name.removesuffix(".hidden.weights") for name in parameters if name.endswith(".hidden.weights")]
        self.recurrences = {
            name: recurrence(parameters, list(ways)) for name, ways in groupby(found, lambda way: way.split(".")[0])
        }

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")

    def convolution(
        self, x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None, stride: int = 1
    ) -> torch.Tensor:
        return F.conv2d(x, weights, biases, stride, padding=weights.shape[-1] // 2)

    def depthwise_convolution(self, x: torch.Tensor, weights: torch.Tensor, stride: int) -> torch.Tensor:
        return F.conv2d(x, weights, None, stride, padding=weights.shape[-1] // 2, groups=weights.shape[0])

    def transposed_convolution(self, x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, weights, biases, weights.shape[-1])

    def mean_of_pixels(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))

    def mean_of_steps(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)

    def concatenate(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, y), 1)

    def batch_norm(self, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, name: str) -> torch.Tensor:
        mean, variance = self.statistics[f"{name}.mean"], self.statistics[f"{name}.variance"]
        share = 1 - NORMALIZATION_MOMENTUM
        return F.batch_norm(x, mean, variance, gamma, beta, training=True, momentum=share, eps=NORMALIZATION_EPSILON)

    def layer_norm(self, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, gamma.shape, gamma, beta, NORMALIZATION_EPSILON)

    def dropout(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        return x if self.keeps_all else F.dropout(x, rate)

    def attention(self, x: torch.Tensor, p: dict[str, torch.Tensor], name: str, heads: int) -> torch.Tensor:
        batch, tokens, width = x.shape
        joint = F.linear(x, p[f"{name}.joint.weights"], p[f"{name}.joint.biases"])
        query, key, value = joint.view(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, tokens, width)
        return F.linear(seen, p[f"{name}.output.weights"], p[f"{name}.output.biases"])

    def last_of_lstm(self, x: torch.Tensor, p: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        return self.recurrences[name](x)[0][:, -1]

    def lstm_both_ways(self, x: torch.Tensor, p: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        return self.recurrences[name](x)[0]

    def flatten(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)

    def split_rows(self, x: torch.Tensor, width: int) -> torch.Tensor:
        return x.reshape(-1, width)

    def pixels_as_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).flatten(0, 2)


def recurrence(parameters: dict[str, torch.Tensor], ways: list[str]) -> nn.LSTM:
    """PyTorch's module with these parameters; its second set of biases stays at zero, the others have but one.

    `ways` are the names of its layers, in both directions one after the other where it has two.
    """
    for way in ways:
        for key in (f"{way}.input.weights", f"{way}.hidden.weights", f"{way}.biases"):
            parameters[key] = nn.Parameter(parameters[key].detach())  # the module takes nothing else
    directions = 2 if ways[-1].endswith(".backward") else 1
    weights = parameters[f"{ways[0]}.input.weights"]
    sizes = weights.shape[1], weights.shape[0] // 4, len(ways) // directions
    module = nn.LSTM(*sizes, batch_first=True, bidirectional=directions == 2, device=weights.device)
    for i, way in enumerate(ways):
        end = f"l{i // directions}" + ("_reverse" if i % directions else "")
        biases = parameters[f"{way}.biases"]
        setattr(module, f"weight_ih_{end}", parameters[f"{way}.input.weights"])
        setattr(module, f"weight_hh_{end}", parameters[f"{way}.hidden.weights"])
        setattr(module, f"bias_ih_{end}", biases)
        setattr(module, f"bias_hh_{end}", nn.Parameter(torch.zeros_like(biases), requires_grad=False))
    module.flatten_parameters()  # one block of memory, as cuDNN wants it
    return module


class Eager:
    """The loop everybody writes: forward, `backward`, `optimizer.step`."""

    images = torch.contiguous_format

    def __init__(self, model: Model, device: str, dropout: bool) -> None:
        self.device = device
        # Plain tensors: with nn.Parameters torch 2.13 compiles `demo` wrongly on the CPU, and all that stands before
        # its max pool gets gradients of zero.
        parameters = {name: self.placed(value).requires_grad_() for name, value in model.parameters().items()}
        on = Operators(parameters, {name: self.placed(value) for name, value in model.statistics().items()}, dropout)
        self.inputs, self.labels = (self.placed(array) for array in model.batch())
        self.optimizer = torch.optim.Adam(
            parameters.values(), lr=model.learning_rate, betas=BETAS, eps=EPSILON, fused=True
        )

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


class InFloat64(Eager):
    """The same loop with twice the bits, so that next to nothing is rounded."""

    def placed(self, array: np.ndarray) -> torch.Tensor:
        placed = super().placed(array)
        return placed.double() if placed.is_floating_point() else placed


class Compiled(Eager):
    """The same loop; forward and gradient are compiled."""

    mode = "default"

    def compiled(self, forward: Any) -> Any:
        forward.__code__ = forward.__code__.replace()  # code of its own, so every instance compiles for itself
        return torch.compile(forward, mode=self.mode)


class ReducedOverhead(Compiled):
    """The same, with CUDA graphs."""

    mode = "reduce-overhead"
