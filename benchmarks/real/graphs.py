"""The models wired from stepgraph's own layers, with the weights of the PyTorch module, by its names."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

import stepgraph as sg
from benchmarks.real.modules import STAGES

State = Mapping[str, torch.Tensor]


class Wiring:
    """A graph whose layers take their tensors from a module's `state_dict`, by the path of the submodule.

    `trained` has parameters that belong to no layer; they are inputs of the training graph.
    """

    def __init__(self, state: State) -> None:
        self.graph, self.trained = sg.Graph(), dict[str, sg.Tensor]()
        self._state, self._made = state, dict[str, list[sg.Tensor]]()
        self._transposed = set[str]()

    def values(self, read: Callable[[sg.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """What `read` finds for every tensor, by the module's names; entries that share memory appear once."""
        joined = {name: torch.cat([read(one).detach().cpu() for one in made]) for name, made in self._made.items()}
        return {name: one.transpose(0, 1) if name in self._transposed else one for name, one in joined.items()}

    def tensors(self, name: str, parts: int = 1) -> list[sg.Tensor]:
        """The tensors of an entry, cut along its rows; the same ones for entries that share memory."""
        array = self._state[name]
        name = next((own for own in self._made if self._state[own].data_ptr() == array.data_ptr()), name)
        if name not in self._made:
            array = array.transpose(0, 1) if name in self._transposed else array
            rows = np.split(array.detach().cpu().contiguous().numpy(), parts)
            self._made[name] = [sg.Tensor(one.shape, data=one) for one in rows]
        return self._made[name]

    def tensor(self, name: str) -> sg.Tensor:
        return self.tensors(name)[0]

    def biases(self, path: str) -> sg.Tensor | None:
        return self.tensor(f"{path}.bias") if f"{path}.bias" in self._state else None

    def add_trained(self, x: sg.Tensor, name: str) -> sg.Tensor:
        """`x` plus a parameter that belongs to no layer."""
        return self.graph.add(x, self.trained_input(name))

    def trained_input(self, name: str) -> sg.Tensor:
        self.trained[name] = self.tensor(name)
        return self.trained[name]

    def linear(self, x: sg.Tensor, path: str) -> sg.Tensor:
        weights = self.tensor(f"{path}.weight")
        descriptor = sg.ConvolutionDescriptor(1, weights.shape[1], weights.shape[0])
        return self.graph.node(sg.FullyConnectedLayer(weights, self.biases(path), descriptor, label=path), x)

    def embedding(self, x: sg.Tensor, path: str) -> sg.Tensor:
        weights = self.tensor(f"{path}.weight")
        return self.graph.node(sg.EmbeddingLayer(sg.EmbeddingDescriptor(*weights.shape), weights, label=path), x)

    def layer_norm(self, x: sg.Tensor, path: str, epsilon: float) -> sg.Tensor:
        gamma, beta = self.tensor(f"{path}.weight"), self.tensor(f"{path}.bias")
        return self.graph.node(sg.LayerNormalizationLayer(gamma.shape, beta, gamma, epsilon, label=path), x)

    def rms_norm(self, x: sg.Tensor, path: str) -> sg.Tensor:
        gamma = self.tensor(f"{path}.weight")
        return self.graph.node(sg.RMSNormalizationLayer(gamma.shape, gamma, 1e-5, label=path), x)

    def attention(self, x: sg.Tensor, path: str, heads: int, *masks: sg.Tensor, causal: bool = False) -> sg.Tensor:
        weights, biases = (
            [*self.tensors(f"{path}.joint.{kind}", 3), self.tensor(f"{path}.output.{kind}")]
            for kind in ("weight", "bias")
        )
        descriptor = sg.MultiheadAttentionDescriptor(x.shape[-1], heads, causal=causal)
        layer = sg.MultiheadAttentionLayer(descriptor, weights, biases, label=path)
        return self.graph.node(layer, x, x, x, *masks)

    def rotary_attention(self, x: sg.Tensor, path: str, heads: int, shared: int) -> sg.Tensor:
        weights = [self.tensor(f"{path}.{part}.weight") for part in ("query", "key", "value", "output")]
        descriptor = sg.MultiheadAttentionDescriptor(
            x.shape[-1], heads, key_value_head_count=shared, causal=True, rotary_base=10_000.0, has_biases=False
        )
        return self.graph.node(sg.MultiheadAttentionLayer(descriptor, weights, label=path), x, x, x)

    def block(self, x: sg.Tensor, path: str, heads: int, epsilon: float, causal: bool = False) -> sg.Tensor:
        """A transformer block with normalization first, as `modules.Block`; GELU by tanh where it is causal."""
        graph, gelu = self.graph, self.graph.gelu if causal else self.graph.gelu_erf
        inner = self.layer_norm(x, f"{path}.norm1", epsilon)
        x = graph.add(x, self.attention(inner, f"{path}.attention", heads, causal=causal))
        inner = self.linear(self.layer_norm(x, f"{path}.norm2", epsilon), f"{path}.full1")
        return graph.add(x, self.linear(gelu(inner), f"{path}.full2"))

    def convolution(self, x: sg.Tensor, path: str, stride: int = 1, padding: int | None = None) -> sg.Tensor:
        outputs, inputs, size, _ = (weights := self.tensor(f"{path}.weight")).shape
        border = size // 2 if padding is None else padding
        descriptor = sg.ConvolutionDescriptor(
            size,
            inputs,
            outputs,
            strides=stride,
            padding_policy=sg.PaddingPolicy.USE_PADDING_SIZE,
            padding_sizes=border,
        )
        return self.graph.node(sg.ConvolutionLayer(weights, self.biases(path), descriptor, label=path), x)

    def grown(self, x: sg.Tensor, path: str) -> sg.Tensor:
        """A transposed convolution that doubles pictures."""
        self._transposed.add(f"{path}.weight")  # PyTorch's are [inputs, outputs, height, width]
        outputs, inputs, *_ = (weights := self.tensor(f"{path}.weight")).shape
        descriptor = sg.ConvolutionDescriptor.transposed(2, inputs, outputs, strides=2)
        return self.graph.node(sg.ConvolutionLayer(weights, self.biases(path), descriptor, label=path), x)

    def batch_norm(self, x: sg.Tensor, path: str) -> sg.Tensor:
        channels = x.shape[1]
        mean, variance = (sg.Tensor((channels,), fill=value) for value in (0.0, 1.0))
        gamma, beta = self.tensor(f"{path}.weight"), self.tensor(f"{path}.bias")
        layer = sg.BatchNormalizationLayer(channels, mean, variance, beta, gamma, 1e-5, 0.9, label=path)
        return self.graph.node(layer, x)


def gpt2(on: Wiring, tokens: sg.Tensor, *, depth: int, heads: int, **_: int) -> sg.Tensor:
    """As `modules.GPT2`."""
    x = on.add_trained(on.embedding(tokens, "tokens"), "positions")
    for i in range(depth):
        x = on.block(x, f"blocks.{i}", heads, 1e-5, causal=True)
    return on.linear(on.layer_norm(x, "norm", 1e-5), "head")


def llama(on: Wiring, tokens: sg.Tensor, *, depth: int, heads: int, shared: int, **_: int) -> sg.Tensor:
    """As `modules.Llama`."""
    x = on.embedding(tokens, "tokens")
    for i in range(depth):
        path = f"blocks.{i}"
        inner = on.rotary_attention(on.rms_norm(x, f"{path}.norm1"), f"{path}.attention", heads, shared)
        x = on.graph.add(x, inner)
        weights = [on.tensor(f"{path}.{part}.weight") for part in ("gate", "up", "down")]
        inner = on.graph.node(sg.GatedFeedForwardLayer(weights, label=path), on.rms_norm(x, f"{path}.norm2"))
        x = on.graph.add(x, inner)
    return on.linear(on.rms_norm(x, "norm"), "head")


def bert(on: Wiring, tokens: sg.Tensor, hidden: sg.Tensor, *, depth: int, heads: int, **_: int) -> sg.Tensor:
    """As `modules.BERT`."""
    graph = on.graph
    x = on.add_trained(on.add_trained(on.embedding(tokens, "tokens"), "positions"), "segment")
    x = on.layer_norm(x, "norm", 1e-12)
    for i in range(depth):
        path = f"blocks.{i}"
        x = graph.add(x, on.attention(x, f"{path}.attention", heads, hidden))
        x = on.layer_norm(x, f"{path}.norm1", 1e-12)
        inner = on.linear(graph.gelu_erf(on.linear(x, f"{path}.full1")), f"{path}.full2")
        x = on.layer_norm(graph.add(x, inner), f"{path}.norm2", 1e-12)
    return on.linear(on.layer_norm(graph.gelu_erf(on.linear(x, "full")), "norm_head", 1e-12), "head")


def vit(on: Wiring, pictures: sg.Tensor, *, patch: int, width: int, depth: int, heads: int, **_: int) -> sg.Tensor:
    """As `modules.ViT`.

    No layer repeats a tensor for every picture of a batch, so the token that is classified is added to a row of zeros.
    """
    graph = on.graph
    patches = on.convolution(pictures, "patches", patch, padding=0)
    count, batch = patches.shape[2] * patches.shape[3], patches.shape[0]
    rows = graph.transpose((0, 2, 1), graph.reshape((batch, width, count), patches))
    rows = graph.zero_padding(graph.reshape((batch, 1, count, width), rows), (1, 0, 0, 0))
    token = graph.zero_padding(graph.reshape((1, 1, 1, width), on.trained_input("token")), (0, count, 0, 0))
    x = graph.reshape((batch, count + 1, width), graph.add(rows, token))
    x = on.add_trained(x, "positions")
    for i in range(depth):
        x = on.block(x, f"blocks.{i}", heads, 1e-6)
    first = graph.slice(x, (0, 0, 0), (batch, 1, width))
    return on.linear(on.layer_norm(graph.reshape((batch, width), first), "norm", 1e-6), "head")


def resnet50(on: Wiring, pictures: sg.Tensor, **_: int) -> sg.Tensor:
    """As `modules.ResNet50`."""
    graph = on.graph

    def bottleneck(x: sg.Tensor, path: str, stride: int, turns: bool) -> sg.Tensor:
        y = graph.relu(on.batch_norm(on.convolution(x, f"{path}.conv1"), f"{path}.norm1"))
        y = graph.relu(on.batch_norm(on.convolution(y, f"{path}.conv2", stride), f"{path}.norm2"))
        y = on.batch_norm(on.convolution(y, f"{path}.conv3"), f"{path}.norm3")
        if turns:
            x = on.batch_norm(on.convolution(x, f"{path}.shortcut.0", stride), f"{path}.shortcut.1")
        return graph.relu(graph.add(y, x))

    x = graph.relu(on.batch_norm(on.convolution(pictures, "stem", 2), "norm"))
    x = graph.max_pooling(x, 3, 2, padding_sizes=1)
    strides = [1 if i else stride for count, stride in STAGES for i in range(count)]
    firsts = {sum(count for count, _ in STAGES[:stage]) for stage in range(len(STAGES))}
    for i, stride in enumerate(strides):
        x = bottleneck(x, f"blocks.{i}", stride, i in firsts)
    return on.linear(graph.reshape(x.shape[:2], graph.mean(x, (2, 3))), "head")


def unet(on: Wiring, pictures: sg.Tensor, *, levels: int, **_: int) -> sg.Tensor:
    """As `modules.UNet`."""
    graph = on.graph

    def twice(x: sg.Tensor, path: str) -> sg.Tensor:
        for i in (1, 2):
            x = graph.relu(on.batch_norm(on.convolution(x, f"{path}.conv{i}"), f"{path}.norm{i}"))
        return x

    x, kept = twice(pictures, "down.0"), list[sg.Tensor]()
    for level in range(levels):
        kept.append(x)
        x = twice(graph.max_pooling(x, 2), f"down.{level + 1}")
    for level in reversed(range(levels)):
        x = twice(graph.concatenate([kept.pop(), on.grown(x, f"grow.{level}")]), f"up.{level}")
    return on.convolution(x, "head")


KINDS: dict[str, Callable[..., sg.Tensor]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "resnet50": resnet50,
    "unet": unet,
}
