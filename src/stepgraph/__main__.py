"""`python -m stepgraph` is the command `stepgraph`."""

import sys

from stepgraph.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
