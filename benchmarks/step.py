"""Times one training step in stepgraph and in its peers, in turns, and prints ratios with their spread.

    python -m benchmarks.step --models mlp,cnn --rounds 20 --json results.json

All libraries must give the same losses. See README.md for what the numbers mean.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.models import MODELS, WARM_UP, Model

OURS = "stepgraph"
PEERS = {  # name: module and class, what it needs, whether it runs without being asked for
    OURS: ("benchmarks.in_stepgraph:Stepgraph", ("torch",), True),
    "pytorch": ("benchmarks.in_pytorch:Eager", ("torch",), True),
    "channels_last": ("benchmarks.in_pytorch:ChannelsLast", ("torch",), False),
    "compile": ("benchmarks.in_pytorch:Compiled", ("torch",), False),
    "jax": ("benchmarks.in_jax:Jax", ("jax", "optax"), True),
}
CHECKED_STEPS, TOLERANCE = 3, 1e-4
TURN_SECONDS, MOST_STEPS = 0.1, 200
MOST_OF_OTHERS = 0.05  # a thread that waits for a core makes all threads of its library wait


def main() -> None:
    """Measures what the command line asks for."""
    options = _options()
    _prepare(options)
    console = Console(width=None if sys.stdout.isatty() else 112)
    makers = {name: _maker(name) for name in options.peers if _usable(name, options, console)}
    report = _surroundings(options, list(makers))
    check(WARM_UP, makers, options.device)
    for name in options.models:
        report["models"][name] = result = measure(MODELS[name], makers, options.device, options.rounds, options.steps)
        console.print(table(name, MODELS[name], result), "")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(model: Model, makers: dict[str, Any], device: str, rounds: int, steps: int | None) -> dict[str, Any]:
    """Time to the first step, then losses compared, then rounds in which every peer has a turn."""
    peers, first = {}, {}
    for name, make in makers.items():
        began = time.perf_counter()
        peers[name] = make(model, device, dropout=True)
        peers[name].step()
        peers[name].wait()
        first[name] = time.perf_counter() - began
    losses = check(model, makers, device)  # later, since a library may remember what it learned about these shapes
    for peer in peers.values():  # further first times: CUDA graphs are captured at the second step or later
        turn(peer, 3)
    count = steps or max(3, min(MOST_STEPS, round(TURN_SECONDS / turn(peers[OURS], 3))))
    times: dict[str, list[float]] = {name: [] for name in peers}
    before, shuffled = _cpu_times(), random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample(list(peers), len(peers)):  # so that nobody always follows the same one
            times[name].append(turn(peers[name], count))
    rows = {name: _summary(times[name], times[OURS], first[name], losses[name]) for name in peers}
    facts = {"batch_size": model.batch_size, "parameters": model.parameter_count, "steps_per_turn": count}
    return facts | {"cpu_share_of_others": _share_of_others(before, _cpu_times()), "peers": rows}


def check(model: Model, makers: dict[str, Any], device: str) -> dict[str, list[float]]:
    """The first losses of every peer, without dropout; ends the program where they differ from ours."""
    found: dict[str, list[float]] = {}
    for name, make in makers.items():
        peer, found[name] = make(model, device, dropout=False), []
        for _ in range(CHECKED_STEPS):
            peer.step()
            found[name].append(peer.loss)
    for name, losses in found.items():
        if any(abs(a - b) > TOLERANCE * abs(b) for a, b in zip(losses, found[OURS], strict=True)):
            sys.exit(f"{name} computes other losses: {losses}, {OURS} computes {found[OURS]}")
    return found


def turn(peer: Any, count: int) -> float:
    """Seconds of one step: one step to settle in, then `count` steps that are timed together, up to their very end."""
    peer.step()
    peer.wait()
    began = time.perf_counter()
    for _ in range(count):
        peer.step()
    peer.wait()
    return (time.perf_counter() - began) / count


def table(name: str, model: Model, result: dict[str, Any]) -> Table:
    """One row a peer."""
    title = f"{name}: batch {model.batch_size}, {model.parameter_count:,} parameters"
    others = result["cpu_share_of_others"] or 0
    warning = (
        f"Other programs took {others:.0%} of the CPU: measure again when they rest."
        if others > MOST_OF_OTHERS
        else None
    )
    drawn = Table(
        title=title, caption=warning, title_justify="left", caption_justify="left", show_edge=False, pad_edge=False
    )
    drawn.add_column("")
    for column in ("step, median", "time / stepgraph's", "its quartiles", "to the first step"):
        drawn.add_column(column, justify="right")
    for peer, row in result["peers"].items():
        low, middle, high = row["ratio_quartiles"]
        ratio, spread = ("", "") if peer == OURS else (f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
        drawn.add_row(peer, f"{row['median_ms']:.3f} ms", ratio, spread, f"{row['first_step_seconds']:.2f} s")
    return drawn


def _summary(times: list[float], ours: list[float], first: float, losses: list[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(times, ours, strict=True)]  # of the same round
    return {
        "median_ms": round(1e3 * statistics.median(times), 4),
        "ratio_quartiles": [round(q, 3) for q in _quartiles(ratios)],
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "first_step_seconds": round(first, 3),
        "first_losses": losses,
        "rounds_ms": [round(1e3 * one, 4) for one in times],
    }


def _cpu_times() -> tuple[float, float] | None:
    """CPU seconds that other programs took so far, and CPU seconds there were; None where the system does not say."""
    if not Path("/proc/stat").exists():
        return None
    ticks = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    there, idle = (count / os.sysconf("SC_CLK_TCK") for count in (sum(ticks), ticks[3] + ticks[4]))
    return there - idle - sum(os.times()[:4]), there


def _share_of_others(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    if before is None or after is None or after[1] == before[1]:
        return None
    return round(max(0.0, (after[0] - before[0]) / (after[1] - before[1])), 3)


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=(__doc__ or "").splitlines()[0])
    usual = [name for name, (_, _, is_usual) in PEERS.items() if is_usual]
    parser.add_argument("--models", default=",".join(MODELS), help="which, comma between (%(default)s)")
    parser.add_argument("--peers", default=None, help=f"which of {','.join(PEERS)} ({','.join(usual)}, as installed)")
    parser.add_argument("--all", action="store_true", help="every peer that is installed")
    parser.add_argument("--rounds", type=int, default=20, help="rounds in which every peer has a turn (%(default)s)")
    parser.add_argument("--steps", type=int, default=None, help="steps of a turn (what takes stepgraph 0.1 s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (as many as PyTorch takes by itself)")
    parser.add_argument("--json", type=Path, default=None, help="a file for all the numbers")
    options = parser.parse_args()
    options.models = options.models.split(",")
    options.asked = options.peers is not None
    names = list(PEERS) if options.all else options.peers.split(",") if options.asked else usual
    options.peers = list(dict.fromkeys([OURS, *names]))
    for kind, given, known in (("model", options.models, MODELS), ("peer", options.peers, PEERS)):
        for name in given:
            if name not in known:
                parser.error(f"there is no {kind} {name!r}; there are {', '.join(known)}")
    if options.rounds < 1 or (options.steps or 1) < 1 or (options.threads or 1) < 1:
        parser.error("rounds, steps and threads are whole numbers of at least 1")
    return options


def _prepare(options: argparse.Namespace) -> None:
    """The same conditions for everybody; before any library starts its threads."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a first step is a first step, for torch.compile
    options.caches = tempfile.TemporaryDirectory()  # and for stepgraph, which keeps its choice of kernels on disk
    os.environ["XDG_CACHE_HOME"] = options.caches.name
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves the others their memory
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # full float32 on a GPU, as the others
    for known in ("dynamo_pgo", "TensorFloat32"):  # that there is no cache and no TF32 is what was asked for
        warnings.filterwarnings("ignore", message=known)
    if options.threads and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])  # the limit every library sees
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # for PyTorch and stepgraph alike
        if not torch.cuda.is_available():
            sys.exit("PyTorch finds no CUDA device here")


def _usable(name: str, options: argparse.Namespace, console: Console) -> bool:
    missing = [package for package in PEERS[name][1] if importlib.util.find_spec(package) is None]
    problem = f"{' and '.join(missing)} not installed" if missing else ""
    if not problem and name == "jax" and not importlib.import_module("benchmarks.in_jax").is_on(options.device):
        problem = f"this JAX cannot use {options.device}"
    if problem and options.asked:
        sys.exit(f"{name}: {problem}")
    if problem:
        console.print(f"{name} is left out: {problem}", style="yellow")
    return not problem


def _maker(name: str) -> Any:
    module, kind = PEERS[name][0].split(":")
    return getattr(importlib.import_module(module), kind)


def _asked(arguments: list[str]) -> list[str]:
    """The arguments that matter to the numbers: where the file goes does not."""
    dropped = {i + offset for i, one in enumerate(arguments) if one == "--json" for offset in (0, 1)}
    return [one for i, one in enumerate(arguments) if i not in dropped and not one.startswith("--json=")]


def _surroundings(options: argparse.Namespace, peers: list[str]) -> dict[str, Any]:
    """What the numbers depend on."""
    import torch

    import stepgraph

    packages = sorted({package for name in peers for package in PEERS[name][1]} | {"numpy"})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    on_cpu = f"{cores}-core {platform.machine()} CPU"
    return {
        "command": " ".join(["python -m benchmarks.step", *_asked(sys.argv[1:])]),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else on_cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {OURS: stepgraph.__version__} | {one: importlib.metadata.version(one) for one in packages},
        "rounds": options.rounds,
        "models": {},
    }


if __name__ == "__main__":
    main()
