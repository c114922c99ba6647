"""LSTMs beyond the table: descriptors, the operator against the plain loop, lengths, dropout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.errors import ArgumentError, ShapeError, StateError
from stepgraph.layers.activation import ActivationDescriptor, ActivationType
from stepgraph.layers.layer import Scope
from stepgraph.layers.recurrent import LSTMDescriptor, LSTMLayer, LSTMResultMode
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from tests.layers.cases_recurrent import ACTIVATIONS, USUAL, Setting


class PlainLSTM(LSTMLayer):
    """Never takes the operator."""

    is_standard = False


@dataclasses.dataclass
class Run:
    """One pass over float64 arrays: results, and gradients of everything for the same cotangents."""

    results: list[torch.Tensor]
    gradients: list[torch.Tensor]


def arrays(layer: LSTMLayer, dtype: torch.dtype = torch.float64) -> dict[Tensor, torch.Tensor]:
    return {tensor: tensor.torch().to(dtype).requires_grad_() for tensor in layer.parameters.values()}


def sources(setting: Setting, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = np.random.default_rng(3)
    given = [torch.from_numpy(np.array(draw(generator))) for draw in setting.sources()]
    return [one.to(dtype).requires_grad_() if one.is_floating_point() else one for one in given]


def run(layer: LSTMLayer, inputs: list[torch.Tensor], training: bool = False) -> Run:
    dtype = inputs[0].dtype
    own = arrays(layer, dtype)
    results = layer.forward(*inputs, scope=Scope(own, training=training, stream=torch.tensor([1, 2])))
    results = list(results) if isinstance(results, tuple) else [results]
    leaves = [*(one for one in inputs if one.requires_grad), *own.values()]
    generator = torch.Generator().manual_seed(5)
    sent = [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(dtype) for one in results]
    return Run(results, list(torch.autograd.grad(results, leaves, sent, allow_unused=True, materialize_grads=True)))


def twin(setting: Setting, layer: LSTMLayer, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    own = arrays(layer, inputs[0].dtype)
    fields = ("input_weights", "hidden_weights", "biases")
    tensors = {name: [own[one] for one in getattr(layer, name)] for name in fields if getattr(layer, name)}
    results = setting.twin(*inputs, **tensors)
    return list(results) if isinstance(results, tuple) else [results]


def assert_all_close(ours: list[torch.Tensor], theirs: list[Any], tolerance: float = 1e-10) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, torch.as_tensor(other), rtol=tolerance, atol=tolerance)


# Descriptor and construction


def test_result_mode_has_the_raw_values_and_descriptions_of_the_original() -> None:
    assert [(mode.name, int(mode), mode.debug_description) for mode in LSTMResultMode] == [
        ("OUTPUT", 0, "Output"),
        ("OUTPUT_AND_STATES", 1, "Output and States"),
    ]


def test_short_descriptor_has_the_defaults_of_the_original() -> None:
    one = LSTMDescriptor(3, 4)
    assert (one.input_size, one.hidden_size, one.layer_count) == (3, 4, 1)
    assert (one.uses_biases, one.batch_first, one.is_bidirectional, one.returns_sequences) == (True, True, False, True)
    assert (one.dropout, one.result_mode) == (0.0, LSTMResultMode.OUTPUT)
    assert one == LSTMDescriptor(3, 4, 1) and hash(one) == hash(LSTMDescriptor(3, 4, 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.dropout = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "keywords", "words"),
    [
        ((0, 4), {}, "input_size is 0"),
        ((3, -1), {}, "hidden_size is -1"),
        ((3, 4, 0), {}, "layer_count is 0"),
        ((3, 4.0), {}, "hidden_size is 4.0"),
        ((3, True), {}, "hidden_size is True"),
        ((3, 4), {"dropout": 1.0}, "dropout is 1.0"),
        ((3, 4), {"dropout": -0.1}, "dropout is -0.1"),
        ((3, 4), {"dropout": math.nan}, "dropout is nan"),
        ((3, 4), {"result_mode": 7}, "result_mode is 7"),
    ],
)
def test_descriptor_refuses_by_name(arguments: tuple, keywords: dict, words: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        LSTMDescriptor(*arguments, **keywords)
    assert words in str(raised.value)
    assert "Fix:" in str(raised.value)


def zeros(count: int, *shape: int) -> list[Tensor]:
    return [Tensor(shape, fill=0.0) for _ in range(count)]


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ((zeros(3, 4, 3), zeros(4, 4, 4)), ShapeError, "3 input_weights, but 1 layers in 1 directions need 4"),
        ((zeros(4, 4, 3), zeros(8, 4, 4)), ShapeError, "8 hidden_weights, but 1 layers in 1 directions need 4"),
        ((zeros(4, 4, 4), zeros(4, 4, 4)), ShapeError, "input_weights[0] holds 16 numbers, but 12 are needed"),
        ((zeros(4, 4, 3), zeros(4, 4, 3)), ShapeError, "hidden_weights[0] holds 12 numbers, but 16 are needed"),
        ((zeros(4, 4, 3), zeros(4, 4, 4), zeros(4, 5)), ShapeError, "peephole_weights[0] holds 5 numbers, but 4 or 16"),
        (
            (zeros(4, 4, 3), zeros(4, 4, 4), None, zeros(4, 3)),
            ShapeError,
            "biases[0] holds 3 numbers, but 4 are",
        ),
        (
            (zeros(4, 4, 3), zeros(4, 4, 4), None, None, [ActivationDescriptor(ActivationType.TANH)]),
            ArgumentError,
            "pass four ActivationDescriptors",
        ),
    ],
)
def test_layer_refuses_tensors_that_do_not_fit(tensors: tuple, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        LSTMLayer(LSTMDescriptor(3, 4), *tensors)
    assert words in str(raised.value)


def test_biases_need_a_descriptor_that_uses_them() -> None:
    with pytest.raises(ArgumentError, match="4 biases were passed, but uses_biases is False"):
        LSTMLayer(LSTMDescriptor(3, 4, uses_biases=False), zeros(4, 4, 3), zeros(4, 4, 4), None, zeros(4, 4))


def test_default_activations_are_those_of_the_original() -> None:
    layer = LSTMLayer(LSTMDescriptor(3, 4), zeros(4, 4, 3), zeros(4, 4, 4))
    assert [one.type for one in layer.gate_activations] == list(USUAL)
    assert layer.output_result_activation.type is ActivationType.TANH
    assert layer.label == "LSTM"
    with pytest.raises(StateError):
        layer.biases = ()  # type: ignore[misc]


def test_create_makes_natural_shapes() -> None:
    layer = LSTMLayer.create(3, 4, 2, is_bidirectional=True, peepholes=True, label="reader")
    assert layer.label == "reader"
    assert [one.shape for one in layer.input_weights] == ([(4, 3)] * 4 + [(4, 8)] * 4) * 2
    assert [one.shape for one in layer.hidden_weights] == [(4, 4)] * 16
    assert [one.shape for one in layer.peephole_weights or ()] == [(4, 4)] * 16
    assert [one.shape for one in layer.biases or ()] == [(4,)] * 16
    assert layer.parameter_count == 2 * 4 * (4 * 3 + 4 * 8 + 2 * (2 * 16 + 4))
    bare = LSTMLayer.create(3, 4, uses_biases=False)
    assert bare.biases is None and bare.biases_parameters is None and bare.peephole_weights_parameters is None


def test_create_uses_the_fans_of_each_gate() -> None:
    layer = LSTMLayer.create(200, 100)
    assert float(np.abs(layer.input_weights[0].numpy()).max()) == pytest.approx(math.sqrt(6 / 300), rel=1e-2)
    assert float(np.abs(layer.hidden_weights[3].numpy()).max()) == pytest.approx(math.sqrt(6 / 200), rel=1e-2)
    assert not np.array_equal(layer.input_weights[0].numpy(), layer.input_weights[1].numpy())


def test_parameters_are_the_very_tensors() -> None:
    layer = LSTMLayer.create(3, 4, peepholes=True)
    pairs = [
        (layer.input_weights_parameters, layer.input_weights),
        (layer.hidden_weights_parameters, layer.hidden_weights),
        (layer.peephole_weights_parameters, layer.peephole_weights),
        (layer.biases_parameters, layer.biases),
    ]
    for parameters, tensors in pairs:
        assert all(one.tensor is tensor for one, tensor in zip(parameters, tensors, strict=True))
    assert layer.parameters["input_weights.2"] is layer.input_weights[2]
    assert len(layer.parameters) == 16


def test_one_tensor_in_several_gates_is_one_parameter() -> None:
    shared, hidden = Tensor((4, 3), data=np.full((4, 3), 0.1, np.float32)), zeros(4, 4, 4)
    layer = LSTMLayer(LSTMDescriptor(3, 4), [shared] * 4, hidden)
    apart = [Tensor((4, 3), data=shared.numpy().copy()) for _ in range(4)]
    x = torch.randn(2, 3, 3, dtype=torch.float64)
    together, separate = run(layer, [x]), run(LSTMLayer(LSTMDescriptor(3, 4), apart, hidden), [x])
    torch.testing.assert_close(together.gradients[0], sum(separate.gradients[:4]))


# The whole space of settings

BOUNDED = (ActivationType.SIGMOID, ActivationType.TANH, ActivationType.HARD_SIGMOID, ActivationType.SOFT_SIGN)


@st.composite
def drawn(draw: st.DrawFn, standard: bool) -> Setting:
    """A small LSTM with any combination of settings and sources."""
    batch, steps, flag = draw(st.integers(1, 3)), draw(st.integers(1, 4)), st.booleans()
    lengths = st.none() | st.tuples(*[st.integers(0, steps)] * batch)
    any_kind, bounded = st.sampled_from(sorted(ACTIVATIONS)), st.sampled_from(BOUNDED)  # else numbers explode
    return Setting(
        inputs=draw(st.integers(1, 4)),
        hidden=draw(st.integers(1, 4)),
        layers=draw(st.integers(1, 3)),
        biases=draw(flag),
        batch_first=draw(flag),
        both=draw(flag),
        sequences=draw(flag),
        states_out=draw(flag),
        states_in=draw(flag),
        lengths=draw(lengths),
        batch=batch,
        steps=steps,
        packed=draw(flag),
        peepholes="" if standard else draw(st.sampled_from(["", "matrix", "diagonal"])),
        gates=USUAL if standard else draw(st.tuples(bounded, bounded, any_kind, bounded)),
        result=ActivationType.TANH if standard else draw(any_kind),
    )


def check_the_operator(setting: Setting) -> None:
    """The operator, the plain loop, the reference and PyTorch agree, gradients included."""
    layer, inputs = setting.layer(), sources(setting)
    promised = setting.layer().infer(
        *(TensorDescriptor(tuple(x.shape), np.float32 if x.is_floating_point() else np.int32) for x in inputs)
    )
    fast, plain = run(layer, inputs), run(setting.layer(PlainLSTM), inputs)
    assert [one.shape for one in promised] == [tuple(one.shape) for one in fast.results]
    assert_all_close(fast.results, plain.results)
    assert_all_close(fast.gradients, plain.gradients)
    check_the_reference(setting)
    if min(setting.lengths or (1,)) > 0:  # PyTorch packs no empty sequences
        assert_all_close(fast.results, twin(setting, layer, inputs))


def check_the_reference(setting: Setting) -> None:
    layer, inputs = setting.layer(), sources(setting)
    fields = ("input_weights", "hidden_weights", "peephole_weights", "biases")
    numbers = {name: [one.numpy().astype(np.float64) for one in getattr(layer, name) or ()] for name in fields}
    wanted = setting.reference(*(one.detach().numpy() for one in inputs), **numbers)
    assert_all_close(run(layer, inputs).results, list(wanted) if isinstance(wanted, tuple) else [wanted])


@given(drawn(standard=True))
@settings(max_examples=25, deadline=None)
def test_operator_agrees_with_everything(setting: Setting) -> None:
    check_the_operator(setting)


@pytest.mark.deep
@given(drawn(standard=True))
@settings(max_examples=300, deadline=None)
def test_operator_agrees_with_everything_over_many_settings(setting: Setting) -> None:
    check_the_operator(setting)


@given(drawn(standard=False))
@settings(max_examples=25, deadline=None)
def test_plain_loop_agrees_with_the_reference(setting: Setting) -> None:
    check_the_reference(setting)


@pytest.mark.deep
@given(drawn(standard=False))
@settings(max_examples=300, deadline=None)
def test_plain_loop_agrees_with_the_reference_over_many_settings(setting: Setting) -> None:
    check_the_reference(setting)


def test_float32_is_as_close_as_its_digits() -> None:
    setting = Setting(inputs=16, hidden=32, layers=2, both=True, states_in=True, states_out=True, batch=4, steps=40)
    layer, inputs = setting.layer(), sources(setting)
    single, double = run(layer, sources(setting, torch.float32)), run(layer, inputs)
    for one, other in zip(single.results + single.gradients, double.results + double.gradients, strict=True):
        assert one.dtype is torch.float32
        assert ((one - other).abs().max() / other.abs().max()).item() < 1e-5


# Lengths


@pytest.mark.parametrize("kind", [LSTMLayer, PlainLSTM])
@pytest.mark.parametrize("both", [False, True])
def test_what_stands_after_an_end_does_not_matter(kind: type[LSTMLayer], both: bool) -> None:
    setting = Setting(layers=2, both=both, lengths=(2, 4, 0), states_in=True, states_out=True)
    layer, (x, h0, c0, lengths) = setting.layer(kind), sources(setting)
    clean = run(layer, [x, h0, c0, lengths])
    ended = torch.arange(4) >= lengths[:, None]
    dirty = x.detach().masked_fill(ended[..., None], math.nan).requires_grad_()
    found = run(layer, [dirty, h0, c0, lengths])
    for one, other in zip(clean.results + clean.gradients, found.results + found.gradients, strict=True):
        assert torch.equal(one, other)
    output, h, c = found.results
    assert not output[ended].any()
    assert torch.equal(h[:, :, 2], h0[:, :, 2]) and torch.equal(c[:, :, 2], c0[:, :, 2])
    assert not found.gradients[0][ended].any()


@pytest.mark.parametrize("kind", [LSTMLayer, PlainLSTM])
def test_full_lengths_are_no_lengths(kind: type[LSTMLayer]) -> None:
    setting = Setting(both=True, states_out=True)
    layer, (x,) = setting.layer(kind), sources(setting)
    without, full = run(layer, [x]), run(layer, [x, torch.tensor([4, 4, 4])])
    assert_all_close(without.results + without.gradients, full.results + full.gradients, 1e-14)


@pytest.mark.parametrize("kind", [LSTMLayer, PlainLSTM])
@pytest.mark.parametrize("lengths", [(5, 1, 1), (1, -1, 1)])
def test_lengths_outside_of_the_steps_are_refused(kind: type[LSTMLayer], lengths: tuple[int, ...]) -> None:
    layer, (x,) = Setting().layer(kind), sources(Setting())
    with pytest.raises(ArgumentError, match=r"sequence lengths are .*, but there are 4 steps"):
        run(layer, [x, torch.tensor(lengths)])


# Dropout


def test_dropout_stands_between_layers_and_in_training_only() -> None:
    setting = Setting(inputs=5, hidden=6, layers=2, both=True, dropout=0.4, batch=7, steps=8)
    layer, (x,) = setting.layer(), sources(setting)
    own = arrays(layer)
    stream = torch.tensor([4, 9])
    found = layer.forward(x, scope=Scope(own, training=True, stream=stream))

    def single(index: int, inputs: int) -> LSTMLayer:
        """One of the two layers by itself."""
        picked = [4 * index + gate for gate in range(4)] + [8 + 4 * index + gate for gate in range(4)]
        tensors = [[group[i] for i in picked] for group in (layer.input_weights, layer.hidden_weights, layer.biases)]
        descriptor = LSTMDescriptor(inputs, 6, is_bidirectional=True, dropout=0.9)  # nothing stands after the last
        return LSTMLayer(descriptor, tensors[0], tensors[1], None, tensors[2])

    lower = single(0, 5).forward(x, scope=Scope(own, training=True, stream=stream))
    mask = Scope(own, training=True, stream=stream).keep_mask(lower.transpose(0, 1), 0.4, seed=1).transpose(0, 1)
    assert 0.5 < mask.double().mean().item() < 0.7
    wanted = single(1, 12).forward(lower * mask / 0.6, scope=Scope(own, training=True, stream=stream))
    torch.testing.assert_close(found, wanted)
    free = dataclasses.replace(setting, dropout=0.0).layer()
    quiet = layer.forward(x, scope=Scope(own, training=False, stream=stream))
    assert torch.equal(quiet, run(free, [x], training=True).results[0])


def test_dropout_differs_between_layers_and_steps() -> None:
    setting = Setting(hidden=6, layers=3, dropout=0.5, batch=4, steps=8)
    layer, (x,) = setting.layer(), sources(setting)
    masks: list[torch.Tensor] = []

    class Watching(Scope):
        def keep_mask(self, x: torch.Tensor, rate: float, seed: int = 0) -> torch.Tensor:
            masks.append(super().keep_mask(x, rate, seed))
            return masks[-1]

    for step in (1, 1, 2):
        layer.forward(x, scope=Watching(arrays(layer), training=True, stream=torch.tensor([1, step])))
    assert len(masks) == 6
    assert torch.equal(masks[0], masks[2]) and torch.equal(masks[1], masks[3])
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[4])
