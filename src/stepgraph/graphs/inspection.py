"""Inspecting a compiled graph: how it runs, what it needs, where its numbers stop being finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType

from stepgraph import draw
from stepgraph.compiler import memory
from stepgraph.compiler.program import PartName
from stepgraph.compiler.step import STREAM
from stepgraph.errors import StateError
from stepgraph.graphs.compilation import Arrays, Compilation
from stepgraph.graphs.session import Session
from stepgraph.layers.node import Node
from stepgraph.runtime.declaration import Declaration
from stepgraph.runtime.description import described, described_step
from stepgraph.runtime.feeds import Data
from stepgraph.runtime.numerics import NumericsReport, report
from stepgraph.runtime.profile import Profile, profile
from stepgraph.runtime.trial import everything, replay

# As text and as a picture


def table(title: str, nodes: Sequence[Node], compilation: Compilation | None) -> RenderableType:
    """The layers and, for a compiled graph, its memory plan and how it runs."""
    parts: list[RenderableType] = [draw.table(nodes, title)]
    for text in _texts(compilation):
        parts += ["", draw.lines(text)]
    return Group(*parts)


def svg(nodes: Sequence[Node], declaration: Declaration) -> str:
    """The graph as an SVG."""
    return draw.svg(nodes, declaration.stopped, {tensor: name for _, name, tensor in declaration.feeds})


def html(title: str, nodes: Sequence[Node], declaration: Declaration, compilation: Compilation | None) -> str:
    """The same for a notebook."""
    return draw.graph_html(title, svg(nodes, declaration), nodes, *_texts(compilation))


def _texts(compilation: Compilation | None) -> list[str]:
    if compilation is None:
        return []
    programs, trains = compilation.programs, compilation.declaration.trains
    batch = compilation.usual_batch
    if compilation.feeds.is_open and programs.last_batch is None:
        text = "The first call compiles a program for its number of rows; memory_plan_for(rows) plans its memory."
        return [text, _lines(described_step(compilation.step(batch, trains)))]
    program = programs.program(batch, trains)
    names = (PartName.LAST, compilation.whole)  # a rank with one shard runs only the last
    made = [name for name in names if (name, batch) in programs.executables]
    executable = programs.in_use(made[0], batch) if made else None
    switch = programs.switches.get(batch) if trains else None
    return [str(programs.plan), _lines([*_ranks(compilation), *described(program, executable, switch)])]


def _ranks(compilation: Compilation) -> list[tuple[str, str]]:
    """Which of several ranks this is, and what it sends to the others."""
    world = compilation.world
    if world.is_alone:
        return []
    return [("rank", f"{world.rank} of {world.size}, sends {draw.size(compilation.traffic.total)} per update")]


def _lines(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["How it runs", *(f"  {name:<12}{text}" for name, text in rows)])


# Rerunning a step on copies of everything it changes


class _Batch(NamedTuple):
    """The data of a rerun step: its batch size, its number, all arrays it reads."""

    batch: int
    step: int | None
    arrays: Arrays


def check_numerics(session: Session, given: tuple[Data | None, ...], batch_size: int | None) -> NumericsReport:
    """Finds where a step's numbers stop being finite."""
    compiled = session.compilation
    chosen = _chosen(session, "check_numerics", given, batch_size)
    program = compiled.programs.program(chosen.batch, compiled.declaration.trains)
    plan = memory.plan(program.step, everything(program))
    compiled.require_fit(plan, "check_numerics", chosen.batch, "check_numerics")
    return report(replay(program, chosen.arrays), chosen.step, session.feeds.titles)


def profiled(session: Session, given: tuple[Data | None, ...], batch_size: int | None, repeat: int) -> Profile:
    """Time by layer and phase, the minimum over several runs."""
    chosen = _chosen(session, "profile", given, batch_size)
    compiled = session.compilation
    whole = PartName.STEP if compiled.declaration.trains else PartName.INFERENCE  # of shards, too: with the update
    executable = compiled.programs.executable(whole, chosen.batch)
    found = []
    with executable.settings():
        for _ in range(repeat):
            copies = {key: chosen.arrays[key].clone() for key in executable.part.written}
            arrays = executable.bind({**chosen.arrays, **copies}).filled({})
            found.append(profile(executable.part, arrays, session.device.torch)[1])
    return Profile.best_of(found)


def _chosen(session: Session, call: str, given: tuple[Data | None, ...], batch_size: int | None) -> _Batch:
    """The batch passed by the caller, or that of the last call."""
    last = session.last
    if any(data is not None for data in given):
        named = session.feeds.named(*given)
        batch = session.batch_size(batch_size, named)
        feeds = session.feeds.arrays(named, batch, session.device, exact=not batch_size)
        return _Batch(batch, session.next_step, _beside(session, batch, again=False) | feeds)
    if last is None:
        raise StateError(
            f"{session.compilation.declaration.kind}.{call}",
            "nothing has been executed yet",
            fix="execute a step first, or pass a batch",
        )
    return _Batch(last.batch, last.step, _beside(session, last.batch, again=True) | last.feeds)


def _beside(session: Session, batch: int, again: bool) -> Arrays:
    """Arrays other than the feeds; `again` repeats the last step, with its random numbers."""
    if session.state is None:
        return session.arrays()
    stream = session.arrays()[STREAM].clone()
    stream[1] -= int(again and session.last is not None and session.last.drew)
    return session.arrays() | session.seeds(batch) | {STREAM: stream}
