"""What the API reference has to be told about this code base: an extension of griffe, which reads the sources.

- Layers are dataclasses because their base makes them so, which no decorator shows.
- Members of enumerations are explained by the comment behind them; here they become a table.
- `Example:` is what griffe calls `Examples:`.
"""

from collections.abc import Iterator
from typing import Any

import griffe

LAYER = "stepgraph.layers.layer.Layer"
MARKERS = {"stepgraph.layers.layer.statistic", "stepgraph.layers.layer.constant"}
ENUMERATIONS = {"RawEnum", "IntFlag"}


class Reference(griffe.Extension):
    """Runs before griffe's own extension for dataclasses, which then sees the layers, too."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Changes what was read, once all of it has been."""
        decorators = pkg["layers.layer.Layer"].decorators
        for one in list(_members(pkg)):
            if one.docstring:
                one.docstring.value = one.docstring.value.replace("Example:\n", "Examples:\n")
            if one.is_class and LAYER in {base.canonical_path for base in one.mro()}:
                one.decorators = [*one.decorators, *decorators]
                _show_defaults(one)
            elif one.is_class and {str(base) for base in one.bases} & ENUMERATIONS:
                _tabulate(one)


def _members(owner: griffe.Object) -> Iterator[griffe.Object]:
    for member in owner.members.values():
        if not member.is_alias:
            yield member
            yield from _members(member)


def _show_defaults(layer: griffe.Class) -> None:
    """`statistic(default=x)` and `constant(default=x)` read as `x`."""
    for field in layer.attributes.values():
        if isinstance(field.value, griffe.ExprCall) and field.value.canonical_path in MARKERS:
            field.value = {argument.name: argument.value for argument in field.value.arguments}.get("default")


def _tabulate(enumeration: griffe.Class) -> None:
    """Replaces the members by a table in the description: name, raw value, meaning."""
    lines = enumeration.lines_collection[enumeration.filepath]
    rows = []
    for name, member in list(enumeration.attributes.items()):
        if name.isupper():
            raw, _, description = str(member.value).strip("()").partition(", ")
            meaning = lines[member.lineno - 1].partition("  # ")[2] or description.strip("'\"").lower()
            rows.append(f"| `{name}` | {raw} | {meaning.replace('|', '&#124;')} |")
            enumeration.del_member(name)
    if rows:
        enumeration.docstring.value += "\n\n" + "\n".join(["| member | value | |", "|---|---|---|", *rows])
