"""Builds classes of faces from their tables. Here, errors become nil or NO."""

from __future__ import annotations

import copy
from typing import Any

from stepgraph.errors import StateError
from stepgraph.mlc.face import Face, hold, register
from stepgraph.mlc.refusals import accept, refuse
from stepgraph.mlc.table import Class, Row


def build(table: Class, base: type[Face]) -> type[Face]:
    """The class of faces described by a table."""
    members: dict[str, Any] = {"__slots__": (), "__module__": "stepgraph.mlc", "table": table}
    members["__doc__"] = f"stepgraph's `{table.native_name}` under Apple's names."
    for row in table.rows:
        if row.kind not in ("new", "init"):  # every object inherits them from the base
            make = _class_method if row.is_class_method else _method
            members[row.spelling] = make(row, table)
    made = type(table.name, (base,), members)
    if table.native is not None:
        register(table.native, made)
    return made


def _method(row: Row, table: Class) -> Any:
    call = f"{table.name}.{row.spelling}"

    def method(self: Face, *arguments: Any, **named: Any) -> Any:
        try:
            if self.native is None:
                if row.kind == "property" and not arguments and not named:
                    accept()
                    return copy.copy(row.empty)
                problem = f"this {type(self).__name__} is empty"
                raise StateError(call, problem, fix="create it with a factory method of its class")
            answer = row.function(self.native, **row.taken(call, arguments, named))
            if row.kind == "replacing setter":
                hold(self, answer)
            answer = row.given(answer)
        except Exception as error:  # nothing is raised across this boundary, whatever a program passes
            refuse(call, error)
            return row.refused()
        accept()
        return answer

    return _documented(method, row, table)


def _class_method(row: Row, table: Class) -> Any:
    call = f"{table.name}.{row.spelling}"

    def method(cls: type[Face], *arguments: Any, **named: Any) -> Any:
        try:
            taken = row.taken(call, arguments, named)
            if row.makes_empty and any(taken[name] is None for name in row.makes_empty):
                return cls.alloc()
            answer = row.given(row.function(cls.table.native, **taken))
        except Exception as error:
            refuse(call, error)
            return row.refused()
        accept()
        return answer

    return classmethod(_documented(method, row, table))


def _documented(method: Any, row: Row, table: Class) -> Any:
    method.__name__, method.__qualname__ = row.spelling, f"{table.name}.{row.spelling}"
    method.__doc__ = f"`{row.selector}`: stepgraph's `{row.native.replace('<class>', table.native_name)}`."
    return method
