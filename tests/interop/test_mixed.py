"""Imported models in mixed precision: as close to float32 as PyTorch's autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import nn

import stepgraph as sg
from tests.interop.test_odd_models import model

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def turning(self: Any, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """As timesteps of a diffusion model: whole turns are lost if the angles are rounded."""
    angles = times[:, None] * self.rates
    y = self.a(x)
    return self.b(y + torch.cat([angles.sin(), angles.cos()], 1))


def turning_later(self: Any, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The angles pass from one stretch of functions to another."""
    angles = (times[:, None] * self.rates).requires_grad_(False)
    y = self.a(x + angles.sum(1, keepdim=True) * 0)
    return self.b(y) + torch.cat([angles.sin(), angles.cos()], 1)


def turning_beside(self: Any, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """One stretch makes angles and what a layer's result goes into."""
    h = self.a(x) * 2
    angles = times[:, None] * self.rates
    return self.b(h) + torch.cat([angles.sin(), angles.cos()], 1)


def turning_by_parameters(self: Any, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    angles = times[:, None] * (self.learned * 2)
    y = self.b(self.a(x) + angles.sum(1, keepdim=True) * 0)
    return y + torch.cat([angles.sin(), angles.cos()], 1)


def attending(self: Any, x: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """No key is known of the first row: the mean of all, not 0 / 0."""
    h = self.a(x) + x
    bias = torch.where(known[:, None, :], 0.0, torch.finfo(torch.float32).min)
    q, k = self.b(h).view(-1, 3, 2), self.a(h).view(-1, 3, 2)
    return ((q @ k.transpose(1, 2) + bias).softmax(-1) @ h.view(-1, 3, 2)).flatten(1)


def attending_with_its_type(self: Any, x: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    q, k = self.a(x).view(-1, 3, 2), self.b(x).view(-1, 3, 2)
    scores = (q @ k.transpose(1, 2)).masked_fill(~known[:, None, :], torch.finfo(q.dtype).min)
    return (scores.softmax(-1) @ q).flatten(1)


def with_loss(self: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(self.b(self.a(x)), classes)


def by_hand(self: Any, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    scores = self.b(self.a(x))
    return (scores.logsumexp(1) - scores.gather(1, classes[:, None])[:, 0]).mean()


def sampled(self: Any, x: torch.Tensor) -> torch.Tensor:
    places = x[:, :4].view(-1, 2, 1, 2)
    found = F.grid_sample(self.a(x).view(-1, 1, 2, 3), places, align_corners=False)
    return self.b(found.reshape(-1, 2).repeat(1, 3))


RATES = torch.tensor([1.0, 17.3, 301.7])
TIMES = torch.arange(8) * 11.7 + 3.1
KNOWN = torch.arange(24).view(8, 3) % 5 > 1
KNOWN[0] = False
MODELS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any], dict[str, torch.Tensor]]] = {
    # name: forward, parts, inputs
    "angles": (turning, {"rates": RATES}, {"x": X, "times": TIMES}),
    "angles of another stretch": (turning_later, {"rates": RATES}, {"x": X, "times": TIMES}),
    "angles beside what a layer computed": (turning_beside, {"rates": RATES}, {"x": X, "times": TIMES}),
    "angles of parameters": (
        turning_by_parameters,
        {"learned": nn.Parameter(RATES.clone())},
        {"x": X, "times": TIMES},
    ),
    "a mask beside what a layer computed": (attending, {}, {"x": X, "known": KNOWN}),
    "a mask of the least number": (attending_with_its_type, {}, {"x": X, "known": KNOWN}),
    "a mask of the least number, by keyword": (
        lambda self, x, known: self.a(x).masked_fill(known.repeat(1, 2), value=torch.finfo(x.dtype).min).softmax(1),
        {},
        {"x": X, "known": KNOWN},
    ),
    "its own loss": (with_loss, {}, {"x": X, "classes": torch.arange(8) % 6}),
    "its own loss, by hand": (by_hand, {}, {"x": X, "classes": torch.arange(8) % 6}),
    "a gain": (lambda self, x: self.b(self.a(x) * self.gain), {"gain": nn.Parameter(torch.rand(6))}, {"x": X}),
    "a spectrum": (lambda self, x: self.b(torch.fft.rfft(self.a(x), n=10).abs()), {}, {"x": X}),
    "a quantile": (lambda self, x: self.b(self.a(x) - self.a(x).quantile(0.5, 1, keepdim=True)), {}, {"x": X}),
    "distances": (lambda self, x: self.b(self.a(x)) + torch.cdist(self.a(x), self.a.weight), {}, {"x": X}),
    "samples": (sampled, {}, {"x": X}),
    "a decomposition": (lambda self, x: self.b(torch.linalg.pinv(self.a(x)).T), {}, {"x": X}),
    "a product with a constant": (
        lambda self, x: self.b(torch.baddbmm(torch.ones(1), self.a(x)[:, None], torch.ones(len(x), 6, 6))[:, 0]),
        {},
        {"x": X},
    ),
    "a mean of types that PyTorch does not mix": (
        lambda self, x: self.b(torch.lerp(self.a(x), self.b(x), self.share.sigmoid())),
        {"share": nn.Parameter(torch.rand(6))},
        {"x": X},
    ),
    "rows put into zeros": (
        lambda self, x: self.b(torch.zeros(len(x), 6).index_copy(0, torch.arange(len(x)), self.a(x))),
        {},
        {"x": X},
    ),
}


@pytest.mark.parametrize("compute_type", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_is_as_close_to_float32_as_in_autocast(name: str, compute_type: str) -> None:
    if name == "a quantile" and Version(torch.__version__) < Version("2.13"):
        pytest.skip("quantile itself reads numbers in this PyTorch")
    forward, parts, inputs = MODELS[name]
    made = model(forward, **parts)
    imported = sg.from_torch(made, inputs)
    graph = sg.InferenceGraph([imported.graph])
    graph.add_inputs(imported.inputs)
    graph.compile("cpu", compute_type=compute_type)
    ours = graph.execute(inputs).result.torch().reshape(-1)
    with torch.no_grad():
        exact = made(**inputs).reshape(-1)
        try:
            with torch.autocast("cpu", getattr(torch, compute_type)):
                theirs = made(**inputs).float().reshape(-1)
        except RuntimeError:  # PyTorch refuses the types; float32 does not
            theirs = exact
    scale, rounding = exact.abs().max(), torch.finfo(getattr(torch, compute_type)).eps
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 2 * rounding * scale


def test_an_operator_without_the_type_is_named_with_a_fix() -> None:
    imported = sg.from_torch(model(lambda self, x: self.b(torch.special.bessel_j0(self.a(x)))), X)
    graph = sg.InferenceGraph([imported.graph])
    graph.add_inputs(imported.inputs)
    graph.compile("cpu", compute_type="bfloat16")
    with pytest.raises(sg.ExecutionError, match=r"not implemented for 'BFloat16'[\s\S]*as by x\.float\(\)"):
        graph.execute({"x": X})


def test_a_loss_that_the_model_returns_is_not_rounded() -> None:
    made = model(with_loss)
    inputs = MODELS["its own loss"][2]
    imported = sg.from_torch(made, inputs)
    training = imported.training(None, sg.SGDOptimizer(0.1))
    training.compile("cpu", compute_type="bfloat16")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = float(made(**inputs))
    found = float(training.execute(inputs).loss)
    assert found == pytest.approx(expected, rel=1e-4)
    assert float(torch.tensor(found).bfloat16()) != found
