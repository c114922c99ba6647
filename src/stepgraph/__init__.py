"""Static training graphs: wire layers, compile the step once, execute it whole or phase by phase.

    import stepgraph as sg

`public.py` is the table of contents.
"""

import sys as _sys
import typing as _typing

__version__ = "0.1.0"


def _is_command() -> bool:
    """Whether this process is `stepgraph …` or `python -m stepgraph …`."""
    from itertools import pairwise
    from pathlib import PurePath

    started = _sys.argv[0] if _sys.argv else ""
    # While Python looks for the module that `-m` names, `sys.argv[0]` is "-m".
    is_module = started == "-m" and ("-m", "stepgraph") in pairwise(_sys.orig_argv)
    return is_module or PurePath(started).stem == "stepgraph"


if _typing.TYPE_CHECKING or not _is_command():
    from stepgraph.public import *
else:
    # The command line need not wait for PyTorch before it prints its help: the names come when one is asked for.
    def __getattr__(name: str) -> _typing.Any:
        from importlib import import_module

        public = import_module("stepgraph.public")
        # All at once: `fit` is a function here, also where its module was imported before.
        globals().update({one: value for one, value in vars(public).items() if not one.startswith("_")})
        if name not in globals():
            raise AttributeError(f"module 'stepgraph' has no attribute '{name}'", name=name, obj=_sys.modules[__name__])
        return globals()[name]
