"""The record of a run: one file of JSON lines that only grows.

The first line says what the file is. Every later one is an object with its `kind`: `begin`, `graph`, `memory`, `steps`,
`epoch`, `distributions`, `profile`, `end`. A line is written whole and at once, so that a process killed at any moment
leaves a file whose lines can be read; at most the last one is torn, and whoever goes on removes it first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepgraph.errors import ArgumentError, RunError, StorageError, reason
from stepgraph.history import plain

FORMAT, VERSION = "stepgraph run", 1
FILE = "run.jsonl"
CHECKPOINTS = "checkpoints"


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(plain(line), separators=(",", ":"), allow_nan=False).encode()


HEADER = _encoded({"format": FORMAT, "version": VERSION})


class Record:
    """The file of a run, open for appending."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        with storage(folder, "written"):
            folder.mkdir(parents=True, exist_ok=True)
            whole = _whole_lines(self.path)
            # Unbuffered: one line is one write, and nothing waits in this process when it is killed.
            self._file = self.path.open("ab", buffering=0)
            self._file.truncate(whole)
            if whole == 0:
                self._file.write(HEADER + b"\n")

    def add(self, kind: str, **fields: Any) -> None:
        """Appends one line."""
        self._write({"kind": kind, **fields})

    def close(self) -> None:
        """Ends appending."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        with storage(self.path.parent, "written"):
            self._file.write(_encoded(line) + b"\n")


def check_new(folder: Path, resume: bool) -> None:
    """Refuses, before anything is trained, a folder that a run cannot be written to."""
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder}", "it is a file, not a folder", fix="give another name for run=")
    path = folder / FILE
    if not path.exists():
        return
    with storage(folder, "read"), path.open("rb") as file:
        first = file.readline()
    if not first.endswith(b"\n") and HEADER.startswith(first):  # killed before it had written anything
        return
    check_header(folder, first)
    if not resume:
        raise ArgumentError(
            "fit", f"there is a run in {folder} already", fix="give resume=True to go on with it, or another folder"
        )


def check_header(folder: Path, line: bytes) -> None:
    """Refuses a file that another program or a newer version wrote."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RunError(f"{folder}", f"{FILE} is not the record of a run", fix="give a folder that fit(run=…) wrote")
    version = header.get("version")
    if version != VERSION or isinstance(version, bool):
        raise RunError(
            f"{folder}", f"its record has version {version!r}, this stepgraph reads {VERSION}", fix="update stepgraph"
        )


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


@contextmanager
def storage(folder: Path, done: str) -> Iterator[None]:
    """Turns what the file system says into one kind of error."""
    try:
        yield
    except OSError as error:
        said = error.strerror or reason(error)
        failed = StorageError(
            f"{folder}", f"it cannot be {done}: {said}", fix="check the path, its rights and the space"
        )
        failed.errno = error.errno
        raise failed from error
