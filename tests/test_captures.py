"""Captures of CUDA graphs that another thread breaks."""

import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import fusion
from stepgraph.runtime.executable import _Capture
from stepgraph.system import captures, streams, torch_private
from tests import stand_in_graphs

BROKEN = "CUDA error: operation failed due to a previous error during capture"


class Graph:
    """Stands for a CUDA graph."""

    was_reset = False

    def reset(self) -> None:
        self.was_reset = True


class Capture:
    """Stands for a capture: once a launch has failed, so does its end."""

    def __init__(self, *given: Any, **more: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError(BROKEN)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Captures without a GPU; the pools whose use has ended."""
    found: list[Any] = []
    monkeypatch.setattr(captures, "PAUSE", 0)
    monkeypatch.setattr(captures, "_kept", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(streams, "of_captures", lambda device: None)
    monkeypatch.setattr(torch_private, "end_allocations", lambda device, pool: found.append(pool))
    return found


def failing(*errors: Exception) -> Any:
    """A function that raises these errors, one per call, and then returns 7."""
    left = list(errors)

    def run() -> int:
        if left:
            raise left.pop(0)
        return 7

    return run


def test_a_capture_that_another_thread_breaks_is_repeated(ended: list[Any]) -> None:
    errors = RuntimeError(BROKEN), RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
    graph, found = captures.capture(failing(*errors), torch.device("cuda"))
    assert found == 7 and not graph.was_reset and len(ended) == 2
    assert all(one.was_reset for one in captures._kept) and len(captures._kept) == 2


def test_other_errors_are_raised_at_once(ended: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captures.capture(
            failing(RuntimeError("operation not permitted when stream is capturing")), torch.device("cuda")
        )
    with pytest.raises(ValueError, match="wrong"):
        captures.capture(failing(ValueError("wrong")), torch.device("cuda"))
    assert len(ended) == 2


def test_a_capture_that_is_always_broken_fails(ended: list[Any]) -> None:
    with pytest.raises(captures.Broken) as raised:
        captures.capture(failing(*[RuntimeError("CUBLAS failed")] * captures.ATTEMPTS), torch.device("cuda"))
    assert len(ended) == captures.ATTEMPTS and "CUBLAS" in str(raised.value)


@pytest.mark.parametrize(("count", "error"), [(1, None), (2, RuntimeError)])
def test_fusion_that_meets_a_capture_is_repeated_once(
    monkeypatch: pytest.MonkeyPatch, count: int, error: type[Exception] | None
) -> None:
    run = failing(*[RuntimeError("operation not permitted when stream is capturing")] * count)
    fused = fusion.Fused(lambda *_: [], lambda: None)
    monkeypatch.setattr(fusion, "fuse", lambda *_: fused if run() else None)
    future: Future[Any] = fusion.fuse_in_background(None, None)  # type: ignore[arg-type]
    assert type(future.exception(timeout=10)) is (type(None) if error is None else error)
    assert error is not None or future.result() is fused


def test_a_capture_that_fails_leaves_no_earlier_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_graphs.stand_in(monkeypatch.setattr)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    x, graph = sg.Tensor((4, 3)), sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(3, 1), x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile("cpu")
    (executable,) = inference.compilation.programs.executables.values()
    executable._capture, executable.runs_alone = _Capture(executable), False
    batches = [torch.full((4, 3), float(i)) for i in range(1, 6)]
    one = inference.execute({"x": batches[0]}).result.numpy()  # operator by operator
    inference.execute({"x": batches[0]})
    assert executable.mode == "CUDA graph"  # which reads the first batch where it is

    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as full:
        full.setattr(captures, "capture", refuse)
        with pytest.raises(sg.ExecutionError):
            inference.execute({"x": batches[1]})
        assert executable.mode == "traced"
    for i in (2, 3, 4):
        found = inference.execute({"x": batches[i]}).result
        np.testing.assert_allclose(found.numpy(), (i + 1) * one, rtol=1e-6)
    assert executable.mode == "CUDA graph"


def test_other_threads_do_not_get_the_stream_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        """One of PyTorch's 32, which it hands out in turn."""

        count = 0

        def __init__(self, device: Any) -> None:
            Stream.count += 1
            self.cuda_stream = Stream.count % 32

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    taken = streams.of_captures(torch.device("cuda")).cuda_stream
    try:
        assert streams.of_captures(torch.device("cuda", 7)).cuda_stream == taken
        given = {streams.beside(torch.device("cuda", 7)).cuda_stream for _ in range(100)}
    finally:
        streams.of_index.cache_clear()
    assert given == {*range(32)} - {taken}


@pytest.mark.gpu
def test_work_beside_a_capture_does_not_become_part_of_it() -> None:
    device, numbers = torch.device("cuda"), torch.zeros(1, device="cuda")

    def add() -> None:
        for _ in range(64):
            with torch.cuda.stream(streams.beside(device)):
                numbers.add_(1)
                torch.cuda.current_stream().synchronize()

    def run() -> torch.Tensor:
        thread = threading.Thread(target=add)
        thread.start()
        thread.join()
        return numbers + 0

    graph, _ = captures.capture(run, device)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert numbers.item() == 64


@pytest.mark.gpu
def test_what_fails_in_a_capture_is_raised() -> None:
    """Not that the memory of the capture, which has ended, cannot be ended again."""
    device = torch.device("cuda")
    before = torch.zeros(1, device=device)
    with pytest.raises(ValueError, match="wrong"):
        captures.capture(failing(ValueError("wrong")), device)
    with pytest.raises(torch.OutOfMemoryError):
        captures.capture(lambda: torch.empty(1 << 50, device=device), device)
    graph, found = captures.capture(lambda: before + 1, device)
    graph.replay()
    assert found.item() == 1


def trained(count: int) -> tuple[list[float], Any]:
    """The losses of some steps on the GPU, and the executable that ran them."""
    sg.set_seed(3)
    x, y, graph = sg.Tensor((8, 16)), sg.Tensor((8, 4)), sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(16, 4), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cuda", fuse=False)
    data = {"x": np.ones((8, 16), np.float32)}, {"y": np.ones((8, 4), np.float32)}
    losses = [float(training.execute(*data).loss) for _ in range(count)]
    (executable,) = training.compilation.programs.executables.values()
    return losses, executable


@pytest.mark.gpu
def test_steps_are_captured_while_a_thread_waits_for_the_device() -> None:
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.01):  # longer than a capture takes, or none would succeed
            with suppress(RuntimeError):  # it met a capture
                torch.cuda.synchronize()

    undisturbed, _ = trained(4)
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        runs = [trained(4) for _ in range(20)]  # until a capture was met, as a rule
    finally:
        stop.set()
        thread.join()
    assert all(losses == undisturbed for losses, _ in runs)
    assert any("CUDA graph" in executable.mode for _, executable in runs)


@pytest.mark.gpu
def test_steps_train_without_a_capture_while_none_succeeds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed, captured = trained(6)
    assert "CUDA graph" in captured.mode
    attempts = []

    def broken(*_: Any) -> Any:
        attempts.append(1)
        raise captures.Broken("CUBLAS failed")

    monkeypatch.setattr(captures, "capture", broken)
    losses, executable = trained(6)
    assert losses == undisturbed and executable.mode == "traced"
    assert len(attempts) == 1 and "CUBLAS failed" in caplog.text
    monkeypatch.setattr(captures, "RESTS", 0)
    trained(6)
    assert len(attempts) == 6
