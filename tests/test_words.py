"""Short spellings: devices by name, settings by keyword, phases with their data, results by name."""

import inspect

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph import mlc
from stepgraph.compiler.settings import SWITCHES, switched

Options = sg.GraphCompilationOptions


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Line:
    """One dense layer, a squared loss, and SGD."""

    def __init__(self, device: object = "cpu", **settings: object) -> None:
        sg.set_seed(2)
        self.x, self.y, self.graph = sg.Tensor((4, 3)), sg.Tensor((4, 2)), sg.Graph()
        self.dense = sg.FullyConnectedLayer.create(3, 2)
        self.out = self.graph.node(self.dense, self.x)
        optimizer = sg.SGDOptimizer(learning_rate=0.1)
        self.training = sg.TrainingGraph([self.graph], sg.LossLayer.mean_squared_error(), optimizer)
        self.training.add_inputs({"x": self.x}, {"y": self.y})
        self.training.add_outputs({"out": self.out})
        self.training.compile(device, **settings)

    def predicted(self, x: np.ndarray) -> np.ndarray:
        return x @ self.dense.weights.numpy().T + self.dense.biases.numpy()


X, Y = numbers(4, 3), numbers(4, 2, seed=1)


# compile


@pytest.mark.parametrize("device", ["cpu", "any", torch.device("cpu"), sg.Device.cpu()], ids=str)
def test_devices_by_name(device: object) -> None:
    assert Line(device).training.device in (sg.Device.cpu(), sg.Device.any())


def test_unknown_and_missing_devices_are_refused_and_change_nothing() -> None:
    training = Line().training
    with pytest.raises(sg.DataTypeError, match="'warp' is not a device"):
        training.compile("warp")
    with pytest.raises(sg.DeviceError, match="no device 'cuda:97'"):
        training.compile("cuda:97")
    assert training.device == sg.Device.cpu() and training.execute({"x": X}, {"y": Y}).loss > 0


def test_keywords_stand_for_the_option_flags() -> None:
    for name, (on, off) in SWITCHES.items():
        for value, flag in ((True, on), (False, off), (None, Options.NONE)):
            assert switched(Options.NONE, {name: value}) == flag, (name, value)
    assert inspect.signature(sg.TrainingGraph.compile).parameters.keys() >= SWITCHES.keys()
    both = Line(options=Options.CHECK_NUMERICS, deterministic=True, check_numerics=True)
    assert both.training.compilation.settings.options == Options.CHECK_NUMERICS | Options.DETERMINISTIC
    every = Line("cpu", deterministic=True, check_numerics=True, fuse=True).training
    assert every.compilation.settings.options == both.training.compilation.settings.options | Options.FUSE_LAYERS


def test_keywords_and_flags_that_disagree_are_refused() -> None:
    line = Line()
    for flag, name, value in (
        (Options.DETERMINISTIC, "deterministic", False),
        (Options.CHECK_NUMERICS, "check_numerics", False),
        (Options.FUSE_LAYERS, "fuse", False),
        (Options.DISABLE_LAYER_FUSION, "fuse", True),
    ):
        with pytest.raises(sg.ArgumentError, match=f"{name} is {value}, but the options contain"):
            line.training.compile("cpu", flag, **{name: value})
    with pytest.raises(sg.DataTypeError, match="fuse is 1"):
        line.training.compile("cpu", fuse=1)
    assert line.training.compilation.settings.options == Options.NONE


# Phases


def test_phases_take_their_data_and_equal_whole_steps() -> None:
    whole, phases = Line(deterministic=True), Line(deterministic=True)
    for seed in range(3):
        x, y = numbers(4, 3, seed=seed), numbers(4, 2, seed=9 + seed)
        loss = whole.training.execute({"x": x}, {"y": y}).loss
        step = phases.training.execute_forward({"x": x}, {"y": y})
        assert step.loss == loss and np.array_equal(step["out"], phases.out)
        phases.training.execute_gradient()
        phases.training.execute_optimizer_update()
    assert np.array_equal(whole.dense.weights, phases.dense.weights)


def test_bound_data_stays_until_other_data_comes() -> None:
    line, again = Line(deterministic=True), Line(deterministic=True)
    line.training.bind({"x": X, "y": Y})
    loss = again.training.execute({"x": X}, {"y": Y}).loss
    assert line.training.execute_forward().loss == line.training.execute_forward({"x": X}).loss == loss
    with pytest.raises(sg.UnknownNameError, match="'z' is not among"):
        line.training.bind({"z": X})
    with pytest.raises(sg.DataError, match="9 rows, but the call reads 4"):
        line.training.bind({"x": numbers(9, 3)})
    with pytest.raises(sg.StateError, match="not compiled"):
        sg.TrainingGraph([line.graph]).bind({"x": X})
    line.training.bind({"x": X[:2], "y": Y[:2]}, batch_size=2)
    assert line.training.execute_forward(2).loss == pytest.approx(((line.predicted(X[:2]) - Y[:2]) ** 2).mean())


def test_a_gradient_from_outside_is_passed_with_its_pass() -> None:
    for by_name in (False, True):
        line = Line(deterministic=True)
        outside = sg.TrainingGraph([line.graph], optimizer=sg.SGDOptimizer(learning_rate=0.1))
        outside.add_inputs({"x": line.x})
        outside.add_outputs({"out": line.out})
        outside.compile("cpu")
        before = line.dense.weights.numpy().copy()
        outside.execute_forward({"x": X})
        gradient = numbers(4, 2, seed=5)
        with pytest.raises(sg.UnknownNameError, match="not an output"):
            outside.execute_gradient({"nothing": gradient})
        with pytest.raises(sg.UnknownNameError, match="not a result"):
            outside.execute_gradient({line.x: gradient})
        with pytest.raises(sg.DataError, match="8 rows, but the call reads 4"):
            outside.execute_gradient({line.out: numbers(8, 2)})
        outside.execute_gradient({"out" if by_name else line.out: gradient})
        outside.execute_optimizer_update()
        np.testing.assert_allclose(line.dense.weights.numpy(), before - 0.1 * gradient.T @ X, rtol=1e-5, atol=1e-6)
        outside.execute_forward({"x": X})
        outside.execute_gradient()  # the outside gradient belonged to its own pass
        assert np.abs(outside.gradient_data(line.dense.weights, line.dense)).max() == 0


# Rows


def test_more_rows_than_a_call_reads_are_never_cut_silently() -> None:
    line = Line()
    many, labels = numbers(33, 3), numbers(33, 2)
    inference = line.training.inference()
    for call in (
        lambda: line.training.execute({"x": many}, {"y": labels}),
        lambda: line.training.execute({"x": X}, {"y": labels}),
        lambda: line.training.execute({"x": many.tolist()}, {"y": labels}),
        lambda: line.training.execute({"x": many.ravel()}, {"y": labels}),
        lambda: line.training.execute_forward({"x": torch.tensor(many)}, {"y": labels}),
        lambda: line.training.check_numerics({"x": many}, {"y": labels}),
        lambda: inference.execute({"x": many}),
    ):
        with pytest.raises(sg.DataError, match="33 rows, but the call reads 4"):
            call()
    with pytest.raises(sg.ShapeError, match="different numbers of rows"):
        sg.evaluate(line.training, [(X, labels)])
    loss = sg.evaluate(line.training, (many, labels))["loss"]
    assert loss == pytest.approx(((line.predicted(many) - labels) ** 2).mean(), rel=1e-5)
    assert line.training.execute({"x": many}, {"y": labels}, batch_size=33).loss == pytest.approx(loss, rel=1e-5)


def test_ml_computes_names_do_not_cut_arrays_either() -> None:
    tensor = mlc.MLCTensor.tensorWithShape_([4, 3])
    graph = mlc.MLCGraph.graph()
    graph.nodeWithLayer_source_(mlc.MLCActivationLayer.reluLayer(), tensor)
    inference = mlc.MLCInferenceGraph.graphWithGraphObjects_([graph])
    inference.addInputs_({"x": tensor})
    inference.compileWithOptions_device_(mlc.MLCGraphCompilationOptionsNone, mlc.MLCDevice.cpuDevice())
    execute = inference.executeWithInputsData_batchSize_options_completionHandler_
    synchronous = mlc.MLCExecutionOptionsSynchronous
    many = numbers(33, 3)
    assert not execute({"x": many}, 0, synchronous, None)
    assert "33 rows, but the call reads 4" in str(mlc.lastError())
    memory = mlc.MLCTensorData.dataWithBytesNoCopy_length_(many, many.nbytes)  # raw memory has no rows
    assert execute({"x": memory}, 0, synchronous, None) and execute({"x": many[:4]}, 0, synchronous, None)


# Results


def test_results_by_name_stay_what_they_were() -> None:
    line = Line()
    steps, expected = [], []
    for seed in range(4):
        x = numbers(4, 3, seed=seed)
        expected.append(line.predicted(x))
        steps.append(line.training.execute({"x": x}, {"y": Y}))
    for step, wanted in zip(steps, expected, strict=True):
        np.testing.assert_allclose(step["out"].numpy(), wanted, rtol=1e-5, atol=1e-6)
        assert step.outputs == ("out",) and step["out"].label == line.out.label
    with pytest.raises(sg.UnknownNameError, match=r"no output 'loss'(.|\n)*'out'"):
        steps[0]["loss"]


def test_gradients_by_name_stay_what_they_were_while_others_are_added() -> None:
    line = Line(all_gradients=True)
    line.training.add_outputs({"dx": line.training.gradient_tensor(line.x)})
    line.training.execute_forward({"x": X}, {"y": Y})
    first = line.training.execute_gradient()
    wanted = first["dx"].numpy().copy()
    line.training.execute_forward({"x": 3 * X}, {"y": Y})
    line.training.execute_gradient(options=sg.ExecutionOptions.ACCUMULATE_GRADIENTS)
    assert np.array_equal(first["dx"], wanted) and "out" not in first.outputs
    assert np.array_equal(line.training.execute({"x": X}, {"y": Y})["dx"], wanted)


@pytest.mark.gpu
def test_results_by_name_stay_what_they_were_on_cuda() -> None:
    line = Line("cuda")
    for _ in range(12):
        line.training.execute({"x": X}, {"y": Y})
    steps, expected = [], []
    for seed in range(30):
        x = numbers(4, 3, seed=seed)
        line.training.synchronize_updates()
        expected.append(line.predicted(x))
        steps.append(line.training.execute({"x": x}, {"y": Y}))
    for step, wanted in zip(steps, expected, strict=True):
        np.testing.assert_allclose(step["out"].numpy(), wanted, rtol=1e-3, atol=1e-3)
