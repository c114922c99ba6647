"""Writes `functions.py`: one method per layer, or per variant of a layer, with the signature of what creates it.

    python tools/layer_functions.py > src/stepgraph/layers/functions.py

Rows follow from the public layers; only names that a rule does not give, and sources that are not plain, are listed.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from stepgraph.layers.arithmetic import ArithmeticLayer, ArithmeticOperation
from stepgraph.layers.layer import Layer

WIDTH = 116
# Families of variants: the pattern of their functions' names, and the names of some.
VARIANTS = {
    "ActivationLayer": "{}",
    "ArithmeticLayer": "{}",
    "ComparisonLayer": "{}",
    "LossLayer": "{}",
    "PaddingLayer": "{}_padding",
    "PoolingLayer": "{}_pooling",
    "ReductionLayer": "{}",
    "SoftmaxLayer": "{}",
    "UpsampleLayer": "upsample_{}",
}
RENAMED = {
    "ArithmeticLayer.max": "maximum",
    "ArithmeticLayer.min": "minimum",
    "LossLayer.log": "log_loss",
    "LossLayer.hinge": "hinge_loss",
    "LossLayer.huber": "huber_loss",
    "FullyConnectedLayer": "dense",
    "MultiheadAttentionLayer": "attention",
    "MatMulLayer": "matmul",
}
# Layers that `Graph` wires itself, in ML Compute's order of arguments.
ELSEWHERE = {
    "ConcatenationLayer", "GatherLayer", "MatMulLayer", "ReshapeLayer", "ScatterLayer", "SelectionLayer",
    "SplitLayer", "TransposeLayer",
}  # fmt: skip
BY_NODE = {"TorchLayer"}  # wired with `graph.node`: the module decides how many sources and results it has
SEVERAL = {"LSTMLayer", "GRULayer"}  # layers that may have several results
ATTENTION = "x, x if key is None else key, (x if key is None else key) if value is None else value, *masks"
# Further sources as keywords, and what to wire.
SOURCES = {
    "MultiheadAttentionLayer": (
        "key: Tensor | None = None, value: Tensor | None = None, masks: Sequence[Tensor] = ()",
        ATTENTION,
    ),
    "LSTMLayer": ("others: Sequence[Tensor] = ()", "x, *others"),
    "GRULayer": ("others: Sequence[Tensor] = ()", "x, *others"),
}
HEAD = '''"""Layers as functions of a graph: `graph.relu(x)` wires `ActivationLayer.relu()`.

Written by `python tools/layer_functions.py`; a test compares.
"""

from __future__ import annotations

{imports}


class LayerFunctions(ABC):
    """The functions of a graph that wire one layer and return its result, or all of its results as a tuple."""

    @abstractmethod
    def wire(self, layer: Layer, *sources: Operand, loss_labels: Tensor | None = None) -> Any:
        """Wires a layer and returns its result, or all of them."""
'''


class Row(NamedTuple):
    """A function to write: its name, the layer, what creates it, and how that is called."""

    name: str
    layer: type[Layer]
    create: Callable[..., Any]
    call: str


def rows(layers: list[type[Layer]]) -> Iterator[Row]:
    """The functions of all layers, in the order of the layers."""
    for layer in layers:
        kind = layer.__name__
        if kind in ELSEWHERE | BY_NODE:
            continue
        if kind in VARIANTS:
            for name in _factories(layer):
                call = f"{kind}.{name}"
                yield Row(RENAMED.get(call, VARIANTS[kind].format(name)), layer, getattr(layer, name), call)
        elif "create" in vars(layer):
            yield Row(RENAMED.get(kind, _snake(kind)), layer, layer.create, f"{kind}.create")  # type: ignore[attr-defined]
        else:
            yield Row(RENAMED.get(kind, _snake(kind)), layer, layer, kind)


def written(layers: list[type[Layer]]) -> str:
    """The module."""
    imports: dict[str, set[str]] = {
        "abc": {"ABC", "abstractmethod"},
        "typing": {"Any"},
        "stepgraph.layers.layer": {"Layer"},
        "stepgraph.tensors.tensor": {"Operand", "Tensor"},
    }
    found = list(rows(layers))
    methods = [_method(row, imports) for row in found]
    methods += _functions_of_one({row.name for row in found})
    imports[ArithmeticLayer.__module__].add(ArithmeticOperation.__name__)
    foreign, ours = ([m for m in imports if m.startswith("stepgraph") is own] for own in (False, True))
    blocks = ["\n".join(_import(m, imports[m]) for m in sorted(modules)) for modules in (foreign, ours)]
    return "\n".join([HEAD.format(imports="\n\n".join(blocks)), *methods])


def _method(row: Row, imports: dict[str, set[str]]) -> str:
    kind = row.layer.__name__
    arguments = _arguments(row, imports)
    imports.setdefault(row.layer.__module__, set()).add(kind)
    extra, sources = SOURCES.get(kind, ("", "x"))
    given, loss = ["x: Tensor"], ""
    if row.layer.is_loss and row.layer.takes_labels:
        given, sources, loss = ["x: Tensor", "labels: Tensor"], "x", ", loss_labels=labels"
    elif row.layer.source_counts[1] == 2:
        given, sources = ["x: Operand", "y: Operand"], "x, y"
    if extra:
        imports.setdefault("collections.abc", set()).add("Sequence")
        arguments.kwonlyargs[:0], arguments.kw_defaults[:0] = _keywords(extra)
    finds = hasattr(getattr(row.create, "__func__", None), "found_at_node")
    passed = [f"{one.arg}={one.arg}" if finds else one.arg for one in arguments.args]
    passed += [f"{one.arg}={one.arg}" for one in arguments.kwonlyargs if f"{one.arg}:" not in extra]
    passed += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    signature = ", ".join(filter(None, ["self", *given, ast.unparse(arguments)]))
    result = "Any" if kind in SEVERAL else "Tensor"
    return (
        f"\n    def {row.name}({signature}) -> {result}:\n{_docstring(row)}\n"
        f"        return self.wire({row.call}({', '.join(passed)}), {sources}{loss})"
    )


def _docstring(row: Row) -> str:
    about = (inspect.getdoc(row.create) or "").splitlines()[0]
    short = f'        """`{row.call}`: {about}"""'
    if len(short) <= WIDTH:
        return short
    wrapped = textwrap.fill(about, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return f'        """`{row.call}`.\n\n{wrapped}\n        """'


def _functions_of_one(taken: set[str]) -> Iterator[str]:
    """Arithmetic operations on one source, which have no methods of their own."""
    for operation in ArithmeticOperation:
        name = operation.name.lower()
        if name not in (*_factories(ArithmeticLayer), *taken):
            call = f"ArithmeticLayer(ArithmeticOperation.{operation.name}"
            yield (
                f'\n    def {name}(self, x: Tensor, *, label: str = "") -> Tensor:\n'
                f'        """`{call})`: {operation.debug_description.lower()} of each element."""\n'
                f"        return self.wire({call}, label=label), x)"
            )


def _arguments(row: Row, imports: dict[str, set[str]]) -> ast.arguments:
    """The arguments of what creates a layer, without the class and what is found when it is wired."""
    function = getattr(row.create, "__func__", row.create)
    if function is row.layer:
        arguments = _constructor(row.layer)
    else:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        arguments = ast.parse(source).body[0].args  # type: ignore[attr-defined]
        left_out = {"cls", getattr(function, "found_at_node", "")}
        assert len(arguments.args) - len(arguments.defaults) >= len(left_out & {one.arg for one in arguments.args})
        arguments.args = [one for one in arguments.args if one.arg not in left_out]
    module = sys.modules[row.layer.__module__]
    for one in ast.walk(arguments):
        if isinstance(one, ast.Name) and hasattr(module, one.id):
            imports.setdefault(_home(module, one.id), set()).add(one.id)
    return arguments


def _constructor(layer: type[Layer]) -> ast.arguments:
    """The arguments of a dataclass, without the debugging flag."""
    shown = [p for p in inspect.signature(layer).parameters.values() if p.name != "is_debugging_enabled"]
    text, keyword = "", False
    for one in shown:
        text += ", *" if one.kind is one.KEYWORD_ONLY and not keyword else ""
        keyword |= one.kind is one.KEYWORD_ONLY
        text += f", {one.name}: {one.annotation}" + ("" if one.default is one.empty else f" = {_code(one.default)}")
    return ast.parse(f"def f({text.removeprefix(', ')}): ...").body[0].args  # type: ignore[attr-defined]


def _code(value: Any) -> str:
    """A default as it is written in code."""
    return f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else repr(value)


def _keywords(text: str) -> tuple[list[ast.arg], list[ast.expr | None]]:
    arguments = ast.parse(f"def f(*, {text}): ...").body[0].args  # type: ignore[attr-defined]
    return arguments.kwonlyargs, arguments.kw_defaults


def _home(module: Any, name: str) -> str:
    """The module that defines a name which another one imports."""
    for one in ast.parse(inspect.getsource(module)).body:
        if isinstance(one, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in one.names):
            assert one.module is not None
            found = sys.modules[one.module]
            return _home(found, name) if one.module.startswith("stepgraph") else one.module
    return str(module.__name__)


def _import(module: str, names: set[str]) -> str:
    return f"from {module} import {', '.join(sorted(names, key=_order))}"


def _order(name: str) -> tuple[int, str]:
    """Constants, classes, functions: as ruff sorts them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _factories(layer: type[Layer]) -> list[str]:
    own = {name: one for name, one in vars(layer).items() if isinstance(one, classmethod) and not name.startswith("_")}
    return [name for name in own if name not in ("supports_data_type", "deferred")]


def _snake(kind: str) -> str:
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|\d+[A-Z]?", kind.removesuffix("Layer"))
    return "_".join(words).lower()


def public_layers() -> list[type[Layer]]:
    """The layers that stepgraph exports."""
    import stepgraph

    named = (getattr(stepgraph, name) for name in dir(stepgraph))
    found = {one for one in named if isinstance(one, type) and issubclass(one, Layer) and one is not Layer}
    return sorted(found, key=lambda layer: (layer.__module__, layer.__name__))


if __name__ == "__main__":
    print(written(public_layers()))
