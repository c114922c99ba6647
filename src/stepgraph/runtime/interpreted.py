"""Operators of a tiny step, run by PyTorch's own interpreter: one call from Python instead of one per operator.

An operator on few numbers takes less time than Python needs to call it. PyTorch has an interpreter of recorded
operators that needs no Python in between; it calls the same kernels in the same order. It is given PyTorch's operators
that follow one another; what Python computes stays between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph.compiler import operators
from stepgraph.compiler.program import fakes
from stepgraph.system import torch_private

LEAST = 4  # operators: entering the interpreter takes as long as Python needs to call two or three
_TYPES = {torch.float32: 6, torch.float64: 7, torch.int64: 4, torch.bool: 11}  # as the interpreter numbers them
_TEXTS: dict[type, str] = {bool: "bool", int: "int", float: "float"}


class _Untranslatable(Exception):
    """The interpreter does not know an operator or one of its arguments, or would do something else."""


class _Call(NamedTuple):
    """One operator: its overload, all arguments in the order of its schema, and those it writes to."""

    overload: torch_private.OpOverload
    given: tuple[Any, ...]
    written: tuple[Any, ...]


class Interpreted:
    """Operators that follow one another, as a function.

    Args:
        number: its number in the step.
        text: the operators in the interpreter's language.
        plain: the same operators called from Python.

    Attributes:
        overloads: the operators as the interpreter has understood them.
    """

    def __init__(self, number: int, text: str, plain: Callable[..., Any]) -> None:
        self.__name__, self._plain = f"interpreted_{number}", plain
        self._function, self.overloads = torch_private.interpreted(text)
        self._is_ready = False

    def __call__(self, *given: torch.Tensor) -> Any:
        try:
            if self._is_ready:
                return self._function(*given)
            with torch_private.without_profiling():
                found = self._function(*given)
            self._is_ready = True
            return found
        except RuntimeError:
            self._plain(*given)  # raises the same at the operator that fails
            raise


def interpret(graph: fx.Graph, plainly: Callable[[fx.Graph], Callable[..., Any]]) -> bool:
    """Replaces operators that follow one another with functions of the interpreter; whether there are any.

    Args:
        graph: what a step calls, with results in the arena.
        plainly: makes a graph a function that calls its operators from Python.
    """
    count = 0
    for run in [*_runs(graph)]:
        try:
            _replace(graph, run, count, plainly)
        except _Untranslatable:
            continue
        count += 1
    return count > 0


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The longest sequences of operators that can be translated."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "get_attr":  # reads no memory
            continue
        if node.op == "call_function" and _fits(node, run):
            run.append(node)
            continue
        if sum(one.target is not getitem for one in run) >= LEAST:
            yield run
        run = []


def _fits(node: fx.Node, run: Sequence[fx.Node]) -> bool:
    """Whether an operator can be translated, and writes only to memory of this step."""
    if node.target is getitem:
        return node.args[0] in run
    try:
        call = _call(node)
        for one in call.given:
            _constants(one)
    except _Untranslatable:
        return False
    return all(one in run or one.op == "get_attr" for one in call.written)


def _call(node: fx.Node) -> _Call:
    target, named = node.target, dict(node.kwargs)
    given: list[Any] = list(node.args)
    if target in operators.BEHIND:
        target, keyword = operators.BEHIND[target]
        named[keyword] = given[0]
    if not isinstance(target, torch_private.OpOverload) or target.namespace != "aten":
        raise _Untranslatable
    arrays = fakes(node)
    if not arrays or any(array.device.type != "cpu" for array in arrays):
        raise _Untranslatable
    schema = torch_private.schema(target)
    every, written = [], []
    for position, argument in enumerate(schema.arguments):
        default = argument.default_value if argument.has_default_value() else _Untranslatable
        value: Any = given[position] if position < len(given) else named.get(argument.name, default)
        if value is _Untranslatable:
            raise _Untranslatable
        is_float = isinstance(value, int) and not isinstance(value, bool) and str(argument.type) == "float"
        every.append(float(value) if is_float else value)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(value)
    if not all(isinstance(one, fx.Node) for one in written):
        raise _Untranslatable
    return _Call(target, tuple(every), tuple(written))


def _constants(value: Any) -> list[tuple[str, str]]:
    """The type and the value of a constant in the interpreter's language; none for arrays, several for lists."""
    if isinstance(value, fx.Node):
        return []
    if value is None:
        return [("NoneType", "")]
    if isinstance(value, torch.dtype) and value in _TYPES:
        return [("int", str(_TYPES[value]))]
    if type(value) in _TEXTS:
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise _Untranslatable
        return [(_TEXTS[type(value)], repr(int(value) if isinstance(value, bool) else value))]
    if isinstance(value, list | tuple) and all(type(one) is int for one in value):
        return [("int", str(one)) for one in value]
    raise _Untranslatable


class _Text:
    """Operators in the interpreter's language."""

    def __init__(self) -> None:
        self.inputs: list[fx.Node] = []
        self.overloads: list[str] = []
        self._lines: list[str] = []
        self._names: dict[fx.Node, str] = {}
        self._known: dict[tuple[str, str], str] = {}

    def add(self, node: fx.Node) -> None:
        """Adds an operator."""
        if node.target is getitem:
            source, index = node.args
            self._names[node] = f"{self._names[source]}_{index}"  # type: ignore[index]
            return
        call = _call(node)
        given = ", ".join(map(self._argument, call.given))
        name, results = f"%v{len(self._lines)}", len(torch_private.schema(call.overload).returns)
        made = [name] if results == 1 else [f"{name}_{index}" for index in range(results)]
        left = ", ".join(f"{one} : Tensor" for one in made)
        self._lines.append(f"{left} = {torch_private.schema(call.overload).name}({given})")
        self.overloads.append(call.overload.name())
        self._names[node] = name

    def returning(self, nodes: Sequence[fx.Node]) -> str:
        """The whole text, with these results."""
        taken = ", ".join(f"{self._names[node]} : Tensor" for node in self.inputs)
        results = [self._names[node] for node in nodes]
        lines = self._lines
        if len(results) != 1:
            kinds = ", ".join("Tensor" for _ in results)
            lines = [*lines, f"%all : ({kinds}) = prim::TupleConstruct({', '.join(results)})"]
        end = results[0] if len(results) == 1 else "%all"
        return "\n  ".join([f"graph({taken}):", *lines, f"return ({end})"])

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            if value not in self._names:
                self._names[value] = f"%i{len(self.inputs)}"
                self.inputs.append(value)
            return self._names[value]
        constants = [self._constant(*one) for one in _constants(value)]
        if not isinstance(value, list | tuple):
            return constants[0]
        name = f"%v{len(self._lines)}"
        self._lines.append(f"{name} : int[] = prim::ListConstruct({', '.join(constants)})")
        return name

    def _constant(self, kind: str, value: str) -> str:
        if (kind, value) not in self._known:
            self._known[kind, value] = name = f"%c{len(self._known)}"
            self._lines.append(f"{name} : {kind} = prim::Constant{f'[value={value}]' if value else ''}()")
        return self._known[kind, value]


def _replace(
    graph: fx.Graph, run: Sequence[fx.Node], number: int, plainly: Callable[[fx.Graph], Callable[..., Any]]
) -> None:
    """Replaces operators with one function."""
    text = _Text()
    for node in run:
        text.add(node)
    read = [node for node in run if any(user not in run for user in node.users)]
    try:
        function = Interpreted(number, text.returning(read), plainly(_apart(run, text.inputs)))
    except RuntimeError as error:
        raise _Untranslatable from error
    if function.overloads != text.overloads:
        raise _Untranslatable
    with graph.inserting_after(run[-1]):
        made = graph.call_function(function, tuple(text.inputs))
    for index, node in enumerate(reversed(read)):
        with graph.inserting_after(made):
            place = len(read) - 1 - index
            part = made if len(read) == 1 else graph.call_function(getitem, (made, place))
        node.replace_all_uses_with(part, lambda user: user not in run)
    for node in reversed(run):
        graph.erase_node(node)


def _apart(run: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> fx.Graph:
    """The operators in a graph of their own."""
    apart = fx.Graph()
    copies = {node: apart.placeholder(node.name) for node in inputs}
    for node in run:
        copies[node] = apart.node_copy(node, copies.__getitem__)
    apart.output(())
    return apart
