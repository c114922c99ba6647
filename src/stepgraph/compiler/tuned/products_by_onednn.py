"""Products of matrices in float32 by oneDNN, on x86 processors.

PyTorch computes them by MKL, which runs at half speed on processors of other makers than Intel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stepgraph.compiler.kernels.alternatives import Alternative
from stepgraph.compiler.tuned.row import Tuned, on_x86
from stepgraph.layers import gru_kernel, lstm_kernel
from stepgraph.system import torch_private

aten, ours = torch.ops.aten, torch.ops.stepgraph
Array = torch.Tensor
NAME = "onednn"
ROWS, MULTIPLIED = 1 << 8, 1 << 31  # rows and multiplications that suffice to measure a product
SMALL = 0.05  # numbers for which recurrent layers do not amplify rounding


def product(a: Array, b: Array) -> Array:
    """`a b`."""
    return torch_private.onednn_linear(a, b.t(), None, "none", [], "")


def product_with_vector(c: Array, a: Array, b: Array) -> Array:
    """`c + a b` for a vector."""
    return torch_private.onednn_linear(a, b.t(), c, "none", [], "")


def lstm(*given: Any) -> tuple[Array, ...]:
    """`stepgraph::lstm`."""
    return lstm_kernel.run(*given, product=_product)


def lstm_gradient(*given: Any) -> tuple[Array, ...]:
    """`stepgraph::lstm_gradient`."""
    return lstm_kernel.run_gradient(*given, product=_product)


def gru(*given: Any) -> tuple[Array, ...]:
    """`stepgraph::gru`."""
    return gru_kernel.run(*given, product=_product)


def gru_gradient(*given: Any) -> tuple[Array, ...]:
    """`stepgraph::gru_gradient`."""
    return gru_kernel.run_gradient(*given, product=_product)


def _product(a: Array, b: Array, added: Array | None, out: Array | None) -> Array:
    if out is None:
        if added is None or added.ndim == 1:
            return torch_private.onednn_linear(a, b.t(), added, "none", [], "")
        return product(a, b).add_(added)
    return out.copy_(product(a, b)) if added is None else torch.add(product(a, b), added, out=out)


def _fits(given: Sequence[Any]) -> bool:
    """Whether all arrays but lengths hold float32, none is empty, and there is oneDNN."""
    arrays = [one for one in given if isinstance(one, torch.Tensor)]
    kinds = {one.dtype for one in arrays} - {torch.int64}
    return torch_private.onednn_linear is not None and kinds == {torch.float32} and all(one.numel() for one in arrays)


def _fits_product(given: Sequence[Any]) -> bool:
    second = given[-1]  # oneDNN refuses columns that overlap in memory
    return _fits(given) and (second.is_contiguous() or second.t().is_contiguous())


def _fits_vector(given: Sequence[Any]) -> bool:
    c, _, b = given  # oneDNN reads the vector as if it had no strides
    return _fits_product(given) and c.shape == b.shape[1:] and c.is_contiguous()


def _fewer_rows(given: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with fewer rows of the first factor: the time is proportional to them."""
    *added, a, b = given
    return (*added, a[: max(ROWS, MULTIPLIED // b.numel())], b)


def _copied(given: Sequence[Any], _: int) -> int:
    """The bytes of a first factor with other strides, which is copied."""
    first = given[-2]
    return 0 if first.is_contiguous() else int(first.nbytes)


ROW = Tuned(
    name="products by oneDNN",
    hardware="x86 processors",
    pattern="products of two matrices in float32, alone, with an added vector, and in recurrent layers",
    gains={"mlp": 1.83, "autoencoder": 1.67, "transformer": 1.64, "cnn": 1.10},
    results="rent-amd",
    condition=on_x86,
    offers=(
        Alternative(aten.mm.default, NAME, product, fits=_fits_product, workspace=_copied, sample=_fewer_rows),
        Alternative(
            aten.addmm.default,
            NAME,
            product_with_vector,
            fits=_fits_vector,
            workspace=_copied,
            sample=_fewer_rows,
        ),
        *(
            Alternative(operation, NAME, function, fits=_fits, workspace=workspace, scales=True, deviation=SMALL)
            for operation, function, workspace in (
                (ours.lstm.default, lstm, lambda given, _: given[2].nbytes),
                (ours.lstm_gradient.default, lstm_gradient, lambda given, _: given[1].nbytes),
                (ours.gru.default, gru, None),
                (ours.gru_gradient.default, gru_gradient, lambda given, _: 4 * given[1].nbytes),
            )
        ),
    ),
)
