"""Numbers that are not finite: the layer, phase and step are named, and nothing is lost."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.step import STREAM

BATCH = 4
CPU = sg.Device.cpu()
CHECK = sg.GraphCompilationOptions.CHECK_NUMERICS
NAN, INF = np.float32("nan"), np.float32("inf")
Y = np.zeros((BATCH, 2), np.float32)
X = np.linspace(0.1, 1.2, 12, dtype=np.float32).reshape(BATCH, 3)


def arithmetic(operation: str, label: str) -> sg.Layer:
    return sg.ArithmeticLayer(sg.ArithmeticOperation[operation], label=label)


def dense(inputs: int, outputs: int, label: str, fill: float | None = None) -> sg.FullyConnectedLayer:
    """A layer with the same small weights each time, or all the same."""
    weights = np.linspace(-0.4, 0.5, inputs * outputs, dtype=np.float32).reshape(outputs, inputs)
    if fill is not None:
        weights = np.full((outputs, inputs), fill, np.float32)
    tensors = (sg.Tensor(array.shape, data=array) for array in (weights, np.zeros(outputs, np.float32)))
    return sg.FullyConnectedLayer(*tensors, sg.ConvolutionDescriptor(1, inputs, outputs), label=label)


def network(
    layers: Sequence[sg.Layer],
    options: sg.GraphCompilationOptions = CHECK,
    optimizer: sg.Optimizer | None = None,
    compute_type: str | None = None,
) -> sg.TrainingGraph:
    """Layers in a row, from `x` of three numbers to `y` of two, and a mean squared error."""
    x, y, graph = sg.Tensor((BATCH, 3), label="x"), sg.Tensor((BATCH, 2), label="y"), sg.Graph()
    given = x
    for layer in layers:
        given = graph.node(layer, given)
    loss = sg.LossLayer.mean_squared_error(label="loss")
    training = sg.TrainingGraph([graph], loss, optimizer or sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU, options, compute_type=compute_type)
    return training


def step(training: sg.TrainingGraph, x: np.ndarray = X, y: np.ndarray = Y) -> sg.Execution:
    return training.execute({"x": x}, {"y": y})


def with_value(array: np.ndarray, value: float) -> np.ndarray:
    changed = array.copy()
    changed[2, 1] = value
    return changed


def _log_of_a_negative() -> tuple[sg.TrainingGraph, Any, Any]:
    return network([arithmetic("LOG", "log"), dense(3, 2, "last")]), -X, Y


def _overflowing_exponential() -> tuple[sg.TrainingGraph, Any, Any]:
    return network([dense(3, 5, "first"), arithmetic("EXP", "exp"), dense(5, 2, "last")]), X * 1000, Y


def _root_at_zero() -> tuple[sg.TrainingGraph, Any, Any]:
    return network([dense(3, 5, "first", 0.0), arithmetic("SQRT", "root"), dense(5, 2, "last")]), X, Y


def _large_rate() -> tuple[sg.TrainingGraph, Any, Any]:
    optimizer = sg.SGDOptimizer(learning_rate=3e38)
    return network([dense(3, 2, "only")], optimizer=optimizer), X * 100, Y + 100


def _large_square() -> tuple[sg.TrainingGraph, Any, Any]:
    return network([dense(3, 2, "only")], optimizer=sg.AdamOptimizer(learning_rate=0.1)), X * 1e12, Y


def _nan_in_data() -> tuple[sg.TrainingGraph, Any, Any]:
    return network([dense(3, 5, "first"), arithmetic("EXP", "exp"), dense(5, 2, "last")]), with_value(X, NAN), Y


def _infinite_label() -> tuple[sg.TrainingGraph, Any, Any]:
    return network([dense(3, 2, "only")]), X, with_value(Y, -INF)


def _statistics() -> tuple[sg.TrainingGraph, Any, Any]:
    turned = [sg.ReshapeLayer((BATCH, 3, 1, 1)), sg.BatchNormalizationLayer.create(3, label="norm")]
    return network([*turned, sg.ReshapeLayer((BATCH, 3)), dense(3, 2, "last")]), X * 1e25, Y


class Swallowed(sg.Layer):
    """A large exponential that is not chosen: the forward pass is fine, its gradient is 0 · inf."""

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return torch.where(x > 0.1, torch.ones_like(x), torch.exp(200 * x))


def _gradient_behind_where() -> tuple[sg.TrainingGraph, Any, Any]:
    return network([dense(3, 5, "first"), Swallowed(label="swallowed"), dense(5, 2, "last")]), X * 20, Y


CASES: dict[str, tuple[Callable[[], tuple[sg.TrainingGraph, Any, Any]], str, str, str, str]] = {
    "log of a negative number": (_log_of_a_negative, "log", "forward", "result", "12 NaN of 12"),
    "overflow in exp": (_overflowing_exponential, "exp", "forward", "result", "+inf of 20"),
    "root at zero": (_root_at_zero, "root", "gradient", "gradient", "inf"),
    "hidden behind a where": (_gradient_behind_where, "swallowed", "gradient", "gradient", "NaN"),
    "large learning rate": (_large_rate, "only", "update", "update", "inf of 6 elements"),
    "squares of gradients": (_large_square, "only", "update", "update", "velocity"),
    "NaN in the data": (_nan_in_data, "first", "forward", "input", "1 NaN of 12 elements, first at [2, 1]"),
    "infinite label": (_infinite_label, "loss", "forward", "input", "1 -inf of 8 elements, first at [2, 1]"),
    "running variance": (_statistics, "norm", "forward", "result", "variance"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_first_offender_is_named(case: tuple) -> None:
    build, layer, phase, what, words = case
    training, x, y = build()
    with pytest.raises(sg.NumericsError) as caught:
        step(training, x, y)
    error = caught.value
    assert (error.layer, error.phase, error.step, error.report.what) == (layer, phase, 1, what), str(error)
    assert words in str(error) and "test_seeing_numerics.py:" in str(error)
    assert isinstance(error, FloatingPointError) and "Fix: " in str(error)
    told = training.check_numerics()  # the same, looked at again
    assert (told.layer, told.phase, told.step, told.what, told.ok) == (layer, phase, 1, what, False)


def test_input_data_is_blamed_by_its_name_and_no_layer_is() -> None:
    training, x, y = _nan_in_data()
    with pytest.raises(sg.NumericsError, match=r"^Tensor 'x' \(input 'x'\): NaN in its data in step 1\.") as caught:
        step(training, x, y)
    assert caught.value.report.name == "x"


def test_steps_are_counted() -> None:
    training = network([arithmetic("LOG", "log"), dense(3, 2, "last")])
    for _ in range(2):
        step(training)
    with pytest.raises(sg.NumericsError, match="forward pass of step 3") as caught:
        step(training, -X)
    assert caught.value.step == 3 and training.optimizer.time_step == 3
    step(training)
    assert training.optimizer.time_step == 4


def test_the_message_tells_ranges_of_what_was_read() -> None:
    training, x, y = _overflowing_exponential()
    with pytest.raises(sg.NumericsError) as caught:
        step(training, x, y)
    seen = training.check_numerics().facts["source"]
    assert seen.is_finite and seen.count == 20 and seen.high > 89  # exp(89) is more than float32 holds
    assert f"source        20 elements, {seen.low:.4g} to {seen.high:.4g}" in str(caught.value)
    assert "first NaN" in str(caught.value)  # where infinities meet later on


@pytest.mark.parametrize("order", [("log", "root"), ("root", "log")])
@pytest.mark.parametrize("bad", ["both", "log"])
def test_among_branches_the_first_that_is_not_finite_is_named(order: tuple[str, str], bad: str) -> None:
    x, y, graph = sg.Tensor((BATCH, 3), label="x"), sg.Tensor((BATCH, 3), label="y"), sg.Graph()
    names = {"log": arithmetic("LOG", "log"), "root": arithmetic("SQRT" if bad == "both" else "EXP", "root")}
    one, other = (graph.node(names[name], x) for name in order)
    graph.node(sg.ArithmeticLayer.add(), graph.node(sg.ActivationLayer.tanh(label="tanh"), one), other)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error())
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU, CHECK)
    with pytest.raises(sg.NumericsError) as caught:
        training.execute({"x": -X}, {"y": X})
    assert caught.value.layer == (order[0] if bad == "both" else "log")
    assert caught.value.step is None  # nothing counts steps without an optimizer


def test_recurrent_layers_and_what_follows_them_are_told_apart() -> None:
    x, y, graph = sg.Tensor((2, 5, 3), label="x"), sg.Tensor((2, 5, 4)), sg.Graph()
    layer = sg.LSTMLayer.create(3, 4, label="memory")
    graph.node(arithmetic("LOG", "log"), graph.node(sg.ActivationLayer.relu(), graph.node(layer, x)))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU, CHECK)
    data, labels = {"x": np.ones((2, 5, 3), np.float32)}, {"y": np.zeros((2, 5, 4), np.float32)}
    for parameter in layer.parameters.values():
        parameter.torch().fill_(0.1)
    training.execute(data, labels)
    for parameter in layer.parameters.values():
        parameter.torch().fill_(-0.1)
    with pytest.raises(sg.NumericsError) as caught:  # the logarithm of relu's zeros
        training.execute(data, labels)
    assert (caught.value.layer, caught.value.phase, caught.value.step) == ("log", "forward", 2)
    layer.parameters["hidden_weights.1"].torch()[2, 3] = float("inf")
    with pytest.raises(sg.NumericsError, match="first at \\[2, 3\\]") as caught:
        training.execute(data, labels)
    assert (caught.value.layer, caught.value.report.what) == ("memory", "parameter")
    assert caught.value.report.name == "hidden_weights.1"


def test_infinities_that_come_to_nothing_are_no_problem() -> None:
    """What an attention mask does: minus infinity before a softmax."""
    x, mask, y, graph = sg.Tensor((BATCH, 3)), sg.Tensor((1, 3)), sg.Tensor((BATCH, 3)), sg.Graph()
    scores = graph.node(sg.ArithmeticLayer.add(), graph.node(dense(3, 3, "scores"), x), mask)
    graph.node(sg.SoftmaxLayer.softmax(1), scores)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x, "mask": mask}, {"y": y})
    training.compile(CPU, CHECK)
    training.execute({"x": X, "mask": np.array([[0, -INF, 0]], np.float32)}, {"y": X})
    assert training.check_numerics().ok
    with pytest.raises(sg.NumericsError, match="input 'mask'") as caught:  # no score left: the softmax makes NaN of it
        training.execute({"x": X, "mask": np.array([[-INF] * 3], np.float32)}, {"y": X})
    assert caught.value.report.name == mask.label


def test_a_parameter_that_is_not_finite_already_is_named_with_the_others() -> None:
    training = network([dense(3, 5, "first"), dense(5, 2, "second")], sg.GraphCompilationOptions.NONE)
    step(training)
    assert np.isnan(step(training, with_value(X, NAN)).loss)  # and the update has spread it
    told = training.check_numerics()
    assert (told.what, told.name, told.step) == ("input", "x", 2)
    assert "first.weights" in str(told) and "second.weights" in str(told)
    told = training.check_numerics({"x": X}, {"y": Y})
    assert (told.what, told.layer, told.name, told.step) == ("parameter", "first", "weights", 3)
    assert "when step 3 begins; an earlier step produced it" in str(told) and "CHECK_NUMERICS" in str(told)


def test_a_gradient_from_outside_is_named() -> None:
    x, graph = sg.Tensor((BATCH, 3)), sg.Graph()
    out = graph.node(dense(3, 2, "only"), x)
    training = sg.TrainingGraph([graph], None, sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x})
    training.compile(CPU, CHECK)
    given = training.allocate_user_gradient(out)
    training.bind_and_write_data({"g": with_value(Y, NAN)}, {"g": given}, CPU)
    with pytest.raises(sg.NumericsError) as caught:
        training.execute({"x": X})
    assert (caught.value.layer, caught.value.phase, caught.value.report.what) == ("only", "gradient", "user gradient")


# Nothing is lost


def _learner(options: sg.GraphCompilationOptions = CHECK) -> sg.TrainingGraph:
    """With everything that a step changes: parameters, two optimizer buffers, statistics, random numbers."""
    sg.set_seed(5)
    turned = [sg.ReshapeLayer((BATCH, 3, 1, 1)), sg.BatchNormalizationLayer.create(3, label="norm")]
    layers = [*turned, sg.ReshapeLayer((BATCH, 3)), dense(3, 5, "first"), sg.DropoutLayer(0.5), dense(5, 2, "last")]
    return network(layers, options, sg.AdamOptimizer(learning_rate=0.1))


def _everything(training: sg.TrainingGraph) -> list[bytes]:
    arrays = [*(tensor.torch() for tensor in training.compilation.held), *training.session.state.arrays.values()]
    return [array.cpu().numpy().tobytes() for array in arrays] + [bytes([training.optimizer.time_step])]


def _phases(training: sg.TrainingGraph, x: np.ndarray = X, y: np.ndarray = Y) -> None:
    tensors = {"x": training.inputs["x"], "y": training.loss_labels["y"]}
    training.bind_and_write_data({"x": x, "y": y}, tensors, CPU)
    training.execute_forward()
    training.execute_gradient()
    training.execute_optimizer_update()


def test_a_step_that_is_refused_leaves_everything_as_it_was() -> None:
    training, twin = _learner(), _learner(sg.GraphCompilationOptions.NONE)
    for _ in range(2):
        step(training)
        step(twin)
    before = _everything(training)
    assert before == _everything(twin)  # checking changes no number
    for run in (step, _phases):
        with pytest.raises(sg.NumericsError):
            run(training, with_value(X, NAN))
        assert _everything(training) == before
    assert step(training).loss == step(twin).loss
    assert _everything(training) == _everything(twin)


@pytest.mark.parametrize("build", [_root_at_zero, _large_rate], ids=["gradient", "update"])
def test_phases_raise_in_the_phase_that_is_concerned(build: Callable[..., Any]) -> None:
    training, x, y = build()
    tensors = {"x": training.inputs["x"], "y": training.loss_labels["y"]}
    training.bind_and_write_data({"x": x, "y": y}, tensors, CPU)
    before = _everything(training)
    training.execute_forward()
    if build is _large_rate:
        training.execute_gradient()
        with pytest.raises(sg.NumericsError) as caught:
            training.execute_optimizer_update()
    else:
        with pytest.raises(sg.NumericsError) as caught:
            training.execute_gradient()
    assert caught.value.phase == ("update" if build is _large_rate else "gradient")
    assert _everything(training) == before


def test_looking_changes_nothing() -> None:
    training, twin = _learner(sg.GraphCompilationOptions.NONE), _learner(sg.GraphCompilationOptions.NONE)
    for one in (training, twin):
        step(one)
    before, shown = _everything(training), training.nodes[-1].results[0].numpy().copy()
    assert training.check_numerics().ok and not training.check_numerics({"x": with_value(X, NAN)}, {"y": Y}).ok
    assert training.profile().seconds > 0
    assert _everything(training) == before
    assert np.array_equal(training.nodes[-1].results[0].numpy(), shown)
    assert step(training).loss == step(twin).loss and _everything(training) == _everything(twin)


def test_the_last_batch_is_replayed_with_its_own_random_numbers() -> None:
    """A dropout that kept other elements would hide, or show, what the step has seen."""
    x, y, graph = sg.Tensor((BATCH, 64), label="x"), sg.Tensor((BATCH, 64)), sg.Graph()
    graph.node(arithmetic("RSQRT", "rsqrt"), graph.node(sg.DropoutLayer(0.3, label="drop"), x))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error())
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    data, labels = np.ones((BATCH, 64), np.float32), np.zeros((BATCH, 64), np.float32)
    for _ in range(3):
        training.execute({"x": data}, {"y": labels})
        dropped = int(np.isinf(training.nodes[-1].results[0].numpy()).sum())
        assert training.check_numerics().contents.positive == dropped
        stream = training.session.arrays()[STREAM].tolist()
        assert training.check_numerics({"x": data}, {"y": labels}).contents.positive != dropped
        assert training.session.arrays()[STREAM].tolist() == stream


# Mixed precision, inference, and how the error reaches people


def test_gradients_that_overflow_with_a_scaled_loss_are_no_problem() -> None:
    training = network([dense(3, 2, "only")], compute_type="float16")
    training.loss_scale = 2.0**30
    before = training.nodes[0].layer.weights.numpy().copy()
    step(training, X * 100)
    told = training.check_numerics()
    assert training.loss_scale == 2.0**29 and np.array_equal(training.nodes[0].layer.weights.numpy(), before)
    assert told.ok and "skipped" in str(told) and "5.36871e+08" in str(told)
    with pytest.raises(sg.NumericsError) as caught:  # in the forward pass no scale is at work
        step(training, X * 65000)
    assert caught.value.layer == "only" and caught.value.phase == "forward"


def test_inference_graphs_check_too() -> None:
    x, graph = sg.Tensor((BATCH, 3), label="x"), sg.Graph()
    graph.node(sg.ActivationLayer.relu(label="relu"), graph.node(arithmetic("LOG", "log"), x))
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(CPU, CHECK)
    inference.execute({"x": X})
    assert str(inference.check_numerics()) == "Everything is finite."
    with pytest.raises(sg.NumericsError) as caught:
        inference.execute({"x": -X})
    assert (caught.value.layer, caught.value.phase) == ("log", "forward") and "rolled back" not in str(caught.value)
    assert inference.check_numerics().layer == "log"


def test_an_evaluation_is_checked() -> None:
    training, x, y = _log_of_a_negative()
    with pytest.raises(sg.NumericsError) as caught:
        training.execute({"x": x}, {"y": y}, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE)
    assert caught.value.layer == "log"


def test_a_completion_handler_gets_the_error() -> None:
    training, x, y = _log_of_a_negative()
    got: list[Any] = []
    execution = training.execute({"x": x}, {"y": y}, completion=lambda *given: got.append(given))
    assert isinstance(got[0][1], sg.NumericsError)
    with pytest.raises(sg.NumericsError):
        execution.wait()


def test_the_rows_of_the_last_call_are_looked_at() -> None:
    training, x, _ = _log_of_a_negative()
    assert training.check_numerics({"x": X[:3]}, {"y": Y[:3]}, batch_size=3).ok
    training.execute({"x": X}, {"y": Y})
    training.execute({}, options=sg.ExecutionOptions.SKIP_WRITING_INPUT_DATA_TO_DEVICE, batch_size=2)
    assert training.check_numerics().ok
    with pytest.raises(sg.DataError):
        training.execute({"x": x[:1]}, {"y": Y[:1]}, batch_size=3)
    assert training.check_numerics().ok  # what was refused was not executed
    with pytest.raises(sg.NumericsError):
        training.execute({"x": x[:3]}, {"y": Y[:3]}, batch_size=3)
    assert training.check_numerics().contents.nan == 9


def test_there_must_be_a_batch() -> None:
    training = network([dense(3, 2, "only")])
    for call in (training.check_numerics, training.profile):
        with pytest.raises(sg.StateError, match="nothing has been executed yet"):
            call()
    with pytest.raises(sg.StateError, match="not compiled"):
        sg.TrainingGraph().check_numerics()


def test_fit_points_at_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    training = network([dense(3, 2, "only")], sg.GraphCompilationOptions.NONE)
    data = {"x": with_value(X, NAN)}, {"y": Y}
    history = sg.fit(training, data, epochs=3, on_nan="continue", progress="plain")
    printed = capsys.readouterr().out
    assert printed.count("check_numerics()") == 1 and "the loss is nan in step 1" in printed
    assert len(history.epochs) == 3  # and goes on as before


def test_fit_ends_with_the_error() -> None:
    training = network([dense(3, 2, "only")])
    with pytest.raises(sg.NumericsError, match="input 'x'"):
        sg.fit(training, ({"x": with_value(X, NAN)}, {"y": Y}), progress="quiet")


@pytest.mark.gpu
def test_a_gpu_is_checked_through_all_its_ways_to_run() -> None:
    """Before the CUDA graph, while it is captured, and as a replay."""
    for good in (0, 1, 4):
        training = network([arithmetic("LOG", "log"), dense(3, 2, "last")])
        training.compile(sg.Device.gpu(), CHECK)
        for _ in range(good):
            step(training)
        before = _everything(training)
        with pytest.raises(sg.NumericsError) as caught:
            step(training, -X)
        assert (caught.value.layer, caught.value.phase, caught.value.step) == ("log", "forward", good + 1)
        assert _everything(training) == before and training.check_numerics().layer == "log"
        assert step(training).loss > 0 and "fusion starts in the background" in str(training)
