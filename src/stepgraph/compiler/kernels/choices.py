"""The implementations chosen so far, in memory and in a file in the user's cache folder."""

from __future__ import annotations

import json
import os
import platform
from functools import cached_property
from pathlib import Path

import torch

from stepgraph.errors import StorageError
from stepgraph.system.storage import read_regular

LARGEST = 2**26  # maximum size of the file of choices in bytes; one takes about 200


class Choices:
    """What was found fastest. There is one for the process: a graph that is compiled again must compute the same."""

    def __init__(self) -> None:
        self.left_out: set[str] = set()  # names of implementations, while their gain is measured

    @cached_property
    def file(self) -> Path | None:
        """The file with the choices for this processor and this PyTorch; None if the user has no cache folder."""
        folder = _cache_folder()
        machine = "".join(c if c.isalnum() else "-" for c in f"{platform.machine()}-{processor()}")
        return None if folder is None else folder / f"kernels-{machine}-torch-{torch.__version__}.json"

    @cached_property
    def _known(self) -> dict[str, str]:
        return self._stored()

    def get(self, key: str) -> str | None:
        """A previous choice."""
        return self._known.get(key)

    def remember(self, key: str, chosen: str) -> None:
        """Keeps a choice, for later runs too if its file can be written."""
        self._known[key] = chosen
        path = self.file
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._known.update({**self._stored(), **self._known})  # other processes write it too
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(self._known, indent=0))
            draft.replace(path)
        except OSError:  # if the folder is not writable, the next run measures again
            return

    def forget(self) -> None:
        """Drops what is in memory, as a new process would."""
        for name in ("file", "_known"):
            self.__dict__.pop(name, None)

    def _stored(self) -> dict[str, str]:
        try:
            found = None if self.file is None else json.loads(read_regular(self.file, LARGEST, StorageError))
        except (OSError, ValueError, RecursionError):  # missing or unreadable: measure again
            return {}
        return {key: name for key, name in found.items() if isinstance(name, str)} if isinstance(found, dict) else {}


CHOICES = Choices()


def _cache_folder() -> Path | None:
    """`$XDG_CACHE_HOME/stepgraph` or `~/.cache/stepgraph`; the XDG specification requires absolute paths."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "stepgraph"
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor the account defines it
        return None
    return home / ".cache" / "stepgraph" if home.is_absolute() else None


def processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "CPU part", "Hardware")
    return next((line.split(":")[1].strip() for line in lines if line.startswith(wanted)), platform.processor())
