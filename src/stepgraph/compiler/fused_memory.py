"""The memory of a fused step: what the code that PyTorch's compiler generated allocates and frees, and when.

The code runs once on arrays without memory, with kernels that do nothing. Unlike an estimate, this includes every
buffer that the compiler reuses, keeps for longer, or writes in place.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stepgraph.compiler.memory import Timeline, kind_of
from stepgraph.compiler.operators import TABLE
from stepgraph.compiler.program import Notes
from stepgraph.system import torch_private

ALLOCATE, KERNEL = "empty_strided_", "cpp_"
BLOCK = 512  # bytes; allocators round up to whole blocks
_WITHOUT_KERNELS = {torch.ops.aten.empty_strided.default, torch.ops.aten.as_strided.default}
_NODES = re.compile(r"# .*Source Nodes: \[([^\]]*)\]")


def timeline(module: Any, arrays: Sequence[torch.Tensor], known: Mapping[str, Notes]) -> Timeline:
    """Live bytes by kind at each kernel, with its layer and phase.

    Args:
        module: the generated code.
        arrays: what the step reads, as arrays without memory.
        known: the notes of the operators that were compiled, by name.
    """
    function = getattr(module.call, "__func__", module.call)
    source = getattr(module, "source", None) or Path(str(module.__file__)).read_text()
    watch = _Watch(function, _origins(source.splitlines(), known))
    names = {**function.__globals__, **_stand_ins(function.__globals__, watch)}
    dry = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    owner = (module.call.__self__,) if hasattr(module.call, "__self__") else ()
    mode = arrays[0].fake_mode if arrays else torch_private.FakeTensorMode()  # type: ignore[attr-defined]
    for array in arrays:
        watch.ignore(array)
    with mode, watch:
        results = dry(*owner, list(arrays))
        watch.launched()
    del results
    return watch.found


def _stand_ins(names: Mapping[str, Any], watch: _Watch) -> dict[str, Any]:
    """What generated code calls instead of kernels and of functions that need memory."""
    found: dict[str, Any] = {}
    for name, one in names.items():
        if name.startswith(ALLOCATE):
            found[name] = _allocating(name.removeprefix(ALLOCATE))
        elif name.startswith(KERNEL) and callable(one):
            found[name] = watch.launched
        elif hasattr(one, "run") and not isinstance(one, ModuleType | type):
            found[name] = SimpleNamespace(run=watch.launched)
    return {**found, "reinterpret_tensor": _viewed, "assert_size_stride": _nothing, "assert_alignment": _nothing}


def _allocating(device: str) -> Callable[..., torch.Tensor]:
    kind = device.partition("_")[0]  # of pinned memory, too
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=kind)


def _viewed(array: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    return array.as_strided(size, stride, array.storage_offset() + offset)


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for a check."""


def _origins(lines: Iterable[str], known: Mapping[str, Notes]) -> dict[int, Notes]:
    """By line number: the operators that the generated code names there, the last of them."""
    found: dict[int, Notes] = {}
    for number, line in enumerate(lines, 1):
        named = _NODES.search(line)
        operators = [known[name] for name in named[1].split(", ") if name in known] if named else []
        if operators:
            found[number] = operators[-1]
    return found


class _Watch(torch_private.DispatchMode):
    """Notices every new array and counts what is alive at each kernel."""

    def __init__(self, function: FunctionType, origins: Mapping[int, Notes]) -> None:
        super().__init__()
        self._code, self._origins = function.__code__, origins
        self._ignored: set[StorageWeakRef] = set()
        self._alive: dict[StorageWeakRef, tuple[int, str]] = {}
        self._new: list[tuple[StorageWeakRef, int]] = []
        self._line, self._notes = 0, Notes()
        self.found: Timeline = []

    def ignore(self, array: torch.Tensor) -> None:
        """Does not count an array, which the caller holds."""
        self._ignored.add(StorageWeakRef(array.untyped_storage()))

    def launched(self, *_: Any, **__: Any) -> None:
        """Stands for a kernel."""
        self._launch(workspace=0)

    def _launch(self, workspace: int) -> None:
        """Counts what is alive while a kernel runs."""
        line = self._current_line()
        passed = [self._origins[one] for one in range(self._line, line + 1) if one in self._origins]
        self._line, self._notes = line, passed[-1] if passed else self._notes
        kind = kind_of(self._notes.phase)
        self._alive |= {one: (size, kind) for one, size in self._new}
        self._new.clear()
        live: dict[str, int] = defaultdict(int, workspace=workspace)
        for one, (size, what) in [*self._alive.items()]:
            if one.expired():
                del self._alive[one]
            else:
                live[what] += size
        self.found.append((self._notes.layer, self._notes.phase, dict(live)))

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = target(*args, **(kwargs or {}))
        torch_private.tree_map_only(torch.Tensor, self._notice, found)
        if target not in _WITHOUT_KERNELS:
            workspace = TABLE[target].workspace if target in TABLE else None
            self._launch(0 if workspace is None else workspace(args, 0))
        return found

    def _notice(self, array: torch.Tensor) -> torch.Tensor:
        one = StorageWeakRef(array.untyped_storage())
        if one not in self._ignored and one not in self._alive and one not in (new for new, _ in self._new):
            self._new.append((one, -(-array.untyped_storage().nbytes() // BLOCK) * BLOCK))
        return array

    def _current_line(self) -> int:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        return self._line if frame is None else frame.f_lineno
