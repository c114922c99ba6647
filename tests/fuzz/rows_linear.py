"""Rows of layers that are matrices of weights: fully connected, gated feed-forward, a PyTorch module, embedding."""

from __future__ import annotations

import torch

import stepgraph as sg
from tests.fuzz.draw import Draw
from tests.fuzz.recipe import Settings
from tests.fuzz.row import Array, Arrays, Context, Drawn, Row, Tensors, several
from tests.fuzz.rows_elementwise import activated

Parameters = dict[str, tuple[tuple[int, ...], str]]


def _draw_linear(draw: Draw) -> Drawn | None:
    x = draw.floating(least=2)
    if x is None:
        return None
    shape = draw.values[x].shape
    is_pixel = len(shape) == 4 and shape[2:] == (1, 1)
    inputs, outputs = (shape[1] if is_pixel else shape[-1]), draw.choose([1, 2, 3, 5, 8])
    packed = draw.chance(0.2)
    parameters: Parameters = {"weights": ((1, outputs * inputs, 1, 1) if packed else (outputs, inputs), "weight")}
    if draw.chance(0.7):
        parameters["biases"] = ((outputs,), "bias")
    return Drawn((x,), {"inputs": inputs, "outputs": outputs}, parameters)


def _build_linear(settings: Settings, tensors: Tensors) -> sg.Layer:
    descriptor = sg.ConvolutionDescriptor(1, settings["inputs"], settings["outputs"])
    return sg.FullyConnectedLayer(tensors["weights"], tensors.get("biases"), descriptor)


def _connect(_: Context, settings: Settings, parameters: Arrays, x: Array) -> Array:
    weights = parameters["weights"].reshape(settings["outputs"], settings["inputs"])
    is_pixel = x.ndim == 4 and x.shape[1:] == (settings["inputs"], 1, 1)
    y = torch.einsum("...i,oi->...o", x.flatten(1) if is_pixel else x, weights)
    biases = parameters.get("biases")
    y = y if biases is None else y + biases.reshape(-1)
    return y[:, :, None, None] if is_pixel else y


# Gated feed-forward


def _draw_gated(draw: Draw) -> Drawn | None:
    x = draw.floating(least=2)
    if x is None:
        return None
    inputs, hidden, outputs = draw.values[x].shape[-1], draw.choose([1, 2, 4]), draw.choose([1, 2, 3])
    shapes = (hidden, inputs), (hidden, inputs), (outputs, hidden)
    parameters: Parameters = {f"weights.{i}": (shape, "weight") for i, shape in enumerate(shapes)}
    if draw.chance(0.4):
        parameters |= {f"biases.{i}": (shape[:1], "bias") for i, shape in enumerate(shapes)}
    return Drawn((x,), {"type": draw.choose(["SILU", "GELU", "GELU_ERF", "SIGMOID"])}, parameters)


def _build_gated(settings: Settings, tensors: Tensors) -> sg.Layer:
    activation = sg.ActivationDescriptor(sg.ActivationType[settings["type"]])
    return sg.GatedFeedForwardLayer(several(tensors, "weights") or [], several(tensors, "biases"), activation)


def _gate(_: Context, settings: Settings, parameters: Arrays, x: Array) -> Array:
    def product(x: Array, index: int) -> Array:
        y = torch.einsum("...i,oi->...o", x, parameters[f"weights.{index}"])
        return y + parameters.get(f"biases.{index}", 0.0)

    return product(activated(product(x, 0), settings) * product(x, 1), 2)


# Embedding


def _draw_embedding(draw: Draw) -> Drawn | None:
    count, dimension = draw.choose([3, 5, 8]), draw.choose([1, 2, 3, 5])
    shape = draw.choose([(0,), (0, 3), (0, 2, 2)])
    indices = draw.input(shape, draw.choose(["int32", "int64"]), high=count)
    settings: Settings = {"count": count, "dimension": dimension}
    if draw.chance(0.4):
        settings["padding_index"] = draw.whole(0, count - 1)
    if draw.chance(0.3):
        settings |= {"maximum_norm": draw.choose([0.5, 1.0]), "p_norm": draw.choose([1.0, 2.0, 3.0])}
    if draw.chance(0.3):
        settings["scales_gradient_by_frequency"] = True
    return Drawn((indices,), settings, {"weights": ((count, dimension), "weight")})


def _build_embedding(settings: Settings, tensors: Tensors) -> sg.Layer:
    rest = {k: v for k, v in settings.items() if k not in ("count", "dimension")}
    return sg.EmbeddingLayer(
        sg.EmbeddingDescriptor(settings["count"], settings["dimension"], **rest), tensors["weights"]
    )


def _embed(context: Context, settings: Settings, parameters: Arrays, indices: Array) -> Array:
    weights = parameters["weights"].reshape(settings["count"], settings["dimension"])
    chosen = indices.long()
    hits = torch.nn.functional.one_hot(chosen, settings["count"]).to(weights.dtype)
    rows = hits @ weights
    if settings.get("scales_gradient_by_frequency"):
        often = hits.flatten(0, -2).sum(0)[chosen][..., None]
        rows = rows.detach() + (rows - rows.detach()) / often
    if "maximum_norm" in settings:
        norms = (weights.detach().abs() ** settings["p_norm"]).sum(-1, keepdim=True) ** (1 / settings["p_norm"])
        clipped = weights.detach() * (settings["maximum_norm"] / norms).clamp(max=1)
        rows = rows + (hits @ clipped - rows).detach()
        if context.training:
            seen = hits.flatten(0, -2).sum(0)[:, None] > 0
            context.updates["weights"] = torch.where(seen, clipped, weights.detach()).reshape(
                parameters["weights"].shape
            )
    if "padding_index" in settings:
        rows = rows * (chosen != settings["padding_index"])[..., None]
    return rows


# A module of PyTorch


def _draw_module(draw: Draw) -> Drawn | None:
    x = draw.floating(least=2)
    if x is None:
        return None
    inputs, outputs = draw.values[x].shape[-1], draw.choose([1, 2, 3])
    parameters: Parameters = {"weight": ((outputs, inputs), "weight"), "bias": ((outputs,), "bias")}
    return Drawn((x,), {"inputs": inputs, "outputs": outputs}, parameters)


def _build_module(settings: Settings, tensors: Tensors) -> sg.Layer:
    return sg.TorchLayer(torch.nn.Linear(settings["inputs"], settings["outputs"]), tensors=tensors)


def _apply(_: Context, settings: Settings, parameters: Arrays, x: Array) -> Array:
    return torch.einsum("...i,oi->...o", x, parameters["weight"]) + parameters["bias"]


ROWS = {
    "fully connected": Row(sg.FullyConnectedLayer, _draw_linear, _build_linear, _connect, weight=3),
    "gated feed-forward": Row(sg.GatedFeedForwardLayer, _draw_gated, _build_gated, _gate, packs=False),
    "module": Row(sg.TorchLayer, _draw_module, _build_module, _apply, weight=0.5, packs=False),
    "embedding": Row(sg.EmbeddingLayer, _draw_embedding, _build_embedding, _embed),
}
