"""Ranks run fused operators from the same update on, or none of them does."""

import os
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from stepgraph.compiler import fusion
from stepgraph.compiler.fusion import Fused, Unusable
from stepgraph.compiler.program import Part, PartName
from stepgraph.compiler.ranks import slices
from stepgraph.compiler.step import Fusion, Step
from tests.parallel_runs import batch, marks, new, together

ROWS = 16
READY = {"0": 3, "1": 5}  # by rank, the update after which the compiler is done


def fake(part: Part) -> Fused:
    """Stands for what PyTorch's compiler makes: it triples losses, so that they show what has run."""

    def function(*arrays: torch.Tensor) -> list[torch.Tensor]:
        every = part.module(*arrays)
        return [found * 3 if found.numel() == 1 and found.is_floating_point() else found for found in every]

    return Fused(function, lambda: None)


def switched(fails: str, where: str = "host") -> tuple[list[int], list[str]]:
    """In which updates fused operators have run: compilers of two ranks are done at different times, or one fails."""
    rank, started = os.environ["RANK"], []
    patched = pytest.MonkeyPatch()
    if where == "device":  # that decides about updates; the host reads what ranks have told in the next one
        patched.setattr("stepgraph.graphs.compilation.DECIDED", {"cpu"})
    patched.setattr("stepgraph.graphs.compilation.fusion_of", lambda *_: Fusion.LATER)
    patched.setattr("stepgraph.graphs.verdicts.fusion_of", lambda *_: Fusion.LATER)

    def fuse_in_background(part: Part, step: Step) -> Future[Fused]:
        started.append((Future(), part))
        return started[-1][0]

    patched.setattr(fusion, "fuse_in_background", fuse_in_background)
    training, plain = (new("mlp", parallel={"order": "any"}) for _ in range(2))
    fused = []
    for update in range(1, 9):
        expected = plain.execute(*batch("mlp", ROWS, 0)).loss
        found = training.execute(*batch("mlp", ROWS, 0)).loss
        assert expected is not None and found is not None
        if found > 2 * expected:
            fused.append(update)
        executables = training.require_session("test").compilation.programs.executables
        if update == 1:
            for one in executables.values():
                one.fuse_later({})
        if update == READY[rank]:
            for future, part in started:
                future.set_exception(Unusable("no compiler")) if rank == fails else future.set_result(fake(part))
    return fused, sorted({one.fusing for one in executables.values()})


@pytest.mark.parametrize("where, updates", [("host", [7, 8]), ("device", [8])])
def test_ranks_switch_in_the_same_update(where: str, updates: list[int]) -> None:
    assert together(2, switched, "", where) == [(updates, ["done"])] * 2


@pytest.mark.parametrize("where", ["host", pytest.param("device", marks=pytest.mark.deep)])
def test_if_one_rank_fails_all_stay_unfused(where: str) -> None:
    first, second = together(2, switched, "1", where)
    assert first == ([], ["rank 1 could not fuse its operators"])
    assert second == ([], ["no compiler"])


def fused_first(name: str, order: str) -> tuple[list[Any], dict[str, str], set[str]]:
    if "RANK" in os.environ:
        slices.BUCKET = 1 << 12  # several exchanges at once
    training = new(name, fuse=True, parallel={"order": order})
    losses = [training.execute(*batch(name, ROWS, step)).loss for step in range(3)]
    parts = training.require_session("test").compilation.programs.executables
    for (name_of_part, _), one in parts.items():  # memory that others read is not reused
        exchanges = name_of_part is not PartName.SHARD and not training.world.is_alone
        assert (fusion.EXCHANGING.items() <= fusion.config(one.part, one.step).items()) == exchanges
    assert not parts.keys().isdisjoint({(PartName.UPDATE, ROWS // 8)})
    return losses, marks(training), {one.fusing for one in parts.values()}


@pytest.mark.deep
@pytest.mark.skipif(not fusion.has_compiler(), reason="needs a C++ compiler")
def test_fused_steps_have_the_same_bits_in_every_world() -> None:
    alone = fused_first("wide", "tree")
    assert alone[2] == {"done"}
    for world in (2, 3):
        assert together(world, fused_first, "wide", "tree", timeout=600) == [alone] * world
