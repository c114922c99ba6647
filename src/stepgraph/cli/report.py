"""`stepgraph report RUN`: the page of one or more training runs, as a file or served during training."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from stepgraph.errors import readable

if TYPE_CHECKING:
    from stepgraph.report.run import Run

HELP = "write the page of a training run, or serve it during training"

EXAMPLES = """
examples:
  stepgraph report runs/first                    write runs/first/report.html
  stepgraph report runs/first --open             and open it
  stepgraph report runs/first runs/second        curves of both in one page, report.html
  stepgraph report runs/first --live --open      follow a running training; Ctrl-C ends it
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `report`."""
    parser.epilog = EXAMPLES
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a folder that fit(run=…) wrote")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="the page; by default report.html in the run, or here for several"
    )
    parser.add_argument("--live", action="store_true", help="serve the page on 127.0.0.1 and keep it up to date")
    parser.add_argument("--port", metavar="N", type=int, default=0, help="the port to serve it on (any free port)")
    parser.add_argument("--until-finished", action="store_true", help="stop serving some seconds after the run ends")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(arguments: argparse.Namespace) -> int:
    """Writes or serves the page."""
    from stepgraph.report import page
    from stepgraph.report.run import Run

    runs = [Run(folder) for folder in arguments.runs]
    if arguments.live:
        return _serve(arguments, runs)
    default = arguments.runs[0] / page.FILE if len(runs) == 1 else Path(page.FILE)
    target = arguments.output or default
    page.write(target, runs)
    print(readable(str(target)))
    if arguments.open:
        webbrowser.open(target.resolve().as_uri())
    return 0


def _serve(arguments: argparse.Namespace, runs: list[Run]) -> int:
    from stepgraph.report.live import LiveServer

    server = LiveServer(runs, arguments.port)
    print(f"{server.url}  (Ctrl-C ends it)", flush=True)
    if arguments.open:
        webbrowser.open(server.url)
    try:
        server.serve(arguments.until_finished)
    except KeyboardInterrupt:  # the intended way to end it
        print()
    return 0
