"""The data of the page about a run: the record, thinned to what is visible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from stepgraph.errors import RunError, StorageError, readable, reason
from stepgraph.report.drawing import harmless
from stepgraph.report.record import FILE
from stepgraph.report.run import Run

POINTS = 1200  # of a curve
OPERATORS = 1500  # of the memory timeline
CELLS = 240_000  # bins of all histograms together


def view(run: Run) -> dict[str, Any]:
    """Everything the page shows, as JSON values."""
    try:
        return {**_readable(_view(run)), "drawing": harmless(run.graph.get("drawing", ""))}
    except OSError as error:
        raise StorageError(f"{run.folder}", f"it cannot be read: {reason(error)}", fix="check the path") from error
    except Exception as error:  # the record may contain anything
        problem = f"{FILE} is damaged: {type(error).__name__}: {reason(error)}"
        raise RunError(f"{run.folder}", problem, fix="use another run") from error


def name(run: Run) -> str:
    """The name of a run: its folder."""
    try:
        return run.folder.resolve().name
    except OSError:  # relative to a deleted working directory
        return run.folder.name


def _readable(value: Any) -> Any:
    """Removes text in the record that could reverse or hide text on the page, and numbers that JSON lacks."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {_readable(key): _readable(one) for key, one in value.items()}
    return [_readable(one) for one in value] if isinstance(value, list | tuple) else finite(value)


def _view(run: Run) -> dict[str, Any]:
    last = run.begins[-1]
    graph = dict(run.graph)
    graph.pop("drawing", None)
    changed = (run.folder / FILE).stat().st_mtime
    return {
        "name": name(run),
        "status": run.status,
        "changed": datetime.fromtimestamp(changed, UTC).isoformat(timespec="seconds"),
        "begins": [{name: one.get(name) for name in ("time", "step", "epoch", "resumed")} for one in run.begins],
        "total": last.get("total"),
        "command": last.get("command"),
        "environment": last.get("environment"),
        "settings": last.get("settings"),
        "end": run.end,
        "loss": losses(run.steps),
        "rate": rates(run.steps),
        "speed": speeds(run.speeds),
        "epochs": [{name: finite(value) for name, value in row.items()} for row in run.epochs],
        "ranks": run.ranks,
        "graph": graph,
        "memory": {**run.memory, **timeline(run.memory)},
        "profiles": [run.profiles[0], *run.profiles[1:][-1:]] if run.profiles else [],
        "distributions": thinned(run.distributions),
        "missing": run.missing,
    }


def losses(steps: Sequence[tuple[int, float, float]]) -> dict[str, Any]:
    """Means of adjacent updates with their bounds, and the first update whose loss is NaN."""
    found: dict[str, Any] = {"x": [], "y": [], "low": [], "high": []}
    for group in _groups(steps):
        values = [loss for _, loss, _ in group if math.isfinite(loss)]
        found["x"].append(group[-1][0])
        found["y"].append(_digits(sum(values) / len(values)) if values else None)
        found["low"].append(_digits(min(values)) if values else None)
        found["high"].append(_digits(max(values)) if values else None)
    found["together"] = len(_groups(steps)[0]) if steps else 1
    found["not_finite"] = next((step for step, loss, _ in steps if not math.isfinite(loss)), None)
    return found


def rates(steps: Sequence[tuple[int, float, float]]) -> dict[str, Any]:
    """The learning rate; constant stretches are reduced to their ends."""
    groups = _groups(steps)
    points = [(group[-1][0], finite(group[-1][2])) for group in groups]
    if points and len({rate for _, rate in points}) == 1:
        points = [(steps[0][0], points[0][1]), points[-1]]
    return {"x": [step for step, _ in points], "y": [rate for _, rate in points]}


def speeds(found: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    """Rows per second."""
    sums = [(group[-1][0], sum(rows for _, rows, _ in group), sum(s for _, _, s in group)) for group in _groups(found)]
    known = [(step, _digits(rows / seconds)) for step, rows, seconds in sums if seconds > 0]
    return {"x": [step for step, _ in known], "y": [speed for _, speed in known]}


def timeline(memory: dict[str, Any]) -> dict[str, Any]:
    """Live bytes with layers and phases by number; adjacent operators of a layer and phase are merged if too many."""
    rows, peak = memory.get("timeline", []), memory.get("peak")
    groups = [[row] for row in rows]
    if len(rows) > OPERATORS:
        groups = [list(group) for _, group in groupby(rows, key=lambda row: (row[0], row[1]))]
        peak = _group_at(groups, peak)
    names = list(dict.fromkeys(row[0] for row in rows))
    phases = list(dict.fromkeys(row[1] for row in rows))
    layer, phase = ({name: i for i, name in enumerate(all_)} for all_ in (names, phases))
    most = [max(group, key=lambda row: sum(row[2:])) for group in groups]
    packed = [[layer[row[0]], phase[row[1]], *row[2:]] for row in most]
    return {"timeline": packed, "layers": names, "phases": phases, "peak": peak, "operators": len(rows)}


def thinned(looks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first, the last, and as many observations in between as fit on a page."""
    if not looks:
        return []
    bins = sum(len(one.get("bins", ())) for kind in ("parameters", "gradients") for one in looks[0][kind].values())
    most = max(3, CELLS // max(bins, 1))
    if len(looks) <= most:
        return list(looks)
    return [looks[round(i * (len(looks) - 1) / (most - 1))] for i in range(most)]


def finite(value: Any) -> Any:
    """JSON has no NaN: non-finite numbers become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _groups(rows: Sequence[tuple[Any, ...]]) -> list[Sequence[tuple[Any, ...]]]:
    together = -(-len(rows) // POINTS) or 1
    return [rows[i : i + together] for i in range(0, len(rows), together)]


def _group_at(groups: Sequence[Sequence[Any]], place: int | None) -> int | None:
    end = 0
    for index, group in enumerate(groups):
        end += len(group)
        if place is not None and place < end:
            return index
    return None


def _digits(number: float) -> float:
    return float(f"{number:.5g}")
