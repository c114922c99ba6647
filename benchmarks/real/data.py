"""Batches that a model can learn from, drawn anew for every step on the device, so that loading costs nobody anything.

Tokens follow Zipf's law, and the classes of pictures are visible as colors: losses fall from the first step on.
"""

import torch

IGNORED = -100  # PyTorch's label for tokens without a loss
MASK = 3  # the token that stands for a masked one

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


def _words(generator: torch.Generator, count: int, vocabulary: int) -> torch.Tensor:
    frequencies = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float32, device=generator.device)
    return torch.multinomial(frequencies, count, replacement=True, generator=generator)


def text(generator: torch.Generator, batch: int, steps: int, vocabulary: int) -> Batch:
    """Tokens, and those that follow them."""
    words = _words(generator, batch * (steps + 1), vocabulary).view(batch, -1)
    return {"tokens": words[:, :-1].contiguous()}, words[:, 1:].contiguous()


def masked_text(generator: torch.Generator, batch: int, steps: int, vocabulary: int) -> Batch:
    """Sentences of different lengths; `hidden` marks the padding. 15% of the tokens are masked and to be found."""
    device, shape = generator.device, (batch, steps)
    words = _words(generator, batch * steps, vocabulary).view(shape)
    lengths = torch.randint(steps // 2, steps + 1, (batch, 1), device=device, generator=generator)
    hidden = torch.arange(steps, device=device) >= lengths
    masked = (torch.rand(shape, device=device, generator=generator) < 0.15) & ~hidden
    return {"tokens": words.masked_fill(masked, MASK), "hidden": hidden}, words.masked_fill(~masked, IGNORED)


def pictures(generator: torch.Generator, batch: int, pixels: int, classes: int) -> Batch:
    """Noise in the color of one class per picture."""
    labels = torch.randint(0, classes, (batch,), device=generator.device, generator=generator)
    return {"pictures": _painted(generator, labels[:, None, None], pixels, classes)}, labels


def segments(generator: torch.Generator, batch: int, pixels: int, classes: int) -> Batch:
    """Noise in squares, each in the color of its class."""
    side = pixels // 8
    labels = torch.randint(0, classes, (batch, 8, 8), device=generator.device, generator=generator)
    labels = labels.repeat_interleave(side, 1).repeat_interleave(side, 2)
    return {"pictures": _painted(generator, labels, pixels, classes)}, labels


def _painted(generator: torch.Generator, labels: torch.Tensor, pixels: int, classes: int) -> torch.Tensor:
    """Pictures `[batch, 3, pixels, pixels]`, channels last in memory."""
    device = generator.device
    colors = torch.randn(classes, 3, device=device, generator=torch.Generator(device).manual_seed(0))
    noise = torch.randn(len(labels), pixels, pixels, 3, device=device, generator=generator)
    return (noise + colors[labels]).permute(0, 3, 1, 2)
