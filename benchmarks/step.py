"""Times one training step in stepgraph and in its peers, in turns, and prints ratios with their spread.

    python -m benchmarks.step --models mlp,cnn --rounds 20 --json results.json

All libraries must give the same losses. See README.md for what the numbers mean.
"""

import gc
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.models import Model
from benchmarks.peers import (
    OURS,
    OURS_FUSED,
    OURS_UNFUSED,
    PEERS,
    parsed,
    parser,
    prepare,
    set_tf32,
    suits,
    surroundings,
    usable,
)

VARIANTS = (OURS_FUSED, OURS_UNFUSED)  # of ours
CHECKED_STEPS, TOLERANCE = 3, 1e-4
TURN_SECONDS, MOST_STEPS = 0.1, 200
MOST_OF_OTHERS = 0.05  # a thread that waits for a core makes all threads of its library wait


def main() -> None:
    """Measures what the command line asks for."""
    made = parser("step", __doc__)
    made.add_argument("--rounds", type=int, default=20, help="rounds in which every peer has a turn (%(default)s)")
    made.add_argument("--steps", type=int, default=None, help="steps of a turn (what takes stepgraph 0.1 s)")
    options = parsed(made)
    prepare(options)
    console = Console(width=None if sys.stdout.isatty() else 112)
    makers = {name: PEERS[name].load() for name in usable(options.peers, options.device, options.asked, console)}
    report = surroundings(options, "step", list(makers)) | {"rounds": options.rounds, "models": {}}
    for name, model in options.models.items():
        chosen = {peer: make for peer, make in makers.items() if suits(peer, model)}
        losses = check(model, chosen, options.device)
        set_tf32(options.tf32)
        result = measure(model, chosen, options.device, options.rounds, options.steps)
        for peer, row in result["peers"].items():
            row["first_losses"] = losses[peer]
        report["models"][name] = result
        console.print(table(name, model, result), "")
        if options.json:  # after each model, so that a long run that is ended early leaves what it has
            options.json.write_text(json.dumps(report, indent=1) + "\n")


def check(model: Model, makers: dict[str, Any], device: str) -> dict[str, list[float]]:
    """The first losses of every peer, in full float32 and without dropout; ends the program where they differ."""
    set_tf32(False)
    found: dict[str, list[float]] = {}
    for name, make in makers.items():
        peer, found[name] = make(model, device, dropout=False), []
        for _ in range(CHECKED_STEPS):
            peer.step()
            found[name].append(peer.loss)
        del peer
        gc.collect()
    for name, losses in found.items():
        if any(abs(a - b) > TOLERANCE * abs(b) for a, b in zip(losses, found[OURS], strict=True)):
            sys.exit(f"{name} computes other losses: {losses}, {OURS} computes {found[OURS]}")
    return found


def measure(model: Model, makers: dict[str, Any], device: str, rounds: int, steps: int | None) -> dict[str, Any]:
    """Rounds in which every peer has a turn."""
    peers = {name: make(model, device, dropout=True) for name, make in makers.items()}
    peers[OURS].settle()
    for peer in peers.values():  # first times: CUDA graphs are captured at the second step or later
        turn(peer, 3)
    count = steps or max(3, min(MOST_STEPS, round(TURN_SECONDS / turn(peers[OURS], 3))))
    times: dict[str, list[float]] = {name: [] for name in peers}
    before, shuffled = _cpu_times(), random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample(list(peers), len(peers)):  # so that nobody always follows the same one
            times[name].append(turn(peers[name], count))
    facts = {"batch_size": model.batch_size, "parameters": model.parameter_count, "steps_per_turn": count}
    facts["cpu_share_of_others"] = _share_of_others(before, _cpu_times())
    return facts | summary(times)


def turn(peer: Any, count: int) -> float:
    """Seconds of one step: one step to settle in, then `count` steps that are timed together, up to their very end."""
    peer.step()
    peer.wait()
    began = time.perf_counter()
    for _ in range(count):
        peer.step()
    peer.wait()
    return (time.perf_counter() - began) / count


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and ratios of every peer; the best peer is the one with the smallest median.

    Example:
        >>> summary({"stepgraph": [1.0, 1.0], "pytorch": [3.0, 3.0], "jax": [2.0, 2.0]})["best_peer"]
        'jax'
    """
    rows = {name: _row(seconds, times[OURS]) for name, seconds in times.items()}
    others = [name for name in rows if name not in (OURS, *VARIANTS)]
    best = min(others, key=lambda name: rows[name]["median_ms"], default=None)
    found = {"best_peer": best, "ratio_to_best_peer": rows[best]["ratio_quartiles"] if best else None}
    for name in VARIANTS:
        if best and name in rows:
            found[f"{name}_ratio_to_best_peer"] = _row(times[best], times[name])["ratio_quartiles"]
    return found | {"peers": rows}


def table(name: str, model: Model, result: dict[str, Any]) -> Table:
    """One row a peer, and below them the headline: the ratio to the best of them."""
    title = f"{name}: batch {model.batch_size}, {model.parameter_count:,} parameters"
    notes = []
    if result["best_peer"]:
        low, middle, high = result["ratio_to_best_peer"]
        notes.append(f"to the best peer, {result['best_peer']}: {middle:.2f} ({low:.2f} to {high:.2f})")
    for variant in VARIANTS:
        if f"{variant}_ratio_to_best_peer" in result:
            low, middle, high = result[f"{variant}_ratio_to_best_peer"]
            notes.append(f"{variant}, to the same: {middle:.2f} ({low:.2f} to {high:.2f})")
    others = result["cpu_share_of_others"] or 0
    if others > MOST_OF_OTHERS:
        notes.append(f"Other programs took {others:.0%} of the CPU: measure again when they rest.")
    justified: Any = {"title_justify": "left", "caption_justify": "left"}
    drawn = Table(title=title, caption="\n".join(notes) or None, show_edge=False, pad_edge=False, **justified)
    drawn.add_column("")
    for column in ("step, median", "time / stepgraph's", "its quartiles"):
        drawn.add_column(column, justify="right")
    for peer, row in result["peers"].items():
        low, middle, high = row["ratio_quartiles"]
        ratio, spread = ("", "") if peer == OURS else (f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
        drawn.add_row(peer, f"{row['median_ms']:.3f} ms", ratio, spread)
    return drawn


def _row(times: list[float], ours: list[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(times, ours, strict=True)]  # of the same round
    return {
        "median_ms": round(1e3 * statistics.median(times), 4),
        "ratio_quartiles": [round(q, 3) for q in _quartiles(ratios)],
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "rounds_ms": [round(1e3 * one, 4) for one in times],
    }


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


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


if __name__ == "__main__":
    main()
