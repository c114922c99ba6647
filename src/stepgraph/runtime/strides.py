"""Makes the memory layout of results match the recording.

A step is recorded on arrays without memory, and PyTorch does not always predict the layout of an operator's result
correctly, especially with channels last. Later operators were recorded for the predicted layout: a view may be
impossible in the real one, or an operator may require the predicted one. So the first run of a program compares the
two. Results with another layout are copied into the recorded one, in that run and all later ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.program import copied_as, fake, notes, same_order

_STATEMENT = re.compile(r"^( +)(\w+)( = .*?)(;  .*)?$")
LAID = "_laid_out"


def laying_out(source: str, names: Iterable[str] | None = None) -> str:
    """Generated code that passes results, all or some, through `_laid_out`."""
    wanted = None if names is None else set(names)
    lines = []
    for line in source.splitlines():
        found = _STATEMENT.match(line)
        if found is not None and (wanted is None or found[2] in wanted):
            indent, name, call, rest = found.groups()
            line = f"{indent}{name}{call}; {name} = {LAID}('{name}', {name}){rest or ''}"
        lines.append(line)
    return "\n".join(lines)


class Layouts:
    """The recorded layouts of a program's results, and which results differ from them."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._nodes = {node.name: node for node in nodes if node.op == "call_function"}
        self.surprises: dict[str, str] = {}

    def laid_out(self, name: str, found: Any) -> Any:
        """A result in its recorded layout."""
        node = self._nodes.get(name)
        believed = None if node is None else fake(node)
        if isinstance(found, tuple | list) and isinstance(believed, tuple | list):
            pairs = zip(found, believed, strict=True)
            return type(found)(self._ordered(name, one, other) for one, other in pairs)
        return self._ordered(name, found, believed)

    def _ordered(self, name: str, real: Any, believed: Any) -> Any:
        if not isinstance(real, torch.Tensor) or not isinstance(believed, torch.Tensor) or same_order(real, believed):
            return real
        node = self._nodes[name]
        self.surprises[name] = f"{notes(node).layer}: {node.target} returns {real.stride()}, not {believed.stride()}"
        return copied_as(real, believed.stride())
