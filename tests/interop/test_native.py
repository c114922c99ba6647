"""Every row of the table of native layers: the module's numbers and gradients, and what keeps a module wrapped."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph as sg
from stepgraph.interop.native import _BY_NAME, _TABLE

ROWS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(4, 3), (5, 4)),
    "linear without bias, in steps": (nn.Linear(4, 3, bias=False), (5, 2, 4)),
    "convolution of sequences": (nn.Conv1d(2, 3, 3, stride=2, padding=1), (3, 2, 7)),
    "convolution of images": (nn.Conv2d(2, 4, (3, 2), padding=(1, 0), dilation=(1, 2), groups=2), (3, 2, 6, 7)),
    "convolution of volumes": (nn.Conv3d(1, 2, 2, bias=False), (2, 1, 3, 4, 3)),
    "layer normalization": (nn.LayerNorm((3, 4)), (2, 5, 3, 4)),
    "group normalization": (nn.GroupNorm(2, 4, eps=1e-3), (3, 4, 5)),
    "RMS normalization": (nn.RMSNorm(4, eps=1e-6), (2, 5, 4)),
    "max of sequences": (nn.MaxPool1d(3, 2, padding=1), (2, 3, 8)),
    "max of images": (nn.MaxPool2d((2, 3), stride=(2, 1), dilation=(1, 2)), (2, 3, 7, 8)),
    "max of volumes": (nn.MaxPool3d(2), (2, 3, 4, 4, 5)),
    "average of sequences": (nn.AvgPool1d(2), (2, 3, 8)),
    "average of images": (nn.AvgPool2d(3, 2, padding=1), (2, 3, 7, 8)),
    "average without padding": (nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), (2, 3, 7, 8)),
    "average of volumes": (nn.AvgPool3d((1, 2, 2)), (2, 3, 4, 4, 5)),
    "flatten": (nn.Flatten(), (3, 2, 4, 2)),
    "softmax": (nn.Softmax(dim=-1), (3, 2, 4)),
    "log softmax": (nn.LogSoftmax(dim=1), (3, 2, 4)),
    "leaky ReLU": (nn.LeakyReLU(0.2), (3, 5)),
    "GELU": (nn.GELU(), (3, 5)),
    "GELU by tanh": (nn.GELU("tanh"), (3, 5)),
    "ELU": (nn.ELU(0.7), (3, 5)),
    "CELU": (nn.CELU(0.7), (3, 5)),
    "threshold": (nn.Threshold(0.1, 3.0), (3, 5)),
    "hard tanh": (nn.Hardtanh(-0.5, 0.7), (3, 5)),
    "hard shrink": (nn.Hardshrink(0.3), (3, 5)),
    "soft shrink": (nn.Softshrink(0.3), (3, 5)),
    **{
        kind.__name__: (kind(), (3, 5))
        for kind in (
            *(nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Tanh, nn.SELU, nn.SiLU, nn.LogSigmoid, nn.Softsign),
            *(nn.Tanhshrink, nn.Hardswish),
        )
    },
}


def test_every_row_has_a_case() -> None:
    elsewhere = {nn.Embedding, nn.Dropout}  # below: an index, and random numbers
    assert set(_TABLE) - elsewhere == {type(module) for module, _ in ROWS.values()}


@pytest.mark.parametrize("name", _BY_NAME)
def test_a_row_by_name_learns_as_its_module(name: str) -> None:
    package, _, kind = name.rpartition(".")
    pytest.importorskip(package.partition(".")[0])
    learns_as_its_module(getattr(importlib.import_module(package), kind)(), (3, 5))


class Between(nn.Module):
    """A module between two others, so that its source has a gradient."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(shape[1:]) + 0.5)
        self.inner = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.scale)


@pytest.mark.parametrize("name", ROWS)
def test_a_native_layer_learns_as_its_module(name: str) -> None:
    learns_as_its_module(*ROWS[name])


def learns_as_its_module(module: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Between(module, shape)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(shape)
    y = model(x)
    target = torch.randn_like(y)
    error = ((y - target) ** 2).mean()
    error.backward()
    wanted = {key: value - 0.1 * value.grad for key, value in model.named_parameters()}
    imported = sg.from_torch(model, x, share=False)
    assert [row.how for row in imported.rows if row.path == "inner"] == ["native"]
    labels = sg.Tensor((sg.BATCH, *target.shape[1:]))
    training = imported.training(sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1), labels)
    training.compile("cpu")
    loss = training.execute({"x": x}, {"labels": target}).loss
    assert loss == pytest.approx(error.item(), rel=1e-5)
    for key, value in imported.state_dict().items():
        np.testing.assert_allclose(value.numpy(), wanted[key].detach().numpy(), rtol=1e-4, atol=1e-5)


WRAPPED: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "sizes rounded up": (nn.MaxPool2d(2, ceil_mode=True), (2, 3, 5, 5), "rounds sizes up"),
    "another divisor": (nn.AvgPool2d(2, divisor_override=3), (2, 3, 4, 4), "divides by another number"),
    "no scale": (nn.GroupNorm(2, 4, affine=False), (2, 4, 3), "no scale"),
    "an epsilon by type": (nn.RMSNorm(4), (2, 4), "epsilon"),
    "some dimensions": (nn.Flatten(2), (2, 3, 4, 2), "some dimensions only"),
    "circular padding": (nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), (2, 1, 4, 4), "circular"),
    "normalized weights": (nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), (2, 3), "computed"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_no_layer_computes_stays_wrapped(name: str) -> None:
    module, shape, why = WRAPPED[name]
    (row,) = sg.from_torch(nn.Sequential(module), torch.rand(shape)).rows
    assert row.how == "wrapped" and why in row.why
