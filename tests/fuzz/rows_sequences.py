"""Rows of layers for sequences: LSTM, GRU, attention."""

from __future__ import annotations

import math

import torch

import stepgraph as sg
from tests.fuzz.draw import Draw
from tests.fuzz.recipe import Settings
from tests.fuzz.row import Array, Arrays, Context, Drawn, Row, Tensors, several
from tests.fuzz.rows_elementwise import activated

STEPS = 4
Parameters = dict[str, tuple[tuple[int, ...], str]]


# LSTM


def _draw_lstm(draw: Draw) -> Drawn | None:
    x = draw.pick(lambda x: x.is_floating_point() and x.ndim == 3 and _is_short(x.shape, draw.batch))
    if x is None:
        return None
    shape = draw.values[x].shape
    first = shape[0] == draw.batch
    settings: Settings = {
        "input_size": shape[2],
        "hidden_size": draw.choose([1, 2, 3]),
        "layer_count": draw.choose([1, 1, 1, 2]),
        "uses_biases": draw.chance(0.7),
        "batch_first": first,
        "is_bidirectional": draw.chance(0.4),
        "returns_sequences": draw.chance(0.6),
        "result_mode": draw.choose(["OUTPUT", "OUTPUT_AND_STATES"]),
    }
    directions = 2 if settings["is_bidirectional"] else 1
    cells = settings["layer_count"] * directions * shape[1 if first else 0]
    is_plain = cells > STEPS or draw.chance(0.5)  # cells of other kinds are traced one by one
    if not is_plain and draw.chance(0.6):
        kinds = ("SIGMOID", "HARD_SIGMOID", "TANH", "SOFT_SIGN", "LINEAR")
        settings["gate_activations"] = tuple(draw.choose(kinds) for _ in range(4))
        settings["output_result_activation"] = draw.choose(("TANH", "RELU", "NONE"))
    if settings["layer_count"] > 1 and draw.chance(0.15):
        settings["hidden_dropout"] = 0.3
    sources = [x]
    if draw.chance(0.3) and first:
        states = (settings["layer_count"], directions, draw.batch, settings["hidden_size"])
        sources += [draw.input(states, role="trained") for _ in range(2)]
    if draw.chance(0.3) and first:
        sources.append(draw.input((0,), draw.choose(["int32", "int64"]), low=1, high=shape[1] + 1))
    return Drawn(tuple(sources), settings, _lstm_parameters(draw, settings, directions, is_plain))


def _is_short(shape: torch.Size, batch: int) -> bool:
    """Whether there are few steps: each takes a while to trace."""
    return (shape[0] == batch and shape[1] <= STEPS) or (shape[1] == batch and shape[0] <= STEPS)


def _lstm_parameters(draw: Draw, settings: Settings, directions: int, is_plain: bool) -> Parameters:
    hidden, peepholes = settings["hidden_size"], "none" if is_plain else draw.choose(["none", "diagonal", "matrix"])
    found: Parameters = {}
    index = 0
    for _ in range(directions):
        for layer in range(settings["layer_count"]):
            inputs = hidden * directions if layer else settings["input_size"]
            for _ in range(4):
                found[f"input_weights.{index}"] = (hidden, inputs), "weight"
                found[f"hidden_weights.{index}"] = (hidden, hidden), "weight"
                if settings["uses_biases"]:
                    found[f"biases.{index}"] = (hidden,), "bias"
                if peepholes != "none":
                    found[f"peephole_weights.{index}"] = (
                        ((hidden, hidden) if peepholes == "matrix" else (hidden,)),
                        "weight",
                    )
                index += 1
    return found


def _build_lstm(settings: Settings, tensors: Tensors) -> sg.Layer:
    names = ("uses_biases", "batch_first", "is_bidirectional", "returns_sequences")
    descriptor = sg.LSTMDescriptor(
        settings["input_size"],
        settings["hidden_size"],
        settings["layer_count"],
        **{name: settings[name] for name in names},
        dropout=settings.get("hidden_dropout", 0.0),
        result_mode=sg.LSTMResultMode[settings["result_mode"]],
    )
    activations = {}
    if "gate_activations" in settings:
        chosen = [sg.ActivationDescriptor(sg.ActivationType[name]) for name in settings["gate_activations"]]
        last = sg.ActivationDescriptor(sg.ActivationType[settings["output_result_activation"]])
        activations = {"gate_activations": chosen, "output_result_activation": last}
    parts = {name: several(tensors, name) for name in ("input_weights", "hidden_weights", "peephole_weights", "biases")}
    return sg.LSTMLayer(descriptor, **parts, **activations)


def _remember(context: Context, settings: Settings, parameters: Arrays, x: Array, *others: Array) -> tuple[Array, ...]:
    """Step by step, sample by sample where they have lengths of their own."""
    x = x if settings["batch_first"] else x.transpose(0, 1)
    states, lengths = (others[:-1], others[-1]) if len(others) in (1, 3) else (others, None)
    directions, finals = (2 if settings["is_bidirectional"] else 1), []
    for layer in range(settings["layer_count"]):
        outputs = []
        for direction in range(directions):
            start = 4 * (direction * settings["layer_count"] + layer)
            first = [state[layer, direction] for state in states] or [x.new_zeros(len(x), settings["hidden_size"])] * 2
            output, h, c = _one_direction(settings, parameters, start, x, first, lengths, direction == 1)
            outputs.append(output)
            finals.append((h, c))
        x = torch.cat(outputs, 2)
    if not settings["returns_sequences"]:
        x = torch.cat([h for h, _ in finals[-directions:]], 1).unsqueeze(1)
    x = x if settings["batch_first"] else x.transpose(0, 1)
    if settings["result_mode"] == "OUTPUT":
        return (x,)
    shape = settings["layer_count"], directions, *finals[0][0].shape
    return x, *(torch.stack([final[i] for final in finals]).reshape(shape) for i in (0, 1))


def _one_direction(
    settings: Settings,
    parameters: Arrays,
    start: int,
    x: Array,
    first: list[Array],
    lengths: Array | None,
    backwards: bool,
) -> tuple[Array, Array, Array]:
    h, c = first
    hidden, steps = settings["hidden_size"], x.shape[1]
    gates = [{"type": one} for one in settings.get("gate_activations", ("SIGMOID", "SIGMOID", "TANH", "SIGMOID"))]
    last = {"type": settings.get("output_result_activation", "TANH")}
    w, u = (
        [parameters[f"{name}.{start + g}"].reshape(hidden, -1) for g in range(4)]
        for name in ("input_weights", "hidden_weights")
    )
    b = [parameters[f"biases.{start + g}"].reshape(-1) if settings["uses_biases"] else 0.0 for g in range(4)]
    p = [_peephole(parameters.get(f"peephole_weights.{start + g}"), hidden) for g in range(4)]
    outputs: list[Array] = [x.new_zeros(len(x), hidden)] * steps
    for t in reversed(range(steps)) if backwards else range(steps):
        z = [x[:, t] @ w[g].T + h @ u[g].T + b[g] for g in range(4)]
        i, f, g = (activated(z[k] if p[k] is None else z[k] + c @ p[k].T, gates[k]) for k in range(3))
        new_c = f * c + i * g
        o = activated(z[3] if p[3] is None else z[3] + new_c @ p[3].T, gates[3])
        new_h = o * activated(new_c, last)
        goes = torch.ones(len(x), 1, dtype=torch.bool, device=x.device) if lengths is None else (t < lengths)[:, None]
        h, c = torch.where(goes, new_h, h), torch.where(goes, new_c, c)
        outputs[t] = torch.where(goes, new_h, torch.zeros_like(new_h))
    return torch.stack(outputs, 1), h, c


def _peephole(weights: Array | None, hidden: int) -> Array | None:
    if weights is None:
        return None
    return weights.reshape(hidden, hidden) if weights.numel() == hidden * hidden else torch.diag(weights.reshape(-1))


# GRU


def _draw_gru(draw: Draw) -> Drawn | None:
    x = draw.pick(lambda x: x.is_floating_point() and x.ndim == 3 and _is_short(x.shape, draw.batch))
    if x is None:
        return None
    shape = draw.values[x].shape
    first = shape[0] == draw.batch
    settings: Settings = {
        "input_size": shape[2],
        "hidden_size": draw.choose([1, 2, 3]),
        "layer_count": draw.choose([1, 1, 2]),
        "uses_biases": draw.chance(0.7),
        "batch_first": first,
        "is_bidirectional": draw.chance(0.4),
        "returns_sequences": draw.chance(0.6),
        "returns_state": draw.chance(0.4),
        "reset_after": draw.chance(0.6),
    }
    directions, hidden = 2 if settings["is_bidirectional"] else 1, settings["hidden_size"]
    if settings["layer_count"] > 1 and draw.chance(0.15):
        settings["hidden_dropout"] = 0.3
    sources = [x]
    if draw.chance(0.3) and first:
        states = (settings["layer_count"], directions, draw.batch, hidden)
        sources.append(draw.input(states, role="trained"))
    if draw.chance(0.3) and first:
        sources.append(draw.input((0,), draw.choose(["int32", "int64"]), low=1, high=shape[1] + 1))
    found: Parameters = {}
    for index in range(directions * settings["layer_count"]):
        inputs = hidden * directions if index % settings["layer_count"] else shape[2]
        for gate in range(3 * index, 3 * index + 3):
            found[f"input_weights.{gate}"] = (hidden, inputs), "weight"
            found[f"hidden_weights.{gate}"] = (hidden, hidden), "weight"
            if settings["uses_biases"]:
                found[f"biases.{gate}"] = (hidden,), "bias"
        if settings["uses_biases"] and settings["reset_after"]:
            found[f"hidden_biases.{index}"] = (hidden,), "bias"
    return Drawn(tuple(sources), settings, found)


def _build_gru(settings: Settings, tensors: Tensors) -> sg.Layer:
    rest = {k: v for k, v in settings.items() if k != "hidden_dropout"}
    descriptor = sg.GRUDescriptor(**rest, dropout=settings.get("hidden_dropout", 0.0))
    names = ("input_weights", "hidden_weights", "biases", "hidden_biases")
    return sg.GRULayer(descriptor, *(several(tensors, name) for name in names))  # type: ignore[arg-type]


def _recall(context: Context, settings: Settings, parameters: Arrays, x: Array, *others: Array) -> tuple[Array, ...]:
    """Step by step."""
    x = x if settings["batch_first"] else x.transpose(0, 1)
    state = next((one for one in others if one.is_floating_point()), None)
    lengths = next((one for one in others if not one.is_floating_point()), None)
    directions, finals = (2 if settings["is_bidirectional"] else 1), []
    for layer in range(settings["layer_count"]):
        outputs = []
        for direction in range(directions):
            h = x.new_zeros(len(x), settings["hidden_size"]) if state is None else state[layer, direction]
            index = direction * settings["layer_count"] + layer
            found = [torch.zeros_like(h)] * x.shape[1]
            for t in reversed(range(x.shape[1])) if direction else range(x.shape[1]):
                new = _gru_step(settings, parameters, index, x[:, t], h)
                goes = torch.ones_like(h, dtype=torch.bool) if lengths is None else (t < lengths)[:, None]
                h = torch.where(goes, new, h)
                found[t] = torch.where(goes, new, 0.0)
            outputs.append(torch.stack(found, 1))
            finals.append(h)
        x = torch.cat(outputs, 2)
    if not settings["returns_sequences"]:
        x = torch.cat(finals[-directions:], 1).unsqueeze(1)
    x = x if settings["batch_first"] else x.transpose(0, 1)
    shape = settings["layer_count"], directions, *finals[0].shape
    return (x, torch.stack(finals).reshape(shape)) if settings["returns_state"] else (x,)


def _gru_step(settings: Settings, parameters: Arrays, index: int, x: Array, h: Array) -> Array:
    w, u = ([parameters[f"{name}.{3 * index + g}"] for g in range(3)] for name in ("input_weights", "hidden_weights"))
    b = [parameters.get(f"biases.{3 * index + g}", 0.0) for g in range(3)]
    d = parameters.get(f"hidden_biases.{index}", 0.0)
    r, z = (torch.sigmoid(x @ w[g].T + h @ u[g].T + b[g]) for g in (0, 1))
    hidden = r * (h @ u[2].T + d) if settings["reset_after"] else (r * h) @ u[2].T
    return (1 - z) * torch.tanh(x @ w[2].T + b[2] + hidden) + z * h


# Attention


def _draw_attention(draw: Draw) -> Drawn | None:
    query = draw.pick(lambda x: x.is_floating_point() and x.ndim == 3 and x.shape[0] == draw.batch)
    if query is None:
        return None
    batch, steps, model = draw.values[query].shape
    key = draw.pick(lambda x: x.is_floating_point() and x.ndim == 3 and x.shape[0] == batch)
    assert key is not None
    keys = draw.values[key].shape[1]
    value = draw.pick(lambda x: x.is_floating_point() and x.ndim == 3 and x.shape[:2] == (batch, keys))
    assert value is not None
    groups = draw.choose([1, 2])
    heads = groups * draw.choose([1, 1, 2])
    is_rotary = draw.chance(0.3)
    settings: Settings = {
        "model_dimension": model,
        "head_count": heads,
        "key_value_head_count": groups,
        "key_dimension": heads * (2 * draw.whole(1, 2) if is_rotary else draw.whole(1, 3)),
        "value_dimension": heads * draw.whole(1, 2),
        "has_biases": draw.chance(0.7),
        "has_attention_biases": draw.chance(0.3),
        "adds_zero_attention": draw.chance(0.3),
    }
    if draw.chance(0.1):
        settings["hidden_dropout"] = 0.3
    if is_rotary:
        settings |= {"rotary_base": draw.choose([10.0, 10_000.0]), "rotary_interleaved": draw.chance(0.5)}
    if steps == keys:
        settings |= {"causal": draw.chance(0.5), "window": draw.choose([None, None, 1, 2])}
    sources = [query, key, value]
    if draw.chance(0.3):
        sources.append(draw.input((0, keys), "boolean"))
    if draw.chance(0.3):
        first = draw.choose([1, 0])
        sources.append(draw.input((first, steps, keys), draw.choose(["float32", "boolean"])))
    widths = [draw.values[n].shape[2] for n in (query, key, value)]
    return Drawn(tuple(sources), settings, _attention_parameters(settings, widths))


def _attention_parameters(settings: Settings, widths: list[int]) -> Parameters:
    whole_k, whole_v, model = settings["key_dimension"], settings["value_dimension"], settings["model_dimension"]
    k, v = (n // settings["head_count"] * settings["key_value_head_count"] for n in (whole_k, whole_v))
    shapes = [(whole_k, widths[0]), (k, widths[1]), (v, widths[2]), (model, whole_v)]
    found: Parameters = {f"weights.{i}": (shape, "weight") for i, shape in enumerate(shapes)}
    if settings["has_biases"]:
        found |= {f"biases.{i}": ((shape[0],), "bias") for i, shape in enumerate(shapes)}
    if settings["has_attention_biases"]:
        found |= {"attention_biases.0": ((k,), "bias"), "attention_biases.1": ((v,), "bias")}
    return found


def _build_attention(settings: Settings, tensors: Tensors) -> sg.Layer:
    rest = {k: v for k, v in settings.items() if k not in ("hidden_dropout", "model_dimension", "head_count")}
    descriptor = sg.MultiheadAttentionDescriptor(
        settings["model_dimension"], settings["head_count"], dropout=settings.get("hidden_dropout", 0.0), **rest
    )
    parts = [several(tensors, name) for name in ("weights", "biases", "attention_biases")]
    return sg.MultiheadAttentionLayer(descriptor, *parts)


def _attend(context: Context, settings: Settings, parameters: Arrays, *sources: Array) -> Array:
    heads, batch = settings["head_count"], len(sources[0])
    # The gradient of the keys' biases is nothing but rounding: a constant in all scores changes no share.
    projected = [context.rounded(_project(parameters, i, x, settings)) for i, x in enumerate(sources[:3])]
    width, groups = settings["key_dimension"] // heads, settings["key_value_head_count"]
    if "rotary_base" in settings:
        projected[:2] = [_turn(x, width, settings) for x in projected[:2]]
    rows = several(parameters, "attention_biases") or [None, None]
    for i, row in ((1, rows[0]), (2, rows[1])):
        width = projected[i].shape[2]
        added = [] if row is None else [row.reshape(1, 1, -1).expand(batch, 1, width)]
        added += [projected[i].new_zeros(batch, 1, width)] if settings["adds_zero_attention"] else []
        projected[i] = torch.cat([projected[i], *added], 1)
    q = projected[0].reshape(*projected[0].shape[:2], heads, -1)
    k, v = (x.reshape(*x.shape[:2], groups, -1).repeat_interleave(heads // groups, 2) for x in projected[1:])
    scores = torch.einsum("nlhd,nshd->nhls", q, k) / math.sqrt(q.shape[-1])
    allowed = torch.ones_like(scores, dtype=torch.bool)
    count = sources[1].shape[1]
    for mask in sources[3:]:
        if mask.ndim == 2:
            allowed[..., :count] &= ~mask[:, None, None]
        elif mask.dtype is torch.bool:
            allowed[..., :count] &= ~mask[:, None]
        else:
            scores = torch.cat([scores[..., :count] + mask[:, None], scores[..., count:]], -1)
    far = torch.arange(q.shape[1], device=q.device)[:, None] - torch.arange(count, device=q.device)
    if settings.get("causal"):
        allowed[..., :count] &= far >= 0
    if settings.get("window"):
        allowed[..., :count] &= far.abs() < settings["window"]
    some = allowed.any(-1, keepdim=True)
    exponents = scores - scores.detach().amax(-1, keepdim=True)
    powers = torch.where(allowed, exponents.exp(), 0.0)
    shares = powers / torch.where(some, powers.sum(-1, keepdim=True), 1.0)
    found = torch.einsum("nhls,nshd->nlhd", shares, v).flatten(2)
    return _project(parameters, 3, found, settings)


def _turn(x: Array, width: int, settings: Settings) -> Array:
    """Rotary positions as products of complex numbers."""
    x = x.reshape(*x.shape[:2], -1, width)
    interleaved = settings["rotary_interleaved"]
    pairs = x.reshape(*x.shape[:3], -1, 2) if interleaved else x.reshape(*x.shape[:3], 2, -1).transpose(-1, -2)
    index = torch.arange(width // 2, dtype=torch.float64, device=x.device)
    angles = torch.arange(x.shape[1], device=x.device)[:, None] / settings["rotary_base"] ** (2 * index / width)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.double().contiguous()) * turn).to(x.dtype)
    return (turned if interleaved else turned.transpose(-1, -2)).reshape(*x.shape[:2], -1)


def _project(parameters: Arrays, index: int, x: Array, settings: Settings) -> Array:
    y = x @ parameters[f"weights.{index}"].reshape(-1, x.shape[-1]).T
    return y + parameters[f"biases.{index}"].reshape(-1) if settings["has_biases"] else y


ROWS = {
    "lstm": Row(sg.LSTMLayer, _draw_lstm, _build_lstm, _remember, weight=1.3),
    "gru": Row(sg.GRULayer, _draw_gru, _build_gru, _recall),
    "attention": Row(sg.MultiheadAttentionLayer, _draw_attention, _build_attention, _attend, weight=1.3),
}
