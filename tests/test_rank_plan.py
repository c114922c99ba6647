"""Plans of one of many ranks, and of graphs without memory, against formulas by hand."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

import stepgraph as sg
from stepgraph.compiler.ranks.plan import RankPlan
from stepgraph.compiler.ranks.slices import BLOCK
from stepgraph.compiler.step import KeyKind
from tests.parallel_runs import together

FLOAT = 4  # bytes


def linear(outputs: int = 64, optimizer: sg.Optimizer | None = None, **settings: float) -> sg.TrainingGraph:
    """One matrix of `outputs` × 256 numbers."""
    x, y, graph = sg.Tensor((sg.BATCH, 256)), sg.Tensor((sg.BATCH, outputs)), sg.Graph()
    graph.dense(x, outputs, biases=False)
    chosen = sg.AdamOptimizer(0.1) if optimizer is None else optimizer
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), chosen, **settings)
    training.add_inputs({"x": x}, {"y": y})
    return training


def planned(training: sg.TrainingGraph, batch: int, ranks: int, shards: int, **settings: str) -> RankPlan:
    parallel = sg.Parallel(shards, **settings)
    plan = training.memory_plan_for(batch, ranks=ranks, parallel=parallel, device="cpu")
    assert isinstance(plan, RankPlan)
    return plan


def test_the_plan_of_a_rank_follows_the_formulas() -> None:
    training, size = linear(256), 256 * 256 * FLOAT  # large enough to be allocated result by result
    plan = planned(training, 8, ranks=4, shards=4)
    assert (plan.ranks, plan.shards, plan.rows) == (4, 4, 2)
    assert plan.parameters == size
    assert plan.optimizer_state == 2 * size // 4  # momentum and velocity of a quarter
    assert (plan.gradients_sent, plan.parameters_sent) == (3 * size // 4, 3 * size // 4)
    assert plan.sent == 2 * size * 3 // 4
    alone = training.memory_plan_for(2, device="cpu", parallel=sg.Parallel(1))
    assert plan.shard_activations == alone.activations > 0
    # The most is needed in the update: a quarter of the gradients, a quarter of the parameters to send, all of them as
    # they arrive, and Gloo's copy.
    assert (plan.activations, plan.gradients, plan.workspace) == (0, size // 4, size)
    assert plan.buckets == size // 4 + size
    assert plan.total == size + size // 2 + size // 4 + plan.buckets + size


def test_sums_of_shards_are_kept_and_sent() -> None:
    training, size = linear(6 * 16), 6 * 16 * 256 * FLOAT  # six blocks, two for each rank
    plan = planned(training, 8, ranks=3, shards=8)
    # The ranks run 2, 3 and 3 shards. The last rank has two sums in front of its last shard, and two after it; of all
    # five it receives a third.
    assert plan.gradients == 2 * size and plan.buckets == 2 * size + 5 * size // 3
    assert plan.gradients_sent == 2 * size * 2 // 3
    assert plan.parameters_sent == size * 2 // 3
    assert planned(training, 8, ranks=3, shards=8, order="any").gradients_sent == size * 2 // 3
    one = planned(training, 8, ranks=1, shards=8)
    assert one.optimizer_state == 2 * size and one.sent == one.buckets == 0
    assert one.gradients == (3 + 2) * size  # sums of 4, 2 and 1 shards, the gradient of another, and its copy


def test_a_matrix_that_is_updated_as_a_whole_has_its_state_on_one_rank() -> None:
    size = 64 * 256 * FLOAT
    plan = planned(linear(optimizer=sg.MuonOptimizer(0.1)), 8, ranks=4, shards=4)
    assert plan.optimizer_state == size  # its momentum
    averaged = planned(linear(average=0.9), 8, ranks=4, shards=4)
    assert averaged.optimizer_state == 3 * size // 4


@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_slices_are_almost_even(ranks: int) -> None:
    training, size = linear(3 * 256), 3 * 256 * 256 * FLOAT
    plan = planned(training, ranks, ranks=ranks, shards=ranks)
    assert size / ranks <= plan.optimizer_state / 2 <= size / ranks + BLOCK * FLOAT
    assert plan.gradients_sent == pytest.approx(size * (ranks - 1) / ranks, abs=ranks * BLOCK * FLOAT)
    assert plan.parameters_sent == pytest.approx(size * (ranks - 1) / ranks, abs=ranks * BLOCK * FLOAT)


def test_a_compiled_graph_is_planned_as_it_is_compiled() -> None:
    training = linear()
    before = planned(training, 8, ranks=4, shards=4)
    training.compile("cpu", parallel=sg.Parallel(4))
    assert training.memory_plan_for(8, ranks=4) == before
    text = str(before)
    assert text.startswith("Memory plan of one of 4 ranks, 4 shards of 2 rows\n")
    assert "optimizer state        32.00 KiB" in text and "sent per update        96.00 KiB" in text
    half = training.memory_plan_for(8, ranks=4, compute_type="bfloat16")
    assert half.parameters == before.parameters and half != before  # what else differs depends on the processor


def test_freezing_a_parameter_changes_the_plan() -> None:
    x, y, graph = sg.Tensor((sg.BATCH, 256)), sg.Tensor((sg.BATCH, 16)), sg.Graph()
    first = sg.FullyConnectedLayer.create(256, 64, biases=False)
    graph.dense(graph.node(first, x), 16, biases=False)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1, momentum=0.9))
    training.add_inputs({"x": x}, {"y": y})
    both = planned(training, 4, ranks=2, shards=2)
    first.weights_parameter.is_updatable = False
    frozen = planned(training, 4, ranks=2, shards=2)
    assert both.gradients_sent - frozen.gradients_sent == 64 * 256 * FLOAT // 2


def test_what_cannot_be_planned_is_refused() -> None:
    training = linear()
    with pytest.raises(sg.StateError, match="not compiled"):
        training.memory_plan_for(8)
    with pytest.raises(sg.StateError, match="how ranks divide a batch"):
        training.memory_plan_for(8, ranks=4, device="cpu")
    with pytest.raises(sg.ArgumentError, match="4 shards cannot be divided among 5 ranks"):
        planned(training, 8, ranks=5, shards=4)
    for ranks in (0, True, 1.5, "4"):
        with pytest.raises(sg.ArgumentError, match="ranks is"):
            planned(training, 8, ranks=ranks, shards=4)  # type: ignore[arg-type]
    bare = sg.TrainingGraph([sg.Graph()])
    with pytest.raises(sg.StateError, match="no layers"):
        planned(bare, 8, ranks=4, shards=4)


def test_a_graph_that_learns_nothing_sends_nothing() -> None:
    training = linear(8)
    for tensor in training.named_tensors().values():
        tensor.is_updatable = False
    plan = planned(training, 8, ranks=3, shards=4)
    assert plan.sent == plan.optimizer_state == 0 < plan.parameters


# ------------------------------------------------------------------------------------------------------- what is real


def peak(ranks: int, shards: int) -> tuple[int, int, int, int]:
    """Bytes that come and go in an update, as measured and as planned; of optimizer state; and as this rank plans."""
    training = linear(1024)
    training.compile("cpu", parallel=sg.Parallel(shards))
    data = {"x": np.ones((2 * shards, 256), np.float32)}, {"y": np.ones((2 * shards, 1024), np.float32)}
    training.execute(*data)
    most = min(
        peak_of(lambda: training.execute(*data)) for _ in range(5)
    )  # Gloo's threads may free what they sent late
    arrays = training.require_session("test").arrays()
    state = sum(array.nbytes for key, array in arrays.items() if key.kind is KeyKind.STATE)
    planned = training.memory_plan_for(2 * shards, ranks=ranks).intermediates
    return most, planned, state, training.memory_plan.intermediates


def peak_of(run: Callable[[], object]) -> int:
    """The most bytes that a call allocates at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            run()
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda one: one.start_ns())
    live = most = 0
    for event in (one for one in events if one.name() == "[memory]"):
        live += event.nbytes()
        most = max(most, live)
    return most


@pytest.mark.parametrize(
    "ranks, shards", [(2, 6), *(pytest.param(*one, marks=pytest.mark.deep) for one in ((1, 4), (2, 2), (3, 8)))]
)
def test_the_plan_is_what_the_ranks_need(ranks: int, shards: int) -> None:
    found = together(ranks, peak, ranks, shards) if ranks > 1 else [peak(ranks, shards)]
    assert not isinstance(found[0], str), found
    assert max(most for most, *_ in found) == pytest.approx(found[0][1], rel=0.02)
    assert [own for *_, own in found] == pytest.approx([most for most, *_ in found], rel=0.02)
    plan = planned(linear(1024), 2 * shards, ranks=ranks, shards=shards)
    assert max(state for _, _, state, _ in found) == pytest.approx(plan.optimizer_state, abs=2 * BLOCK * FLOAT)


# ----------------------------------------------------------------------------------------------------- without memory


def images(graph: sg.Graph) -> tuple[sg.Tensor, sg.Tensor]:
    x = sg.Tensor((sg.BATCH, 3, 8, 8))
    h = graph.relu(graph.batch_normalization(graph.convolution(x, 4, 3)))
    return x, graph.dense(graph.reshape((sg.BATCH, -1), graph.max_pooling(h, 2)), 5)


def sequences(graph: sg.Graph) -> tuple[sg.Tensor, sg.Tensor]:
    x = sg.Tensor((sg.BATCH, 6), "int64")
    h = graph.embedding(x, 11, 8)
    h = h + graph.attention(graph.layer_normalization(h), 2, causal=True)
    h = h + graph.gated_feed_forward(graph.rms_normalization(h), hidden=12)
    h = graph.node(sg.LSTMLayer.create(8, 7), h)
    return x, graph.dense(graph.reshape((sg.BATCH, 42), h), 5)


def classifier(wire: Callable[[sg.Graph], tuple[sg.Tensor, sg.Tensor]]) -> sg.TrainingGraph:
    graph = sg.Graph()
    x, _ = wire(graph)
    y = sg.Tensor((sg.BATCH,), "int64")
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    return training


@pytest.mark.parametrize("wire", [images, sequences])
def test_a_graph_without_memory_is_planned_like_any_other(wire: Callable[..., tuple[sg.Tensor, sg.Tensor]]) -> None:
    with sg.without_memory():
        described = classifier(wire)
    ordinary = classifier(wire)
    assert not any(tensor.has_data for tensor in described.named_tensors().values())
    assert planned(described, 8, ranks=2, shards=2) == planned(ordinary, 8, ranks=2, shards=2)


def test_a_graph_without_memory_runs_once_it_has_data(tmp_path: Path) -> None:
    sg.set_seed(1)
    saved = classifier(images)
    sg.save_safetensors(saved, tmp_path / "weights.safetensors")
    before = sg.random.draw_seed()
    sg.set_seed(1)
    classifier(images)
    with sg.without_memory():
        training = classifier(images)
    assert sg.random.draw_seed() == before  # it has drawn nothing
    with pytest.raises(sg.DataError, match="holds no data") as caught:
        training.compile("cpu")
    assert "without_memory" in str(caught.value)
    with pytest.raises(sg.StateError, match="it was created without memory"):
        next(iter(training.named_tensors().values())).numpy()
    sg.load_safetensors(training, tmp_path / "weights.safetensors")
    saved.compile("cpu")
    training.compile("cpu")
    data = {"x": np.ones((4, 3, 8, 8), np.float32)}, {"y": np.zeros(4, np.int64)}
    assert training.execute(*data).loss == saved.execute(*data).loss


def test_an_enormous_graph_takes_no_memory() -> None:
    with sg.without_memory():
        training = linear(1 << 32)  # 4 TiB of weights
        assert sg.Tensor((1 << 40,), fill=1.0).memory is None
    plan = planned(training, 64, ranks=64, shards=64)
    assert plan.parameters == FLOAT * (256 << 32) and plan.optimizer_state == 2 * plan.parameters // 64
    assert sg.Tensor((2,), fill=1.0).numpy().tolist() == [1, 1]
    assert pickle.loads(pickle.dumps(plan)) == plan
