"""Embedding beyond the table: what changes in the dictionary, which gradients rows get, training with an optimizer."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stepgraph as sg
from stepgraph.fitting.data import Batch
from stepgraph.layers.embedding import EmbeddingDescriptor, EmbeddingLayer
from stepgraph.layers.layer import Scope
from stepgraph.report.probe import Probe
from tests.layers.cases_embedding import ROWS, WIDTH, embedding

DOUBLE = torch.float64


def run(layer: EmbeddingLayer, source: torch.Tensor, training: bool = True) -> tuple[torch.Tensor, torch.Tensor, Scope]:
    """The result, the leaf of the dictionary and the scope."""
    leaf = layer.weights.torch().to(DOUBLE).clone().requires_grad_()
    scope = Scope({layer.weights: leaf}, training=training)
    return layer.forward(source, scope=scope), leaf, scope


def module(layer: EmbeddingLayer, values: torch.Tensor) -> torch.nn.Embedding:
    """PyTorch's module with the same settings and a copy of the same dictionary."""
    one = layer.descriptor
    return torch.nn.Embedding(
        one.embedding_count,
        one.embedding_dimension,
        one.padding_index,
        one.maximum_norm,
        one.p_norm,
        one.scales_gradient_by_frequency,
        _weight=values.detach().clone().reshape(one.embedding_count, one.embedding_dimension),
    )


def compare_with_module(layer: EmbeddingLayer, source: torch.Tensor) -> None:
    """Result, dictionary and gradient are those of the module, up to its 1e-7 in the division by the norm."""
    y, leaf, scope = run(layer, source)
    values = leaf.detach().clone().reshape(layer.descriptor.embedding_count, -1)
    if layer.descriptor.padding_index is not None:
        values[layer.descriptor.padding_index] = 0  # the module expects it there
    theirs = module(layer, values)
    wanted = theirs(source)
    torch.testing.assert_close(y, wanted, rtol=1e-6, atol=1e-9)
    cotangent = torch.randn(y.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad(y, leaf, cotangent)
    wanted.backward(cotangent)
    torch.testing.assert_close(gradient.reshape(theirs.weight.shape), theirs.weight.grad, rtol=1e-10, atol=1e-12)
    if layer.descriptor.maximum_norm is not None:
        changed = scope.updates[layer.weights].reshape(theirs.weight.shape).clone()
        if layer.descriptor.padding_index is not None:
            changed[layer.descriptor.padding_index] = 0
        torch.testing.assert_close(changed, theirs.weight.detach(), rtol=1e-6, atol=1e-9)


SOURCE = torch.tensor([[0, 2, 2], [6, 5, 6], [6, 1, 2]])


@pytest.mark.parametrize("p", [1.0, 2.0, np.inf])
@pytest.mark.parametrize("padding", [None, 2, 6])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("maximum", [None, 0.8, 50.0])
def test_everything_is_as_in_the_module(p: float, padding: int | None, by_frequency: bool, maximum: float) -> None:
    layer = embedding(padding_index=padding, maximum_norm=maximum, p_norm=p, scales_gradient_by_frequency=by_frequency)
    compare_with_module(layer, SOURCE)
    compare_with_module(layer, SOURCE.int())


def test_norm_changes_looked_up_rows_of_the_dictionary_only() -> None:
    layer = embedding((1, ROWS, 1, WIDTH), maximum_norm=0.8)
    _, leaf, scope = run(layer, torch.tensor([6, 0, 6]))
    changed = scope.updates[layer.weights].reshape(ROWS, WIDTH)
    before = leaf.detach().reshape(ROWS, WIDTH)
    assert torch.equal(changed[:6], before[:6])  # row 0 is short already, rows 1 to 5 were not asked for
    torch.testing.assert_close(changed[6], before[6] * 0.8 / before[6].norm())
    assert not scope.updates[layer.weights].requires_grad


def test_nothing_is_handed_back_without_a_norm_or_in_inference() -> None:
    source = torch.tensor([6, 0, 6])
    assert not run(embedding(), source)[2].updates
    assert not run(embedding(padding_index=0), source)[2].updates
    assert not run(embedding(maximum_norm=0.8), source, training=False)[2].updates


def test_padding_row_reads_as_zero_and_keeps_its_numbers() -> None:
    layer = embedding(padding_index=2)
    y, leaf, _ = run(layer, torch.tensor([2, 1, 2]))
    assert not y[[0, 2]].any()
    (gradient,) = torch.autograd.grad(y.sum(), leaf)
    assert not gradient[2].any()
    assert gradient[1].tolist() == [1.0] * WIDTH
    assert leaf[2].all()


def test_frequency_divides_the_gradient() -> None:
    y, leaf, _ = run(embedding(scales_gradient_by_frequency=True), torch.tensor([4, 1, 4, 4]))
    (gradient,) = torch.autograd.grad(
        y, leaf, torch.tensor([[3.0], [5.0], [6.0], [9.0]], dtype=DOUBLE).expand(4, WIDTH)
    )
    assert gradient[[1, 4], 0].tolist() == [5.0, 6.0]


def test_zero_row_stays_zero_under_a_norm() -> None:
    layer = EmbeddingLayer(EmbeddingDescriptor(2, 2, maximum_norm=0.5), sg.Tensor((2, 2), fill=0.0))
    y, _, scope = run(layer, torch.tensor([1, 0]))
    assert not y.any()
    assert not scope.updates[layer.weights].any()


def test_create_draws_the_dictionary_and_zeroes_the_padding() -> None:
    layer = EmbeddingLayer.create(300, 50, padding_index=3, label="words")
    assert (layer.label, layer.weights.shape, EmbeddingLayer.create(2, 2).label) == ("words", (300, 50), "Embedding")
    assert layer.weights_parameter.tensor is layer.weights
    assert layer.parameters == {"weights": layer.weights}
    values = layer.weights.numpy()
    bound = (6 / 350) ** 0.5
    assert 0.95 * bound < np.abs(values).max() <= bound
    assert not values[3].any()
    assert values[[0, 1, 2, 4]].any(1).all()


def test_data_types_it_supports() -> None:
    supported = {one for one in sg.DataType if EmbeddingLayer.supports_data_type(one)}
    assert supported == {sg.DataType.INT32, sg.DataType.INT64}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"embedding_count": 0}, "embedding_count is 0"),
        ({"embedding_dimension": True}, "embedding_dimension is True"),
        ({"padding_index": 5}, "padding_index is 5, but the dictionary has 5 rows"),
        ({"padding_index": -1}, "padding_index is -1"),
        ({"maximum_norm": 0.0}, "maximum_norm is 0.0"),
        ({"maximum_norm": np.inf}, "maximum_norm is inf"),
        ({"p_norm": 0.0}, "p_norm is 0.0"),
        ({"p_norm": float("nan")}, "p_norm is nan"),
    ],
)
def test_descriptor_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(sg.ArgumentError, match=words):
        EmbeddingDescriptor(**{"embedding_count": 5, "embedding_dimension": 4, **arguments})


def test_descriptor_takes_none_for_the_usual_norm() -> None:
    assert EmbeddingDescriptor(5, 4, p_norm=None).p_norm == 2.0  # type: ignore[arg-type]
    assert EmbeddingDescriptor(5, 4, p_norm=np.inf).p_norm == np.inf


def test_dictionary_of_another_size_is_refused() -> None:
    with pytest.raises(sg.ShapeError, match="the weights hold 12 numbers, but 5 rows of 4 need 20"):
        EmbeddingLayer(EmbeddingDescriptor(5, 4), sg.Tensor((3, 4), fill=0.0))


class Words:
    """Three words in, two numbers out, behind something else than the embedding: it may stand anywhere."""

    def __init__(
        self,
        optimizer: sg.Optimizer,
        device: sg.Device | None = None,
        *,
        compiled: dict[str, Any] | None = None,
        frozen: bool = False,
        **settings: Any,
    ) -> None:
        sg.set_seed(3)
        self.x, self.y = sg.Tensor((4, 3), "int64"), sg.Tensor((4, 2))
        self.embedding = EmbeddingLayer.create(9, 5, initializer=sg.RandomInitializerType.UNIFORM, **settings)
        self.linear = sg.FullyConnectedLayer.create(15, 2)
        graph = sg.Graph()
        indices = graph.transpose((1, 0), graph.transpose((1, 0), self.x))
        rows = graph.node(self.embedding, indices, disable_update=frozen)
        graph.node(self.linear, graph.reshape((4, 15), rows))
        self.training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), optimizer)
        self.training.add_inputs({"x": self.x}, {"y": self.y})
        self.device = device or sg.Device.cpu()
        self.training.compile(self.device, **(compiled or {}))

    def phases(self, x: np.ndarray, y: np.ndarray) -> float:
        self.training.bind_and_write_data({"x": x, "y": y}, {"x": self.x, "y": self.y}, self.device)
        loss = self.training.execute_forward().loss
        self.training.execute_gradient()
        self.training.execute_optimizer_update()
        return loss


def batches(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(0)
    targets = generator.standard_normal((count, 4, 2)).astype(np.float32)
    return list(zip(generator.integers(0, 9, (count, 4, 3)), targets, strict=True))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"padding_index": 0},
    {"maximum_norm": 0.7},
    {"maximum_norm": 0.7, "padding_index": 2, "scales_gradient_by_frequency": True, "p_norm": 1.0},
]


@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
@pytest.mark.parametrize("rule", ["SGD", "Adam"])
def test_training_goes_the_way_of_the_module(chosen: dict[str, Any], rule: str) -> None:
    ours = Words(getattr(sg, f"{rule}Optimizer")(learning_rate=0.05), **chosen)
    rows = module(ours.embedding, ours.embedding.weights.torch())
    linear = torch.nn.Linear(15, 2)
    linear.load_state_dict({"weight": ours.linear.weights.torch(), "bias": ours.linear.biases.torch()})  # type: ignore[union-attr]
    optimizer = getattr(torch.optim, rule)([*rows.parameters(), *linear.parameters()], 0.05)
    for x, y in batches(6):
        optimizer.zero_grad()
        wanted = torch.nn.functional.mse_loss(linear(rows(torch.from_numpy(x)).reshape(4, 15)), torch.from_numpy(y))
        wanted.backward()
        optimizer.step()
        assert ours.training.execute({"x": x}, {"y": y}).loss == pytest.approx(wanted.item(), rel=1e-4)
    np.testing.assert_allclose(ours.embedding.weights.numpy(), rows.weight.detach().numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
def test_phases_equal_the_whole_step(chosen: dict[str, Any]) -> None:
    whole, parted = (Words(sg.AdamOptimizer(learning_rate=0.05), **chosen) for _ in range(2))
    for x, y in batches(3):
        assert whole.training.execute({"x": x}, {"y": y}).loss == parted.phases(x, y)
    assert whole.embedding.weights.numpy().tobytes() == parted.embedding.weights.numpy().tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
def test_gpu_trains_as_the_cpu_does(chosen: dict[str, Any]) -> None:
    one, other = (Words(sg.SGDOptimizer(learning_rate=0.05), device, **chosen) for device in (None, sg.Device.gpu()))
    for x, y in batches(5):
        loss = one.training.execute({"x": x}, {"y": y}).loss
        assert other.training.execute({"x": x}, {"y": y}).loss == pytest.approx(loss, rel=1e-3)
    other.training.synchronize_updates()
    np.testing.assert_allclose(one.embedding.weights.data, other.embedding.weights.data, rtol=1e-3, atol=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [9, -1])
def test_index_outside_of_the_dictionary_is_an_error(index: int) -> None:
    words = Words(sg.SGDOptimizer(learning_rate=0.1))
    with pytest.raises(sg.DataError, match=f"row 0, position 0 holds the index {index}, but Embedding takes 0 to "):
        words.training.execute({"x": np.full((4, 3), index)}, {"y": np.zeros((4, 2), np.float32)})


@st.composite
def drawn(draw: st.DrawFn) -> tuple[EmbeddingLayer, torch.Tensor]:
    """Any legal small embedding, and indices for it."""
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    descriptor = EmbeddingDescriptor(
        rows,
        width,
        padding_index=draw(st.none() | st.integers(0, rows - 1)),
        maximum_norm=draw(st.none() | st.floats(0.1, 3.0)),
        p_norm=draw(st.sampled_from([1.0, 1.5, 2.0, 3.0, np.inf])),
        scales_gradient_by_frequency=draw(st.booleans()),
    )
    shape = draw(st.sampled_from([(rows, width), (1, rows, 1, width), (rows * width,)]))
    weights = sg.Tensor(shape, data=generator.standard_normal(shape).astype(np.float32))
    extents = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    return EmbeddingLayer(descriptor, weights), torch.from_numpy(generator.integers(0, rows, extents).astype(dtype))


def check_any(layer: EmbeddingLayer, source: torch.Tensor) -> None:
    promised = layer.infer(sg.TensorDescriptor(tuple(source.shape), sg.DataType.of(source.dtype)))[0].shape
    assert promised == (*source.shape, layer.descriptor.embedding_dimension)
    compare_with_module(layer, source)
    y, _, _ = run(layer, source, training=False)
    torch.testing.assert_close(y, run(layer, source)[0])


@given(drawn())
@settings(max_examples=25, deadline=None)
def test_any_setting(one: tuple[EmbeddingLayer, torch.Tensor]) -> None:
    check_any(*one)


@pytest.mark.deep
@given(drawn())
@settings(max_examples=300, deadline=None)
def test_any_setting_deep(one: tuple[EmbeddingLayer, torch.Tensor]) -> None:
    check_any(*one)


# The forward pass writes into the dictionary


@pytest.mark.parametrize("compute_type", ["bfloat16", "float16"])
@pytest.mark.parametrize("frozen", [False, True])
def test_mixed_precision_keeps_every_digit_of_the_dictionary(compute_type: str, frozen: bool) -> None:
    words = Words(
        sg.SGDOptimizer(learning_rate=0.0), maximum_norm=0.7, frozen=frozen, compiled={"compute_type": compute_type}
    )
    before = words.embedding.weights.numpy().copy()
    words.training.execute({"x": np.full((4, 3), 5)}, {"y": np.zeros((4, 2), np.float32)})
    after = words.embedding.weights.numpy()
    others = [row for row in range(9) if row != 5]
    assert before[others].tobytes() == after[others].tobytes()
    np.testing.assert_allclose(after[5], before[5] * 0.7 / np.linalg.norm(before[5]), rtol=1e-6)


def test_mixed_precision_keeps_a_double_dictionary_double() -> None:
    values = np.random.default_rng(0).standard_normal((9, 5))
    layer = EmbeddingLayer(EmbeddingDescriptor(9, 5, maximum_norm=0.7), sg.Tensor((9, 5), "float64", data=values))
    graph, x, y = sg.Graph(), sg.Tensor((4,), "int64"), sg.Tensor((4, 5))
    graph.node(layer, x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.0))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), compute_type="bfloat16")
    training.execute({"x": [2, 2, 2, 2]}, {"y": np.zeros((4, 5), np.float32)})
    wanted = values.copy()
    wanted[2] *= 0.7 / np.linalg.norm(values[2])
    np.testing.assert_allclose(layer.weights.numpy(), wanted, rtol=1e-14)


LOOKS: dict[str, Any] = {
    "check_numerics": lambda words, x, y: words.training.check_numerics({"x": x}, {"y": y}),
    "profile": lambda words, x, y: words.training.profile({"x": x}, {"y": y}, repeat=1),
    "probe": lambda words, x, y: Probe(words.training).gradients(Batch(({"x": x}, {"y": y}, {}), 4)),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=list(LOOKS))
@pytest.mark.parametrize("frozen", [False, True])
def test_looking_changes_no_row(look: Any, frozen: bool) -> None:
    words = Words(sg.SGDOptimizer(learning_rate=0.1), maximum_norm=0.7, frozen=frozen)
    x, y = batches(1)[0]
    before = words.embedding.weights.numpy().copy()
    look(words, x, y)
    assert words.embedding.weights.numpy().tobytes() == before.tobytes()
    words.training.execute({"x": x}, {"y": y})
    assert words.embedding.weights.numpy().tobytes() != before.tobytes()  # frozen or not, as in PyTorch


def test_a_step_taken_back_takes_back_the_rows() -> None:
    checks = {"options": sg.GraphCompilationOptions.CHECK_NUMERICS}
    words = Words(sg.SGDOptimizer(learning_rate=0.1), maximum_norm=0.7, frozen=True, compiled=checks)
    before = words.embedding.weights.numpy().copy()
    with pytest.raises(sg.NumericsError):
        words.training.execute({"x": batches(1)[0][0]}, {"y": np.full((4, 2), np.nan, np.float32)})
    assert words.embedding.weights.numpy().tobytes() == before.tobytes()
