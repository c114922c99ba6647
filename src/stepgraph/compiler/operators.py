"""One row per operator: its out-variant, its workspace, the cost of recomputing it.

Passes consult this table. An operator without a row has none of these: its results are new arrays, it needs no
significant workspace, and it is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph.compiler.kernels import label_losses, layer_norm, lstm_onednn, row_sums, statistics
from stepgraph.compiler.kernels.alternatives import Alternative
from stepgraph.compiler.kernels.choose_operator import ALTERNATIVES
from stepgraph.compiler.kernels.update import PreparedUpdate, update_by_rule, update_on_cpu, workspace
from stepgraph.compiler.program import fake, fakes, note
from stepgraph.compiler.python_api import IN_PYTHON
from stepgraph.compiler.tuned import MANIFEST
from stepgraph.layers import gru_kernel, lstm_kernel, over_ranks
from stepgraph.random import draw_mask, draw_uniform
from stepgraph.system import torch_private

aten, ours = torch.ops.aten, torch.ops.stepgraph
Workspace = Callable[[Sequence[Any], int], int]


class Out(NamedTuple):
    """The out-variant of an operator, and the keyword that takes the memory.

    With several results, all of them arrays, the keyword takes a list with None for those without memory.

    Args:
        function: the variant.
        keyword: the keyword.
        is_for_tiny: whether it is used in tiny steps only, where it saves the time to create an array.
    """

    function: Callable[..., Any]
    keyword: str = "out"
    is_for_tiny: bool = False


class Prepared(NamedTuple):
    """How an operator is prepared for arrays that are the same in every call.

    Args:
        function: takes these arrays and the constants, and returns a function of what each call brings.
        brought: the positions of the arguments that each call brings.
        applies: whether an operator can be prepared.
    """

    function: Callable[..., Callable[..., None]]
    brought: tuple[int, ...]
    applies: Callable[[fx.Node], bool]


class Count:
    """Adds to one number in memory: PyTorch's operator takes ten times as long."""

    def __init__(self, number: torch.Tensor, added: float) -> None:
        self._cell: Any = number.numpy().data
        self._added = added

    def __call__(self) -> None:
        self._cell[()] += self._added


def _counts(node: fx.Node) -> bool:
    """Whether an operator adds a constant to one number, in the type of Python's own, on the CPU."""
    array, added = fake(node), node.args[1]
    counts = isinstance(added, float) and array.ndim == 0 and array.dtype is torch.float64 and not node.kwargs
    return counts and array.device.type == "cpu" and not node.users


@dataclass(frozen=True)
class Operator:
    """What passes know about an operator.

    Args:
        out: the variant that writes into preallocated memory.
        in_place: the variant that overwrites its first argument with its first result.
        workspace: its workspace in bytes, from its arguments (arrays without memory) and the bytes of its results.
        is_costly: whether it is recomputed only if recomputing everything else is not enough.
        direct: for our own operators, the Python function behind them. A compiled step calls it without PyTorch's
            dispatcher, which would take longer than most of them.
        prepared: how it is prepared for arrays that stay between calls; it returns nothing.
    """

    out: Out | None = None
    in_place: Any = None
    workspace: Workspace | None = None
    is_costly: bool = False
    direct: Callable[..., Any] | None = None
    prepared: Prepared | None = None


_threshold_into = aten.threshold_backward.grad_input.op  # without a Python wrapper


def _threshold_backward(g: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.Tensor:
    return _threshold_into(g, x, threshold, grad_input=g)


def _like(position: int) -> Workspace:
    """The size of one argument."""
    return lambda given, _: given[position].nbytes


def _of_flash_attention(given: Sequence[Any], _: int) -> int:
    """The gradient of the query in float32, and one number per row, for whole blocks of rows and columns."""
    batch, heads, rows, width = given[1].shape
    return 4 * batch * heads * _up(rows, 128) * (_up(width, 32) + 1)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _alternative(one: Alternative) -> Operator:
    return Operator(out=Out(one.function) if one.takes_out else None, workspace=one.workspace)


TABLE: dict[Any, Operator] = {
    # PyTorch's
    aten.add.Tensor: Operator(out=Out(aten.add.out), in_place=aten.add_.Tensor),
    aten.addmm.default: Operator(out=Out(aten.addmm.out), is_costly=True),
    aten.baddbmm.default: Operator(is_costly=True),
    aten.bmm.default: Operator(out=Out(aten.bmm.out), is_costly=True),
    aten.convolution.default: Operator(is_costly=True),
    aten.div.Tensor: Operator(in_place=aten.div_.Tensor),
    aten.gelu.default: Operator(out=Out(aten.gelu.out)),
    aten.gelu_backward.default: Operator(out=Out(aten.gelu_backward.grad_input, "grad_input")),
    aten.mm.default: Operator(out=Out(aten.mm.out), is_costly=True),
    aten.mul.Tensor: Operator(out=Out(aten.mul.out), in_place=aten.mul_.Tensor),
    aten.relu.default: Operator(out=Out(aten.relu.out), in_place=aten.relu_.default),
    aten.sigmoid.default: Operator(in_place=aten.sigmoid_.default),
    torch_private.efficient_attention.default: Operator(is_costly=True),
    torch_private.flash_attention.default: Operator(is_costly=True),
    torch_private.flash_attention_gradient.default: Operator(workspace=_of_flash_attention),
    torch_private.flash_attention_on_cpu.default: Operator(is_costly=True),
    torch_private.log_softmax.default: Operator(out=Out(torch_private.log_softmax.out, is_for_tiny=True)),
    torch_private.log_softmax_gradient.default: Operator(
        out=Out(torch_private.log_softmax_gradient.out, is_for_tiny=True)
    ),
    torch_private.softmax.default: Operator(out=Out(torch_private.softmax.out)),
    aten.sub.Tensor: Operator(in_place=aten.sub_.Tensor),
    aten.sum.dim_IntList: Operator(out=Out(aten.sum.IntList_out, is_for_tiny=True), workspace=row_sums.workspace),
    aten.tanh.default: Operator(in_place=aten.tanh_.default),
    aten.threshold_backward.default: Operator(
        out=Out(aten.threshold_backward.grad_input, "grad_input"), in_place=_threshold_backward
    ),
    aten.add_.Tensor: Operator(prepared=Prepared(Count, (), _counts)),
    # Our own
    ours.keep_mask.default: Operator(direct=draw_mask),
    ours.uniform.default: Operator(direct=draw_uniform),
    ours.sum_over_ranks.default: Operator(direct=over_ranks.run, is_costly=True),
    ours.layer_norm.default: Operator(direct=layer_norm.layer_norm),
    ours.layer_norm_gradient.default: Operator(direct=layer_norm.layer_norm_gradient, workspace=layer_norm.workspace),
    ours.track_.default: Operator(direct=statistics.track),
    ours.update_.default: Operator(
        direct=update_on_cpu, prepared=Prepared(PreparedUpdate, (1, 4, 5), lambda node: True)
    ),
    ours.update_by_rule_.default: Operator(direct=update_by_rule, workspace=workspace),
    # transposed weights
    ours.lstm.default: Operator(out=Out(lstm_kernel.run), workspace=_like(2), is_costly=True),
    # `∂h/∂c` of all steps
    ours.lstm_gradient.default: Operator(out=Out(lstm_kernel.run_gradient), workspace=_like(1), is_costly=True),
    ours.lstm_onednn.default: Operator(is_costly=True, direct=lstm_onednn.run, workspace=lstm_onednn.workspace),
    ours.lstm_onednn_gradient.default: Operator(
        is_costly=True, direct=lstm_onednn.run_gradient, workspace=lstm_onednn.workspace_of_gradient
    ),
    ours.gru.default: Operator(is_costly=True, direct=gru_kernel.run),
    # the states before all steps and three factors
    ours.gru_gradient.default: Operator(
        workspace=lambda given, _: 4 * given[1].nbytes, is_costly=True, direct=gru_kernel.run_gradient
    ),
    ours.label_losses.default: Operator(workspace=label_losses.workspace, direct=label_losses.run),
    ours.label_losses_gradient.default: Operator(
        in_place=label_losses.run_gradient_in_place,
        workspace=label_losses.workspace,
        direct=label_losses.run_gradient,
    ),
    ours.label_losses_with_gradient.default: Operator(
        in_place=label_losses.run_with_gradient_in_place,
        workspace=label_losses.workspace,
        direct=label_losses.run_with_gradient,
    ),
    # Implementations beside PyTorch's
    **{one.function: _alternative(one) for one in ALTERNATIVES},
    **{one.function: _alternative(one) for row in MANIFEST for one in row.offers},
}
_PLAIN = Operator()


def operator(node: fx.Node) -> Operator:
    """The table entry for the operator of a node."""
    return TABLE.get(node.target, _PLAIN)


def note_workspaces(graph: fx.Graph) -> None:
    """Records the workspace of operators for the memory plan."""
    for node in graph.nodes:
        note_workspace(node)


def note_workspace(node: fx.Node) -> None:
    """Records the workspace of one operator."""
    workspace = operator(node).workspace
    if workspace is not None:
        given = fx.map_arg(list(node.args), fake)
        note(node, workspace=workspace(given, sum(array.nbytes for array in fakes(node))))


def call_directly(graph: fx.Graph) -> None:
    """Calls operators by the function that does so fastest: our own behind them, or that of PyTorch's Python API."""
    for node in graph.nodes:
        if node.op == "call_function":
            if node.target is aten.view.default and node.args[1]:
                node.args = (node.args[0], *node.args[1])  # one by one, the extents are parsed in half the time
            node.target = operator(node).direct or IN_PYTHON.get(node.target, node.target)
