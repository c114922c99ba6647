"""Updates in shards by one process: the numbers of whole batches, a fixed order of sums, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import pipeline
from stepgraph.compiler.program import PartName, fake
from stepgraph.compiler.ranks.shards import TreeSum, climbed, most_nodes, own, partial_nodes, spans
from stepgraph.compiler.step import KeyKind
from stepgraph.graphs.compilation import Compilation
from tests.parallel_runs import NETWORKS, batch, compiled, marks, mlp, new

DEEP = pytest.mark.deep

# ------------------------------------------------------------------------------------------------ the setting


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"shards": 0}, "shards is 0"),
        ({"shards": True}, "shards is True"),
        ({"shards": 2.5}, "shards is 2.5"),
        ({"shards": 2, "order": "ring"}, "order is 'ring'"),
        ({"shards": 2, "timeout": 0}, "timeout is 0"),
        ({"shards": 2, "timeout": float("inf")}, "timeout is inf"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(sg.ArgumentError, match=problem):
        sg.Parallel(**settings)


def test_without_torchrun_there_is_no_process_group() -> None:
    training = new("mlp")
    assert (training.world.rank, training.world.size) == (0, 1)
    assert not torch.distributed.is_initialized()


# ----------------------------------------------------------------------------------------------- shards and sums


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 13, 64])
@pytest.mark.parametrize("shards", [1, 3, 8])
def test_every_row_is_in_one_shard(rows: int, shards: int) -> None:
    found = spans(rows, shards)
    assert [row for start, stop in found for row in range(start, stop)] == list(range(rows))
    sizes = [stop - start for start, stop in found]
    assert max(sizes) - min(sizes) <= 1 and len(found) == min(rows, shards)


@pytest.mark.parametrize("count", [*range(1, 18), 64])
def test_every_world_adds_in_the_same_order(count: int) -> None:
    """Sums as text show the order; a world's ranks first add alone, then what they are left with."""

    class Recorded(TreeSum):
        def add(self, node: Any, arrays: Any) -> None:
            met, node = climbed(self.count, self.sums, node)
            for neighbour in met:
                arrays = "(" + "+".join(sorted([self.sums.pop(neighbour), arrays])) + ")"  # type: ignore[list-item]
            self.sums[node] = arrays

    def total(world: int) -> Any:
        whole = Recorded(count)
        for rank in range(world):
            mine = Recorded(count)
            for shard in own(count, rank, world):
                mine.add((0, shard), f"{shard:02}")
            assert sorted(mine.sums, key=lambda node: node[1] << node[0]) == partial_nodes(count, rank, world)
            assert len(mine.sums) <= most_nodes(count)
            for node, text in mine.sums.items():
                whole.add(node, text)
        return whole.total

    expected = total(1)
    assert all(total(world) == expected for world in range(2, 9))


def test_a_tree_adds_numbers() -> None:
    leaves = [torch.randn(5, dtype=torch.float64) for _ in range(11)]
    found = TreeSum(11)
    for index in (3, 0, 10, 9, 1, 2, 7, 8, 5, 4, 6):
        found.add((0, index), [leaves[index].clone()])
    torch.testing.assert_close(found.total[0], torch.stack(leaves).sum(0))


# ---------------------------------------------------------------------------------------------- the same numbers


def steps(training: sg.TrainingGraph, name: str, rows: int, count: int = 4) -> list[Any]:
    return [training.execute(*batch(name, rows, step), batch_size=rows).losses for step in range(count)]


@pytest.mark.parametrize("name", ["mlp", "cnn", pytest.param("heads", marks=DEEP)])
def test_one_shard_computes_the_bits_of_a_whole_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless gradients are clipped by their norm, which ranks that have slices take in blocks."""
    whole = new(name, shards=None, deterministic=True)
    monkeypatch.setattr(Compilation, "is_divided", True)  # as if there were other ranks
    divided = new(name, shards=1, deterministic=True)
    assert steps(whole, name, 16) == steps(divided, name, 16)
    mine = marks(divided)
    assert mine.pop("seeds") and {kind: mine[kind] for kind in mine} == {
        kind: mark for kind, mark in marks(whole).items() if kind != "seeds"
    }


def test_the_only_shard_of_one_process_is_a_whole_step() -> None:
    training = new("mlp", shards=1)
    first = training.execute(*batch("mlp", 16, 0), batch_size=16).loss
    assert first == new("mlp", shards=None).execute(*batch("mlp", 16, 0), batch_size=16).loss
    compilation = training.require_session("test").compilation
    assert {part for part, _ in compilation.programs.executables} == {PartName.STEP}
    assert training.world.is_alone and training.bytes_sent == 0
    mine, plain = compilation.step(16, True), new("mlp", shards=None).require_session("test").compilation.step(16, True)
    assert mine.measures_kernels and (mine.shards, mine.ownership) == (0, None) and mine.fusion is plain.fusion


@pytest.mark.parametrize("shards, measures", [(None, True), (1, True), (2, False)])
def test_only_what_ranks_divide_is_chosen_by_a_rule(shards: int | None, measures: bool) -> None:
    training = new("cnn", shards=shards)
    for graph in (training, training.inference()):
        compilation = graph.require_session("test").compilation
        assert compilation.step(16, graph is training).measures_kernels is measures


def without_dropout(name: str) -> sg.TrainingGraph:
    """Nothing that depends on the rows of a part: no dropout, no batch normalization."""
    sg.set_seed(5)
    return NETWORKS[name]()


@pytest.mark.parametrize(
    "name, rows", [("mlp", 5), ("heads", 13), *(pytest.param("heads", rows, marks=DEEP) for rows in (16, 5))]
)
def test_shards_compute_the_numbers_of_a_whole_batch(name: str, rows: int) -> None:
    whole = compiled(without_dropout(name), shards=None, deterministic=True)
    divided = compiled(without_dropout(name))
    for one, other in zip(steps(whole, name, rows), steps(divided, name, rows), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for mine, theirs in zip(whole.layers, divided.layers, strict=True):
        for field, tensor in mine.parameters.items():
            np.testing.assert_allclose(tensor.numpy(), theirs.parameters[field].numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", [sg.ReductionType.SUM, sg.ReductionType.NONE])
def test_losses_that_are_no_means(reduction: sg.ReductionType) -> None:
    def graph(shards: int | None) -> sg.TrainingGraph:
        sg.set_seed(5)
        x, y, layers = sg.Tensor((sg.BATCH, 6)), sg.Tensor((sg.BATCH, 2)), sg.Graph()
        layers.dense(x, 2)
        training = sg.TrainingGraph([layers], sg.LossLayer.mean_squared_error(reduction), sg.SGDOptimizer(0.01))
        training.add_inputs({"x": x}, {"y": y})
        return compiled(training, shards)

    x, y = np.random.default_rng(0).standard_normal((2, 13, 6)).astype(np.float32)
    whole, divided = graph(None), graph(4)
    for _ in range(3):
        one, other = (t.execute({"x": x}, {"y": y[:, :2]}).loss for t in (whole, divided))
        np.testing.assert_allclose(one, other, rtol=1e-5)
    np.testing.assert_allclose(whole.layers[0].weights.numpy(), divided.layers[0].weights.numpy(), rtol=1e-5)


def test_batch_normalization_works_on_each_shard_and_averages_statistics_by_rows() -> None:
    x, y, graph = sg.Tensor((sg.BATCH, 3)), sg.Tensor((sg.BATCH, 3)), sg.Graph()
    layer = sg.BatchNormalizationLayer.create(3, momentum=0.75)
    graph.node(layer, x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.0))
    training.add_inputs({"x": x}, {"y": y})
    compiled(training, shards=4)
    data = np.random.default_rng(0).standard_normal((14, 3)).astype(np.float32)
    loss = training.execute({"x": data}, {"y": 0 * data}).loss
    pieces = [data[start:stop].astype(np.float64) for start, stop in ((0, 4), (4, 8), (8, 11), (11, 14))]
    means = sum(len(one) * one.mean(0) for one in pieces) / 14
    variances = sum(len(one) * one.var(0) for one in pieces) / 14
    np.testing.assert_allclose(layer.mean.numpy(), 0.25 * means, rtol=1e-5)
    np.testing.assert_allclose(layer.variance.numpy(), 0.75 + 0.25 * variances, rtol=1e-5)
    normalized = [(one - one.mean(0)) / np.sqrt(one.var(0) + 1e-5) for one in pieces]
    assert loss == pytest.approx(np.square(np.concatenate(normalized)).mean(), rel=1e-5)


def test_shards_draw_different_masks_and_updates_move_the_stream_once() -> None:
    x, y, graph = sg.Tensor((sg.BATCH, 64)), sg.Tensor((sg.BATCH, 64)), sg.Graph()
    dropped = graph.node(sg.DropoutLayer(0.5), x)
    graph.node(sg.BatchNormalizationLayer.create(64), dropped)  # something to train
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.0))
    training.add_inputs({"x": x}, {"y": y})
    training.add_outputs({"dropped": dropped})
    compiled(training, shards=4)
    ones = np.ones((8, 64), np.float32)
    first, second = (training.execute({"x": ones}, {"y": ones})["dropped"].numpy() for _ in range(2))
    assert len({one.tobytes() for one in (*np.split(first, 4), *np.split(second, 4))}) == 8
    assert training.progress().stream[1] == 2


@pytest.mark.parametrize("order", ["tree", "any"])
def test_outputs_and_predictions_have_the_rows_of_the_whole_batch(order: str) -> None:
    training = mlp()
    hidden = training.nodes[1].results[0]
    training.add_outputs({"hidden": hidden})
    compiled(training, parallel={"order": order})
    destination = np.zeros((13, 16), np.float32)
    execution = training.execute(*batch("mlp", 13, 0), outputs_data={"hidden": destination})
    np.testing.assert_array_equal(execution["hidden"].numpy(), destination)
    assert destination.any(axis=1).all()


# ----------------------------------------------------------------------------------------- calls and their options


def test_options_of_a_call() -> None:
    training = new("cnn")
    every = sg.ExecutionOptions.PROFILING | sg.ExecutionOptions.PER_LAYER_PROFILING | sg.ExecutionOptions.SYNCHRONOUS
    told: list[Any] = []
    execution = training.execute(*batch("cnn", 16, 0), options=every, completion=lambda *one: told.append(one))
    assert execution.time and execution.profile is not None
    assert {phase for _, phase, _, _ in execution.profile.rows} == {"forward", "gradient", "update"}
    assert len(told) == 1 and told[0][1] is None
    assert "gradient" in str(training.profile()) and "Memory plan" in str(training)


def test_a_failed_shard_changes_nothing() -> None:
    training = new("cnn")
    training.execute(*batch("cnn", 16, 0))
    before = marks(training)
    (inputs, labels) = batch("cnn", 16, 1)
    labels["y"][12] = 99
    with pytest.raises(sg.StepgraphError, match="row 12 holds the class index 99"):
        training.execute(inputs, labels)
    assert marks(training) == before


def test_steps_that_are_not_finite_are_rolled_back() -> None:
    training = new("cnn", check_numerics=True)
    training.execute(*batch("cnn", 16, 0))
    before = marks(training)
    (inputs, labels) = batch("cnn", 16, 1)
    inputs["x"][15, 0, 0, 0] = np.inf
    with pytest.raises(sg.NumericsError):
        training.execute(inputs, labels)
    assert marks(training) == before


def test_a_memory_limit_counts_the_sums_of_shards() -> None:
    plain, divided = new("mlp", shards=None), new("mlp", shards=8)
    parameters = plain.memory_plan_for(2).parameters
    assert divided.memory_plan_for(16).gradients >= 4 * parameters
    with pytest.raises(sg.MemoryLimitError, match="a shard of 2 rows needs"):
        new("cnn", memory_limit=1000)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision(dtype: str) -> None:
    whole, divided = new("mlp", shards=None, deterministic=True, compute_type=dtype), new("mlp", compute_type=dtype)
    first, second = steps(whole, "mlp", 16), steps(divided, "mlp", 16)
    for one, other in zip(first, second, strict=True):
        assert one == pytest.approx(other, rel=0.05)


# --------------------------------------------------------------------------------------------- what is refused


def test_separate_passes_are_refused() -> None:
    training = new("mlp")
    for call in (lambda: training.execute_forward(8), training.execute_gradient, training.execute_optimizer_update):
        with pytest.raises(sg.StateError, match="parallel"):
            call()


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"parallel": 8}, "parallel is 8"),
        ({"parallel": sg.Parallel(2), "link_graphs": True}, "LINK_GRAPHS"),
        ({"parallel": sg.Parallel(2), "debug_layers": True}, "DEBUG_LAYERS"),
    ],
)
def test_settings_that_exclude_each_other(settings: dict[str, Any], problem: str) -> None:
    training = mlp()
    with pytest.raises(sg.StepgraphError, match=problem):
        training.compile("cpu", **settings)
    assert training.session is None


def test_graphs_that_cannot_be_divided() -> None:
    x, graph = sg.Tensor((sg.BATCH, 4)), sg.Graph()
    graph.dense(x, 2)
    for training, problem in (
        (sg.TrainingGraph([graph], optimizer=sg.SGDOptimizer(0.1)), "no loss"),
        (mlp_without_optimizer(), "no optimizer"),
        (with_maximum_norm(), "changes the parameter"),
    ):
        with pytest.raises(sg.StateError, match=problem):
            compiled(training, shards=2)
        assert training.session is None


def mlp_without_optimizer() -> sg.TrainingGraph:
    x, y, graph = sg.Tensor((sg.BATCH, 4)), sg.Tensor((sg.BATCH, 2)), sg.Graph()
    graph.dense(x, 2)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error())
    training.add_inputs({"x": x}, {"y": y})
    return training


def with_maximum_norm() -> sg.TrainingGraph:
    x, y, graph = sg.Tensor((sg.BATCH,), "int64"), sg.Tensor((sg.BATCH, 4)), sg.Graph()
    descriptor = sg.EmbeddingDescriptor(5, 4, maximum_norm=1.0)
    graph.node(sg.EmbeddingLayer(descriptor, sg.Tensor((5, 4), random=sg.RandomInitializerType.UNIFORM)), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    return training


def centered(across: str) -> sg.TrainingGraph:
    """A network in which rows meet, or something that every row has is learned."""
    x, y, graph = sg.Tensor((sg.BATCH, 6)), sg.Tensor((sg.BATCH, 6)), sg.Graph()
    hidden = graph.dense(x, 6)
    if across == "mean":
        hidden = hidden - graph.node(sg.ReductionLayer(sg.ReductionType.MEAN, 0), hidden)
    elif across == "products":
        alike = graph.node(sg.MatMulLayer(sg.MatMulDescriptor(transposes_y=True)), [hidden, hidden])
        hidden = graph.node(sg.MatMulLayer(sg.MatMulDescriptor()), [alike, x])
    else:
        places = graph.node(sg.EmbeddingLayer.create(6, 1), sg.Tensor((6,), "int64", data=np.arange(6)))
        hidden = hidden + graph.reshape((1, 6), places)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    return training


@pytest.mark.parametrize("across, name", [("mean", "Reduction"), ("products", "MatMul1"), ("nothing", None)])
def test_layers_that_combine_rows_are_pointed_out(
    across: str, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(centered(across), shards=None)
    compiled(centered(across), shards=1)
    assert "combines the rows" not in caplog.text
    compiled(centered(across))
    assert ("combines the rows of a batch" in caplog.text) == (name is not None)
    assert name is None or f"'{name}' combines" in caplog.text


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "heads", "imported"])
def test_layers_that_keep_rows_apart_are_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
    new(name)
    assert "combines the rows" not in caplog.text


def test_outputs_without_rows_are_refused() -> None:
    x, y, graph = sg.Tensor((sg.BATCH, 4)), sg.Tensor((sg.BATCH, 4)), sg.Graph()
    h = graph.dense(x, 4)
    total = graph.node(sg.ReductionLayer(sg.ReductionType.SUM, 0), h)
    training = sg.TrainingGraph([graph], optimizer=sg.SGDOptimizer(0.1))
    training.node(sg.LossLayer.mean_squared_error(), h, loss_labels=[y])
    training.add_inputs({"x": x}, {"y": y})
    training.add_outputs({"total": total})
    compiled(training, shards=2)
    ones = np.ones((4, 4), np.float32)
    with pytest.raises(sg.StateError, match="row per row"):
        training.execute({"x": ones}, {"y": ones})


def test_outputs_of_a_single_row() -> None:
    training = mlp()
    training.add_outputs({"scores": training.nodes[-1].results[0]})
    compiled(training)
    assert training.execute(*batch("mlp", 1, 0))["scores"].numpy().shape == (1, 3)


def test_frozen_layers_stay_as_they_are() -> None:
    training = new("mlp")
    for tensor in training.layers[0].parameters.values():
        tensor.is_updatable = False
    before = [tensor.numpy().copy() for layer in training.layers for tensor in layer.parameters.values()]
    training.execute(*batch("mlp", 16, 0))
    after = [tensor.numpy() for layer in training.layers for tensor in layer.parameters.values()]
    assert [np.array_equal(one, other) for one, other in zip(before, after, strict=True)] == [True, True, False, False]


def channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lays images out as on a GPU."""
    decided = pipeline.decided
    monkeypatch.setattr(pipeline, "decided", lambda step: replace(decided(step), channels_last=True))


def test_updates_read_gradients_in_the_order_of_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused updates were compiled for the order in which a convolution leaves them."""
    channels_last(monkeypatch)
    training = new("cnn")
    training.execute(*batch("cnn", 16, 0))
    (update,) = (one for (name, _), one in training.compilation.programs.executables.items() if name == "update")
    given = zip(update.part.inputs, update.part.placeholders, strict=True)
    gradients = [fake(node) for key, node in given if key.kind is KeyKind.GRADIENT]
    assert any(one.ndim == 4 for one in gradients) and all(one.is_contiguous() for one in gradients)


@pytest.mark.deep
@pytest.mark.parametrize("are_channels_last", [False, True])
def test_fused_shards(monkeypatch: pytest.MonkeyPatch, are_channels_last: bool) -> None:
    if are_channels_last:
        channels_last(monkeypatch)
    plain, fused = new("cnn"), new("cnn", fuse=True)
    for one, other in zip(steps(plain, "cnn", 16), steps(fused, "cnn", 16), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_shards_recompute_to_fit_a_memory_limit() -> None:
    def deep(**settings: Any) -> sg.TrainingGraph:
        sg.set_seed(5)
        x, y, graph = sg.Tensor((1024, 8)), sg.Tensor((1024, 8)), sg.Graph()
        h = x
        for _ in range(4):
            h = graph.tanh(graph.dense(h, 8))
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
        training.add_inputs({"x": x}, {"y": y})
        return compiled(training, shards=2, **settings)

    plain = deep()
    limited = deep(memory_limit=plain.memory_plan.total * 9 // 10)
    assert limited.memory_plan.total < plain.memory_plan.total
    x = np.random.default_rng(0).standard_normal((1024, 8)).astype(np.float32)
    first, second = ([one.execute({"x": x}, {"y": x}).loss for _ in range(3)] for one in (plain, limited))
    assert first == second and marks(plain) == marks(limited)


@pytest.mark.deep
def test_an_imported_model() -> None:
    def model(shards: int | None) -> sg.TrainingGraph:
        torch.manual_seed(0)
        parts = (torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3))
        layers = torch.nn.Sequential(*parts)
        imported = sg.from_torch(layers, torch.zeros(4, 6))
        training = sg.TrainingGraph([imported.graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(0.1))
        training.add_inputs(imported.inputs, {"y": sg.Tensor((sg.BATCH,), "int64")})
        return compiled(training, shards, deterministic=True)

    x, y = np.random.default_rng(0).standard_normal((13, 6)).astype(np.float32), np.arange(13) % 3
    whole, divided = ([t.execute({"input": x}, {"y": y}).loss for _ in range(4)] for t in (model(None), model(4)))
    assert whole == pytest.approx(divided, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_shards_on_a_gpu(name: str) -> None:
    """Captured parts read gradients where they were the last time, and one size of shards follows another."""
    found = []
    for device in ("cuda", "cuda", "cpu"):
        sg.set_seed(5)
        training = NETWORKS[name]()
        training.compile(device, parallel=sg.Parallel(8), tf32=False)
        training.keep_predictions()
        losses = [training.execute(*batch(name, rows, 1), batch_size=rows).loss for rows in (13, 16, 5) * 4]
        assert training.require_session("test").compilation.compared[0].torch().shape[0] == 5
        found.append(losses)
    first, again, host = found
    assert first == pytest.approx(again, rel=0.02) and first == pytest.approx(host, rel=0.05)
    assert first[:2] == pytest.approx(host[:2], rel=1e-3)
