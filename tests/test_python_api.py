"""Functions of PyTorch's Python API that stand for operators: each one calls exactly its operator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import ops

from stepgraph.compiler.python_api import IN_PYTHON
from stepgraph.system import torch_private

aten = ops.aten


def _matrix() -> torch.Tensor:
    return torch.arange(1.0, 10.0).reshape(3, 3)


def _stack() -> torch.Tensor:
    return torch.arange(8.0).reshape(2, 2, 2)


# Arguments, as recorded steps have them; each call makes its own, because some operators change theirs.
ARGUMENTS: dict[Any, Callable[[], tuple[Any, ...]]] = {
    aten.add.Tensor: lambda: (_matrix(), _matrix()),
    aten.add.out: lambda: (_matrix(), _matrix()),
    aten.add_.Tensor: lambda: (_matrix(), 1),
    aten.addmm.default: lambda: (_matrix()[0], _matrix(), _matrix()),
    aten.addmm.out: lambda: (_matrix()[0], _matrix(), _matrix()),
    aten.bmm.default: lambda: (_stack(), _stack()),
    aten.bmm.out: lambda: (_stack(), _stack()),
    aten.cat.default: lambda: ([_matrix(), _matrix()], 1),
    aten.clamp_min.default: lambda: (_matrix(), 3),
    aten.copy_.default: lambda: (_matrix(), _matrix().t()),
    aten.div.Tensor: lambda: (_matrix(), 3),
    aten.div_.Tensor: lambda: (_matrix(), _matrix()),
    aten.embedding.default: lambda: (_matrix(), torch.tensor([2, 0]), -1, False, False),
    aten.expand.default: lambda: (_matrix()[0], [2, 3]),
    aten.lerp.Scalar: lambda: (_matrix(), -_matrix(), 0.1),
    aten.mean.dim: lambda: (_matrix(), [1], True),
    aten.mm.default: lambda: (_matrix(), _matrix()),
    aten.mm.out: lambda: (_matrix(), _matrix()),
    aten.mul.Tensor: lambda: (_matrix(), 0.5),
    aten.mul.out: lambda: (_matrix(), _matrix()),
    aten.mul_.Tensor: lambda: (_matrix(), _matrix()),
    aten.native_layer_norm.default: lambda: (_matrix(), [3], _matrix()[0], None, 1e-5),
    aten.permute.default: lambda: (_stack(), [2, 0, 1]),
    aten.pow.Tensor_Scalar: lambda: (_matrix(), 2),
    aten.select.int: lambda: (_matrix(), 0, 1),
    aten.squeeze.dim: lambda: (_matrix()[:1], 0),
    aten.sub.Tensor: lambda: (_matrix(), 1.0),
    aten.sub_.Tensor: lambda: (_matrix(), _matrix()),
    aten.sum.dim_IntList: lambda: (_matrix(), [0], True),
    aten.sum.IntList_out: lambda: (_matrix(), [0], True),
    aten.transpose.int: lambda: (_matrix(), 0, 1),
    aten.unsqueeze.default: lambda: (_matrix(), 1),
    aten.view.default: lambda: (_matrix(), [9]),
    aten.where.self: lambda: (_matrix() > 4, _matrix(), -_matrix()),
    torch_private.softmax.default: lambda: (_matrix(), 1, False),
    torch_private.softmax.out: lambda: (_matrix(), 1, False),
    torch_private.log_softmax.default: lambda: (_matrix(), 1, False),
    torch_private.log_softmax.out: lambda: (_matrix(), 1, False),
    torch_private.log_softmax_gradient.default: lambda: (_matrix(), -_matrix(), 1, torch.float32),
    torch_private.log_softmax_gradient.out: lambda: (_matrix(), -_matrix(), 1, torch.float32),
}
# Those recorded with keywords.
KEYWORDS: dict[Any, tuple[dict[str, Any], ...]] = {
    aten.clone.default: ({}, {"memory_format": torch.contiguous_format}),
    aten.ones_like.default: ({}, {"pin_memory": False}),
    aten.add.Tensor: ({}, {"alpha": 2}),
}


class _Seen(torch_private.DispatchMode):
    """The operators that PyTorch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, operator: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        self.operators.append(operator)
        return operator(*given, **(named or {}))


@pytest.mark.parametrize("operator", IN_PYTHON, ids=str)
def test_a_function_calls_exactly_its_operator(operator: Any) -> None:
    arguments = ARGUMENTS.get(operator, lambda: (_matrix(),))
    for named in KEYWORDS.get(operator, ({},)):
        given, memory, expected_memory = arguments(), _memory(operator), _memory(operator)
        with torch.inference_mode(), _Seen() as seen:
            found = IN_PYTHON[operator](*given, **named, **memory)
        assert seen.operators == [operator]
        with torch.inference_mode():
            expected = operator(*arguments(), **named, **expected_memory)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def _memory(operator: Any) -> dict[str, torch.Tensor]:
    return {"out": torch.empty(0)} if operator.name().endswith("out") else {}
