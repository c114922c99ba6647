"""Alternative implementations of single operators, built from what PyTorch provides.

To add one, add a function and a row in `ALTERNATIVES`; `measure` decides for each shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.kernels import normalization_by_rows as by_rows
from stepgraph.compiler.kernels import short_rows
from stepgraph.compiler.kernels.alternatives import Alternative
from stepgraph.compiler.kernels.measure import Pick, are_large, fastest, fewer
from stepgraph.compiler.kernels.preferences import preferred
from stepgraph.compiler.program import fake, note
from stepgraph.system import torch_private

aten = torch.ops.aten
Array = torch.Tensor
LARGE = 1 << 14  # elements from which an alternative can matter


def choose(node: fx.Node, offered: Sequence[Alternative], pick: Pick | None = None) -> None:
    """Replaces the operator with its fastest implementation.

    Args:
        node: the operator.
        offered: further alternatives, besides `ALTERNATIVES`.
        pick: chooses one by its name; by default, they are measured.
    """
    operator, arrays = cast(Any, node.target), [fake(one) for one in node.all_input_nodes]
    if node.kwargs or max((a.numel() for a in arrays if a.dtype.is_floating_point), default=0) < LARGE:
        return
    arguments = tuple(fake(one) if isinstance(one, fx.Node) else one for one in node.args)
    found = [one for one in (*ALTERNATIVES, *offered) if one.operation is operator and one.fits(arguments)]
    if not found:
        return
    known = {"pytorch": operator} | {one.name: one.function for one in found}
    if all(one.scales for one in found):
        arguments = fewer(arguments)
    elif found[0].sample is not None:
        arguments = found[0].sample(arguments)
    rules = {"gain": max(one.gain for one in found), "deviation": min(one.deviation for one in found)}
    if pick is None:
        pick = preferred if are_large(arguments) else fastest
    name = pick(str(operator), known, arguments, **rules)
    note(node, implementation=(str(operator).split(".")[1], name))
    node.target = known[name]


def max_pool_channels_last(x: Array, *window: Any) -> tuple[Array, Array]:
    """With channels last, several channels are compared together; the images are converted to that layout and back."""
    y, indices = aten.max_pool2d_with_indices.default(x.contiguous(memory_format=torch.channels_last), *window)
    return y.contiguous(), indices.contiguous()


def _is_channels_first(arguments: Sequence[Any]) -> bool:
    return arguments[0].ndim == 4 and arguments[0].is_contiguous()


ALTERNATIVES = (
    Alternative(
        aten.max_pool2d_with_indices.default,
        "channels last",
        max_pool_channels_last,
        fits=_is_channels_first,
        workspace=lambda arguments, results: max(arguments[0].nbytes, results),
        scales=True,
    ),
    Alternative(
        aten.native_batch_norm.default,
        "rows",
        by_rows.normalize_by_rows,
        fits=by_rows.fits,
        workspace=by_rows.workspace,
        scales=True,
    ),
    Alternative(
        aten.native_batch_norm_backward.default,
        "rows",
        by_rows.gradients_by_rows,
        fits=by_rows.fits_gradient,
        workspace=by_rows.workspace,
        scales=True,
    ),
    *(
        Alternative(operation, "padded", function, fits=short_rows.fits, workspace=short_rows.workspace, scales=True)
        for operation, function in (
            (torch_private.log_softmax.default, short_rows.log_softmax),
            (torch_private.softmax.default, short_rows.softmax),
        )
    ),
)
