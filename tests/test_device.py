"""Devices: what this machine has, what it has not, and graphs compiled for them."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg

GPUS = (
    tuple(
        torch.device(torch.accelerator.current_accelerator().type, i) for i in range(torch.accelerator.device_count())
    )
    if torch.accelerator.is_available()
    else ()
)
without_gpu = pytest.mark.skipif(bool(GPUS), reason="this machine has a GPU")
CPU = torch.device("cpu")


@pytest.mark.parametrize("device", [sg.Device.cpu(), sg.Device.of(sg.DeviceType.CPU), sg.Device.of("cpu")])
def test_the_cpu_is_a_cpu_under_every_name(device: sg.Device) -> None:
    assert (device.type, device.actual_device_type) == (sg.DeviceType.CPU, sg.DeviceType.CPU)
    assert (device.torch, device.gpu_devices) == (CPU, ())
    assert device == copy.copy(device) == sg.Device.cpu()
    assert str(device).startswith("cpu (")


def test_raw_values_are_apples() -> None:
    assert [int(kind) for kind in sg.DeviceType] == [0, 1, 2, 3]
    assert [kind.name for kind in sg.DeviceType] == ["CPU", "GPU", "ANY", "ANE"]


def test_gpu_is_the_first_one_or_none() -> None:
    device = sg.Device.gpu()
    assert (device and device.torch_devices) == (GPUS[:1] or None)
    assert sg.Device.of(sg.DeviceType.GPU) == device


@pytest.mark.parametrize("several", [False, True])
def test_any_is_the_gpu_where_there_is_one(several: bool) -> None:
    device = sg.Device.of(sg.DeviceType.ANY, selects_multiple_compute_devices=several)
    assert device.type is sg.DeviceType.ANY
    assert device.torch_devices == ((GPUS if several else GPUS[:1]) or (CPU,))
    assert device.actual_device_type is (sg.DeviceType.GPU if GPUS else sg.DeviceType.CPU)
    assert several or device == sg.Device.any()


def test_there_is_no_neural_engine() -> None:
    assert sg.Device.ane() is None
    assert sg.Device.of(sg.DeviceType.ANE) is None
    assert sg.Device.of(sg.DeviceType.ANE, selects_multiple_compute_devices=True) is None


@without_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:1", torch.device("cuda", 0), "mps"], ids=str)
def test_a_named_device_this_machine_lacks_is_none(name: Any) -> None:
    assert sg.Device.of(name) is None


@without_gpu
@pytest.mark.parametrize("several", [False, True])
def test_the_gpu_type_is_none_without_a_gpu(several: bool) -> None:
    assert sg.Device.of(sg.DeviceType.GPU, selects_multiple_compute_devices=several) is None


@pytest.mark.parametrize("gpus", [[99], ["cuda:99"], [0, 99], ["cpu"], []], ids=repr)
def test_gpus_that_are_not_there_are_refused_by_name(gpus: list) -> None:
    here = ", ".join(map(str, GPUS)) or "no GPU"
    asked = str(gpus[-1]) if gpus else "no GPU"
    with pytest.raises(sg.DeviceError, match=rf"^Device: .*{asked}.* was requested, but this machine has {here}\.\n"):
        sg.Device.with_gpus(gpus)


@pytest.mark.parametrize("kind", ["nonsense", None, 1.5], ids=repr)
def test_what_is_no_kind_of_device_is_refused(kind: Any) -> None:
    with pytest.raises(sg.StepgraphError, match=rf"(?s)Device.*{kind}.*Fix: "):
        sg.Device.of(kind)


@pytest.mark.parametrize("gpus", [None, [-1], [None], ["nonsense"]], ids=repr)
def test_what_is_no_list_of_gpus_is_refused(gpus: Any) -> None:
    with pytest.raises(sg.StepgraphError, match=r"(?s)Device.*Fix: "):
        sg.Device.with_gpus(gpus)


def test_a_graph_and_its_tensors_know_their_device_once_compiled() -> None:
    x, layer, graph = sg.Tensor((2, 3)), sg.FullyConnectedLayer.create(3, 2), sg.Graph()
    graph.node(layer, x)
    inference = sg.InferenceGraph([graph])
    assert (inference.device, layer.weights.device, layer.device_type) == (None, None, None)
    device = sg.Device.cpu()
    inference.compile(device)
    assert (inference.device, layer.weights.device, layer.device_type) == (device, device, sg.DeviceType.CPU)
    assert graph.device is None
    inference.compile()  # keeps the device it was compiled for
    assert inference.device is device


@pytest.mark.gpu
def test_named_gpus_are_the_gpus_of_the_device() -> None:
    for device in (sg.Device.with_gpus([0]), sg.Device.with_gpus(["cuda"]), sg.Device.of("cuda:0")):
        assert (device.type, device.actual_device_type) == (sg.DeviceType.GPU, sg.DeviceType.GPU)
        assert device.gpu_devices == device.torch_devices == GPUS[:1]
    every = sg.Device.of(sg.DeviceType.GPU, selects_multiple_compute_devices=True)
    assert every.gpu_devices == sg.Device.with_gpus(range(len(GPUS))).gpu_devices == GPUS
    assert (every.torch, str(every).startswith("cuda:0 (")) == (GPUS[0], True)


@pytest.mark.gpu
def test_parameters_come_home_from_the_gpu_when_asked() -> None:
    memory = np.array([[2]], np.float32)
    x, y = sg.Tensor((1, 1)), sg.Tensor((1, 1))
    layer = sg.FullyConnectedLayer(sg.Tensor((1, 1), data=memory), None, sg.ConvolutionDescriptor(1, 1, 1))
    graph = sg.Graph()
    graph.node(layer, x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.5))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.gpu())
    training.execute({"x": [3]}, {"y": [5]})
    stepped = 2 - 0.5 * 2 * (2 * 3 - 5) * 3
    assert (layer.weights.numpy().item(), memory.item()) == (stepped, 2)
    training.synchronize_updates()
    assert (memory.item(), layer.weights.data.item()) == (stepped, stepped)
