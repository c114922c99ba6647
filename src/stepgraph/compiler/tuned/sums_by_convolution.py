"""A matrix product with an added vector as a convolution, on ARM under Linux: a fully connected layer's forward pass.

PyTorch's own sum with transposed weights uses oneDNN there, whose threads compete with those of BLAS. Neighboring
operators in a step get slower too, which measuring a sum alone does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.compiler.kernels.alternatives import Alternative
from stepgraph.compiler.tuned.row import Tuned, on_linux_arm
from stepgraph.system import torch_private

aten = torch.ops.aten
Array = torch.Tensor
GAIN = 1.05  # alone it may even be a little slower: the neighbors gain


def sum_by_convolution(c: Array, a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`c + a b` as a convolution of an image one pixel wide with one tap, which PyTorch passes to BLAS."""
    (rows, inner), columns = a.shape, b.shape[1]
    image, weights = a.view(1, rows, 1, inner).permute(0, 3, 1, 2), b.t().view(columns, inner, 1, 1)
    settings = weights, [1, 1], c, [1, 1], [0, 0]
    if out is None:
        return torch_private.slow_convolution.default(image, *settings).permute(0, 2, 3, 1).view(rows, columns)
    torch_private.slow_convolution.output(image, *settings, output=out.view(1, rows, 1, columns).permute(0, 3, 1, 2))
    return out


def _is_by_transposed_weights(arguments: Sequence[Any]) -> bool:
    _, a, b = arguments
    return a.is_contiguous() and b.t().is_contiguous()


ROW = Tuned(
    name="sums by convolution",
    hardware="ARM processors under Linux",
    pattern="vector plus matrix times transposed matrix",
    gains={"autoencoder": 1.06, "mlp": 1.05},
    results="rent-cpu",
    condition=on_linux_arm,
    offers=(
        Alternative(
            aten.addmm.default,
            "convolution",
            sum_by_convolution,
            fits=_is_by_transposed_weights,
            takes_out=True,
            gain=GAIN,
        ),
    ),
)
