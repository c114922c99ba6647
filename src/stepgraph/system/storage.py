"""File access: valid paths, regular files of bounded size, one kind of error."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

from stepgraph.errors import ArgumentError, DataTypeError, StepgraphError, StorageError, reason

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PATIENCE = 60.0  # seconds to wait for another process that writes to the same folder
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def as_path(where: str, given: Any) -> Path:
    """`given` as a path, if it is valid."""
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str):
        raise DataTypeError(where, f"the path is {type(given).__name__}", fix="pass a directory's name")
    if not text:
        raise ArgumentError(where, "the path is empty", fix="pass a directory's name; '.' is the working directory")
    if "\0" in text:
        raise ArgumentError(where, f"the path {text!r} contains a NUL character", fix="use another name")
    return Path(text)


@contextmanager
def storage(path: Path, done: str, *also: type[Exception]) -> Iterator[None]:
    """Converts errors of the file system into one kind of error.

    Args:
        path: what is being read or written.
        done: `"read"` or `"written"`.
        also: other exceptions that mean the same.
    """
    meant: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except StepgraphError:
        raise
    except meant as error:
        message = getattr(error, "strerror", None) or reason(error)
        failed = StorageError(f"{path}", f"it cannot be {done}: {message}", fix="check path, permissions and space")
        failed.errno = getattr(error, "errno", None)
        raise failed from error


@contextmanager
def own_turn(folder: Path) -> Iterator[None]:
    """Lets one process at a time write to a folder, such as ranks that all save the same inference graph.

    After a minute, or where the file system has no locks, it goes on without.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _is_locked(handle) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def _is_locked(handle: int) -> bool:
    """Locks an open file; False if another process has locked it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True


def read_regular(path: Path, most: int, refusal: type[StepgraphError]) -> bytes:
    """All bytes of a regular file of at most `most` bytes.

    Args:
        path: the file; a link to one is followed.
        most: the maximum size; a larger file is rejected unread.
        refusal: the error to raise for a pipe, a device, a socket or a directory, which may never end, and for a file
            that is too large.
    """
    with open_regular(path, refusal) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise refusal(
                f"{path.parent}",
                f"{path.name} has {size:,} bytes, more than the maximum of {most:,}",
                fix="use another one",
            )
        return whole(file, size, path.parent, refusal)


def whole(file: BinaryIO, size: int, folder: Path, refusal: type[StepgraphError]) -> bytes:
    """The first `size` bytes of an open file; raises an error if they do not fit into memory."""
    try:
        return file.read(size)
    except (MemoryError, OverflowError):
        raise refusal(f"{folder}", f"a file has {size:,} bytes, too large for memory", fix="free memory") from None


def open_regular(path: Path, refusal: type[StepgraphError]) -> BinaryIO:
    """A regular file, open for reading; anything else is rejected without blocking."""
    # Checked before opening, which a device may notice, and again afterwards, when it can no longer be replaced.
    _require_regular(path, path.stat(), refusal)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _require_regular(path, os.fstat(handle), refusal)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def append_regular(path: Path, data: bytes, most: int, refusal: type[StepgraphError]) -> None:
    """Appends to a regular file, which is created if necessary, in one write that others cannot interleave.

    Args:
        path: the file; a link to one is followed.
        data: the bytes to append.
        most: the maximum size; a larger file is left alone.
        refusal: the error to raise for a pipe, a device or a socket, and for a file that is too large.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags, 0o666)
    try:
        found = os.fstat(handle)
        _require_regular(path, found, refusal)
        if found.st_size + len(data) > most:
            raise refusal(f"{path.parent}", f"{path.name} has {found.st_size:,} bytes", fix="remove it")
        os.write(handle, data)
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file at once: a reader sees the old or the new one."""
    partial = path.with_name(f".{path.name}.{token_hex(4)}.partial")
    with storage(path, "written"):
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def _require_regular(path: Path, found: os.stat_result, refusal: type[StepgraphError]) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise refusal(f"{path.parent}", f"{path.name} is {kind}, not a regular file", fix="use another one")


def require_writable(folder: Path) -> None:
    """Creates a folder and a file in it, to check that it is writable, and removes the file again."""
    probe = folder / f".writable-{os.getpid()}"
    with storage(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.touch()
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """Values as JSON: NaN and infinities as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def real(value: Any) -> Any:
    """The numbers written by `plain`."""
    if isinstance(value, str):
        return float(value)
    if isinstance(value, dict):
        return {name: real(one) for name, one in value.items()}
    return [real(one) for one in value] if isinstance(value, list) else value
