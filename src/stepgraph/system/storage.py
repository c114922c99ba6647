"""Files as the library meets them: paths that can be paths, regular files of a known size, one kind of error."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from stepgraph.errors import ArgumentError, DataTypeError, StepgraphError, StorageError, reason

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def as_path(where: str, given: Any) -> Path:
    """`given` as a path, if it can be one."""
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str):
        raise DataTypeError(where, f"the path is {type(given).__name__}", fix="give a directory's name")
    if not text:
        raise ArgumentError(where, "the path is empty", fix="give a directory's name; '.' is the working directory")
    if "\0" in text:
        raise ArgumentError(where, f"the path {text!r} holds a NUL character", fix="give another name")
    return Path(text)


@contextmanager
def storage(path: Path, done: str, *also: type[Exception]) -> Iterator[None]:
    """Turns what the file system says into one kind of error.

    Args:
        path: what is being read or written.
        done: `"read"` or `"written"`.
        also: further exceptions that mean the same.
    """
    meant: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except StepgraphError:
        raise
    except meant as error:
        said = getattr(error, "strerror", None) or reason(error)
        failed = StorageError(f"{path}", f"it cannot be {done}: {said}", fix="check the path, its rights and the space")
        failed.errno = getattr(error, "errno", None)
        raise failed from error


def read_regular(path: Path, most: int, refusal: type[StepgraphError]) -> bytes:
    """All bytes of a regular file of at most `most` bytes.

    Args:
        path: the file; a link to one is followed.
        most: bytes above which it is refused unread.
        refusal: what to raise for a pipe, a device, a socket or a directory, which may never end, and for a file that
            is too large.
    """
    with open_regular(path, refusal) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise refusal(
                f"{path.parent}",
                f"{path.name} has {size:,} bytes, more than the {most:,} that are read",
                fix="give another one",
            )
        return whole(file, size, path.parent, refusal)


def whole(file: BinaryIO, size: int, folder: Path, refusal: type[StepgraphError]) -> bytes:
    """The first `size` bytes of an open file, refused where this machine has no memory for them."""
    try:
        return file.read(size)
    except (MemoryError, OverflowError):
        raise refusal(f"{folder}", f"a file has {size:,} bytes, too many for the memory", fix="free some") from None


def open_regular(path: Path, refusal: type[StepgraphError]) -> BinaryIO:
    """A regular file, open for reading; anything else is refused without waiting for it."""
    # Asked before opening, which a device may notice, and again afterwards, when it cannot be exchanged any more.
    _require_regular(path, path.stat(), refusal)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _require_regular(path, os.fstat(handle), refusal)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _require_regular(path: Path, found: os.stat_result, refusal: type[StepgraphError]) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise refusal(f"{path.parent}", f"{path.name} is {kind}, not a regular file", fix="give another one")


def require_writable(folder: Path) -> None:
    """Makes a folder and a file in it, as whoever writes there later will, and removes the file again."""
    probe = folder / f".writable-{os.getpid()}"
    with storage(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.touch()
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """Values as JSON has them: NaN and infinities as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def real(value: Any) -> Any:
    """The numbers that `plain` wrote."""
    if isinstance(value, str):
        return float(value)
    if isinstance(value, dict):
        return {name: real(one) for name, one in value.items()}
    return [real(one) for one in value] if isinstance(value, list) else value
