"""Modules as people write them, small: each with the shapes of its sources, for tests that train them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations


class Row(NamedTuple):
    """A module to train.

    Args:
        make: creates it.
        shapes: of its sources; those named `int` hold indices below 10.
        bits: whether the operators are PyTorch's own, so that losses and states have the same bits.
        call: how its sources become arguments.
    """

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    bits: bool = True
    call: Any = None
    indices: bool = False


class Residual(nn.Module):
    """A residual block with shortcuts in place and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class Recurrent(nn.Module):
    """A recurrent network and a linear layer on its output."""

    def __init__(self, network: nn.RNNBase) -> None:
        super().__init__()
        self.network = network
        width = (network.proj_size or network.hidden_size) * (2 if network.bidirectional else 1)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.network(x)
        return self.head(y)


class Attends(nn.Module):
    """Self-attention with a causal mask, and its weights as a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.attention(x, x, x, attn_mask=mask)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.body(self.embedding(ids))))


class LowRank(nn.Module):
    """A frozen base and a trained difference of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


class UNet(nn.Module):
    """Down, up, and a skip between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.middle = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        return self.out(torch.cat([self.up(F.relu(self.middle(skip))), skip], 1))


class Pair(nn.Module):
    """Two inputs, and a dictionary with a nested result, None and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(5, 4)

    def forward(self, a: torch.Tensor, *, b: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        joined = self.left(a) * scale + self.right(b)
        return {"joined": joined, "cache": None, "parts": [joined.relu(), joined.sum()], "scale": scale}


class Target(nn.Module):
    """The distance from a target network that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.target(x)
        return self.online(x) - wanted + 0.1 * self.online(x).detach()


class Averaged(nn.Module):
    """A moving average by assignment, a counter in place, and a buffer that never moves."""

    average: torch.Tensor
    calls: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
            self.calls += 1
        return (y - self.average) * self.scale


class Square(torch.autograd.Function):
    """A function with its own gradient, which is not the true one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * dy


class Custom(nn.Module):
    """A custom function, a hook, a scalar parameter and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(3, 4), nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.linear.register_forward_hook(lambda module, given, y: y + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Square.apply(self.linear(x)) * self.gain


def _cnn() -> nn.Module:
    convolutions = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 2)
    return nn.Sequential(*convolutions, nn.BatchNorm2d(6, affine=False), nn.Flatten(), nn.Linear(24, 3))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODULES = {
    "mlp": Row(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)), ((6, 3),)),
    "cnn": Row(_cnn, ((4, 2, 8, 8),), bits=False),
    "residual": Row(Residual, ((3, 4, 5, 5),), bits=False),
    "lstm": Row(lambda: Recurrent(nn.LSTM(3, 4, 2, batch_first=True)), ((3, 5, 3),), bits=False),
    "projected lstm": Row(lambda: Recurrent(nn.LSTM(3, 4, proj_size=2, bidirectional=True)), ((3, 2, 3),), bits=False),
    "gru": Row(lambda: Recurrent(nn.GRU(3, 4, bidirectional=True)), ((5, 2, 3),), bits=False),
    "rnn": Row(lambda: Recurrent(nn.RNN(3, 4, 2, nonlinearity="relu")), ((4, 2, 3),), bits=False),
    "transformer": Row(_encoder, ((3, 5, 8),)),
    "attention": Row(Attends, ((3, 5, 8),)),
    "tied": Row(Tied, ((4, 5),), indices=True),
    "weight norm": Row(lambda: parametrizations.weight_norm(nn.Conv2d(2, 3, 3)), ((2, 2, 5, 5),)),
    "spectral norm": Row(lambda: parametrizations.spectral_norm(nn.Linear(5, 4)), ((3, 5),)),
    "low rank": Row(LowRank, ((5, 6),)),
    "u-net": Row(UNet, ((2, 2, 6, 6),)),
    "two inputs": Row(Pair, ((4, 3), (4, 5)), call=(["source 0"], {"b": "source 1", "scale": 0.5})),
    "target": Row(Target, ((5, 3),)),
    "averaged": Row(Averaged, ((5, 3),)),
    "custom": Row(Custom, ((5, 3),)),
    "instance norm": Row(
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
        ((3, 2, 6),),
        bits=False,
    ),
}
