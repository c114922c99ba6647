"""`to_torch`: a graph as a PyTorch module with the same numbers, names and uses."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.interop.module import module_of
from tests.interop.cases import ALL, prediction, wire
from tests.layers.case import Case

CPU = sg.Device.cpu()


@pytest.mark.parametrize("cases", [ALL[::5], pytest.param(ALL, marks=pytest.mark.deep)], ids=["some", "all"])
def test_layers_compute_the_same(cases: list[Case]) -> None:
    for case in cases:
        graph = sg.InferenceGraph()
        one = wire(graph, case, "layer")
        found = module_of(prediction(graph, [one]))(*one.data.values())
        for ours, wanted in zip(found if isinstance(found, tuple) else (found,), one.expected(), strict=True):
            assert ours.shape == wanted.shape, case.name
            close = torch.isclose(ours.double(), wanted.double(), rtol=2e-4, atol=2e-5, equal_nan=True)
            assert close.all(), case.name


def network(rows: int = sg.BATCH) -> sg.InferenceGraph:
    """A block with statistics, dropout, arithmetic and a reshape; labels with dots."""
    sg.set_seed(0)
    image = sg.Tensor((rows, 1, 8, 8), label="image")
    graph = sg.InferenceGraph()
    x = graph.sequence(
        image,
        sg.ConvolutionLayer.create(4, (3, 3), label="features.0"),
        sg.BatchNormalizationLayer.create(label="features.norm"),
        sg.ActivationLayer.relu(label="type"),  # a name that PyTorch's modules reserve
        sg.DropoutLayer(0.5, label="drop"),
    )
    graph.dense((2 * x + 1).reshape(rows, -1), 3, label="features")  # a layer, and the parent of others
    graph.add_inputs({"image": image})
    return graph


NAMES = ["features.weights", "features.biases", "features.0.weights", "features.0.biases"]
NAMES += [f"features.norm.{name}" for name in ("beta", "gamma", "mean", "variance")]


@pytest.mark.parametrize(
    "rows", [pytest.param(sg.BATCH, id="free"), pytest.param(4, id="declared", marks=pytest.mark.deep)]
)
def test_any_number_of_rows(rows: int) -> None:
    graph = network(rows)
    module = graph.to_torch()
    graph.compile(CPU, deterministic=True)
    for count in (1, 4, 7):
        image = torch.randn(count, 1, 8, 8)
        wanted = graph.execute({"image": image}, batch_size=count).result.torch()
        torch.testing.assert_close(module(image), wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(module(image=image), module(image))


def test_names_and_kinds() -> None:
    module = network().to_torch()
    assert list(module.state_dict()) == NAMES and not module.training
    assert {name for name, _ in module.named_parameters()} == {n for n in NAMES if "mean" not in n and "var" not in n}
    assert {"features", "features.0", "features.norm", "type_", "drop", "Reshape"} <= dict(
        module.named_modules()
    ).keys()
    assert "image → output" in repr(module) and "(norm): LayerModule(BatchNormalizationLayer)" in repr(module)
    with pytest.raises(TypeError, match="image"):
        module()


def test_values_are_copies() -> None:
    graph = network()
    module, before = graph.to_torch(), graph.state_dict()["features.weights"].clone()
    with torch.no_grad():
        module.features.weights.zero_()
    assert torch.equal(graph.state_dict()["features.weights"], before)


def test_state_goes_both_ways() -> None:
    graph, other = network(), network()
    with torch.no_grad():
        for array in graph.state_dict().values():
            array.copy_(torch.randn_like(array).abs())
    module = other.to_torch()
    assert not any(module.load_state_dict(graph.state_dict()))
    image = torch.randn(3, 1, 8, 8)
    assert torch.equal(module(image), graph.to_torch()(image))
    other.load_state_dict(module.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), graph.state_dict().values(), strict=True))


def test_shared_weights_are_shared() -> None:
    x = sg.Tensor((sg.BATCH, 4))
    graph = sg.InferenceGraph()
    first = sg.FullyConnectedLayer.create(4, 4, label="first")
    second = sg.FullyConnectedLayer(first.weights, None, first.descriptor, label="second")
    y = graph.node(second, graph.node(first, x))
    graph.matmul(y, first.weights)
    module = graph.to_torch()
    assert module.first.weights is module.second.weights
    assert {"first.weights", "second.weights"} < set(module.state_dict()) == set(graph.state_dict())
    copied = copy.deepcopy(module)
    assert copied.first.weights is copied.second.weights is not module.first.weights
    data = torch.randn(2, 4)
    torch.testing.assert_close(copied(data), module(data), rtol=0, atol=0)
    product = first.weights.torch()
    hidden = (data @ product.t() + first.biases.torch()) @ product.t()
    torch.testing.assert_close(module(data), hidden @ product, rtol=1e-5, atol=1e-6)


def test_exports_with_a_free_batch() -> None:
    module = network().to_torch()
    batch = torch.export.Dim("batch")
    for shapes in (({0: batch},), {"image": {0: batch}}):
        program = torch.export.export(module, (torch.randn(2, 1, 8, 8),), dynamic_shapes=shapes)
        for count in (1, 5):
            image = torch.randn(count, 1, 8, 8)
            torch.testing.assert_close(program.module()(image), module(image), rtol=0, atol=0)
    assert set(program.state_dict) >= set(NAMES)


def test_trains_in_pytorch() -> None:
    """Dropout draws from PyTorch's generator; statistics move; gradients reach every parameter."""
    graph = network(6)
    module = graph.to_torch()
    module.train()
    image = torch.randn(6, 1, 8, 8)
    torch.manual_seed(3)
    first = module(image)
    torch.manual_seed(3)
    assert torch.equal(module(image), first) and not torch.equal(module(image), first)
    first.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    assert not torch.equal(module.features.norm.mean, graph.state_dict()["features.norm.mean"])


def test_a_training_step_matches_the_graph() -> None:
    sg.set_seed(1)
    x, y = sg.Tensor((8, 5)), sg.Tensor((8, 2))
    graph = sg.Graph()
    h = graph.node(sg.BatchNormalizationLayer.create(label="norm"), graph.reshape((8, 5, 1, 1), x))
    graph.dense(graph.reshape((8, 5), h), 2, label="head")
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU, deterministic=True)
    module = training.inference().to_torch().train()
    data, wanted = torch.randn(8, 5), torch.randn(8, 2)
    training.execute({"x": data}, {"y": wanted})
    torch.nn.functional.mse_loss(module(data), wanted).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    for name, array in training.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], array, rtol=1e-5, atol=1e-6, msg=name)


def test_frozen_layers_stay_frozen() -> None:
    x = sg.Tensor((2, 3))
    graph = sg.InferenceGraph()
    y = graph.node(sg.FullyConnectedLayer.create(3, 3, label="frozen"), x, disable_update=True)
    layer = sg.FullyConnectedLayer.create(3, 3, label="partly")
    layer.weights_parameter.is_updatable = False
    graph.node(layer, y)
    trains = {name: p.requires_grad for name, p in graph.to_torch().named_parameters()}
    assert trains == {"frozen.weights": False, "frozen.biases": False, "partly.weights": False, "partly.biases": True}


def test_outputs_and_losses() -> None:
    """Declared outputs are returned in order; losses are left out, and constants are buffers."""
    x, mask, y = sg.Tensor((4, 3)), sg.Tensor((1, 3)), sg.Tensor((4, 3))
    graph = sg.Graph()
    hidden = graph.dense(x, 3, label="hidden")
    graph.multiply(hidden, mask)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error())
    training.add_inputs({"x": x, "mask": mask}, {"y": y})
    training.add_outputs({"masked": graph.nodes[-1].results[0], "hidden": hidden})
    numbers = np.array([[1.0, 0.0, 2.0]], np.float32)
    training.compile(CPU, input_tensors={"mask": mask}, input_tensors_data={"mask": numbers})
    module = training.inference().to_torch()
    data = torch.randn(2, 3)
    masked, plain = module(data)
    assert (module.input_names, module.output_names) == (("x",), ("masked", "hidden"))
    torch.testing.assert_close(masked, plain * torch.from_numpy(numbers))
    assert list(module.state_dict()) == ["hidden.weights", "hidden.biases"]


def test_labels_of_all_kinds() -> None:
    """Whatever labels are, the module has all numbers."""
    x = sg.Tensor((sg.BATCH, 2))
    graph = sg.InferenceGraph()
    y = x
    labels = ["forward", "a..b", ".", "a b/c", "0", "half", "half_", "block.weights", "block", "größe", "self"]
    for label in labels:
        y = graph.dense(y, 2, label=label)
    graph.add_inputs({"lambda": x})
    module = graph.to_torch()
    data = torch.randn(3, 2)
    wanted = data
    for node in graph.nodes:
        wanted = wanted @ node.layer.weights.torch().t() + node.layer.biases.torch()
    torch.testing.assert_close(module(lambda_=data), wanted)
    assert len(module.state_dict()) == 2 * len(labels)


def test_a_layer_by_itself() -> None:
    module = network().to_torch()
    image = torch.randn(2, 1, 8, 8)
    layer = module.get_submodule("features.0")
    found = layer(image)
    wanted = torch.nn.functional.conv2d(image, layer.weights.reshape(4, 1, 3, 3), layer.biases.reshape(-1), padding=1)
    torch.testing.assert_close(found, wanted)


def test_nothing_keeps_a_module_alive() -> None:
    module = network().to_torch()
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_an_empty_graph_is_refused() -> None:
    with pytest.raises(sg.StateError, match="the graph has no layers"):
        sg.InferenceGraph().to_torch()


@pytest.mark.gpu
def test_moves_to_a_gpu() -> None:
    graph = network()
    image = torch.randn(3, 1, 8, 8)
    wanted = graph.to_torch()(image)
    torch.testing.assert_close(graph.to_torch().to("cuda")(image.cuda()).cpu(), wanted, rtol=1e-4, atol=1e-4)
    graph.compile("cuda")
    assert graph.to_torch()(image.cuda()).is_cuda
