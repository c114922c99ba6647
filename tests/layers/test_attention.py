"""Multihead attention beyond the table: PyTorch's module, operators in use, refused tensors, training."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from stepgraph.layers.attention import MultiheadAttentionDescriptor, MultiheadAttentionLayer
from stepgraph.layers.layer import Scope
from tests.layers.cases_attention import E, attended, attention, turned

DOUBLE = torch.float64


def run(layer: MultiheadAttentionLayer, *sources: torch.Tensor, training: bool = False) -> torch.Tensor:
    arrays = {tensor: tensor.torch().to(sources[0].dtype) for tensor in layer.parameters.values()}
    scope = Scope(arrays, training=training, stream=torch.tensor([1, 2]))
    return layer.forward(*sources, scope=scope)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def operators(layer: MultiheadAttentionLayer, *sources: torch.Tensor, training: bool = True) -> set[str]:
    traced = make_fx(lambda *x: run(layer, *x, training=training))(*sources)
    return {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("widths", [(E, E), (5, 8)])
def test_everything_is_as_in_the_module(
    heads: int, biases: bool, rows: bool, zero: bool, widths: tuple[int, int]
) -> None:
    module = torch.nn.MultiheadAttention(
        E, heads, bias=biases, add_bias_kv=rows, add_zero_attn=zero, kdim=widths[0], vdim=widths[1], batch_first=True
    )
    if biases:
        torch.nn.init.normal_(module.in_proj_bias)
    layer = of_module(module, biases, rows)
    sources = random(2, 3, E), random(2, 4, widths[0], seed=1), random(2, 4, widths[1], seed=2)
    keys = torch.tensor([[False, True, False, False], [False, False, True, True]])
    module.double()
    for attn_mask in (None, random(3, 4) < -1, random(2 * heads, 3, 4)):
        mask = None if attn_mask is None or attn_mask.ndim == 3 else attn_mask[None]
        ours = [keys] + ([] if attn_mask is None else [attn_mask if mask is None else mask])
        floating = attn_mask is not None and attn_mask.is_floating_point()
        theirs = torch.zeros(keys.shape, dtype=DOUBLE).masked_fill(keys, -torch.inf) if floating else keys
        wanted, _ = module(*sources, key_padding_mask=theirs, attn_mask=attn_mask, need_weights=False)
        torch.testing.assert_close(run(layer, *sources, *ours), wanted, rtol=1e-6, atol=1e-6)


def of_module(module: torch.nn.MultiheadAttention, biases: bool, rows: bool) -> MultiheadAttentionLayer:
    """A layer over copies of the module's parameters."""
    descriptor = MultiheadAttentionDescriptor(
        E, module.num_heads, has_biases=biases, has_attention_biases=rows, adds_zero_attention=module.add_zero_attn
    )
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    projections = module.in_proj_weight.chunk(3) if module._qkv_same_embed_dim else separate

    def tensors(arrays: Any) -> list[sg.Tensor]:
        return [sg.Tensor(tuple(one.shape), data=one.detach().clone().contiguous()) for one in arrays]

    return MultiheadAttentionLayer(
        descriptor,
        tensors([*projections, module.out_proj.weight]),
        tensors([*module.in_proj_bias.chunk(3), module.out_proj.bias]) if biases else None,
        tensors([module.bias_k, module.bias_v]) if rows else None,
    )


def test_one_operator_attends_without_dropout() -> None:
    sources = [random(2, 3, E).float()] * 3
    for layer, training in ((attention(), True), (attention(dropout=0.5), False)):
        found = operators(layer, *sources, training=training)
        assert any("scaled_dot_product" in name for name in found)
        assert not any("softmax" in name for name in found)
    for further in ({}, {"key_value_head_count": 1}, {"window": 3}):
        found = operators(attention(causal=True, **further), *sources)
        assert any("scaled_dot_product" in name for name in found)
        assert not any("softmax" in name or "mask" in name or "arange" in name for name in found)  # no mask in memory
    found = operators(attention(dropout=0.5), *sources)
    assert {"stepgraph.keep_mask.default", "aten._softmax.default"} <= found


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_query_without_keys_gathers_nothing_and_passes_no_gradient(
    dropout: float, boolean: bool, dtype: torch.dtype
) -> None:
    layer = attention(dropout=dropout)
    sources = [random(2, 3, E, seed=seed).to(dtype).requires_grad_() for seed in range(3)]
    masked = torch.zeros(1, 3, 3, dtype=torch.bool)
    masked[0, 1] = True
    mask = masked if boolean else torch.zeros(masked.shape, dtype=dtype).masked_fill(masked, -torch.inf)
    y = run(layer, *sources, mask, training=True)
    assert layer.biases is not None
    assert torch.equal(y[:, 1], layer.biases[3].torch().to(dtype).expand(2, E))
    gradients = torch.autograd.grad(y[:, 1].sum(), sources, materialize_grads=True)
    assert not any(gradient.any() for gradient in gradients)
    gradients = torch.autograd.grad(run(layer, *sources, mask, training=True).sum(), sources)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 6])
def test_query_without_keys_gathers_nothing_in_any_kernel(boolean: bool, dtype: torch.dtype, width: int) -> None:
    layer = MultiheadAttentionLayer.create(2 * width, 2)
    arrays = {tensor: tensor.torch().to("cuda", dtype) for tensor in layer.parameters.values()}
    sources = [random(2, 24, 2 * width, seed=seed).to("cuda", dtype).requires_grad_() for seed in range(3)]
    masked = torch.zeros(4, 24, 24, dtype=torch.bool, device="cuda")
    masked[0, 3] = masked[1, 3] = masked[2:] = True
    mask = masked if boolean else torch.zeros(masked.shape, dtype=dtype, device="cuda").masked_fill(masked, -torch.inf)
    y = layer.forward(*sources, mask, scope=Scope(arrays, training=True))
    assert not y[0, 3].any()
    assert not y[1].any()
    assert y[0, :3].all()
    gradients = torch.autograd.grad(y.sum(), sources)
    assert all(gradient.isfinite().all() and not gradient[1].any() for gradient in gradients)


def test_all_keys_of_a_sample_masked_leaves_the_others_alone() -> None:
    layer, sources = attention(), [random(2, 3, E, seed=seed) for seed in range(3)]
    keys = torch.tensor([[True] * 3, [False] * 3])
    y = run(layer, *sources, keys)
    assert torch.equal(y[1], run(layer, *sources)[1])
    assert layer.biases is not None
    torch.testing.assert_close(y[0], layer.biases[3].torch().double().expand(3, E))


def test_dropout_draws_anew_each_step_and_keeps_the_average() -> None:
    layer, sources = attention(dropout=0.5), [random(2, 3, E, seed=seed) for seed in range(3)]
    arrays = {tensor: tensor.torch().double() for tensor in layer.parameters.values()}
    steps = [Scope(arrays, training=True, stream=torch.tensor([5, step])) for step in range(2000)]
    results = torch.stack([layer.forward(*sources, scope=scope) for scope in steps])
    assert not torch.equal(results[0], results[1])
    standard_error = results.std(0) / len(steps) ** 0.5
    assert ((results.mean(0) - run(layer, *sources)).abs() < 4.5 * standard_error).all()


def test_mask_of_another_floating_type_is_converted() -> None:
    sources, mask = [random(2, 3, E).float()] * 3, random(1, 3, 3)
    wanted = run(attention(), *sources, mask.float())
    assert torch.equal(run(attention(), *sources, mask), wanted)


def test_create_makes_natural_shapes() -> None:
    settings: dict[str, Any] = {"key_dimension": 16, "value_dimension": 24, "has_attention_biases": True}
    layer = MultiheadAttentionLayer.create(32, 4, key_width=20, value_width=28, label="first", **settings)
    assert [tensor.shape for tensor in layer.weights] == [(16, 32), (16, 20), (24, 28), (32, 24)]
    assert layer.biases is not None
    assert layer.attention_biases is not None
    assert [tensor.shape for tensor in layer.biases] == [(16,), (16,), (24,), (32,)]
    assert [tensor.shape for tensor in layer.attention_biases] == [(16,), (24,)]
    assert not any(tensor.numpy().any() for tensor in layer.biases)
    bound = (6 / (16 + 20)) ** 0.5
    assert 0.9 * bound < np.abs(layer.weights[1].numpy()).max() <= bound
    assert (layer.label, layer.source_widths) == ("first", (32, 20, 28))
    assert [one.tensor for one in layer.weights_parameters] == list(layer.weights)
    assert [one.tensor for one in layer.biases_parameters] == list(layer.biases)
    names = [f"weights.{i}" for i in range(4)] + [f"biases.{i}" for i in range(4)]
    assert list(layer.parameters) == [*names, "attention_biases.0", "attention_biases.1"]
    bare = MultiheadAttentionLayer.create(32, 4, has_biases=False)
    assert (bare.label, bare.biases, bare.attention_biases) == ("MultiheadAttention", None, None)
    assert bare.biases_parameters is None


def test_descriptor_fills_in_the_model_dimension() -> None:
    one = MultiheadAttentionDescriptor(12, 3)
    assert (one.key_dimension, one.value_dimension, one.dropout) == (12, 12, 0.0)
    assert (one.has_biases, one.has_attention_biases, one.adds_zero_attention) == (True, False, False)
    assert MultiheadAttentionDescriptor(5, 3, key_dimension=6, value_dimension=9).projected == (6, 6, 9, 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model_dimension": 0}, "model_dimension is 0"),
        ({"head_count": 2.0}, "head_count is 2.0"),
        ({"head_count": 5}, "5 heads do not divide key_dimension 12"),
        ({"value_dimension": 10}, "3 heads do not divide value_dimension 10"),
        ({"dropout": 1.0}, r"dropout is 1.0, not in \[0, 1\)"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"key_value_head_count": 0}, "key_value_head_count is 0"),
        ({"key_value_head_count": 2}, "2 key and value heads do not divide 3 heads"),
        ({"window": 0}, "window is 0"),
        ({"window": 2.0}, "window is 2.0"),
        ({"rotary_base": 0.0}, "rotary_base is 0.0"),
        ({"rotary_base": math.nan}, "rotary_base is nan"),
        ({"rotary_base": True}, "rotary_base is True"),
        ({"rotary_base": 10.0, "key_dimension": 9}, "3 features of a head 3 wide cannot be rotated in pairs"),
        ({"rotary_base": 10.0, "rotary_dimension": 6}, "6 features of a head 4 wide"),
        ({"rotary_base": 10.0, "rotary_dimension": 3}, "3 features of a head 4 wide"),
        ({"rotary_dimension": 2}, "rotary_dimension has no effect without rotary_base"),
        ({"rotary_interleaved": True}, "rotary_interleaved has no effect without rotary_base"),
    ],
)
def test_descriptor_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(sg.ArgumentError, match=words):
        MultiheadAttentionDescriptor(**{"model_dimension": 12, "head_count": 3, **arguments})


def zeros(*shapes: tuple[int, ...]) -> list[sg.Tensor]:
    return [sg.Tensor(shape, fill=0.0) for shape in shapes]


WEIGHTS = ((4, 4),) * 4
BIASES = ((4,),) * 4


@pytest.mark.parametrize(
    ("tensors", "settings", "error", "words"),
    [
        ((WEIGHTS[:3], BIASES), {}, sg.ArgumentError, "3 weights were passed, but 4 are needed"),
        ((WEIGHTS, None), {}, sg.ArgumentError, "0 biases were passed, but 4 are needed"),
        ((WEIGHTS, BIASES), {"has_biases": False}, sg.ArgumentError, "4 biases were passed, but 0 are needed"),
        ((WEIGHTS, BIASES, BIASES[:2]), {}, sg.ArgumentError, "2 attention biases were passed, but 0 are needed"),
        (
            (WEIGHTS, BIASES),
            {"has_attention_biases": True},
            sg.ArgumentError,
            "0 attention biases were passed, but 2",
        ),
        (
            (WEIGHTS, (*BIASES[:3], (5,))),
            {},
            sg.ShapeError,
            r"the biases hold \[4, 4, 4, 5\] numbers, not \[4, 4, 4, 4\]",
        ),
        (
            ((*WEIGHTS[:3], (4, 5)), BIASES),
            {},
            sg.ShapeError,
            r"the output weights hold 20 numbers, but need \[4, 4\]",
        ),
        ((((4, 6), *WEIGHTS[1:]), BIASES), {}, sg.ShapeError, "the query weights hold 24 numbers"),
        (((WEIGHTS[0], (3, 3), *WEIGHTS[2:]), BIASES), {}, sg.ShapeError, "the key weights hold 9 numbers"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tensors: tuple[Any, ...], settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        MultiheadAttentionLayer(
            MultiheadAttentionDescriptor(4, 2, **settings), *(None if one is None else zeros(*one) for one in tensors)
        )


def test_data_types_it_supports() -> None:
    supported = {one for one in sg.DataType if MultiheadAttentionLayer.supports_data_type(one)}
    assert {sg.DataType.FLOAT32, sg.DataType.BOOLEAN} <= supported
    assert sg.DataType.INT32 not in supported


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_training_learns_with_a_mask_in_phases_and_at_once(dropout: float) -> None:
    generator = np.random.default_rng(1)
    x = generator.standard_normal((4, 5, 8)).astype(np.float32)
    masked = np.arange(5)[None] >= np.array([5, 4, 3, 0])[:, None]  # the last sample has no key at all
    data, labels = {"x": x, "masked": masked}, {"y": np.roll(x, 1, 2)}
    whole, parted = Sequences(dropout), Sequences(dropout)
    losses = [whole.training.execute(data, labels).loss for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    bound = {"x": parted.x, "masked": parted.masked, "y": parted.y}
    for wanted in losses[:4]:
        parted.training.bind_and_write_data(data | labels, bound, sg.Device.cpu())
        assert parted.training.execute_forward().loss == wanted
        parted.training.execute_gradient()
        parted.training.execute_optimizer_update()


class Sequences:
    """Self-attention over sequences with a key mask, learning to give each row back, rolled."""

    def __init__(self, dropout: float) -> None:
        sg.set_seed(2)
        self.x, self.y, self.masked = sg.Tensor((4, 5, 8)), sg.Tensor((4, 5, 8)), sg.Tensor((4, 5), "boolean")
        graph = sg.Graph()
        graph.node(MultiheadAttentionLayer.create(8, 2, dropout=dropout), self.x, self.x, self.x, self.masked)
        optimizer = sg.AdamOptimizer(learning_rate=0.03)
        self.training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), optimizer)
        self.training.add_inputs({"x": self.x, "masked": self.masked}, {"y": self.y})
        self.training.compile(sg.Device.cpu())


def llama(compute_type: str | None = None) -> tuple[sg.TrainingGraph, MultiheadAttentionLayer]:
    """Causal grouped attention with rotary positions, learning to give the previous row back."""
    sg.set_seed(2)
    x, y, graph = sg.Tensor((4, 6, 16)), sg.Tensor((4, 6, 16)), sg.Graph()
    layer = MultiheadAttentionLayer.create(
        16, 4, key_value_head_count=2, causal=True, window=4, rotary_base=100.0, has_biases=False
    )
    out = graph.node(layer, x, x, x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(learning_rate=0.03))
    training.add_inputs({"x": x}, {"y": y})
    training.add_outputs({"out": out})
    training.compile(sg.Device.cpu(), compute_type=compute_type)
    return training, layer


def test_modern_attention_trains_sees_no_future_and_is_loaded(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    x = generator.standard_normal((4, 6, 16)).astype(np.float32)
    labels = np.roll(x, 1, 1)
    labels[:, 0] = 0
    training, layer = llama()
    losses = [training.execute({"x": x}, {"y": labels}).loss for _ in range(30)]
    assert losses[-1] < 0.6 * losses[0]
    sg.save(tmp_path / "model", training)
    loaded = sg.load(tmp_path / "model")
    assert loaded.layers[0].descriptor == layer.descriptor  # type: ignore[attr-defined]
    loaded.compile(sg.Device.cpu())
    assert loaded.execute({"x": x}, {"y": labels}).loss == training.execute({"x": x}, {"y": labels}).loss
    changed = x.copy()
    changed[:, 4:] = 9  # nothing before step 4 depends on it
    before = run(layer, *[torch.from_numpy(x)] * 3)
    after = run(layer, *[torch.from_numpy(changed)] * 3)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


@pytest.mark.deep
def test_modern_attention_learns_alike_in_mixed_precision() -> None:
    x = np.random.default_rng(1).standard_normal((4, 6, 16)).astype(np.float32)
    runs = [llama(kind)[0] for kind in (None, "bfloat16")]
    plain, mixed = ([one.execute({"x": x}, {"y": np.roll(x, 1, 2)}).loss for _ in range(30)] for one in runs)
    assert mixed == pytest.approx(plain, rel=0.1)


Drawn = tuple[MultiheadAttentionLayer, list[torch.Tensor], bool]


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Any legal small attention, sources for it, and whether it trains."""
    few = st.integers(1, 3)
    groups, batch, queries, keys, model = draw(few), draw(few), draw(few), draw(few), draw(st.integers(1, 4))
    heads = groups * draw(st.integers(1, 2))
    causal, window = draw(st.booleans()), draw(st.sampled_from([None, 1, 2]))
    queries = keys if causal or window else queries
    rotary = {"rotary_base": 7.0, "rotary_interleaved": draw(st.booleans())} if draw(st.booleans()) else {}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    layer = MultiheadAttentionLayer.create(
        model,
        heads,
        key_dimension=heads * (2 * draw(st.integers(1, 2)) if rotary else draw(few)),
        value_dimension=heads * draw(few),
        key_width=draw(few),
        value_width=draw(few),
        dropout=draw(st.sampled_from([0.0, 0.3])),
        has_biases=draw(st.booleans()),
        has_attention_biases=draw(st.booleans()),
        adds_zero_attention=draw(st.booleans()),
        initializer=sg.RandomInitializerType.UNIFORM,
        key_value_head_count=groups,
        causal=causal,
        window=window,
        **rotary,
    )
    shapes = zip((queries, keys, keys), layer.source_widths, strict=True)
    sources = [torch.randn(batch, *shape, generator=generator, dtype=DOUBLE) for shape in shapes]
    if draw(st.booleans()):
        sources.append(torch.rand(batch, keys, generator=generator) < 0.4)
    if draw(st.booleans()):
        mask = torch.randn(
            draw(st.sampled_from([1, batch, batch * heads])), queries, keys, generator=generator, dtype=DOUBLE
        )
        sources.append(mask if draw(st.booleans()) else mask < 0)
    return layer, sources, draw(st.booleans())


def check_any(layer: MultiheadAttentionLayer, sources: list[torch.Tensor], training: bool) -> None:
    one = layer.descriptor
    descriptors = [sg.TensorDescriptor(tuple(x.shape), "float32" if x.is_floating_point() else "bool") for x in sources]  # type: ignore[arg-type]
    y = run(layer, *sources, training=training)
    assert layer.infer(*descriptors)[0].shape == tuple(y.shape)
    tensors = {
        name: [tensor.numpy().astype(np.float64) for tensor in found]
        for name in ("weights", "biases", "attention_biases")
        if (found := getattr(layer, name)) is not None
    }
    width = one.key_dimension // one.head_count
    still = one.rotary_base is None
    wanted = attended(
        groups=one.key_value_head_count,
        sees=lambda i, j: (j <= i or not one.causal) and (one.window is None or abs(i - j) < one.window),
        turn=turned(one.rotary_base or 1.0, 0 if still else width, one.rotary_interleaved),
        heads=one.head_count,
        zero=one.adds_zero_attention,
        rate=one.dropout if training else 0.0,
        key=one.key_dimension,
        value=one.value_dimension,
    )(*(x.numpy() for x in sources), **tensors)
    np.testing.assert_allclose(y.detach().numpy(), wanted, rtol=1e-9, atol=1e-10)


@given(drawn())
@settings(max_examples=25, deadline=None)
def test_any_setting(one: Drawn) -> None:
    check_any(*one)


@pytest.mark.deep
@given(drawn())
@settings(max_examples=300, deadline=None)
def test_any_setting_deep(one: Drawn) -> None:
    check_any(*one)
