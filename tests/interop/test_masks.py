"""Masks that a model computes from shapes become settings of attention; all others stay what they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph as sg
from stepgraph.layers.glue import GlueLayer
from tests.interop.models import CASES, tokens

STEPS, WIDTH = 6, 8


class Attention(nn.Module):
    """Attention with one head and whatever mask.

    Args:
        mask: makes the mask from the source.
        keys: how many of the steps are keys.
    """

    def __init__(self, mask: Callable[..., Any], keys: int = STEPS) -> None:
        super().__init__()
        self.joint, self.mask, self.keys = nn.Linear(WIDTH, 3 * WIDTH), mask, keys
        self.register_buffer("triangle", below())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one[:, None] for one in self.joint(x).chunk(3, -1))
        k, v = k[..., : self.keys, :], v[..., : self.keys, :]
        return F.scaled_dot_product_attention(q, k, v, self.mask(self, x))[:, 0]


def below(steps: int = STEPS) -> torch.Tensor:
    return torch.ones(steps, steps, dtype=torch.bool).tril()


def filled(kind: torch.dtype = torch.float32, value: float = -math.inf) -> torch.Tensor:
    return torch.full((STEPS, STEPS), value, dtype=kind).triu(1)


def in_place(*_: Any) -> torch.Tensor:
    """Written through a view, as some models do."""
    mask = torch.zeros(1, 1, STEPS, STEPS)
    mask[0, 0].masked_fill_(~below(), -math.inf)
    return mask


def of_positions(_: Any, x: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(x.shape[1], device=x.device)
    return (steps[None] <= steps[:, None]).expand(x.shape[0], 1, -1, -1)


def first_row(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Written in one row only, which is all of an example with one."""
    mask = torch.zeros(x.shape[0], 1, STEPS, STEPS)
    mask[0].masked_fill_(~below(), -math.inf)
    return mask


def packed(_: Any, x: torch.Tensor) -> torch.Tensor:
    """Numbers the sequences of each row, as transformers does, and looks them up."""
    steps, rows = torch.arange(STEPS), torch.arange(x.shape[0])[:, None, None, None]
    places = steps[None].expand(x.shape[0], -1)
    sequence = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    same = sequence[rows, steps[None, None, :, None]] == sequence[rows, steps[None, None, None]]
    return same & (steps[None] <= steps[:, None])


CAUSAL: dict[str, Callable[..., Any]] = {
    "a triangle": lambda *_: below(),
    "infinities above": lambda *_: filled(),
    "the smallest number above": lambda *_: filled(value=torch.finfo(torch.float32).min),
    "written in place": in_place,
    "positions, for every row": of_positions,
    "by where": lambda *_: torch.where(below(), 0.0, -math.inf)[None, None],
    "packed sequences": packed,
    "repeated for every row": lambda _, x: below()[None, None].repeat(x.shape[0], 1, 1, 1),
    "PyTorch's": lambda *_: nn.Transformer.generate_square_subsequent_mask(STEPS),
}
NOTHING: dict[str, Callable[..., Any]] = {
    "all ones": lambda _, x: torch.ones(x.shape[0], 1, 1, STEPS, dtype=torch.bool),
    "all zeros": lambda *_: torch.zeros(STEPS, STEPS),
}
BY_ROWS: dict[str, Callable[..., Any]] = {
    "other rows": lambda _, x: below() | (torch.arange(x.shape[0]) % 2 == 1)[:, None, None, None],
    "a later row": lambda _, x: below() | (torch.arange(x.shape[0]) > 9)[:, None, None, None],
    "many rows": lambda _, x: below() | (torch.full((x.shape[0], 1, STEPS, 1), x.shape[0]) > 9),
    "rows counted": lambda _, x: below() | (torch.ones(x.shape[0]).sum() > 9),
    "rows summed up": lambda _, x: below() | (torch.ones(x.shape[0], 1, 1, 1).cumsum(0) > 9),
    "rows side by side": lambda _, x: below() & (torch.arange(STEPS).repeat(x.shape[0])[-STEPS:] < 9),
    "a row in place": first_row,
}
KEPT: dict[str, Callable[..., Any]] = {
    **BY_ROWS,
    "a window": lambda *_: below() & ~below().tril(-3),
    "two diagonals more": lambda *_: torch.ones(STEPS, STEPS, dtype=torch.bool).tril(2),
    "scores lowered": lambda *_: filled(value=-1e4),
    "distances": lambda *_: filled() + torch.arange(STEPS) * 0.1,
    "an input": lambda _, x: below() & (x.mean(-1) > -9)[:, None, None],
    "a buffer": lambda self, _: self.triangle,
    "zeros like an input": lambda _, x: torch.zeros_like(x[0, :, :STEPS]).masked_fill(~below(), -math.inf),
    "random numbers": lambda *_: below() & (torch.rand(STEPS, STEPS) < 0.99999),
}


def call(imported: sg.Imported) -> dict[str, Any]:
    """The settings with which the graph calls attention."""
    programs = [node.layer.training for node in imported.graph.nodes if isinstance(node.layer, GlueLayer)]
    (found,) = (one for program in programs for one in program.calls if "attention" in one.function)
    return dict(zip(("attn_mask", "dropout_p", "is_causal"), found.arguments[3:], strict=False)) | dict(found.settings)


def imported(mask: Callable[..., Any], keys: int = STEPS) -> sg.Imported:
    torch.manual_seed(0)
    return sg.from_torch(Attention(mask, keys), torch.zeros(2, STEPS, WIDTH))


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_becomes_a_setting(name: str) -> None:
    found = call(imported(CAUSAL[name]))
    assert found["is_causal"] is True and found["attn_mask"] is None


@pytest.mark.parametrize("name", NOTHING)
def test_a_mask_that_excludes_nothing_is_left_out(name: str) -> None:
    found = call(imported(NOTHING[name]))
    assert found["attn_mask"] is None and not found.get("is_causal")


@pytest.mark.parametrize("name", KEPT)
def test_another_mask_stays(name: str) -> None:
    if name == "random numbers":  # which the comparison with the model cannot repeat
        torch.manual_seed(0)
        made = sg.from_torch(Attention(KEPT[name]), torch.zeros(2, STEPS, WIDTH), check=False)
    else:
        made = imported(KEPT[name])
    found = call(made)
    assert found["attn_mask"] is not None and not found.get("is_causal")


def test_a_triangle_over_fewer_keys_stays() -> None:
    """PyTorch's kernels do not agree on where such a triangle begins."""
    found = call(imported(lambda *_: torch.ones(STEPS, 4, dtype=torch.bool).tril(), keys=4))
    assert found["attn_mask"] is not None


KEYS = torch.randn(1, 1, STEPS, WIDTH, generator=torch.Generator().manual_seed(0))


def test_arrays_that_belong_to_the_program() -> None:
    class Held(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.joint(x) + F.scaled_dot_product_attention(KEYS, KEYS, KEYS, below()).mean()

    assert call(sg.from_torch(Held(below), torch.zeros(2, STEPS, WIDTH)))["is_causal"]


@pytest.mark.parametrize("name", BY_ROWS)
def test_other_numbers_of_rows(name: str) -> None:
    """An example of one row says little about twelve."""
    torch.manual_seed(0)
    made = sg.from_torch(Attention(BY_ROWS[name]), torch.zeros(1, STEPS, WIDTH))
    inference = sg.InferenceGraph([made.graph])
    inference.add_inputs(made.inputs)
    inference.compile("cpu")
    x = torch.randn(12, STEPS, WIDTH)
    found = inference.execute({"x": x}).result
    np.testing.assert_allclose(found.numpy(), made.model(x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_every_argument_by_name() -> None:
    class Named(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (one[:, None] for one in self.joint(x).chunk(3, -1))
            return F.scaled_dot_product_attention(attn_mask=below(), value=v, key=k, query=q, scale=0.5)[:, 0]

    found = call(sg.from_torch(Named(below), torch.zeros(2, STEPS, WIDTH)))
    assert found == {"attn_mask": None, "is_causal": True, "scale": 0.5}


@pytest.mark.parametrize("mask", [CAUSAL["positions, for every row"], KEPT["a window"]], ids=["causal", "window"])
def test_the_graph_learns_as_the_model(mask: Callable[..., Any]) -> None:
    made = imported(mask)
    model, x, target = made.model, torch.randn(5, STEPS, WIDTH), torch.randn(5, STEPS, WIDTH)
    error = F.mse_loss(model(x), target)
    error.backward()
    wanted = [(one - 0.1 * one.grad).detach().numpy() for one in model.parameters()]
    labels = sg.Tensor((sg.BATCH, STEPS, WIDTH))
    training = made.training(sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1), labels)
    training.compile("cpu")
    assert training.execute({"x": x}, {"labels": target}).loss == pytest.approx(error.item(), rel=1e-5)
    for one, expected in zip(model.parameters(), wanted, strict=True):
        np.testing.assert_allclose(one.detach().numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_causal_models_of_transformers_need_no_mask(name: str) -> None:
    made = sg.from_torch(CASES[name].make(), {"input_ids": tokens()["input_ids"]}, outputs=["logits"])
    programs = [node.layer.training for node in made.graph.nodes if isinstance(node.layer, GlueLayer)]
    calls = [one for program in programs for one in program.calls if "attention" in one.function]
    assert calls and all(one.settings["is_causal"] and one.settings["attn_mask"] is None for one in calls)
