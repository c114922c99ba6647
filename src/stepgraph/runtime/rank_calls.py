"""Calls that every rank must make: what a rank tells the others before one, and what all say if these do another.

In such a call ranks exchange something, or prepare to do so in later updates. Those that make another call meanwhile
would wait for something else, so ranks first tell each other which call they make: in the exchange of an update, which
one that makes no update refuses (`Shards.meet`), or, during a run, in the exchange about its end (`World.greet`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from stepgraph.errors import ExecutionError

# The call, what must be equal in it, and in an update the first tensor that is frozen now, from 1, negative if it is no
# longer; in other calls, the number of the graph.
Told = tuple[int, int, int]
_TOLD = "other_ranks_know"  # of an error
BETWEEN, BATCH, NO_BATCH, OVER = range(4)  # where in a run a rank is: in front of an update, with or without a batch


class RankCall(IntEnum):
    """What a rank does; numbers travel."""

    UPDATE = 0
    EXECUTE = 1  # an update with other updatable parameters
    COMPILE = 2
    COMPILE_OPTIMIZER = 3
    STOP_GRADIENT = 4
    ALLOCATE_USER_GRADIENT = 5
    LINK = 6
    ADD_OUTPUTS = 7
    KEEP_PREDICTIONS = 8
    GRADIENT_TENSOR = 9
    SAVE = 10
    AVERAGES = 11
    FIT = 12
    STEP_OF_FIT = 13
    FAILURE = 14  # of something in front of an exchange

    @classmethod
    def named(cls, call: str) -> RankCall:
        """The call with a name."""
        return cls[call.upper()]

    @property
    def exchanged(self) -> str:
        """What ranks exchange before the call, for errors about those that do not come."""
        return f"their calls, which must be the same (here: {self.name.lower()})"

    @property
    def words(self) -> str:
        """What a rank that makes the call does."""
        return _WORDS.get(self, f"calls {self.name.lower()}")


_WORDS = {
    RankCall.UPDATE: "makes an update",
    RankCall.EXECUTE: "makes an update",
    RankCall.AVERAGES: "reads averages",
    RankCall.STEP_OF_FIT: "goes on with fit",
    RankCall.FAILURE: "has failed",
}


def disagreement(
    told: Sequence[Told], where: str, name: Callable[[int], str], graphs: Sequence[float]
) -> ExecutionError | None:
    """The error for ranks that make different calls, or the same with different graphs; None if all make the same.

    Args:
        told: what each rank has told.
        where: this rank.
        name: the name of a tensor by its number.
        graphs: the number of each rank's graph.
    """
    calls = [RankCall(one) for one, _, _ in told]
    failed = [rank for rank, one in enumerate(calls) if one == RankCall.FAILURE]
    if failed:
        problem = f"{listed(failed)} failed between two updates; nothing has changed"
        return ExecutionError(where, problem, fix="see the error of that rank") if len(failed) < len(calls) else None
    updates = {*calls} <= {RankCall.UPDATE, RankCall.EXECUTE}
    if len({*graphs}) > 1 and (updates or len({*calls}) == 1):
        return _different_graphs(graphs, calls[0], where)
    if updates:
        return _switched(told, where, name)
    if len({*calls}) > 1:
        parts = [f"{listed([rank for rank, one in enumerate(calls) if one == call])} {_conjugated(call, calls)}"
                 for call in dict.fromkeys(calls)]  # fmt: skip
        fix = "make such calls on every rank, at the same place in the program"
        return ExecutionError(where, f"{', and '.join(parts)}; nothing has changed", fix=fix)
    details = [detail for _, detail, _ in told]
    if calls[0] == RankCall.STEP_OF_FIT and len({*details}) > 1:
        return _out_of_step(details, where)
    if len({*details}) > 1:
        problem = f"ranks call {calls[0].name.lower()} with different arguments; nothing has changed"
        return ExecutionError(where, problem, fix="pass the same, in the same order, on every rank")
    return None


def _different_graphs(graphs: Sequence[float], call: RankCall, where: str) -> ExecutionError:
    """The error for ranks that make one call, each with another graph."""
    other = next(rank for rank, one in enumerate(graphs) if one != graphs[0])
    done = "execute different graphs" if call <= RankCall.EXECUTE else f"call {call.name.lower()} of different graphs"
    problem, fix = f"ranks 0 and {other} {done}; nothing has changed", "use graphs in the same order on every rank"
    return ExecutionError(where, problem, fix=fix)


def _out_of_step(places: Sequence[int], where: str) -> ExecutionError:
    """The error for ranks that are at different places of a run."""
    ready, others = ([rank for rank, one in enumerate(places) if (one == BATCH) == is_ready] for is_ready in (1, 0))
    if not ready:
        return ExecutionError(where, "ranks have come to different places of the run", fix="run the same program")
    has, have_none = ("has" if len(some) == 1 else "have" for some in (ready, others))
    problem = f"{listed(ready)} {has} a batch for the next update, and {listed(others)} {have_none} none"
    return ExecutionError(where, problem, fix="pass the same data on every rank")


def _conjugated(call: RankCall, calls: Sequence[RankCall]) -> str:
    """What one rank or several of them do."""
    verb, rest = call.words.split(" ", 1)
    if calls.count(call) > 1:
        verb = {"has": "have", "goes": "go"}.get(verb, verb.removesuffix("s"))
    return f"{verb} {rest}"


def _switched(told: Sequence[Told], where: str, name: Callable[[int], str]) -> ExecutionError | None:
    """The error for ranks that have frozen different parameters since the last update."""
    if len({detail for _, detail, _ in told}) == 1:
        return None
    parts = []
    for one in dict.fromkeys(switched for *_, switched in told):
        ranks = [rank for rank, (*_, switched) in enumerate(told) if switched == one]
        has = "has" if len(ranks) == 1 else "have"
        done = f"{'frozen' if one > 0 else 'unfrozen'} {name(abs(one) - 1)}" if one else "not"
        parts.append((one == 0, f"{listed(ranks)} {has} {done}"))
    found = ", and ".join(text for _, text in sorted(parts, key=lambda part: part[0]))
    problem = found if len(parts) > 1 else f"{found}, and different parameters behind it"
    fix = "freeze and unfreeze the same parameters on every rank"
    return ExecutionError(where, f"since the last update, {problem}; nothing has changed", fix=fix)


def note_told(error: Exception) -> bool:
    """Notes that other ranks hear of an error; returns whether they have not before."""
    is_new = not getattr(error, _TOLD, False)
    setattr(error, _TOLD, True)
    return is_new


def listed(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1 and 2`, or `ranks 1, 2 and 3`."""
    *most, last = map(str, ranks)
    return f"rank {last}" if not most else f"ranks {', '.join(most)} and {last}"
