"""Whether results lie in memory as the recording believes.

A step is recorded on arrays without memory, and PyTorch's account of how an operator lays its result out is not always
what its kernels do, above all where channels lie last. Operators give the right numbers in either order; a recorded
view does not, since it may be impossible in the real one. So the first run of a program compares the two, and where
they differ anywhere, that program copies what cannot be viewed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.trace import layer_of

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)
_STATEMENT = re.compile(r"^( +)(\w+)( = .*?)(;  .*)?$")
NOTE = "_note"


def noting(source: str) -> str:
    """Generated code that hands each result to `_note`, with its name, before anything else happens."""
    lines = []
    for line in source.splitlines():
        found = _STATEMENT.match(line)
        if found is not None:
            indent, name, call, rest = found.groups()
            line = f"{indent}{name}{call}; {NOTE}('{name}', {name}){rest or ''}"
        lines.append(line)
    return "\n".join(lines)


class Layouts:
    """Compares results with what was recorded, in one run."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._believed = {node.name: node for node in nodes}
        self.surprises: list[str] = []

    def note(self, name: str, found: Any) -> None:
        """Takes one result of an operator into account."""
        node = self._believed.get(name)
        for real, believed in zip(_arrays(found), _arrays(node.meta.get("val") if node else None), strict=False):
            if not same_order(real, believed):
                assert node is not None
                self.surprises.append(
                    f"{layer_of(node)}: {node.target} gives strides {real.stride()}, not {believed.stride()}"
                )


def same_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two arrays of one shape lie alike in memory; the stride of an extent of one means nothing."""
    return all(a == b for a, b, extent in zip(one.stride(), other.stride(), one.shape, strict=False) if extent > 1)


def reshaped(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """What a view shows, copied where memory does not lie so that it could be seen in place."""
    return x.reshape(shape)


def tolerant(names: dict[str, Any]) -> dict[str, Any]:
    """The names that generated code uses, with views that copy where they must."""
    return {name: reshaped if any(one is view._op for view in VIEWS) else one for name, one in names.items()}


def _arrays(found: Any) -> list[torch.Tensor]:
    several = found if isinstance(found, tuple | list) else [found]
    return [one for one in several if isinstance(one, torch.Tensor)]
