"""`stepgraph cache`: the kernels that were chosen by measurement, the steps that were fused, and what keeps them."""

from __future__ import annotations

import argparse
import math
from textwrap import shorten
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepgraph.compiler.kernels.choices import Choice

HELP = "list, clear or repeat the measurements that chose kernels on this CPU"

EXAMPLES = """
examples:
  stepgraph cache                                what is kept, where, and how it was chosen
  stepgraph cache 'convolution*'                 only some operators
  stepgraph cache --measure --disturbed          measure again what a busy machine disturbed
  stepgraph cache --clear 'aten.addmm*'          forget some choices: the next compilation measures
  stepgraph cache --clear --others               remove files of other processors and versions of PyTorch
  stepgraph cache --json | jq '.choices[].chosen'
"""
SECONDS = 60  # for --measure
WIDEST = 48  # characters of shapes in the table; JSON has all of them
DISTURBED = """\
Something else that ran may have decided a disturbed choice. The next process that needs it measures it again; after the
third time, it is accepted. --measure --disturbed does so now."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `cache`."""
    parser.epilog = EXAMPLES
    parser.add_argument("pattern", metavar="OPERATOR", nargs="?", help="only operators like this; * matches anything")
    parser.add_argument("--disturbed", action="store_true", help="only choices that something else may have decided")
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--clear",
        action="store_true",
        help="forget them; without a selection, remove every file, those of fused steps too",
    )
    either.add_argument("--measure", action="store_true", help="measure them again now")
    parser.add_argument(
        "--others", action="store_true", help="with --clear: only files for other processors or versions"
    )
    parser.add_argument(
        "--seconds",
        metavar="N",
        type=_seconds,
        default=SECONDS,
        help=f"with --measure: when to start no further one ({SECONDS})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _seconds(text: str) -> float:
    """A duration, as `argparse` reads it."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: use a positive number of seconds")
    return found


def run(arguments: argparse.Namespace) -> int:
    """Clears, measures or lists choices."""
    from stepgraph.cli import kept, screen
    from stepgraph.errors import ArgumentError

    selects = arguments.pattern is not None or arguments.disturbed
    if arguments.others and (selects or not arguments.clear):
        problem = "--others stands for whole files, without a selection"
        raise ArgumentError("stepgraph cache", problem, fix="use stepgraph cache --clear --others")
    chosen = kept.Selection(arguments.pattern, arguments.disturbed)
    done: dict[str, Any] = {}
    if arguments.clear:
        done = {"cleared": kept.clear(chosen if selects else None, arguments.others)}
    elif arguments.measure:
        done = {"measured": kept.measure_again(chosen, arguments.seconds)}
    found = kept.look(chosen)
    if arguments.json:
        screen.show_json(done | found | {"choices": [kept.described(one) for one in found["choices"]]})
    else:
        screen.show(*_text(done, found, chosen.words))
    return 0


def _text(done: dict[str, Any], found: dict[str, Any], selection: str) -> list[Any]:
    parts: list[Any] = []
    if "cleared" in done:
        cleared = done["cleared"]
        parts = [f"Cleared {_count(cleared['choices'], 'choice')}, {_count(cleared['files'], 'file')} removed.", ""]
    if "measured" in done:
        parts = [*_measured(done["measured"]), ""]
    parts += ["Kernels chosen by measurement", _facts(found)]
    if found["choices"]:
        parts += ["", _table(found["choices"])]
    elif selection:
        parts += ["", f"No {selection}."]
    return [*parts, "", DISTURBED] if any(one.disturbed for one in found["choices"]) else parts


def _measured(done: dict[str, Any]) -> list[str]:
    count = _count(done["measured"], "choice")
    lines = [f"Measured {count} again: {done['changed']} changed, {done['disturbed']} disturbed."]
    if done["unchanged"]:
        lines.append(f"{_count(done['unchanged'], 'choice')} left as before: the new measurements were disturbed.")
    if done["cleared"]:
        lines.append(f"Cleared {_count(done['cleared'], 'choice')} that only a compilation can measure.")
    if done["left"]:
        lines.append(f"{_count(done['left'], 'choice')} left when the time was over: --seconds gives more.")
    return lines


def _facts(found: dict[str, Any]) -> Any:
    from stepgraph import draw
    from stepgraph.cli import screen

    if found["folder"] is None:
        return screen.facts({"folder": "none: there is no home directory, so each process measures again"})
    own, fused, compiler = found["own"], found["fused"], found["compiler"]
    holds = (
        f"{_count(own['choices'], 'choice')}, {own['disturbed']} of them disturbed" if own["choices"] else own["state"]
    )
    rows = {
        "folder": f"{found['folder']}, {draw.size(found['bytes'])}",
        "file": f"{own['file']}, {draw.size(own['bytes'])}",
        "holds": holds,
        "damaged": _count(own["damaged"], "line") + ", ignored" if own["damaged"] else "",
        "others": _others(found["others"]),
        "written": "" if found["writable"] else "no: the folder is read-only, so each process measures again",
        "fused": f"{_count(fused['steps'], 'step')}, {draw.size(fused['bytes'])}" if fused["steps"] else "",
        "PyTorch's compiler": f"{compiler['folder']}, {draw.size(compiler['bytes'])}" if compiler["exists"] else "",
    }
    return screen.facts({name: value for name, value in rows.items() if value})


def _others(files: Sequence[dict[str, Any]]) -> str:
    from stepgraph import draw

    if not files:
        return ""
    total = draw.size(sum(one["bytes"] for one in files))
    return f"{_count(len(files), 'file')} for other processors or versions, {total}"


def _table(choices: Sequence[Choice]) -> Any:
    from stepgraph.cli import kept, screen
    from stepgraph.errors import readable

    table = screen.columns("operator", "shapes", "threads", "chosen", "time", "second", "measured (UTC)", "")
    for one in choices:
        row = kept.described(one)
        second = "" if row["second"] is None else f"{row['second']} ×{row['ratio']:.2f}"
        taken, when = _time(one.seconds.get(one.chosen)), one.measured[:16].replace("T", " ")
        cells = (
            row["operator"],
            shorten(row["shapes"], WIDEST, placeholder=" …"),
            str(row["threads"]),
            one.chosen,
            taken,
            second,
            when,
        )
        table.add_row(*map(readable, cells), row["state"] if one.disturbed else "")
    return table


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    scale, unit = (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * scale:.3g} {unit}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
