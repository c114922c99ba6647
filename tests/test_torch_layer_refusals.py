"""Modules that cannot be a layer: each is refused with its layer, its line and what to do; nothing changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph as sg

CPU = sg.Device.cpu()


class Function(nn.Module):
    """A function of arrays as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arrays: torch.Tensor) -> Any:
        return self.function(*arrays)


class Holds(nn.Module):
    """A module with one array."""

    def __init__(self, array: torch.Tensor, role: str = "buffer") -> None:
        super().__init__()
        if role == "buffer":
            self.register_buffer("held", array)
        else:
            self.held = nn.Parameter(array, requires_grad=False) if role == "parameter" else array

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.held


class Grows(nn.Module):
    """A buffer that grows with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.cat([self.cache, x])
        return self.cache


class AssignsData(nn.Module):
    """A buffer that changes where no one sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data = 0.9 * self.mean.data + 0.1 * x.detach().mean(0)
        return x - self.mean


def branches(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


# ------------------------------------------------------------------------------------------ Python that reads numbers


@pytest.mark.parametrize(
    "function",
    [
        branches,
        lambda x: x * x.sum().item(),
        lambda x: x * float(x.max()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.unique(x) + 1,
        lambda x: x * sum(x.flatten().tolist()),
        lambda x: x + torch.from_numpy(x.detach().numpy()),
        lambda x: x[: int(x.abs().sum())],
        lambda x: torch.repeat_interleave(x, x.abs().long()[0], 1),
        lambda x: next(one for one in x if one.any()),
        lambda x: x if bool(torch.isfinite(x).all()) else -x,
    ],
)
def test_python_that_reads_numbers_is_refused_with_its_line(function: Callable[..., Any]) -> None:
    module, graph = nn.Sequential(nn.Linear(3, 3), Function(function)), sg.Graph()
    with pytest.raises(sg.StateError, match="reads numbers") as caught:
        graph.node(sg.TorchLayer(module, label="net"), sg.Tensor((2, 3)))
    text = str(caught.value)
    assert text.startswith("TorchLayer 'net'") and "1 (Function)" in text
    assert f"test_torch_layer_refusals.py:{function.__code__.co_firstlineno + (function is branches)}" in text
    assert not graph.nodes


# --------------------------------------------------------------------------------------------------------- refused


def quantized() -> nn.Module:
    return Holds(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "data that is assigned": (AssignsData, sg.StateError, r"assigns the \.data of an array"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), sg.StateError, "'0.weight' has no shape yet"),
    "meta": (lambda: nn.Linear(3, 3, device="meta"), sg.StateError, "'weight' is on the meta device"),
    "momentum": (
        lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=None)),
        sg.ArgumentError,
        r"'0' \(BatchNorm1d\) has momentum=None",
    ),
    "complex parameter": (
        lambda: Holds(torch.ones(3, dtype=torch.complex64), "parameter"),
        sg.DataTypeError,
        "parameter 'held' is complex64",
    ),
    "complex buffer": (lambda: Holds(torch.ones(3) * 1j), sg.DataTypeError, "buffer 'held' is complex64"),
    "attribute of another type": (
        lambda: Holds(torch.ones(3, dtype=torch.int16), "attribute"),
        sg.DataTypeError,
        "attribute 'held' is int16",
    ),
    "quantized": (quantized, sg.DataTypeError, "buffer 'held' is qint8"),
    "sparse": (lambda: Holds(torch.eye(3).to_sparse()), sg.DataTypeError, "buffer 'held' is sparse_coo"),
    "scripted": (lambda: torch.jit.script(nn.Linear(3, 3)), sg.DataTypeError, "a scripted module has no Python code"),
    "complex result": (
        lambda: Function(lambda x: {"spectrum": torch.fft.rfft(x)}),
        sg.DataTypeError,
        "its result 'spectrum' is complex64",
    ),
    "no result": (lambda: Function(lambda x: {"cache": None}), sg.DataTypeError, "returns dict without any array"),
    "six dimensions": (
        lambda: Function(lambda x: x[:, None, None, None, None]),
        sg.ShapeError,
        r"has shape \[2, 1, 1, 1, 1, 3\]",
    ),
    "no elements": (lambda: Function(lambda x: x[:0]), sg.ShapeError, r"has shape \[0, 3\]"),
    "wrong shape": (lambda: nn.Linear(4, 2), sg.ShapeError, "does not accept these sources"),
    "wrong count": (lambda: nn.Bilinear(3, 3, 2), sg.ShapeError, "missing 1 required positional argument"),
    "own error": (lambda: Function(lambda x: 1 / 0), sg.ShapeError, "division by zero"),
    "growing": (Grows, sg.ShapeError, r"gives the buffer 'cache' the shape \[4, 3\]"),
    "renormalized embedding": (
        lambda: nn.Sequential(Function(lambda x: x.long() * 0), nn.Embedding(5, 2, max_norm=1.0)),
        sg.StateError,
        "changes the parameter '1.weight' in place",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Lazy modules", "ignore:.*quantize", "ignore:.*script")
@pytest.mark.filterwarnings("ignore:.*torch.ao", "ignore:Sparse")
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str) -> None:
    make, error, problem = REFUSED[name]
    module, graph = make(), sg.Graph()
    with pytest.raises(error, match=problem) as caught:
        graph.node(sg.TorchLayer(module), sg.Tensor((2, 3)))
    assert "Fix:" in str(caught.value) and "TorchLayer" in str(caught.value)
    assert not graph.nodes


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(sg.DataTypeError, match=r"type is not a torch\.nn\.Module"):
        sg.TorchLayer(nn.Linear)  # type: ignore[arg-type]


def test_a_loss_that_fails_in_the_gradient_names_the_layer() -> None:
    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("there is no gradient")

    graph, x = sg.Graph(), sg.Tensor((2, 3), label="x")
    graph.node(sg.TorchLayer(nn.Sequential(nn.Linear(3, 3), Function(NoGradient.apply)), label="net"), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": sg.Tensor((2, 3))})
    with pytest.raises(sg.ExecutionError, match=r"'net'.*there is no gradient"):
        training.compile(CPU)


# --------------------------------------------------------------------------------------------------- odd, but right


def run(module: nn.Module, *arrays: torch.Tensor) -> torch.Tensor:
    """The first result of an inference graph around a module."""
    graph = sg.Graph()
    sources = [sg.Tensor(tuple(one.shape), one.dtype, label=f"x{i}") for i, one in enumerate(arrays)]
    graph.node(sg.TorchLayer(module), *sources)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({f"x{i}": one for i, one in enumerate(sources)})
    inference.compile(CPU)
    return inference.execute({f"x{i}": one for i, one in enumerate(arrays)}).result.torch().clone()


CLOSURE = torch.arange(3.0)


class Containers(nn.Module):
    """Arrays in lists, dictionaries and tuples, one of them without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.several = [torch.ones(3), {"a": torch.full((3,), 2.0)}, (torch.tensor(3.0),)]
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("wide", torch.ones(1, 1, 1, 1, 1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.several
        return torch.cat([x + first * second["a"] * third[0] * self.wide.view(3), self.empty])


ODD: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "closure": (lambda: Function(lambda x: x + CLOSURE), (torch.ones(2, 3),)),
    "new arrays": (lambda: Function(lambda x: x + torch.arange(3) + torch.zeros(2, 1)), (torch.ones(2, 3),)),
    "containers": (Containers, (torch.ones(2, 3),)),
    "double": (lambda: nn.Linear(3, 2).double(), (torch.ones(2, 3, dtype=torch.float64),)),
    "integers": (lambda: Function(lambda x: x * 2 + 1), (torch.arange(6).view(2, 3),)),
    "booleans": (lambda: Function(lambda x: ~x), (torch.tensor([True, False]),)),
    "embedding bag": (lambda: nn.EmbeddingBag(10, 3, mode="sum"), (torch.tensor([[1, 2], [3, 9]]),)),
    "permuted weights": (lambda: _permuted().eval(), (torch.ones(2, 3),)),
    "gradient inside": (lambda: Function(_gradient), (torch.ones(2, 3),)),
    "identity": (nn.Identity, (torch.ones(2, 3),)),
    "views": (lambda: Function(lambda x: x.t().t()[:, 1:]), (torch.ones(2, 3),)),
    "writes into parts": (lambda: Function(_parts), (torch.ones(2, 3),)),
    "out": (lambda: Function(lambda x: torch.mul(x, 3, out=torch.empty(2, 3))), (torch.ones(2, 3),)),
    "einsum": (lambda: Function(lambda x, y: torch.einsum("ij,kj->ik", x, y)), (torch.ones(2, 3), torch.ones(4, 3))),
    "vmap": (lambda: Function(torch.vmap(lambda row: row.sum() * row)), (torch.ones(2, 3),)),
    "interpolation": (lambda: Function(lambda x: F.interpolate(x, 7, mode="linear")), (torch.ones(1, 2, 3),)),
    "complex inside": (lambda: Function(lambda x: torch.fft.irfft(torch.fft.rfft(x), n=4)), (torch.randn(2, 4),)),
}


def _permuted() -> nn.Module:
    module = nn.Linear(3, 2)
    module.weight = nn.Parameter(torch.arange(6.0).view(3, 2).t())
    return module


def _gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((leaf**3).sum(), leaf)[0]


def _parts(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2, 4)
    y[:, 1:] = x
    y[0].mul_(5)
    return y


@pytest.mark.parametrize("name", ODD)
def test_odd_modules_give_what_pytorch_gives(name: str) -> None:
    make, arrays = ODD[name]
    module = make()
    wanted = module(*(one.clone() for one in arrays))
    assert torch.allclose(run(module, *arrays), wanted)
