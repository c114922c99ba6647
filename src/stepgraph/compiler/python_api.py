"""PyTorch's operators that are also functions or methods of its Python API.

The two do the same, but `torch.ops` matches arguments against a schema in generic code. The parser of the Python API
takes half that time, which is most of the time of an operator on few numbers.

To add one, add a row here and its arguments in `tests/test_python_api.py`, which checks that the function calls exactly
this operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stepgraph.system import torch_private

aten, Tensor = torch.ops.aten, torch.Tensor

IN_PYTHON: dict[torch_private.OpOverload, Callable[..., Any]] = {
    aten.abs.default: torch.abs,
    aten.add.Tensor: torch.add,
    aten.add.out: torch.add,
    aten.add_.Tensor: Tensor.add_,
    aten.addmm.default: torch.addmm,
    aten.addmm.out: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.bmm.out: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clamp_min.default: torch.clamp_min,
    aten.clone.default: torch.clone,
    aten.copy_.default: Tensor.copy_,
    aten.div.Tensor: torch.div,
    aten.div_.Tensor: Tensor.div_,
    aten.embedding.default: torch.embedding,
    aten.exp.default: torch.exp,
    aten.expand.default: Tensor.expand,
    aten.lerp.Scalar: torch.lerp,
    aten.log.default: torch.log,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mm.out: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.mul.out: torch.mul,
    aten.mul_.Tensor: Tensor.mul_,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.ones_like.default: torch.ones_like,
    aten.permute.default: torch.permute,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.relu.default: torch.relu,
    aten.relu_.default: torch.relu_,
    aten.select.int: torch.select,
    aten.sigmoid.default: torch.sigmoid,
    aten.sigmoid_.default: torch.sigmoid_,
    aten.sqrt.default: torch.sqrt,
    aten.squeeze.dim: torch.squeeze,
    aten.sub.Tensor: torch.sub,
    aten.sub_.Tensor: Tensor.sub_,
    aten.sum.dim_IntList: torch.sum,
    aten.sum.IntList_out: torch.sum,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.tanh_.default: torch.tanh_,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: Tensor.view,
    aten.where.self: torch.where,
    torch_private.log_softmax.default: torch_private.log_softmax_in_python,
    torch_private.log_softmax.out: torch_private.log_softmax_in_python,
    torch_private.log_softmax_gradient.default: torch_private.log_softmax_gradient_in_python,
    torch_private.log_softmax_gradient.out: torch_private.log_softmax_gradient_in_python,
    torch_private.softmax.default: torch_private.softmax_in_python,
    torch_private.softmax.out: torch_private.softmax_in_python,
}
