"""Where the time of a step goes on a CPU: products, the update, other operators, and what lies between operators.

    python -m benchmarks.shares --models mlp,autoencoder,transformer

Peers call the same products, and an update reads and writes every parameter and its state. The last column is how many
times as fast as stepgraph's a step would be in which nothing else took any time: no library can gain more on it.
"""

import json
import os
import statistics
import sys
import time
import warnings
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.models import Model
from benchmarks.peers import EAGER, OURS, PEERS, parsed, parser, prepare, suits, surroundings, usable

KINDS = {  # parts of the names of operators; whatever has none of them is another operator
    "products": ("mm", "conv", "linear", "dot_product", "lstm"),
    "update": ("_fused_adam", "_foreach"),
}
OTHERS, BETWEEN = "other operators", "between them"
WARM, STEPS = 20, 20


def main() -> None:
    """Measures what the command line asks for."""
    made = parser("shares", __doc__, models=("mlp", "autoencoder", "transformer"), peers=EAGER)
    made.add_argument("--rounds", type=int, default=10, help="rounds of steps, of which the median counts")
    options = parsed(made)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler says nothing of its starts and stops
    prepare(options)
    console = Console(width=None if sys.stdout.isatty() else 112)
    names = usable(options.peers, options.device, options.asked, console)
    if options.device != "cpu" or any("torch" not in PEERS[name].packages for name in names):
        sys.exit("only steps of PyTorch's operators on a CPU are divided here: give peers that run on it")
    report = surroundings(options, "shares", names) | {"models": {}}
    drawn = Table("", title="Parts of a step, ms", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("step", *KINDS, OTHERS, BETWEEN, "at most"):
        drawn.add_column(column, justify="right")
    for name, model in options.models.items():
        suited = [one for one in names if suits(one, model)]
        report["models"][name] = found = {one: measure(model, one, options.rounds) for one in suited}
        for peer, parts in found.items():
            numbers = [f"{1e3 * seconds:.3f}" for seconds in parts.values()]
            drawn.add_row(f"{name}, {peer}", *numbers, f"{most(parts):.2f}" if peer == OURS else "")
    console.print(drawn)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(model: Model, name: str, rounds: int) -> dict[str, float]:
    """Seconds of a step, and of its parts."""
    peer = PEERS[name].load()(model, "cpu", dropout=True)
    _run(peer, WARM)
    step = statistics.median(_run(peer, STEPS) for _ in range(rounds))
    shares = dict.fromkeys((*KINDS, OTHERS), 0.0)
    for operator, share in _operators(peer):
        shares[_kind(operator)] += share
    return {"step": step, **{kind: share * step for kind, share in shares.items()}, BETWEEN: _rest(shares) * step}


def _rest(shares: dict[str, float]) -> float:
    return max(0.0, 1 - sum(shares.values()))


def most(parts: dict[str, float]) -> float:
    """How many times as fast a step would be that consisted of products and the update alone.

    Example:
        >>> most({"step": 5.0, "products": 3.0, "update": 1.0})
        1.25
    """
    return parts["step"] / sum(parts[kind] for kind in KINDS)


def _kind(operator: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(word in operator for word in words)), OTHERS)


def _run(peer: Any, count: int) -> float:
    """Seconds of one of some steps."""
    began = time.perf_counter()
    for _ in range(count):
        peer.step()
        peer.wait()
    return (time.perf_counter() - began) / count


def _operators(peer: Any) -> list[tuple[str, float]]:
    """The operators of a step, each with its share in it, without those it calls."""
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            seconds = _run(peer, STEPS) * STEPS
    return [(one.key, one.self_cpu_time_total / 1e6 / seconds) for one in recorded.key_averages()]


if __name__ == "__main__":
    main()
