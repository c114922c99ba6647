"""What the cache folder keeps, as plain values; clearing it, and measuring again."""

from __future__ import annotations

import getpass
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from stepgraph.compiler import fused_cache, kept_files, kept_launches
from stepgraph.compiler.kernels import choose, measure
from stepgraph.compiler.kernels.choices import CHOICES, Choice, Question, cache_folder, other_files
from stepgraph.compiler.tuned import MANIFEST
from stepgraph.errors import StepgraphError
from stepgraph.system import surroundings
from stepgraph.system.storage import storage


@dataclass(frozen=True)
class Selection:
    """Which choices a command is about.

    Args:
        pattern: a pattern that the operator matches, or None for all.
        disturbed: whether only disturbed ones count.
    """

    pattern: str | None
    disturbed: bool

    @property
    def words(self) -> str:
        """What it selects, in words; empty if that is everything."""
        kind = "disturbed choice" if self.disturbed else "choice"
        if self.pattern is not None:
            return f"{kind} of an operator like {self.pattern!r}"
        return kind if self.disturbed else ""

    def __call__(self, choice: Choice) -> bool:
        """Whether it selects a choice."""
        named = self.pattern is None or fnmatchcase(choice.question.operator, self.pattern)
        return named and (choice.disturbed or not self.disturbed)


def look(selection: Selection) -> dict[str, Any]:
    """Everything that `stepgraph cache` shows; `choices` has the selected ones."""
    folder, own = cache_folder(), CHOICES.file
    every = CHOICES.stored()
    compiler, steps = compiler_folder(), fused_cache.files()
    return {
        "folder": None if folder is None else str(folder),
        "bytes": 0 if folder is None else _bytes(folder),
        "writable": folder is None or _is_writable(folder),
        "own": {
            "file": None if own is None else str(own),
            "bytes": 0 if own is None else _bytes(own),
            "choices": len(every),
            "disturbed": sum(one.disturbed for one in every),
            "damaged": CHOICES.damaged(),
            "state": "kept" if every else _state(own),
        },
        "others": [{"file": str(one), "bytes": _bytes(one)} for one in other_files()],
        "fused": {"folder": str(kept_files.folder()), "steps": len(steps), "bytes": sum(map(_bytes, _of_steps()))},
        "compiler": {"folder": str(compiler), "exists": compiler.is_dir(), "bytes": _bytes(compiler)},
        "choices": sorted(filter(selection, every), key=lambda one: (one.question.operator, one.question.key)),
    }


def described(choice: Choice) -> dict[str, Any]:
    """A choice as a program reads it."""
    question, taken = choice.question, choice.seconds.get(choice.chosen)
    others = {name: one for name, one in choice.seconds.items() if name != choice.chosen}
    second = min(others, key=others.__getitem__, default=None) if taken else None
    return {
        "operator": question.operator,
        "shapes": _shapes(question.arguments),
        "arguments": list(question.arguments),
        "threads": question.threads,
        "implementations": list(question.implementations),
        "chosen": choice.chosen,
        "seconds": dict(choice.seconds),
        "spread": dict(choice.spread),
        "second": second,
        "ratio": others[second] / taken if second and taken else None,
        "measured": choice.measured,
        "disturbed": choice.disturbed,
        "tries": choice.tries,
        "state": _standing(choice),
    }


def clear(selection: Selection | None, others: bool) -> dict[str, int]:
    """Removes choices, and returns how many choices and files.

    Args:
        selection: what to remove from the file for this processor and PyTorch; None removes whole files.
        others: whether to keep the file for this processor and PyTorch, and the files of fused steps.
    """
    if selection is not None:
        return {"choices": CHOICES.drop(selection), "files": 0}
    own = [] if others or CHOICES.file is None or not CHOICES.file.exists() else [CHOICES.file]
    count = len(CHOICES.stored()) if own else 0
    files = [*own, *other_files(), *([] if others else _of_steps())]
    for one in files:
        with storage(one, "removed"):
            one.unlink(missing_ok=True)
    CHOICES.forget()
    return {"choices": count, "files": len(files)}


def _of_steps() -> list[Path]:
    """The files of fused steps."""
    return fused_cache.files() + kept_launches.files()


def measure_again(selection: Selection, seconds: float) -> dict[str, int]:
    """Measures choices again; those that only a compilation can measure are cleared, so that the next one does.

    Args:
        selection: which choices.
        seconds: the time after which no further measurement begins.
    """
    wanted = [one for one in CHOICES.stored() if selection(one)]
    offered = [one for row in MANIFEST for one in row.offers]
    done, impossible, began = list[tuple[Choice, Choice]](), set[str](), time.monotonic()
    left = 0
    for one in wanted:
        if time.monotonic() - began > seconds:
            left += 1
        elif (found := _measured_again(one, choose.implementations(one.question, offered))) is None:
            impossible.add(one.question.key)
        else:
            done.append((one, found))
    if impossible:
        CHOICES.drop(lambda one: one.question.key in impossible)
    return {
        "measured": len(done),
        "changed": sum(before.chosen != after.chosen for before, after in done),
        "disturbed": sum(after.disturbed for _, after in done),
        "unchanged": sum(before == after for before, after in done),  # a disturbed measurement replaces no other
        "cleared": len(impossible),
        "left": left,
    }


def _measured_again(choice: Choice, implementations: measure.Implementations | None) -> Choice | None:
    """The choice, measured now; None if that needs the graph or arguments that the file cannot hold."""
    if implementations is None:
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(choice.question.threads)
    rules = {name: value for name, value in choice.rules.items() if name in measure.RULES}
    try:
        with surroundings.tracing():
            arguments = _arguments(choice.question)
            return measure.chosen_anew(choice.question, implementations, arguments, **rules)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, StepgraphError):
        return None
    finally:
        torch.set_num_threads(threads)


def _arguments(question: Question) -> list[Any]:
    """The arguments that a question was asked with; arrays have no memory."""
    return [_array(one) if isinstance(one, dict) else one for one in question.arguments]


def _array(described: dict[str, Any]) -> torch.Tensor:
    kind = getattr(torch, described["type"].removeprefix("torch."))
    return torch.empty_strided(described["shape"], described["strides"], dtype=kind, device="meta")


def compiler_folder() -> Path:
    """Where PyTorch's compiler keeps its kernels; importing it to ask takes seconds."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(given).absolute() if given else Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        return f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"


def _shapes(arguments: Iterable[Any]) -> str:
    """The shapes of arrays, and types that distinguish them from the same in float32."""
    arrays = [one for one in arguments if isinstance(one, dict) and isinstance(one.get("shape"), list)]
    kinds = {str(one.get("type")).removeprefix("torch."): None for one in arrays}
    others = [kind for kind in kinds if "float" in kind and kind != "float32"]
    shapes = ", ".join("×".join(map(str, one["shape"])) for one in arrays)
    return f"{shapes} in {' and '.join(others)}" if others else shapes


def _standing(choice: Choice) -> str:
    if not choice.disturbed:
        return "settled"
    return f"disturbed {choice.tries}×" + (", accepted" if choice.settled else "")


def _state(file: Path | None) -> str:
    if file is None or not file.exists():
        return "nothing: the first compilation creates it"
    return "nothing" if file.is_file() else "nothing: it is not a regular file, so each process measures again"


def _bytes(path: Path) -> int:
    """The size of a file, or of everything in a folder, as far as it can be read."""
    if not path.is_dir():
        return path.stat().st_size if path.is_file() else 0
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += Path(folder, name).lstat().st_size
            except OSError:  # another process has removed it
                continue
    return total


def _is_writable(folder: Path) -> bool:
    """Whether files can be created in a folder, or the folder itself."""
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    return os.access(existing, os.W_OK | os.X_OK)
