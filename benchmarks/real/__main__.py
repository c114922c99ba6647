"""Trains models of real sizes in stepgraph and in PyTorch, each contender in its own process, in turns.

    python -m benchmarks.real --json benchmarks/results/real-h200.json

A contender that fails is a row with the reason. What is in the file already is kept: run the rest another time.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.real.contenders import CONTENDERS, OURS
from benchmarks.real.models import MODELS, SMALL, Model
from benchmarks.real.report import summed_up, table
from benchmarks.real.turns import LONG, Failed, Process, Task, prepared, rounds
from benchmarks.real.worker import MEMORY

PROFILED = 5  # steps
MODES = ("reduce", "autotune", "stream")


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.real", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--models", default=None, help=f"which of {','.join(MODELS)}, comma between (all)")
    made.add_argument("--peers", default=None, help=f"which of {','.join(CONTENDERS)} (the usual ones)")
    made.add_argument("--modes", default="", help=f"peers in addition: which of {','.join(MODES)}")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--small", action="store_true", help="the small models of the tests")
    made.add_argument("--batch", type=int, default=None, help="another batch size for all models")
    made.add_argument("--rounds", type=int, default=7, help="rounds in which every contender has a turn (%(default)s)")
    made.add_argument("--seconds", type=float, default=30, help="begin no round after so many seconds (%(default)s)")
    made.add_argument("--losses", type=int, default=50, help="steps whose losses are compared (%(default)s)")
    made.add_argument("--at-once", type=int, default=1, help="contenders that get ready at once (%(default)s)")
    made.add_argument("--patience", type=float, default=300, help="seconds to get ready in, each (%(default)s)")
    made.add_argument("--minutes", type=float, default=None, help="begin no model after so many minutes")
    made.add_argument("--warm", action="store_true", help="time getting ready again, with the caches of the first time")
    made.add_argument("--profile", action="store_true", help="add the kernels of a step to the file")
    made.add_argument("--json", type=Path, default=None, help="a file for all numbers; what is in it already is kept")
    found = made.parse_args(arguments)
    known = SMALL if found.small else MODELS
    found.models = found.models.split(",") if found.models else list(known)
    found.peers = found.peers.split(",") if found.peers else None
    found.modes = found.modes.split(",") if found.modes else []
    for kind, given, names in (
        ("model", found.models, known),
        ("peer", found.peers or [], CONTENDERS),
        ("mode", found.modes, MODES),
    ):
        for name in given:
            if name not in names:
                made.error(f"there is no {kind} {name!r}; there are {', '.join(names)}")
    for name in ("batch", "rounds", "losses", "at_once"):
        value = getattr(found, name)
        if value is not None and value < 1:
            made.error(f"--{name.replace('_', '-')} is {value}, it must be at least 1")
    return found


def chosen(name: str, model: Model, given: argparse.Namespace) -> dict[str, str]:
    """Contenders of a model, stepgraph first, each with the reason why it is left out, or nothing."""
    usual = [one for one, row in CONTENDERS.items() if row.usual is None or name in row.usual]
    wanted = dict.fromkeys([OURS, *(given.peers if given.peers is not None else usual), *given.modes])
    return {one: CONTENDERS[one].problem(model, given.device) for one in wanted}


def measured(
    task: Task, names: list[str], given: argparse.Namespace, said: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """A row per contender. stepgraph stays while its peers come and go in groups, and takes turns with each group."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: Path(folder, name) for name in names}
        rows = _in_groups(task, caches, given.at_once, given, said)
        if given.at_once > 1 and MEMORY in rows[OURS].get("failed", ""):  # alone it may find the memory it needs
            rows = _in_groups(task, {name: Path(folder, "alone", name) for name in names}, 1, given, said)
        if given.warm:
            for name in (name for name, row in rows.items() if "rounds" in row):
                rows[name]["warm"] = _again(task, name, caches[name])
    return rows


def _in_groups(
    task: Task, caches: dict[str, Path], size: int, given: argparse.Namespace, said: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """The rows of contenders that get ready in groups of this size."""
    rows: dict[str, dict[str, Any]] = {}
    names, ours = list(caches), None
    groups = [names[i : i + size] for i in range(0, len(names), size)]
    while groups:
        group = groups.pop(0)
        ready = prepared(task, {name: caches[name] for name in group}, said)
        rows |= {name: row for name, (_, row) in ready.items()}
        alive = {name: process for name, (process, _) in ready.items() if process is not None}
        ours = alive.pop(OURS, ours)
        times, failed = rounds(({OURS: ours} if ours else {}) | alive, given.rounds, given.seconds)
        _note(rows, times, failed)
        if given.profile:
            _profile(rows, ({OURS: ours} if ours and not groups else {}) | alive)
        for process in alive.values():
            process.end()
        if len(group) > 1:  # beside stepgraph alone it may find the memory it needs
            groups += [[name] for name in group if name != OURS and MEMORY in rows[name].get("failed", "")]
    if ours is not None:
        ours.end()
    return rows


def _note(rows: dict[str, dict[str, Any]], times: dict[str, list[float]], failed: dict[str, str]) -> None:
    """Adds the times of some rounds to the rows, with stepgraph's of the same rounds."""
    for name, reason in failed.items():
        rows[name]["failed"] = reason
    for name, found in times.items():
        if name == OURS:
            rows[name]["rounds"] = rows[name].get("rounds", []) + found
        else:
            rows[name] |= {"rounds": found, "ours": times.get(OURS, [])}


def _profile(rows: dict[str, dict[str, Any]], processes: dict[str, Process]) -> None:
    """Adds the kernels of a step to the rows."""
    for name, process in processes.items():
        try:
            rows[name] |= process.ask(LONG, do="kernels", count=PROFILED)
        except Failed as error:
            rows[name]["kernels"] = str(error)


def _again(task: Task, name: str, caches: Path) -> dict[str, Any]:
    """The times of getting ready in another process with the same caches."""
    process = Process(task, name, caches)
    try:
        process.load()
        return process.begin()
    except Failed as error:
        return {"failed": str(error)}
    finally:
        process.end()


def main(arguments: list[str] | None = None) -> None:
    """Measures what the command line asks for, and writes each model to the file when it is done."""
    given, started = options(arguments), time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 180)
    known = SMALL if given.small else MODELS
    report = json.loads(given.json.read_text()) if given.json and given.json.exists() else {"models": {}}
    for name in given.models:
        if name in report["models"]:
            console.print(f"{name} is in the file already", style="yellow")
            continue
        if given.minutes is not None and time.monotonic() - started > 60 * given.minutes:
            console.print(f"{name} is left for another time", style="yellow")
            continue
        model, began = known[name].of_batch(given.batch), time.monotonic()
        task = Task(name, given.device, given.small, given.batch, given.losses, given.patience)
        problems = chosen(name, model, given)
        rows = measured(task, [one for one, problem in problems.items() if not problem], given, console.print)
        rows |= {one: {"failed": problem} for one, problem in problems.items() if problem}
        where = next((row.pop("where") for row in rows.values() if "where" in row), {"device": "unknown"})
        report = {"program": "real", **where, **report}
        result = summed_up(model, rows, report["device"])
        facts = {"batch_size": model.batch_size, "parameters": model.parameter_count, "flops": model.flops}
        asked = " ".join(sys.argv[1:] if arguments is None else arguments)
        where_to = f" --json {given.json}" if given.json else ""  # does not matter to the numbers
        settings = {"command": f"python -m benchmarks.real {asked}".replace(where_to, "")}
        settings |= {"at_once": given.at_once, "minutes": round((time.monotonic() - began) / 60, 2)}
        report["models"][name] = {**facts, **settings, **result, "rows": rows}
        console.print(table(name, model, rows, result), "")
        if given.json:
            given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
