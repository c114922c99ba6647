"""Times a whole step with and without each row of tuned code, in turns: what does a row gain on which network?

    python -m benchmarks.rent --rows "expand small products" --models tiny,mlp

A row that changes nothing in a network is left out there. See `compiler/tuned/` for the rule that decides which stay.
"""

import copy
import gc
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

    made = parser("rent", __doc__)
    made.set_defaults(peers=OURS, models=",".join(MODELS))
    names = ", ".join(repr(row.name) for row in MANIFEST)
    made.add_argument("--rows", default=None, help=f"which, comma between (all); there are {names}")
    made.add_argument("--rounds", type=int, default=15, help="rounds in which both have a turn (%(default)s)")
    options = parsed(made)
    asked = options.rows.split(",") if options.rows else [row.name for row in MANIFEST]
    for name in asked:
        if name not in [row.name for row in MANIFEST]:
            made.error(f"there is no row {name!r}; there are {names}")
    prepare(options)
    set_tf32(options.tf32)
    console = Console(width=None if sys.stdout.isatty() else 112)
    report = surroundings(options, "rent", [OURS]) | {"rounds": options.rounds, "rows": {}}
    for model_name, model in options.models.items():
        found = measure(model, options.device, asked, options.rounds)
        for row, quartiles in found.items():
            report["rows"].setdefault(row, {})[model_name] = quartiles
        console.print(table(model_name, found), "")
        if options.json:  # after each model, so that a long run that is ended early leaves what it has
            options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(model: Model, device: str, asked: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """By row: the time without it, relative to the time with it, as quartiles."""
    complete, found = _peer(model, device), {}
    used = changing(complete.training)
    for row in (one for one in used if one.name in asked):
        with without(row):
            other = _peer(model, device)
        turn(complete, 3)
        turn(other, 3)
        count = max(3, min(MOST_STEPS, round(TURN_SECONDS / turn(complete, 3))))
        ratios = []
        for number in range(rounds):
            pair = (complete, other) if number % 2 else (other, complete)
            times = {id(one): turn(one, count) for one in pair}
            ratios.append(times[id(other)] / times[id(complete)])
        found[row.name] = [round(one, 4) for one in statistics.quantiles(ratios, n=4)]
        del other
        gc.collect()
    return found


def _peer(model: Model, device: str) -> Any:
    from benchmarks.in_stepgraph import Fused

    return Fused(model, device, dropout=True)


@contextmanager
def without(row: Any) -> Iterator[None]:
    """Compiles without one row."""
    row.is_on = False
    try:
        yield
    finally:
        row.is_on = True


def changing(training: Any) -> list[Any]:
    """The rows that do something to a compiled graph."""
    from stepgraph.compiler import pipeline
    from stepgraph.compiler.modules import Module
    from stepgraph.compiler.tuned import MANIFEST

    compiled = training.compilation
    executable = compiled.programs.executable("step", compiled.feeds.batch)
    part, step = executable.part, executable.step
    module = Module(part.module, copy.deepcopy(part.module.graph))
    changed = set()
    for one in pipeline.rows(pipeline.FUSED, step, "step"):
        before = str(module.graph)
        one.run(module, step)
        if str(module.graph) != before:
            changed.add(one.name)
    return [row for row in MANIFEST if row.name in changed or (row.launches is not None and row.applies(step))]


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
