"""A step like the last one does not find out again what to do. Whatever happens in between, it computes the same."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.errors import DataError, DataTypeError, NumericsError, StepgraphError, UnknownNameError
from stepgraph.graphs.repetition import Repetition
from stepgraph.graphs.session import Session
from stepgraph.graphs.training import TrainingGraph

ROWS = 4
FORWARD_ONLY = sg.ExecutionOptions.FORWARD_FOR_INFERENCE
SKIP = sg.ExecutionOptions.SKIP_WRITING_INPUT_DATA_TO_DEVICE
Data = tuple[dict[str, Any], dict[str, Any]]


class Case:
    """A small network with two inputs, dropout and running statistics, and batches for it."""

    def __init__(self, rows: Any = ROWS, kind: str = "torch", **settings: Any) -> None:
        sg.set_seed(3)
        self.kind, self.settings = kind, settings
        self.x, self.z, self.y = sg.Tensor((rows, 3)), sg.Tensor((rows, 3)), sg.Tensor((rows,), "int64")
        graph = sg.Graph()
        self.first = sg.FullyConnectedLayer.create(3, 6)
        hidden = graph.relu(graph.add(graph.node(self.first, self.x), graph.dense(self.z, 6)))
        hidden = graph.node(sg.DropoutLayer(0.25), graph.reshape((rows, 6, 1, 1), hidden))
        self.hidden = hidden = graph.node(sg.BatchNormalizationLayer.create(6), hidden)
        self.scores = graph.dense(graph.reshape((rows, 6), hidden), 5)
        self.optimizer = sg.AdamOptimizer(learning_rate=0.05)
        loss = sg.LossLayer.softmax_cross_entropy()
        self.training = sg.TrainingGraph([graph], loss, self.optimizer, average=0.5)
        self.training.add_inputs({"x": self.x, "z": self.z}, {"y": self.y})
        self.training.compile("cpu", **settings)
        self.number = 0

    def batch(self, rows: int = ROWS) -> Data:
        self.number += 1
        rng = np.random.default_rng(self.number)
        found = [rng.standard_normal((rows, 3), np.float32) for _ in range(2)] + [rng.integers(0, 5, rows)]
        x, z, y = map(torch.from_numpy, found) if self.kind == "torch" else found
        return {"x": x, "z": z}, {"y": y}

    def step(self, rows: int = ROWS) -> float:
        self.execution = self.training.execute(*self.batch(rows))
        return float(self.execution.loss)

    def state(self) -> list[np.ndarray]:
        """All that is readable: outputs, results, parameters and statistics, gradients, averages."""
        declared = [self.execution[name].numpy() for name in self.training.outputs]
        shown = [result for node in self.training.nodes for result in node.results]
        handles = self.training.gradients.handles.values()
        averages = [array.numpy() for array in self.training.averages.values()]
        tensors = (*shown, *self.training.compilation.held, *handles)
        return [*declared, *(one.numpy().copy() for one in tensors if one.has_data), *averages]


def freeze(case: Case) -> None:
    case.first.weights.is_updatable = False


def freeze_for_a_step(case: Case) -> None:
    freeze(case)
    case.step()
    case.first.weights.is_updatable = True


def assign_numbers(case: Case) -> None:
    case.optimizer.learning_rate = 0.5
    case.step()
    case.optimizer.time_step = 1


def bind_weights(case: Case) -> None:
    case.first.weights.bind_and_write_data(np.ones((6, 3), np.float32), sg.Device.cpu())


def write_weights(case: Case) -> None:
    case.first.weights.torch().fill_(0.5)


def evaluate(case: Case) -> None:
    case.training.execute(*case.batch(), options=FORWARD_ONLY)


def evaluate_other_rows(case: Case) -> None:
    case.training.execute(*case.batch(2), batch_size=2, options=FORWARD_ONLY)


def short_batch(case: Case) -> None:
    case.training.execute(*case.batch(3), batch_size=3)


def phases(case: Case) -> None:
    case.training.execute_forward(*case.batch())
    case.training.execute_gradient()
    case.training.execute_optimizer_update()


def a_phase(case: Case) -> None:
    case.training.execute_forward(*case.batch())


def gradients(case: Case) -> None:
    phases(case)
    assert case.training.result_gradient_tensors(case.first)


def compile_again(case: Case) -> None:
    case.training.compile("cpu", **case.settings)


def other_optimizer(case: Case) -> None:
    case.training.compile_optimizer(sg.SGDOptimizer(0.1))


def stop(case: Case) -> None:
    case.training.stop_gradient([case.scores])


def outputs(case: Case) -> None:
    case.training.add_outputs({"scores": case.scores})


def other_results(case: Case) -> None:
    """Asks for what whole steps discard, so they are compiled again."""
    assert not case.hidden.has_data
    case.training.add_outputs({"hidden": case.hidden})
    case.step()
    assert case.hidden.has_data


def keep_predictions(case: Case) -> None:
    case.training.keep_predictions()


def user_gradient(case: Case) -> None:
    gradient = case.training.allocate_user_gradient(case.scores)
    case.step()
    data = {"gradient": np.full((ROWS, 5), 0.1, np.float32)}
    case.training.bind_and_write_data(data, {"gradient": gradient}, sg.Device.cpu(), batch_size=ROWS)


def memory_for_outputs(case: Case) -> None:
    outputs(case)
    case.step()
    found = np.zeros((ROWS, 5), np.float32)
    case.training.execute(*case.batch(), outputs_data={"scores": found})
    assert found.any()


def completion(case: Case) -> None:
    told: list[Any] = []
    case.training.execute(*case.batch(), completion=lambda *found: told.append(found))
    assert len(told) == 1


def profiled(case: Case) -> None:
    case.training.execute(*case.batch(), options=sg.ExecutionOptions.PROFILING)


def skip(case: Case) -> None:
    case.training.execute({}, {}, options=SKIP)
    data = {"x": np.ones((ROWS, 3), np.float32)}
    case.training.bind_and_write_data(data, {"x": case.x}, sg.Device.cpu(), batch_size=ROWS)
    case.training.execute({}, {}, options=SKIP)


def bound_data(case: Case) -> None:
    inputs, labels = case.batch()
    case.training.bind_and_write_data({"x": inputs.pop("x")}, {"x": case.x}, sg.Device.cpu())
    case.training.execute(inputs, labels)


def other_order(case: Case) -> None:
    inputs, labels = case.batch()
    case.training.execute(dict(reversed(inputs.items())), labels)


def other_strides(case: Case) -> None:
    inputs, labels = case.batch()
    turned = torch.as_tensor(inputs["x"]).T.contiguous().T
    case.training.execute({**inputs, "x": turned}, labels)


def with_gradient(case: Case) -> None:
    inputs, labels = case.batch()
    case.training.execute({**inputs, "x": torch.as_tensor(inputs["x"]).requires_grad_()}, labels)


def wrong_name(case: Case) -> None:
    inputs, labels = case.batch()
    with pytest.raises(UnknownNameError):
        case.training.execute({**inputs, "w": inputs["x"]}, labels)


def wrong_type(case: Case) -> None:
    inputs, labels = case.batch()
    with pytest.raises(DataTypeError):
        case.training.execute({**inputs, "x": torch.as_tensor(inputs["x"]).double()}, labels)


def wrong_rows(case: Case) -> None:
    inputs, labels = case.batch()
    with pytest.raises(StepgraphError):
        case.training.execute({**inputs, "x": case.batch(ROWS + 1)[0]["x"]}, labels)


def missing(case: Case) -> None:
    inputs, _ = case.batch()
    with pytest.raises(DataError):
        Case(rows=ROWS, kind=case.kind, **case.settings).training.execute(inputs)


def wrong_label(case: Case) -> None:
    inputs, labels = case.batch()
    labels["y"][0] = 7
    with pytest.raises(StepgraphError):
        case.training.execute(inputs, labels)


def averaged(case: Case) -> None:
    with case.training.averaged():
        evaluate(case)


def other_graph(case: Case) -> None:
    x, y, graph = sg.Tensor((ROWS, 3)), sg.Tensor((ROWS, 6)), sg.Graph()
    graph.node(case.first, x)
    other = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    other.add_inputs({"x": x}, {"y": y})
    other.compile("cpu", **case.settings)
    other.execute({"x": np.ones((ROWS, 3), np.float32)}, {"y": np.ones((ROWS, 6), np.float32)})


def save_and_restore(case: Case, folder: Path) -> None:
    case.training.save(folder / "kept")
    case.step()
    case.training.restore(folder / "kept")


EVENTS: list[Callable[..., None]] = [
    freeze, freeze_for_a_step, assign_numbers, bind_weights, write_weights, evaluate, evaluate_other_rows, short_batch,
    phases, a_phase, gradients, compile_again, other_optimizer, stop, outputs, other_results, keep_predictions,
    user_gradient, memory_for_outputs, completion, profiled,
    skip, bound_data, other_order, other_strides, with_gradient, wrong_name, wrong_type, wrong_rows, missing,
    wrong_label, averaged, other_graph, save_and_restore,
]  # fmt: skip
# Those that have to do with the rows of a call.
OF_ROWS = [evaluate_other_rows, short_batch, phases, skip, bound_data, wrong_rows, compile_again]


def story(case: Case, event: Callable[..., None], folder: Path) -> list[Any]:
    """The losses around an event, and what is readable in the end."""
    found: list[Any] = [case.step() for _ in range(3)]
    event(case, folder) if event is save_and_restore else event(case)
    found += [case.step() for _ in range(3)]
    return [*found, case.optimizer.time_step, *case.state()]


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of every step that has found out what to do."""
    found, whole = [], TrainingGraph._executed

    def noting(self: TrainingGraph, *arguments: Any) -> Any:
        found.append(1)
        return whole(self, *arguments)

    monkeypatch.setattr(TrainingGraph, "_executed", noting)
    return found


CASES = [(ROWS, "torch", event) for event in EVENTS] + [(sg.BATCH, "numpy", event) for event in OF_ROWS]


@pytest.mark.parametrize(("rows", "kind", "event"), CASES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_whatever_happens_in_between_changes_nothing(
    event: Callable[..., None],
    rows: Any,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    decided: list[int],
) -> None:
    found = story(Case(rows, kind), event, tmp_path)
    repeats = len(decided)
    monkeypatch.setattr(Repetition, "run", lambda *_: (None, None))
    decided.clear()
    expected = story(Case(rows, kind), event, tmp_path)
    assert repeats < len(decided)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_steps_alike_find_out_once_what_to_do(decided: list[int]) -> None:
    case = Case()
    for _ in range(5):
        case.step()
    assert len(decided) == 1


def test_a_graph_that_is_compiled_again_keeps_nothing_of_the_session_before() -> None:
    case = Case()
    for _ in range(2):
        case.step()
    session = weakref.ref(case.training.session)
    case.training.compile("cpu")
    gc.collect()
    assert session() is None


def test_an_error_of_a_repeated_step_names_the_data() -> None:
    case = Case()
    case.step()
    inputs, labels = case.batch()
    labels["y"][1] = 5
    with pytest.raises(StepgraphError, match="'y'") as raised:
        case.training.execute(inputs, labels)
    assert "5" in str(raised.value)
    assert np.isfinite(case.step())


def test_what_is_not_finite_is_rolled_back_in_repeated_steps() -> None:
    case = Case(options=sg.GraphCompilationOptions.CHECK_NUMERICS)
    before = [case.step(), case.step()]
    kept = case.state()
    inputs, labels = case.batch()
    with pytest.raises(NumericsError):
        case.training.execute({**inputs, "x": inputs["x"] * torch.inf}, labels)
    for one, other in zip(case.state()[-4:], kept[-4:], strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isfinite([*before, case.step()]).all()


class Noisy:
    """Data that differs each time it is read."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.reads = array, array.shape, 0

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.reads += 1
        return self.array


@pytest.mark.parametrize("rows", [ROWS, sg.BATCH])
def test_data_is_read_once_whatever_its_rows(rows: Any) -> None:
    case = Case(rows, "numpy")
    for count in (4, 3, 4, 4, 3):
        inputs, labels = case.batch(count if rows is sg.BATCH else ROWS)
        noisy = Noisy(inputs["x"])
        case.training.execute({**inputs, "x": noisy}, labels)
        assert noisy.reads == 1


@pytest.mark.parametrize("change", [freeze, bind_weights])
def test_what_another_thread_changes_meanwhile_is_noticed(
    change: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It happens while a step finds out what to do."""
    case, bound = Case(), Session.bound

    def changing(self: Session, *given: Any) -> Any:
        found = bound(self, *given)
        monkeypatch.setattr(Session, "bound", bound)
        change(case)
        return found

    case.step()
    case.training.compile("cpu")
    monkeypatch.setattr(Session, "bound", changing)
    case.step()
    weights = case.first.weights.torch()
    before = weights.clone()
    case.step()
    assert torch.equal(weights, before) == (change is freeze)
