"""Times the first step: from the call that builds and compiles to the end of one step, each in a new process.

    python -m benchmarks.first_step --models cnn,mlp --rounds 5

A process imports its library and runs the same network with a few small numbers before the clock starts, so loading is
not counted. Its caches on disk are empty: kernels are measured and code is compiled as on the first day. stepgraph's
first steps on a GPU are not fused yet; that happens later, beside them.
"""

import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.models import SMALL, Model
from benchmarks.peers import OURS, PEERS, Peer, parsed, parser, prepare, set_tf32, suits, surroundings, usable

MARK = "seconds to the first step:"


def main() -> None:
    """Starts a process for each measurement; in such a process (`--here`), measures."""
    made = parser("first_step", __doc__)
    made.add_argument("--rounds", type=int, default=3, help="processes for each peer and model (%(default)s)")
    made.add_argument("--here", action="store_true", help="measure one peer and one model in this very process")
    options = parsed(made)
    prepare(options)
    if options.here:
        (name, model), peer = next(iter(options.models.items())), options.peers[-1]
        found = PEERS[peer] if peer != OURS else Peer("benchmarks.in_stepgraph:AtFirst")
        print(MARK, first_step(found.load(), name, model, options.device, options.tf32))
        return
    console = Console(width=None if sys.stdout.isatty() else 112)
    peers = usable(options.peers, options.device, options.asked, console)
    report = surroundings(options, "first_step", peers) | {"rounds": options.rounds, "models": {}}
    for name, model in options.models.items():
        chosen = [peer for peer in peers if suits(peer, model)]
        report["models"][name] = result = measure(name, chosen, options.rounds, sys.argv[1:])
        console.print(table(name, model, result), "")
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")


def first_step(make: Any, name: str, model: Model, device: str, tf32: bool) -> float:
    """Seconds of building and of one step, to its end."""
    set_tf32(tf32)
    small = make(SMALL[name], device, dropout=True)
    for _ in range(3):
        small.step()
        small.wait()
    began = time.perf_counter()
    peer = make(model, device, dropout=True)
    peer.step()
    peer.wait()
    return time.perf_counter() - began


def measure(name: str, peers: list[str], rounds: int, arguments: list[str]) -> dict[str, Any]:
    """Seconds by peer, in rounds with another order each."""
    found: dict[str, list[float]] = {peer: [] for peer in peers}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for peer in shuffled.sample(peers, len(peers)):
            found[peer].append(_in_a_process(name, peer, arguments))
    return {
        "peers": {
            peer: {"median_seconds": round(statistics.median(seconds), 4), "rounds_seconds": seconds}
            for peer, seconds in found.items()
        }
    }


def _in_a_process(name: str, peer: str, arguments: list[str]) -> float:
    command = [sys.executable, "-m", "benchmarks.first_step", *arguments]  # the last of two options counts
    done = subprocess.run(
        [*command, "--here", "--models", name, "--peers", peer], capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return round(float(line.removeprefix(MARK)), 4)
    sys.exit(f"{peer} gave no first step of {name}:\n{done.stderr[-2000:]}")


def table(name: str, model: Model, result: dict[str, Any]) -> Table:
    """One row a peer."""
    title = f"{name}: batch {model.batch_size}, {model.parameter_count:,} parameters"
    drawn = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    drawn.add_column("")
    for column in ("to the first step, median", "least to most", "time / stepgraph's"):
        drawn.add_column(column, justify="right")
    ours = result["peers"][OURS]["median_seconds"]
    for peer, row in result["peers"].items():
        seconds, middle = row["rounds_seconds"], row["median_seconds"]
        ratio = "" if peer == OURS else f"{middle / ours:.2f}"
        drawn.add_row(peer, f"{middle:.2f} s", f"{min(seconds):.2f} to {max(seconds):.2f}", ratio)
    return drawn


if __name__ == "__main__":
    main()
