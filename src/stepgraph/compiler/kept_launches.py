"""The kernels of a fused tiny step and their arguments, found by later runs without PyTorch's compiler.

To load that compiler takes two seconds, longer than many trainings of tiny networks. A file here lists the launches
of a step, as a row of `tuned` has recorded them, and the libraries that the compiler has left for them. It is used only
where the compiler would make the same: for the same operators, machine, versions and settings. A file that is damaged,
or names a library that is not the same any more, only costs time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stepgraph.compiler import kept_files, outline
from stepgraph.compiler.launch_record import Launch, Place, Record
from stepgraph.compiler.memory import Timeline
from stepgraph.compiler.program import Part
from stepgraph.errors import StorageError, reason
from stepgraph.system import torch_private
from stepgraph.system.storage import read_regular, replace_file

logger = logging.getLogger("stepgraph")
LARGEST = 2**20  # bytes of a file
MOST = 1000  # files; with more, those that were not used for the longest time are removed
LARGEST_LIBRARY = 2**28
DECISIVE = ("TORCHINDUCTOR_", "ATEN_", "CXX")  # beginnings of environment variables, of which some are no settings
GIVEN, RESULT, BUFFER = "given", "result", "buffer"  # what an argument is, unless a number


class Kept(NamedTuple):
    """What was kept of a step.

    Args:
        record: its launches.
        live: the live bytes at each of its kernels.
    """

    record: Record
    live: Timeline


def key(part: Part, *decided: object) -> str | None:
    """A hash of all that decides the kernels of a part, found without the compiler; None if that cannot be known.

    Args:
        part: the part.
        decided: what decides them besides operators, machine and surroundings, as values with an exact `repr`.
    """
    if not outline.is_known(part.module.graph):
        return None
    environment = sorted(one for one in os.environ.items() if one[0].startswith(DECISIVE))
    versions = torch.__version__, torch.version.git_version, sys.implementation.cache_tag, sys.platform
    settings = torch_private.every_setting(), torch.are_deterministic_algorithms_enabled()
    under = repr((environment, versions, settings, decided))
    return f"{outline.of(part)}-{hashlib.sha256(under.encode()).hexdigest()}"


def load(wanted: str | None) -> Kept | None:
    """What was kept under a key; None if there is nothing, or it cannot be used."""
    file = _file(wanted)
    if file is None or not kept_files.is_there(file):
        return None
    try:
        found = kept_files.unsealed(read_regular(file, LARGEST, StorageError))
        if found["key"] != wanted:
            raise ValueError("it is of another step")
        kept = Kept(_restored(found), kept_files.timeline_of(found["live"]))
    except Exception as error:  # whatever a damaged file or library raises, PyTorch's compiler is asked
        logger.debug("not launching kernels by %s: %s", file, reason(error))
        with suppress(OSError):
            file.unlink(missing_ok=True)
        return None
    kept_files.mark_used(file)
    return kept


def keep(wanted: str | None, kept: Kept) -> None:
    """Lets later runs find the launches of a step."""
    file = _file(wanted)
    if wanted is None or file is None:
        return
    try:
        described = _described(kept.record)
        if described is None:
            return
        text = kept_files.sealed({"key": wanted, "live": kept_files.rows_of(kept.live), **described})
        if len(text) <= LARGEST:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, text)
            kept_files.make_room(files(), MOST)
    except (OSError, StorageError) as error:  # if the folder is not writable, the next run asks the compiler
        logger.debug("launches are not kept for later runs: %s", reason(error))


def files() -> list[Path]:
    """The files of all steps."""
    return kept_files.files_like("*.launches")


def _file(wanted: str | None) -> Path | None:
    folder = kept_files.folder()
    return None if folder is None or wanted is None else folder / f"{wanted}.launches"


def _described(record: Record) -> dict[str, Any] | None:
    """A record as values that JSON can hold; None if a kernel is in no library, or an argument is of another kind."""
    libraries = list(dict.fromkeys(torch_private.library_of(kernel) for kernel, _ in record.launches))
    if None in libraries:
        return None
    named = {**_named(GIVEN, record.given), **_named(RESULT, record.results)}
    memory = _Memory({}, [])
    launches = []
    for kernel, arguments in record.launches:
        described = [named.get((id(arguments), place)) or memory.described(one) for place, one in enumerate(arguments)]
        if None in described:
            return None
        launches.append([libraries.index(torch_private.library_of(kernel)), described])
    return {
        "libraries": [[str(one), _digest(one)] for one in libraries if one is not None],
        "launches": launches,
        "given": len(record.given),
        "results": [[shape, stride, str(kind).removeprefix("torch.")] for shape, stride, kind in record.like],
        "memory": memory.sizes,
    }


def _named(kind: str, places: Sequence[Sequence[Place]]) -> dict[tuple[int, int], list[Any]]:
    return {(id(one.arguments), one.position): [kind, index] for index, each in enumerate(places) for one in each}


@dataclass
class _Memory:
    """The memory that kernels use beside what they are given: its address and bytes, by its index."""

    known: dict[int, int]
    sizes: list[int]

    def described(self, argument: Any) -> Any:
        """An argument as values; a number as it is; None if it is neither that nor an array."""
        if type(argument) in (int, float):
            return argument
        if not isinstance(argument, torch.Tensor):
            return None
        storage = argument.untyped_storage()
        index = self.known.setdefault(storage.data_ptr(), len(self.sizes))
        if index == len(self.sizes):
            self.sizes.append(storage.nbytes())
        return [BUFFER, index, argument.data_ptr() - storage.data_ptr()]


def _restored(found: Mapping[str, Any]) -> Record:
    """The record that these values describe; raises if a library is not the same any more."""
    kernels = [_kernel(Path(path), digest) for path, digest in found["libraries"]]
    memory = [torch.empty(size + 1, dtype=torch.uint8) for size in found["memory"]]  # any place in it has an address
    places: dict[str, list[list[Place]]] = {
        GIVEN: [[] for _ in range(found["given"])],
        RESULT: [[] for _ in found["results"]],
    }
    launches = []
    for index, described in found["launches"]:
        arguments: list[Any] = []
        for one in described:
            match one:
                case [kind, number]:
                    places[kind][number].append(Place(arguments, len(arguments)))
                    arguments.append(None)
                case [_, number, offset]:
                    arguments.append(memory[number][offset:])
                case _:
                    arguments.append(one)
        launches.append(Launch(kernels[index], arguments))
    like = [(tuple(shape), tuple(stride), getattr(torch, kind)) for shape, stride, kind in found["results"]]
    return Record(launches, places[GIVEN], places[RESULT], like, torch_private.allocate_on_cpu())


def _kernel(library: Path, digest: str) -> Any:
    if _digest(library) != digest:
        raise ValueError(f"{library} is not what it was")
    return torch_private.kernel_in(library)


def _digest(library: Path) -> str:
    return hashlib.sha256(read_regular(library, LARGEST_LIBRARY, StorageError)).hexdigest()
