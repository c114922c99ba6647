"""Faces: thin objects that show a stepgraph object under Apple's names. They hold it, and nothing else.

A class of faces is made from its table (`table.py`) by `build`. `face_of` finds the face of a native object: the same
one for as long as anybody holds it, so that `is` means in a program what it meant there.
"""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any, ClassVar, Self

from stepgraph.errors import StateError
from stepgraph.mlc.refusals import refuse
from stepgraph.mlc.table import Class, Row

_faces: weakref.WeakValueDictionary[int, Face] = weakref.WeakValueDictionary()
_classes: dict[type, type[Face]] = {}
_lock = threading.RLock()


class Face:
    """Base of all faces, with what PyObjC gives every object. `native` is the stepgraph object, None if empty."""

    __slots__ = ("__weakref__", "native")

    table: ClassVar[Class]
    native: Any

    @classmethod
    def alloc(cls) -> Self:
        """An object that waits for `init`."""
        face = cls.__new__(cls)
        object.__setattr__(face, "native", None)
        return face

    def init(self) -> Self:
        """The object that `new` gives: an empty one where the class has no default."""
        if self.native is None and self.table.new is not None:
            hold(self, self.table.new())
        return self

    @classmethod
    def new(cls) -> Self:
        """`alloc().init()`."""
        return cls.alloc().init()

    def copy(self) -> Face | None:
        """A copy, where the class has copies (`NSCopying`), else nil."""
        try:
            if self.native is None or self.table.copy is None:
                raise StateError(self.table.name, "there is nothing to copy", fix="make a new object")
            return face_of(self.table.copy(self.native))
        except Exception as error:
            refuse(f"{self.table.name}.copy", error)
            return None

    def copyWithZone_(self, zone: Any = None) -> Face | None:
        """`copy`, under its Objective-C name."""
        return self.copy()

    def isKindOfClass_(self, kind: Any) -> bool:
        """`isinstance`."""
        return isinstance(kind, type) and isinstance(self, kind)

    def isEqual_(self, other: Any) -> bool:
        """`==`."""
        return self == other

    def description(self) -> str:
        """`str()`."""
        return str(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Face):
            return NotImplemented
        return self is other or (self.native is not None and bool(self.native == other.native))

    def __hash__(self) -> int:
        return id(self) if self.native is None else hash(self.native)

    def __copy__(self) -> Face | None:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Face | None:
        return self.copy()

    def __setattr__(self, name: str, value: Any) -> None:
        """`tensor.label = "x"` is `tensor.setLabel_("x")`."""
        setter = getattr(self, f"set{name[:1].upper()}{name[1:]}_", None)
        if setter is None:
            raise AttributeError(f"{type(self).__name__} has no property {name!r} that can be set")
        setter(value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'(empty)' if self.native is None else self.native!r}>"


def hold(face: Face, native: Any) -> None:
    """Makes `native` the object behind `face`."""
    with _lock:
        object.__setattr__(face, "native", native)
        _faces[id(native)] = face


def face_of(native: Any) -> Any:
    """The face of a stepgraph object; what has no face is given back as it is."""
    with _lock:
        face = _faces.get(id(native))
        if face is not None and face.native is native:
            return face
        kind = next((_classes[base] for base in type(native).__mro__ if base in _classes), None)
        if kind is None:
            return native
        face = kind.alloc()
        hold(face, native)
        return face


def build(table: Class, base: type[Face]) -> type[Face]:
    """The class of faces that a table describes."""
    members: dict[str, Any] = {"__slots__": (), "__doc__": f"{table.native_name} under Apple's names.", "table": table}
    for row in table.rows:
        if row.kind not in ("new", "init"):  # every object has them from the base
            members[row.spelling] = _class_method(row) if row.is_class_method else _method(row)
    made = type(table.name, (base,), members)
    if table.native is not None:
        _classes.setdefault(table.native, made)
    return made


def _method(row: Row) -> Any:
    def method(self: Face, *arguments: Any, **named: Any) -> Any:
        call = f"{type(self).__name__}.{row.spelling}"
        try:
            if self.native is None:
                if row.kind == "property" and not arguments and not named:
                    return copy.copy(row.empty)
                problem = f"this {type(self).__name__} is empty"
                raise StateError(call, problem, fix="make it with a factory method of its class")
            answer = row.function(self.native, **row.taken(call, arguments, named))
            if row.kind == "replacing setter":
                hold(self, answer)
            return row.given(answer, face_of)
        except Exception as error:  # nothing is raised through this boundary, whatever a program passes
            refuse(call, error)
            return row.refused()

    return _documented(method, row)


def _class_method(row: Row) -> Any:
    def method(cls: type[Face], *arguments: Any, **named: Any) -> Any:
        call = f"{cls.__name__}.{row.spelling}"
        try:
            taken = row.taken(call, arguments, named)
            if any(taken.get(name, 0) is None for name in row.makes_empty):
                return cls.alloc()
            return row.given(row.function(cls.table.native, **taken), face_of)
        except Exception as error:
            refuse(call, error)
            return row.refused()

    return classmethod(_documented(method, row))


def _documented(method: Any, row: Row) -> Any:
    method.__name__ = method.__qualname__ = row.spelling
    method.__doc__ = f"`{row.selector}`: stepgraph's `{row.native}`."
    return method
