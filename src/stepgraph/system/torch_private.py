"""Every private name of PyTorch that stepgraph uses, and nothing else.

PyTorch may rename or drop them in any version; `tests/test_torch_private.py` lists each one and its purpose. What
runs in every step is PyTorch's own object under another name, without overhead. Inductor takes seconds
to import, so it is imported on first use.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch._inductor.output_code import CompiledFxGraph

# Running


InferenceMode: Any = torch._C._InferenceMode
"""Inference mode for every call; the public `torch.inference_mode` adds slow Python code."""

function_mode_count = torch._C._len_torch_function_stack
"""How many modes intercept PyTorch's functions, including a default device; no public name counts them."""

raw_stream: Any = torch._C._cuda_getCurrentRawStream if torch.backends.cuda.is_built() else None
"""The current CUDA stream of a device as a number; the public API creates an object in every call."""

version: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often an array was written to; no public name provides it."""

base: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""The array that a view is a part of, or None; no public name provides it."""

foreach_add_ = torch._foreach_add_
"""Adds to many arrays in one call; the public `add_` takes one."""

foreach_copy_ = torch._foreach_copy_
"""Copies into many arrays in one call; the public `copy_` takes one."""

fused_adam_ = torch._fused_adam_
"""Adam in one pass over memory; the public `torch.optim.Adam` holds its own state."""

fused_adamw_ = torch._fused_adamw_
"""AdamW in one pass over memory; the public `torch.optim.AdamW` holds its own state."""

fused_sgd_ = torch._fused_sgd_
"""SGD in one pass over memory; the public `torch.optim.SGD` holds its own state."""


functional_collectives: Any = torch.ops._c10d_functional
"""Collectives as operators on arrays; their public counterparts write in place, and Python wrappers change names."""


def compile_cuda(source: str, name: str, **settings: Any) -> Callable[..., None]:
    """A CUDA kernel from its source, compiled for the current device; publicly that takes a C++ compiler."""
    return torch.cuda._compile_kernel(source, name, **settings)


addmm_activation = torch._addmm_activation
"""A product, a sum and ReLU in one cuBLAS call; publicly they are two operators."""


# Recording


FakeTensor = torch._subclasses.FakeTensor
"""The type of arrays without memory; it has no public name."""

FakeTensorMode = torch._subclasses.FakeTensorMode
"""Creates arrays without memory, on which steps are recorded; the public meta device loses their device."""

DispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""Sees every operator that runs; no public name provides it."""


@contextmanager
def without_checkpointing() -> Iterator[None]:
    """Lets `torch.utils.checkpoint` only call its function; no public switch turns it off.

    Recomputation inside a recording would be recorded as further operators.
    """
    from torch.utils import checkpoint

    names = {"CheckpointFunction": _Called, "_checkpoint_without_reentrant_generator": _nothing_around}
    before = {name: getattr(checkpoint, name) for name in names}
    for name, replacement in names.items():
        setattr(checkpoint, name, replacement)
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(checkpoint, name, original)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Lets what `torch.compile` returned call what it was made from, also during a recording, where it would raise."""
    from torch._dynamo import config

    with config.patch(error_on_nested_fx_trace=False), torch.compiler.set_stance("force_eager"):
        yield


class _Called:
    """Stands for the autograd function that would compute again."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *arguments: Any) -> Any:
        """Calls the function."""
        return function(*arguments)


def _nothing_around(*_: Any, **__: Any) -> Iterator[None]:
    """Stands for the hooks that would compute again."""
    yield


is_transformed: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether an array is one of `torch.vmap` or `torch.func.grad` inside a call of it; no public name provides it."""

disable_modes = torch.utils._python_dispatch._disable_current_modes
"""Real arrays in the middle of a recording; no public name suspends a recording."""


# Recorded operators and graphs


OpOverload = torch._ops.OpOverload
"""The type of PyTorch's operators; it has no public name."""


def schema(operator: OpOverload) -> Any:
    """An operator's arguments and which of them it changes; publicly they can only be parsed from its text."""
    return operator._schema


def identity(storage: torch.UntypedStorage) -> int:
    """A number shared only by views of the same memory; the public address is 0 for arrays without memory."""
    return storage._cdata


def root(graph: torch.fx.Graph) -> torch.fx.Node:
    """The node before a graph's first; publicly a node can only be moved next to one of the others."""
    return graph._root


def module_sources() -> dict[str, str]:
    """The sources that torch.fx keeps for tracebacks, by file name; there is no public API to drop one."""
    return torch.fx.graph_module._loader.eval_cache


tree_map_only = torch.utils._pytree.tree_map_only
"""Maps over values of one type in nested results; PyTorch has no public name for trees."""


# Operators that a step records, or chooses among; public functions choose among them internally


efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
"""Attention on CUDA in float32."""

efficient_attention_gradient = torch.ops.aten._scaled_dot_product_efficient_attention_backward
"""Its gradient."""

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
"""Attention on CUDA in half precision."""

flash_attention_gradient = torch.ops.aten._scaled_dot_product_flash_attention_backward
"""Its gradient."""

flash_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Attention on the CPU."""

softmax = torch.ops.aten._softmax
"""Softmax along one axis."""

softmax_in_python = torch._softmax
"""The same operator in the Python API, which calls it faster."""

log_softmax = torch.ops.aten._log_softmax
"""The log softmax."""

log_softmax_in_python = torch._log_softmax
"""The same operator in the Python API."""

log_softmax_gradient = torch.ops.aten._log_softmax_backward_data
"""Its gradient, with which the gradient of a cross entropy ends."""

log_softmax_gradient_in_python = torch._log_softmax_backward_data
"""The same operator in the Python API."""

to_copy = torch.ops.aten._to_copy
"""A conversion to another type."""

unsafe_view = torch.ops.aten._unsafe_view
"""A view of a result that nothing else reads."""

unsafe_index = torch.ops.aten._unsafe_index
"""Reads at indices that are known to be in range, without checking."""

nnpack_convolution = torch.ops.aten._nnpack_spatial_convolution
"""A convolution with NNPACK."""

slow_convolution = torch.ops.aten._slow_conv2d_forward
"""A convolution as products over patches."""

slow_convolution_gradient = torch.ops.aten._slow_conv2d_backward
"""Its gradients."""

cudnn_rnn = torch.ops.aten._cudnn_rnn
"""A recurrent network with cuDNN; the public `torch.lstm` hides what the gradient needs."""

cudnn_rnn_gradient = torch.ops.aten._cudnn_rnn_backward
"""Its gradients."""

cudnn_rnn_pack = torch.ops.aten._cudnn_rnn_flatten_weight
"""Packs the weights of a recurrent network into one block, as cuDNN expects them."""


# PyTorch's compiler


class Inductor(NamedTuple):
    """PyTorch's compiler for a graph that is already recorded; the public `torch.compile` does its own recording."""

    compile_graph: Callable[..., Any]
    compile_kernels: Callable[..., Any]  # of a graph prepared by the other one
    without_repeats: Callable[[torch.fx.Graph], torch.fx.Graph]  # equal operators are computed once


def inductor() -> Inductor:
    """The compiler, imported; the first import takes seconds."""
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    return Inductor(compile_fx, compile_fx_inner, fx_graph_cse)


@contextmanager
def kept_between_runs(arrays: Sequence[torch.Tensor]) -> Iterator[None]:
    """Lets the compiler keep what it makes for these arrays, on disk, for later runs; no public name asks for it.

    It refuses shapes that cannot be open, although ours never are.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = next((one.fake_mode for one in arrays if isinstance(one, FakeTensor)), None)
    before = None if mode is None else mode.shape_env
    if mode is not None:
        mode.shape_env = before or ShapeEnv()
    try:
        yield
    finally:
        if mode is not None:
            mode.shape_env = before


@contextmanager
def compiled_for(fingerprint: str) -> Iterator[None]:
    """Takes from the compiler's cache only what was compiled for the same fingerprint."""
    settings: Any = torch.compiler.config
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag} {fingerprint}"):
        yield


def drop(compiled: CompiledFxGraph) -> None:
    """Removes a compiled graph from the compiler's cache; a public name only clears all of it."""
    from torch._inductor.codecache import FxGraphCache

    if hasattr(compiled, "cache_key") and compiled._fx_graph_cache_key is not None:
        shutil.rmtree(FxGraphCache._get_tmp_dir_for_key(compiled._fx_graph_cache_key), ignore_errors=True)


def generated_code(compiled: CompiledFxGraph) -> Any:
    """The code generated for a graph; a public name provides only the function around it."""
    return compiled.current_callable


def generated_module(compiled: CompiledFxGraph) -> Any:
    """The module that was generated for a graph, with its kernels; None for a graph without operators."""
    from torch._inductor.codecache import PyCodeCache

    if not hasattr(compiled, "cache_key"):  # a graph without operators is returned as it is
        return None
    return next(one for one in reversed(PyCodeCache.modules) if one.key == compiled.cache_key)


def kernel_assembly(compiled: CompiledFxGraph) -> Iterator[str]:
    """The PTX of a graph's kernels, in all block sizes that may be tried; no public name provides it.

    Triton keeps it in its cache, in a folder named after the kernel.
    """
    from torch._inductor.runtime.runtime_utils import triton_cache_dir, triton_hash_to_path_key

    module = generated_module(compiled)
    for kernel in vars(module).values() if module is not None else ():
        for result in getattr(kernel, "compile_results", ()):
            cache = triton_cache_dir(kernel.triton_meta["device"])
            for path in Path(cache, triton_hash_to_path_key(result.kernel.hash)).glob("*.ptx"):
                yield path.read_text()
