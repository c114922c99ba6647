"""Several ranks that each update a slice: what they hold and send, how their state is read, and what fails."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph import draw
from stepgraph.compiler.passes import held
from stepgraph.compiler.program import EXCHANGE, PartName, fake, notes
from stepgraph.compiler.ranks import collectives
from stepgraph.compiler.step import KeyKind
from stepgraph.graphs import compilation
from stepgraph.runtime import world as worlds
from tests.parallel_runs import NETWORKS, SHARDS, batch, compiled, marks, mlp, new, together, wide

ELEMENTS = 6 * 1400 + 1400 + 1400 * 3 + 3  # the parameters of `wide`


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def steps(training: sg.TrainingGraph, count: int = 2, first: int = 0) -> list[Any]:
    return [training.execute(*batch("wide", 16, seed)).loss for seed in range(first, first + count)]


# ------------------------------------------------------------------------------------------- memory and messages


@contextmanager
def counted() -> Any:
    """Counts the bytes that this rank sends to others, by what they are."""
    sent: dict[str, int] = {}
    start = worlds.World.start

    def counting(self: worlds.World, what: str, name: str, array: Any, *settings: Any) -> Any:
        each = array.nbytes // (self.size if name == "reduce_scatter_tensor" else 1)
        given = settings[1] if name == "all_to_all_single" else [each] * self.size
        kind = "bucket" if "bucket" in what or "updates" in what else "other"
        sent[kind] = sent.get(kind, 0) + sum(given) - given[self.rank]
        return start(self, what, name, array, *settings)

    worlds.World.start = counting  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        worlds.World.start = start  # type: ignore[method-assign]


def facts(order: str) -> dict[str, Any]:
    training = new("wide", parallel={"order": order})
    steps(training, 1)
    with counted() as sent:
        losses = steps(training, 3)
    session = training.require_session("test")
    sliced = (KeyKind.STATE, KeyKind.AVERAGE)
    held = sum(array.nbytes for key, array in session.arrays().items() if key.kind in sliced)
    plan = training.memory_plan
    executables = session.compilation.programs.executables
    return {
        "held": held,
        "planned": plan.optimizer_state,
        "plan": plan.total,
        "sent": sent,
        "promised": training.bytes_sent,
        "table": str(training),
        "shown": [len(tensor.optimizer_data) for layer in training.layers for tensor in layer.parameters.values()],
        "losses": losses,
        "bits": marks(training),
        "last": [str(node.target) for node in executables[PartName.LAST, 2].part.nodes],
    }


@pytest.mark.parametrize("order", ["tree", pytest.param("any", marks=pytest.mark.deep)])
def test_a_rank_holds_its_share_and_sends_what_the_plan_says(order: str) -> None:
    alone = new("wide")
    expected = steps(alone, 1) and steps(alone, 3)
    found = together(2, facts, order)
    assert sum(one["held"] for one in found) == 3 * 4 * ELEMENTS  # momentum, velocity and averages
    assert max(one["held"] for one in found) < 0.65 * 3 * 4 * ELEMENTS
    for rank, one in enumerate(found):
        assert one["planned"] == one["held"]
        shown = f"rank        {rank} of 2, sends {draw.size(one['promised'])} per update"
        assert shown in one["table"] and re.search(r"batch +\d in each of 8 shards", one["table"])
        assert one["sent"]["bucket"] == 3 * one["promised"] and one["sent"]["other"] < 10_000
        assert one["shown"] == [0, 0, 0, 0]
        assert one["losses"] == (expected if order == "tree" else pytest.approx(expected, rel=1e-4))
        assert order == "any" or one["bits"] == marks(alone)
        starts = [index for index, name in enumerate(one["last"]) if name.startswith("stepgraph.start")]
        ends = [index for index, name in enumerate(one["last"]) if name.startswith("stepgraph.finish")]
        assert len(starts) == len(ends) == 2 and max(starts) < min(ends)  # gradients and news travel at the same time
        assert one["last"][starts[1]] == "stepgraph.start_news.default"
    parallel = sg.Parallel(SHARDS, order)
    most = alone.memory_plan_for(16, ranks=2, parallel=parallel).total
    assert max(one["plan"] for one in found) == pytest.approx(most, rel=0.02)
    assert alone.bytes_sent == 0


def copied(shards: int) -> dict[str, Any]:
    """Trains with few shards; how many gradients are copied to be exchanged, and how many belong to others."""
    training = new("wide", shards=shards)
    found: dict[str, Any] = {"losses": steps(training, 4)}
    if training.world.size > 1:
        executables = training.require_session("test").compilation.programs.executables
        last = next(one for (part, _), one in executables.items() if part == PartName.LAST)
        packs = [node for node in last.part.nodes if node.target is collectives.pack]
        owned = [(owner, one.size) for each in last.step.ownership.slices.values() for owner, one in enumerate(each)]
        found["copied"] = sum(fake(node).numel() for node in packs)
        found["of others"] = sum(size for owner, size in owned if owner != rank())
        found["plan"] = training.memory_plan.total
    return found | {"bits": marks(training)}


@pytest.mark.parametrize("shards", [2, 3])
def test_two_ranks_do_not_copy_gradients_that_stay_with_them(shards: int) -> None:
    """A rank with several shards adds them up in copies; the bits are the same in any case."""
    alone, found = copied(shards), together(2, copied, shards)
    assert [one["copied"] for one in found] == [
        found[0]["of others"],
        found[1]["of others"] if shards == 2 else ELEMENTS,
    ]
    assert all(one["of others"] < ELEMENTS for one in found)
    assert all(one[name] == alone[name] for one in found for name in alone)
    planned = new("wide", shards=shards).memory_plan_for(16, ranks=2)  # three shards have six rows or five
    assert max(one["plan"] for one in found) == pytest.approx(planned.total, rel=0.02)


# ------------------------------------------------------------------------------------------- a world of one rank


def single(device: str, name: str, exchanges: bool, order: str = "tree", **settings: Any) -> dict[str, Any]:
    """Trains on one rank, which exchanges everything with itself if it is told to."""
    worlds.ALWAYS_EXCHANGES = exchanges
    sg.set_seed(5)
    training = NETWORKS[name]()
    training.compile(device, parallel=sg.Parallel(4, order, timeout=60), tf32=False, **settings)
    assert training.world.is_alone is not exchanges
    rows = (13, 16, 16, 16, 3, 16, 16, 13)
    losses = [training.execute(*batch(name, count, seed), batch_size=count).loss for seed, count in enumerate(rows)]
    made = training.require_session("test").compilation.programs.executables
    modes = {str(part): one.mode for (part, count), one in made.items() if count == 4 and part != PartName.SHARD}
    return {"losses": losses, "modes": modes, "bits": marks(training) if device == "cpu" else None}


@pytest.mark.deep
def test_collectives_of_a_single_rank_change_nothing() -> None:
    (found,) = together(1, single, "cpu", "wide", True)
    expected = single("cpu", "wide", False)
    assert (found["losses"], found["bits"]) == (expected["losses"], expected["bits"])
    assert found["modes"] == {"last shard": "traced", "update": "traced"}


HOLD, NEVER = held.hold, 1 << 40


def in_an_arena(large: int) -> dict[str, Any]:
    """Trains with results of at least so many bytes in memory that is kept between steps."""
    held.LARGE, held.LEAST, held.WORTH = large, 1, 9.0
    held.hold = HOLD if large < NEVER else lambda part: part
    training = new("wide")
    losses = steps(training, 4)
    parts = [one.part for one in training.require_session("test").compilation.programs.executables.values()]
    sent = [node for part in parts for node in part.nodes if notes(node).layer == EXCHANGE]
    return {
        "losses": losses,
        "marks": marks(training),
        "held": max(part.held for part in parts),
        "apart": bool(sent) and not any(notes(node).offsets for node in sent),
    }


def test_ranks_keep_memory_between_steps_but_not_what_they_send() -> None:
    plain, kept = (together(2, in_an_arena, large) for large in (NEVER, 1 << 8))
    for one, other in zip(plain, kept, strict=True):
        assert one["losses"] == other["losses"] and one["marks"] == other["marks"]
        assert other["apart"] and other["held"] and not one["held"]


def both(device: str, order: str, compute_type: str | None) -> list[dict[str, Any]]:
    settings = {"compute_type": compute_type, "fuse": False}
    return [single(device, "wide", exchanges, order, **settings) for exchanges in (False, True)]


def as_torchrun_would(call: str, module: str = "tests.test_parallel_slices") -> Any:
    """What a call returns in a program that torchrun has started alone, and that ends without a complaint."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    places = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    environment = {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    code = f"import json\nfrom {module} import *\nprint(json.dumps({call}))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(
        command, check=False, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    assert "destroy_process_group" not in ran.stderr and "unwaited" not in ran.stderr, ran.stderr[-5000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.deep
def test_a_program_with_collectives_ends_quietly() -> None:
    expected, found = as_torchrun_would("both('cpu', 'any', None)")
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("order, compute_type", [("tree", None), ("any", "bfloat16")])
def test_collectives_are_captured_on_a_gpu(order: str, compute_type: str | None) -> None:
    """One rank by NCCL: captured, replayed, and torn down when the process ends."""
    expected, found = as_torchrun_would(f"both('cuda', {order!r}, {compute_type!r})")
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4 if compute_type is None else 0.05)
    assert found["modes"] == {"last shard": "CUDA graph", "update": "CUDA graph"}


def _are_fused(made: dict[Any, Any]) -> bool:
    return all(one.mode == "fused CUDA graph" for (part, _), one in made.items() if part != PartName.SHARD)


def fused_and_plain(order: str, seconds: float) -> dict[str, Any]:
    """Trains on one rank by NCCL until all parts are fused and captured, and as long without fusion.

    If any order will do, they are fused in the background.
    """
    worlds.ALWAYS_EXCHANGES = True
    losses, modes = [], {}
    for wanted in (None if order == "any" else True, False):
        sg.set_seed(5)
        training = NETWORKS["wide"]()
        training.compile("cuda", parallel=sg.Parallel(1, order, timeout=60), tf32=False, fuse=wanted)
        every: list[Any] = []
        deadline, made = time.monotonic() + seconds, {}
        while len(every) < (len(losses[0]) if losses else 30) or (not losses and time.monotonic() < deadline):
            every.append(training.execute(*batch("wide", 16, len(every) % 7)).loss)
            made = training.require_session("test").compilation.programs.executables
            if not losses and len(every) >= 30 and _are_fused(made):
                break
        losses.append(every)
        modes = modes or {str(part): one.mode for (part, _), one in made.items() if part != PartName.SHARD}
    return {"losses": losses, "modes": modes}


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["any", "tree"])
def test_steps_with_collectives_are_fused_on_a_gpu(order: str) -> None:
    found = as_torchrun_would(f"fused_and_plain({order!r}, 100.0)")
    fused, plain = found["losses"]
    assert fused == pytest.approx(plain, rel=1e-3, abs=1e-4)
    assert found["modes"] == {"last shard": "fused CUDA graph", "update": "fused CUDA graph"}


# ------------------------------------------------------------------------------------------------ reading state


def lives(folder: str) -> dict[str, Any]:
    """Everything that moves optimizer state: saving, freezing, binding, another optimizer, no ranks, restoring."""
    sg.set_seed(5)
    training = wide()
    for tensor in [tensor for layer in training.layers for tensor in layer.parameters.values()]:
        tensor.bind_optimizer_data([np.full(tensor.shape, 0.5, np.float32) for _ in range(2)])
    compiled(training)
    found: dict[str, Any] = {"first": (steps(training), marks(training))}
    path = training.save(Path(folder) / "whole")
    layer = next(layer for layer in training.layers if layer.parameters)
    for tensor in layer.parameters.values():
        tensor.is_updatable = False
    found["frozen"] = steps(training), marks(training)
    for tensor in layer.parameters.values():
        tensor.is_updatable = True
    found["again"] = steps(training), marks(training)
    training.restore(path)
    found["restored"] = marks(training), steps(training), marks(training)
    training.compile("cpu", deterministic=True)  # each rank by itself: it needs all of the state
    found["apart"] = marks(training)
    training.compile("cpu", parallel=sg.Parallel(8))
    found["together"] = steps(training), marks(training)
    training.compile_optimizer(sg.SGDOptimizer(0.1, momentum=0.9))
    found["momentum"] = steps(training), marks(training)
    return found


@pytest.mark.deep
def test_state_moves_with_the_number_of_ranks(tmp_path: Path) -> None:
    expected = lives(str(tmp_path / "alone"))
    for found in together(2, lives, str(tmp_path / "two")):
        assert found == expected
    one, other = ((tmp_path / name / "whole").glob("tensors-*") for name in ("alone", "two"))
    assert next(one).name == next(other).name  # their names are their checksums


def averaging(folder: str) -> dict[str, Any]:
    """Everything that reads averages: the property, the block, inference graphs, checkpoints, the best epoch."""
    training = new("wide")
    inputs, labels = batch("wide", 4, 0)
    inference = training.inference(weights="average")

    def predicted() -> Any:
        return inference.execute(inputs, batch_size=4).result.numpy().tolist()

    found: dict[str, Any] = {"first": [predicted(), steps(training), predicted(), predicted()]}
    before = marks(training)
    try:
        with training.averaged():
            found["block"] = training.inference().execute(inputs, batch_size=4).result.numpy().tolist(), predicted()
            if rank() == 1:
                raise KeyError("only one rank leaves early")
    except KeyError:
        pass
    assert marks(training) == before
    path = training.save(Path(folder) / "averages")
    steps(training)
    assert predicted() != found["block"][1]
    inference.save(Path(folder) / f"inference{rank()}")
    found["saved"] = (
        predicted(),
        sg.load(Path(folder) / f"inference{rank()}", "cpu").execute(inputs, batch_size=4).result.numpy().tolist(),
    )
    training.restore(path)
    found["restored"] = predicted(), marks(training)
    scores = iter([0.1, 0.9, 0.3])
    seen = []

    def score(*_: Any) -> float:
        seen.append(predicted())
        return next(scores)

    best: dict[str, Any] = {"metrics": {"score": score}, "watch": "score", "better": "higher", "restore_best": True}
    sg.fit(training, (inputs["x"], labels["y"]), epochs=3, progress="quiet", **best)
    found["best"] = seen, predicted(), marks(training)
    return found


def test_ranks_read_averages_of_which_each_has_a_slice(tmp_path: Path) -> None:
    expected = averaging(str(tmp_path / "alone"))
    assert expected["block"][0] == expected["block"][1] == expected["first"][2] == expected["first"][3]
    assert expected["saved"][0] == expected["saved"][1] and expected["restored"][0] == expected["first"][2]
    assert expected["best"][1] == expected["best"][0][1] != expected["best"][0][2]
    for found in together(3, averaging, str(tmp_path / "three")):
        assert found == expected


def small(**settings: Any) -> dict[str, str]:
    """Two small parameters, clipped by their common norm: of three ranks, one updates nothing."""
    sg.set_seed(5)
    x, y, graph = sg.Tensor((sg.BATCH, 6)), sg.Tensor((sg.BATCH,), "int64"), sg.Graph()
    graph.dense(x, 3)
    optimizer = sg.AdamWOptimizer(0.02, clip_norm=0.1)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(ignored_label=-1), optimizer, average=0.9)
    training.add_inputs({"x": x}, {"y": y})
    steps(compiled(training, **settings))
    return {kind: one for kind, one in marks(training).items() if kind != "agreed"}


def small_ones() -> list[dict[str, str]]:
    found = [small(), small(deterministic=True)]
    compilation.DECIDED = {"cpu"}
    return [*found, small()]


def test_a_rank_that_updates_nothing_takes_part_in_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "DECIDED", compilation.DECIDED)
    assert together(3, small_ones) == [small_ones()] * 3


# ------------------------------------------------------------------------------------------------ what goes wrong


def troubles(folder: str) -> dict[str, Any]:
    """Failures, after each of which nothing has changed and training goes on."""
    found: dict[str, Any] = {}
    training = new("wide", check_numerics=True)
    steps(training)

    def refused(name: str, call: Any) -> None:
        before = marks(training)
        try:
            call()
        except sg.StepgraphError as error:
            found[name] = f"{type(error).__name__}: {error}"
        assert marks(training) == before, name

    arrays = training.require_session("test").arrays()
    own = next(array for key, array in arrays.items() if key.kind == KeyKind.STATE and key.position == 1)
    kept = own.clone()
    if rank() == 1:
        own.fill_(np.inf)
    refused("state", lambda: steps(training, 1))
    own.copy_(kept)
    steps(training, 1)
    return found


def endings(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    training = new("wide")
    steps(training)
    before = marks(training)
    (inputs, labels) = batch("wide", 16, 1)
    labels["y"][15] = 99  # in the last shard of the last rank
    _told(found, "label", lambda: training.execute(inputs, labels))
    line = collectives._lines[training.world.group]
    start, calls = line.start, []

    def failing(*given: Any) -> Any:
        calls.append(given)
        if rank() == 1 and len(calls) == 2:
            raise RuntimeError("no more memory")
        return start(*given)

    line.start = failing  # type: ignore[method-assign]
    _told(found, "bucket", lambda: steps(training, 1))
    line.start = start  # type: ignore[method-assign]
    assert marks(training) == before
    Path(folder, "file").write_text("")
    _told(found, "file", lambda: training.save(Path(folder) / "file" / "no folder"))
    _told(found, "notes", lambda: training.save(Path(folder) / "notes", notes={"rank": object() if rank() == 0 else 0}))
    found["after"] = steps(training)
    return found


def _told(found: dict[str, Any], name: str, call: Any) -> None:
    try:
        call()
    except sg.StepgraphError as error:
        found[name] = f"{type(error).__name__}: {error}"


def small_buckets(job: Any, folder: str) -> Any:
    """The same with a bucket for each parameter."""
    from stepgraph.compiler.ranks import slices

    slices.BUCKET = 1
    return job(folder)


def test_what_one_rank_cannot_do_no_rank_does(tmp_path: Path) -> None:
    first, second = together(2, small_buckets, endings, str(tmp_path))
    assert all("row 15 holds the class index 99" in one["label"] for one in (first, second))
    assert "rank 1 failed in this step; nothing has changed" in first["bucket"]
    assert "no more memory" in second["bucket"]
    assert first["file"].startswith("StorageError") and first["notes"].startswith("DataTypeError")
    assert all(
        "StorageError" in text and "the first rank has not" in text for text in (second["file"], second["notes"])
    )
    assert first["after"] == second["after"]


@pytest.mark.deep
def test_an_update_that_is_not_finite_is_rolled_back_by_all(tmp_path: Path) -> None:
    first, second = together(2, troubles, str(tmp_path))
    assert "the part of the update that another rank makes is not finite; nothing has changed" in first["state"]
    assert second["state"].startswith("NumericsError")


def saves_alone(folder: str) -> None:
    training = mlp()
    training.compile("cpu", parallel=sg.Parallel(4, timeout=3))
    training.execute(*batch("mlp", 13, 0))
    if rank() == 0:
        training.save(folder)


@pytest.mark.deep
def test_a_rank_that_saves_alone_is_told_so(tmp_path: Path) -> None:
    first, _ = together(2, saves_alone, str(tmp_path))
    assert "rank 1 did not come to exchange their calls, which must be the same (here: save)" in first


def scaled() -> Any:
    """The first updates overflow in float16 on some rank and are skipped on all."""
    training = new("wide", compute_type="float16")
    training.loss_scale = 2.0**24
    return steps(training, 6), training.loss_scale, training.optimizer.time_step, marks(training)


@pytest.mark.deep
def test_updates_that_overflow_are_skipped_by_all() -> None:
    expected = scaled()
    assert expected[1] < 2.0**24 and expected[2] < 7
    assert together(2, scaled) == [expected] * 2


def few_shards() -> None:
    new("mlp", shards=2)


@pytest.mark.deep
def test_more_ranks_than_shards_are_refused() -> None:
    for found in together(3, few_shards):
        assert "2 shards cannot be divided among 3 ranks" in found
