"""Pictures for the demonstration, computed by formula: which of four shapes is it?"""

from __future__ import annotations

import numpy as np

SIZE = 16
NAMES = ("circle", "square", "triangle", "cross")
_SHADES = " .:-=+*#%@"


def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures `[count, 1, 16, 16]` from 0 to about 1, and the class index of the shape in each.

    A shape is the set of points close to its outline; position, size and angle are random,
    and every pixel has noise.
    """
    generator = np.random.default_rng(seed)
    kinds = generator.integers(0, len(NAMES), count)
    middle = (SIZE - 1) / 2
    centre = generator.uniform(middle - 2, middle + 2, (2, count, 1, 1))
    radius, angle = generator.uniform(3.5, 6, (count, 1, 1)), generator.uniform(-0.3, 0.3, (count, 1, 1))
    rows, columns = np.mgrid[:SIZE, :SIZE]
    y, x = rows - centre[0], columns - centre[1]
    x, y = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
    distance = np.choose(kinds[:, None, None], _distances(x, y, radius))
    pictures = np.clip(1.5 - distance, 0, 1) + generator.normal(0, 0.15, distance.shape)
    return pictures[:, None].astype(np.float32), kinds


def _distances(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> list[np.ndarray]:
    """Distances from the outline of each shape, in the order of `NAMES`."""
    far = np.maximum(abs(x), abs(y))
    sides = [np.sin(turn) * x + np.cos(turn) * y for turn in np.arange(3) * 2 * np.pi / 3]
    return [
        abs(np.hypot(x, y) - radius),
        abs(far - 0.85 * radius),
        abs(np.max(sides, axis=0) - 0.6 * radius),
        np.maximum(np.minimum(abs(x), abs(y)), far - radius),
    ]


def as_text(pictures: np.ndarray, captions: list[str], width: int) -> str:
    """Pictures in characters, a caption below each: side by side, as many as fit the width."""
    levels = np.clip(pictures[:, 0] * len(_SHADES), 0, len(_SHADES) - 1).astype(int)
    drawn = [["".join(_SHADES[pixel] for pixel in row) for row in picture] for picture in levels]
    blocks = [[*lines, f"{caption:^{SIZE}}"] for lines, caption in zip(drawn, captions, strict=True)]
    room = max(1, (width + 2) // (SIZE + 2))
    rows = [blocks[start : start + room] for start in range(0, len(blocks), room)]
    return "\n\n".join("\n".join("  ".join(parts).rstrip() for parts in zip(*row, strict=True)) for row in rows)
