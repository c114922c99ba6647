"""The files by which later runs find what was compiled for a step: their folder, their form, and how many are kept."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepgraph.compiler.kernels.choices import cache_folder
from stepgraph.compiler.memory import Timeline
from stepgraph.compiler.program import Phase

FORMAT = 3
KINDS = ("activations", "gradients", "workspace")
Rows = tuple[list[str], list[list[int]]]


def folder() -> Path | None:
    """Where the files are; None if the user has no cache folder."""
    found = cache_folder()
    return None if found is None else found / "fused"


def files_like(names: str) -> list[Path]:
    """The files with names like these; none if the folder cannot be read."""
    place = folder()
    try:
        return [] if place is None else sorted(place.glob(names))
    except OSError:
        return []


def is_there(file: Path) -> bool:
    """Whether there is such a file, and the user may look."""
    try:
        return file.exists()
    except OSError:  # Python before 3.12 raises it for a folder that may not be searched
        return False


def mark_used(file: Path) -> None:
    """Makes a file the last one to be removed."""
    with suppress(OSError):  # it may belong to another user, or be gone
        os.utime(file)


def make_room(files: Sequence[Path], most: int) -> None:
    """Removes the files that were not used for the longest time, so that so many are left."""
    for old in sorted(files, key=_age)[:-most]:
        old.unlink(missing_ok=True)


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0


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
