"""Static training graphs: wire layers, compile the step once, execute it whole or phase by phase.

    import stepgraph as sg

`public.py` is the table of contents.
"""

import importlib
import sys
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _is_command() -> bool:
    """Whether this process is `stepgraph …` or `python -m stepgraph …`."""
    started = sys.argv[0] if sys.argv else ""
    # While Python looks for the module that `-m` names, `sys.argv[0]` is "-m".
    is_module = started == "-m" and ("-m", "stepgraph") in pairwise(sys.orig_argv)
    return is_module or PurePath(started).stem == "stepgraph"


if TYPE_CHECKING or not _is_command():
    from stepgraph.public import *
else:
    # The command line need not wait for PyTorch before it prints its help: the names come when one is asked for.
    def __getattr__(name: str) -> Any:
        public = importlib.import_module("stepgraph.public")
        # All at once: `fit` is a function here, also where its module was imported before.
        globals().update({one: value for one, value in vars(public).items() if not one.startswith("_")})
        if name not in globals():
            raise AttributeError(f"module 'stepgraph' has no attribute '{name}'", name=name, obj=sys.modules[__name__])
        return globals()[name]
