"""How far measured steps are from what the machine's arithmetic and memory allow, from the files of `benchmarks.step`.

    python -m benchmarks.limits benchmarks/results/step-h200*.json

The limit counts matrix products and convolutions alone, forward and gradients: each takes at least its multiplications
at the highest rate of the data sheet, and at least its operands and results once through the memory. What lies between
them, the optimizer and all launching count as nothing, so no library can reach it.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.in_pytorch import Eager
from benchmarks.models import MODELS, Model
from benchmarks.peers import OURS

SHEETS = {  # multiplications and additions a second with TF32 and without, bytes a second
    "NVIDIA H200": (494.5e12, 66.9e12, 4.8e12),
}


class Work(NamedTuple):
    """One operator that multiplies: multiplications and additions, and bytes of operands and results."""

    flops: int
    size: int


class Products(TorchDispatchMode):
    """Notes every matrix product and convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Work] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        count = flop_registry.get(function._overloadpacket)
        if count is not None:
            flops = _grouped_gradient(function, args) or count(*args, **(kwargs or {}), out_val=results)
            self.found.append(Work(flops, sum(map(_bytes, (*args, *_several(results))))))
        return results


def products(model: Model) -> list[Work]:
    """What one step multiplies, counted on arrays without memory."""
    peer = Eager(model, "meta", dropout=False)
    with Products() as counted:
        peer.forward(peer.inputs, peer.labels).backward()
    return counted.found


def limit(work: list[Work], flops_rate: float, bytes_rate: float) -> float:
    """Seconds that the products take at least, one after the other.

    Example:
        >>> limit([Work(10, 1), Work(1, 30)], 10.0, 10.0)
        4.0
    """
    return sum(max(one.flops / flops_rate, one.size / bytes_rate) for one in work)


def main() -> None:
    """Prints a row for each model of the files."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=(__doc__ or "").split("\n")[0])
    made.add_argument("files", nargs="+", type=Path)
    drawn = Table("", title="A step and its limit, ms", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("GFLOP", "limit", "stepgraph", "of the limit", "best peer", "of the limit"):
        drawn.add_column(column, justify="right")
    for path in made.parse_args().files:
        report = json.loads(path.read_text())
        if report["device"] not in SHEETS:
            raise SystemExit(f"{path}: no data sheet of {report['device']!r} is here, only of {', '.join(SHEETS)}")
        with_tf32, without, bandwidth = SHEETS[report["device"]]
        for name, result in report["models"].items():
            work = products(MODELS[name].of_batch(result["batch_size"]))
            least = 1e3 * limit(work, with_tf32 if report["tf32"] else without, bandwidth)
            times = [result["peers"][peer]["median_ms"] for peer in (OURS, result["best_peer"])]
            cells = [cell for ms in times for cell in (f"{ms:.3f}", f"{ms / least:.1f} ×")]
            drawn.add_row(name, f"{sum(one.flops for one in work) / 1e9:,.1f}", f"{least:.3f}", *cells)
    Console().print(drawn)


def _several(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _grouped_gradient(function: Any, args: Any) -> int:
    """Of a convolution with groups, which PyTorch counts for its weights as if every output saw every input; else 0."""
    if function is not torch.ops.aten.convolution_backward.default or args[9] == 1 or args[7]:
        return 0
    gradient, weights, wanted = args[0], args[2], args[10]
    return 2 * math.prod(gradient.shape) * math.prod(weights.shape[1:]) * sum(wanted[:2])


def _bytes(one: Any) -> int:
    return math.prod(one.shape) * one.itemsize if isinstance(one, torch.Tensor) else 0


if __name__ == "__main__":
    main()
