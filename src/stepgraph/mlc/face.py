"""Faces: thin objects that expose a stepgraph object under Apple's names. They hold nothing else.

`build.py` creates a class of faces from its table. `face_of` finds the face of a native object: the same one as long
as it is in use, so that `is` has its usual meaning in a program.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from stepgraph.errors import StateError
from stepgraph.mlc.refusals import accept, refuse

_faces: weakref.WeakValueDictionary[int, Face] = weakref.WeakValueDictionary()
_classes: dict[type, type[Face]] = {}
_lock = threading.RLock()


def answering(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that returns nil if it fails, including for a wrong number of arguments."""

    @functools.wraps(function)
    def answer(receiver: Any, *arguments: Any, **named: Any) -> Any:
        try:
            given = function(receiver, *arguments, **named)
        except Exception as error:
            refuse(f"{receiver.table.name}.{function.__name__}", error)
            return None
        accept()
        return given

    return answer


class Described(Protocol):
    """The parts of a class's table that a face needs."""

    @property
    def name(self) -> str:
        """Apple's name of the class."""

    @property
    def native(self) -> type | None:
        """The native class of its objects."""

    @property
    def new(self) -> Callable[[], Any] | None:
        """Creates a default object, if the class has one."""

    @property
    def copy(self) -> Callable[[Any], Any] | None:
        """Copies an object, if the class supports copies."""


class Face:
    """Base of all faces, with the members of every PyObjC object. `native` is the stepgraph object, None if empty."""

    __slots__ = ("__weakref__", "native")

    table: ClassVar[Described]
    native: Any

    @classmethod
    @answering
    def alloc(cls) -> Face:
        """An object that is not initialized yet."""
        face = cls.__new__(cls)
        object.__setattr__(face, "native", None)
        return face

    @answering
    def init(self) -> Face:
        """The object that `new` returns: an empty one if the class has no default."""
        if self.native is None and self.table.new is not None:
            hold(self, self.table.new())
        return self

    @classmethod
    @answering
    def new(cls) -> Face:
        """`alloc().init()`."""
        return cls.alloc().init()

    @answering
    def copy(self) -> Face:
        """A copy, if the class supports copies (`NSCopying`), else nil."""
        if self.native is None or self.table.copy is None:
            raise StateError(self.table.name, "there is nothing to copy", fix="create a new object")
        return face_of(self.table.copy(self.native))

    @answering
    def copyWithZone_(self, zone: Any) -> Face:
        """`copy`, under its Objective-C name."""
        return self.copy()

    @answering
    def isKindOfClass_(self, kind: type) -> bool:
        """`isinstance`."""
        return isinstance(self, kind)

    @answering
    def isEqual_(self, other: Any) -> bool:
        """`==`."""
        return self == other

    @answering
    def description(self) -> str:
        """`str()`."""
        return str(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Face):
            return NotImplemented
        return self is other or (self.native is not None and bool(self.native == other.native))

    def __hash__(self) -> int:
        return id(self) if self.native is None else hash(self.native)

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
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


def register(native: type, kind: type[Face]) -> None:
    """Makes `kind` the class of faces for objects of a native class and its subclasses."""
    _classes.setdefault(native, kind)


def face_of(native: Any) -> Any:
    """The face of a stepgraph object; returns anything without a face unchanged."""
    with _lock:
        face = _faces.get(id(native))
        if face is not None and face.native is native:
            return face
        kind = _classes.get(type(native)) or _nearest(type(native))
        if kind is None:
            return native
        face = kind.__new__(kind)
        object.__setattr__(face, "native", native)
        _faces[id(native)] = face
        return face


def _nearest(native: type) -> type[Face] | None:
    return next((_classes[base] for base in native.__mro__ if base in _classes), None)
