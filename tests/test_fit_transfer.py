"""Batches on their way to a GPU: copied by the thread that prepares them, in a stream of their own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.fitting.data import Batch
from stepgraph.fitting.trained import Trained
from stepgraph.fitting.transfer import Transfer
from stepgraph.system import streams

ROWS, CLASSES = 4, 5


def network(place: str = "cpu", **settings: Any) -> sg.TrainingGraph:
    sg.set_seed(2)
    x, y = sg.Tensor((ROWS, 3)), sg.Tensor((ROWS,), "int64")
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(3, CLASSES), x)
    loss = sg.LossLayer.softmax_cross_entropy(ignored_label=-100)
    training = sg.TrainingGraph([graph], loss, sg.AdamOptimizer(0.01))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(place, **settings)
    return training


def arrays(rows: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(4)
    return generator.standard_normal((rows, 3)).astype(np.float32), generator.integers(0, CLASSES, rows)


class Streams:
    """Stands in for CUDA's streams: notes what happens, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.inside = False
        log = self.log

        class Event:
            def __init__(self, blocking: bool) -> None:
                assert blocking  # the thread sleeps meanwhile

            def record(self) -> None:
                log.append("record")

            def synchronize(self) -> None:
                log.append("wait")

        monkeypatch.setattr(streams, "beside", lambda device: "own")
        for name, one in (("Event", Event), ("stream", self.entered)):
            monkeypatch.setattr(torch.cuda, name, one)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda array, stream: log.append(f"used on {stream}"))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda array: log.append("pin") or array)
        copied = torch.Tensor.to

        def to(array: torch.Tensor, *place: Any, **settings: Any) -> torch.Tensor:
            if settings == {"non_blocking": True} and place == (torch.device("meta"),):
                assert self.inside
                log.append("copy")
            return copied(array, *place, **settings)

        monkeypatch.setattr(torch.Tensor, "to", to)

    @contextmanager
    def entered(self, stream: str) -> Iterator[None]:
        assert stream == "own"
        self.inside = True
        yield
        self.inside = False


def test_a_batch_is_complete_before_it_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, training = Streams(monkeypatch), network()
    names = training.inputs, training.loss_labels, training.loss_label_weights
    limits = training.session.index_limits
    transfer = Transfer(torch.device("meta"), names, limits)
    x, y = map(torch.from_numpy, arrays(ROWS))
    (moved,) = transfer.taken(iter([transfer.moved(Batch(({"x": x}, {"y": y}, {}), ROWS))]))
    assert streams.log == ["pin", "pin", "copy", "copy", "record", "wait", "used on current", "used on current"]
    assert moved.parts[0]["x"].is_meta and moved.origin[0]["x"].data_ptr() == x.data_ptr() and moved.rows == ROWS
    streams.log.clear()
    y[2] = CLASSES
    bad = Batch(({"x": x}, {"y": y}, {}), ROWS)
    (stays,) = transfer.taken(iter([transfer.moved(bad)]))
    assert streams.log == ["pin", "pin"] and stays.origin is None and stays.parts[1]["y"].data_ptr() == y.data_ptr()
    y[2] = -100
    assert transfer.moved(bad).origin is not None


@pytest.mark.parametrize("settings", [{"memory_limit": 1 << 30}, {"check_numerics": True}])
def test_batches_stay_on_the_host_where_they_might_not_fit_or_be_checked(settings: dict[str, Any]) -> None:
    assert Trained(network(**settings))._transfer() is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["arrays", "loader"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gpu_learns_the_same_from_batches_that_come_ahead(kind: str, accumulate: int) -> None:
    x, y = arrays(50 * ROWS)

    def data() -> Any:
        if kind == "arrays":
            return x, y
        rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        return torch.utils.data.DataLoader(rows, batch_size=ROWS, num_workers=2, pin_memory=True)

    settings: dict[str, Any] = {"epochs": 2, "shuffle": False, "accumulate": accumulate, "progress": "quiet"}
    if kind == "loader":
        del settings["shuffle"]
    runs = [
        sg.fit(network("cuda"), data(), prefetch=count, metrics=["accuracy"], **settings).losses for count in (0, 2)
    ]
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-6)


@pytest.mark.gpu
def test_a_bad_label_on_the_way_to_a_gpu_stops_the_run_at_its_batch() -> None:
    x, y = arrays(20 * ROWS)
    y[7 * ROWS + 1] = 9
    training = network("cuda")
    with pytest.raises(sg.DataError, match="row 1 holds the class index 9, but Loss takes 0 to 4 or -100"):
        sg.fit(training, (x, y), shuffle=False, progress="quiet")
    assert training.optimizer.time_step == 8


@pytest.mark.gpu
def test_early_stops_and_errors_end_the_thread() -> None:
    def broken(_: int) -> Iterator[Any]:
        for _ in range(5):
            yield arrays(ROWS)
        raise OSError("the disk is gone")

    training = network("cuda")
    with pytest.raises(OSError, match="the disk is gone"):
        sg.fit(training, broken, progress="quiet")

    class Enough(sg.Callback):
        def step(self, moment: Any) -> None:
            moment.stop("enough")

    assert sg.fit(training, arrays(40 * ROWS), callbacks=[Enough()], progress="quiet").stopped == "enough"
    assert "stepgraph data" not in [thread.name for thread in threading.enumerate()]
