"""Whether a fast step trains the same: its losses over 20 steps, against PyTorch's own kernels and against float64.

    python -m benchmarks.curves --models resnet18

Two results in float32 are never the same bits: sums are taken in other orders, and training lets the difference grow.
How far float32 itself is from the exact losses is the measure of it, so everybody is compared with the same loop in
float64 too.
"""

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.models import Model
from benchmarks.peers import EAGER, OURS, PEERS, parsed, parser, prepare, set_tf32, suits, surroundings, usable

STEPS = 20
REFERENCE = "reference"  # stepgraph with DETERMINISTIC


def main() -> None:
    """Compares what the command line asks for."""
    made = parser("curves", __doc__, peers=f"{EAGER},channels_last")
    options = parsed(made)
    prepare(options)
    set_tf32(options.tf32)
    console = Console(width=None if sys.stdout.isatty() else 112)
    names = usable(options.peers, options.device, options.asked, console)
    report = surroundings(options, "curves", names) | {"models": {}}
    title = f"Largest relative difference in {STEPS} losses"
    drawn = Table("", title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in ("first loss", "last loss", "to reference", OURS, REFERENCE, *names[1:]):
        drawn.add_column(column, justify="right")
    for name, model in options.models.items():
        report["models"][name] = result = measure(model, names, options.device)
        drawn.add_row(*_row(name, result, names))
    console.print(drawn)
    console.print("The reference is stepgraph with DETERMINISTIC. The columns on its right are differences to float64.")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(model: Model, names: list[str], device: str) -> dict[str, Any]:
    """All losses, and the largest relative differences: ours to the reference, everybody's to float64."""
    from benchmarks.in_pytorch import InFloat64
    from benchmarks.in_stepgraph import Reference

    kinds = {name: PEERS[name].load() for name in names if suits(name, model)} | {REFERENCE: Reference}
    losses = {name: curve(kind(model, device, dropout=False)) for name, kind in kinds.items()}
    exact = curve(InFloat64(model, device, dropout=False))
    return {
        "batch_size": model.batch_size,
        "to_reference": difference(losses[OURS], losses[REFERENCE]),
        "to_float64": {name: difference(found, exact) for name, found in losses.items()},
        "losses": losses | {"float64": exact},
    }


def curve(peer: Any) -> list[float]:
    """The losses of 20 steps on the same batch."""
    losses = []
    for _ in range(STEPS):
        peer.step()
        losses.append(peer.loss)
    return losses


def difference(found: list[float], right: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, right, strict=True))


def _row(name: str, result: dict[str, Any], names: list[str]) -> list[str]:
    exact, distances = result["losses"]["float64"], result["to_float64"]
    shown = [f"{distances[peer]:.1e}" if peer in distances else "" for peer in (OURS, REFERENCE, *names[1:])]
    return [name, f"{exact[0]:.4f}", f"{exact[-1]:.4f}", f"{result['to_reference']:.1e}", *shown]


if __name__ == "__main__":
    main()
