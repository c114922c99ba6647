"""Static training graphs: wire layers, compile the step once, execute it whole or phase by phase.

    import stepgraph as sg

`public.py` is the table of contents. Its names are loaded when the first of them is used, so that importing the package
is fast and the command line can print its help without importing PyTorch.
"""

import typing as _typing

__version__ = "0.1.0"

if _typing.TYPE_CHECKING:
    from stepgraph import optimizers as optimizers
    from stepgraph.public import *
else:

    def _load() -> dict[str, _typing.Any]:
        from importlib import import_module

        public = vars(import_module("stepgraph.public"))
        names = {name: value for name, value in public.items() if not name.startswith("_")}
        globals().update(names)
        return names

    def __getattr__(name: str) -> _typing.Any:
        from importlib import import_module
        from importlib.util import find_spec

        if name == "__all__":  # for `from stepgraph import *`
            return sorted(_load())
        is_public = name.isidentifier() and not name.startswith("_")
        if is_public and find_spec(f"stepgraph.{name}") is not None:
            return import_module(f"stepgraph.{name}")
        if not is_public or name not in _load():
            raise AttributeError(f"module 'stepgraph' has no attribute '{name}'", name=name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *_load()})
