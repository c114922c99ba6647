"""Times a whole step with and without each row of tuned code, in turns: what does a row gain on which network?

    python -m benchmarks.rent --rows "expand small products" --models tiny,mlp
    python -m benchmarks.rent --implementations

Rows of the manifest take part in fused steps, measured implementations in those that are not. What changes nothing
in a network is left out there. See `compiler/tuned/` for the rule that decides which stay.
"""

import copy
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.models import MODELS, Model
from benchmarks.peers import OURS, parsed, parser, prepare, set_tf32, surroundings
from benchmarks.step import TURN_SECONDS, turn

MOST_STEPS = 2000


def main() -> None:
    """Measures what the command line asks for."""
    from stepgraph.compiler.tuned import MANIFEST

    made = parser("rent", __doc__, models=MODELS, peers=OURS)
    names = ", ".join(repr(row.name) for row in MANIFEST)
    made.add_argument("--rows", default=None, help=f"which, comma between (all); there are {names}")
    made.add_argument("--implementations", action="store_true", help="measured implementations instead of rows")
    made.add_argument("--rounds", type=int, default=15, help="rounds in which both have a turn (%(default)s)")
    options = parsed(made)
    asked = options.rows.split(",") if options.rows else None
    for name in asked or ():
        if not options.implementations and name not in [row.name for row in MANIFEST]:
            made.error(f"there is no row {name!r}; there are {names}")
    prepare(options)
    set_tf32(options.tf32)
    console = Console(width=None if sys.stdout.isatty() else 112)
    report = surroundings(options, "rent", [OURS]) | {"rounds": options.rounds, "rows": {}}
    for model_name, model in options.models.items():
        found = measure(model, options.device, asked, options.rounds, implementations=options.implementations)
        for row, quartiles in found.items():
            report["rows"].setdefault(row, {})[model_name] = quartiles
        console.print(table(model_name, found), "")
        if options.json:  # after each model, so that a long run that is ended early leaves what it has
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    for name in asked or ():
        if name not in report["rows"]:
            console.print(f"no step used {name!r}", style="yellow")


def measure(
    model: Model, device: str, asked: Sequence[str] | None, rounds: int, *, implementations: bool = False
) -> dict[str, list[float]]:
    """By row or implementation: the time without it, relative to the time with it, as quartiles."""
    from benchmarks.in_stepgraph import AtFirst, Fused

    peer = AtFirst if implementations else Fused
    complete = peer(model, device, dropout=True)
    others = {}
    for name, removed in (chosen if implementations else changing)(complete.training).items():
        if asked is None or name in asked:
            with removed:
                others[name] = peer(model, device, dropout=True)
                turn(others[name], 3)
    return {name: compared(complete, other, rounds) for name, other in others.items()}


def compared(complete: Any, other: Any, rounds: int) -> list[float]:
    """The time of one step relative to that of the complete one, as quartiles."""
    turn(complete, 3)
    turn(other, 3)
    count = max(3, min(MOST_STEPS, round(TURN_SECONDS / turn(complete, 3))))
    ratios = []
    for number in range(rounds):
        pair = (complete, other) if number % 2 else (other, complete)
        times = {id(one): turn(one, count) for one in pair}
        ratios.append(times[id(other)] / times[id(complete)])
    return [round(one, 4) for one in statistics.quantiles(ratios, n=4)]


@contextmanager
def without(row: Any) -> Iterator[None]:
    """Compiles without one row."""
    row.is_on = False
    try:
        yield
    finally:
        row.is_on = True


@contextmanager
def without_implementation(name: str) -> Iterator[None]:
    """Compiles without one of the measured implementations."""
    from stepgraph.compiler.kernels.choices import CHOICES

    CHOICES.left_out.add(name)
    try:
        yield
    finally:
        CHOICES.left_out.discard(name)


def changing(training: Any) -> dict[str, AbstractContextManager[None]]:
    """The rows that do something to a compiled graph, and how to compile without each."""
    from stepgraph.compiler import pipeline
    from stepgraph.compiler.modules import Module
    from stepgraph.compiler.tuned import MANIFEST

    executable = _executable(training)
    part, step = executable.part, executable.step
    module = Module(part.module, copy.deepcopy(part.module.graph))
    changed = set()
    for one in pipeline.rows(pipeline.FUSED, step, "step"):
        before = str(module.graph)
        one.run(module, step)
        if str(module.graph) != before:
            changed.add(one.name)
    used = [row for row in MANIFEST if row.name in changed or (row.launches is not None and row.applies(step))]
    return {row.name: without(row) for row in used}


def chosen(training: Any) -> dict[str, AbstractContextManager[None]]:
    """The implementations that were chosen for a compiled graph instead of PyTorch's, and how to compile without each.

    Those that a row of the manifest offers go by the name of the row.
    """
    from stepgraph.compiler.program import notes
    from stepgraph.compiler.tuned import MANIFEST

    rows = {one.name: row for row in MANIFEST for one in row.offers}
    found: dict[str, AbstractContextManager[None]] = {}
    for node in _executable(training).part.module.graph.nodes:
        implementation = notes(node).implementation if node.op == "call_function" else None
        if implementation is not None and implementation[1] != "pytorch":
            name = implementation[1]
            if name in rows:
                found[rows[name].name] = without(rows[name])
            else:
                found[name] = without_implementation(name)
    return found


def _executable(training: Any) -> Any:
    compiled = training.compilation
    return compiled.programs.executable("step", compiled.feeds.batch)


def table(model: str, found: dict[str, list[float]]) -> Table:
    """What each row gains on a network."""
    drawn = Table("", title=f"{model}: time without a row, relative to all", title_justify="left", show_edge=False)
    for column in ("quarter", "median", "three quarters"):
        drawn.add_column(column, justify="right")
    for row, quartiles in found.items():
        drawn.add_row(row, *(f"{one:.3f}" for one in quartiles))
    return drawn


if __name__ == "__main__":
    main()
