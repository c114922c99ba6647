"""Convolutions of few channels by Triton's interpreter, on the CPU, against PyTorch's in float64.

`TRITON_INTERPRET=1 python -m tests.few_channels_runs` runs all cases; `test_few_channels.py` does so where Triton is.
The interpreter has no products in bfloat16; `test_gpu_few_channels.py` runs the same cases in both types on a GPU.
"""

import math
import random
from typing import Any, NamedTuple

import torch

from stepgraph.compiler.kernels import few_channels

aten = torch.ops.aten
LAST = torch.channels_last


class Case(NamedTuple):
    """A convolution, with biases or without."""

    shape: tuple[int, int, int, int]
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    biases: bool


CASES = [
    Case((2, 3, 30, 28), 64, (7, 7), (2, 2), (3, 3), False),  # windows begin at odd places
    Case((2, 3, 16, 16), 64, (3, 3), (1, 1), (1, 1), True),
    Case((3, 1, 14, 14), 32, (5, 5), (1, 1), (2, 2), True),
    Case((1, 4, 20, 20), 48, (3, 3), (2, 2), (1, 1), False),  # 16 bytes at once
    Case((1, 3, 35, 44), 96, (11, 11), (4, 4), (2, 2), True),  # sums of several programs per window
    Case((1, 2, 9, 7), 130, (1, 1), (3, 2), (0, 0), False),  # outputs of several programs
    Case((2, 1, 7, 5), 24, (7, 5), (1, 1), (0, 0), True),  # one pixel
    Case((1, 4, 6, 5), 65, (2, 4), (2, 3), (3, 3), True),  # windows in the padding
    Case((5, 3, 8, 9), 1, (4, 1), (1, 3), (1, 0), False),
]


def drawn(seed: int) -> Case:
    """A random one."""
    choice = random.Random(seed).choice
    kernel, padding = (choice(range(1, 7)), choice(range(1, 7))), (choice(range(4)), choice(range(4)))
    extents = (choice(range(kernel[axis], 17)) for axis in (0, 1))
    shape = choice((1, 2, 3)), choice((1, 2, 3, 4)), *extents
    stride = choice((1, 2, 3)), choice((1, 2, 3))
    return Case(shape, choice((24, 32, 64, 65)), kernel, stride, padding, choice((True, False)))


def arrays(case: Case, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Images, weights and biases."""
    generator = torch.Generator().manual_seed(math.prod(case.shape) + case.outputs)
    shapes = case.shape, (case.outputs, case.shape[1], *case.kernel), (case.outputs,)
    x, w, b = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return x.contiguous(memory_format=LAST), w.contiguous(memory_format=LAST), b if case.biases else None


def compare(case: Case, dtype: torch.dtype = torch.float16, device: str = "cpu") -> None:
    """Compares result and gradient with those in float64; both are rounded once."""
    x, w, b = arrays(case, dtype, device)
    settings = list(case.stride), list(case.padding)
    rest = *settings, [1, 1], False, [0, 0], 1
    wide = [None if one is None else one.double().cpu() for one in (x, w, b)]
    right = aten.convolution(*wide, *rest)
    found = few_channels.convolved(x, w, b, *settings)
    assert found.dtype is dtype and found.is_contiguous(memory_format=LAST)
    close(found, right, case)
    g = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).to(x).contiguous(memory_format=LAST)
    _, wanted, _ = aten.convolution_backward(g.double().cpu(), *wide[:2], None, *rest, [False, True, False])
    gradient = few_channels.convolved_gradient(g, x, list(w.shape), *settings)
    assert gradient.dtype is dtype and gradient.is_contiguous(memory_format=LAST)
    close(gradient, wanted, case)


def close(found: torch.Tensor, right: torch.Tensor, case: Case) -> None:
    """Sums are in float32, so only the rounding at the end counts, except where numbers cancel."""
    bounds = {"rtol": 0.51 * torch.finfo(found.dtype).eps, "atol": 1e-5 * float(right.abs().max())}
    torch.testing.assert_close(found.double().cpu(), right, **bounds, msg=lambda text: f"{case}\n{text}")


def not_finite_stays_in_its_windows(dtype: torch.dtype = torch.float16, device: str = "cpu") -> None:
    """Numbers beside windows, which kernels could read with them, do not reach results and gradients."""
    case = CASES[0]
    x, w, b = arrays(case, dtype, device)
    settings = list(case.stride), list(case.padding)
    x[0, 1, 12, 11] = torch.inf  # below a window
    x[1, 2, 14, 22] = torch.nan  # the last channel, in front of a window
    right = torch.conv2d(x.float().cpu(), w.float().cpu(), None, *settings)
    assert torch.equal(few_channels.convolved(x, w, b, *settings).isfinite().cpu(), right.isfinite())
    x = torch.ones(1, 3, 10, 10, dtype=dtype, device=device).contiguous(memory_format=LAST)
    x[0, 0, 8, 0] = x[0, 1, 1, 9] = torch.nan  # windows of 3×3 in steps of 4 leave them out
    g = torch.ones(1, 5, 2, 2, dtype=dtype, device=device)
    assert few_channels.convolved_gradient(g, x, [5, 3, 3, 3], [4, 4], [0, 0]).eq(4).all()


def main() -> None:
    """Runs all cases with kernels that are interpreted."""
    from stepgraph.compiler.kernels import few_channels_kernels as kernels

    patched: Any = kernels
    patched.launch = lambda kernel, grid, *arguments, **settings: kernel[grid](*arguments, **settings)
    patched._processors = lambda device: 2
    patched.STEPS = 1  # so that several programs sum up
    for case in [*CASES, *map(drawn, range(40))]:
        compare(case)
    not_finite_stays_in_its_windows()


if __name__ == "__main__":
    main()
