"""Small models with random weights, as people write them: transformers' own, and networks of torch.nn alone.

Each row makes a model and the arrays of one batch. Dropout is off where numbers are compared with PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ROWS = 4


@dataclass(frozen=True)
class Case:
    """A model to import.

    Args:
        make: returns the model.
        inputs: returns the arrays of one batch by name.
        output: the path of the result that is trained.
        classes: the number of classes of the labels, or None for a mean squared error.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    output: str = "logits"
    classes: int | None = None


def _hf(name: str) -> Any:
    return getattr(pytest.importorskip("transformers"), name)


def tokens(length: int = 8, words: int = 50, name: str = "input_ids") -> dict[str, torch.Tensor]:
    return {name: torch.randint(1, words, (ROWS, length))}


def images(size: int = 16, channels: int = 3, name: str = "pixel_values") -> dict[str, torch.Tensor]:
    return {name: torch.randn(ROWS, channels, size, size)}


def gpt2(**settings: Any) -> nn.Module:
    given = dict(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
    off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _hf("GPT2LMHeadModel")(_hf("GPT2Config")(**{**given, **off, **settings}))


def llama() -> nn.Module:
    config = _hf("LlamaConfig")(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return _hf("LlamaForCausalLM")(config)


def bert() -> nn.Module:
    config = _hf("BertConfig")(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=50,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return _hf("BertForSequenceClassification")(config)


def padded() -> dict[str, torch.Tensor]:
    lengths = torch.tensor([8, 5, 7, 3])
    return {**tokens(), "attention_mask": (torch.arange(8) < lengths[:, None]).long()}


def vit() -> nn.Module:
    config = _hf("ViTConfig")(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return _hf("ViTForImageClassification")(config)


def resnet() -> nn.Module:
    config = _hf("ResNetConfig")(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=3
    )
    return _hf("ResNetForImageClassification")(config)


def t5() -> nn.Module:
    config = _hf("T5Config")(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=50, dropout_rate=0.0, pad_token_id=0
    )
    return _hf("T5ForConditionalGeneration")(config)


def mamba() -> nn.Module:
    config = _hf("MambaConfig")(hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=50, pad_token_id=0)
    return _hf("MambaForCausalLM")(config)


def whisper_encoder() -> nn.Module:
    config = _hf("WhisperConfig")(
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=6,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    return _hf("WhisperModel")(config).get_encoder()


def convnext() -> nn.Module:
    config = _hf("ConvNextConfig")(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2, num_labels=3)
    return _hf("ConvNextForImageClassification")(config)


def swin() -> nn.Module:
    config = _hf("SwinConfig")(
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=3,
    )
    return _hf("SwinForImageClassification")(config)


class Squeeze(nn.Module):
    """Squeeze and excitation, as in MobileNetV3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 2, 1), nn.Conv2d(channels // 2, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.up(F.relu(self.down(scale))))


class Inverted(nn.Module):
    """An inverted residual of MobileNetV3."""

    def __init__(self, channels: int, wide: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(True),
        )
        self.squeeze = Squeeze(wide)
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(self.squeeze(self.depth(self.expand(x))))
        y += x
        return y


class MobileNet(nn.Module):
    """A MobileNetV3 of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())
        self.blocks = nn.Sequential(Inverted(8, 16), Inverted(8, 24))
        self.classifier = nn.Linear(8, 3)

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.blocks(self.stem(pixel_values))
        return {"logits": self.classifier(x.mean((2, 3)))}


class UNet(nn.Module):
    """A U-Net with one skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True))
        self.bottom = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        skip = self.down(pixel_values)
        x = self.up(self.bottom(F.max_pool2d(skip, 2)))
        return self.last(torch.cat([x, skip], dim=1))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(50, 16), nn.Parameter(torch.randn(8, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], device=input_ids.device)
        x = self.encoder(self.embed(input_ids) + self.places, mask=mask, is_causal=True)
        return self.head(x), None


class Recurrent(nn.Module):
    """A stack of `nn.LSTM`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(50, 8), nn.LSTM(8, 12, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        y, (h, c) = self.lstm(self.embed(input_ids))
        return self.head(y[:, -1] + torch.cat([h[-2], h[-1]], dim=1) * c.mean())


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 1, 4, bias=False),
        nn.Flatten(),
    )


class LoRA(nn.Module):
    """A low-rank update beside a frozen projection."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(inputs, rank) * 0.1), nn.Parameter(torch.randn(rank, outputs) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a @ self.b


def lora() -> nn.Module:
    model = gpt2().requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn, 16, 48)
    return model


def noise() -> dict[str, torch.Tensor]:
    return {"input": torch.randn(ROWS, 8, 1, 1)}


def both_texts() -> dict[str, torch.Tensor]:
    return {**tokens(), **tokens(6, name="decoder_input_ids")}


CASES = {
    "gpt2": Case(gpt2, tokens, classes=50),
    "llama": Case(llama, tokens, classes=50),
    "bert": Case(bert, padded, classes=3),
    "vit": Case(vit, images, classes=3),
    "resnet": Case(resnet, images, classes=3),
    "t5": Case(t5, both_texts, classes=50),
    "mamba": Case(mamba, tokens, classes=50),
    "whisper": Case(whisper_encoder, lambda: {"input_features": torch.randn(ROWS, 8, 12)}, "last_hidden_state"),
    "convnext": Case(convnext, images, classes=3),
    "swin": Case(swin, images, classes=3),
    "mobilenet": Case(MobileNet, images, classes=3),
    "unet": Case(UNet, images, "output"),
    "encoder": Case(Encoder, tokens, "0", classes=50),
    "lstm": Case(Recurrent, tokens, "output", classes=3),
    "generator": Case(generator, noise, "output"),
    "discriminator": Case(discriminator, lambda: images(name="input"), "output"),
    "lora": Case(lora, tokens, classes=50),
}
