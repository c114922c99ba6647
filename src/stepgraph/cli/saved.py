"""The contents of a saved graph's files as plain values, without rebuilding it or importing custom classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from stepgraph.checkpoint.codec import of_kind, read_extent
from stepgraph.checkpoint.graph_json import read_notes
from stepgraph.types import GraphCompilationOptions

if TYPE_CHECKING:
    from stepgraph.checkpoint.files import Content


def header(content: Content) -> dict[str, Any]:
    """Overview: kind, files, names for data, optimizer, compilation, notes."""
    saved = content.description
    graphs = saved["graphs"]
    return {
        "path": str(content.path),
        "kind": "training graph" if graphs[saved["saved"]]["class"] == "TrainingGraph" else "inference graph",
        "linked_graphs": len(graphs),
        "torch": saved["made_by"].get("torch"),
        "bytes": saved["tensors_file"]["bytes"],
        **{kind: _named(saved, kind) for kind in ("inputs", "loss_labels", "loss_label_weights", "outputs")},
        "optimizers": [_optimizer(one) for one in saved["optimizers"]],
        "compiled": _compiled(graphs[saved["saved"]]["compiled"]),
        "classes": sorted({one["class"] for one in saved["layers"] if ":" in one["class"]}),
        "notes": read_notes(saved),
    }


def labels(content: Content) -> frozenset[str]:
    """The names of labels and their weights, which inference does not read."""
    kinds = ("loss_labels", "loss_label_weights")
    return frozenset(name for kind in kinds for name in _named(content.description, kind))


def _named(saved: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Shapes and types by name, over all graphs; an output may be a gradient."""
    found = {}
    for graph in saved["graphs"]:
        for name, one in graph[kind].items():
            number = one if isinstance(one, int) else one.get("tensor", one.get("gradient"))
            found[name] = "" if number is None else _described(saved["tensors"][number])
    return found


def _described(tensor: Mapping[str, Any]) -> str:
    return f"[{', '.join(str(read_extent(one)) for one in tensor['shape'])}] {tensor['data_type']}"


def _optimizer(saved: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: one["member"] if isinstance(one, dict) else one for name, one in saved["settings"].items()}
    found = {"rule": saved["rule"], "updates": settings.pop("time_step") - 1, "settings": settings}
    return {**found, "groups": len(saved["groups"])} if saved.get("groups") else found


def effective(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer without disabled ones."""
    plain = {"gradient_rescale": 1.0, "custom_global_norm": 0.0, "dampening": 0.0, "formula": "ml compute"}
    unused = {name for name, value in plain.items() if name in settings and settings[name] == value}
    if not settings["applies_gradient_clipping"]:
        unused |= {name for name in settings if "clip" in name or "norm" in name}
    if settings["regularization_type"] == "NONE":  # still the scale of a decoupled decay
        unused |= {"regularization_type", *([] if settings["regularization_scale"] else ["regularization_scale"])}
    return {name: value for name, value in settings.items() if name not in unused and value is not False}


def _compiled(saved: Mapping[str, Any] | None) -> str:
    if saved is None:
        return "not yet"
    asked = [one.name or "" for one in GraphCompilationOptions(saved["options"])]
    mixed, tf32, limit = saved["compute_type"], saved.get("tf32"), saved.get("memory_limit")
    further = [f"computing in {mixed.lower()}"] if mixed else []
    further += [] if tf32 is None else ["TF32 allowed" if tf32 else "TF32 off"]
    further += [] if limit is None else [f"within {limit:,} bytes"]
    return ", ".join([*asked, *further]) or "with the default settings"


def tensors(content: Content) -> list[dict[str, Any]]:
    """The named tensors: shape, type, and statistics of their numbers."""
    found = (one for one in content.description["tensors"] if "name" in one and "data" in one)
    return [measured(of_kind(str, one["name"]), content.arrays[one["data"]]) for one in found]


def measured(name: str, array: torch.Tensor) -> dict[str, Any]:
    """One row: a tensor and the size of its numbers; the norm is Euclidean."""
    numbers = array.double() if array.dtype.is_floating_point else array.to(torch.float64)
    return {
        "name": name,
        "shape": list(array.shape),
        "type": str(array.dtype).removeprefix("torch."),
        "count": array.numel(),
        "norm": float(numbers.norm()),
        "largest": float(numbers.abs().max()) if array.numel() else 0.0,
        "not_finite": int((~numbers.isfinite()).sum()),
    }


def roles(graphs: Iterable[Any]) -> dict[str, str]:
    """Which tensors are trained, by name, according to the rebuilt graphs."""
    from stepgraph.checkpoint.graph_json import named_tensors

    group = list(graphs)
    nodes = [node for graph in group for node in graph.shown_nodes()]
    kinds = {t: "statistic" for node in nodes for t in node.layer.statistics.values()}
    kinds |= {t: "constant" for node in nodes for t in node.layer.constants.values()}
    frozen = {t for node in nodes for t in node.layer.parameters.values()} - {t for node in nodes for t in node.trained}
    return {
        name: kinds.get(tensor, "frozen" if tensor in frozen or not tensor.is_updatable else "parameter")
        for name, tensor in named_tensors([graph.declaration for graph in group]).items()
    }


def is_of_fit(name: str, note: Any) -> bool:
    """Whether a note was written by `fit`; a user's program may use the same name for its own note."""
    return name == "fit" and isinstance(note, dict) and {"place", "history"} <= note.keys()


def fit_notes(notes: Mapping[str, Any]) -> str:
    """The notes of `fit`, on one line."""
    from stepgraph.fitting.progress import one_line
    from stepgraph.system.storage import real

    place, history = notes["place"], notes["history"]
    line = f"{place['epoch']} epochs, {place['step']} updates"
    if history["epochs"]:
        row = real(history["epochs"][-1])
        last = {name: one for name, one in row.items() if name not in ("epoch", "step", "seconds", "waiting")}
        line += f"; last epoch: {one_line(last)}; best epoch: {history['best_epoch']}"
    return line
