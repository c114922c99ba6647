"""`stepgraph inspect FILE`: shows a saved graph without the program that built it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgraph.cli import device_argument, opening
from stepgraph.errors import CheckpointError, StepgraphError, StorageError, readable

if TYPE_CHECKING:
    from stepgraph.graphs.compiled import CompiledGraph

HELP = "show a saved graph: layers, parameters, memory by batch size, a drawing"

EXAMPLES = """
examples:
  stepgraph inspect run/model
  stepgraph inspect run/model --batch-sizes 1,64,512
  stepgraph inspect run/model --no-plan --svg net.svg
  stepgraph inspect run/model --no-plan --passes
  stepgraph inspect run/model --custom layers.py:Swish
  stepgraph inspect run/model --json | jq '.tensors[].name'
"""

# Kinds of memory, as a `MemoryPlan` calls them, and in words.
PLAN = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "statistics": "running statistics",
    "activations": "activations at peak",
    "gradients": "gradients at peak",
    "workspace": "workspace at peak",
    "total": "total",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `inspect`."""
    parser.epilog = f"{device_argument.SYNTAX}{EXAMPLES}"
    opening.arguments(parser)
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        type=device_argument.parse,
        default=device_argument.parse("any"),
        help="plan memory for it (any)",
    )
    parser.add_argument(
        "--batch-sizes",
        metavar="ROWS,…",
        type=_sizes,
        help="plan memory for these batch sizes; by default 1, the declared one, and 4 times that",
    )
    parser.add_argument("--no-plan", action="store_true", help="skip the memory plan: nothing is compiled")
    parser.add_argument(
        "--passes", action="store_true", help="show the compiler's passes and their effects; compiles the graph"
    )
    parser.add_argument("--dot", metavar="FILE", type=Path, help="write a drawing for Graphviz")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="write a drawing for browsers")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _sizes(text: str) -> list[int]:
    """Batch sizes separated by commas, as `argparse` reads them."""
    parts = [one.strip() for one in text.split(",")]
    if not all(one.isdecimal() and int(one) > 0 for one in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of batch sizes: use numbers such as 1,8,64")
    return list(dict.fromkeys(int(one) for one in parts))


@dataclass
class _Found:
    """Everything to show about a file."""

    header: dict[str, Any]
    tensors: list[dict[str, Any]]
    graphs: list[CompiledGraph] = field(default_factory=list)
    plans: list[dict[int, dict[str, int]]] = field(default_factory=list)
    unplanned: str = ""
    passes: list[Any] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> int:
    """Reads, shows and draws a saved graph."""
    from stepgraph.checkpoint.restoring import understood
    from stepgraph.cli import saved

    content = opening.read(arguments.file)
    custom = opening.classes(arguments.custom)
    with understood(content.path):
        found = _Found(saved.header(content), saved.tensors(content))
    is_shown = arguments.no_plan and not arguments.passes and found.header["linked_graphs"] == 1
    device = None if is_shown else arguments.device
    try:
        graph = opening.load(content, custom, device)
    except CheckpointError:
        _show(found, arguments)  # it is intact, but cannot be rebuilt here: show what the files contain
        raise
    found.graphs = list(graph.linked_graphs)
    if not arguments.no_plan:
        _plan(found, arguments.batch_sizes)
    if arguments.passes:
        found.passes = [graph.pipeline for graph in found.graphs]
    _show(found, arguments)
    _draw(found.graphs, arguments)
    return 0


def _plan(found: _Found, asked: Sequence[int] | None) -> None:
    """Plans the memory of each graph; default batch sizes may be impossible."""
    for graph in found.graphs:
        declared = graph.declaration.feeds.batch
        sizes = asked or ([1, 32, 128] if graph.declaration.feeds.is_open else sorted({1, declared, 4 * declared}))
        plans = {}
        for rows in sizes:
            try:
                plan = graph.memory_plan if rows == declared else graph.memory_plan_for(rows)
            except StepgraphError as error:
                if asked:
                    raise
                found.unplanned = error.problem
                continue
            plans[rows] = {kind: getattr(plan, kind) for kind in PLAN}
        found.plans.append(plans)


# Showing


def _show(found: _Found, arguments: argparse.Namespace) -> None:
    from stepgraph.checkpoint.restoring import understood
    from stepgraph.cli import screen

    with understood(Path(found.header["path"])):
        shown = _as_json(found) if arguments.json else _as_text(found)
    if arguments.json:
        screen.show_json(shown)
    else:
        screen.show(*shown)


def _as_text(found: _Found) -> list[Any]:
    shown: list[Any] = [*_header(found.header)]
    for number, graph in enumerate(found.graphs):
        shown += ["", _layers(graph, number, len(found.graphs))]
    if found.tensors:
        shown += ["", _tensors(_with_roles(found))]
    for graph, plans in zip(found.graphs, found.plans, strict=False):
        shown += ["", _plans(graph, plans)]
    for report in found.passes:
        shown += ["", report]
    if found.unplanned:
        shown.append(f"Other batch sizes cannot be planned: {found.unplanned}.")
    return shown


def _header(header: Mapping[str, Any]) -> list[Any]:
    from stepgraph import draw
    from stepgraph.cli import saved, screen

    linked = f", linked with {header['linked_graphs'] - 1} more" if header["linked_graphs"] > 1 else ""
    rows = {"saved": f"with PyTorch {header['torch']}, {draw.size(header['bytes'])} of tensors"}
    for kind in ("inputs", "loss_labels", "loss_label_weights", "outputs"):
        if header[kind]:
            rows[kind.replace("_", " ")] = "\n".join(
                readable(f"{name} {shape}".strip()) for name, shape in header[kind].items()
            )
    for one in header["optimizers"]:
        settings = ", ".join(f"{name} {_number(value)}" for name, value in saved.effective(one["settings"]).items())
        groups = f"; parameter groups: {one['groups']}" if "groups" in one else ""
        rows["optimizer"] = f"{one['rule']}, {settings}{groups}; updates: {one['updates']:,}"
    rows["compiled"] = header["compiled"]
    if header["classes"]:
        rows["own classes"] = ", ".join(header["classes"])
    for name, note in header["notes"].items():
        rows[f"note {name}"] = (
            saved.fit_notes(note) if saved.is_of_fit(name, note) else json.dumps(note, ensure_ascii=False)
        )
    return [f"{header['path']}: {header['kind']}{linked}", screen.facts(rows)]


def _number(value: Any) -> Any:
    return f"{value:g}" if isinstance(value, float) else value


def _layers(graph: Any, number: int, count: int) -> Any:
    from stepgraph import draw

    return draw.table(graph.shown_nodes(), "Layers" if count == 1 else f"Layers of graph {number + 1} of {count}")


def _with_roles(found: _Found) -> list[dict[str, Any]]:
    from stepgraph.cli import saved

    roles = saved.roles(found.graphs)
    return [{**one, "role": roles.get(one["name"], "")} for one in found.tensors]


def _tensors(rows: Sequence[Mapping[str, Any]]) -> Any:
    from stepgraph.cli import screen

    table = screen.columns("tensor", "role", "shape", "type", "count", "norm", "largest", title="Tensors", numbers=3)
    for one in rows:
        shape, bad = "×".join(map(str, one["shape"])), f" ({one['not_finite']} not finite)" if one["not_finite"] else ""
        numbers = f"{one['count']:,}", f"{one['norm']:.4g}", f"{one['largest']:.4g}{bad}"
        table.add_row(one["name"], one["role"], shape, one["type"], *numbers)
    return table


def _plans(graph: Any, plans: Mapping[int, Mapping[str, int]]) -> Any:
    from stepgraph import draw
    from stepgraph.cli import screen

    title = f"Memory by batch size on {graph.device}"
    table = screen.columns("", *(f"{rows:,}" for rows in plans), title=title, numbers=len(plans))
    for kind, words in PLAN.items():
        table.add_row(words, *(draw.size(plan[kind]) for plan in plans.values()))
    return table


def _as_json(found: _Found) -> dict[str, Any]:
    from stepgraph import draw

    layers = []
    for graph in found.graphs:
        nodes = graph.shown_nodes()
        names = draw.unique_names(node.layer for node in nodes)
        layers.append([_node(names[node.layer], node) for node in nodes])
    plans = [
        {"device": str(graph.device), "by_batch_size": {str(rows): plan for rows, plan in plans.items()}}
        for graph, plans in zip(found.graphs, found.plans, strict=False)
    ]
    passes = [[_pass(one) for one in report.ran] for report in found.passes]
    return {**found.header, "layers": layers, "tensors": _with_roles(found), "memory": plans, "passes": passes}


def _pass(ran: Any) -> dict[str, Any]:
    operators = None if ran.before is None else [ran.before, ran.after]
    known = {"operators": operators, "intermediates": ran.intermediates, "seconds": ran.seconds}
    return {"stage": str(ran.row.stage), "name": ran.row.name, **known}


def _node(name: str, node: Any) -> dict[str, Any]:
    return {
        "name": name,
        "class": type(node.layer).__name__,
        "sources": [list(tensor.shape) for tensor in node.arguments],
        "results": [list(tensor.shape) for tensor in node.results],
        "parameters": node.layer.parameter_count,
        "frozen": node.disable_update or node.is_frozen,
        "line": node.line,
    }


def _draw(graphs: Sequence[CompiledGraph], arguments: argparse.Namespace) -> None:
    from stepgraph import draw

    nodes = [node for graph in graphs for node in graph.shown_nodes()]
    stopped = frozenset().union(*(graph.stopped for graph in graphs))
    for path, picture in ((arguments.dot, draw.dot), (arguments.svg, draw.svg)):
        if path is None:
            continue
        try:
            path.write_text(picture(nodes, stopped), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{path}", f"it cannot be written: {error.strerror}", fix="check the path") from error
