"""What a graph restored from a checkpoint, and what did not match."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stepgraph.errors import readable


class Mismatch(NamedTuple):
    """A tensor that the graph and the checkpoint declare differently."""

    name: str
    in_graph: str
    in_checkpoint: str


@dataclass(frozen=True)
class RestoreReport:
    """The result of `restore`; print it for a summary.

    Args:
        path: the checkpoint that was read.
        loaded: names of the restored tensors.
        missing: names in the graph that the checkpoint does not have; they keep their values.
        unexpected: names in the checkpoint that the graph does not have.
        mismatched: names in both with different shapes or types; they keep their values.
        state: which training state (optimizer, random numbers) was not restored, and why.
        changed: settings of layers or the optimizer that differ; the graph keeps its own.
        notes: the notes of the saving program.
    """

    path: Path
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    state: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether everything in the graph came from the checkpoint and nothing was left over."""
        return not (self.missing or self.unexpected or self.mismatched or self.state)

    @property
    def facts(self) -> dict[str, str]:
        """What did not match, one line per kind."""
        shapes = (f"{one.name} ({one.in_graph} here, {one.in_checkpoint} there)" for one in self.mismatched)
        lines = {
            "missing": ", ".join(self.missing),
            "unexpected": ", ".join(self.unexpected),
            "mismatched": ", ".join(shapes),
            "state": "; ".join(self.state),
        }
        return {name: line for name, line in lines.items() if line}

    def __str__(self) -> str:
        lines = [f"{self.path}: {len(self.loaded)} of {self._count} tensors restored"]
        width = len("mismatched")
        facts = {**self.facts, **({"changed": "; ".join(self.changed)} if self.changed else {})}
        return "\n".join(map(readable, [*lines, *(f"    {name:{width}}   {line}" for name, line in facts.items())]))

    @property
    def _count(self) -> int:
        return len(self.loaded) + len(self.missing) + len(self.mismatched)
