"""The optimizers' formulas: clip, rescale, regularize, update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Array = torch.Tensor


def updated(
    settings: Mapping[str, Any],
    parameters: Mapping[int, Array],
    gradients: Mapping[int, Array],
    state: Mapping[int, list[Array]],
    time: int,
) -> dict[str, Array]:
    """New parameters and state of an update with these gradients, as `parameter n` and `state n.i`."""
    found: dict[str, Array] = {}
    whole, own = settings, {number: _own(settings, parameters[number]) for number in parameters}
    counted = [n for n in parameters if own[n].get("clipping", True) and not own[n].get("frozen")]
    norms = [gradients[n].double().square().sum() for n in counted]
    everywhere = float(torch.stack(norms).sum().sqrt()) if norms else 0.0
    for number, parameter in parameters.items():
        settings = own[number] if whole.get("groups") else whole
        if settings.get("frozen"):
            found[f"parameter {number}"] = parameter
            found |= {f"state {number}.{i}": array for i, array in enumerate(state.get(number, []))}
            continue
        g = prepared(settings, parameter, gradients[number], everywhere)
        old = state.get(number, [])
        parameter, new = RULES[settings["kind"]](settings, parameter, g, old, time)
        found[f"parameter {number}"] = parameter
        found |= {f"state {number}.{i}": array for i, array in enumerate(new)}
    return found


def _own(settings: Mapping[str, Any], parameter: Array) -> Mapping[str, Any]:
    """The settings for one parameter: those of its group, if it is in one."""
    remainder = sum(parameter.shape) % 2
    group = next((one for one in settings.get("groups", ()) if one["remainder"] == remainder), {})
    found = {**settings, **group, "learning_rate": settings["learning_rate"] * group.get("learning_rate_factor", 1.0)}
    if not group.get("clipping", True):
        found["applies_gradient_clipping"] = False
    if "weight_decay" in group:
        found |= {"regularization_type": "L2", "regularization_scale": group["weight_decay"]}
    return found


def prepared(settings: Mapping[str, Any], parameter: Array, g: Array, everywhere: float) -> Array:
    """The gradient after clipping, rescaling and regularization."""
    if settings.get("applies_gradient_clipping"):
        if settings["gradient_clipping_type"] == "BY_VALUE":
            g = g.clamp(settings["gradient_clip_min"], settings["gradient_clip_max"])
        else:
            own = float(g.double().square().sum().sqrt())
            together = settings.get("custom_global_norm", 0.0) or everywhere
            norm = own if settings["gradient_clipping_type"] == "BY_NORM" else together
            most = settings["maximum_clipping_norm"]
            g = g * (most / norm) if norm > most else g
    g = g * settings.get("gradient_rescale", 1.0)
    if settings["kind"] == "AdamW":
        return g
    scale = settings.get("regularization_scale", 0.0)
    match settings.get("regularization_type"):
        case "L1":
            return g + scale * parameter.sign()
        case "L2":
            return g + scale * parameter
    return g


def _sgd(s: Mapping[str, Any], w: Array, g: Array, state: list[Array], _: int) -> tuple[Array, list[Array]]:
    rate, mu = s["learning_rate"], s["momentum_scale"]
    if not mu:
        return w - rate * g, []
    if s.get("uses_nesterov_momentum"):
        m = mu * state[0] + g
        return w - rate * (g + mu * m), [m]
    m = mu * state[0] + rate * g
    return w - m, [m]


def _adam(s: Mapping[str, Any], w: Array, g: Array, state: list[Array], t: int) -> tuple[Array, list[Array]]:
    b1, b2 = s["beta1"], s["beta2"]
    rate = s["learning_rate"] * (1 - b2**t) ** 0.5 / (1 - b1**t)
    m, v = b1 * state[0] + (1 - b1) * g, b2 * state[1] + (1 - b2) * g * g
    if not s.get("uses_ams_grad"):
        return w - rate * m / (v.sqrt() + s["epsilon"]), [m, v]
    most = torch.maximum(state[2], v)
    return w - rate * m / (most.sqrt() + s["epsilon"]), [m, v, most]


def _adam_w(s: Mapping[str, Any], w: Array, g: Array, state: list[Array], t: int) -> tuple[Array, list[Array]]:
    return _adam(s, w - s["learning_rate"] * s.get("regularization_scale", 0.0) * w, g, state, t)


def _rms_prop(s: Mapping[str, Any], w: Array, g: Array, state: list[Array], _: int) -> tuple[Array, list[Array]]:
    alpha, mu, left = s["alpha"], s["momentum_scale"], list(state)
    v = alpha * left.pop(0) + (1 - alpha) * g * g
    new, spread = [v], v
    if s.get("is_centered"):
        a = alpha * left.pop(0) + (1 - alpha) * g
        new, spread = [v, a], (v - a * a).clamp(min=0)
    change = -s["learning_rate"] * g / (spread.sqrt() + s["epsilon"])
    if mu:
        change = mu * left.pop(0) + change
        new.append(change)
    return w + change, new


RULES = {"SGD": _sgd, "Adam": _adam, "AdamW": _adam_w, "RMSProp": _rms_prop}
