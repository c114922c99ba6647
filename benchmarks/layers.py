"""Each layer against PyTorch's own module for the same thing: forward alone, and forward with gradient, interleaved.

    python -m benchmarks.layers [--rounds 15] [--device cpu] [--only lstm,dropout] [--json FILE]

A layer runs as it does in a compiled step: traced, kernels chosen, called as one function. PyTorch runs its module
eagerly. Above 1 the layer is faster. A gradient that is the incoming gradient itself (add, concatenation) is copied
here, because it leaves the step; between two layers of a graph it is not.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import stepgraph as sg
from stepgraph.compiler.passes.in_place import in_place
from stepgraph.compiler.phases import split, whole
from stepgraph.compiler.step import Key, KeyKind, Step, gradient, source_gradient, value
from stepgraph.compiler.trace import input_keys, trace
from stepgraph.runtime.executable import Executable


class Pair(NamedTuple):
    """A layer, PyTorch's twin and the shapes of their sources."""

    layer: Callable[[], sg.Layer]
    twin: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


class Attention(nn.MultiheadAttention):
    """Only the result, not the attention weights."""

    def __init__(self) -> None:
        super().__init__(256, 4, batch_first=True)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().forward(q, k, v, need_weights=False)[0]


class Recurrence(nn.LSTM):
    """Only the output, not the states."""

    def __init__(self) -> None:
        super().__init__(64, 256, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


IMAGE, ROWS, SEQUENCE = (32, 64, 32, 32), (128, 1024), (16, 64, 256)

PAIRS = {
    "fully connected": Pair(lambda: sg.FullyConnectedLayer.create(1024, 1024), nn.Linear(1024, 1024), (ROWS,)),
    "convolution 3×3": Pair(lambda: sg.ConvolutionLayer.create(64, 64, 3), nn.Conv2d(64, 64, 3, padding=1), (IMAGE,)),
    "convolution 1×1": Pair(lambda: sg.ConvolutionLayer.create(64, 128, 1), nn.Conv2d(64, 128, 1), (IMAGE,)),
    "max pooling": Pair(lambda: sg.PoolingLayer.max(2), nn.MaxPool2d(2), (IMAGE,)),
    "average pooling": Pair(lambda: sg.PoolingLayer.average(2), nn.AvgPool2d(2), (IMAGE,)),
    "relu": Pair(sg.ActivationLayer.relu, nn.ReLU(), (IMAGE,)),
    "gelu": Pair(sg.ActivationLayer.gelu, nn.GELU(approximate="tanh"), (SEQUENCE,)),
    "sigmoid": Pair(sg.ActivationLayer.sigmoid, nn.Sigmoid(), (IMAGE,)),
    "softmax": Pair(lambda: sg.SoftmaxLayer.softmax(2), nn.Softmax(2), (SEQUENCE,)),
    "add": Pair(sg.ArithmeticLayer.add, torch.add, (IMAGE, IMAGE)),
    "concatenation": Pair(lambda: sg.ConcatenationLayer(1), lambda a, b: torch.cat([a, b], 1), (IMAGE, IMAGE)),
    "dropout": Pair(lambda: sg.DropoutLayer(0.3), nn.Dropout(0.3), (IMAGE,)),
    "batch normalization": Pair(lambda: sg.BatchNormalizationLayer.create(64), nn.BatchNorm2d(64), (IMAGE,)),
    "group normalization": Pair(lambda: sg.GroupNormalizationLayer.create(64, 8), nn.GroupNorm(8, 64), (IMAGE,)),
    "layer normalization": Pair(lambda: sg.LayerNormalizationLayer.create((256,)), nn.LayerNorm(256), (SEQUENCE,)),
    "upsample": Pair(
        lambda: sg.UpsampleLayer.linear((64, 64)), lambda x: F.interpolate(x, (64, 64), mode="bilinear"), (IMAGE,)
    ),
    "matrix product": Pair(
        lambda: sg.MatMulLayer(sg.MatMulDescriptor()), torch.matmul, ((16, 128, 256), (16, 256, 128))
    ),
    "attention": Pair(lambda: sg.MultiheadAttentionLayer.create(256, head_count=4), Attention(), (SEQUENCE,) * 3),
    "lstm": Pair(lambda: sg.LSTMLayer.create(64, 256), Recurrence(), ((32, 100, 64),)),
}


class Ours:
    """A layer alone in a step: its forward, and its forward with gradient."""

    def __init__(self, pair: Pair, device: torch.device) -> None:
        layer, graph = pair.layer(), sg.Graph()
        sources = [sg.Tensor(shape) for shape in pair.shapes]
        result = graph.node(layer, *sources)
        nodes, trained = graph.nodes, tuple(layer.parameters.values())
        batch = (pair.shapes[0][0],) * 2
        step = Step(nodes, tuple(sources), device, batch, True, trained, frozenset(sources), seeded=(result,))
        program = trace(step)
        gradients = [source_gradient(nodes[0], i) for i in range(len(sources))] + [gradient(t) for t in trained]
        arrays = {}
        for key in input_keys(step):
            like = program.inputs[key].meta["val"]
            held = key.owner.torch() if isinstance(key.owner, sg.Tensor) and key.owner.has_data else None
            random = (
                torch.randn(like.shape) if like.dtype.is_floating_point else torch.ones(like.shape, dtype=like.dtype)
            )
            arrays[key] = (random if held is None or key.kind != KeyKind.VALUE else held).to(device)
        parts = whole(program, [value(result), *gradients]), split(program).forward
        self.both, self.forward = (_call(Executable(in_place(part), step), arrays) for part in parts)


def _call(executable: Executable, arrays: dict[Key, torch.Tensor]) -> Callable[[], Any]:
    binding = executable.bind(arrays)
    return lambda: executable(binding, {})


class Theirs:
    """PyTorch's module, eager."""

    def __init__(self, pair: Pair, device: torch.device) -> None:
        twin = pair.twin.to(device) if isinstance(pair.twin, nn.Module) else pair.twin
        self.parameters = list(twin.parameters()) if isinstance(twin, nn.Module) else []
        sources = [torch.randn(shape, device=device).requires_grad_() for shape in pair.shapes]
        cotangent = torch.randn_like(twin(*sources))
        self.forward = lambda: twin(*sources)
        self.both = lambda: torch.autograd.grad(twin(*sources), [*sources, *self.parameters], cotangent)


def seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Time of one call."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def measure(pair: Pair, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Ratios PyTorch ÷ stepgraph of each round."""
    ours, theirs = Ours(pair, device), Theirs(pair, device)
    found = {}
    for what in ("forward", "both"):
        calls = getattr(ours, what), getattr(theirs, what)
        once = [seconds(call, device, 3) for call in calls]
        repeats = max(1, int(0.02 / max(once)))
        pairs = [[seconds(call, device, repeats) for call in calls] for _ in range(rounds)]
        found[what] = [their / our for our, their in pairs]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default=",".join(PAIRS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    table = Table("layer", "forward", "its spread", "with gradient", "its spread", title="PyTorch ÷ stepgraph")
    results = {}
    for name in options.only.split(","):
        results[name] = ratios = measure(PAIRS[name], device, options.rounds)
        row = [name]
        for what in ("forward", "both"):
            low, middle, high = statistics.quantiles(ratios[what], n=4)
            row += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        table.add_row(*row)
    Console().print(table)
    if options.json:
        options.json.write_text(
            json.dumps({"torch": torch.__version__, "device": str(device), "ratios": results}, indent=1)
        )


if __name__ == "__main__":
    main()
