"""The table of subcommands, the parser built from it, and error handling.

A subcommand is a module with `HELP`, `arguments(parser)` and `run(arguments)`, which returns the exit code. It imports
PyTorch only within `run`, so that help and completion respond immediately.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from stepgraph import __version__
from stepgraph.errors import StepgraphError, reason

COMMANDS = (
    "demo",
    "devices",
    "inspect",
    "compare",
    "report",
    "cache",
    "completion",
)
OK, FAILED, USAGE, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141

EXAMPLES = """\
examples:
  stepgraph demo --save run/demo                 train a small network and keep it
  stepgraph inspect run/demo                     its layers, parameters and memory
  stepgraph compare --devices cpu,gpu run/demo   whether both compute the same
  stepgraph COMMAND --help                       more about a command

exit codes:
  0    done
  1    an error, printed to stderr; or a comparison beyond its tolerance
  2    invalid command line
  130  interrupted with Ctrl-C
  141  the reader of the output has closed the pipe
"""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Leaves the examples unchanged, and puts every command and its help on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = max(len(name) for name in COMMANDS) + 4  # argparse ignores their indentation


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    made = argparse.ArgumentParser(
        prog="stepgraph",
        description="Static training graphs: inspect them, compare devices, see what this machine offers.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
    )
    made.add_argument("--version", action="version", version=f"stepgraph {__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name in COMMANDS:
        module = import_module(f"stepgraph.cli.{name}")
        one = commands.add_parser(
            name,
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            formatter_class=Formatter,
        )
        module.arguments(one)
        one.set_defaults(run=module.run)
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    parsing = parser()
    asked = parsing.parse_args(given)
    if asked.command is None:
        parsing.print_help(sys.stderr)
        return USAGE
    if sys.stdout is None:  # it was closed when the command was started
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that cannot show × must not end the command
        sys.stdout.reconfigure(errors="replace")
    try:
        if asked.command != "completion":
            # First, and completely: its modules import one another through the package, whose names come from there.
            import_module("stepgraph.public")
        code: int = asked.run(asked)
        sys.stdout.flush()
        return code
    except StepgraphError as error:
        print(error, file=sys.stderr)
        return FAILED
    except OSError as error:  # of the output: errors of files are our own
        _discard_output()
        if isinstance(error, BrokenPipeError):
            return NO_READER
        print(f"stepgraph {asked.command}: {reason(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _discard_output() -> None:
    """Sends what has not been written nowhere: otherwise Python reports at exit that it cannot be written."""
    with suppress(OSError):  # it has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
