"""A checkpoint on disk: one directory with `graph.json` and one safetensors file.

New tensors are written next to the old ones, under a name derived from their checksum; then `graph.json` is replaced
with one rename. The directory always holds the old or the new checkpoint, and one without `graph.json`
was never complete. Both files are checksummed, so any changed byte is detected before anything is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors

from stepgraph.checkpoint.tensors_file import Stored, save_file
from stepgraph.errors import ArgumentError, CheckpointError, DataTypeError, StorageError, reason
from stepgraph.system.storage import as_path, open_regular, own_turn, read_regular, storage, whole

FORMAT, VERSION = "stepgraph", 1
DESCRIPTION = "graph.json"
LARGEST_DESCRIPTION = 2**28  # bytes; a graph of a million nodes stays below
LINE, DEEPEST = 200, 20  # characters per line, and the depth below which there are no new lines
_TENSORS = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
_UNFINISHED = re.compile(r"\.tmp[0-9A-Za-z]{6}")  # left behind by earlier versions that were killed
_MEMBER = re.compile(r"checkpoint-(\d{6,})")
_SIGNED = re.compile(rb'(.*,\n "sha256": ")([0-9a-f]{64})"\n}\n', re.DOTALL)
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Content:
    """A checkpoint that was read and verified."""

    path: Path
    description: dict[str, Any]
    arrays: dict[str, torch.Tensor]


# Writing


def write(path: Path, description: Mapping[str, Any], arrays: Mapping[str, Stored]) -> None:
    """Writes a checkpoint to `path`, replacing an existing one; a failure leaves that one unchanged."""
    with storage(path, "written"):
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        with storage(path, "written"):
            path.mkdir(parents=True, exist_ok=True)
            with own_turn(path):
                _replace(path, description, arrays)
    except BaseException:
        with suppress(OSError):
            for folder in new:
                folder.rmdir()
        raise


def _replace(path: Path, description: Mapping[str, Any], arrays: Mapping[str, Stored]) -> None:
    try:
        tensors = _write_tensors(path, arrays)
        _write_description(path, {"format": FORMAT, "version": VERSION, "tensors_file": tensors, **description})
        _sync_folder(path.parent)
    except BaseException:
        _discard(path, keep=_tensors_in_use(path))
        raise
    _discard(path, keep=tensors["name"])


def _write_tensors(path: Path, arrays: Mapping[str, Stored]) -> dict[str, Any]:
    partial = path / ("tensors" + _PARTIAL)
    save_file(arrays, partial)
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    name = f"tensors-{digest[:16]}.safetensors"
    partial.replace(path / name)
    _sync_folder(path)
    return {"name": name, "bytes": size, "sha256": digest}


def _write_description(path: Path, description: Mapping[str, Any]) -> None:
    try:
        members = ",\n".join(f" {json.dumps(name)}: {_pretty(value, 1)}" for name, value in description.items())
    except RecursionError:
        raise DataTypeError("save", "the notes are nested too deeply to be written", fix="pass flatter ones") from None
    body = f'{{\n{members},\n "sha256": "'
    signed = f'{body}{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'.encode()
    if len(signed) > LARGEST_DESCRIPTION:
        raise ArgumentError(
            "save",
            f"{DESCRIPTION} would have {len(signed):,} bytes, more than the maximum of {LARGEST_DESCRIPTION:,}",
            fix="pass shorter notes",
        )
    partial = path / (DESCRIPTION + _PARTIAL)
    with partial.open("wb") as file:
        file.write(signed)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path / DESCRIPTION)
    _sync_folder(path)


def _pretty(value: Any, depth: int) -> str:
    """Readable and diffable JSON: what fits on a line is written on one."""
    line = json.dumps(value, allow_nan=False)
    if len(line) + depth <= LINE or depth > DEEPEST or not isinstance(value, dict | list):
        return line
    indent, closing = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, list):
        return f"[{indent}{f',{indent}'.join(_pretty(one, depth + 1) for one in value)}{closing}]"
    members = (f"{json.dumps(name)}: {_pretty(one, depth + 1)}" for name, one in value.items())
    return f"{{{indent}{f',{indent}'.join(members)}{closing}}}"


def _sync_folder(path: Path) -> None:
    """Makes renames in a folder durable; Windows does not support this."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _tensors_in_use(path: Path) -> str | None:
    """The tensors file that `graph.json` names; "" if there is none, None if that is unknown."""
    with suppress(CheckpointError, OSError):  # a StorageError is one
        if not (path / DESCRIPTION).exists():
            return ""
        return str(read_description(path)["tensors_file"]["name"])
    return None


def _discard(path: Path, keep: str | None) -> None:
    """Removes files left by an interrupted or earlier save; other files stay."""
    with suppress(OSError):
        for file in path.iterdir():
            is_old = _TENSORS.fullmatch(file.name) is not None and keep is not None and file.name != keep
            is_partial = file.name in ("tensors" + _PARTIAL, DESCRIPTION + _PARTIAL)
            if is_old or is_partial or _UNFINISHED.fullmatch(file.name):
                file.unlink(missing_ok=True)


# Reading


def read(given: Path) -> Content:
    """The checkpoint at a path, or the latest of the series in it; raises unless every byte is as it was written."""
    path = find(given)
    description = read_description(path)
    stored = description["tensors_file"]
    try:
        with storage(path, "read"):
            raw = _read_tensors(path, stored)
    except StorageError:
        if read_description(path) != description:  # it was replaced while being read
            return read(given)
        raise
    try:
        # Copied into torch's own memory: alignment decides which instructions sum, and so the last bits.
        return Content(path, description, {name: array.clone() for name, array in load_tensors(raw).items()})
    except Exception as error:  # even a signed file may contain anything
        raise CheckpointError(
            f"{path}", f"{stored['name']} holds no tensors: {reason(error)}", fix="use another checkpoint"
        ) from error


def _read_tensors(path: Path, stored: Mapping[str, Any]) -> bytes:
    """The tensors file, if its length and checksum match the description; it is not read if the length differs."""
    with open_regular(path / stored["name"], CheckpointError) as file:
        size = os.fstat(file.fileno()).st_size
        raw = whole(file, size, path, CheckpointError) if size == stored["bytes"] else b""
    if len(raw) == size == stored["bytes"] and hashlib.sha256(raw).hexdigest() == stored["sha256"]:
        return raw
    raise CheckpointError(
        f"{path}",
        f"{stored['name']} is damaged: its {size} bytes do not match the checksum of the {stored['bytes']} written",
        fix="use another checkpoint",
        **_others(path),
    )


def read_description(path: Path) -> dict[str, Any]:
    """`graph.json` of a checkpoint, verified."""
    with storage(path, "read"):
        raw = read_regular(path / DESCRIPTION, LARGEST_DESCRIPTION, CheckpointError)
    try:
        description = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}",
            f"{DESCRIPTION} is damaged or not JSON: {reason(error)}",
            fix="use another checkpoint",
            **_others(path),
        ) from None
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}", f"{DESCRIPTION} was not written by stepgraph", fix="pass the directory of a checkpoint"
        )
    version = description.get("version")
    if version != VERSION or isinstance(version, bool):
        raise CheckpointError(
            f"{path}", f"its format has version {version!r}, but this stepgraph reads {VERSION}", fix="update stepgraph"
        )
    signed = _SIGNED.fullmatch(raw)
    if signed is None or hashlib.sha256(signed[1]).hexdigest().encode() != signed[2]:
        raise CheckpointError(
            f"{path}",
            f"{DESCRIPTION} does not match its checksum: it is damaged or was changed",
            fix="use another checkpoint",
            **_others(path),
        )
    _check_reference(path, description)
    return description


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_reference(path: Path, description: Mapping[str, Any]) -> None:
    stored = description.get("tensors_file")
    kinds = {"name": str, "bytes": int, "sha256": str}
    if (
        not isinstance(stored, dict)
        or not all(isinstance(stored.get(name), kind) for name, kind in kinds.items())
        or not _TENSORS.fullmatch(stored["name"])
    ):
        raise CheckpointError(f"{path}", f"{DESCRIPTION} names no tensors file", fix="use another checkpoint")


# A series of checkpoints in one folder


def find(path: Path) -> Path:
    """The checkpoint that a path refers to: itself, or the latest of the series in it."""
    with storage(path, "read"):
        if (path / DESCRIPTION).exists():
            return path
        if not path.exists():
            raise StorageError(f"{path}", "there is no such directory", fix="pass the path that was saved to")
    found = latest(path)
    if found is None:
        raise CheckpointError(
            f"{path}", f"there is no complete checkpoint: no {DESCRIPTION}", fix="pass the path that was saved to"
        )
    return found


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint of the series that `save(folder, keep=…)` wrote, or None.

    Example:
        >>> latest(".") is None
        True
    """
    return next((path for _, path in reversed(_members(as_path("latest", folder))) if _is_complete(path)), None)


def next_member(folder: Path) -> Path:
    """The path of the next checkpoint of a series: numbers increase in the order of saving."""
    members = _members(folder)
    return folder / f"checkpoint-{members[-1][0] + 1 if members else 1:06d}"


def rotate(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` complete checkpoints of a series, and incomplete ones before the newest."""
    members = [path for _, path in _members(folder)]
    complete = [path for path in members if _is_complete(path)]
    kept = complete[-keep:]
    for path in members[: members.index(complete[-1])] if complete else ():
        if path not in kept:
            _remove(path)


def check_keep(keep: Any) -> int | None:
    """`keep` if it is a count of checkpoints, or None."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ArgumentError("save", f"keep is {keep!r}", fix="pass the number of checkpoints to keep, at least 1")
    return keep


def _members(folder: Path) -> list[tuple[int, Path]]:
    with storage(folder, "read"):
        if not folder.is_dir():
            return []
        names = [_MEMBER.fullmatch(path.name) for path in folder.iterdir()]
    return sorted((int(found[1]), folder / found[0]) for found in names if found)


def _is_complete(path: Path) -> bool:
    """Whether both files exist, the description is intact and the tensors have the right length."""
    with suppress(CheckpointError, StorageError, OSError):
        stored = read_description(path)["tensors_file"]
        return (path / stored["name"]).stat().st_size == stored["bytes"]
    return False


def _remove(path: Path) -> None:
    """Deletes a checkpoint, the description first; a folder with other files stays."""
    with suppress(OSError):
        (path / DESCRIPTION).unlink(missing_ok=True)
        _discard(path, keep="")
        path.rmdir()


def _others(path: Path) -> dict[str, str]:
    """Other checkpoints of the series that a damaged one belongs to, for its message."""
    if not _MEMBER.fullmatch(path.name):
        return {}
    with suppress(OSError):
        others = [one.name for _, one in _members(path.parent) if one != path and (one / DESCRIPTION).exists()]
        return {"others": ", ".join(others)} if others else {}
    return {}
