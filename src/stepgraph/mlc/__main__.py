"""`python -m stepgraph.mlc --coverage` counts the symbols, `--page` prints the documentation of all of them."""

from __future__ import annotations

import argparse
import sys

from stepgraph.mlc.coverage import missing, symbols
from stepgraph.mlc.page import page


def main(arguments: list[str] | None = None) -> int:
    """Prints the requested output; the exit status shows whether a symbol is missing."""
    parser = argparse.ArgumentParser(prog="python -m stepgraph.mlc", description="ML Compute over stepgraph.")
    parser.add_argument("--coverage", action="store_true", help="count the available public symbols")
    parser.add_argument("--page", action="store_true", help="print the documentation page")
    asked = parser.parse_args(arguments)
    if asked.page:
        sys.stdout.write(page())
        return 0
    if not asked.coverage:
        parser.print_help()
        return 2
    absent = missing()
    print(f"{len(symbols()) - len(absent)} of {len(symbols())} symbols")
    for name in absent:
        print(f"missing: {name}")
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
