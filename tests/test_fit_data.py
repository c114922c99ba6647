"""What a loop can be fed with: arrays, dictionaries, iterables, loaders, datasets with columns."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.fitting.data import Batch, BatchReader, ahead, kept
from tests.fit_runs import BATCH, FEATURES, ROWS, arrays, network, parameters, renewed


class Table:
    """What a dataset with columns looks like: rows by number or slice, as columns; others than the graph's too."""

    column_names = ("id", "x", "y")

    def __init__(self, lists: bool) -> None:
        x, y = arrays()
        self.columns = {"id": np.arange(len(x)), "x": x, "y": y}
        self.lists = lists

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        assert isinstance(rows, list | slice)
        found = {name: column[rows] for name, column in self.columns.items()}
        return {name: column.tolist() for name, column in found.items()} if self.lists else found


class Streamed:
    """What a dataset looks like that is read from one end to the other."""

    column_names = None

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def iter(self, batch_size: int) -> Iterator[dict[str, Any]]:
        table = Table(lists=False)
        return (table[slice(i, i + batch_size)] for i in range(0, ROWS, batch_size))


def batches() -> list:
    x, y = arrays()
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, ROWS, BATCH)]


def torch_arrays() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = arrays()
    return torch.from_numpy(x), torch.from_numpy(y)


X, Y = arrays()
KINDS: dict[str, Any] = {
    "tuple": lambda: (X, Y),
    "dictionary": lambda: {"x": X, "y": Y},
    "tuple of dictionaries": lambda: ({"x": X}, {"y": Y}),
    "torch": torch_arrays,
    "lists": lambda: (X.tolist(), Y.tolist()),
    "read-only": lambda: (np.frombuffer(X.tobytes(), np.float32).reshape(X.shape), Y),
    "reversed": lambda: (X[::-1].copy()[::-1], Y[::-1].copy()[::-1]),
    "big endian": lambda: (X.astype(">f4"), Y),
    "batches": batches,
    "batches by name": lambda: [{"x": x, "y": y} for x, y in batches()],
    "lists of arrays": lambda: [[x, y] for x, y in batches()],
    "function": lambda: lambda epoch: iter(batches()),
    "loader": lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*torch_arrays()), BATCH),
    "table": lambda: Table(lists=False),
    "table of lists": lambda: Table(lists=True),
    "stream": Streamed,
}


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], list[bytes]]:
    training = network()
    losses = [training.execute({"x": x}, {"y": y}, batch_size=len(x)).loss for x, y in batches() * 2]
    return losses, parameters(training)


AHEAD = [(kind, count) for kind in ("tuple", "batches", "table") for count in (0, 3)]


@pytest.mark.parametrize("kind, prefetch", [*((kind, None) for kind in KINDS), *AHEAD])
def test_all_kinds_of_data_are_the_same_data(kind: str, prefetch: int | None, expected: tuple) -> None:
    training, data = network(), KINDS[kind]()
    history = sg.fit(training, data, epochs=2, shuffle=False, prefetch=prefetch, progress="quiet")
    assert (history.losses, parameters(training)) == expected
    if isinstance(data, Streamed):
        assert data.epochs == [0, 1]
        assert sg.evaluate(training, data) == sg.evaluate(training, (X, Y))


def test_shuffled_kinds_have_the_same_order() -> None:
    found = []
    for kind in ("tuple", "torch", "table", "lists"):
        training = network()
        found.append(sg.fit(training, KINDS[kind](), epochs=2, progress="quiet").losses)
    assert found.count(found[0]) == len(found)


def test_batches_may_be_smaller_or_larger_than_declared() -> None:
    for size, steps in ((4, 11), (20, 3), (100, 1)):
        history = sg.fit(network(), (X, Y), batch_size=size, progress="quiet")
        assert history["step"] == [steps]


def test_further_keys_of_dictionaries_are_left_alone() -> None:
    names = [f"row {i}" for i in range(len(X))]
    plain = renewed()
    expected = sg.fit(plain, (X, Y), shuffle=False, progress="quiet").losses
    for data in (
        {"x": X, "y": Y, "name": names, "extra": X[:3]},
        ({"x": X, "name": names}, {"y": Y, "weight": None}),
        [{"x": x, "y": y, "name": names[:8]} for x, y in batches()],
        [({"x": x, "name": names[:8]}, y) for x, y in batches()],
    ):
        assert sg.fit(renewed(), data, shuffle=False, progress="quiet").losses == expected


def test_one_iterator_is_good_for_one_epoch() -> None:
    assert len(sg.fit(network(), iter(batches()), progress="quiet").losses) == len(batches())
    with pytest.raises(ValueError, match="exhausted after one epoch of 2"):
        sg.fit(network(), iter(batches()), epochs=2)
    with pytest.raises(ValueError, match="the validation is an iterator"):
        sg.fit(network(), (X, Y), validation=iter(batches()), epochs=2)


def test_validation_may_come_otherwise_than_the_data() -> None:
    history = sg.fit(network(), (X, Y), batch_size=4, validation=batches(), progress="quiet")
    assert "validation loss" in history.epochs[0]


@pytest.fixture(scope="module")
def untouched() -> sg.TrainingGraph:
    return network()


class Samples(torch.utils.data.Dataset):
    def __getitem__(self, row: int) -> Any:
        return X[row], Y[row]


@pytest.mark.parametrize(
    "data, error, words",
    [
        ((X.astype(np.float64), Y), TypeError, "the data is float64, but the tensor is float32"),
        ((X[:, :3], Y), ValueError, "(1, 3)"),
        ((X.reshape(-1), Y), ValueError, "the array has shape (220,)"),
        ((X, Y[:-1]), ValueError, "different numbers of rows"),
        ((X[:0], Y[:0]), ValueError, "there are no rows"),
        ((X,), ValueError, "'y': there is no data for it"),
        ({"x": X, "label": Y}, KeyError, "no input or label 'label'"),
        (({"image": X}, Y), KeyError, "no input 'image'"),
        ((X, Y, Y), ValueError, "one array was passed as loss label weight, but the graph has 0"),
        ((X, Y, Y, Y), ValueError, "a batch has 4 parts"),
        (3, TypeError, "int is not data"),
        (Samples(), TypeError, "Samples returns single samples"),
        ([(X[:0], Y[:0])], ValueError, "a batch has no rows"),
        ([(X[:4], Y[:2])], ValueError, "too short"),
        ([], ValueError, "there are no batches"),
        ([X, Y], ValueError, "'y': there is no data for it"),
        ({}, ValueError, "there is no data for it"),
        ([("text", Y)], TypeError, "str is not an array"),
    ],
)
def test_data_that_does_not_fit_is_refused(untouched: sg.TrainingGraph, data: Any, error: type, words: str) -> None:
    before = parameters(untouched)
    with pytest.raises(error) as caught:
        sg.fit(untouched, data, progress="quiet")
    assert isinstance(caught.value, sg.StepgraphError)
    assert words in str(caught.value) and "Fix:" in str(caught.value)
    assert parameters(untouched) == before


def test_wrong_validation_data_is_refused_before_the_first_step(untouched: sg.TrainingGraph) -> None:
    training = untouched
    before = parameters(training)
    with pytest.raises(TypeError, match="validation, input 'x': the data is float64"):
        sg.fit(training, (X, Y), validation=(X.astype(np.float64), Y), progress="quiet")
    with pytest.raises(ValueError, match="already in batches"):
        sg.fit(training, batches(), batch_size=4, progress="quiet")
    assert parameters(training) == before


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stepgraph data"]


def made(count: int, seen: list[int]) -> Iterator[Batch]:
    for i in range(count):
        seen.append(i)
        yield Batch(({"i": i}, {}, {}), 1)


def test_batches_are_made_ahead_and_the_thread_ends() -> None:
    seen: list[int] = []
    coming = ahead(made(9, seen), 2)
    assert next(coming).parts[0]["i"] == 0 and len(threads()) == 1
    deadline = time.monotonic() + 10
    while len(seen) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert seen == [0, 1, 2, 3]  # one was taken, two wait, one is in hand
    coming.close()
    assert threads() == []
    assert [batch.parts[0]["i"] for batch in ahead(made(5, []), 3)] == list(range(5)) and threads() == []


def test_what_goes_wrong_in_the_thread_arrives() -> None:
    def broken() -> Iterator[Any]:
        yield X[:BATCH], Y[:BATCH]
        raise OSError("the disk is gone")

    training = network()
    with pytest.raises(OSError, match="the disk is gone"):
        sg.fit(training, lambda epoch: broken(), progress="quiet")
    assert threads() == [] and training.optimizer.time_step == 2


def test_several_inputs_and_constants() -> None:
    a, b, c = (sg.Tensor((BATCH, FEATURES), label=name) for name in "abc")
    y, graph = sg.Tensor((BATCH, FEATURES)), sg.Graph()
    graph.node(sg.ArithmeticLayer.add(), graph.node(sg.FullyConnectedLayer.create(5, 5), a), b)
    graph.node(sg.ArithmeticLayer.add(), graph.nodes[-1].results[0], c)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"a": a, "b": b, "c": c}, {"y": y})
    training.compile(sg.Device.cpu(), input_tensors={"c": c}, input_tensors_data={"c": X[:BATCH]})
    sg.fit(training, {"a": X[:16], "b": X[:16], "y": X[:16]}, progress="quiet")
    sg.fit(training, ({"a": X[:16], "b": X[:16]}, X[:16]), accumulate=2, progress="quiet")
    with pytest.raises(ValueError, match="a tuple was passed as input, but the graph has 2"):
        sg.fit(training, [((X, X), Y)], progress="quiet")
    with pytest.raises(ValueError, match="one array was passed as input, but the graph has 2"):
        sg.fit(training, (X, X))


def test_one_array_is_for_the_input_that_waits_for_data() -> None:
    x, offset, y = sg.Tensor((BATCH, FEATURES)), sg.Tensor((1, FEATURES), fill=1.0), sg.Tensor((BATCH, FEATURES))
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(FEATURES, FEATURES), graph.node(sg.ArithmeticLayer.add(), offset, x))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    by_name = sg.evaluate(training, {"x": X, "y": X})
    assert len(training.inputs) == 2 and sg.evaluate(training, (X, X)) == by_name
    assert len(sg.fit(training, (X, X), accumulate=2, progress="quiet").epochs) == 1
    assert sg.evaluate(training, (X, X)) == sg.evaluate(training, {"x": X, "y": X})  # fit let go of what it bound


@pytest.mark.parametrize("name", ["x", "y"])
def test_a_mask_anywhere_in_the_data_is_found_before_the_first_step(name: str) -> None:
    x, y = arrays()
    masked = {"x": np.ma.array(x), "y": np.ma.array(y)}
    training = network()
    sg.fit(training, masked, progress="quiet")  # nothing is masked
    before = parameters(training)
    masked[name][len(x) - 1] = np.ma.masked
    with pytest.raises(sg.DataError, match="masked elements"):
        sg.fit(training, masked, shuffle=False, progress="quiet")
    assert parameters(training) == before


@pytest.mark.parametrize("own", [np.empty_like, lambda like: torch.empty(like.shape)], ids=["numpy", "torch"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_program_may_fill_the_same_arrays_again(own: Any, count: int) -> None:
    """The thread that reads ahead, and an update of several batches, ask for a batch before they use the last one."""
    rows = np.random.default_rng(0).standard_normal((48, 3)).astype(np.float32)
    buffers = [(own(rows[:4]), own(rows[:4])) for _ in range(count)]

    def filled(epoch: int) -> Iterator[Any]:
        for start in range(0, 48, 4):
            x, y = buffers[start // 4 % count]
            x[:], y[:] = (
                torch.from_numpy(a) if isinstance(x, torch.Tensor) else a for a in (rows[start : start + 4],) * 2
            )
            yield x, y

    fresh = [(rows[start : start + 4], rows[start : start + 4]) for start in range(0, 48, 4)]
    for accumulate, prefetch in ((1, None), (4, 0), (3, 5)):
        ours, theirs = linear(), linear()
        history = sg.fit(ours, filled, epochs=2, accumulate=accumulate, prefetch=prefetch, progress="quiet")
        expected = sg.fit(theirs, fresh, epochs=2, accumulate=accumulate, progress="quiet")
        assert history.losses == expected.losses
        assert sg.evaluate(ours, filled) == sg.evaluate(ours, fresh)
        found, wanted = sg.predict(ours, filled), sg.predict(ours, fresh)
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_new_arrays_are_not_copied_for_long() -> None:
    reader = BatchReader(linear(), "data")
    made = [reader.batch((np.ones((4, 3), np.float32), np.ones((4, 3), np.float32))) for _ in range(6)]
    found = list(kept(iter(made), 3))
    same = [one.parts[0]["x"] is other.parts[0]["x"] for one, other in zip(found, made, strict=True)]
    assert same == [False, False, False, False, True, True]


def linear() -> sg.TrainingGraph:
    sg.set_seed(0)
    x, y, graph = sg.Tensor((sg.BATCH, 3)), sg.Tensor((sg.BATCH, 3)), sg.Graph()
    graph.dense(x, 3)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", deterministic=True)
    return training
