"""Statistics updated together: each by a rule for single elements, all of them in few launches.

A rule is a short list of operators that reads the statistic and one array that the batch has left. On CUDA it becomes
code of the kernel that also does the optimizer's updates; elsewhere its operators run one after another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph.compiler.kernels.update_kernel import Update, launch, written
from stepgraph.system.torch_private import disable_modes

OLD, FOUND = "old", "found"  # what a rule reads, by name; its results are known by their number


class Rule(NamedTuple):
    """How a statistic changes, as operators in order: each with its arguments, which are names, numbers of earlier
    operators as `("result", i)`, or plain numbers. The last one computes the new value.
    """

    operators: tuple[tuple[Any, tuple[Any, ...]], ...]

    def __call__(self, old: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """The new value."""
        known: dict[Any, torch.Tensor] = {OLD: old, FOUND: found}
        for index, (operator, arguments) in enumerate(self.operators):
            given = (known[one] if isinstance(one, str | tuple) else one for one in arguments)
            known["result", index] = operator(*given)
        return known["result", len(self.operators) - 1]

    @property
    def number(self) -> int:
        """A number made from what it does, the same in every run."""
        return int(hashlib.sha256(repr(self).encode()).hexdigest()[:15], 16)


_rules: dict[int, Rule] = {}  # operators take numbers and arrays, no Python objects


def known(rule: Rule) -> int:
    """The number by which `track_` finds a rule from now on."""
    _rules[rule.number] = rule
    return rule.number


_library = torch.library.Library("stepgraph", "FRAGMENT")
_library.define("track_(Tensor(a!)[] statistics, Tensor[] found, int[] rules, Tensor? accepted) -> ()")
TRACK = torch.ops.stepgraph.track_.default


@torch.library.register_fake("stepgraph::track_", lib=_library)
def _(*_: object) -> None:
    return None


@torch.library.impl(_library, "track_", "CompositeExplicitAutograd")
def track(
    statistics: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
    rules: Sequence[int],
    accepted: torch.Tensor | None,
) -> None:
    """Changes all statistics, or none if the call is not accepted."""
    codes = [_code(number) for number in rules] if statistics[0].is_cuda and torch.version.hip is None else [None]
    if None in codes:
        tracked_one_by_one(statistics, found, rules, accepted)
        return
    arrays = Update(statistics, found, (), statistics[0].new_empty(0), finite=accepted)
    launch(arrays, [code for code in codes if code is not None], [statistics[0]] * len(codes))


def tracked_one_by_one(
    statistics: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
    rules: Sequence[int],
    accepted: torch.Tensor | None,
) -> None:
    """The same as single operators, which a compiler can fuse with what computes the arrays they read."""
    for old, one, number in zip(statistics, found, rules, strict=True):
        new = _rules[number](old, one.view(old.shape))
        old.copy_(new if accepted is None else torch.where(accepted, new, old))


@cache
def _code(number: int) -> str | None:
    """A rule as C code for one element, or None if it does anything that a kernel cannot."""
    with disable_modes():
        return written(lambda old, found, *_: [_rules[number](old, found)], (1,), 0, 0)


def expand_statistics(graph: fx.Graph) -> None:
    """Expands updates of statistics into single operators."""
    for node in graph.nodes:
        if node.target is TRACK:
            node.target = tracked_one_by_one
