"""`sg.BATCH`: graphs wired without a number of rows."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stepgraph as sg
from stepgraph.cli.main import main

CPU = sg.Device.cpu()


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Model:
    """A small convolutional network for images of any number, and its PyTorch twin."""

    def __init__(self, rows: int = sg.BATCH, **settings: Any) -> None:
        sg.set_seed(1)
        self.x, self.y, self.graph = sg.Tensor((rows, 2, 6, 6)), sg.Tensor((rows,), "int64"), sg.Graph()
        self.convolution = sg.ConvolutionLayer.create(2, 4, kernel_sizes=3)
        self.dense = sg.FullyConnectedLayer.create(4 * 36, 3)
        a = self.graph.node(sg.ActivationLayer.relu(), self.graph.node(self.convolution, self.x))
        self.scores = self.graph.node(self.dense, self.graph.reshape((sg.BATCH, -1), a))
        loss, optimizer = sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=0.1)
        self.training = sg.TrainingGraph([self.graph], loss, optimizer)
        self.training.add_inputs({"x": self.x}, {"y": self.y})
        self.training.compile(CPU, **settings)

    def torch(self, x: np.ndarray) -> torch.Tensor:
        tensors = self.convolution.weights, self.convolution.biases, self.dense.weights, self.dense.biases
        w, b, v, c = (tensor.torch().clone() for tensor in tensors)
        return F.linear(F.relu(F.conv2d(torch.tensor(x), w, b, padding=1)).flatten(1), v, c)


def batch(rows: int, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    return {"x": numbers(rows, 2, 6, 6, seed=seed)}, {"y": np.random.default_rng(seed).integers(0, 3, rows)}


# Wiring


def test_shapes_follow_the_batch_and_are_shown() -> None:
    x, graph = sg.Tensor((sg.BATCH, 4, 6)), sg.Graph()
    flat = graph.reshape((sg.BATCH, -1), x)
    assert flat.shape == (sg.BATCH, 24) and graph.reshape((-1, 6), x).shape == (4 * sg.BATCH, 6)
    assert graph.transpose((1, 0), flat).shape == (24, sg.BATCH)
    assert graph.reshape((4 * sg.BATCH, -1), x).shape == (4 * sg.BATCH, 6)
    both = graph.concatenate([flat, flat], dimension=0)
    assert both.shape == (2 * sg.BATCH, 24)
    halves = graph.split(both, 2, dimension=0)
    assert [half.shape for half in halves] == [(sg.BATCH, 24)] * 2
    assert graph.node(sg.ReductionLayer(sg.ReductionType.SUM, (0,)), flat).shape == (1, 24)
    assert "BATCH×4×6" in str(graph) and "4·BATCH×6" in str(graph)
    assert repr(x) == f"Tensor('{x.label}', [BATCH, 4, 6] float32)"
    assert sg.Tensor.image(8, 6, 3, sg.BATCH).shape == (sg.BATCH, 3, 6, 8)
    assert sg.Tensor.sequence(7, 3, sg.BATCH).shape == (sg.BATCH, 7, 3)


def test_batch_is_an_extent_of_its_own() -> None:
    assert sg.BATCH == sg.BATCH != 12 and hash(sg.BATCH) == hash(1 * sg.BATCH)
    assert [repr(e) for e in (sg.BATCH, 3 * sg.BATCH, sg.BATCH + 2, 2 * sg.BATCH - 1)] == [
        "BATCH", "3·BATCH", "BATCH+2", "2·BATCH-1",
    ]  # fmt: skip
    assert 6 * sg.BATCH // 3 == 2 * sg.BATCH and f"{sg.BATCH:,}" == "BATCH"
    for same in (copy.deepcopy(3 * sg.BATCH), pickle.loads(pickle.dumps(3 * sg.BATCH))):
        assert same == 3 * sg.BATCH and same.at(5) == 15


def test_reshape_to_batch_rows_in_a_graph_with_a_declared_number() -> None:
    x, graph = sg.Tensor((4, 2, 3)), sg.Graph()
    flat = graph.reshape((sg.BATCH, -1), x)
    assert flat.shape == (4, 6) and not isinstance(flat.shape[0], type(sg.BATCH))
    inference = sg.InferenceGraph([graph])
    inference.compile(CPU)
    assert inference.execute({x.label: numbers(9, 2, 3)}, batch_size=9).result.shape == (9, 6)


class Halves(sg.Layer):
    """A layer that takes even numbers of rows only."""

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x.reshape(x.shape[0] // 2, 2, x.shape[1])


class Rounded(sg.Layer):
    """A layer that returns fewer rows, the more it gets."""

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x[: 60 // x.shape[0]]


def test_what_does_not_fit_every_number_of_rows_is_refused() -> None:
    x, graph = sg.Tensor((sg.BATCH, 4)), sg.Graph()
    with pytest.raises(sg.ShapeError, match=r"BATCH, 4.*12, 4"):
        graph.node(sg.ArithmeticLayer.add(), x, sg.Tensor((12, 4)))
    with pytest.raises(sg.ShapeError, match=r"elements cannot take the shape(.|\n)*counts as 12"):
        graph.reshape((sg.BATCH, 3), x)
    with pytest.raises(sg.ShapeError, match="5 for 12 rows and 2 for 24"):
        graph.node(Rounded(), x)
    with pytest.raises(sg.ShapeError, match="data has a number of rows"):
        sg.Tensor((sg.BATCH, 4), fill=0.0)
    with pytest.raises(sg.ShapeError, match="declared number"):
        graph.node(sg.ReshapeLayer((sg.BATCH, -1)), sg.Tensor((3, 4)))
    assert graph.node(Halves(), x).shape == (sg.BATCH // 2, 2, 4)
    assert "BATCH/2×2×4" in str(graph)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(CPU)
    assert inference.execute({"x": numbers(6, 4)}).result.shape == (3, 2, 4)
    with pytest.raises(sg.StepgraphError, match="Halves"):
        inference.execute({"x": numbers(5, 4)})
    assert inference.execute({"x": numbers(4, 4)}).result.shape == (2, 2, 4)


# Executing


def test_steps_of_any_size_learn_as_pytorch_does() -> None:
    model = Model()
    assert model.training.executables == []
    for rows in (5, 1, 8, 5):
        x, y = batch(rows, seed=rows)
        before = [p.torch().clone().requires_grad_() for p in (model.dense.weights, model.dense.biases)]
        hidden = F.relu(F.conv2d(torch.tensor(x["x"]), model.convolution.weights.torch().clone(),
                                 model.convolution.biases.torch().clone(), padding=1)).flatten(1)  # fmt: skip
        loss = F.cross_entropy(F.linear(hidden, *before), torch.tensor(y["y"]))
        loss.backward()
        assert model.training.execute(x, y).loss == pytest.approx(loss.item(), rel=1e-5)
        after = [(p - 0.1 * p.grad).detach().numpy() for p in before]
        for found, expected in zip((model.dense.weights, model.dense.biases), after, strict=True):
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-6)
    assert model.training.executables == [("step", 5), ("step", 1), ("step", 8)]


def test_it_equals_a_graph_with_a_declared_number_bit_for_bit() -> None:
    open_graph, declared = Model(deterministic=True), Model(5, deterministic=True)
    for seed in range(3):
        losses = [model.training.execute(*batch(5, seed)).loss for model in (open_graph, declared)]
        assert losses[0] == losses[1]
    assert np.array_equal(open_graph.dense.weights, declared.dense.weights)


def test_phases_read_the_rows_off_the_data() -> None:
    whole, phases = Model(deterministic=True), Model(deterministic=True)
    for rows in (4, 7):
        whole.training.execute(*batch(rows))
        step = phases.training.execute_forward(*batch(rows))
        assert phases.scores.numpy().shape == (rows, 3) and step.loss > 0
        phases.training.execute_gradient()
        assert phases.training.gradient_data(phases.dense.weights, phases.dense).shape == (3, 144)
        phases.training.execute_optimizer_update()
    assert np.array_equal(whole.dense.weights, phases.dense.weights)
    x, y = batch(3)
    phases.training.bind({**x, **y})
    assert phases.training.execute_forward().loss == phases.training.execute(x, y).loss
    handles = phases.training.result_gradient_tensors(phases.dense)
    assert [handle.shape for handle in handles] == [(sg.BATCH, 3)]


def test_rows_that_disagree_are_refused_and_change_nothing() -> None:
    model = Model()
    before = model.dense.weights.numpy().copy()
    (x, y), (_, more) = batch(4), batch(5)
    with pytest.raises(sg.ShapeError, match=r"different numbers of rows(.|\n)*4 rows(.|\n)*5 rows"):
        model.training.execute(x, more)
    with pytest.raises(sg.DataError, match="there is no data"):
        model.training.execute(x)
    with pytest.raises(sg.DataError, match="0 rows"):
        model.training.execute({"x": x["x"][:0]}, {"y": y["y"][:0]})
    with pytest.raises(sg.ShapeError, match="different numbers of rows"):
        sg.fit(model.training, [(x["x"], more["y"])], progress="quiet")
    assert np.array_equal(before, model.dense.weights)
    assert model.training.execute({"x": numbers(9, 2, 6, 6)}, more, batch_size=3).loss > 0  # the first three


def test_inputs_that_are_no_batch_keep_their_shapes() -> None:
    x, table, graph = sg.Tensor((sg.BATCH,), "int64"), sg.Tensor((12, 3)), sg.Graph()
    scale = sg.Tensor((1, 3), data=np.full((1, 3), 2, np.float32))
    graph.node(sg.ArithmeticLayer.multiply(), graph.gather(0, table, x), scale)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"table": table, "rows": x})
    inference.compile(CPU)
    values = numbers(12, 3)
    for rows in ([1], [3, 0, 11], list(range(12))):
        found = inference.execute({"table": values, "rows": np.array(rows)})
        assert np.array_equal(found.result, 2 * values[rows])


def test_two_tensors_with_several_rows_each() -> None:
    x, pairs, graph = sg.Tensor((sg.BATCH, 3)), sg.Tensor((2 * sg.BATCH, 3)), sg.Graph()
    first, second = graph.split(graph.reshape((sg.BATCH, 2, 3), pairs), 2, dimension=1)
    both = graph.reshape((sg.BATCH, 3), graph.node(sg.ArithmeticLayer.add(), first, second))
    graph.node(sg.ArithmeticLayer.add(), x, both)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x, "pairs": pairs})
    inference.compile(CPU)
    a, b = numbers(5, 3), numbers(10, 3, seed=1)
    found = inference.execute({"x": a, "pairs": b}).result
    np.testing.assert_allclose(found.numpy(), a + b[::2] + b[1::2], rtol=1e-6)
    with pytest.raises(sg.DataError, match="9 rows, but the tensor has 2·BATCH"):
        inference.execute({"x": a, "pairs": b[:9]})


# Everything around


def test_fit_evaluate_and_predict_take_any_number_of_rows() -> None:
    model = Model()
    x, y = numbers(70, 2, 6, 6), np.random.default_rng(0).integers(0, 3, 70)
    sg.fit(model.training, (x, y), epochs=2, progress="quiet")
    assert {rows for _, rows in model.training.executables} == {32, 6}
    expected = model.torch(x)
    loss = F.cross_entropy(expected, torch.tensor(y)).item()
    assert sg.evaluate(model.training, (x, y), batch_size=9)["loss"] == pytest.approx(loss, rel=1e-4)
    np.testing.assert_allclose(sg.predict(model.training, x)["output"], expected, rtol=1e-4, atol=1e-5)
    sg.fit(model.training, (x, y), batch_size=16, accumulate=2, progress="quiet", metrics=[sg.accuracy])


def test_the_memory_plan_is_that_of_a_stated_size_or_of_what_ran() -> None:
    model, declared = Model(), Model(20)
    assert model.training.memory_plan.total == 0
    assert "memory_plan_for(rows)" in str(model.training)
    assert model.training.memory_plan_for(20).total == declared.training.memory_plan.total
    for rows in (0, -1, 1.5, True):
        with pytest.raises(sg.ArgumentError, match="memory_plan_for: batch_size is"):
            model.training.memory_plan_for(rows)  # type: ignore[arg-type]
    model.training.execute(*batch(20))
    assert model.training.memory_plan.total == declared.training.memory_plan.total
    assert "BATCH×3" in str(model.training) and "total" in str(model.training)
    limited = Model(memory_limit=model.training.memory_plan_for(4).total)
    assert limited.training.execute(*batch(4)).loss > 0
    with pytest.raises(sg.MemoryLimitError, match="batch size"):
        limited.training.execute(*batch(400))


def test_saved_and_loaded_with_its_open_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    model.training.execute(*batch(5))
    model.training.save(tmp_path / "model")
    again = sg.load(tmp_path / "model", "cpu")
    assert again.inputs["x"].shape == (sg.BATCH, 2, 6, 6)
    assert again.execute(*batch(3)).loss == model.training.execute(*batch(3)).loss
    inference = sg.load(tmp_path / "model", "cpu", inference=True)
    x = numbers(4, 2, 6, 6)
    assert inference.execute({"x": x}).result.shape == (4, 3)
    assert Model().training.restore(tmp_path / "model")
    for command in (["inspect"], ["compare", "--devices", "cpu,cpu:deterministic"]):
        assert main([*command, str(tmp_path / "model")]) == 0
    assert "BATCH" in capsys.readouterr().out


def test_a_recorded_run_states_its_batch_size(tmp_path: Path) -> None:
    model = Model()
    x, y = batch(20)
    sg.fit(model.training, (x["x"], y["y"]), batch_size=8, run=tmp_path / "run", progress="quiet")
    assert (tmp_path / "run" / "report.html").exists()


def test_inspection_of_an_open_graph() -> None:
    model = Model(check_numerics=True)
    assert "finite" in str(model.training.check_numerics(*batch(3)))
    model.training.execute(*batch(6))
    assert "Convolution" in str(model.training.profile(repeat=1)) and str(model.training.pipeline)
    assert model.training.inference().execute({"x": numbers(2, 2, 6, 6)}).result.shape == (2, 3)
