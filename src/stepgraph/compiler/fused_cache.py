"""What PyTorch's compiler made for a step, found by later runs before the compiler starts.

PyTorch has a cache of its own, but opens it late: it first records, decomposes and simplifies all operators again,
which takes most of the time of a second run. A file here has the key of an entry of that cache, under a hash of all
that decides it, which arrays the compiled step takes, and what it allocates. It contains no code: a file that is
damaged, or stands for something that PyTorch has removed, only costs the time to compile.

Its name begins with a hash of the operators as they were recorded. Before its first call, a step can therefore see at
once whether an earlier run has fused it, without loading PyTorch's compiler. How operators are changed for the compiler
follows from these, from the names of the passes and from our source, so a later run need not change them again.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import fx

from stepgraph.compiler import kept_files, outline
from stepgraph.compiler.memory import Timeline
from stepgraph.errors import StorageError, reason
from stepgraph.system import background, torch_private
from stepgraph.system.storage import read_regular, replace_file

logger = logging.getLogger("stepgraph")
LARGEST = 2**21  # bytes of a file; a kernel takes about 30
MOST = 1000  # files; with more, those that were not used for the longest time are removed
KEY = re.compile("f[a-z2-7]{20,100}")  # of an entry of PyTorch's cache, which becomes a path there


class Kept(NamedTuple):
    """What was compiled.

    Args:
        compiled: the compiled graph.
        places: the places of its arrays among those of the part.
        live: the live bytes at each of its kernels, if known.
    """

    compiled: torch_private.CompiledFxGraph
    places: list[int]
    live: Timeline | None


def key(recorded: str, graph: fx.Graph, arrays: Sequence[torch.Tensor], *decided: object) -> str | None:
    """A hash of all that decides what the compiler makes from operators; None if that cannot be known.

    Args:
        recorded: their outline, with which the key begins.
        graph: the operators, as they were recorded.
        arrays: its inputs, arrays without memory.
        decided: what else decides it, as values with an exact `repr`.
    """
    if not arrays or not outline.is_known(graph):
        return None
    under = torch_private.compiled_under(arrays)
    return None if under is None else f"{recorded}-{hashlib.sha256(f'{under} {decided}'.encode()).hexdigest()}"


def knows(recorded: str) -> bool:
    """Whether something was kept whose key begins like this."""
    found = kept_files.folder()
    try:
        return found is not None and next(found.glob(f"{recorded}-*.json"), None) is not None
    except OSError:
        return False


def read_ahead() -> None:
    """If anything is kept, lets Triton hash its files."""
    if files():
        start_hashing()


@cache
def start_hashing() -> None:
    """Lets Triton hash its files in a separate thread, while something else is done.

    Every key contains that hash; hashing takes half a second, without holding Python's lock.
    """
    with suppress(RuntimeError):  # the system allows no more threads
        background.start("stepgraph hashing", _hash)


def _hash() -> None:
    with suppress(Exception):  # it only saves time: whoever needs the hash computes it
        importlib.import_module("triton.runtime.cache").triton_key()


def load(wanted: str | None, arrays: Sequence[torch.Tensor]) -> Kept | None:
    """What was compiled under a key, ready to run; None if there is nothing, or it is damaged.

    Args:
        wanted: the key.
        arrays: those of the whole part, without memory.
    """
    file = _file(wanted)
    if wanted is None or file is None or not kept_files.is_there(file):
        return None
    try:
        entry, places, live = _read(file, wanted)
        compiled = torch_private.load_compiled(entry, [arrays[place] for place in places])
    except Exception as error:  # whatever a damaged file of PyTorch raises, the step is compiled again
        logger.warning("compiling again instead of using %s: %s", file, reason(error))
        compiled = None
    if compiled is None:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        return None
    kept_files.mark_used(file)
    return Kept(compiled, places, live)


def keep(wanted: str | None, kept: Kept) -> None:
    """Lets later runs find what was compiled under a key."""
    entry, file = torch_private.cache_entry(kept.compiled), _file(wanted)
    if wanted is None or file is None or entry is None:
        return
    text = _text(wanted, entry, kept.places, None if kept.live is None else kept_files.rows_of(kept.live))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, text if len(text) <= LARGEST else _text(wanted, entry, kept.places, None))
        kept_files.make_room(files(), MOST)
    except (OSError, StorageError) as error:  # if the folder is not writable, the next run compiles again
        logger.debug("not kept for later runs: %s", reason(error))


def files() -> list[Path]:
    """The files of all compiled steps."""
    return kept_files.files_like("*.json")


def _file(wanted: str | None) -> Path | None:
    found = kept_files.folder()
    return None if found is None or wanted is None else found / f"{wanted}.json"


def _text(wanted: str, entry: str, places: list[int], rows: kept_files.Rows | None) -> bytes:
    return kept_files.sealed({"key": wanted, "entry": entry, "places": places, "live": rows})


def _read(file: Path, wanted: str) -> tuple[str, list[int], Timeline | None]:
    """The key of the entry in PyTorch's cache, the places of its arrays, and the live bytes at each kernel."""
    values = kept_files.unsealed(read_regular(file, LARGEST, StorageError))
    entry, places, rows = values["entry"], values["places"], values["live"]
    are_places = all(type(place) is int and place >= 0 for place in places)
    if not KEY.fullmatch(entry) or not are_places or values["key"] != wanted:
        raise ValueError("it is damaged")
    return entry, places, None if rows is None else kept_files.timeline_of(rows)
