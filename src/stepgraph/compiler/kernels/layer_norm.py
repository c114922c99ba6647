"""Layer normalization that reads and writes half precision and computes in float32, also γ and β.

PyTorch's CUDA operator takes γ and β only in the type of its source. With float32 γ and β, the source would be
converted to float32 in memory, and so would be its gradient. Here, a group of threads converts one row in registers.
`layer_norm` and `layer_norm_gradient` have the arguments and results of the operators they stand for. Where there is
no such kernel, they are those operators with conversions around them; this is also what a fusing compiler gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels.half import HALF
from stepgraph.system.torch_private import compile_cuda

aten, ours = torch.ops.aten, torch.ops.stepgraph
Array = torch.Tensor
Triple = tuple[Array, Array, Array]
WIDTHS = (32, 128, 512)  # threads per row; those of a warp need no barriers
PER_THREAD = 32  # elements of a row that a thread holds in registers
LONGEST = WIDTHS[-1] * PER_THREAD
WARPS = 4  # rows per block, if a warp has a row
BLOCKS = 4  # per multiprocessor; each adds up γ's and β's gradients over its rows

_library = torch.library.Library("stepgraph", "FRAGMENT")
_library.define("layer_norm(Tensor x, int[] shape, Tensor? gamma, Tensor? beta, float eps) -> (Tensor, Tensor, Tensor)")
_library.define(
    "layer_norm_gradient(Tensor dy, Tensor x, int[] shape, Tensor mean, Tensor rstd, Tensor? gamma, Tensor? beta, "
    "bool[3] wanted) -> (Tensor, Tensor, Tensor)"
)


def applies(x: Array, shape: Sequence[int], *others: Array | None) -> bool:
    """Whether the kernels normalize an array over the last axes, those of `shape`; `others` are γ and β."""
    plain = all(one is None or one.dtype is torch.float32 for one in others)
    return plain and x.dtype in HALF and math.prod(shape) <= LONGEST and x.numel() < 1 << 31


def plain(x: Array, shape: Sequence[int], gamma: Array | None, beta: Array | None, eps: float) -> Triple:
    """PyTorch's operator in float32, with conversions around it."""
    y, mean, rstd = aten.native_layer_norm.default(x.float(), shape, gamma, beta, eps)
    return y.to(x.dtype), mean, rstd


def plain_gradient(dy: Array, x: Array, *others: Any) -> Triple:
    """Its gradient, of the arguments of `layer_norm_gradient`; what is not wanted is empty."""
    found = aten.native_layer_norm_backward.default(dy.float(), x.float(), *others)
    dx, *of_others = (x.new_empty(0, dtype=torch.float32) if one is None else one for one in found)
    return dx.to(x.dtype), *of_others  # type: ignore[return-value]


@torch.library.impl(_library, "layer_norm", "CompositeExplicitAutograd")
def layer_norm(x: Array, shape: Sequence[int], gamma: Array | None, beta: Array | None, eps: float) -> Triple:
    """`γ (x - mean) / sqrt(variance + ε) + β`, the mean, and `1 / sqrt(variance + ε)`."""
    if not x.is_cuda:
        return plain(x, shape, gamma, beta, eps)
    rows, run = _row(x.shape, shape), _kernels(math.prod(shape), x.dtype, gamma is not None, beta is not None, x.device)
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    given = [x, *(rstd if one is None else one.contiguous() for one in (gamma, beta)), y, mean, rstd]
    run("forward", mean.numel(), [*given, mean.numel(), float(eps)])
    return y, mean, rstd


@torch.library.impl(_library, "layer_norm_gradient", "CompositeExplicitAutograd")
def layer_norm_gradient(
    dy: Array,
    x: Array,
    shape: Sequence[int],
    mean: Array,
    rstd: Array,
    gamma: Array | None,
    beta: Array | None,
    wanted: Sequence[bool],
) -> Triple:
    """The gradients of the source, γ and β; what is not wanted is empty."""
    if not x.is_cuda:
        return plain_gradient(dy, x, shape, mean, rstd, gamma, beta, wanted)
    length = math.prod(shape)
    run = _kernels(length, x.dtype, gamma is not None, beta is not None, x.device)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums = torch.empty(2, run.blocks(mean.numel()), length, dtype=torch.float32, device=x.device)
    scale = rstd if gamma is None else gamma.contiguous()
    given = [dy.contiguous(), x.contiguous(), mean.contiguous(), rstd.contiguous(), scale, dx, sums]
    run("backward", mean.numel(), [*given, mean.numel()])
    of_gamma, of_beta = (one.sum(0).view(tuple(shape)) for one in sums)
    none = rstd.new_empty(0)
    return dx, of_gamma if wanted[1] else none, of_beta if wanted[2] else none


def _row(extents: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the statistics: one number per row."""
    return (*extents[: len(extents) - len(shape)], *(1 for _ in shape))


@torch.library.register_fake("stepgraph::layer_norm", lib=_library)
def _(x: Array, shape: Sequence[int], *_: object) -> Triple:
    statistics = (x.new_empty(_row(x.shape, shape), dtype=torch.float32) for _ in range(2))
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), *statistics  # type: ignore[return-value]


@torch.library.register_fake("stepgraph::layer_norm_gradient", lib=_library)
def _(dy: Array, x: Array, shape: Sequence[int], mean: Array, rstd: Array, _: Any, __: Any, wanted: Any) -> Triple:
    others = (mean.new_empty(tuple(shape) if one else 0) for one in wanted[1:])
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), *others  # type: ignore[return-value]


def workspace(given: Sequence[Any], _: int) -> int:
    """Bytes of the gradient's sums, for the most multiprocessors that a GPU has today."""
    return 2 * 4 * math.prod(given[2]) * min(BLOCKS * 160, math.ceil(given[3].numel() / WARPS))


EXPANDED: dict[Any, Callable[..., Triple]] = {
    ours.layer_norm.default: plain,
    ours.layer_norm_gradient.default: plain_gradient,
}


def expand_layer_norms(graph: fx.Graph) -> None:
    """Expands them into PyTorch's operators, for a compiler that fuses them."""
    for node in graph.nodes:
        if node.target in EXPANDED:
            node.target = EXPANDED[node.target]


class _Kernels:
    """The two kernels for rows of one length."""

    def __init__(self, source: str, width: int, device: torch.device) -> None:
        self._rows = WARPS if width == WIDTHS[0] else 1
        self._width, self._device = width, device
        self._most = BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
        with torch.cuda.device(device):
            self._compiled = {name: compile_cuda(source, name) for name in ("forward", "backward")}

    def blocks(self, rows: int) -> int:
        """How many blocks share the rows."""
        return min(-(-rows // self._rows), self._most)

    def __call__(self, name: str, rows: int, given: list[Any]) -> None:
        with torch.cuda.device(self._device):
            run = self._compiled[name]
            run(grid=(self.blocks(rows), 1, 1), block=(self._width, self._rows, 1), args=given)


@cache
def _kernels(length: int, dtype: torch.dtype, scales: bool, shifts: bool, device: torch.device) -> _Kernels:
    width = next(one for one in WIDTHS if length <= one * PER_THREAD)
    pack = next(one for one in (8, 4, 2, 1) if length % one == 0)
    numbers = {"N": length, "W": width, "PACK": pack, "ROWS": WARPS if width == WIDTHS[0] else 1}
    numbers |= {"K": -(-length // (pack * width)), "SCALES": int(scales), "SHIFTS": int(shifts)}
    numbers |= {"BFLOAT16": int(dtype is torch.bfloat16)}
    return _Kernels("\n".join(f"#define {name} {value}" for name, value in numbers.items()) + CODE, width, device)


# A row's packs are dealt to its W threads in turn; a thread holds K packs.
CODE = """
struct __align__(2 * PACK) Pack { unsigned short of[PACK]; };

__device__ float wide(unsigned short bits) {
#if BFLOAT16
  return __uint_as_float((unsigned)bits << 16);
#else
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
#endif
}

__device__ unsigned short narrow(float x) {
#if BFLOAT16
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#else
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
#endif
}

__device__ float total(float x) {
  for (int other = 16; other; other >>= 1) x += __shfl_xor_sync(0xffffffff, x, other);
#if W > 32
  __shared__ float warps[W / 32];
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.0f;
  for (int i = 0; i < W / 32; ++i) x += warps[i];
#endif
  return x;
}

#define EACH_PACK _Pragma("unroll") for (int k = 0; k < K; ++k) if ((k * W + (int)threadIdx.x) * PACK < N)
#define EACH _Pragma("unroll") for (int e = 0; e < PACK; ++e)
#define EVERY EACH_PACK EACH
#define PLACE (k * W + threadIdx.x)
#define COLUMN (PLACE * PACK + e)
#define OWN (k * PACK + e)

extern "C" __global__ void __launch_bounds__(W * ROWS)
forward(const unsigned short* X, const float* GAMMA, const float* BETA, unsigned short* Y, float* MEAN, float* RSTD,
        int rows, double epsilon) {
  float gamma[K * PACK], beta[K * PACK], x[K * PACK];
  EVERY { gamma[OWN] = SCALES ? GAMMA[COLUMN] : 1.0f; beta[OWN] = SHIFTS ? BETA[COLUMN] : 0.0f; }
  for (long long row = blockIdx.x * (long long)ROWS + threadIdx.y; row < rows; row += gridDim.x * (long long)ROWS) {
    const Pack* in = (const Pack*)(X + row * N);
    Pack* out = (Pack*)(Y + row * N);
    float sum = 0.0f, squares = 0.0f;
    EACH_PACK { const Pack pack = in[PLACE]; EACH sum += x[OWN] = wide(pack.of[e]); }
    const float mean = total(sum) / N;
    EVERY squares += (x[OWN] - mean) * (x[OWN] - mean);
    const float rstd = rsqrtf(total(squares) / N + (float)epsilon);
    EACH_PACK {
      Pack pack;
      EACH pack.of[e] = narrow((x[OWN] - mean) * rstd * gamma[OWN] + beta[OWN]);
      out[PLACE] = pack;
    }
    if (threadIdx.x == 0) { MEAN[row] = mean; RSTD[row] = rstd; }
  }
}

extern "C" __global__ void __launch_bounds__(W * ROWS)
backward(const unsigned short* DY, const unsigned short* X, const float* MEAN, const float* RSTD, const float* GAMMA,
         unsigned short* DX, float* SUMS, int rows) {
  float gamma[K * PACK], of_gamma[K * PACK], of_beta[K * PACK], x[K * PACK], d[K * PACK];
  EVERY { gamma[OWN] = SCALES ? GAMMA[COLUMN] : 1.0f; of_gamma[OWN] = of_beta[OWN] = 0.0f; }
  for (long long row = blockIdx.x * (long long)ROWS + threadIdx.y; row < rows; row += gridDim.x * (long long)ROWS) {
    const float mean = MEAN[row], rstd = RSTD[row];
    float sum = 0.0f, along = 0.0f;
    EACH_PACK {
      const Pack values = ((const Pack*)(X + row * N))[PLACE], changes = ((const Pack*)(DY + row * N))[PLACE];
      EACH {
        x[OWN] = (wide(values.of[e]) - mean) * rstd;
        d[OWN] = wide(changes.of[e]);
        of_gamma[OWN] += d[OWN] * x[OWN];
        of_beta[OWN] += d[OWN];
        d[OWN] *= gamma[OWN];
        sum += d[OWN];
        along += d[OWN] * x[OWN];
      }
    }
    sum = total(sum) / N;
    along = total(along) / N;
    EACH_PACK {
      Pack pack;
      EACH pack.of[e] = narrow(rstd * (d[OWN] - sum - x[OWN] * along));
      ((Pack*)(DX + row * N))[PLACE] = pack;
    }
  }
#if ROWS > 1
  __shared__ float sums[2][N];  // of the block's warps, one after the other: the order is always the same
  for (int warp = 0; warp < ROWS; ++warp) {
    if (threadIdx.y == warp) {
      EVERY {
        of_gamma[OWN] = sums[0][COLUMN] = of_gamma[OWN] + (warp ? sums[0][COLUMN] : 0.0f);
        of_beta[OWN] = sums[1][COLUMN] = of_beta[OWN] + (warp ? sums[1][COLUMN] : 0.0f);
      }
    }
    __syncthreads();
  }
  if (threadIdx.y != ROWS - 1) return;
#endif
  EVERY {
    SUMS[blockIdx.x * (long long)N + COLUMN] = of_gamma[OWN];
    SUMS[(gridDim.x + blockIdx.x) * (long long)N + COLUMN] = of_beta[OWN];
  }
}
"""
