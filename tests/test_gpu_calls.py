"""On CUDA: results that stay, memory that is not the caller's, indices that are refused, layouts that are right."""

import subprocess
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.system.surroundings import Precision

pytestmark = pytest.mark.gpu
UNFUSED = sg.GraphCompilationOptions.DISABLE_LAYER_FUSION
FUSED = sg.GraphCompilationOptions.FUSE_LAYERS


def gpu() -> sg.Device:
    device = sg.Device.gpu()
    assert device is not None
    return device


@pytest.fixture(autouse=True)
def full_float32() -> Any:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def doubling() -> sg.InferenceGraph:
    x = sg.Tensor((4, 3))
    graph = sg.Graph()
    graph.node(sg.ArithmeticLayer.add(), x, x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(gpu(), UNFUSED)
    return inference


def full(number: float) -> dict[str, np.ndarray]:
    return {"x": np.full((4, 3), number, np.float32)}


def test_each_execution_keeps_its_own_result() -> None:
    inference = doubling()
    results = [inference.execute(full(i)).result for i in range(8)]
    kept = [inference.execute(full(i)) for i in range(8)]
    assert [one.numpy()[0, 0] for one in results] == [2 * i for i in range(8)]
    assert [one.result.numpy()[0, 0] for one in kept] == [2 * i for i in range(8)]


def test_threads_get_their_own_answers() -> None:
    inference, wrong = doubling(), []

    def ask(number: int) -> None:
        for i in range(200):
            found = inference.execute(full(1000 * number + i)).result.numpy()
            if not (found == 2 * (1000 * number + i)).all():
                wrong.append((number, i))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_a_thread_works_before_it_captures() -> None:
    x, graph = sg.Tensor((4, 3)), sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(3, 2), x)  # a product: cuBLAS has a handle for each thread
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(gpu(), UNFUSED)
    found = [inference.execute(full(1.0)).result.numpy()]
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(inference.execute(full(1.0)).result.numpy()))
        thread.start()
        thread.join()
    found += [inference.execute(full(1.0)).result.numpy() for _ in range(3)]
    assert len(found) == 6
    for one in found:
        np.testing.assert_allclose(one, found[0], rtol=1e-6)


def test_binding_leaves_the_callers_memory_alone() -> None:
    first, second = torch.ones(3, device="cuda"), torch.full((3,), 5.0, device="cuda")
    x = sg.Tensor((3,))
    graph = sg.Graph()
    for data in (first, second, first):
        graph.bind_and_write_data({"x": data}, {"x": x}, gpu())
    assert first.tolist() == [1, 1, 1] and second.tolist() == [5, 5, 5] and x.numpy().tolist() == [1, 1, 1]


@pytest.mark.parametrize("options", [UNFUSED, FUSED])
@pytest.mark.parametrize("place", ["host", "device", "slice"])
def test_a_class_index_out_of_range_is_refused_and_the_next_call_works(
    place: str, options: sg.GraphCompilationOptions
) -> None:
    x, y = sg.Tensor((4, 3)), sg.Tensor((4,), "int64")
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(3, 5), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(gpu(), options)

    def labels(numbers: list[int]) -> Any:
        host = np.array(numbers)
        if place == "host":
            return host
        whole = torch.tensor([0, 1, 2, 3, *numbers], device="cuda")
        return torch.tensor(host, device="cuda") if place == "device" else whole[4:]

    losses = []
    for bad in (5, -1, -100):
        losses.append(training.execute(full(1), {"y": labels([0, 1, 2, 4])}).loss)
        with pytest.raises(sg.DataError, match=f"row 2 holds the class index {bad}, but Loss takes 0 to 4"):
            _ = training.execute(full(1), {"y": labels([0, 1, bad, 2])}).loss
    losses.append(training.execute(full(1), {"y": labels([0, 1, 2, 4])}).loss)
    assert losses == sorted(losses, reverse=True) and training.optimizer.time_step == 5


def test_labels_that_are_written_over_are_looked_at_again() -> None:
    words = sg.Tensor((4,), "int64")
    graph = sg.Graph()
    graph.node(sg.EmbeddingLayer.create(5, 2), words)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"words": words})
    inference.compile(gpu(), UNFUSED)
    data = torch.tensor([0, 1, 2, 3], device="cuda")
    inference.execute({"words": data})
    data[1] = 7
    with pytest.raises(sg.DataError, match="row 1 holds the index 7"):
        inference.execute({"words": data})


def test_tf32_in_the_new_spelling_compiles_and_stays() -> None:
    switch = torch.backends.cuda.matmul
    switch.fp32_precision = "tf32"
    try:
        assert np.isfinite(doubling().execute(full(1)).result.numpy()).all()
        assert switch.fp32_precision == "tf32" and Precision.of(None).tf32[0]
    finally:
        switch.fp32_precision = "none"
    assert not switch.allow_tf32


def first_of_the_second_look() -> tuple[sg.Tensor, sg.Graph, sg.Tensor]:
    x = sg.Tensor((2, 1, 4, 2))
    graph = sg.Graph()
    settings = {"strides": 2, "dilation_rates": 2, "padding_sizes": (0, 1), "biases": False}
    transposed = sg.ConvolutionLayer.create(1, 2, (4, 3), type=sg.ConvolutionType.TRANSPOSED, **settings)
    y = graph.node(sg.PoolingLayer.max(2), graph.node(transposed, x))
    y = graph.reshape((2, 2, 4, 3), y)
    return x, graph, graph.node(sg.PoolingLayer.l2_norm(3, strides=2, padding_policy=sg.PaddingPolicy.SAME), y)


def second_of_the_second_look() -> tuple[sg.Tensor, sg.Graph, sg.Tensor]:
    x = sg.Tensor((2, 3, 2, 3))
    graph = sg.Graph()
    y = graph.node(sg.UpsampleLayer.linear((3, 6)), graph.node(sg.ConvolutionLayer.create(3, 2, 1), x))
    return x, graph, graph.reshape((2, 36), y)


def padded_average() -> tuple[sg.Tensor, sg.Graph, sg.Tensor]:
    x = sg.Tensor((2, 4, 7, 6))
    graph = sg.Graph()
    y = graph.node(sg.ConvolutionLayer.create(4, 4, 3), x)
    return x, graph, graph.node(sg.PoolingLayer.average(3, strides=2, padding_policy=sg.PaddingPolicy.SAME), y)


def normalized_upsampling() -> tuple[sg.Tensor, sg.Graph, sg.Tensor]:
    x = sg.Tensor((1, 1, 5, 1))
    graph = sg.Graph()
    y = graph.node(sg.UpsampleLayer.linear((10, 1)), graph.node(sg.ConvolutionLayer.create(1, 2, (1, 1)), x))
    return x, graph, graph.node(sg.InstanceNormalizationLayer.create(2), y)


@pytest.mark.parametrize("options", [UNFUSED, FUSED])
@pytest.mark.parametrize(
    "make", [first_of_the_second_look, second_of_the_second_look, padded_average, normalized_upsampling]
)
def test_images_learn_as_on_the_cpu(make: Any, options: sg.GraphCompilationOptions) -> None:
    learned = []
    for device, chosen in ((sg.Device.cpu(), sg.GraphCompilationOptions.DETERMINISTIC), (gpu(), options)):
        sg.set_seed(8)
        x, graph, y = make()
        labels = sg.Tensor(y.shape)
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
        training.add_inputs({"x": x}, {"y": labels})
        training.compile(device, chosen)
        numbers = np.random.default_rng(4)
        losses = []
        for _ in range(4):
            data, target = (numbers.standard_normal(tensor.shape).astype(np.float32) for tensor in (x, y))
            losses.append(training.execute({"x": data}, {"y": target}).loss)
        training.synchronize_updates()
        parameters = [tensor.data.copy() for layer in graph.layers for tensor in layer.parameters.values()]
        learned.append([*losses, *np.concatenate([one.ravel() for one in parameters])])
    np.testing.assert_allclose(learned[1], learned[0], rtol=1e-3, atol=1e-4)


def test_the_last_completion_is_called_before_the_program_ends() -> None:
    program = """
        import numpy as np
        import stepgraph as sg

        x = sg.Tensor((256, 256))
        graph = sg.Graph()
        graph.node(sg.ActivationLayer.relu(), x)
        inference = sg.InferenceGraph([graph])
        inference.add_inputs({"x": x})
        inference.compile(sg.Device.gpu())
        data = {"x": np.ones((256, 256), np.float32)}
        for i in range(3):
            inference.execute(data, completion=lambda *told, i=i: print(i, flush=True))
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], check=True, capture_output=True, text=True, timeout=120
    )
    assert sorted(found.stdout.split()) == ["0", "1", "2"]
