"""The language of the tables: one row per selector, which states its stepgraph member.

A row names its arguments in the selector's order by stepgraph's own parameter names, each with the kind of value it
takes (`values.py`):

    make("descriptorWithShape:dataType:", shape=SHAPE, data_type=DATA_TYPE)

is `TensorDescriptor(shape=…, data_type=…)` in the table of `MLCTensorDescriptor`. The rows generate the classes
(`build.py`), the documentation (`page.py`) and the test that visits every symbol.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from typing import Any, NamedTuple

from stepgraph.errors import ArgumentError
from stepgraph.mlc.values import Kind, give

# What a rejected call returns. ASKED is also NO, for a method whose result is not whether it was accepted.
NIL, NO, NOTHING_IN_IT, VOID, ASKED = "nil", "NO", "[]", "void", "NO or YES"


@dataclass(frozen=True)
class Row:
    """One symbol of a class.

    Args:
        selector: Objective-C's name.
        kind: property, setter, replacing setter, class property, class method, method, new or init.
        native: stepgraph's name for it, as a program writes it: every argument under stepgraph's name, with the
            original's name for its value.
        function: the function to call, with the native object or class first.
        takes: the kinds of its arguments by stepgraph's names, in the selector's order.
        refusal: what a rejected call returns.
        swift: Swift's name.
        note: the differences.
        empty: what a property of an empty object returns.
        makes_empty: arguments that create an empty object if they are nil.
        shown: how a result is converted before it is returned.
    """

    selector: str
    kind: str
    native: str
    function: Callable[..., Any]
    takes: Mapping[str, Kind] = field(default_factory=dict)
    refusal: str = NIL
    swift: str = ""
    note: str = ""
    empty: Any = None
    makes_empty: tuple[str, ...] = ()
    shown: Callable[[Any], Any] | None = None

    @property
    def spelling(self) -> str:
        """PyObjC's name."""
        return self.selector.replace(":", "_")

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The original's names for the arguments, as in the selector."""
        return (self.swift,) if self.kind.endswith("setter") else tuple(_labels(self.selector, self.takes).values())

    @property
    def is_class_method(self) -> bool:
        """Whether it is called on the class."""
        return self.kind in ("class method", "class property", "new")

    def taken(self, call: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as stepgraph takes them, by name."""
        if named or len(arguments) != len(self.takes):
            given = f"{len(arguments)} arguments" + f" and the names {', '.join(named)}" * bool(named)
            raise ArgumentError(
                call, f"{given} were passed, but {len(self.takes)} are needed", fix="pass one per colon"
            )
        taken = zip(self.takes.items(), self.labels, arguments, strict=True)
        return {name: kind.take(call, label, value) for (name, kind), label, value in taken}

    def given(self, answer: Any) -> Any:
        """What the caller receives."""
        if self.refusal in (NO, VOID):
            return True if self.refusal == NO else None
        return give(answer if self.shown is None else self.shown(answer))

    def refused(self) -> Any:
        """What the caller receives from a rejected call."""
        if self.refusal == NOTHING_IN_IT:
            return []
        return False if self.refusal in (NO, ASKED) else None


class Class(NamedTuple):
    """One class: its native class, its rows, and what `new` and `copy` return."""

    name: str
    native: type | None
    base: str
    rows: tuple[Row, ...]
    new: Callable[[], Any] | None = None
    copy: Callable[[Any], Any] | None = None
    note: str = ""

    @property
    def native_name(self) -> str:
        """stepgraph's name for it."""
        return "stepgraph" if self.native is None else self.native.__name__


def snake(name: str) -> str:
    """`usesAMSGrad` as `uses_ams_grad`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def read(name: str, member: str = "", *, empty: Any = None, note: str = "", **settings: Any) -> Row:
    """A property. `member` is stepgraph's name if it differs from the snake_case name."""
    member = member or snake(name)
    function = operator.attrgetter(member)
    return Row(name, "property", f".{member}", function, swift=name, empty=empty, note=note, **settings)


def reads(names: str, *, empty: Any = None) -> tuple[Row, ...]:
    """Properties under stepgraph's own names."""
    return tuple(read(name, empty=empty) for name in names.split())


def write(name: str, kind: Kind, *, replacing: bool = False) -> Row:
    """The setter of a property; `replacing` if the native object is immutable."""
    selector, member = f"set{name[0].upper()}{name[1:]}:", snake(name)
    how, function = ("replacing setter", _replace) if replacing else ("setter", _assign)
    return Row(selector, how, f".{member} =", partial(function, member), {"value": kind}, VOID, name)


def make(
    selector: str, target: str | Callable[..., Any] = "", /, *, swift: str = "", note: str = "", **takes: Any
) -> Row:
    """A class method that creates something.

    `target` is a class method of the native class, the class itself if empty, or a function of the arguments. Arguments
    that are plain values instead of kinds are fixed: the caller does not pass them.
    """
    kinds = {name: kind for name, kind in takes.items() if isinstance(kind, Kind)}
    fixed = {name: value for name, value in takes.items() if name not in kinds}
    if isinstance(target, str):
        name = f"<class>.{target}" if target else "<class>"
    else:
        name = getattr(target, "native_name", target.__name__)
    empties = tuple(one for one, kind in kinds.items() if kind.makes_empty)
    swift = swift or _swift_initializer(selector)
    function, native = partial(_make, target, fixed), _written(name, _labels(selector, kinds), fixed)
    return Row(selector, "class method", native, function, kinds, NIL, swift, note, makes_empty=empties)


def share(selector: str, member: str, *, swift: str, note: str = "") -> Row:
    """A class property that creates a layer."""
    row = make(selector, member, swift=swift, note=note)
    return Row(row.selector, "class property", row.native, row.function, swift=swift, note=note)


def call(
    selector: str,
    target: str | Callable[..., Any] = "",
    /,
    *,
    refusal: str = NO,
    swift: str = "",
    note: str = "",
    **takes: Kind,
) -> Row:
    """A method. `target` is a method of the native object, or a function of the native object and the arguments."""
    if isinstance(target, str):
        member = target or snake(selector)
        function: Callable[..., Any] = partial(_call, member)
    else:
        member, function = getattr(target, "native_name", target.__name__), target
    native = _written(f".{member}", _labels(selector, takes), {}, getattr(target, "positional", ()))
    return Row(selector, "method", native, function, takes, refusal, swift or selector, note)


def unavailable(*kinds: str, note: str = "an empty object") -> tuple[Row, ...]:
    """`new` and `init`, which the headers hide but which still work."""
    return tuple(Row(one, one, "–", lambda native: None, note=note, swift="–") for one in kinds or ("new", "init"))


def native_name(name: str, *positional: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Sets the stepgraph member that an adapter function documents, or how it is written.

    `positional` are the arguments that the member does not take by name.
    """

    def name_it(function: Callable[..., Any]) -> Callable[..., Any]:
        function.native_name, function.positional = name, positional  # type: ignore[attr-defined]
        return function

    return name_it


def _written(name: str, labels: Mapping[str, str], fixed: Mapping[str, Any], positional: Sequence[str] = ()) -> str:
    """How a program writes a call: with keywords, so that the order of the arguments does not matter."""
    if "(" in name:
        return name
    given = [label if one in positional else f"{one}={label}" for one, label in labels.items()]
    settings = [f"{one}={value.__class__.__name__}.{value.name}" for one, value in fixed.items() if _is_member(value)]
    settings += [f"{one}={value!r}" for one, value in fixed.items() if not _is_member(value)]
    return f"{name}({', '.join([*given, *settings])})"


def _is_member(value: Any) -> bool:
    return isinstance(value, Enum)


def _labels(selector: str, names: Iterable[str]) -> dict[str, str]:
    """The selector's names for its arguments, by stepgraph's."""
    pieces = selector.split(":")[:-1]
    first = enumerate(zip(names, pieces, strict=True))
    return {name: piece if index else _first_label(piece, name) for index, (name, piece) in first}


def _make(target: str | Callable[..., Any], fixed: Mapping[str, Any], native: Any, **taken: Any) -> Any:
    made = target if callable(target) else getattr(native, target) if target else native
    return made(**taken, **fixed)


def _call(member: str, native: Any, **taken: Any) -> Any:
    return getattr(native, member)(**taken)


def _assign(member: str, native: Any, value: Any) -> None:
    setattr(native, member, value)


def _replace(member: str, native: Any, value: Any) -> Any:
    return replace(native, **{member: value})


def _swift_initializer(selector: str) -> str:
    """`tensorWithShape:dataType:` as `init(shape:dataType:)`, the way Swift imports factories."""
    found = re.fullmatch(
        r"(?:descriptor|layer|tensor|optimizer|device|data|parameter|graph)With([A-Z]\w*:.*)", selector
    )
    if found is None:
        return "init()" if selector in ("layer", "descriptor", "graph") else selector
    return f"init({_lowered(found[1])})"


def _first_label(piece: str, name: str) -> str:
    """The label in the first piece of a selector: `shape` in `tensorWithShape`, else its own name."""
    found = re.fullmatch(r"\w*(?:With|For|To|From)([A-Z]\w*?)", piece)
    return _lowered(found[1]) if found else re.sub(r"_(\w)", lambda letter: letter[1].upper(), name)


def _lowered(label: str) -> str:
    """`GPUDevices` as `gpuDevices`."""
    head = re.match(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]", label)
    assert head is not None
    return f"{label[: head.end()].lower()}{label[head.end() :]}"
