"""Peak memory of a training step: what stepgraph planned before it, what it then took, and what eager PyTorch takes.

    python -m benchmarks.memory --models resnet18,transformer

Counted are parameters, running statistics, optimizer state and all that lives within a step; the batch is not.
"""

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.models import Model
from benchmarks.peers import EAGER, OURS, PEERS, parsed, parser, prepare, set_tf32, suits, surroundings, usable

MARK = "the step that counts"
STEPS = 3  # with the first one optimizer state appears, and with the second one a CUDA graph


def main() -> None:
    """Measures what the command line asks for."""
    made = parser("memory", __doc__, peers=EAGER)
    options = parsed(made)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler says nothing of its starts and stops
    prepare(options)
    set_tf32(options.tf32)
    console = Console(width=None if sys.stdout.isatty() else 112)
    names = usable(options.peers, options.device, options.asked, console)
    if any("torch" not in PEERS[name].packages for name in names):
        sys.exit("only memory that PyTorch allocates can be measured here: give peers that run on it")
    report = surroundings(options, "memory", names) | {"models": {}}
    drawn = Table("", title="Peak of a step, MiB", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("planned", "measured", "plan's error", "in the step alone", *names[1:], "stepgraph's share"):
        drawn.add_column(column, justify="right")
    for name, model in options.models.items():
        report["models"][name] = result = measure(model, names, options.device)
        drawn.add_row(*_row(name, result, names))
    console.print(drawn)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(model: Model, names: list[str], device: str) -> dict[str, Any]:
    """Bytes: planned, and measured for each peer; and how far the plan is off, of all and of what a step makes."""
    peak = peak_on_cuda if device == "cuda" else peak_on_cpu
    found, plans = {}, []

    def make(name: str) -> Any:
        peer = PEERS[name].load()(model, device, dropout=True)
        if name == OURS:
            plans.append(peer.training.memory_plan)
        return peer

    for name in names:
        if suits(name, model):
            found[name] = peak(lambda name=name: make(name), model)
    plan, measured = plans[0], found[OURS]
    lasting = plan.total - plan.intermediates
    return {
        "batch_size": model.batch_size,
        "planned": plan.total,
        "measured": found,
        "error": round(plan.total / measured - 1, 4),
        "error_in_step": round(plan.intermediates / (measured - lasting) - 1, 4),
    }


def peak_on_cpu(make: Callable[[], Any], model: Model) -> int:
    """The most bytes alive at once in the last of some steps; everything PyTorch allocates from `make` on counts.

    Parameters and statistics come as NumPy arrays, which a library on the CPU may go on using: they are added. One that
    copies them has them twice, and they count twice.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            peer = make()
            for _ in range(STEPS - 1):
                peer.step()
                peer.wait()
            gc.collect()
            with record_function(MARK):
                peer.step()
                peer.wait()
    events = recorded.profiler.kineto_results.events()
    began = next(event.start_ns() for event in events if event.name() == MARK)
    live = peak = 0
    for event in sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns()):
        if event.device_type() == torch.profiler.DeviceType.CPU:
            live += event.nbytes()
            peak = max(peak, live) if event.start_ns() >= began else live
    return peak + _given(model)


def peak_on_cuda(make: Callable[[], Any], model: Model) -> int:
    """The most bytes allocated at once in some steps, the capture of CUDA graphs among them; without one batch."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    peer = make()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        peer.step()
        peer.wait()
    return torch.cuda.max_memory_allocated() - before - sum(array.nbytes for array in model.batch())


def _given(model: Model) -> int:
    return sum(array.nbytes for array in (*model.parameters().values(), *model.statistics().values()))


def _row(name: str, result: dict[str, Any], names: list[str]) -> list[str]:
    measured = result["measured"]
    others = [f"{measured[peer] / 2**20:,.2f}" if peer in measured else "" for peer in names[1:]]
    ours, least = measured[OURS], min((size for peer, size in measured.items() if peer != OURS), default=0)
    sizes = [f"{size / 2**20:,.2f}" for size in (result["planned"], ours)]
    errors = [f"{100 * result[error]:+.1f}%" for error in ("error", "error_in_step")]
    return [name, *sizes, *errors, *others, f"{ours / least:.2f}" if least else ""]


if __name__ == "__main__":
    main()
