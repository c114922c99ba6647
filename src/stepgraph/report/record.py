"""The record of a run: an append-only file of JSON lines.

The first line identifies the file. Every later one is an object with its `kind`: `begin`, `graph`, `memory`, `steps`,
`epoch`, `ranks`, `distributions`, `profile`, `end`. Each line is one write, so a process killed at any time
leaves a file with readable lines. At most the last one is incomplete, and a resumed run removes it first.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stepgraph.errors import ArgumentError, RunError, StorageError
from stepgraph.system.storage import open_regular, plain, read_regular, storage

FORMAT, VERSION = "stepgraph run", 1
FILE = "run.jsonl"
LARGEST = 2**30  # maximum bytes of a record; a million updates take about 20 MB
CHECKPOINTS = "checkpoints"


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(plain(line), separators=(",", ":"), allow_nan=False).encode()


HEADER = _encoded({"format": FORMAT, "version": VERSION})
LONGEST = 1000  # bytes of the first line that are read


class Record:
    """The file of a run, open for appending."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        with storage(folder, "written"):
            folder.mkdir(parents=True, exist_ok=True)
            whole = _whole_lines(self.path)
            # Unbuffered: one line is one write, and nothing is lost in this process when it is killed.
            self._file = self.path.open("ab", buffering=0)
            try:
                self._file.truncate(whole)
                if whole == 0:
                    self._append(HEADER)
            except BaseException:
                self._file.close()
                raise

    def add(self, kind: str, **fields: Any) -> None:
        """Appends one line."""
        self._write({"kind": kind, **fields})

    def close(self) -> None:
        """Ends appending."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        with storage(self.path.parent, "written"):
            self._append(_encoded(line))

    def _append(self, line: bytes) -> None:
        """Writes a line completely or not at all: a full disk may accept half of it, which is removed again."""
        content, whole = memoryview(line + b"\n"), os.fstat(self._file.fileno()).st_size
        try:
            while content:
                content = content[self._file.write(content) :]
        except BaseException:
            self._file.truncate(whole)
            raise


def check_new(folder: Path, resume: bool) -> None:
    """Rejects, before training, a folder that a run cannot be written to."""
    path = folder / FILE
    with storage(folder, "read"):
        if folder.exists() and not folder.is_dir():
            raise StorageError(f"{folder}", "it is a file, not a folder", fix="use another name for run=")
        if not path.exists():
            return
        with open_regular(path, RunError) as file:
            first = file.readline(LONGEST)
    if not first.endswith(b"\n") and HEADER.startswith(first):  # killed before it wrote anything
        return
    check_header(folder, first)
    if not resume:
        raise ArgumentError(
            "fit", f"there is already a run in {folder}", fix="pass resume=True to continue it, or another folder"
        )


def check_header(folder: Path, line: bytes) -> None:
    """Rejects a file written by another program or a newer version."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RunError(f"{folder}", f"{FILE} is not the record of a run", fix="pass a folder that fit(run=…) wrote")
    version = header.get("version")
    if version != VERSION or isinstance(version, bool):
        raise RunError(
            f"{folder}",
            f"the record has version {version!r}, but stepgraph reads {VERSION}",
            fix="update stepgraph",
        )


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last complete line."""
    return read_regular(path, LARGEST, RunError).rfind(b"\n") + 1 if path.exists() else 0
