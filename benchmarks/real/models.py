"""The models that are measured: sizes, batches, and how many operations a step takes.

To add a model, write it in `modules.py` and in `graphs.py`, and add a row to `MODELS` and to `SMALL`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.real import data
from benchmarks.real.modules import Attention, RotaryAttention, module

DATA: dict[str, Callable[..., data.Batch]] = {
    "gpt2": data.text,
    "llama": data.text,
    "bert": data.masked_text,
    "vit": data.pictures,
    "resnet50": data.pictures,
    "unet": data.segments,
}


@dataclass(frozen=True)
class Model:
    """A kind of model with its sizes, and the batch of a step.

    Example:
        >>> MODELS["gpt2"].parameter_count
        124475904
    """

    kind: str
    batch_size: int
    sizes: Mapping[str, int]
    pixels: int = 0  # of a side of the pictures
    learning_rate: float = 3e-4

    def of_batch(self, size: int | None) -> "Model":
        """The same model with another batch size, if there is one."""
        return replace(self, batch_size=size) if size else self

    @property
    def unit(self) -> str:
        """What a step's rate counts."""
        return "images" if self.pixels else "tokens"

    @property
    def units(self) -> int:
        """How many of them a batch has."""
        return self.batch_size * (1 if self.pixels else self.sizes["steps"])

    @property
    def parameter_count(self) -> int:
        """Numbers that are trained."""
        return sum(one.numel() for one in self.module("meta").parameters())

    @property
    def ignored(self) -> int | None:
        """The label of tokens without a loss."""
        return data.IGNORED if self.kind == "bert" else None

    def module(self, device: str, **more: Any) -> nn.Module:
        """The PyTorch module at its first weights, the same at every call on one kind of device."""
        return module(self.kind, device, **self.sizes, **more)

    def batch(self, step: int, device: str) -> data.Batch:
        """Inputs by name and labels of one step, the same at every call on one kind of device."""
        names = ("classes",) if self.pixels else ("steps", "vocabulary")
        sizes = {name: self.sizes[name] for name in names} | ({"pixels": self.pixels} if self.pixels else {})
        return DATA[self.kind](torch.Generator(device).manual_seed(step), self.batch_size, **sizes)

    @property
    def flops(self) -> int:
        """Operations of one step by the usual formula: three times those of the forward pass.

        Counted are `2 w` for every place at which `w` weights of a linear layer or a convolution are applied, and
        `4 t² d` for attention between `t` tokens with `d` features, half of it if it is causal. Embeddings,
        element-wise functions and the optimizer count as nothing.
        """
        made, found, one_sample = self.module("meta"), list[int](), self.of_batch(1)
        for one in made.modules():
            if type(one) in _COUNTS:
                one.register_forward_hook(lambda own, x, y: found.append(_COUNTS[type(own)](own, x[0], y)))
        made(*(torch.empty_like(one, device="meta") for one in one_sample.batch(0, "cpu")[0].values()))
        return 3 * sum(found) * self.batch_size


def _attention(own: Any, x: torch.Tensor, _: torch.Tensor) -> int:
    batch, steps, width = x.shape
    return 4 * batch * steps**2 * width // (2 if getattr(own, "causal", True) else 1)


def _places(of_input: bool) -> Callable[[Any, torch.Tensor, torch.Tensor], int]:
    def count(own: Any, x: torch.Tensor, y: torch.Tensor) -> int:
        array = x if of_input else y
        channels = array.shape[-1 if isinstance(own, nn.Linear) else 1]
        return 2 * own.weight.numel() * (array.numel() // channels)

    return count


_COUNTS: dict[type[nn.Module], Callable[[Any, torch.Tensor, torch.Tensor], int]] = {
    nn.Linear: _places(of_input=False),
    nn.Conv2d: _places(of_input=False),
    nn.ConvTranspose2d: _places(of_input=True),
    Attention: _attention,
    RotaryAttention: _attention,
}

_GPT2 = {"vocabulary": 50_304, "steps": 1024, "width": 768, "depth": 12, "heads": 12}  # 50,257 tokens, padded
_LLAMA = {"vocabulary": 32_000, "steps": 2048, "width": 1024, "depth": 24, "heads": 16, "shared": 8, "inner": 2816}
_BERT = {"vocabulary": 30_522, "steps": 512, "width": 768, "depth": 12, "heads": 12}
_VIT = {"patches": 14, "patch": 16, "width": 768, "depth": 12, "heads": 12, "classes": 1000}

MODELS: dict[str, Model] = {
    "gpt2": Model("gpt2", 16, _GPT2),
    "gpt2-64": Model("gpt2", 64, _GPT2),
    "llama": Model("llama", 8, _LLAMA),
    "bert": Model("bert", 32, _BERT, learning_rate=1e-4),
    "vit": Model("vit", 128, _VIT, 224),
    "resnet50": Model("resnet50", 256, {"width": 64, "classes": 1000}, 224, learning_rate=1e-3),
    "unet": Model("unet", 32, {"width": 64, "levels": 4, "classes": 21}, 256),
}

# The same models, so small that they run in no time; they prove that both forms of a model are the same.
SMALL: dict[str, Model] = {
    "gpt2": Model("gpt2", 2, {"vocabulary": 20, "steps": 6, "width": 8, "depth": 2, "heads": 2}),
    "llama": Model(
        "llama", 2, {"vocabulary": 20, "steps": 6, "width": 16, "depth": 1, "heads": 4, "shared": 2, "inner": 12}
    ),
    "bert": Model("bert", 3, {"vocabulary": 20, "steps": 12, "width": 8, "depth": 1, "heads": 2}),
    "vit": Model("vit", 2, {"patches": 3, "patch": 4, "width": 8, "depth": 1, "heads": 2, "classes": 5}, 12),
    "resnet50": Model("resnet50", 8, {"width": 2, "classes": 5}, 64),
    "unet": Model("unet", 2, {"width": 2, "levels": 1, "classes": 3}, 16),
}
