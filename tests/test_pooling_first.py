"""ReLU behind the max pool instead of before it: the same bits, whatever is asked for."""

import operator

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from stepgraph.compiler import pipeline
from stepgraph.compiler.passes import simplification
from stepgraph.compiler.passes.pool_first import POOL, RELU, pool_first

aten = torch.ops.aten
WITHOUT = tuple(row for row in pipeline.TABLE if row.name != "pool before ReLU")


def recorded(function, *arrays):
    """The function's operators before and after."""
    before, after = (make_fx(function, tracing_mode="fake")(*arrays) for _ in range(2))
    for module in (before, after):
        simplification.simplify(module)
        if module is after:
            pool_first(module.graph)
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
    return before, after


def read_by_relu(module):
    return [node.args[0].target for node in module.graph.nodes if node.target is RELU]


def network(**window):
    def function(x, w, b):
        w, b = (one.detach().requires_grad_() for one in (w, b))
        y = torch.relu(torch.conv2d(x, w, b, padding=1))
        loss = torch.nn.functional.max_pool2d(y, **window).square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, (w, b))]

    return function


@pytest.mark.parametrize(
    "window", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}, {"kernel_size": 3, "stride": 1}]
)
@pytest.mark.parametrize("special", [0.0, float("nan"), float("inf")])
def test_exchanging_keeps_losses_and_gradients(window, special):
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    x[0, 0, :4, :4] = special
    before, after = recorded(network(**window), x, w, b)
    assert read_by_relu(before) == [aten.convolution.default]
    assert all(target is not aten.convolution.default for target in read_by_relu(after))
    (loss, d_w, d_b), (new_loss, new_d_w, new_d_b) = before(x, w, b), after(x, w, b)
    torch.testing.assert_close(new_loss, loss, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(new_d_w, d_w, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(new_d_b, d_b, rtol=1e-5, atol=1e-4, equal_nan=True)  # another order of sums


def test_results_that_are_returned_in_float32_do_not_count_as_read():
    """In half precision, a step can return what lies between the two layers, converted."""

    def function(x):
        x = x.detach().requires_grad_()
        y = torch.relu(x)
        z = torch.nn.functional.max_pool2d(y, 3, 2, 1)
        of_y, of_x = torch.autograd.grad(z, (y, x), z * 2)
        return [z.detach(), of_x, y.detach().float(), of_y.float()]

    x = torch.randn(2, 3, 8, 8).bfloat16()
    before, after = recorded(function, x)
    ends = [module.graph.find_nodes(op="output")[0].args[0][0] for module in (before, after)]
    assert [end.target for end in ends] == [operator.getitem, RELU]
    for one, other in zip(before(x), after(x), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_a_relu_that_is_read_elsewhere_stays():
    def function(x):
        y = torch.relu(x)
        return [torch.nn.functional.max_pool2d(y, 2), y + 1]

    before, after = recorded(function, torch.randn(2, 3, 8, 8))
    assert [node.target for node in before.graph.nodes] == [node.target for node in after.graph.nodes]


def cnn(options=sg.GraphCompilationOptions.NONE):
    sg.set_seed(0)
    x, y = sg.Tensor((4, 1, 8, 8)), sg.Tensor((4,), "int64")
    graph = sg.Graph()
    activation = sg.ActivationLayer.relu()
    activation.is_debugging_enabled = True
    hidden = graph.node(activation, graph.node(sg.ConvolutionLayer.create(1, 5, 3), x))
    pooled = graph.node(sg.PoolingLayer.max(2), hidden)
    graph.node(sg.FullyConnectedLayer.create(5 * 16, 3), graph.reshape((-1, 80), pooled))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), options)
    return training, activation, hidden


DATA = {"x": np.random.default_rng(0).standard_normal((4, 1, 8, 8), np.float32)}, {"y": np.array([0, 1, 2, 0])}


def test_a_compiled_step_pools_first_and_trains_as_before(monkeypatch):
    training, *_ = cnn()
    losses = [training.execute(*DATA).loss for _ in range(5)]
    (executable,) = training.compilation.programs.executables.values()
    (relu,) = (node for node in executable.part.nodes if node.name.startswith("relu"))
    assert relu.args[0].args[0].target is POOL
    monkeypatch.setattr(pipeline, "TABLE", WITHOUT)
    reference, *_ = cnn()
    np.testing.assert_allclose(losses, [reference.execute(*DATA).loss for _ in range(5)], rtol=1e-6)


def test_what_lies_between_the_two_layers_can_be_read(monkeypatch):
    found = []
    for table in (pipeline.TABLE, WITHOUT):
        monkeypatch.setattr(pipeline, "TABLE", table)
        training, activation, hidden = cnn(sg.GraphCompilationOptions.DEBUG_LAYERS)
        training.execute(*DATA)
        (gradient,) = training.result_gradient_tensors(activation)
        found.append((hidden.numpy(), gradient.numpy()))
    (value, gradient), (value_before, gradient_before) = found
    assert (value > 0).any() and (gradient != 0).any()
    np.testing.assert_array_equal(value, value_before)
    np.testing.assert_array_equal(gradient, gradient_before)
