"""Replaces PyTorch's attention operator and its gradient with tiles, in fused steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from stepgraph.compiler.program import fake, inherit, remove_dead
from stepgraph.compiler.step import Fusion, Step
from stepgraph.compiler.triton_launch import run_on
from stepgraph.compiler.tuned.gpus import ROOMY
from stepgraph.compiler.tuned.row import Tuned
from stepgraph.system import torch_private

aten = torch.ops.aten
FORWARD = torch_private.efficient_attention.default
BACKWARD = torch_private.efficient_attention_gradient.default
WIDTHS = (16, 32, 64, 128)  # head widths that tiles support
PLAIN: dict[str, Any] = {"attn_bias": None, "dropout_p": 0.0, "is_causal": False, "scale": None}


def fits_tiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the GPU attention kernels of fused steps support these."""
    width = q.shape[-1]
    return q.dtype is torch.float32 and width == k.shape[-1] == v.shape[-1] and width in WIDTHS


def tile_attention(graph: fx.Graph) -> None:
    """Replaces the attention that tiles support: float32, without mask and dropout."""
    for node in list(graph.nodes):
        if node.target in (FORWARD, BACKWARD):
            given = _named(node)
            sources = [given[name] for name in ("query", "key", "value")]
            plain = all(given.get(name, value) == value for name, value in PLAIN.items())
            if plain and fits_tiles(*(fake(one) for one in sources)):
                _replace(node, sources, given)
    remove_dead(graph)


def _replace(node: fx.Node, sources: list[fx.Node], given: dict[str, Any]) -> None:
    from stepgraph.compiler.tuned import attention_kernels  # noqa: F401 - registers the operators

    if node.target is FORWARD:
        _replace_seeds(node)
        node.target, node.args = torch.ops.stepgraph.attend.default, tuple(sources)
    else:
        node.target = torch.ops.stepgraph.attend_gradients.default
        node.args = (*sources, given["out"], given["logsumexp"], node.args[0])
    node.kwargs = {}


def _replace_seeds(node: fx.Node) -> None:
    """Replaces the random seeds of an absent dropout: a separate gradient pass still receives them."""
    for result in list(node.users):
        if result.args[1] in (2, 3):
            seed = fake(result)
            with node.graph.inserting_before(node):
                settings = {"dtype": seed.dtype, "device": seed.device}
                zeros = node.graph.call_function(aten.zeros.default, (list(seed.shape),), settings)
            inherit(zeros, result)
            result.replace_all_uses_with(zeros)


def _named(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator, by name."""
    names = [one.name for one in torch_private.schema(node.target).arguments]  # type: ignore[arg-type]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _condition(step: Step) -> bool:
    """The kernels multiply in TF32, with a 10-bit mantissa."""
    allowed, _ = step.precision.tf32
    return allowed and step.fusion is not Fusion.NEVER and run_on(step.device, ROOMY)


ROW = Tuned(
    name="attention in tiles",
    hardware="NVIDIA Hopper and Blackwell, TF32",
    pattern=f"attention in float32 without mask and dropout, heads {', '.join(map(str, WIDTHS))} wide",
    gains={"transformer": 1.31},
    results="rent-h200-tf32",
    condition=_condition,
    run=tile_attention,
    takes_attention=fits_tiles,
)
