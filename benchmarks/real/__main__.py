"""Trains models of real sizes in stepgraph and in PyTorch, each contender in its own process, in turns.

    python -m benchmarks.real --json benchmarks/results/real-h200.json

A contender that fails is a row with the reason. What is in the file already is kept: run the rest another time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.real.contenders import CONTENDERS, OURS, OURSELVES
from benchmarks.real.models import MODELS, SMALL, Model
from benchmarks.real.report import summed_up, table
from benchmarks.real.turns import LONG, Failed, Process, Task, Who, prepared, ready_again, rounds
from benchmarks.real.worker import MEMORY

PROFILED = 5  # steps
MODES = ("reduce", "autotune", "stream")


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.real", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--models", default=None, help=f"which of {','.join(MODELS)}, comma between (all)")
    made.add_argument("--peers", default=None, help=f"which of {','.join(CONTENDERS)} (the usual ones)")
    made.add_argument("--ours", choices=OURSELVES, default=OURS, help="whom peers are compared with (%(default)s)")
    made.add_argument("--modes", default="", help=f"peers in addition: which of {','.join(MODES)}")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--small", action="store_true", help="the small models of the tests")
    made.add_argument("--batch", type=int, default=None, help="another batch size for all models")
    made.add_argument("--rounds", type=int, default=7, help="rounds in which every contender has a turn (%(default)s)")
    made.add_argument("--seconds", type=float, default=30, help="begin no round after so many seconds (%(default)s)")
    made.add_argument("--losses", type=int, default=50, help="steps whose losses are compared (%(default)s)")
    made.add_argument("--at-once", type=int, default=1, help="contenders that get ready at once (%(default)s)")
    made.add_argument("--together", action="store_true", help="all models and contenders get ready at once")
    made.add_argument("--patience", type=float, default=300, help="seconds to get ready in, each (%(default)s)")
    made.add_argument("--minutes", type=float, default=None, help="begin no model after so many minutes")
    made.add_argument(
        "--warm",
        nargs="?",
        type=int,
        const=1,
        default=0,
        metavar="TIMES",
        help="time getting ready again, with the caches of the first time; of several times, the middle one counts (1)",
    )
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


@dataclass(frozen=True)
class Wanted:
    """A model to measure.

    Args:
        model: its sizes.
        task: what its contenders are to do.
        problems: all contenders, stepgraph first, each with the reason why it is left out, or nothing.
    """

    model: Model
    task: Task
    problems: dict[str, str]

    @classmethod
    def of(cls, name: str, given: argparse.Namespace) -> Wanted:
        """What the command line asks for."""
        model = (SMALL if given.small else MODELS)[name].of_batch(given.batch)
        task = Task(name, given.device, given.small, given.batch, given.losses, given.patience)
        usual = [one for one, row in CONTENDERS.items() if row.usual is None or name in row.usual]
        asked = dict.fromkeys([given.ours, *(given.peers if given.peers is not None else usual), *given.modes])
        return cls(model, task, {one: CONTENDERS[one].problem(model, given.device) for one in asked})

    @property
    def contenders(self) -> list[str]:
        """Those that can train it here."""
        return [name for name, problem in self.problems.items() if not problem]


def measured(
    task: Task, names: list[str], given: argparse.Namespace, said: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """A row per contender. stepgraph stays while its peers come and go in groups, and takes turns with each group."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {name: Path(folder, name) for name in names}
        rows = _in_groups(task, caches, given.at_once, given, said)
        if given.at_once > 1 and MEMORY in rows[given.ours].get("failed", ""):  # alone it may find the memory it needs
            rows = _in_groups(task, {name: Path(folder, "alone", name) for name in names}, 1, given, said)
        if given.warm:
            for name in (name for name, row in rows.items() if "rounds" in row):
                who = Who(task.model, name)
                rows[name]["warm"] = ready_again({who: (task, caches[name])}, given.warm)[who]
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
        ready = prepared({Who(task.model, name): (task, caches[name]) for name in group}, said)
        rows |= {who.contender: row for who, (_, row) in ready.items()}
        alive = {who.contender: process for who, (process, _) in ready.items() if process is not None}
        ours = alive.pop(given.ours, ours)
        times, failed = rounds(({given.ours: ours} if ours else {}) | alive, given.rounds, given.seconds)
        _note(rows, times, failed, given.ours)
        if given.profile:
            _profile(rows, ({given.ours: ours} if ours and not groups else {}) | alive)
        for process in alive.values():
            process.end()
        if len(group) > 1:  # beside stepgraph alone it may find the memory it needs
            groups += [[name] for name in group if name != given.ours and MEMORY in rows[name].get("failed", "")]
    if ours is not None:
        ours.end()
    return rows


def together(
    wanted: dict[str, Wanted], given: argparse.Namespace, said: Callable[[str], None]
) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows of several models whose contenders all get ready at once; each model then has its own rounds."""
    rows: dict[str, dict[str, dict[str, Any]]] = {model: {} for model in wanted}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        everybody = [Who(model, name) for model, one in wanted.items() for name in one.contenders]
        tasks = {who: (wanted[who.model].task, Path(folder, *who)) for who in everybody}
        ready = prepared(tasks, said)
        for who, (_, row) in ready.items():
            rows[who.model][who.contender] = row
        for model in wanted:
            alive = {who.contender: one for who, (one, _) in ready.items() if one is not None and who.model == model}
            _note(rows[model], *rounds(alive, given.rounds, given.seconds), given.ours)
            if given.profile:
                _profile(rows[model], alive)
            for process in alive.values():
                process.end()
        if given.warm:
            there = {who: tasks[who] for who in everybody if ready[who][0] is not None}
            for who, found in ready_again(there, given.warm).items():
                rows[who.model][who.contender]["warm"] = found
    return rows


def _note(rows: dict[str, dict[str, Any]], times: dict[str, list[float]], failed: dict[str, str], ours: str) -> None:
    """Adds the times of some rounds to the rows, with ours of the same rounds."""
    for name, reason in failed.items():
        rows[name]["failed"] = reason
    for name, found in times.items():
        if name == ours:
            rows[name]["rounds"] = rows[name].get("rounds", []) + found
        else:
            rows[name] |= {"rounds": found, "ours": times.get(ours, [])}


def _profile(rows: dict[str, dict[str, Any]], processes: dict[str, Process]) -> None:
    """Adds the kernels of a step to the rows."""
    for name, process in processes.items():
        try:
            rows[name] |= process.ask(LONG, do="kernels", count=PROFILED)
        except Failed as error:
            rows[name]["kernels"] = str(error)


def measured_models(
    wanted: dict[str, Wanted], given: argparse.Namespace, said: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, dict[str, Any]], float]]:
    """The rows of each model and the minutes they took, as soon as they are there."""
    started = time.monotonic()
    if given.together and wanted:
        for name, rows in together(wanted, given, said).items():
            yield name, rows, (time.monotonic() - started) / 60
        return
    for name, one in wanted.items():
        if given.minutes is not None and time.monotonic() - started > 60 * given.minutes:
            said(f"{name} is left for another time")
            continue
        began = time.monotonic()
        rows = measured(one.task, one.contenders, given, said)
        yield name, rows, (time.monotonic() - began) / 60


def main(arguments: list[str] | None = None) -> None:
    """Measures what the command line asks for, and writes each model to the file when it is done."""
    given = options(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU here; --device cpu --small tries the program on a CPU")
    console = Console(width=None if sys.stdout.isatty() else 180)
    report = json.loads(given.json.read_text()) if given.json and given.json.exists() else {"models": {}}
    for name in report["models"].keys() & given.models:
        console.print(f"{name} is in the file already", style="yellow")
    wanted = {name: Wanted.of(name, given) for name in given.models if name not in report["models"]}
    asked = " ".join(sys.argv[1:] if arguments is None else arguments)
    where_to = f" --json {given.json}" if given.json else ""  # does not matter to the numbers
    command = f"python -m benchmarks.real {asked}".replace(where_to, "")
    count = sum(len(one.contenders) for one in wanted.values()) if given.together else given.at_once
    for name, rows, minutes in measured_models(wanted, given, console.print):
        model = wanted[name].model
        rows |= {one: {"failed": problem} for one, problem in wanted[name].problems.items() if problem}
        where = next((row.pop("where") for row in rows.values() if "where" in row), {"device": "unknown"})
        report = {"program": "real", **where, **report}
        result = summed_up(model, rows, report["device"], given.ours)
        facts = {"batch_size": model.batch_size, "parameters": model.parameter_count, "flops": model.flops}
        settings = {"command": command, "at_once": count, "minutes": round(minutes, 2)}
        report["models"][name] = {**facts, **settings, **result, "rows": rows}
        console.print(table(name, model, rows, result), "")
        if given.json:
            given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
