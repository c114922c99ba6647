"""Random numbers of PyTorch modules: from the graph's stream, with the right distributions, the same in both passes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph as sg
from stepgraph.layers.torch_answers import Answers

CPU = sg.Device.cpu()


class Function(nn.Module):
    """A function of an array as a module."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def answers(seed: int = 5) -> Answers:
    return Answers(sg.Scope({}, training=True, stream=torch.tensor([seed, 1])))


def drawn(function: Callable[[], torch.Tensor], seed: int = 5) -> torch.Tensor:
    """What a function returns under `Answers`, which must neither read nor advance PyTorch's generator."""
    before = torch.get_rng_state()
    with answers(seed) as mode:
        found = function()
    assert torch.equal(torch.get_rng_state(), before) and mode.draws > 0
    with answers(seed):
        assert torch.equal(function(), found)
    with answers(seed + 1):
        assert not torch.equal(function(), found)
    return found


N = 40_000
NORMAL, ONES = torch.distributions.Normal(0.0, 1.0), torch.ones(N)

# What is drawn, its mean and its variance.
DRAWS: dict[str, tuple[Callable[[], torch.Tensor], float, float]] = {
    "rand": (lambda: torch.rand(N), 0.5, 1 / 12),
    "rand of a shape": (lambda: torch.rand((200, N // 200), dtype=torch.float64), 0.5, 1 / 12),
    "rand size=": (lambda: torch.rand(size=(N,)), 0.5, 1 / 12),
    "randn": (lambda: torch.randn(2, N // 2), 0, 1),
    "rand_like": (lambda: torch.rand_like(ONES), 0.5, 1 / 12),
    "randn_like": (lambda: torch.randn_like(ONES), 0, 1),
    "randint": (lambda: torch.randint(10, (N,)), 4.5, 99 / 12),
    "randint low": (lambda: torch.randint(-3, 3, (N,)), -0.5, 35 / 12),
    "randint keywords": (lambda: torch.randint(high=6, size=(N,), low=2), 3.5, 15 / 12),
    "randint_like": (lambda: torch.randint_like(ONES, 4), 1.5, 15 / 12),
    "wide randint": (lambda: torch.randint(2**40, (N,)) / 2**40, 0.5, 1 / 12),
    "randperm": (lambda: torch.randperm(N) / N, 0.5, 1 / 12),
    "normal of numbers": (lambda: torch.normal(2.0, 3.0, (N,)), 2, 9),
    "normal of arrays": (lambda: torch.normal(2 * ONES, 0.5), 2, 0.25),
    "bernoulli": (lambda: torch.bernoulli(0.3 * ONES), 0.3, 0.21),
    "bernoulli p": (lambda: torch.bernoulli(ONES, 0.3), 0.3, 0.21),
    "x.bernoulli": (lambda: ONES.bernoulli(0.2), 0.2, 0.16),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.7), 0.7, 0.21),
    "uniform_": (lambda: torch.empty(N).uniform_(-1, 3), 1, 16 / 12),
    "uniform_ from": (lambda: torch.empty(N).uniform_(**{"from": 1, "to": 2}), 1.5, 1 / 12),
    "normal_": (lambda: torch.empty(N).normal_(1, 2), 1, 4),
    "exponential_": (lambda: torch.empty(N).exponential_(2), 0.5, 0.25),
    "geometric_": (lambda: torch.empty(N).geometric_(0.25), 4, 12),
    "log_normal_": (lambda: torch.empty(N).log_normal_(0, 0.25), 1.0317, 0.0687),
    "random_": (lambda: torch.empty(N).random_(5, 9), 6.5, 15 / 12),
    "cauchy_": (lambda: torch.empty(N).cauchy_().atan(), 0, np.pi**2 / 12),
    "multinomial": (lambda: torch.multinomial(torch.tensor([1.0, 3.0, 0.0]).expand(N, 3), 1), 0.75, 0.1875),
    "multinomial again": (lambda: torch.multinomial(torch.tensor([1.0, 3.0]), N, replacement=True), 0.75, 0.1875),
    "dropout": (lambda: F.dropout(ONES, 0.2), 1, 0.25),
    "dropout in place": (lambda: F.dropout(ONES.clone(), 0.5, inplace=True), 1, 1),
    "torch.dropout": (lambda: torch.dropout(ONES, 0.2, True), 1, 0.25),
    "native_dropout": (lambda: torch.native_dropout(ONES, 0.2, True)[0], 1, 0.25),
    "dropout2d": (lambda: F.dropout2d(torch.ones(N // 4, 4, 1, 1), 0.5), 1, 1),
    "alpha_dropout": (lambda: F.alpha_dropout(torch.zeros(N), 0.3, training=True), 0, 0.495),
    "feature_alpha_dropout": (lambda: F.feature_alpha_dropout(torch.zeros(N, 1), 0.3, training=True), 0, 0.495),
    "rrelu": (lambda: F.rrelu(-ONES, 0.2, 0.8, training=True), -0.5, 0.03),
    "gumbel_softmax": (lambda: F.gumbel_softmax(torch.zeros(N, 2), hard=True)[:, 0], 0.5, 0.25),
    "distribution": (lambda: NORMAL.rsample((N,)), 0, 1),
    "out": (lambda: torch.rand(N, out=torch.empty(N)), 0.5, 1 / 12),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_their_distribution(name: str) -> None:
    function, mean, variance = DRAWS[name]
    found = drawn(function).double()
    assert found.shape[0] == function().shape[0]
    slack = 6 * (variance / found.numel()) ** 0.5 * (3 if name in ("dropout2d", "log_normal_") else 1)
    assert abs(found.mean() - mean) < slack
    assert found.var() == pytest.approx(variance, rel=0.08)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(N, generator=torch.Generator().manual_seed(0))
    found = drawn(lambda: F.alpha_dropout(x, 0.4, training=True))
    assert abs(float(found.mean())) < 0.03 and float(found.var()) == pytest.approx(1, rel=0.03)


def test_channels_drop_together_and_permutations_have_each_number_once() -> None:
    maps = drawn(lambda: F.dropout2d(torch.ones(50, 8, 3, 3), 0.5))
    assert torch.equal(maps, maps[:, :, :1, :1].expand_as(maps))
    assert torch.equal(drawn(lambda: torch.randperm(100)).sort().values, torch.arange(100))
    several = drawn(lambda: torch.multinomial(torch.ones(30, 5), 5))
    assert torch.equal(several.sort(-1).values, torch.arange(5).expand(30, 5))


@pytest.mark.parametrize("form", ["plain", "causal", "mask", "bias", "gqa", "scale"])
def test_attention_with_dropout_is_attention_on_average(form: str) -> None:
    generator, many = torch.Generator().manual_seed(0), 3000
    heads = 2 if form == "gqa" else 4
    q = torch.randn(1, 4, 3, 4, generator=generator).expand(many, -1, -1, -1)
    k, v = (torch.randn(1, heads, 3, 4, generator=generator).expand(many, -1, -1, -1) for _ in range(2))
    extra: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": torch.ones(3, 3).tril().bool()},
        "bias": {"attn_mask": torch.randn(1, 1, 3, 3, generator=generator)},
        "gqa": {"enable_gqa": True},
        "scale": {"scale": 0.1},
    }[form]
    wanted = F.scaled_dot_product_attention(q, k, v, **extra)
    with answers():
        plain = F.scaled_dot_product_attention(q, k, v, **extra)
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, **extra)
    assert torch.equal(plain, wanted) and not torch.allclose(dropped[0], wanted[0], atol=1e-3)
    assert torch.allclose(dropped.mean(0), wanted[0], atol=0.06)


def test_recurrent_networks_drop_between_layers() -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        network, x = kind(3, 64, 2, dropout=0.5), torch.randn(4, 5, 3)
        with answers() as mode:
            network(x)
        assert mode.draws == 1
        network.eval()
        with torch.no_grad(), answers() as mode:
            ours = network(x)[0]
        assert mode.draws == 0 and torch.allclose(ours, network(x)[0], atol=1e-6)


# --------------------------------------------------------------------------------------------------------- in graphs

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 2)), (4, 6)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True), (3, 5, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True), (3, 5, 8)),
    "lstm": (lambda: nn.LSTM(3, 4, 2, dropout=0.4, batch_first=True), (3, 5, 3)),
    "noise": (lambda: nn.Sequential(nn.Linear(6, 6), Function(lambda x: x + torch.randn_like(x))), (4, 6)),
    "drop path": (
        lambda: nn.Sequential(nn.Linear(6, 6), Function(lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.5))),
        (4, 6),
    ),
}


def graph_of(name: str, seed: int = 1, **settings: Any) -> tuple[nn.Module, sg.TrainingGraph, torch.Tensor]:
    make, shape = MODULES[name]
    torch.manual_seed(seed)
    sg.set_seed(seed)
    module, x = make(), sg.Tensor(shape, label="x")
    graph, layer = sg.Graph(), sg.TorchLayer(module, call=([sg.Source(0)] * 3, {}) if name == "attention" else None)
    y = graph.node(layer, x)
    training = sg.TrainingGraph([graph], optimizer=sg.SGDOptimizer(0.1))
    training.node(sg.LossLayer.mean_squared_error(), y, loss_labels=(label := sg.Tensor(y.shape)))
    training.add_inputs({"x": x}, {"y": label})
    training.compile(CPU, deterministic=True, **settings)
    return module, training, torch.zeros(y.shape)


SLOW = {"attention", "encoder", "lstm", "noise"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] if name in SLOW else []) for name in MODULES]
)
def test_modules_are_random_repeatable_and_the_same_in_phases(name: str) -> None:
    x = torch.randn(MODULES[name][1], generator=torch.Generator().manual_seed(0))
    module, training, y = graph_of(name)
    rate = training.optimizer.learning_rate
    training.optimizer.learning_rate = 0.0
    losses = [float(training.execute({"x": x}, {"y": y}).loss) for _ in range(3)]
    assert len(set(losses)) == 3 and np.isfinite(losses).all()
    training.optimizer.learning_rate = rate
    training.execute({"x": x}, {"y": y})
    other, phases, _ = graph_of(name)
    phases.optimizer.learning_rate = 0.0
    for loss in losses:
        phases.execute_forward({"x": x}, {"y": y})
        assert float(phases.execute_gradient().loss or loss) == loss
        phases.execute_optimizer_update()
    phases.optimizer.learning_rate = rate
    phases.execute_forward({"x": x}, {"y": y})
    phases.execute_gradient()
    phases.execute_optimizer_update()
    for one, two in zip(module.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_the_gradient_uses_the_mask_of_the_forward_pass() -> None:
    module, x = nn.Sequential(nn.Linear(4, 512, bias=False), nn.Dropout(0.5)), sg.Tensor((1, 4), label="x")
    with torch.no_grad():
        module[0].weight.fill_(1.0)
    graph = sg.Graph()
    y = graph.node(sg.TorchLayer(module), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": sg.Tensor(y.shape)})
    training.add_outputs({"y": y})
    training.compile(CPU)
    training.execute({"x": np.ones((1, 4), np.float32)}, {"y": np.zeros((1, 512), np.float32)})
    dropped = torch.from_numpy(training.outputs["y"].numpy())[0] == 0
    assert torch.equal(module[0].weight[:, 0] == 1, dropped) and 150 < int(dropped.sum()) < 350


@pytest.mark.parametrize(
    ("rate", "dropped"),
    [(0.0, False), (-1, False), (1.0, True), (2, True)],
)
def test_a_probability_of_0_or_1_decides_a_branch(rate: float, dropped: bool) -> None:
    def skips(x: torch.Tensor) -> torch.Tensor:
        assert bool(torch.rand([]) >= rate) is not dropped and bool(rate > torch.rand(1)) is dropped
        return x if torch.rand([]) < rate else x * 2

    x = sg.Tensor((2, 3), label="x")
    graph = sg.Graph()
    y = graph.node(sg.TorchLayer(nn.Sequential(nn.Linear(3, 3), Function(skips))), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": sg.Tensor(y.shape)})
    training.compile(CPU)
    with pytest.raises(sg.StateError, match="reads numbers"):
        graph.node(sg.TorchLayer(Function(lambda x: x if torch.rand([]) < 0.5 else -x)), x)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: torch.poisson(x.abs()), "aten.poisson"),
        (lambda x: torch.binomial(x.abs().round(), x.sigmoid()), "aten.binomial"),
        (lambda x: torch.ops.aten.rand([3]) + x, "aten.rand"),
        (lambda x: torch._standard_gamma(x.abs()), "aten._standard_gamma"),
    ],
)
def test_other_random_operators_are_refused_by_name(function: Callable[[Any], Any], operator: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), Function(function))
    with pytest.raises(sg.ArgumentError) as caught:
        sg.Graph().node(sg.TorchLayer(module, label="net"), sg.Tensor((2, 3)))
    text = str(caught.value)
    assert "TorchLayer 'net'" in text and f"random operator {operator}," in text
    assert "1 (Function)" in text and "test_torch_layer_random.py:" in text
