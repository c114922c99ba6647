"""LSTMs that oneDNN runs in one call: the layers' own equations, chosen by measuring, memory known."""

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_memory import measured_peak

import stepgraph as sg
from stepgraph.compiler import lowering
from stepgraph.compiler.kernels import lstm_onednn, measure
from stepgraph.compiler.kernels.choices import CHOICES
from stepgraph.compiler.step import Fusion

ours = torch.ops.stepgraph
Array = torch.Tensor
OPTIONS = sg.GraphCompilationOptions
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def choosing(name: str, asked: list[Any] | None = None) -> Any:
    """A function like `fastest` that always chooses the same."""

    def pick(operator: str, known: Any, arguments: Any, **_: Any) -> str:
        if asked is not None:
            asked.append((operator, arguments))
        return name if name in known else next(iter(known))

    return pick


def sequences(**settings: Any) -> tuple[sg.TrainingGraph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A network of an LSTM, compiled; its data."""
    compiled = {name: settings.pop(name) for name in ("options", "compute_type", "memory_limit") if name in settings}
    sg.set_seed(2)
    x, y, graph = sg.Tensor((6, 9, 5), label="x"), sg.Tensor((6,), "int64"), sg.Graph()
    layer = sg.LSTMLayer.create(5, 8, **settings)
    graph.dense(graph.reshape((6, -1), graph.node(layer, x)), 3)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(0.02))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", fuse=False, **compiled)
    data = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    return training, {"x": data}, {"y": np.arange(6) % 3}


def operators(training: sg.TrainingGraph) -> list[Any]:
    compiled = training.require_session("test").compilation
    return [node.target for node in compiled.programs.program(6).module.graph.nodes]


SETTINGS = [
    {"is_bidirectional": True},
    {"uses_biases": False},
    {"layer_count": 2, "result_mode": sg.LSTMResultMode.OUTPUT},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_networks_train_like_with_our_own_operator(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name in ("steps", "sequence"):
        monkeypatch.setattr(lowering, "fastest", choosing(name))
        training, *data = sequences(**settings)
        by_onednn = ours.lstm_onednn.default in operators(training)
        assert by_onednn == (name == "sequence") != (ours.lstm.default in operators(training))
        assert ("lstm: sequence" in str(training)) == by_onednn
        whole = [float(training.execute(*data).loss) for _ in range(5)]
        training.execute_forward(*data)
        training.execute_gradient()
        training.execute_optimizer_update()
        inference = [float(training.execute(*data, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE).loss)]
        parameters = [one.numpy() for one in training.state_dict().values()]
        found[name] = whole, inference, *sg.predict(training, data[0]).values(), *parameters
    for own, other in zip(found["steps"], found["sequence"], strict=True):
        np.testing.assert_allclose(other, own, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("reads", ["output", "states", "both"])
def test_results_and_gradients_are_those_of_our_own_operator(starts: bool, reverse: bool, reads: str) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Array:
        return torch.randn(shape, generator=generator) * 0.5

    gates = [[drawn(6, width) for _ in range(4)] for width in (5, 6)]
    biases, x, states = [drawn(6) for _ in range(4)], drawn(4, 7, 5).transpose(0, 1), [drawn(4, 6) for _ in range(2)]

    def run(by_onednn: bool) -> list[np.ndarray]:
        kind = torch.float32 if by_onednn else torch.float64
        leaves = [one.to(kind).requires_grad_() for one in (x, *gates[0], *gates[1], *biases, *states)]
        h0, c0 = leaves[-2:] if starts else (None, None)
        given = leaves[0], leaves[1:5], leaves[5:9], leaves[9:13], h0, c0, None, reverse
        if by_onednn:
            results = lstm_onednn.lstm_by_onednn(*given, keeps=True)
        else:
            results = lowering.one_direction(*given)
        read = {"output": results[:1], "states": results[1:], "both": results}[reads]
        total = sum((one * one * torch.arange(1, 7)).sum() for one in read)
        used = leaves if starts else leaves[:-2]
        gradients = torch.autograd.grad(total, used)
        assert not by_onednn or results[0].dtype is torch.float32
        return [one.detach().numpy() for one in (*results, *gradients)]

    for found, wanted in zip(run(True), run(False), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * max(1, np.abs(wanted).max()))


def test_what_it_does_not_compute_stays_with_our_own_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "fastest", choosing("sequence"))
    for settings in (
        {"options": OPTIONS.DETERMINISTIC},
        {"memory_limit": 1 << 30},
        {"compute_type": "bfloat16"},
        {"peepholes": True},
    ):
        assert ours.lstm_onednn.default not in operators(sequences(**settings)[0])
    training, *_ = sequences()
    assert ours.lstm_onednn.default in operators(training)
    step = training.require_session("test").compilation.programs.program(6).step
    assert lstm_onednn.applies(step) and not lstm_onednn.applies(replace(step, fusion=Fusion.FIRST))
    x = torch.empty(3, 4, 5)
    assert lstm_onednn.supports(x, None)
    for other, lengths in ((x.double(), None), (x[:, :0], None), (x, torch.tensor([3, 2, 1, 3]))):
        assert not lstm_onednn.supports(other, lengths)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert ours.lstm_onednn.default not in operators(sequences()[0])


def test_it_is_measured_with_gradients_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(lowering, "fastest", choosing("sequence", asked))
    training, inputs, _ = sequences()
    sg.predict(training, inputs)
    assert {operator for operator, _ in asked} == {"lstm"}
    assert {arguments[-1] for _, arguments in asked} == {True, False}
    assert [tuple(one.shape) for one in asked[0][1][:4]] == [(9, 6, 5), (32, 5), (32, 8), (32,)]


@pytest.mark.parametrize("trains", [True, False])
def test_measuring_compares_the_same_numbers(trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(CHOICES), "file", tmp_path / "kernels.jsonl")
    CHOICES.forget()
    gates = [[torch.empty(16, width) for _ in range(4)] for width in (12, 16)]
    given = torch.empty(20, 4, 12), *gates, [torch.empty(16)] * 4, None, torch.empty(4, 16), None, True
    lstm_onednn.is_faster(lowering.fastest, lstm_onednn.compared(given, trains=trains))
    (found,) = CHOICES.stored()
    assert set(found.seconds) == {"steps", "sequence"}  # what computes other numbers is left out
    CHOICES.forget()


@pytest.mark.parametrize("returns_sequences", [True, False])
def test_the_memory_that_it_needs_is_in_the_plan(returns_sequences: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "fastest", choosing("sequence"))
    x, y, graph = sg.Tensor((32, 40, 64)), sg.Tensor((32,), "int64"), sg.Graph()
    hidden = graph.node(sg.LSTMLayer.create(64, 128, returns_sequences=returns_sequences), x)
    graph.dense(graph.reshape((32, -1), hidden), 3)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", fuse=False)
    planned = training.memory_plan.intermediates
    data = {"x": torch.randn(32, 40, 64)}, {"y": torch.zeros(32, dtype=torch.int64)}
    training.execute(*data)
    assert measured_peak(lambda: training.execute(*data)) == pytest.approx(planned, rel=0.05)


def test_long_sequences_are_planned_without_running_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    runs = lstm_onednn.run
    monkeypatch.setattr(lstm_onednn, "run", lambda x, *given: seen.append(len(x)) or runs(x, *given))
    lstm_onednn._seen.cache_clear()
    with torch._subclasses.FakeTensorMode():
        given = torch.empty(10**6, 64, 48), torch.empty(256, 48), torch.empty(256, 64)
        kept = ours.lstm_onednn.default(*given, None, None, None, False, True)[3]
    assert seen and max(seen) <= lstm_onednn.MANY
    assert 2e11 < kept.numel() < 4e11
    fake = lstm_onednn._kept(100, 64, 48, 64)
    real = runs(torch.zeros(100, 64, 48), *given_weights(), None, None, None, False, True)[3].numel()
    assert fake == pytest.approx(real, rel=0.01)


def test_measuring_takes_a_part_of_long_sequences() -> None:
    gates = [[torch.empty(16, width, device="meta") for _ in range(4)] for width in (12, 16)]
    asked: list[Any] = []
    for steps in (10, 10**7):
        given = torch.empty(steps, 4, 12, device="meta"), *gates, None, None, None, None, False
        assert lstm_onednn.is_faster(choosing("sequence", asked), lstm_onednn.compared(given, trains=True))
    assert [len(arguments[0]) for _, arguments in asked] == [10, lstm_onednn.ENOUGH]
    wide = [[torch.empty(10**4, 10**4, device="meta") for _ in range(4)] for _ in range(2)]
    given = torch.empty(4, 4, 10**4, device="meta"), *wide, None, None, None, None, False
    assert measure.are_large(lstm_onednn.compared(given, trains=True))  # nothing of this size is made


def given_weights() -> tuple[Array, Array]:
    return torch.zeros(256, 48), torch.zeros(256, 64)


@pytest.mark.parametrize("keeps", [True, False])
def test_operators_announce_what_they_return(keeps: bool) -> None:
    x, weights, states = torch.randn(3, 2, 5), [torch.randn(16, 5), torch.randn(16, 4)], [torch.randn(2, 4)] * 2
    given = (x, *weights, torch.randn(16), *states, True, keeps)
    torch.library.opcheck(ours.lstm_onednn.default, given, test_utils=("test_schema", "test_faketensor"))
    if keeps:
        results = ours.lstm_onednn.default(*given)
        rest = (*given[:6], *results, torch.randn(3, 2, 4), None, torch.randn(2, 4), True)
        torch.library.opcheck(ours.lstm_onednn_gradient.default, rest, test_utils="test_faketensor")


@pytest.mark.parametrize("reverse", [True, False])
def test_gradients_can_be_computed_again(reverse: bool) -> None:
    """oneDNN writes to what the forward pass has kept."""
    torch.manual_seed(0)
    given = torch.randn(9, 6, 5), torch.randn(32, 5), torch.randn(32, 8), None, torch.randn(6, 8), None
    results, d_output = lstm_onednn.run(*given, reverse, True), torch.randn(9, 6, 8)
    for factor in (1, 2, 1):
        found = lstm_onednn.run_gradient(*given, *results, factor * d_output, None, None, reverse)
        fresh = lstm_onednn.run(*given, reverse, True)
        wanted = lstm_onednn.run_gradient(*given, *fresh, factor * d_output, None, None, reverse)
        assert all(map(torch.equal, found, wanted))
