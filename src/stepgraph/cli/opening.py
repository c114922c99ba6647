"""What a path on the command line refers to, and the graph in it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stepgraph.errors import ArgumentError, CheckpointError, StorageError, UnknownNameError, reason

if TYPE_CHECKING:
    from stepgraph.checkpoint.files import Content
    from stepgraph.cli.device_argument import DeviceArgument

SAVED = "pass a directory that training.save(path) wrote, or a folder with a series of them"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of commands that read a graph."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a saved graph, or a folder with a series of them")
    parser.add_argument(
        "--custom",
        metavar="CODE.py:CLASS",
        action="append",
        default=[],
        help="a custom class that the graph needs; its file is executed, as in your program. May be repeated",
    )


def seed(text: str) -> int:
    """A seed of random numbers, as `argparse` reads it."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed: use a number ≥ 0")
    return int(text)


def read(path: Path) -> Content:
    """A checkpoint with every byte verified; for anything else, the error says what it is."""
    from stepgraph.checkpoint import files

    if path.name == files.DESCRIPTION and path.is_file():
        path = path.parent
    if path.is_file():
        raise CheckpointError(f"{path}", f"it is {kind_of_file(path)}, not a saved graph", fix=_fix_for(path))
    if path.is_dir() and not (path / files.DESCRIPTION).exists() and files.latest(path) is None:
        raise CheckpointError(f"{path}", f"there is no complete checkpoint: no {files.DESCRIPTION}", **_nearby(path))
    return files.read(path)


def load(
    content: Content, custom: Sequence[type], device: DeviceArgument | None = None, *, inference: bool = False
) -> Any:
    """The graph of a checkpoint, compiled for a device if one is passed; with `inference`, without its loss."""
    from stepgraph import load as rebuilt

    try:
        if device is None:
            return rebuilt(content.path, custom=custom, inference=inference)
        return rebuilt(content.path, device.device(), custom=custom, inference=inference, **device.compilation)
    except CheckpointError as error:
        if "pass the class" in (error.fix or ""):
            error.fix = "pass the class: --custom layers.py:Class, with the file that defines it"
        raise


def classes(given: Sequence[str]) -> list[type]:
    """The classes that `--custom` names."""
    return [_class(one) for one in given]


def _class(given: str) -> type:
    where, _, name = given.rpartition(":")
    if not where or not name:
        raise ArgumentError("--custom", f"{given!r} does not name a class", fix="use file.py:Class or module:Class")
    module = _module(where)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        kinds = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
        here = ", ".join(one.__name__ for one in kinds) or "none"
        raise UnknownNameError("--custom", f"{where} has no class {name}", classes=here, fix="use one of its classes")
    return found


def _module(where: str) -> ModuleType:
    path = Path(where)
    if path.suffix == ".py" and not path.is_file():
        raise StorageError("--custom", f"there is no file {where}", fix="check the path")
    try:
        if path.suffix != ".py":
            sys.path.insert(0, "")  # as `python -m` would
            return import_module(where)
        spec = util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        sys.modules[path.stem] = module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as error:  # a user's file can raise anything
        problem = f"{where} cannot be imported: {type(error).__name__}: {reason(error)}"
        raise ArgumentError("--custom", problem, fix="use a file that can be imported without training") from error


def kind_of_file(path: Path) -> str:
    """What a file appears to be, by its first bytes."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise StorageError(f"{path}", f"it cannot be read: {error.strerror}", fix="check its permissions") from error
    if is_safetensors(start):
        return "a safetensors file, tensors without a graph"
    if start.startswith(b"PK\x03\x04"):
        return "a zip archive (PyTorch's torch.save and NumPy's savez write these)"
    if start.startswith(b"\x80"):
        return "a pickle, which stepgraph never opens"
    return "a NumPy array" if start.startswith(b"\x93NUMPY") else "a file of another kind" if start else "an empty file"


def is_safetensors(start: bytes) -> bool:
    """Whether a file begins with the length of a JSON object and the object, as safetensors files do."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 2**32


def _fix_for(path: Path) -> str:
    return f"pass its directory, {path.parent}" if (path.parent / "graph.json").exists() else SAVED


def _nearby(path: Path) -> dict[str, Any]:
    """Saved graphs one folder below."""
    below = sorted(found.parent for found in path.glob("*/graph.json"))
    series = sorted({found.parents[1] for found in path.glob("*/checkpoint-*/graph.json")})
    found = [str(one) for one in (*below, *series)]
    return {"below it": ", ".join(found), "fix": "pass one of those below it"} if found else {"fix": SAVED}
