"""Every public name of ML Compute, built from the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NewType

from stepgraph.mlc.build import build
from stepgraph.mlc.face import Face
from stepgraph.mlc.refusals import accept, refuse, speak
from stepgraph.mlc.table import Class
from stepgraph.mlc.tables import descriptors, graphs, layers, losses, optimizers, parameterized, tensors
from stepgraph.mlc.tables.enumerations import ENUMERATIONS, Enumeration
from stepgraph.mlc.values import INT
from stepgraph.mlc.wording import Wording

CLASSES: tuple[Class, ...] = (
    *tensors.CLASSES,
    *descriptors.CLASSES,
    *layers.CLASSES,
    *parameterized.CLASSES,
    *losses.CLASSES,
    *optimizers.CLASSES,
    *graphs.CLASSES,
)


def _classes() -> dict[str, type[Face]]:
    made: dict[str, type[Face]] = {"NSObject": Face}
    for table in CLASSES:
        made[table.name] = build(table, made[table.base])
    del made["NSObject"]
    return made


def _describing(enumeration: Enumeration) -> Callable[[Any], str | None]:
    """The function that returns a constant's description; a number out of range gives the first one's, as measured."""
    name = f"{enumeration.name}DebugDescription"

    def describe(value: Any) -> str | None:
        try:
            raw = INT.take(name, "value", value)
        except Exception as error:
            refuse(name, error)
            return None
        accept()
        known = {int(member): member.debug_description for member in enumeration.native}
        return known.get(raw, next(iter(known.values())))

    describe.__name__ = describe.__qualname__ = name
    return describe


def _enumerations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in ENUMERATIONS:
        found[one.name] = NewType(one.name, int)  # as PyObjC types constants
        found |= one.values()
        if one.is_described:
            found[f"{one.name}DebugDescription"] = _describing(one)
    return found


_made = _classes()
speak(Wording.of(CLASSES, ENUMERATIONS))
NAMES: dict[str, Any] = {
    **_made,
    **_enumerations(),
    # The signature of completion handlers: (resultTensor or None, error or None, executionTime in seconds).
    "MLCGraphCompletionHandler": Callable[[Any, Any, float], object],
}
