"""`stepgraph devices`: what this machine offers, what would be used, what is missing and how to install it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

HELP = "show what this machine offers, what would be used, and what is missing"

EXAMPLES = """
examples:
  stepgraph devices
  stepgraph devices --json | jq -r .any
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `devices`."""
    parser.epilog = EXAMPLES
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Inspects the machine and prints the result."""
    from stepgraph.cli import machine, screen

    found = machine.look()
    if arguments.json:
        screen.show_json(found)
        return 0
    parts: list[Any] = [f"Device.any() is {found['any']}.", ""]
    table = screen.columns("device", "name", "memory", "free", "", title="Devices", numbers=3)
    table.columns[-1].justify = "left"
    for one in found["devices"]:
        table.add_row(one["device"], one["name"], _size(one["memory"]), _size(one["free"]), one["more"])
    parts += [table, "", "Versions", screen.facts(found["versions"]), "", "For PyTorch's compiler (FUSE_LAYERS)"]
    parts += [screen.facts(found["compiler"]), "", "Kernels chosen by measurement"]
    parts += [screen.facts(_kernels(found["kernels"])), "", "Several processes (compile with parallel=)"]
    parts += [screen.facts(_processes(found["processes"])), "", *_missing(found["missing"])]
    screen.show(*parts)
    return 0


def _size(count: int | None) -> str:
    from stepgraph import draw

    return "" if count is None else draw.size(count)


def _kernels(kernels: Mapping[str, Any]) -> dict[str, str]:
    if kernels["file"] is None:
        return {"file": "none: there is no home directory, so each process measures again"}
    state = f"{kernels['choices']} choices" if kernels["exists"] else "missing: the first compilation creates it"
    return {"file": kernels["file"], "holds": state}


def _processes(processes: Mapping[str, Any]) -> dict[str, str]:
    names = {"cuda": "GPU", "cpu": "core"}
    rows = {}
    for kind, command in processes["commands"].items():
        count = processes["counts"][kind]
        rows[f"{count} {names[kind]}{'s' if count > 1 else ''}"] = command
    told = processes["started_by_torchrun"]
    started = " ".join(f"{name}={value}" for name, value in told.items()) or "no: this process is on its own"
    return rows | {"started by torchrun": started}


def _missing(missing: list[dict[str, str]]) -> list[Any]:
    from stepgraph.cli import screen

    if not missing:
        return ["Nothing is missing."]
    lines: list[Any] = ["Missing"]
    for one in missing:
        lines += [f"  {one['what']}", screen.facts({"": one["fix"]})]
    return lines
