"""Optimizers against NumPy in float64, against PyTorch, and the fused kernels against the plain rule."""

import ast
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from stepgraph.compiler.kernels.update import named, reference, update
from stepgraph.compiler.kernels.update_kernel import Update
from stepgraph.compiler.operators import note_workspaces
from stepgraph.compiler.program import notes
from stepgraph.runtime.state import TrainingState
from tests.optimizer_rules import GLOBAL, L1, L2, NORM, STATE, STEPS, VALUE, Net, Rule, buffers_of
from tests.test_memory import measured_peak

RULES: dict[str, Callable[[sg.OptimizerDescriptor], sg.Optimizer]] = {
    "sgd": sg.SGDOptimizer,
    "sgd momentum": lambda d: sg.SGDOptimizer(d, momentum_scale=0.8),
    "sgd nesterov": lambda d: sg.SGDOptimizer(d, momentum_scale=0.8, uses_nesterov_momentum=True),
    "adam": sg.AdamOptimizer,
    "adam amsgrad": lambda d: sg.AdamOptimizer(d, beta2=0.8, uses_ams_grad=True),
    "adam later": lambda d: sg.AdamOptimizer(d, beta1=0.7, beta2=0.95, epsilon=1e-3, time_step=7),
    "adamw": sg.AdamWOptimizer,
    "adamw amsgrad": lambda d: sg.AdamWOptimizer(d, beta2=0.8, uses_ams_grad=True),
    "rmsprop": lambda d: sg.RMSPropOptimizer(d, alpha=0.9, epsilon=0.1),
    "rmsprop momentum": lambda d: sg.RMSPropOptimizer(d, alpha=0.9, epsilon=0.1, momentum_scale=0.6),
    "rmsprop centered": lambda d: sg.RMSPropOptimizer(d, alpha=0.9, epsilon=0.1, is_centered=True),
    "rmsprop both": lambda d: sg.RMSPropOptimizer(d, alpha=0.9, epsilon=0.1, is_centered=True, momentum_scale=0.6),
    "sgd torch": lambda d: sg.SGDOptimizer(d, momentum=0.8, dampening=0.3, formula="torch"),
    "adam torch": lambda d: sg.AdamOptimizer(d, epsilon=1e-2, formula="torch"),
    "adamw torch": lambda d: sg.AdamWOptimizer(d, beta2=0.8, epsilon=1e-2, amsgrad=True, formula="torch"),
    "rmsprop torch": lambda d: sg.RMSPropOptimizer(d, alpha=0.9, epsilon=0.1, momentum=0.6, formula="torch"),
    "lion": sg.LionOptimizer,
    "muon": sg.MuonOptimizer,
    "muon original": lambda d: sg.MuonOptimizer(d, momentum=0.8, nesterov=False, scale="original"),
}
OLD = 12  # rules that ML Compute has
WITHOUT_KERNEL = ("rmsprop ", "lion", "muon")  # only the plain rule
PREPARATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "by value": {"gradient_clip_max": 0.05, "gradient_clip_min": -0.02},
    "by norm": {"gradient_clipping_type": NORM, "maximum_clipping_norm": 0.1},
    "by global norm": {"gradient_clipping_type": GLOBAL, "maximum_clipping_norm": 0.3},
    "by custom norm": {"gradient_clipping_type": GLOBAL, "maximum_clipping_norm": 0.3, "custom_global_norm": 0.9},
    "custom norm below": {"gradient_clipping_type": GLOBAL, "maximum_clipping_norm": 0.3, "custom_global_norm": 0.2},
    "rescale": {"gradient_rescale": 0.25},
    "L1": {"regularization_type": L1, "regularization_scale": 0.01},
    "L2": {"regularization_type": L2, "regularization_scale": 0.1},
    "all": {
        "gradient_clip_max": 0.05,
        "gradient_clip_min": -0.02,
        "gradient_rescale": 3.0,
        "regularization_type": L2,
        "regularization_scale": 0.1,
    },
}
FEW = ("L1", "all")  # what the rules beside SGD and Adam are tried with
CASES = [
    (rule, preparation)
    for rule in RULES
    for preparation in (PREPARATIONS if rule in list(RULES)[:5] else FEW if rule in list(RULES)[:OLD] else FEW[1:])
    if preparation != "custom norm below" or rule == "sgd"
]


def descriptor(name: str, rate: float = 0.05) -> sg.OptimizerDescriptor:
    return sg.OptimizerDescriptor(
        rate, applies_gradient_clipping="clip" in str(PREPARATIONS[name]), **PREPARATIONS[name]
    )


def assert_same(found: tuple[list, list], expected: tuple[list, list], relative: float = 1e-5) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=relative)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=relative, atol=relative / 10)


def quick_first() -> Iterator[Any]:
    """PyTorch's formulas are left to the deep checks here: test_optimizers_torch.py compares them with PyTorch."""
    for rule, preparation in CASES:
        yield pytest.param(rule, preparation, marks=pytest.mark.deep if rule.endswith(" torch") else ())


@pytest.mark.parametrize(("rule", "preparation"), list(quick_first()))
def test_thirty_steps_follow_the_formulas_in_float64(rule: str, preparation: str) -> None:
    net, optimizer = Net(), RULES[rule](descriptor(preparation))
    assert_same(net.stepgraph(optimizer), net.numpy(Rule(rule, RULES[rule](descriptor(preparation)))))


@pytest.mark.parametrize("preparation", PREPARATIONS)
def test_every_preparation_changes_what_is_learned(preparation: str) -> None:
    net = Net()
    curve = net.numpy(Rule("sgd", sg.SGDOptimizer(descriptor(preparation))))[0]
    plain = net.numpy(Rule("sgd", sg.SGDOptimizer(descriptor("plain"))))[0]
    assert np.allclose(curve, plain, rtol=1e-3) == (preparation in ("plain", "custom norm below"))


@pytest.mark.parametrize("preparation", PREPARATIONS)
@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.startswith(WITHOUT_KERNEL)])
def test_fused_cpu_kernels_equal_the_plain_rule(rule: str, preparation: str) -> None:
    optimizer, generator = RULES[rule](descriptor(preparation)), torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    parameters = [draw(33, 7), draw(5)]
    gradients = [draw(7, 33).T, draw(5)]  # the first with strides unlike its parameter's
    states = [[draw(33, 7).square() + 1, draw(5).square() + 1] for _ in range(STATE[rule])]
    numbers = torch.tensor(list(optimizer.numbers().values()), dtype=torch.float64)
    norm = torch.tensor(optimizer.custom_global_norm or 2.0) if optimizer.needs_global_norm else None
    for finite in (None, torch.tensor(True), torch.tensor(False)):
        found, expected = (copy.deepcopy((parameters, states)) for _ in range(2))
        by_name = partial(named, optimizer, numbers)
        update(optimizer, Update(found[0], gradients, found[1], numbers, norm=norm, finite=finite), by_name)
        arrays = Update(expected[0], gradients, expected[1], numbers, norm=norm, finite=finite)
        reference(optimizer, arrays, by_name())
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)
        stands_still = finite is not None and not finite
        assert all(torch.equal(a, b) == stands_still for a, b in zip(found[0], parameters, strict=True))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.startswith(("sgd", "adam"))])
def test_parameters_in_half_precision_move_as_others_do(rule: str, kind: torch.dtype) -> None:
    optimizer, generator = RULES[rule](descriptor("plain")), torch.Generator().manual_seed(5)
    start, gradient = (torch.randn(67, generator=generator).to(kind) for _ in range(2))
    numbers = torch.tensor(list(optimizer.numbers().values()), dtype=torch.float64)
    norm = torch.tensor(2.0) if optimizer.needs_global_norm else None
    moved = []
    for one in (kind, torch.float32):
        states = [[torch.ones(67, dtype=one)] for _ in range(STATE[rule])]
        parameters = [start.to(one, copy=True)]
        update(
            optimizer,
            Update(parameters, [gradient.to(one)], states, numbers, norm=norm),
            partial(named, optimizer, numbers),
        )
        moved.append(parameters[0].float() - start.float())
    assert float(moved[1].abs().max()) > 0.01
    torch.testing.assert_close(*moved, rtol=0.02, atol=4 * torch.finfo(kind).eps)


def every_pair() -> Iterator[Any]:
    """Every rule, and every preparation of a gradient; most pairs of the two are left to the deep checks."""
    for rule, preparation in product(RULES, PREPARATIONS):
        plain = preparation == next(iter(PREPARATIONS))
        is_quick = (plain and not rule.endswith((" torch", " original"))) or rule == "adam"
        yield pytest.param(rule, preparation, marks=[] if is_quick else [pytest.mark.deep])


@pytest.mark.parametrize(("rule", "preparation"), list(every_pair()))
def test_an_update_recorded_as_one_operator_equals_the_plain_rule(
    monkeypatch: pytest.MonkeyPatch, rule: str, preparation: str
) -> None:
    net = Net()
    expected = net.stepgraph(RULES[rule](descriptor(preparation)))
    monkeypatch.setattr(sys.modules[update.__module__], "AS_ONE", {"cpu"})
    monkeypatch.setattr(sys.modules[update.__module__], "FUSED", {})
    assert_same(net.stepgraph(RULES[rule](descriptor(preparation))), expected)


@pytest.mark.parametrize("kind", [sg.AdamOptimizer, sg.AdamWOptimizer, sg.RMSPropOptimizer])
def test_numbers_rounded_to_float32_change_a_step_by_no_more_than_that(kind: type[sg.Optimizer]) -> None:
    """As they are on a GPU. From a rounded 0.999, 1 - 0.999 would be wrong by 1e-5."""
    optimizer = kind(learning_rate=0.1)
    numbers = named(optimizer, torch.tensor(list(optimizer.numbers().values()), dtype=torch.float64))
    rounded = SimpleNamespace(**{name: value.float().double() for name, value in vars(numbers).items()})
    zero, gradient = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    found, right = (optimizer.update(zero, gradient, (zero,) * len(optimizer.slots), n)[0] for n in (rounded, numbers))
    torch.testing.assert_close(found, right, rtol=2e-7, atol=0)


def test_a_rule_of_ones_own_may_add_numbers_and_change_them() -> None:
    class Halving(sg.SGDOptimizer):
        def derive(self, n: Any) -> None:
            n.learning_rate = n.learning_rate / 2
            n.double = n.learning_rate * 4

    for optimizer, rate in ((sg.AdamOptimizer(learning_rate=0.5), 0.5), (Halving(learning_rate=0.5), 0.25)):
        numbers = torch.tensor(list(optimizer.numbers().values()), dtype=torch.float64)
        found = vars(named(optimizer, numbers))
        together = found.pop("together")
        assert found["learning_rate"] == rate and {"rate", "double"} & found.keys()
        assert torch.equal(together, torch.stack(list(found.values())))  # names and numbers in one order


@pytest.mark.parametrize("rule", RULES)
def test_the_plan_knows_what_an_update_needs(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setattr(sys.modules[update.__module__], "AS_ONE", {"cpu"})
    monkeypatch.setattr(sys.modules[update.__module__], "FUSED", {})
    optimizer = RULES[rule](descriptor("plain"))
    numbers = torch.tensor(list(optimizer.numbers().values()), dtype=torch.float64)
    arrays = [torch.rand(256, 256) + 1 for _ in range(2 + STATE[rule])]

    def run(parameter: torch.Tensor, gradient: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        by_name = partial(named, optimizer, numbers)
        update(optimizer, Update([parameter], [gradient], [[one] for one in states], numbers), by_name)
        return parameter

    traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*arrays)
    note_workspaces(traced.graph)
    (planned,) = (needed for node in traced.graph.nodes if (needed := notes(node).workspace))
    with torch.inference_mode():
        assert measured_peak(lambda: run(*arrays)) == pytest.approx(planned, rel=0.01)


PEERS: dict[str, tuple[Callable[[], sg.Optimizer], Callable[..., torch.optim.Optimizer]]] = {
    "SGD": (lambda: sg.SGDOptimizer(0.1), lambda w: torch.optim.SGD(w, 0.1)),
    "momentum": (
        lambda: sg.SGDOptimizer(0.1, momentum_scale=0.9),
        lambda w: torch.optim.SGD(w, 0.1, momentum=0.9),
    ),
    "Nesterov": (
        lambda: sg.SGDOptimizer(0.1, momentum_scale=0.9, uses_nesterov_momentum=True),
        lambda w: torch.optim.SGD(w, 0.1, momentum=0.9, nesterov=True),
    ),
    "weight decay": (
        lambda: sg.SGDOptimizer(sg.OptimizerDescriptor(0.1, regularization_type=L2, regularization_scale=0.2)),
        lambda w: torch.optim.SGD(w, 0.1, weight_decay=0.2),
    ),
    "Adam": (lambda: sg.AdamOptimizer(0.01, epsilon=1e-14), lambda w: torch.optim.Adam(w, 0.01, eps=1e-14)),
    "AdamW": (
        lambda: sg.AdamWOptimizer(sg.OptimizerDescriptor(0.01, regularization_scale=0.2), epsilon=1e-14),
        lambda w: torch.optim.AdamW(w, 0.01, eps=1e-14, weight_decay=0.2),
    ),
    "RMSProp": (
        lambda: sg.RMSPropOptimizer(0.01, momentum_scale=0.9, is_centered=True),
        lambda w: torch.optim.RMSprop(w, 0.01, momentum=0.9, centered=True),
    ),
    "AMSGrad": (
        lambda: sg.AdamOptimizer(0.01, beta2=0.8, epsilon=1e-14, uses_ams_grad=True),
        lambda w: torch.optim.Adam(w, 0.01, betas=(0.9, 0.8), eps=1e-14, amsgrad=True),
    ),
}


@pytest.mark.parametrize("peer", PEERS)
def test_equal_to_pytorch_where_the_formulas_agree(peer: str) -> None:
    ours, theirs = PEERS[peer]
    net = Net()
    assert_same(net.stepgraph(ours()), net.torch(theirs))


@pytest.mark.parametrize(
    "rule",
    [pytest.param(r, marks=pytest.mark.deep if r.endswith((" torch", " original")) else ()) for r in RULES],
)
def test_state_has_the_order_and_count_of_the_specification(rule: str) -> None:
    net = Net()
    optimizer = RULES[rule](descriptor("plain"))
    plain, expected = Rule(rule, RULES[rule](descriptor("plain"))), Net()
    net.stepgraph(optimizer)
    expected.numpy(plain)
    assert len(optimizer.slots_of(net.tensors[0], ())) == STATE[rule]
    for i, tensor in enumerate(net.tensors):
        tensor.synchronize_optimizer_data()
        buffers = [np.frombuffer(data.bytes, np.float32).reshape(tensor.shape) for data in tensor.optimizer_data]
        assert len(buffers) == len(tensor.optimizer_device_data) == (buffers_of(rule, tensor.numpy()))
        for buffer, wanted in zip(buffers, plain.state[i], strict=True):
            np.testing.assert_allclose(buffer, wanted, rtol=2e-5, atol=1e-7)


LIVE: dict[str, tuple[str, str, dict[str, Any]]] = {  # rule, preparation, what is assigned before step 10
    "learning rate": ("sgd momentum", "plain", {"learning_rate": 0.01}),
    "learning rate of Adam": ("adam", "plain", {"learning_rate": 0.3}),
    "momentum": ("sgd nesterov", "plain", {"momentum_scale": 0.3}),
    "betas": ("adam amsgrad", "plain", {"beta1": 0.5, "beta2": 0.99, "epsilon": 0.1}),
    "decay and alpha": ("rmsprop both", "plain", {"alpha": 0.5, "momentum_scale": 0.1, "epsilon": 0.1}),
    "decay of AdamW": ("adamw", "L1", {"regularization_scale": 0.5}),
    "time step": ("adam", "plain", {"time_step": 1}),
    "clipping off": ("sgd", "by global norm", {"applies_gradient_clipping": False}),
    "clip bounds": ("sgd", "by value", {"gradient_clip_max": 0.3, "gradient_clip_min": -0.3}),
    "norms": ("sgd", "by global norm", {"maximum_clipping_norm": 0.01, "custom_global_norm": 5.0}),
    "regularization": ("sgd", "L2", {"regularization_scale": 1.0, "gradient_rescale": 0.1}),
}


@pytest.mark.parametrize("name", LIVE)
def test_assigned_numbers_count_from_the_next_update_on(name: str) -> None:
    rule, preparation, assigned = LIVE[name]
    net, ours = Net(), RULES[rule](descriptor(preparation))
    plain = Rule(rule, RULES[rule](descriptor(preparation)))

    def assign(optimizer: Any, step: int) -> None:
        for field, value in assigned.items() if step == 10 else ():
            setattr(optimizer, field, value)
            if optimizer is plain.o and field == "time_step":
                plain.time = value

    assert_same(
        net.stepgraph(ours, lambda step: assign(ours, step)), net.numpy(plain, lambda step: assign(plain.o, step))
    )
    unchanged = net.numpy(Rule(rule, RULES[rule](descriptor(preparation))))
    assert not np.allclose(net.tensors[0].numpy(), unchanged[1][0], rtol=1e-4)


def test_assigning_compiles_nothing_and_clipping_can_be_switched_on() -> None:
    net = Net()
    optimizer = sg.SGDOptimizer(sg.OptimizerDescriptor(0.1, gradient_clip_max=0.0, gradient_clip_min=0.0))
    optimizer.applies_gradient_clipping = False
    training = net.graph(optimizer)
    before = training.executables
    training.execute({"x": net.x[0]}, {"y": net.y[0]})
    moved = [tensor.numpy().copy() for tensor in net.tensors]
    optimizer.applies_gradient_clipping = True  # bounds of 0, taken literally, stop everything
    training.execute({"x": net.x[1]}, {"y": net.y[1]})
    assert training.executables == before
    assert all((tensor.numpy() == old).all() for tensor, old in zip(net.tensors, moved, strict=True))
    assert any((old != start).any() for old, start in zip(moved, net.start, strict=True))


def test_time_step_advances_with_each_update_and_with_nothing_else() -> None:
    net, optimizer = Net(), sg.AdamOptimizer(0.1, time_step=4)
    training, data = net.graph(optimizer), ({"x": net.x[0]}, {"y": net.y[0]})
    training.execute(*data)
    assert optimizer.time_step == 5
    training.execute(*data, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE)
    names = {"x": net.inputs, "y": net.labels}
    training.bind_and_write_data({"x": net.x[0], "y": net.y[0]}, names, sg.Device.cpu())
    training.execute_forward()
    training.execute_gradient()
    assert optimizer.time_step == 5
    training.execute_optimizer_update()
    training.execute_optimizer_update()  # the same gradients, applied once more
    assert optimizer.time_step == 7


@pytest.mark.parametrize("rule", ["sgd momentum", "sgd nesterov", "adamw amsgrad", "rmsprop both"])
def test_bound_state_and_time_step_resume_bit_for_bit(rule: str) -> None:
    whole, first, second = Net(), Net(), Net()
    whole.stepgraph(RULES[rule](descriptor("plain")))
    optimizer = RULES[rule](descriptor("plain"))
    training = first.graph(optimizer)
    for step in range(STEPS // 2):
        training.execute({"x": first.x[step]}, {"y": first.y[step]})
    resumed = RULES[rule](descriptor("plain"))
    resumed.time_step = optimizer.time_step
    second.start = [tensor.numpy().copy() for tensor in first.tensors]
    training = second.graph(resumed)
    for old, new in zip(first.tensors, second.tensors, strict=True):
        training.bind_optimizer_data([bytearray(data.bytes) for data in old.optimizer_data], new)
    for step in range(STEPS // 2, STEPS):
        training.execute({"x": second.x[step]}, {"y": second.y[step]})
    for one, other in zip(second.tensors, whole.tensors, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_what_is_frozen_neither_moves_nor_counts_for_the_global_norm() -> None:
    net = Net()
    settings = sg.OptimizerDescriptor(
        1.0, applies_gradient_clipping=True, gradient_clipping_type=GLOBAL, maximum_clipping_norm=0.5
    )
    training = net.graph(sg.SGDOptimizer(settings), disable_update=True)
    net.layers[1].biases_parameter.is_updatable = False
    training.execute({"x": net.x[0]}, {"y": net.y[0]})
    moved = [tensor.numpy() - start for tensor, start in zip(net.tensors, net.start, strict=True)]
    assert [bool(change.any()) for change in moved] == [False, False, True, False]
    assert np.sqrt((moved[2] ** 2).sum()) == pytest.approx(0.5, rel=1e-5)


def test_trained_inputs_are_updated_like_parameters() -> None:
    x, y = sg.Tensor((1, 2), data=np.array([[1, 2]], np.float32)), sg.Tensor((1, 2))
    graph = sg.Graph()
    graph.node(sg.ActivationLayer.linear(3.0, 0.0), x)
    loss = sg.LossLayer.mean_squared_error(sg.ReductionType.SUM)
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(0.1, momentum_scale=0.5))
    training.add_inputs({}, {"y": y})
    training.set_training_tensor_parameters([sg.TensorParameter(x)])
    training.compile(sg.Device.cpu())
    expected, momentum = np.array([[1.0, 2.0]]), 0.0
    for _ in range(3):
        training.execute({}, {"y": [[4, 4]]})
        momentum = 0.5 * momentum + 0.1 * 2 * (3 * expected - 4) * 3
        expected = expected - momentum
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5)


def test_without_an_optimizer_gradients_are_computed_and_nothing_moves() -> None:
    net = Net()
    training = net.graph(None)
    assert training.optimizer is None
    training.execute({"x": net.x[0]}, {"y": net.y[0]})
    assert all((tensor.numpy() == start).all() for tensor, start in zip(net.tensors, net.start, strict=True))
    late = sg.SGDOptimizer(0.1)
    training.compile_optimizer(late)
    assert training.optimizer is late
    training.execute({"x": net.x[0]}, {"y": net.y[0]})
    assert all((tensor.numpy() != start).any() for tensor, start in zip(net.tensors, net.start, strict=True))


def test_defaults_and_copies_of_the_descriptor() -> None:
    settings = sg.OptimizerDescriptor.exact(0.5, gradient_rescale=2.0, maximum_clipping_norm=7.0)
    for make in (sg.SGDOptimizer, sg.AdamOptimizer, sg.AdamWOptimizer, sg.RMSPropOptimizer):
        optimizer = make(settings)
        assert (optimizer.learning_rate, optimizer.gradient_rescale, optimizer.maximum_clipping_norm) == (0.5, 2.0, 7.0)
        assert (optimizer.applies_gradient_clipping, optimizer.gradient_clipping_type) == (False, VALUE)
        assert (optimizer.gradient_clip_max, optimizer.gradient_clip_min, optimizer.custom_global_norm) == (1, -1, 0)
        assert (optimizer.regularization_type, optimizer.regularization_scale) == (sg.RegularizationType.NONE, 0)
        optimizer.learning_rate = 0.1
        assert settings.learning_rate == 0.5
    for adam in (sg.AdamOptimizer(learning_rate=1), sg.AdamWOptimizer(1)):
        assert (adam.beta1, adam.beta2, adam.epsilon, adam.uses_ams_grad, adam.time_step) == (
            0.9,
            0.999,
            1e-8,
            False,
            1,
        )
    sgd, prop = sg.SGDOptimizer(1), sg.RMSPropOptimizer(1)
    assert (prop.momentum_scale, prop.alpha, prop.epsilon, prop.is_centered) == (0, 0.99, 1e-8, False)
    assert (sgd.momentum_scale, sgd.uses_nesterov_momentum) == (0, False)
    assert [int(one) for one in (*sg.GradientClippingType, *sg.RegularizationType)] == [0, 1, 2, 0, 1, 2]


def test_a_mistyped_number_is_refused() -> None:
    optimizer = sg.AdamOptimizer(learning_rate=0.1)
    with pytest.raises(sg.ArgumentError, match=r"(?s)lr.*learning_rate"):
        optimizer.lr = 0.2


# Keywords where people look for them

KEYWORDS: dict[str, tuple[Callable[[], sg.Optimizer], Callable[[], sg.Optimizer]]] = {  # documented, ML Compute's
    "weight decay": (
        lambda: sg.SGDOptimizer(0.1, weight_decay=0.2),
        lambda: sg.SGDOptimizer(sg.OptimizerDescriptor(0.1, regularization_type=L2, regularization_scale=0.2)),
    ),
    "decoupled": (
        lambda: sg.AdamWOptimizer(0.1, weight_decay=0.2),
        lambda: sg.AdamWOptimizer(sg.OptimizerDescriptor(0.1, regularization_scale=0.2)),
    ),
    "clip norm": (
        lambda: sg.RMSPropOptimizer(0.1, clip_norm=0.2, momentum=0.5, centered=True),
        lambda: sg.RMSPropOptimizer(
            sg.OptimizerDescriptor(0.1, gradient_clipping_type=GLOBAL, maximum_clipping_norm=0.2),
            momentum_scale=0.5,
            is_centered=True,
        ),
    ),
    "clip value": (
        lambda: sg.SGDOptimizer(0.1, clip_value=0.2, momentum=0.9, nesterov=True),
        lambda: sg.SGDOptimizer(
            descriptor=sg.OptimizerDescriptor(0.1, gradient_clip_max=0.2, gradient_clip_min=-0.2),
            momentum_scale=0.9,
            uses_nesterov_momentum=True,
        ),
    ),
    "amsgrad": (lambda: sg.AdamOptimizer(0.1, amsgrad=True), lambda: sg.AdamOptimizer(0.1, uses_ams_grad=True)),
    "beside a descriptor": (
        lambda: sg.AdamOptimizer(sg.OptimizerDescriptor(0.1, gradient_rescale=2.0), clip_norm=1.0),
        lambda: sg.AdamOptimizer(
            sg.OptimizerDescriptor(0.1, gradient_rescale=2.0, gradient_clipping_type=GLOBAL, maximum_clipping_norm=1.0)
        ),
    ),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_say_what_descriptors_say(name: str) -> None:
    ours, theirs = (make() for make in KEYWORDS[name])
    assert ours.settings == theirs.settings and (ours.rule, ours.slots) == (theirs.rule, theirs.slots)


def test_clipping_that_it_was_not_created_with_is_refused() -> None:
    with pytest.raises(sg.StateError, match=r"without clip_norm\."):
        sg.AdamOptimizer(0.1).clip_norm = 1.0
    with pytest.raises(sg.StateError, match=r"without clip_norm, but to clip by value\."):
        sg.AdamOptimizer(0.1, clip_value=1.0).clip_norm = 1.0


def test_documented_names_can_be_read_and_assigned() -> None:
    sgd = sg.SGDOptimizer(0.1, momentum=0.9, weight_decay=0.0, clip_norm=2.0)
    assert (sgd.momentum, sgd.nesterov, sgd.weight_decay, sgd.clip_norm, sgd.clip_value) == (0.9, False, 0.0, 2.0, None)
    sgd.momentum, sgd.weight_decay, sgd.clip_norm = 0.5, 0.3, 4.0
    assert (sgd.momentum_scale, sgd.regularization_scale, sgd.maximum_clipping_norm) == (0.5, 0.3, 4.0)
    sgd.clip_norm = None
    assert sgd.numbers()["maximum_clipping_norm"] == np.inf
    sgd.clip_norm = 1.0
    assert sgd.numbers()["maximum_clipping_norm"] == 1.0
    by_value = sg.AdamOptimizer(0.1, clip_value=0.5)
    by_value.clip_value = 0.25
    assert (by_value.gradient_clip_min, by_value.gradient_clip_max) == (-0.25, 0.25)
    for name, value in (("weight_decay", 0.1), ("clip_norm", 1.0)):
        with pytest.raises(sg.StateError, match=f"(?s)AdamOptimizer.*{name}"):
            setattr(by_value, name, value)
    for name in ("weight_decay", "clip_norm", "momentum"):
        before = sgd.settings
        with pytest.raises(sg.ArgumentError):
            setattr(sgd, name, -1.0)
        assert sgd.settings == before


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (sg.SGDOptimizer, "lr", "use learning_rate"),
        (sg.AdamWOptimizer, "lr", "use learning_rate"),
        (sg.AdamOptimizer, "betas", "use beta1 and beta2"),
        (sg.RMSPropOptimizer, "eps", "use epsilon"),
        (sg.LionOptimizer, "weight_deacy", "use weight_decay"),
        (sg.MuonOptimizer, "max_norm", "use clip_norm"),
        (sg.SGDOptimizer, "nestrov", "use nesterov"),
        (sg.SGDOptimizer, "zzz", "use learning_rate, momentum, nesterov, dampening"),
    ],
)
def test_unknown_keywords_name_the_class_and_suggest(kind: type[sg.Optimizer], name: str, meant: str) -> None:
    with pytest.raises(sg.ArgumentError, match=f"(?s)^{kind.__name__}: there is no setting {name}.*{meant}") as caught:
        kind(0.1, **{name: 1.0})
    assert kind.__name__ in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sg.SGDOptimizer(0.1, momentum=0.9, momentum_scale=0.5),
        lambda: sg.SGDOptimizer(0.1, momentum=0.9, dampening=0.5),
        lambda: sg.AdamOptimizer(0.1, formula="keras"),
        lambda: sg.MuonOptimizer(0.1, scale="large"),
        lambda: sg.AdamOptimizer(sg.OptimizerDescriptor(0.1, gradient_clip_max=1.0), clip_norm=1.0),
        lambda: sg.AdamOptimizer(
            sg.OptimizerDescriptor(0.1, regularization_type=L2, regularization_scale=1.0), weight_decay=0.1
        ),
    ],
)
def test_contradictions_are_refused(make: Callable[[], sg.Optimizer]) -> None:
    with pytest.raises(sg.ArgumentError):
        make()


# Clipping settings that are given are meant

BOUNDS: dict[str, dict[str, Any]] = {
    name: settings for name, settings in PREPARATIONS.items() if "clip" in str(settings)
}


@pytest.mark.parametrize("preparation", BOUNDS)
def test_giving_a_bound_switches_clipping_on(preparation: str) -> None:
    given = sg.OptimizerDescriptor(0.05, **BOUNDS[preparation])
    assert given == sg.OptimizerDescriptor(0.05, applies_gradient_clipping=True, **BOUNDS[preparation])
    assert given.applies_gradient_clipping
    assert sg.SGDOptimizer(given).applies_gradient_clipping


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clipping_type": VALUE},
        {"gradient_clip_max": 1.0},
        {"gradient_clip_min": -1.0},
        {"gradient_clipping_type": GLOBAL, "maximum_clipping_norm": 1.0},
    ],
)
def test_a_bound_that_equals_its_default_is_given_all_the_same(settings: dict[str, Any]) -> None:
    assert sg.OptimizerDescriptor(0.1, **settings).applies_gradient_clipping
    with pytest.raises(sg.ArgumentError, match=f"applies_gradient_clipping is False, but {next(iter(settings))}"):
        sg.OptimizerDescriptor(0.1, applies_gradient_clipping=False, **settings)


def test_without_a_bound_nothing_is_clipped() -> None:
    for plain in (sg.OptimizerDescriptor(0.1), sg.OptimizerDescriptor(0.1, applies_gradient_clipping=False)):
        assert plain.applies_gradient_clipping is False
        assert (plain.gradient_clip_min, plain.gradient_clip_max, plain.maximum_clipping_norm) == (-1.0, 1.0, 1.0)
        assert plain.gradient_clipping_type is VALUE
    assert sg.OptimizerDescriptor(0.1, applies_gradient_clipping=True).gradient_clip_max == 1.0


@pytest.mark.parametrize("preparation", PREPARATIONS)
def test_replacing_one_setting_keeps_the_others(preparation: str) -> None:
    one = sg.OptimizerDescriptor(0.1, **PREPARATIONS[preparation])
    other = dataclasses.replace(one, learning_rate=0.2)
    assert dataclasses.replace(other, learning_rate=0.1) == one
    assert other.applies_gradient_clipping == one.applies_gradient_clipping


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"maximum_clipping_norm": 5.0}, "maximum_clipping_norm is 5.0, which clipping by value does not use"),
        ({"custom_global_norm": 2.0}, "custom_global_norm is 2.0, which clipping by value does not use"),
        ({"gradient_clipping_type": NORM, "custom_global_norm": 2.0}, "clipping by norm does not use"),
    ],
)
def test_a_norm_that_nothing_looks_at_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(sg.ArgumentError, match=words):
        sg.OptimizerDescriptor(0.1, **settings)


def test_a_bound_assigned_where_nothing_looks_at_it_is_refused() -> None:
    plain = sg.SGDOptimizer(learning_rate=0.1)
    with pytest.raises(sg.StateError, match="clipping is disabled"):
        plain.gradient_clip_max = 0.5
    with pytest.raises(sg.StateError, match="clips by value, which does not use maximum_clipping_norm"):
        plain.maximum_clipping_norm = 0.5
    assert (plain.gradient_clip_max, plain.maximum_clipping_norm) == (1.0, 1.0)
    plain.applies_gradient_clipping = True
    plain.gradient_clip_max = 0.5
    assert plain.numbers()["gradient_clip_max"] == 0.5


ROOT = Path(__file__).parent.parent


def written_in_the_example() -> list[str]:
    source = (ROOT / "examples" / "05_sequence_lstm.py").read_text()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [text for node in found if "OptimizerDescriptor(" in (text := ast.unparse(node))[:25]]


@pytest.mark.parametrize("written", written_in_the_example())
def test_what_the_example_writes_does_clip(written: str) -> None:
    descriptor = eval(written, {"sg": sg})
    moves = []
    for settings in (dataclasses.replace(descriptor, learning_rate=1.0), sg.OptimizerDescriptor(1.0)):
        x, weights, graph = sg.Tensor((4, 3)), sg.Tensor((2, 3), fill=0.5), sg.Graph()
        graph.node(sg.FullyConnectedLayer(weights, None, sg.ConvolutionDescriptor(1, 3, 2)), x)
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(settings))
        training.add_inputs({"x": x}, {"y": sg.Tensor((4, 2))})
        training.compile(sg.Device.cpu())
        training.execute({"x": np.full((4, 3), 10, np.float32)}, {"y": np.zeros((4, 2), np.float32)})
        moves.append(weights.numpy() - np.float32(0.5))
    clipped, plain = moves
    assert np.linalg.norm(plain) > 100
    if descriptor.gradient_clipping_type is GLOBAL:
        assert np.linalg.norm(clipped) == pytest.approx(descriptor.maximum_clipping_norm, rel=1e-5)
    else:
        np.testing.assert_allclose(np.abs(clipped), descriptor.gradient_clip_max, rtol=1e-5)


def test_the_flag_alone_decides_where_everything_is_exact() -> None:
    settings = {"gradient_clip_max": 0.5, "maximum_clipping_norm": 3.0, "custom_global_norm": 1.0}
    one = sg.OptimizerDescriptor.exact(0.1, **settings)
    assert not one.applies_gradient_clipping
    assert (one.gradient_clip_max, one.gradient_clip_min, one.custom_global_norm) == (0.5, -1.0, 1.0)
    assert sg.OptimizerDescriptor.exact(0.1, applies_gradient_clipping=True, **settings).applies_gradient_clipping
    with pytest.raises(sg.ArgumentError, match="above"):
        sg.OptimizerDescriptor.exact(0.1, gradient_clip_min=2.0)
    with pytest.raises(TypeError):
        sg.OptimizerDescriptor.exact(0.1, clip=2.0)


# Numbers that no rule can use

SHARED = ("learning_rate", "regularization_scale", "custom_global_norm", "maximum_clipping_norm")
OWN: dict[type[sg.Optimizer], dict[str, tuple[float, ...]]] = {
    sg.SGDOptimizer: {"momentum_scale": (-0.1,)},
    sg.AdamOptimizer: {"beta1": (-0.1, 1.0), "beta2": (-0.1, 1.0, 1.5), "epsilon": (-1e-8,)},
    sg.AdamWOptimizer: {"beta1": (-0.1, 1.0), "beta2": (1.0,), "epsilon": (-1e-8,)},
    sg.RMSPropOptimizer: {"momentum_scale": (-0.1,), "alpha": (-0.1, 1.0), "epsilon": (-1e-8,)},
    sg.LionOptimizer: {"beta1": (1.0,)},
    sg.MuonOptimizer: {"momentum_scale": (-0.1,), "beta2": (1.0,)},
}
WRONG = [
    (kind, name, value)
    for kind, names in OWN.items()
    for name, values in {"learning_rate": (-1e-3,), **names}.items()
    for value in (*values, np.nan, np.inf, -np.inf, 10**400)
]


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("value", [-0.1, np.nan, np.inf, 10**400])
def test_a_descriptor_refuses_numbers_out_of_range(name: str, value: float) -> None:
    kind = {"gradient_clipping_type": GLOBAL} if "norm" in name else {}
    with pytest.raises(sg.ArgumentError, match=f"{name} is"):
        sg.OptimizerDescriptor(**{"learning_rate": 0.1, name: value, **kind})


@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_an_optimizer_refuses_numbers_out_of_range(kind: type[sg.Optimizer], name: str, value: float) -> None:
    with pytest.raises(sg.ArgumentError, match=f"{name} is"):
        kind(**{"learning_rate": 0.1, name: value})
    settings = {"momentum_scale": 0.5} if name == "momentum_scale" else {}
    optimizer = kind(learning_rate=0.1, **settings)
    before = optimizer.settings
    with pytest.raises(sg.ArgumentError, match=f"{name} is"):
        setattr(optimizer, name, value)
    assert optimizer.settings == before


@pytest.mark.parametrize("value", [-0.1, np.nan, np.inf])
def test_a_schedule_cannot_set_a_rate_out_of_range(value: float) -> None:
    with pytest.raises(sg.ArgumentError):
        sg.WarmupCosine(value)
    with pytest.raises(sg.ArgumentError):
        sg.WarmupCosine(1.0, floor=value)
    x, graph = sg.Tensor((2, 2)), sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(2, 2), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": sg.Tensor((2, 2))})
    training.compile(sg.Device.cpu())
    rows = np.ones((2, 2), np.float32)
    with pytest.raises(sg.ArgumentError, match="the schedule returned"):
        sg.fit(training, (rows, rows), schedule=lambda step: value, progress="quiet")
    assert training.optimizer.learning_rate == 0.1  # type: ignore[union-attr]


def test_new_buffers_on_a_gpu_are_shown_without_reading_them() -> None:
    """On a device whose memory cannot be read."""
    one, other = sg.Tensor((3, 2), fill=1.0), sg.Tensor((4,), fill=1.0)
    other.bind_optimizer_data([np.full(4, 2, np.float32)])
    optimizer, slots = sg.SGDOptimizer(0.1, momentum=0.9), {one: ("momentum",), other: ("momentum",)}
    begun = TrainingState(cast(Any, SimpleNamespace(torch=torch.device("meta"))))

    def attached() -> TrainingState:
        return begun.attached(optimizer, slots, scaled=False, decay=None, factors=0, guarded=0)

    begun = attached()
    begun.begin(fresh=True)
    assert bytes(one.optimizer_data[0].bytes) == bytes(24) and one.optimizer_device_data[0].array.device.type == "meta"
    assert bytes(other.optimizer_data[0].bytes) == np.full(4, 2, np.float32).tobytes()
    one.optimizer_data, one.optimizer_device_data = [], []
    with pytest.raises(NotImplementedError):  # steps may have written to it
        attached().begin(fresh=False)


@pytest.mark.gpu
def test_a_gpu_shows_its_buffers() -> None:
    net = Net()
    training = net.graph(sg.SGDOptimizer(0.1, momentum=0.9), device=sg.Device.gpu())
    weights = net.tensors[0]
    assert bytes(weights.optimizer_data[0].bytes) == bytes(60)
    training.execute({"x": net.x[0]}, {"y": net.y[0]})
    weights.synchronize_optimizer_data()
    shown = np.frombuffer(weights.optimizer_data[0].bytes, np.float32).reshape(5, 3)
    assert shown.any() and np.array_equal(shown, weights.optimizer_device_data[0].array.cpu().numpy())
