"""What compiling and a step cost as a network grows: in depth, width, batch, and nodes of the graph up to 5,000.

    python -m benchmarks.scaling --only nodes --profile

The slope of a line on two logarithmic axes is the power with which a time grows: 1 is in proportion, 2 is its square.
A time far below its trend's other end has a constant part, so the slope of the last two points is shown as well.
"""

import argparse
import cProfile
import gc
import json
import math
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.peers import parser, prepare, set_tf32, surroundings

Point = dict[str, float]


def perceptron(depth: int, width: int, batch: int) -> tuple[Any, Any]:
    """A graph of `depth` fully connected layers with ReLU, and its input."""
    import stepgraph as sg

    graph, x = sg.Graph(), sg.Tensor((batch, width))
    value = x
    for _ in range(depth):
        value = graph.node(sg.FullyConnectedLayer.create(width, width), value)
        value = graph.node(sg.ActivationLayer.relu(), value)
    return graph, x


def blocks(nodes: int) -> tuple[Any, Any]:
    """A graph of `nodes` nodes: small residual blocks of four (two of them with parameters), and its input."""
    import stepgraph as sg

    graph, x = sg.Graph(), sg.Tensor((8, 16))
    value = x
    while len(graph.nodes) < nodes:
        inner = graph.node(sg.FullyConnectedLayer.create(16, 16), value)
        inner = graph.node(sg.ActivationLayer.tanh(), inner)
        inner = graph.node(sg.LayerNormalizationLayer.create((16,)), inner)
        value = graph.node(sg.ArithmeticLayer.add(), value, inner)
    return graph, x


LINES: dict[
    str, tuple[tuple[int, ...], Callable[[int], tuple[Any, Any]]]
] = {  # what grows: sizes, and the graph of one
    "depth": ((2, 4, 8, 16, 32, 64), lambda n: perceptron(n, width=64, batch=32)),
    "width": ((64, 128, 256, 512, 1024, 2048), lambda n: perceptron(3, width=n, batch=32)),
    "batch": ((8, 32, 128, 512, 2048, 8192), lambda n: perceptron(3, width=256, batch=n)),
    "nodes": ((40, 100, 300, 1000, 2500, 5000), blocks),
}


def main() -> None:
    """Measures what the command line asks for."""
    options = _options()
    prepare(options)
    set_tf32(options.tf32)
    console = Console(width=None if sys.stdout.isatty() else 112)
    report = surroundings(options, "scaling", []) | {"lines": {}}
    measure(blocks, 8, options.device)  # what is loaded at first use
    for name in options.only:
        sizes, build = LINES[name]
        points = []
        for size in (one for one in sizes if one <= options.most):
            points.append(measure(build, size, options.device))
            console.print(f"{name} {size:,}: compiled in {points[-1]['compile']:.2f} s", style="dim")
        report["lines"][name] = {"points": points, "slopes": slopes(points)}
        console.print(table(name, points), "")
        if options.profile:
            profile(build, int(points[-1]["size"]), options.device)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(build: Callable[[int], Any], size: int, device: str) -> Point:
    """Seconds of wiring, of compiling and of a step."""
    import stepgraph as sg

    began = time.perf_counter()
    graph, x = build(size)
    wired = time.perf_counter()
    training = wired_training(graph, x)
    compiling = time.perf_counter()
    training.compile(sg.Device.of(device))
    compiled = time.perf_counter()
    data = {"x": np.random.default_rng(0).standard_normal(x.shape, np.float32)}, {"labels": np.zeros(x.shape[0], int)}
    times = [_step(training, data) for _ in range(7)]
    found = {"size": size, "nodes": len(graph.nodes), "wire": wired - began, "compile": compiled - compiling}
    del training, graph
    gc.collect()
    return found | {"first_step": times[0], "step": statistics.median(times[2:])}


def wired_training(graph: Any, x: Any) -> Any:
    """A training graph that is not compiled yet."""
    import stepgraph as sg

    labels = sg.Tensor((x.shape[0],), "int64")
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-6))
    training.add_inputs({"x": x}, {"labels": labels})
    return training


def profile(build: Callable[[int], Any], size: int, device: str) -> None:
    """Shows where one more compilation spends its time: in which functions, and in which of ours with all they call."""
    import stepgraph as sg

    training, recorded = wired_training(*build(size)), cProfile.Profile()
    recorded.runcall(training.compile, sg.Device.of(device))
    found = pstats.Stats(recorded, stream=sys.stdout)
    found.sort_stats("tottime").print_stats(20)
    found.sort_stats("cumulative").print_stats("stepgraph", 25)


def slopes(points: list[Point]) -> dict[str, list[float]]:
    """The slope of each time against the size on logarithmic axes: of all points, and of the last two.

    Example:
        >>> slopes([{"size": n, "wire": n, "compile": n * n, "step": 1.0} for n in (1, 10, 100)])["compile"]
        [2.0, 2.0]
    """
    if len(points) < 2:
        return {}
    found = {}
    for what in ("wire", "compile", "step"):
        x, y = ([math.log(point[key]) for point in points] for key in ("size", what))
        line = [statistics.linear_regression(x[start:], y[start:]).slope for start in (0, -2)]
        found[what] = [round(one, 2) + 0.0 for one in line]
    return found


def table(name: str, points: list[Point]) -> Table:
    """One row a size, and the slopes below."""
    drawn = Table(name, "nodes", title=f"Against {name}", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("wiring", "compiling", "first step", "a step"):
        drawn.add_column(column, justify="right")
    for point in points:
        times = (f"{1e3 * point[key]:,.2f} ms" for key in ("wire", "compile", "first_step", "step"))
        drawn.add_row(f"{point['size']:,}", f"{point['nodes']:,}", *times)
    found = slopes(points)
    if found:
        drawn.add_section()
        for row, label in enumerate(("slope", "slope at the end")):
            wire, compiling, step = (f"{found[what][row]:.2f}" for what in ("wire", "compile", "step"))
            drawn.add_row(label, "", wire, compiling, "", step)
    return drawn


def _step(training: Any, data: tuple[Any, Any]) -> float:
    began = time.perf_counter()
    training.execute(*data).wait()
    return time.perf_counter() - began


def _options() -> argparse.Namespace:
    made = parser("scaling", __doc__, compares=False)
    made.add_argument("--only", default=",".join(LINES), help="what grows, comma between (%(default)s)")
    made.add_argument("--most", type=int, default=10_000, help="leave out larger sizes")
    made.add_argument("--profile", action="store_true", help="show where the largest compilation spends its time")
    options = made.parse_args()
    options.only = options.only.split(",")
    for name in options.only:
        if name not in LINES:
            made.error(f"there is no line {name!r}; there are {', '.join(LINES)}")
    return options


if __name__ == "__main__":
    main()
