"""Random numbers in layers: several draws of one layer, numbers beside masks, and PyTorch's own operators refused."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stepgraph as sg
from stepgraph.random import keep_mask

CPU, ROWS, WIDTH = sg.Device.cpu(), 4, 64
X = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)


class Drawn(sg.Layer):
    """Whatever a function makes of a source and its scope."""

    function: Callable[[torch.Tensor, sg.Scope], torch.Tensor]

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return self.function(x, scope)


def network(
    *functions: Callable[[torch.Tensor, sg.Scope], torch.Tensor], rows: int = ROWS, **settings: Any
) -> sg.TrainingGraph:
    """A trained layer, then the functions as layers, then the mean of all as the loss."""
    sg.set_seed(5)
    x = sg.Tensor((rows, WIDTH), label="x")
    graph = sg.Graph()
    h = graph.node(sg.FullyConnectedLayer.create(WIDTH, WIDTH, label="first"), x)
    for function in functions:
        h = graph.node(Drawn(function, label="drawn"), h)
    loss = sg.LossLayer.mean_squared_error()
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": sg.Tensor((rows, WIDTH))})
    training.add_outputs({"h": h})
    training.compile(CPU, **settings)
    return training


def draw(training: sg.TrainingGraph) -> np.ndarray:
    training.execute({"x": X}, {"y": np.zeros_like(X)})
    return training.outputs["h"].numpy().copy()


def scope(**settings: Any) -> sg.Scope:
    return sg.Scope({}, training=True, stream=torch.tensor([9, 4]), salt=2, **settings)


def test_each_draw_of_a_layer_is_another_mask() -> None:
    here, x = scope(), torch.zeros(COUNT := 4096)
    masks = torch.stack([here.keep_mask(x, 0.5) for _ in range(6)]).float()
    correlations = torch.corrcoef(masks).fill_diagonal_(0) * COUNT**0.5
    assert correlations.abs().max() < 4


def test_first_draw_with_each_seed_is_what_it_was_in_earlier_versions() -> None:
    here, x = scope(), torch.zeros(512)
    for seed in (0, 1, 5):
        assert torch.equal(here.keep_mask(x, 0.5, seed), keep_mask(torch.tensor([9, 4]), 2 + 7919 * seed, (512,), 0.5))


def test_draws_follow_their_order_and_nothing_else() -> None:
    one, other, x = scope(), scope(), torch.zeros(512)
    first = [one.keep_mask(x, 0.5), one.random((512,)), one.keep_mask(x, 0.5)]
    again = [other.keep_mask(x, 0.5), other.random((512,)), other.keep_mask(x, 0.5)]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[2])
    assert not torch.equal(scope().keep_mask(x, 0.5), scope().random((512,)) >= 0.5)


def test_two_masks_in_one_layer_of_a_compiled_graph() -> None:
    both = network(lambda x, scope: scope.keep_mask(x, 0.5).float() + scope.keep_mask(x, 0.5) + 0 * x)
    counts = [(draw(both) == count).mean() for count in (0, 1, 2)]
    assert 0.35 < counts[1] < 0.65  # two equal masks would never add up to 1


def noisy(x: torch.Tensor, scope: sg.Scope) -> torch.Tensor:
    """Noise, then two masks, with a derivative that needs all of them."""
    x = torch.tanh(x * (0.5 + scope.random(x.shape)))
    return torch.tanh(x * scope.keep_mask(x, 0.3)) * scope.keep_mask(x, 0.3) * (1 + x.square().exp())


def weights(training: sg.TrainingGraph) -> bytes:
    return b"".join(t.numpy().tobytes() for layer in training.layers for t in layer.parameters.values())


def test_whole_phases_and_memory_limit_draw_the_same() -> None:
    rows = 256
    x = np.random.default_rng(0).standard_normal((rows, WIDTH)).astype(np.float32)
    whole, parted = network(noisy, noisy, rows=rows), network(noisy, noisy, rows=rows)
    plan = whole.memory_plan
    limited = network(noisy, noisy, rows=rows, memory_limit=plan.total - plan.intermediates // 4)
    assert "recomputed" in str(limited)
    for _ in range(4):
        loss = whole.execute({"x": x}, {"y": x}).loss
        assert limited.execute({"x": x}, {"y": x}).loss == loss
        parted.bind_and_write_data({"x": x, "y": x}, parted.inputs | parted.loss_labels, CPU)
        assert parted.execute_forward().loss == loss
        parted.execute_gradient()
        parted.execute_optimizer_update()
    assert weights(whole) == weights(parted) == weights(limited)


def test_gradient_sees_the_numbers_of_the_forward_pass() -> None:
    training = network(lambda x, scope: x * scope.random(x.shape) * scope.random(x.shape))
    layer = training.layers[1]
    y = np.zeros_like(X)
    training.bind_and_write_data({"x": X, "y": y}, training.inputs | training.loss_labels, CPU)
    training.execute_forward()
    training.execute_gradient()
    (source,) = training.source_gradient_tensors(layer)
    (result,) = training.result_gradient_tensors(layer)
    factor = training.outputs["h"].numpy() / training.result_tensors(training.layers[0])[0].numpy()
    np.testing.assert_allclose(source.numpy(), result.numpy() * factor, rtol=1e-4, atol=1e-7)


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(tmp_path: Any) -> None:
    one = network(noisy)
    for _ in range(3):
        draw(one)
    one.save(tmp_path / "saved")
    wanted = draw(one)
    other = network(noisy)
    other.restore(tmp_path / "saved")
    assert draw(other).tobytes() == wanted.tobytes()


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": torch.rand_like,
    "randn": lambda x: x + torch.randn(x.shape, device=x.device),
    "randint": lambda x: x + torch.randint(3, (1,), device=x.device),
    "randperm": lambda x: x[:, torch.randperm(x.shape[1], device=x.device)],
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(),
    "multinomial": lambda x: x + torch.multinomial(x.abs() + 1, 1),
    "dropout": F.dropout,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.1)[0],
}


@pytest.mark.parametrize("draws", REFUSED.values(), ids=list(REFUSED))
def test_random_operators_of_pytorch_are_refused_by_name(draws: Callable[[torch.Tensor], torch.Tensor]) -> None:
    before = torch.get_rng_state()
    with pytest.raises(sg.ArgumentError) as caught:
        network(lambda x, scope: draws(x))
    message = str(caught.value)
    assert message.startswith("Drawn 'drawn' (")
    assert "PyTorch's random operator aten." in message
    assert "scope.random(shape)" in message
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("draws", "name"),
    [(random.random, "Python's random"), (lambda: float(np.random.rand()), "numpy.random")],
)
def test_random_numbers_of_python_are_refused_by_name(draws: Callable[[], float], name: str) -> None:
    with pytest.raises(sg.ArgumentError, match=f"draws from {name}, and every step would repeat"):
        network(lambda x, scope: x * draws())


def test_what_another_thread_draws_meanwhile_is_not_the_layers() -> None:
    """The call is repeated, and only what it draws itself is refused."""
    calls = 0

    def interrupted(x: torch.Tensor, scope: sg.Scope) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            other = threading.Thread(target=random.random)
            other.start()
            other.join()
        return x

    network(interrupted)


def test_a_random_operator_in_inference_only_is_refused_when_that_is_traced() -> None:
    training = network(lambda x, scope: x if scope.training else x + torch.rand_like(x))
    with pytest.raises(sg.ArgumentError, match="rand_like"):
        training.execute({"x": X}, {"y": X}, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE)


HARMLESS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "switched off": lambda x: F.rrelu(F.dropout(x, training=False), training=False),
    "dropping nothing": lambda x: F.dropout(x, 0.0),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None]] * 3)[0],
}


@pytest.mark.parametrize("function", HARMLESS.values(), ids=list(HARMLESS))
def test_operators_that_could_draw_and_do_not_are_taken(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    training = network(lambda x, scope: function(x))
    assert draw(training).shape == (ROWS, WIDTH)


@pytest.mark.gpu
def test_the_gpu_draws_the_same_numbers() -> None:
    def numbers(device: str) -> torch.Tensor:
        here = sg.Scope({}, training=True, stream=torch.tensor([9, 4], device=device), salt=2)
        return torch.stack([here.random((1000,)), here.random((1000,))]).cpu()

    assert torch.equal(numbers("cpu"), numbers("cuda"))
