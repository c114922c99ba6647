"""The models as PyTorch modules, written as PyTorch programs usually write them. They are the peers.

Every model takes its inputs in the order of `data.py` and returns logits. Under autocast the residual stream of a
transformer is float32, because embeddings are; with `stream=torch.bfloat16` it is cast once, behind them.
"""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Array = torch.Tensor
FULL = torch.float32
STAGES = ((3, 1), (4, 2), (6, 2), (3, 2))  # of ResNet-50: blocks, and the stride of the first


class Attention(nn.Module):
    """Self-attention with one product for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.joint, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Array, seen: Array | None = None) -> Array:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.joint(x).chunk(3, -1))
        gathered = F.scaled_dot_product_attention(q, k, v, seen, is_causal=self.causal)
        return self.output(gathered.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two fully connected layers, each beside a shortcut; normalized first, or last as in BERT."""

    def __init__(self, width: int, heads: int, epsilon: float, gelu: str, causal: bool = False, last: bool = False):
        super().__init__()
        self.last = last
        self.attention = Attention(width, heads, causal)
        self.norm1, self.norm2 = (nn.LayerNorm(width, epsilon) for _ in range(2))
        self.full1, self.full2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu = nn.GELU(gelu)

    def forward(self, x: Array, seen: Array | None = None) -> Array:
        if self.last:
            x = self.norm1(x + self.attention(x, seen))
            return self.norm2(x + self.full2(self.gelu(self.full1(x))))
        x = x + self.attention(self.norm1(x), seen)
        return x + self.full2(self.gelu(self.full1(self.norm2(x))))


class LanguageModel(nn.Module):
    """Tokens with learned positions, blocks, and a head tied to the embedding."""

    block: Mapping[str, Any]
    head_biases: bool

    def __init__(
        self, vocabulary: int, steps: int, width: int, depth: int, heads: int, stream: torch.dtype = FULL
    ) -> None:
        super().__init__()
        self.stream = stream
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.empty(steps, width))
        self.blocks = nn.ModuleList(Block(width, heads, **self.block) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=self.head_biases)
        self.head.weight = self.tokens.weight


class GPT2(LanguageModel):
    """GPT-2: normalization first."""

    block: Mapping[str, Any] = {"epsilon": 1e-5, "gelu": "tanh", "causal": True}
    head_biases = False

    def __init__(self, *, width: int, **others: Any) -> None:
        super().__init__(width=width, **others)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Array) -> Array:
        x = (self.tokens(tokens) + self.positions).to(self.stream)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class BERT(LanguageModel):
    """BERT with its masked-language-model head, over all tokens; one kind of segment."""

    block: Mapping[str, Any] = {"epsilon": 1e-12, "gelu": "none", "last": True}
    head_biases = True

    def __init__(self, *, width: int, **others: Any) -> None:
        super().__init__(width=width, **others)
        self.segment = nn.Parameter(torch.empty(width))
        self.norm = nn.LayerNorm(width, 1e-12)
        self.full, self.gelu, self.norm_head = nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, 1e-12)

    def forward(self, tokens: Array, hidden: Array) -> Array:
        x = self.norm(self.tokens(tokens) + self.positions + self.segment).to(self.stream)
        for block in self.blocks:
            x = block(x, ~hidden[:, None, None])
        return self.head(self.norm_head(self.gelu(self.full(x))))


class ViT(nn.Module):
    """A vision transformer: patches as tokens, and one more that is classified."""

    def __init__(
        self,
        patches: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        classes: int,
        stream: torch.dtype = FULL,
    ) -> None:
        super().__init__()
        self.stream = stream
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(patches**2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads, 1e-6, "none") for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width, 1e-6), nn.Linear(width, classes)

    def forward(self, pictures: Array) -> Array:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = (torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions).to(self.stream)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class RotaryAttention(nn.Module):
    """Causal attention with rotary positions, whose keys and values have fewer heads than the queries."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, size = heads, shared, width // heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, outputs, bias=False) for outputs in (width, shared * size, shared * size, width)
        )

    def forward(self, x: Array, cosine: Array, sine: Array) -> Array:
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part(x).unflatten(-1, (self.shared, -1)).transpose(1, 2) for part in (self.key, self.value))
        q, k = (rotated(part, cosine, sine).type_as(v) for part in (q, k))
        gathered = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(gathered.transpose(1, 2).flatten(2))


def rotated(x: Array, cosine: Array, sine: Array) -> Array:
    """Pairs of features `(i, i + half)`, turned by their angles."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


class LlamaBlock(nn.Module):
    """Rotary attention and SwiGLU, each beside a shortcut, normalized first."""

    def __init__(self, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.attention = RotaryAttention(width, heads, shared)
        self.norm1, self.norm2 = (nn.RMSNorm(width, 1e-5) for _ in range(2))
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, inner), (width, inner), (inner, width))
        )

    def forward(self, x: Array, cosine: Array, sine: Array) -> Array:
        x = x + self.attention(self.norm1(x), cosine, sine)
        inner = self.norm2(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    """A language model as Llama: RMS normalization, rotary positions, SwiGLU, grouped heads, no biases."""

    cosine: Array
    sine: Array

    def __init__(
        self,
        vocabulary: int,
        steps: int,
        width: int,
        depth: int,
        heads: int,
        shared: int,
        inner: int,
        stream: torch.dtype = FULL,
    ) -> None:
        super().__init__()
        self.stream = stream
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, shared, inner) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width, 1e-5), nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.arange(steps)[:, None] * 10_000.0 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Array) -> Array:
        x = self.tokens(tokens).to(self.stream)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    """Three convolutions through a narrow middle, beside a shortcut; the stride is in the second."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = normalized(inputs, width, 1)
        self.conv2, self.norm2 = normalized(width, width, 3, stride)
        self.conv3, self.norm3 = normalized(width, 4 * width, 1)
        self.relu = nn.ReLU()
        self.shortcut = None
        if stride > 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(*normalized(inputs, 4 * width, 1, stride))

    def forward(self, x: Array) -> Array:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(self.relu(self.norm2(self.conv2(y)))))
        return self.relu(y + (x if self.shortcut is None else self.shortcut(x)))


def normalized(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """A convolution without biases, and the batch normalization behind it."""
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)


class ResNet50(nn.Module):
    """ResNet-50; `width` is 64."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = normalized(3, width, 7, 2)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        blocks, inputs = list[nn.Module](), width
        for stage, (count, stride) in enumerate(STAGES):
            for i in range(count):
                blocks.append(Bottleneck(inputs, width << stage, 1 if i else stride))
                inputs = 4 * width << stage
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(inputs, classes)

    def forward(self, pictures: Array) -> Array:
        x = self.pool(self.relu(self.norm(self.stem(pictures))))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Twice(nn.Module):
    """Two convolutions with batch normalization and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = normalized(inputs, outputs, 3)
        self.conv2, self.norm2 = normalized(outputs, outputs, 3)
        self.relu = nn.ReLU()

    def forward(self, x: Array) -> Array:
        return self.relu(self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """U-Net with batch normalization: down to small pictures and up again; every pixel gets a class."""

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(Twice(a, b) for a, b in pairwise([3, *widths]))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(Twice(2 * one, one) for one in widths[:-1])
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(width, classes, 1)

    def forward(self, pictures: Array) -> Array:
        x, kept = self.down[0](pictures), list[Array]()
        for down in self.down[1:]:
            kept.append(x)
            x = down(self.pool(x))
        for grow, up in zip(reversed(self.grow), reversed(self.up), strict=True):
            x = up(torch.cat([kept.pop(), grow(x)], 1))
        return self.head(x)


KINDS: dict[str, Callable[..., nn.Module]] = {
    "gpt2": GPT2,
    "llama": Llama,
    "bert": BERT,
    "vit": ViT,
    "resnet50": ResNet50,
    "unet": UNet,
}


def module(kind: str, device: str, **sizes: Any) -> nn.Module:
    """A model at its first weights, the same at every call on one kind of device."""
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        made = KINDS[kind](**sizes)
        for name, one in made.named_parameters():
            if name.endswith("bias"):
                one.zero_()
            elif name.endswith("norm3.weight"):
                one.zero_()  # each block starts as its shortcut, without which float32 gradients are mostly rounding
            elif one.ndim > 1 or name == "segment":
                inputs = one.numel() // (len(one) if one.ndim > 1 else 1)
                one.normal_(std=math.sqrt((2 if one.ndim == 4 else 0.3) / inputs))  # 0.02 for 768 features
    return made


def loss(logits: Array, labels: Array) -> Array:
    """The mean cross entropy of all labels but -100; classes are last in sequences, second in pictures."""
    return (
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()) if logits.ndim == 3 else F.cross_entropy(logits, labels)
    )
