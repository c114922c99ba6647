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
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import fx

from stepgraph.compiler.kernels.choices import cache_folder, processor
from stepgraph.compiler.kernels.update import UPDATE, Recorded, expanded_update
from stepgraph.compiler.memory import Timeline
from stepgraph.compiler.program import Part, Phase, fakes, notes
from stepgraph.errors import StorageError, reason
from stepgraph.system import background, torch_private
from stepgraph.system.storage import read_regular, replace_file

logger = logging.getLogger("stepgraph")
FORMAT = 3
LARGEST = 2**21  # bytes of a file; a kernel takes about 30
MOST = 1000  # files; with more, the oldest are removed
KEY = re.compile("f[a-z2-7]{20,100}")  # of an entry of PyTorch's cache, which becomes a path there
# Operators of others may be composed of further ones, which can change although name and results stay.
NAMESPACES = {"aten", "prims", "stepgraph"}
MODULES = ("_operator", "torch", "stepgraph")  # of functions that depend on their arguments alone
KINDS = ("activations", "gradients", "workspace")
Rows = tuple[list[str], list[list[int]]]


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


def fingerprint(graph: fx.Graph) -> str:
    """What kernels depend on besides what PyTorch's cache already compares: results of operators, machine and version.

    PyTorch knows custom operators by name only, so their results and our source count too; and it assumes that all
    processors that see the cache are alike.
    """
    results = [_layouts(node) for node in graph.nodes]
    machine = processor(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return hashlib.sha256(f"{source()} {machine} {results}".encode()).hexdigest()


def key(recorded: str, graph: fx.Graph, arrays: Sequence[torch.Tensor], *decided: object) -> str | None:
    """A hash of all that decides what the compiler makes from operators; None if that cannot be known.

    Args:
        recorded: their outline, with which the key begins.
        graph: the operators, as they were recorded.
        arrays: its inputs, arrays without memory.
        decided: what else decides it, as values with an exact `repr`.
    """
    if not arrays or not is_known(graph):
        return None
    under = torch_private.compiled_under(arrays)
    return None if under is None else f"{recorded}-{hashlib.sha256(f'{under} {decided}'.encode()).hexdigest()}"


def is_known(graph: fx.Graph) -> bool:
    """Whether names, arguments and results tell what operators compute, in every process."""
    return all(map(_is_known, graph.nodes))


def outline_of(part: Part) -> str:
    """The outline of a part, computed once: it is needed to look for what was kept, and to load that."""
    found = _outlines.get(part)
    if found is None:
        found = _outlines[part] = outline(part.module.graph)
    return found


_outlines: WeakKeyDictionary[Part, str] = WeakKeyDictionary()


def outline(graph: fx.Graph) -> str:
    """A hash of operators, their arguments and results, the machine and our version."""
    found = hashlib.sha256(f"{FORMAT} {fingerprint(graph)}".encode())
    places = {node: place for place, node in enumerate(graph.nodes)}  # names of inputs differ between processes
    for node in graph.nodes:
        named = () if node.op == "placeholder" else (node.name, _name(node))
        arguments = fx.map_arg((_decisive(node), node.kwargs), lambda one: _Place(places[one]))
        known = notes(node)
        noted = known.layer, known.phase, known.recomputed, known.in_place
        found.update(repr((node.op, named, arguments, noted)).encode())
    return found.hexdigest()


class _Place(int):
    """The place of an operator, which is not the number that an argument may be."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _is_known(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":  # constants have values
        return False
    if node.target in (UPDATE, expanded_update):  # an optimizer's number says nothing in another process, its code does
        arguments: Any = node.args
        return bool(Recorded(*arguments).rules)
    if isinstance(node.target, torch_private.OpOverload):
        return node.target.namespace in NAMESPACES
    return str(getattr(node.target, "__module__", "")).split(".")[0] in MODULES and "<" not in _name(node)


def _decisive(node: fx.Node) -> tuple[Any, ...]:
    """The arguments; of an update, without the number of its optimizer, which each optimizer has its own of."""
    arguments: Any = node.args
    return Recorded(*arguments).decisive if node.target in (UPDATE, expanded_update) else node.args


def _name(node: fx.Node) -> str:
    target: Any = node.target
    named = isinstance(target, str | torch_private.OpOverload)
    return str(target) if named else f"{target.__module__}.{getattr(target, '__qualname__', '<unnamed>')}"


def _layouts(node: fx.Node) -> list[tuple[Any, ...]]:
    return [(tuple(one.shape), one.stride(), one.dtype, one.device) for one in fakes(node)]


@cache
def source() -> str:
    """The hash of stepgraph's source; where there is none, as in an archive, a text that no other process has."""
    root = Path(__file__).parents[1]
    modules = sorted(root.rglob("*.py"))
    if not modules:  # another version would have the same hash, and run what this one has compiled
        return token_hex()
    found = hashlib.sha256()
    for file in modules:
        found.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return found.hexdigest()


def knows(recorded: str) -> bool:
    """Whether something was kept whose key begins like this."""
    found = folder()
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
    if wanted is None or file is None or not file.exists():
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
    return Kept(compiled, places, live)


def keep(wanted: str | None, kept: Kept) -> None:
    """Lets later runs find what was compiled under a key."""
    entry, file = torch_private.cache_entry(kept.compiled), _file(wanted)
    if wanted is None or file is None or entry is None:
        return
    text = _text(wanted, entry, kept.places, None if kept.live is None else rows_of(kept.live))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, text if len(text) <= LARGEST else _text(wanted, entry, kept.places, None))
        make_room(files(), MOST)
    except (OSError, StorageError) as error:  # if the folder is not writable, the next run compiles again
        logger.debug("not kept for later runs: %s", reason(error))


def files() -> list[Path]:
    """The files of all compiled steps."""
    return files_like("*.json")


def files_like(names: str) -> list[Path]:
    """The files with names like these; none if the folder cannot be read."""
    place = folder()
    try:
        return [] if place is None else sorted(place.glob(names))
    except OSError:
        return []


def make_room(files: Sequence[Path], most: int) -> None:
    """Removes the oldest files, so that so many are left."""
    for old in sorted(files, key=_age)[:-most]:
        old.unlink(missing_ok=True)


def folder() -> Path | None:
    """Where the files are; None if the user has no cache folder."""
    found = cache_folder()
    return None if found is None else found / "fused"


def _file(wanted: str | None) -> Path | None:
    found = folder()
    return None if found is None or wanted is None else found / f"{wanted}.json"


def rows_of(live: Timeline) -> Rows:
    """A timeline as names of layers, and a row of numbers for each kernel."""
    names, phases = list(dict.fromkeys(layer for layer, _, _ in live)), list(Phase)
    places = {name: place for place, name in enumerate(names)}
    return names, [
        [places[layer], phases.index(phase), *(kinds.get(kind, 0) for kind in KINDS)] for layer, phase, kinds in live
    ]


def timeline_of(rows: Rows) -> Timeline:
    """The timeline that these rows describe; raises if they describe none."""
    (names, kernels), phases = rows, list(Phase)
    if not all(type(number) is int and number >= 0 for row in kernels for number in row):
        raise ValueError("it is damaged")
    return [(names[layer], phases[phase], dict(zip(KINDS, sizes, strict=True))) for layer, phase, *sizes in kernels]


def _text(wanted: str, entry: str, places: list[int], rows: Rows | None) -> bytes:
    return sealed({"key": wanted, "entry": entry, "places": places, "live": rows})


def sealed(values: Mapping[str, Any]) -> bytes:
    """Values as a line of JSON with a checksum."""
    made = {"format": FORMAT, **values}
    check = hashlib.sha256(json.dumps(made).encode()).hexdigest()
    return json.dumps({**made, "sha256": check}, separators=(",", ":")).encode() + b"\n"


def unsealed(text: bytes) -> dict[str, Any]:
    """The values in such a line; raises if it is damaged or of another format."""
    values = json.loads(text)
    given = {name: value for name, value in values.items() if name not in ("format", "sha256")}
    if text != sealed(given):
        raise ValueError("it is damaged")
    return given


def _read(file: Path, wanted: str) -> tuple[str, list[int], Timeline | None]:
    """The key of the entry in PyTorch's cache, the places of its arrays, and the live bytes at each kernel."""
    values = unsealed(read_regular(file, LARGEST, StorageError))
    entry, places, rows = values["entry"], values["places"], values["live"]
    are_places = all(type(place) is int and place >= 0 for place in places)
    if not KEY.fullmatch(entry) or not are_places or values["key"] != wanted:
        raise ValueError("it is damaged")
    return entry, places, None if rows is None else timeline_of(rows)


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0
