"""Chooses kernels by measuring them once on the real shapes, and remembers the choice.

Shapes are static, so it pays to look: for each convolution of a traced step, each way to compute it is checked
against PyTorch's own and timed, and the fastest takes its place in the graph. The choice is kept in a file in the
user's cache folder, by processor, thread count and PyTorch version, so that later runs choose the same and compute
the same numbers.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.kernels import convolution as conv

aten = torch.ops.aten
TOLERANCE = 1e-4  # largest difference from PyTorch's own result, relative to its largest element
ROUNDS, BUDGET = 9, 0.25  # times each way runs, and seconds after which that is enough
GAIN = 0.9  # another way must take less than this share of the reference's time


def choose_kernels(module: fx.GraphModule) -> None:
    """Puts the fastest way in the place of each convolution and each gradient of one."""
    for node in module.graph.nodes:
        if node.target is aten.convolution.default:
            _choose_forward(node)
        elif node.target is aten.convolution_backward.default:
            _choose_backward(node)
    module.recompile()


def _choose_forward(node: fx.Node) -> None:
    x, w, b, stride, padding, dilation, transposed, _, groups = cast(Any, node.args)
    source, weights, bias = _array(x), _array(w), _array(b)
    if not conv.applies(source, weights, dilation, transposed, groups):
        return
    way = _fastest("forward", conv.forward_ways(), (source, weights, bias, stride, padding))
    if way != "onednn":
        node.target, node.args = conv.FORWARD[way], (x, w, b, stride, padding)
        node.meta["workspace"] = conv.workspace(way, source, weights, stride, padding)


def _choose_backward(node: fx.Node) -> None:
    g, x, w, _, stride, padding, dilation, transposed, _, groups, mask = cast(Any, node.args)
    gradient, source, weights = _array(g), _array(x), _array(w)
    if not conv.applies(source, weights, dilation, transposed, groups):
        return
    arguments = (gradient, source, weights, stride, padding)
    data = _fastest("data", conv.data_ways(weights, stride, padding), arguments) if mask[0] else "onednn"
    kernel = _fastest("weights", conv.WEIGHTS, arguments) if mask[1] else "onednn"
    if (data, kernel) != ("onednn", "onednn"):
        node.target, node.args = _backward(data, kernel), (g, x, w, stride, padding, mask)
        node.meta["workspace"] = conv.workspace(kernel, source, weights, stride, padding)


@cache
def _backward(data: str, kernel: str) -> Callable[..., Any]:
    """All gradients of a convolution, each in its own way."""
    data_way, weights_way = conv.DATA[data], conv.WEIGHTS[kernel]

    def backward(
        g: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        mask: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        return [
            data_way(g, x, w, stride, padding) if mask[0] else None,
            weights_way(g, x, w, stride, padding) if mask[1] else None,
            g.sum((0, 2, 3)) if mask[2] else None,
        ]

    backward.__name__ = backward.__qualname__ = f"backward_{data}_{kernel}"
    return backward


def _array(node: Any) -> Any:
    return None if node is None else node.meta["val"]


def _fastest(what: str, ways: Mapping[str, Callable[..., Any]], arguments: tuple[Any, ...]) -> str:
    """The name of the fastest way for these shapes; the first way is the reference."""
    shapes = [list(a.shape) if isinstance(a, torch.Tensor) else a for a in arguments]
    key = json.dumps(["convolution", what, sorted(ways), shapes, torch.get_num_threads()], default=list)
    choices = _choices()
    if key not in choices:
        choices[key] = _measure(ways, arguments)
        _remember(choices)
    return choices[key]


@torch.inference_mode()
def _measure(ways: Mapping[str, Callable[..., Any]], arguments: tuple[Any, ...]) -> str:
    """Times all ways in turn, so that a busy moment hurts them alike; each counts with its best time."""
    generator = torch.Generator().manual_seed(0)
    real = [torch.randn(a.shape, generator=generator) if isinstance(a, torch.Tensor) else a for a in arguments]
    reference, *others = ways
    right = ways[reference](*real)
    usable = [reference, *(name for name in others if _agrees(ways[name], real, right))]
    best = dict.fromkeys(usable, float("inf"))
    began = time.perf_counter()
    for _ in range(ROUNDS):
        for name in usable:
            best[name] = min(best[name], _seconds(ways[name], real))
        if time.perf_counter() - began > BUDGET:
            break
    fastest = min(usable, key=best.__getitem__)
    return fastest if best[fastest] < GAIN * best[reference] else reference


def _agrees(way: Callable[..., Any], arguments: Sequence[Any], right: torch.Tensor) -> bool:
    try:
        found = way(*arguments)
    except RuntimeError:  # not every library takes every shape
        return False
    return bool((found - right).abs().max() <= TOLERANCE * right.abs().max())


def _seconds(way: Callable[..., Any], arguments: Sequence[Any]) -> float:
    start = time.perf_counter()
    way(*arguments)
    return time.perf_counter() - start


# What was chosen, in memory and in the user's cache folder


@cache
def _file() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "stepgraph"
    machine = "".join(c if c.isalnum() else "-" for c in f"{platform.machine()}-{_processor()}")
    return folder / f"kernels-{machine}-torch-{torch.__version__}.json"


@cache
def _choices() -> dict[str, str]:
    return _stored()


def _stored() -> dict[str, str]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):  # none yet, or not readable: measured again
        return {}
    return found if isinstance(found, dict) else {}


def _remember(choices: dict[str, str]) -> None:
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        choices.update({**_stored(), **choices})  # other processes choose too
        draft = _file().with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(choices, indent=0))
        draft.replace(_file())
    except OSError:  # a folder that cannot be written costs only the next run's measuring
        return


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "CPU part", "Hardware")
    return next((line.split(":")[1].strip() for line in lines if line.startswith(wanted)), platform.processor())
