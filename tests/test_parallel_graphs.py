"""Updates of shards that are captured as one graph, with a stand-in for CUDA's."""

import logging
import os
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import operators
from stepgraph.graphs import compilation, update_graph
from stepgraph.graphs.shard_update import Update
from stepgraph.runtime import steady_views
from stepgraph.runtime import world as worlds
from stepgraph.runtime.verdict import SentAgain
from stepgraph.system import captures, surroundings
from tests.parallel_runs import NETWORKS, batch, expect_refusal, first_weights, marks, new, together
from tests.stand_in_graphs import Graph, captured
from tests.test_parallel_slices import as_torchrun_would
from tests.test_parallel_verdicts import decided, same, tried


@pytest.fixture(autouse=True)
def _undone(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = (
        *((compilation, "DECIDED"), (compilation, "GUARDED"), (update_graph, "CAPTURED"), (captures, "capture")),
        *((surroundings, "reach"), (operators, "call_directly"), (steady_views, "staying")),
    )
    for place, name in changed:
        monkeypatch.setattr(place, name, getattr(place, name))


def trained(names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, Any]:
    """Losses, state and replays of updates with data that is always somewhere else, and batches of several sizes."""
    found: dict[str, Any] = {}
    for name in names:
        before, training = Graph.replays, new(name)
        executions = [training.execute(*batch(name, rows, step), batch_size=rows) for step, rows in enumerate(sizes)]
        losses = [one.loss for one in executions]  # read late: a replay must not overwrite what another has left
        found[name] = losses, same(marks(training)), training.optimizer.time_step
        found[f"replays of {name}"] = Graph.replays - before
    return found


@pytest.mark.parametrize(
    "world, names",
    [
        (1, ("heads",)),
        (2, ("cnn",)),
        pytest.param(3, ("mlp", "heads", "transformer", "wide", "imported"), marks=pytest.mark.deep),
    ],
)
def test_replayed_updates_have_the_bits_of_their_parts(world: int, names: tuple[str, ...]) -> None:
    sizes = (13, 16, 13, 16, 5, 13, 5, 16)
    expected = decided(trained, names, sizes)
    found = together(world, captured, trained, names, sizes) if world > 1 else [captured(trained, names, sizes)]
    for name in names:
        assert expected.pop(f"replays of {name}") == 0
        for one in found:
            assert one.pop(f"replays of {name}") == len(sizes) - 3  # all but the first of each size
    assert found == [expected] * world


def placed(name: str, rows: int, step: int) -> Any:
    """A batch in memory that stays where it is: each step writes its own numbers there."""
    inputs, labels = batch(name, rows, step)
    kept = PLACES.setdefault((name, rows), {key: np.empty_like(one) for key, one in (inputs | labels).items()})
    for key, one in (inputs | labels).items():
        kept[key][...] = one
    return {key: kept[key] for key in inputs}, {key: kept[key] for key in labels}


PLACES: dict[Any, dict[str, np.ndarray]] = {}


def refused(kind: str) -> dict[str, Any]:
    """An update that one rank cannot make, between some that are replayed."""
    training = new("cnn")
    for step in range(3):
        training.execute(*placed("cnn", 13, step), batch_size=13)
    before, steps = same(marks(training)), training.optimizer.time_step
    inputs, labels = placed("cnn", 13, 3)
    run, graphs = Update.run_and_exchange, update_graph.UpdateGraphs.of
    weights, last = first_weights(training), os.environ.get("RANK") == "1"
    if kind == "label":
        labels["y"][11] = 99  # in the last shards
    elif kind == "write" and last:
        weights.torch().mul_(2)
    elif kind == "failure" and last:

        def fail(update: Update, *given: Any) -> Any:
            update.failure = sg.ExecutionError("execute", "out of order")
            return []

        Update.run_and_exchange = fail  # type: ignore[method-assign]
        update_graph.UpdateGraphs.of = lambda *_: None  # type: ignore[assignment, method-assign]
    execution = training.execute(inputs, labels, batch_size=13)
    Update.run_and_exchange, update_graph.UpdateGraphs.of = run, graphs  # type: ignore[method-assign]
    error = tried(lambda: execution.loss)
    if kind == "write":
        weights.torch().mul_(0.5 if last else 1)
    same_state = same(marks(training)) == before and training.optimizer.time_step == steps
    replays = Graph.replays
    losses = [training.execute(*placed("cnn", 13, step), batch_size=13).loss for step in (3, 4)]
    after = losses, same(marks(training))
    return {"error": error, "same state": same_state, "after": after, "replays": Graph.replays - replays}


def undisturbed() -> Any:
    training = new("cnn")
    losses = [training.execute(*batch("cnn", 13, step), batch_size=13).loss for step in range(5)]
    return losses[3:], same(marks(training))


@pytest.mark.parametrize("kind", ["label", "write", pytest.param("failure", marks=pytest.mark.deep)])
def test_a_replayed_update_that_one_rank_refuses_changes_nothing_on_any(kind: str) -> None:
    first, second = together(2, captured, refused, kind)
    expect_refusal(kind, first["error"], second["error"])
    after = undisturbed()
    for one in (first, second):
        assert one["same state"] and one["replays"] == 2 and one["after"] == after


APART: tuple[tuple[int | str, ...], ...] = (  # what ranks do instead of one update: pass a batch, or save
    (13, 16, 5),  # in front of all others
    (13, 16, 5),  # one replays its update
    (16, 5, 16),  # nobody does
    (13, "save", 13),
    (5, "save", 13),
)


def apart(folder: str) -> dict[str, Any]:
    """Updates with results of every row, and between them some that ranks do not make together."""
    training, rank = new("cnn"), os.environ.get("RANK")
    training.keep_predictions()
    (scores,) = training.require_session("test").compilation.compared

    def update(rows: int, step: int) -> tuple[float, bytes]:
        loss = training.execute(*placed("cnn", rows, step), batch_size=rows).loss
        return loss, scores.torch().numpy().tobytes()

    errors, unchanged, found, replays = [], True, [], Graph.replays
    for every in APART:
        before, own = same(marks(training)), every[int(rank or 0)]
        if rank is not None:
            errors.append(tried(lambda own=own: update(own, 9) if isinstance(own, int) else training.save(folder)))
        unchanged = unchanged and same(marks(training)) == before
        found += [update(13, step) for step in range(3)]
    made = {"found": found, "marks": same(marks(training))}
    return {"errors": errors, "unchanged": unchanged, "replays": Graph.replays - replays, "made": made}


@pytest.mark.parametrize(
    "job, replays",  # two of three updates that count, and refused ones that have the size of the one before
    [
        (decided, (0, 0)),
        (captured, (10 + 2, 10)),
        pytest.param(captured, (10 + 2, 10, 10 + 2), marks=pytest.mark.deep),
    ],
)
def test_ranks_with_batches_of_different_sizes_do_not_join_their_results(
    job: Any, replays: tuple[int, ...], tmp_path: Any
) -> None:
    expected = apart("")["made"]
    for rank, one in enumerate(together(len(replays), job, apart, str(tmp_path / "saved"))):
        assert isinstance(one, dict), one
        for actions, error in zip(APART, one["errors"], strict=True):
            text = "rank 1 calls save" if "save" in actions else f"of {actions[0]} and {actions[1]} rows"
            assert text in error, (actions, error)
        assert one["unchanged"] and one["made"] == expected and one["replays"] == replays[rank]


def test_a_single_process_replays_a_refused_update_and_goes_on() -> None:
    found = captured(refused, "label")
    assert "row 11 holds the class index 99" in found["error"]
    assert found["same state"] and found["replays"] == 2 and found["after"] == undisturbed()


def test_results_outlive_the_replays_behind_them() -> None:
    def outputs() -> list[Any]:
        training = new("mlp")
        training.add_outputs({"scores": training.require_session("test").compilation.compared[0]})
        found = [training.execute(*placed("mlp", 13, step), batch_size=13) for step in range(5)]
        return [(one.loss, one.result.numpy().tolist(), one["scores"].numpy().tolist()) for one in found]

    replays = Graph.replays
    expected = outputs()
    assert Graph.replays == replays and captured(outputs) == expected and Graph.replays == 4


def test_data_is_read_in_place_until_it_moves() -> None:
    def where() -> list[int]:
        training, counts, made = new("mlp"), [], []
        plain = captures.capture
        captures.capture = lambda *given: made.append(1) or plain(*given)
        for step, data in enumerate([placed, placed, placed, batch, batch, placed]):
            training.execute(*data("mlp", 13, step), batch_size=13)
            counts.append(len(made))
        return counts

    assert captured(where) == [0, 1, 1, 2, 2, 2]


def test_an_update_that_cannot_be_captured_runs_part_by_part(caplog: pytest.LogCaptureFixture) -> None:
    def losses(names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, Any]:
        captures.capture = refuse
        return trained(names, sizes)

    def refuse(run: Any, device: Any) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    given = ("mlp",), (13, 13, 13, 16, 16)
    expected = decided(trained, *given)
    with caplog.at_level(logging.WARNING, "stepgraph"):
        assert captured(losses, *given) == expected
    said = [one.getMessage() for one in caplog.records if "part by part" in one.getMessage()]
    assert len(said) == 2 and "updates of 13 rows are captured part by part: " in said[0]


def test_an_update_whose_capture_was_broken_is_captured_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def losses(names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, Any]:
        attempts, capture = [0], captures.capture

        def broken_twice(run: Any, device: Any) -> Any:
            attempts[0] += 1
            if attempts[0] <= 2:
                raise captures.Broken("CUBLAS failed")
            return capture(run, device)

        captures.capture = broken_twice
        return trained(names, sizes)

    monkeypatch.setattr(captures, "RESTS", 0)
    given = ("mlp",), (13,) * 6
    expected = decided(trained, *given)
    with caplog.at_level(logging.WARNING, "stepgraph"):
        assert captured(losses, *given) == expected | {"replays of mlp": 3}  # not the first, and not the broken two
    said = [one.getMessage() for one in caplog.records if "part by part" in one.getMessage()]
    assert len(said) == 2 and "CUBLAS failed; the next attempt is in 0 s" in said[0]


def test_what_needs_the_host_runs_part_by_part() -> None:
    def checked() -> int:
        training = new("mlp", check_numerics=True)
        for step in range(3):
            training.execute(*batch("mlp", 13, step))
        profiled = new("mlp")
        for step in range(3):
            profiled.execute(*batch("mlp", 13, step), options=sg.ExecutionOptions.PER_LAYER_PROFILING)
        return Graph.replays

    assert captured(checked) == 0


# ------------------------------------------------------------------------------------------------------ on a GPU


def launched(name: str, exchanges: bool, captures_wholly: bool, fuse: bool) -> dict[str, Any]:
    """Trains on one GPU; what it computes, and the graphs that it launches in an update."""
    worlds.ALWAYS_EXCHANGES = exchanges
    update_graph.CAPTURED = {"cuda"} if captures_wholly else set()
    counts, replay = [0], torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        counts[0] += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]
    sg.set_seed(5)
    training = NETWORKS[name]()
    training.compile("cuda", parallel=sg.Parallel(2, timeout=60), tf32=False, fuse=fuse, deterministic=not fuse)
    given = [{key: torch.from_numpy(one).cuda() for key, one in part.items()} for part in batch(name, 16, 0)]
    executions = [training.execute(*given) for _ in range(4)]
    counts[0] = 0
    executions += [training.execute(*given) for _ in range(5)]
    found = {"launches": counts[0], "losses": [one.loss for one in executions], "waited": training.world.place.waited}
    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
    compilation = training.require_session("test").compilation
    # The gradient of keys' biases is zero but for rounding, of which AdamW makes steps of any size and sign.
    layers = [node.layer for node in compilation.step(16, True).nodes]
    noise = [one.parameters["biases.1"] for one in layers if isinstance(one, sg.MultiheadAttentionLayer)]
    held = [one for one in compilation.held if one not in noise]
    return found | {"held": [one.torch().double().sum().item() for one in held]}


@pytest.mark.gpu
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", ["cnn", "transformer", "heads"])
def test_a_gpu_launches_an_update_once(name: str, fuse: bool) -> None:
    kinds = ((True, True), (True, False), (False, True), (False, False))
    calls = ", ".join(f"launched({name!r}, {kind[0]}, {kind[1]}, {fuse})" for kind in kinds)
    whole, parts, whole_alone, parts_alone = as_torchrun_would(f"[{calls}]", "tests.test_parallel_graphs")
    assert whole["launches"] == whole_alone["launches"] == 5
    assert parts["launches"] == parts_alone["launches"] == 15  # two shards and an update
    for one, other in ((whole, parts), (whole_alone, parts_alone)):
        # Kernels that are not deterministic add in any order, and each update adds to the rounding of the last.
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5 if fuse else 1e-6)
        assert one["held"] == pytest.approx(other["held"], rel=1e-5, abs=1e-5)
    assert whole["waited"] > 0 and whole_alone["waited"] == 0


@pytest.mark.gpu
def test_what_a_graph_sends_can_be_read_while_it_runs() -> None:
    device, told = torch.device("cuda", 0), torch.zeros(1, 2, dtype=torch.float64, device="cuda")
    sent, graph, numbers = SentAgain((1, 2), device), torch.cuda.CUDAGraph(), torch.ones(1 << 26, device="cuda")

    def work() -> None:
        for _ in range(100):
            numbers.mul_(1.0)

    work()
    with torch.inference_mode(), torch.cuda.graph(graph):
        work()
        told.add_(1)
        sent.send(told)
        work()
    for step in range(1, 4):
        sent.expect()
        graph.replay()
        assert sent.read().tolist() == [[step, step]]
        assert not torch.cuda.current_stream().query()  # the second half is still under way
    torch.cuda.synchronize()
