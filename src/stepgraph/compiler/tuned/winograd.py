"""The gradient of a 3×3 kernel with Winograd's minimal filtering, with stride 1, on ARM under Linux.

In one dimension the gradient of three weights from `m` pixels of the result is `dw[k] = Σ_t g[t] x[t + k]`: `3 m`
products. Winograd's algorithm takes `m + 2`, one per point: `dw = A [(G g) ⊙ (B x)]`, where `B` and `G` are
additions and multiplications by small integers, and the fractions are all in `A`. The sum over all pixels of all
images precedes `A`, so the products form one matrix product per point.

There are two forms. Tiles of 2 rows, with windows cut along the columns as in `patches`, take 2/3 of the products and
little else. Tiles of 4×4 pixels, with both axes transformed, take a quarter of the products, which pays off with many
channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from stepgraph.compiler.kernels.alternatives import CONVOLUTION_WEIGHTS, Alternative
from stepgraph.compiler.kernels.channels_last import is_last
from stepgraph.compiler.kernels.patches import extents, portions
from stepgraph.compiler.tuned.row import Tuned, on_linux_arm

Array = torch.Tensor
Pair = Sequence[int]
Call = Callable[[], Any]
Rule = Callable[[Array, Array], list[Call]]
KERNEL = 3
MANY = 64  # channels; squares were never fastest with fewer, rows never with more
PRODUCTS = 1 << 21  # numbers transformed back at a time, if not all must be kept


# The transforms along an axis: from `s`, pixels by their position in a tile, to `out`, by point. They return calls
# instead of calling, so that views are created once for all portions.


def _source_of_2(s: Array, out: Array) -> list[Call]:
    """`x0 - x2, x1 + x2, x2 - x1, x1 - x3`."""
    return [
        partial(torch.sub, s[:2], s[2:], out=out[::3]),
        partial(torch.add, s[1], s[2], out=out[1]),
        partial(torch.sub, s[2], s[1], out=out[2]),
    ]


def _gradient_of_2(s: Array, out: Array) -> list[Call]:
    """`g0, g0 + g1, g0 - g1, g1`."""
    return [
        partial(out[::3].copy_, s),
        partial(torch.add, s[0], s[1], out=out[1]),
        partial(torch.sub, s[0], s[1], out=out[2]),
    ]


def _source_of_4(s: Array, out: Array) -> list[Call]:
    """`4 x0 - 5 x2 + x4`, `a + b`, `a - b`, `2 c + d`, `2 c - d`, `4 x1 - 5 x3 + x5`.

    `a = x3 - 4 x1`, `b = x4 - 4 x2`, `c = x3 - x1` and `d = x4 - x2` are computed in the output buffers.
    """
    ends = out[::5]
    return [
        partial(torch.sub, s[4:], s[2:4], alpha=5, out=ends),
        partial(ends.add_, s[:2], alpha=4),
        partial(torch.sub, s[3:5], s[1:3], alpha=4, out=out[1:3]),
        partial(torch.add, out[1], out[2], out=out[1]),
        partial(torch.sub, out[1], out[2], alpha=2, out=out[2]),
        partial(torch.sub, s[3:5], s[1:3], out=out[3:5]),
        partial(torch.add, out[4], out[3], alpha=2, out=out[3]),
        partial(torch.sub, out[3], out[4], alpha=2, out=out[4]),
    ]


def _gradient_of_4(s: Array, out: Array) -> list[Call]:
    """`g0`, `a + b`, `a - b`, `c + 2 d`, `c - 2 d`, `g3`.

    `a = g0 + g2`, `b = g1 + g3`, `c = g0 + 4 g2` and `d = g1 + 4 g3` are computed in the output buffers.
    """
    return [
        partial(out[::5].copy_, s[::3]),
        partial(torch.add, s[:2], s[2:], out=out[1:3]),
        partial(torch.add, out[1], out[2], out=out[1]),
        partial(torch.sub, out[1], out[2], alpha=2, out=out[2]),
        partial(torch.add, s[:2], s[2:], alpha=4, out=out[3:5]),
        partial(torch.add, out[3], out[4], alpha=2, out=out[3]),
        partial(torch.sub, out[3], out[4], alpha=4, out=out[4]),
    ]


@dataclass(frozen=True)
class Filtering:
    """How tiles of the gradient, `step` pixels long, are multiplied with tiles of the source, two pixels longer."""

    step: int
    is_square: bool  # tiles of `step × step` pixels, otherwise of `step` rows
    portion: int  # numbers; bounds how many images are transformed at a time
    source: Rule
    gradient: Rule
    back: tuple[tuple[float, ...], ...]  # A, including the signs that the transforms omit

    @property
    def points(self) -> int:
        """Points along an axis, and pixels of a source's tile."""
        return self.step + KERNEL - 1

    @property
    def products(self) -> int:
        """Numbers for each pair of an output and an input before `A`."""
        return self.points**2 if self.is_square else self.points * KERNEL


ROWS = Filtering(
    2,
    False,
    1 << 21,
    _source_of_2,
    _gradient_of_2,
    ((1, 1 / 2, 1 / 2, 0), (0, 1 / 2, -1 / 2, 0), (0, 1 / 2, 1 / 2, -1)),
)
SQUARES = Filtering(
    4,
    True,
    3 << 20,
    _source_of_4,
    _gradient_of_4,
    (
        (1 / 4, -1 / 6, 1 / 6, 1 / 24, -1 / 24, 0),
        (0, -1 / 6, -1 / 6, 1 / 12, 1 / 12, 0),
        (0, -1 / 6, 1 / 6, 1 / 6, -1 / 6, 1),
    ),
)


class _Plan:
    """Shapes of everything that one gradient needs; images in buffers have channels last."""

    def __init__(self, by: Filtering, x: Array, w: Array, padding: Pair, order: torch.memory_format) -> None:
        """`order` is the memory layout of the arguments."""
        self.by, self.images = by, len(x)
        self.outputs, self.inputs = w.shape[:2]
        rows, columns = extents(x, w, (1, 1), padding)
        self.down = -(-rows // by.step)  # the last tile may extend past the end, where the gradient counts as zero
        self.across = -(-columns // by.step) if by.is_square else columns
        fits = (rows, columns) == (self.down * by.step, self.across * (by.step if by.is_square else 1))
        self.reads = fits and order is torch.channels_last  # the gradient in place
        most = max(1, by.portion // self.numbers(1))
        if self.numbers(self.images) <= by.portion + self.pairs(self.outputs) * by.products:
            most = self.images  # all together: accumulating products across portions would take more
        self.count = _even(self.images, most)
        self.some = _even(self.outputs, max(1, PRODUCTS // (self.pairs(1) * by.products)))

    def shapes(self, count: int) -> dict[str, tuple[int, ...]]:
        """Shapes of buffers for this many images: with a border, transformed along the first axis, and transformed."""
        by = self.by
        shapes: dict[str, tuple[int, ...]] = {}
        rows, columns = self.down * by.step, self.across * (by.step if by.is_square else 1)
        for name, border, channels in (("x", KERNEL - 1, self.inputs), ("g", 0, self.outputs)):
            shapes[name] = (count, rows + border, columns + border, channels)
            if by.is_square:
                shapes[name + " half"] = (by.points, count, rows + border, self.across, channels)
                shapes[name + " tiles"] = (by.points, by.points, count, self.down, self.across, channels)
            else:
                windows = (KERNEL,) if name == "x" else ()
                shapes[name + " tiles"] = (by.points, count, self.down, self.across, *windows, channels)
        return shapes

    def numbers(self, count: int) -> int:
        """The size of these buffers; of the half-transformed ones, only one exists at a time."""
        found = {name: math.prod(shape) for name, shape in self.shapes(count).items()}
        half = max(found.pop("x half", 0), found.pop("g half", 0))
        return sum(found.values()) + half - (found["g"] if self.reads else 0)

    def pairs(self, outputs: int) -> int:
        """The number of pairs of this many outputs with inputs."""
        return outputs * self.inputs

    @property
    def is_whole(self) -> bool:
        """Whether all images are transformed together."""
        return self.count == self.images

    def workspace(self) -> int:
        """Bytes needed besides the arguments and the result."""
        images, products, some = self.numbers(self.count), self.by.products, self.pairs(self.some)
        if self.is_whole:
            return 4 * (images + some * (products + KERNEL**2))
        return 4 * (self.pairs(self.outputs) * products + max(images, some * KERNEL**2))


def _even(total: int, most: int) -> int:
    """The size of equal parts, none larger than `most`; the last is smaller only if parts would become too small."""
    exact = (size for size in range(min(most, total), most // 2, -1) if total % size == 0)
    return next(exact, -(-total // -(-total // most)))


class _Buffers:
    """Memory for one portion of images, and the calls that transform its contents."""

    def __init__(self, plan: _Plan, like: Array) -> None:
        shapes = plan.shapes(plan.count)
        self.by = plan.by
        self.x = like.new_zeros(shapes["x"])
        self.g = None if plan.reads else like.new_zeros(shapes["g"])
        self.v, self.u = (like.new_empty(shapes[f"{name} tiles"]) for name in "xg")
        halves = [shapes[f"{name} half"] for name in "xg"] if plan.by.is_square else []
        half = like.new_empty(max(map(math.prod, halves), default=0))
        self.halves = [half[: math.prod(shape)].view(shape) for shape in halves]
        self.of_x = self._transform(self.by.source, self.x, self.by.points, self.v)
        self.of_g = None if self.g is None else self.of_gradient(self.g)

    def of_gradient(self, g: Array) -> list[Call]:
        """The calls that transform this many images."""
        return self._transform(self.by.gradient, g, self.by.step, self.u.narrow(-4, 0, len(g)))

    def _transform(self, rule: Rule, images: Array, size: int, out: Array) -> list[Call]:
        step = self.by.step
        if self.by.is_square:
            half = self.halves[rule is self.by.gradient].narrow(-4, 0, len(images))
            return [*rule(_tiles(images, -2, size, step), half), *rule(_tiles(half, -3, size, step), out)]
        tiles = _tiles(images, -3, size, step)
        return rule(tiles.unfold(-2, KERNEL, 1).transpose(-1, -2) if rule is self.by.source else tiles, out)


def _tiles(images: Array, axis: int, size: int, step: int) -> Array:
    """Pixels by their position along an axis in tiles of `size`, `step` apart."""
    return images.unfold(axis, size, step).movedim(-1, 0)


def _transformed(plan: _Plan, g: Array, x: Array, padding: Pair) -> Iterator[tuple[Array, Array]]:
    """One portion of images after another, in the same memory.

    The gradient is `[points, outputs, tiles]`, the source `[points, tiles, inputs]`, or `[..., 3 * inputs]` in windows.
    """
    buffers, (top, left) = _Buffers(plan, x), padding
    pixels = buffers.x[:, top : top + x.shape[2], left : left + x.shape[3]]
    width = plan.inputs if plan.by.is_square else KERNEL * plan.inputs
    points = plan.by.products * plan.inputs // width
    u, v = buffers.u.view(points, -1, plan.outputs).transpose(1, 2), buffers.v.view(points, -1, width)
    for start, images in portions(x, plan.count):
        n, given = len(images), g[start : start + plan.count].permute(0, 2, 3, 1)
        pixels[:n].copy_(images.permute(0, 2, 3, 1))
        if buffers.g is not None:
            buffers.g[:n, : g.shape[2], : g.shape[3]].copy_(given)
        for call in (*buffers.of_x, *(buffers.of_g or buffers.of_gradient(given))):
            call()
        if n < plan.count:  # leftovers of the previous portion
            buffers.u.narrow(-4, n, plan.count - n).zero_()
        yield u, v


def _gradient(by: Filtering, g: Array, x: Array, w: Array, padding: Pair) -> Array:
    order = _order(g)
    plan = _Plan(by, x, w, padding, order)
    found = torch.empty(w.shape, dtype=x.dtype, device=x.device, memory_format=order)
    total = None
    slices = [slice(start, start + plan.some) for start in range(0, plan.outputs, plan.some)]
    for u, v in _transformed(plan, g, x, padding):
        if plan.is_whole:
            for some in slices:
                _finish(by, torch.bmm(u[:, some], v), found[some])
        else:
            total = torch.bmm(u, v) if total is None else torch.baddbmm(total, u, v, out=total)
    if total is not None:
        del u, v  # frees their memory for what follows
        for some in slices:
            _finish(by, total[:, some], found[some])
    return found


def _finish(by: Filtering, products: Array, found: Array) -> None:
    """From points to weights."""
    outputs, inputs = found.shape[:2]
    rows = _back(by, found.dtype) @ products.flatten(1)
    if by.is_square:
        found.copy_(rows.view(KERNEL, KERNEL, outputs, inputs).permute(2, 3, 0, 1))
    else:
        found.copy_(rows.view(KERNEL, outputs, KERNEL, inputs).permute(1, 3, 0, 2))


@cache
def _back(by: Filtering, kind: torch.dtype) -> Array:
    along = torch.tensor(by.back, dtype=kind, device="cpu")
    return torch.kron(along, along) if by.is_square else along


def by_rows(g: Array, x: Array, w: Array, stride: Pair, padding: Pair) -> Array:
    """With tiles of 2 rows."""
    return _gradient(ROWS, g, x, w, padding)


def by_squares(g: Array, x: Array, w: Array, stride: Pair, padding: Pair) -> Array:
    """With tiles of 4×4 pixels."""
    return _gradient(SQUARES, g, x, w, padding)


def _order(g: Array) -> torch.memory_format:
    """The memory layout of the gradient, in which the result is too."""
    return torch.channels_last if is_last(g) else torch.contiguous_format


def _fits(arguments: Sequence[Any]) -> bool:
    _, _, w, stride, _ = arguments
    return tuple(w.shape[2:]) == (KERNEL, KERNEL) and all(step == 1 for step in stride)


def _has_many_channels(arguments: Sequence[Any]) -> bool:
    return bool(arguments[1].shape[1] >= MANY)


def _workspace(by: Filtering, arguments: Sequence[Any], _: int) -> int:
    g, x, w, _, padding = arguments
    return _Plan(by, x, w, padding, _order(g)).workspace()


ROW = Tuned(
    name="Winograd filtering",
    hardware="ARM processors under Linux",
    pattern="weight gradients of 3×3 convolutions with stride 1",
    gains={"dense": 1.08, "cnn": 1.07},
    results="rent-cpu",
    condition=on_linux_arm,
    offers=(
        Alternative(
            CONVOLUTION_WEIGHTS,
            "winograd",
            by_rows,
            fits=lambda arguments: _fits(arguments) and not _has_many_channels(arguments),
            workspace=partial(_workspace, ROWS),
        ),
        Alternative(
            CONVOLUTION_WEIGHTS,
            "winograd 4",
            by_squares,
            fits=lambda arguments: _fits(arguments) and _has_many_channels(arguments),
            workspace=partial(_workspace, SQUARES),
        ),
    ),
)
