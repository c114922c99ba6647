"""What several ranks cost: a step of 1 and 2 processes against DistributedDataParallel, in turns in the same run.

    python -m benchmarks.parallel
    python -m benchmarks.parallel --models mlp,transformer --ranks 1,2,4 --json parallel.json
    python -m benchmarks.parallel --device cuda --ranks 1         # what `parallel` adds on one GPU, unfused
    python -m benchmarks.parallel --plan                          # plans of large models for 8, 64 and 1,024 ranks

Each number of ranks is a world of its own, started by torchrun. Every rank has one thread, or `--threads`, and the same
share of the batch. `tree` adds gradients in the order that makes every world compute the same bits, `any` in the
order of the communication library; `ddp` is PyTorch's loop with DistributedDataParallel and its fused Adam. A single
rank runs its only shard as a whole step, so `tree` says nothing about shards there; `exchanging` runs them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import rank_plans
from benchmarks.models import MODELS, SMALL
from benchmarks.peers import cold_caches, parser, surroundings
from stepgraph import draw

MOST = {"cpu": ("ddp", 1.0), "cuda": ("alone", 1.03)}  # what a step with ranks may take, in steps of another
SECONDS = {"cpu": 0.3, "cuda": 0.1}  # of a turn
ON_LINUX = sys.platform == "linux"
DEFAULTS = "mlp,cnn,transformer"


def main(arguments: list[str] | None = None) -> None:
    """Measures what the command line asks for."""
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 112, highlight=False)
    if options.plan:
        rank_plans.show(console, options.ranks, options.json)
        return
    report: dict[str, Any] = surroundings(options, "parallel", []) | {"models": {}}
    with cold_caches():
        for name in options.models:
            worlds = {ranks: world(name, ranks, options) for ranks in options.ranks}
            report["models"][name] = worlds
            console.print(table(name, worlds, options.device), "")
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")


def world(model: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """What a world of some ranks measured."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        settings = {"model": model, "device": options.device, "rounds": options.rounds, "seconds": options.seconds}
        settings |= {"small": options.small, "found": str(found), "threads": options.threads, "fuse": options.fuse}
        command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        worker = ["-m", "benchmarks.parallel_worker", json.dumps(settings)]
        local = {"OMP_NUM_THREADS": str(options.threads)} | ({"GLOO_SOCKET_IFNAME": "lo"} if ON_LINUX else {})
        done = subprocess.run([sys.executable, "-m", *command, *worker], env=os.environ | local, check=False)
        if done.returncode:
            sys.exit(f"{ranks} ranks of {model} failed")
        return summary(json.loads(found.read_text()))


def summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Medians, and the ratios of the same rounds to each other contender, with quartiles.

    Args:
        measured: of a world, seconds by contender and round, and bytes.
    """
    times: Mapping[str, list[float]] = measured["seconds"]
    ratios = {
        name: {other: quartiles(mine, theirs) for other, theirs in times.items() if other != name}
        for name, mine in times.items()
    }
    return {**measured, "medians": {name: statistics.median(one) for name, one in times.items()}, "ratios": ratios}


def quartiles(mine: list[float], theirs: list[float]) -> list[float]:
    """The quartiles of the ratio over rounds.

    Example:
        >>> quartiles([1.0, 2.0, 6.0], [1.0, 1.0, 2.0])
        [1.5, 2.0, 2.5]
    """
    found = [a / b for a, b in zip(mine, theirs, strict=True)]
    return statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3


def table(model: str, worlds: Mapping[int, Mapping[str, Any]], device: str) -> Table:
    """One row per contender and number of ranks."""
    base, most = MOST[device]
    title = f"{model}: against {base}, at most {most:g} is wanted"
    drawn = Table("ranks", "", title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in ("ms a step", "ratio", "quartiles", "sent per rank", "formula", "on the wire"):
        drawn.add_column(column, justify="right")
    for ranks, found in worlds.items():
        for name, median in found["medians"].items():
            low, middle, high = found["ratios"][name].get(base, [1.0] * 3)
            sent = [_size(found[kind].get(name)) for kind in ("planned", "formula", "wire")]
            spread = f"{low:.3f} – {high:.3f}" if name != base else ""
            drawn.add_row(str(ranks), name, f"{1e3 * median:.2f}", f"{middle:.3f}", spread, *sent)
        drawn.add_section()
    return drawn


def _size(count: float | None) -> str:
    return "" if count is None else draw.size(count)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser("parallel", __doc__, compares=False)
    made.set_defaults(threads=1)
    made.add_argument("--models", default=DEFAULTS, help="which, comma between (%(default)s)")
    made.add_argument("--ranks", default=None, help="numbers of ranks, comma between (1,2; with --plan 8,64,1024)")
    made.add_argument("--rounds", type=int, default=15, help="turns of each contender (%(default)s)")
    made.add_argument("--seconds", type=float, default=None, help="of a turn, about (0.3; on a GPU 0.1)")
    made.add_argument("--fuse", action="store_true", help="time steps that PyTorch's compiler has fused")
    made.add_argument("--plan", action="store_true", help="print plans of large models; nothing is run")
    made.add_argument("--small", action="store_true", help="tiny models, to see that it works")
    options = made.parse_args(arguments)
    known = SMALL if options.small else MODELS
    options.models = options.models.split(",")
    options.seconds = options.seconds or SECONDS[options.device]
    for name in options.models:
        if name not in known:
            made.error(f"there is no model {name!r}; there are {', '.join(known)}")
    ranks = options.ranks or ("8,64,1024" if options.plan else "1,2")
    if not all(one.isdecimal() and int(one) for one in ranks.split(",")):
        made.error(f"--ranks is {ranks}; pass numbers such as 1,2")
    options.ranks = [int(one) for one in ranks.split(",")]
    return options


if __name__ == "__main__":
    main()
