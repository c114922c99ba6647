"""Every private name of PyTorch that stepgraph uses, and nothing else.

PyTorch may rename or drop them in any version; `tests/test_torch_private.py` lists each one and its purpose. What
runs in every step is PyTorch's own object under another name, without overhead. Inductor takes seconds
to import, so it is imported on first use.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from math import prod
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stepgraph.system import forks, nvrtc

if TYPE_CHECKING:
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

# Running


InferenceMode: Any = torch._C._InferenceMode
"""Inference mode for every call; the public `torch.inference_mode` adds slow Python code."""

any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device; the public query of one device takes three times as long."""

Alike: Any = torch._C._dynamo.guards.TensorGuards
"""Checks at once that arrays are like others: kind, type, device, shape, strides; publicly that takes ten queries."""

rounding: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
"""What a library may round float32 factors to, by library and kind; the public attribute takes seven times as long."""

function_mode_count = torch._C._len_torch_function_stack
"""How many modes intercept PyTorch's functions, including a default device; no public name counts them."""

raw_stream: Any = torch._C._cuda_getCurrentRawStream if torch.backends.cuda.is_built() else None
"""The current CUDA stream of a device as a number; the public API creates an object in every call."""

version: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often an array was written to; no public name provides it."""

base: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
"""The array that a view is a part of, or None; no public name provides it."""

gradient_hooks: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")
"""What `backward` calls with the gradient of a parameter; no public name provides it."""

later_gradient_hooks: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
"""What `backward` calls when it has added that gradient; no public name provides it."""

grouped_mm = torch._grouped_mm
"""Products of groups of rows; the public `grouped_mm` calls it, and only it is seen by a mode."""

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


def compile_cuda(source: str, name: str, options: Sequence[str] = ()) -> Any:
    """A CUDA kernel from its source, compiled for the current device; publicly that takes a C++ compiler."""
    if torch.version.hip is not None:
        return torch.cuda._compile_kernel(source, name, nvcc_options=list(options))
    code, lowered = assemble_cuda(source, name, options, torch.cuda.current_device())
    return torch.cuda._utils._cuda_load_module(code, [lowered])[lowered]  # type: ignore[index]


def assemble_cuda(source: str, name: str, options: Sequence[str], device: int) -> tuple[bytes, str]:
    """The machine code that `compile_cuda` loads, and the kernel's name in it; nothing happens on the device.

    Public names compile and load in one call.
    """
    found, library = torch.cuda.get_device_properties(device), torch.cuda._utils._get_gpu_rtc_library()
    return nvrtc.remembered(library, source, name, [f"--gpu-architecture=sm_{found.major}{found.minor}", *options])


def launch_cuda(kernel: Any, blocks: int, threads: int, table: ctypes.Structure) -> None:
    """Launches what `compile_cuda` returned with one structure by value; its own call takes only numbers and arrays.

    The launch goes to the current stream of the current device.
    """
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    given = (ctypes.c_void_p * 1)(ctypes.addressof(table))
    launch = torch.cuda._utils._get_gpu_runtime_library().cuLaunchKernel
    torch.cuda._utils._check_cuda(launch(kernel.func, blocks, 1, 1, threads, 1, 1, 0, stream, given, None))


addmm_activation = torch._addmm_activation
"""A product, a sum and ReLU in one cuBLAS call; publicly they are two operators."""


# Recording


FakeTensor = torch._subclasses.FakeTensor
"""The type of arrays without memory; it has no public name."""

FakeTensorMode = torch._subclasses.FakeTensorMode
"""Creates arrays without memory, on which steps are recorded; the public meta device loses their device."""

DispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""Sees every operator that runs; no public name provides it."""


device_of: Any = torch.ops.prim.device.default
"""The device of an array without memory, which PyTorch asks for as if it were an operator's result."""


unseen: Any = torch._C._DisableTorchDispatch
"""Operators on the memory behind arrays that no mode sees; no public name lets them pass a recording."""


def snapshot(array: Any) -> torch.Tensor:
    """An array without memory that stays as another one is now; inside of a recording, `detach` would be recorded."""
    with unseen():
        return _fake(array.fake_mode, array, array.fake_device)


class Layout(NamedTuple):
    """What is known about an array without memory, besides its memory."""

    device: torch.device
    dtype: torch.dtype
    shape: Sequence[int]
    strides: Sequence[int]
    offset: int
    is_conjugate: bool
    is_negative: bool


def layout(array: Any) -> Layout:
    """The layout of an array without memory; its device has no public name that a recording would not see."""
    kept = array.fake_device, array.dtype, array.shape, array.stride(), array.storage_offset()
    return Layout(*kept, array.is_conj(), array.is_neg())


def laid_out(given: Layout, mode: FakeTensorMode, storage: torch.UntypedStorage | None) -> torch.Tensor:
    """An array without memory with a layout, also in a recording, as a view of a storage or of its own.

    Public functions would ask the recording, which takes twenty times as long.
    """
    with unseen():
        if storage is None:
            made = torch.empty_strided(given.shape, given.strides, dtype=given.dtype, device="meta")
        else:
            made = torch.empty(0, dtype=given.dtype, device="meta")
            made.set_(storage, given.offset, given.shape, given.strides)
        found = _fake(mode, made, given.device)
    if storage is None:
        guard = torch._C._set_warn_deprecated_on_mutable_data_ptr
        (guard if mode._allow_unsafe_data_ptr_access else torch._C._set_throw_on_mutable_data_ptr)(found)
    return found


def _fake(mode: Any, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An array without memory in the place of another one.

    Its constructor takes five times as long: it sets twenty attributes, and allocates an array on a GPU each time.
    """
    known = _attributes(device)
    made: Any = torch.Tensor._make_subclass(
        FakeTensor, like, False, dispatch_device=True, device_for_backend_keys=device
    )
    made.__dict__.update(known, fake_mode=mode)
    return made


@cache
def _attributes(device: torch.device) -> dict[str, Any]:
    """What the constructor of an array without memory sets, except its mode."""
    with unseen():
        made = FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), device)
    return {name: value for name, value in vars(made).items() if name != "fake_mode"}


def without_memory(
    mode: Any, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None, device: torch.device
) -> torch.Tensor:
    """A new array without memory, contiguous unless it has strides; a public function takes five times as long."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return FakeTensor(mode, meta if strides is None else meta.as_strided(shape, strides), device)


def another(value: Any) -> Any:
    """An array without memory like one, which shares nothing with it; public functions take twenty times as long."""
    return laid_out(layout(value), value.fake_mode, None) if isinstance(value, FakeTensor) else value


@cache
def is_composed(operator: Any, device: str | None) -> bool:
    """Whether PyTorch's tracer may record what an operator is composed of: the device has no kernel for it."""
    if not operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return False
    key = None if device is None else torch._C._dispatch_key_for_device(device)
    return key is None or not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


def node_name(graph: torch.fx.Graph, operator: Any) -> str:
    """The name that PyTorch's tracer gives the node of an operator; without one, torch.fx names it by its overload."""
    return graph._target_to_str(operator.overloadpacket.__name__)


_replacing = threading.RLock()
"""Held while something is replaced for the whole process: two threads would restore what the other has replaced."""

forks.wait_for(_replacing)


@contextmanager
def without_checkpointing() -> Iterator[None]:
    """Lets `torch.utils.checkpoint` only call its function; no public switch turns it off.

    Recomputation inside a recording would be recorded as further operators.
    """
    from torch.utils import checkpoint

    names = {"CheckpointFunction": _Called, "_checkpoint_without_reentrant_generator": _nothing_around}
    with _replacing:
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

    with _replacing, config.patch(error_on_nested_fx_trace=False), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def nothing_validated() -> Iterator[None]:
    """Lets distributions take any arguments: they look at numbers, which a recording does not have."""
    with _replacing:
        before = torch.distributions.Distribution._validate_args
        torch.distributions.Distribution.set_default_validate_args(False)
        try:
            yield
        finally:
            torch.distributions.Distribution.set_default_validate_args(before)


@contextmanager
def nothing_logged() -> Iterator[None]:
    """Keeps PyTorch from logging each operator that arrays without memory do not fit: the error says it once."""

    def no(_: logging.LogRecord) -> bool:
        return False

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(no)
    try:
        yield
    finally:
        logger.removeFilter(no)


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

onednn_linear: Any = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None
"""A product with transposed weights by oneDNN; public products of plain matrices in float32 use BLAS."""

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


class Trace(NamedTuple):
    """A recording of functions that change arrays, as operators that change nothing, while it runs."""

    tracer: Any

    @property
    def graph(self) -> torch.fx.Graph:
        """What is recorded so far."""
        return self.tracer.graph

    def node(self, array: torch.Tensor) -> torch.fx.Node:
        """The node of an array."""
        from torch.fx.experimental.proxy_tensor import get_proxy_slot

        return get_proxy_slot(array, self.tracer).proxy.node

    def array(self, node: torch.fx.Node, fake: torch.Tensor) -> torch.Tensor:
        """The array of a node, followed from now on."""
        from torch.fx.experimental.proxy_tensor import has_proxy_slot, track_tensor

        if isinstance(fake, torch.Tensor) and not has_proxy_slot(fake, self.tracer):
            track_tensor(fake, torch.fx.Proxy(node, self.tracer), constant=None, tracer=self.tracer)
        return fake

    @staticmethod
    def functional(array: torch.Tensor) -> torch.Tensor:
        """An array that can be changed, for which nothing is changed."""
        from torch._functorch._aot_autograd.functional_utils import to_fun

        return to_fun(array)

    @staticmethod
    def current(array: torch.Tensor) -> torch.Tensor:
        """What such an array is now."""
        from torch._functorch._aot_autograd.functional_utils import from_fun

        return from_fun(array)  # type: ignore[return-value]


def current_trace() -> Trace:
    """The recording in which the caller runs; no public name provides it."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    return Trace(mode.tracer)


@contextmanager
def compiling(arrays: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> Iterator[None]:
    """The state in which the compiler takes a graph apart and compiles it; publicly it also records the graph again."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import V as current
    from torch._inductor.compile_fx import _use_lazy_graph_module, enable_python_dispatcher
    from torch._inductor.compile_fx import config as defaults

    if any(one.device.type == "cuda" for one in arrays):
        AsyncCompile.wakeup()  # its processes start meanwhile
    context, tracing = _tracing()
    mode: Any = arrays[0].fake_mode  # type: ignore[attr-defined]
    with (
        defaults.patch(dict(settings)),
        tracing(context(mode)),
        current.set_fake_mode(mode),
        _use_lazy_graph_module(True),
        enable_python_dispatcher(),
    ):
        yield


def functional_trace(function: Callable[..., Any], arrays: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Records what the operators of a function are composed of; publicly only the compiler does, for whole graphs.

    The function makes arrays that it changes functional itself.
    """
    from torch._inductor.compile_fx import select_decomp_table
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced(*given: torch.Tensor) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)):
            return function(*given)

    mode: Any = arrays[0].fake_mode  # type: ignore[attr-defined]
    # Kernels are named after the operators that nodes come from.
    with mode, FunctionalTensorMode(), torch.fx.traceback.preserve_node_meta():
        return make_fx(traced, select_decomp_table(), _disable_torch_fn_metadata_mode=True)(*arrays)


def compile_expanded(
    module: torch.fx.GraphModule, arrays: Sequence[torch.Tensor], compile_inner: Callable[..., Any]
) -> Any:
    """Compiles what `functional_trace` returned; publicly the compiler only takes what it has recorded itself."""
    from torch._inductor.compile_fx import BoxedBool, BoxedDeviceIndex, _graph_counter, compile_fx_forward

    (end,) = module.graph.find_nodes(op="output")
    given = {"cudagraphs": BoxedBool(False), "forward_device": BoxedDeviceIndex(None)}
    around: Any = SimpleNamespace(**given, graph_id=next(_graph_counter))
    with _patterns_that_occur(module.graph), _rules_of_types_once():
        return compile_fx_forward(module, arrays, len(end.args[0]), len(arrays), around, compile_inner, True)


@contextmanager
def propagated_by(propagate: Callable[[torch.fx.Graph, Sequence[torch.Tensor]], bool]) -> Iterator[None]:
    """Lets a function compute the results of a graph without memory, where the compiler would run all operators.

    If it returns False, the compiler does. No public name leaves that out. Others who compile get theirs.
    """
    from torch._inductor import compile_fx

    compiler: Any = compile_fx
    before, here = compile_fx.fake_tensor_prop, threading.get_ident()

    def propagated(module: Any, arrays: Sequence[Any], *others: Any) -> Any:
        if threading.get_ident() == here and not others and propagate(module.graph, arrays):
            return arrays[0].fake_mode
        return before(module, arrays, *others)

    compiler.fake_tensor_prop = propagated
    try:
        yield
    finally:
        compiler.fake_tensor_prop = before


@contextmanager
def _patterns_that_occur(graph: torch.fx.Graph) -> Iterator[None]:
    """Lets the compiler prepare no patterns of attention, which takes seconds, if it cannot find any.

    All of them multiply batches of matrices. No public name leaves them out. Others who compile get theirs.
    """
    from torch._inductor.fx_passes import joint_graph

    if graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default):
        yield
        return
    before, others, here = joint_graph.lazy_init, _patterns_without_attention(), threading.get_ident()

    def prepare(*given: Any) -> Any:
        return others(*given) if threading.get_ident() == here else before(*given)

    joint_graph.lazy_init = prepare
    try:
        yield
    finally:
        joint_graph.lazy_init = before


@cache
def _patterns_without_attention() -> Callable[..., Any]:
    """Prepares the compiler's other patterns for a device, once."""
    from torch._inductor.fx_passes.misc_patterns import _misc_patterns_init
    from torch._inductor.fx_passes.pad_mm import _pad_mm_init
    from torch._inductor.pattern_matcher import init_once_fakemode

    def prepare(device: Any = None) -> None:
        _pad_mm_init(device)
        _misc_patterns_init(device)

    return init_once_fakemode(prepare)


@contextmanager
def _rules_of_types_once() -> Iterator[None]:
    """Lets the compiler make its table of types of results once, not for every operator of every kernel.

    The table is a single object, but each call of its class fills it again.
    """
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    rules: Any = DtypePropagationOpsHandler
    fill = rules.__init__
    filled = list[Any]()

    def fill_once(table: Any) -> None:
        if table not in filled:
            fill(table)
            filled.append(table)

    rules.__init__ = fill_once
    try:
        yield
    finally:
        rules.__init__ = fill


def written_to_memory() -> OpOverload:
    """An operator that makes the compiler write its source to memory, with these strides; a public one may be fused."""
    from torch._inductor.inductor_prims import force_stride_order

    return force_stride_order


@cache
def lower_to_buffer(operator: OpOverload) -> None:
    """Lets the compiler write an operator's source to a buffer that it can lay out freely; no public name does."""
    from torch._inductor.lowering import clone

    def written(source: Any) -> Any:
        copied = clone(source)
        copied.realize()
        return copied

    _lower(operator, written)


@cache
def lower_to_places(operator: OpOverload) -> None:
    """Lets kernels write the parts of an array directly to their places; public operators join whole blocks only.

    The operator takes the parts, shape and strides of the whole, all strides of parts as one list, and their offsets.
    """
    from torch._inductor.ir import ConcatKernel, FixedLayout, ReinterpretView, StorageBox, TensorBox
    from torch._inductor.virtualized import V

    def filled(parts: Any, shape: Any, order: Any, strides: Any, offsets: Any) -> Any:
        graph, kind, rest = V.graph, (parts[0].get_device(), parts[0].get_dtype()), iter(strides)
        layout = FixedLayout(*kind, list(shape), list(order))
        whole, written = ConcatKernel(name=None, layout=layout, inputs=[]), list[Any]()
        stored = StorageBox(whole)
        for part, offset in zip(parts, offsets, strict=True):
            extents = list(part.get_size())
            place = FixedLayout(*kind, extents, [next(rest) for _ in extents], offset)
            written.append(ConcatKernel.realize_into(part, ReinterpretView(data=stored, layout=place)))
        whole.name = graph.register_buffer(whole)
        whole.inputs = ConcatKernel.unwrap_storage(written)
        graph.register_operation(whole)
        return TensorBox(stored)

    _lower(operator, filled)


def _lower(operator: OpOverload, function: Callable[..., Any]) -> None:
    """Lets the compiler call a function of its own representation for an operator."""
    from torch._inductor.lowering import register_lowering

    register_lowering(operator, type_promotion_kind=None)(function)


def is_called(operator: OpOverload) -> bool:
    """Whether the compiler calls an operator as it is, on arrays with the recorded strides; no public name says so."""
    from torch._inductor.lowering import fallbacks, lowerings

    return operator in fallbacks or operator not in lowerings


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


def compiled_under(arrays: Sequence[torch.Tensor]) -> str | None:
    """PyTorch's key for all that decides what its compiler makes, except the graph; None if the compiler keeps nothing.

    No public name provides it: versions, devices, settings of the compiler and of the process.
    """
    tracing_settings, compiler_settings = _settings()
    if not compiler_settings.fx_graph_cache or compiler_settings.force_disable_caches:
        return None
    nothing = torch.fx.Graph()
    nothing.output(())
    with _as_while_compiling(arrays):
        found, _ = _graph_cache().key(torch.fx.GraphModule(torch.nn.Module(), nothing), [], {}, [], False)
    return None if found is None else f"{found[0]} {sorted(tracing_settings.save_config_portable().items())}"


def every_setting() -> str:
    """All settings of the compiler, those among them that its keys leave out; loads little else of it."""
    settings: tuple[Any, ...] = *_settings(), torch.compiler.config
    return repr([sorted(one.get_config_copy().items()) for one in settings])


def _settings() -> tuple[Any, Any]:
    """The settings of what takes steps apart, and those of the compiler; no public name has them all."""
    from torch._functorch import config as tracing_settings
    from torch._inductor import config as compiler_settings

    return tracing_settings, compiler_settings


def load_compiled(entry: str, arrays: Sequence[torch.Tensor]) -> CompiledFxGraph | None:
    """A compiled graph from the compiler's cache, ready to run on arrays like these; None if it is not there.

    Publicly, the compiler looks there only after it has prepared the same graph again.
    """
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    constants = CompiledFxGraphConstants()
    given = {"local": True, "remote_cache": None, "is_backward": False, "constants": constants}
    with _as_while_compiling(arrays):
        found, _ = _graph_cache().load(entry, [], list(arrays), **given)
        if found is not None:
            found._fx_graph_cache_key = entry
            found.post_compile(list(arrays), constants, {"cudagraphs": BoxedBool(False), "is_backward": False})
    return found


@contextmanager
def _as_while_compiling(arrays: Sequence[torch.Tensor]) -> Iterator[None]:
    """The state in which the compiler opens its cache."""
    context, tracing = _tracing()
    with kept_between_runs(arrays), tracing(context(arrays[0].fake_mode)):  # type: ignore[attr-defined]
        yield


def _tracing() -> tuple[Any, Any]:
    """The class of what the compiler knows about its current graph, and what makes one current."""
    from torch._guards import TracingContext, tracing

    return TracingContext, tracing


class _GraphCache(NamedTuple):
    """The cache of compiled graphs."""

    key: Callable[..., Any]
    load: Callable[..., Any]
    folder: Callable[[str], str]


def _graph_cache() -> _GraphCache:
    """The cache of compiled graphs, with which publicly only the compiler works."""
    from torch._inductor.codecache import FxGraphCache

    return _GraphCache(FxGraphCache.prepare_key, FxGraphCache.load_with_key, FxGraphCache._get_tmp_dir_for_key)


def cache_entry(compiled: CompiledFxGraph) -> str | None:
    """The key of a compiled graph in the compiler's cache; None if it is not there."""
    return compiled._fx_graph_cache_key if hasattr(compiled, "cache_key") else None


def is_complete() -> bool:
    """Whether the graph that is being compiled takes and returns just what its caller does.

    Otherwise PyTorch's code around it writes to inputs or makes views after a call; no public name says so.
    """
    context = _tracing()[0].try_get()
    known = None if context is None else context.fw_metadata
    if known is None:
        return False
    left = known.num_mutated_inp_runtime_indices, known.num_outputs_aliased, known.num_intermediate_bases, known.tokens
    return not any(left) and not known.is_rng_op_functionalized


def end_allocations(device: torch.device, pool: tuple[int, int]) -> None:
    """Ends the use of a memory pool by a capture that has failed, unless it has ended; no public name does."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # if only `run` failed, the end of the capture has done it
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)


@contextmanager
def combined_up_to(elements: int) -> Iterator[None]:
    """Lets the compiler launch kernels together only if each has at most so many elements, in one range of indices.

    Its own choice has no public name. It would also combine kernels over tiles of two ranges: those share one grid, of
    the sum of their blocks in one direction by the most in the other, in which nearly all blocks can be empty.
    """
    from torch._inductor.codegen.simd import SIMDScheduling
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Combined

    def is_small(kernel: Any) -> bool:
        nodes = kernel.get_nodes()
        ranges, reduced = max(nodes, key=lambda node: node.is_reduction()).get_ranges()
        results, terms = prod(ranges), prod(reduced)
        return results * terms <= elements and "y" not in SIMDScheduling.select_tiling(nodes, results, terms)

    def groups(scheduler: Any) -> list[list[Any]]:
        return [list(filter(is_small, Combined.combinable_nodes(group))) for group in before(scheduler)]

    before = Combined.group_algorithm_for_combo_kernels
    Combined.set_group_algorithm_for_combo_kernels(groups)
    try:
        yield
    finally:
        Combined.set_group_algorithm_for_combo_kernels(before)


@contextmanager
def order_kept() -> Iterator[None]:
    """Keeps updates behind kernels that read the old values, when the compiler divides loops on the CPU.

    PyTorch 2.11 computes what such a loop reads again, and forgets what it only has to wait for.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    loops: Any = SchedulerNode
    divide = SchedulerNode.recompute_size_and_body

    def divide_in_order(node: Any, *given: Any, **named: Any) -> None:
        awaited = [one for one in node.read_writes.reads if isinstance(one, StarDep | WeakDep)]
        divide(node, *given, **named)
        node.set_read_writes(node.read_writes.with_read(OrderedSet(awaited)).rename(node.mutation_renames))

    loops.recompute_size_and_body = divide_in_order
    try:
        yield
    finally:
        loops.recompute_size_and_body = divide


@contextmanager
def widest_vectors_first() -> Iterator[None]:
    """Lets the compiler choose vector instructions of x86 processors without trying narrower ones.

    By itself it compiles programs for all that a processor has, up to ten, and then uses the widest that works.
    """
    from torch._inductor import cpu_vec_isa as instructions

    listed, find = instructions.supported_vec_isa_list, instructions.valid_vec_isa_list
    is_chosen = instructions.config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ
    names = frozenset(instructions.x86_isa_checker())  # none on other processors
    if is_chosen or not names or find.cache_info().currsize:
        yield
        return
    instructions.supported_vec_isa_list = _UntilOneWorks(listed, names)
    try:
        yield
    finally:
        instructions.supported_vec_isa_list = listed
        find.cache_clear()  # others may want narrower ones


class _UntilOneWorks(list[Any]):
    """Vector instructions up to the first that this processor has and that compile; trying them takes seconds.

    Args:
        listed: all of them, the widest first.
        names: those that this processor has.
    """

    def __init__(self, listed: Sequence[Any], names: frozenset[str]) -> None:
        super().__init__(listed)
        self._names = names

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            yield one
            if self._names.issuperset(str(one).split()) and one:
                return


@contextmanager
def named_briefly(characters: int = 100) -> Iterator[None]:
    """Cuts the names of kernels in Triton, which list all operators that a kernel fuses.

    Triton cuts the names of its files after 150 characters. PyTorch then does not find them, keeps no binary of such a
    kernel, and asks Triton again in later runs, whose own key depends on what the process has compiled before.
    """
    from torch._inductor.codegen import triton

    generator: Any = triton
    name = triton.get_fused_kernel_name
    generator.get_fused_kernel_name = lambda *given: name(*given)[:characters].rstrip("_")
    try:
        yield
    finally:
        generator.get_fused_kernel_name = name


def drop(compiled: CompiledFxGraph) -> None:
    """Removes a compiled graph from the compiler's cache; a public name only clears all of it."""
    entry = cache_entry(compiled)
    if entry is not None:
        shutil.rmtree(_graph_cache().folder(entry), ignore_errors=True)


def generated_code(compiled: CompiledFxGraph) -> Any:
    """The code generated for a graph; a public name provides only the function around it."""
    return compiled.current_callable


def generated_module(compiled: CompiledFxGraph) -> Any:
    """The module that was generated for a graph, with its kernels; None for a graph without operators.

    Without caches, PyTorch forgets the module and removes its file, so its names and its `source` take its place.
    """
    from torch._inductor.codecache import PyCodeCache

    if not hasattr(compiled, "cache_key"):  # a graph without operators is returned as it is
        return None
    known = next((one for one in reversed(PyCodeCache.modules) if one.key == compiled.cache_key), None)
    if known is not None:
        return known
    function = generated_code(compiled)
    names = getattr(function, "__func__", function).__globals__
    return SimpleNamespace(**{**names, "source": compiled.source_code})


def library_of(kernel: Callable[..., None]) -> Path | None:
    """The library that a generated kernel for the CPU is in."""
    file = getattr(getattr(kernel, "__self__", None), "__file__", None)
    return None if file is None else Path(file)


def kernel_in(library: Path) -> Callable[..., None]:
    """The kernel in such a library, without the compiler; publicly, only the compiler loads it."""
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)  # where the library looks for it
    specification = importlib.util.spec_from_file_location(f"{library.name.partition('.')[0]}.launched.kernel", library)
    assert specification is not None and specification.loader is not None
    module: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    kernel: Callable[..., None] = module.kernel
    return kernel


def allocate_on_cpu() -> Callable[..., torch.Tensor]:
    """How generated code allocates an array on the CPU, from its shape, strides and type: faster than public names."""
    allocate: Callable[..., torch.Tensor] = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
    return allocate


def drop_variants(compiled: CompiledFxGraph, is_wrong: Callable[[Path], bool]) -> list[str]:
    """Drops the block sizes of a graph's kernels that are wrong, before the compiler times them.

    A kernel that has no other is compiled in further ones. No public name provides them. Triton keeps PTX and assembled
    code in a folder for each.

    Args:
        compiled: the graph.
        is_wrong: whether a kernel may not run, from its folder.

    Returns:
        The kernels of which every block size is wrong.
    """
    module = generated_module(compiled)
    known = vars(module).items() if module is not None else ()
    kernels = {name: kernel for name, kernel in known if hasattr(kernel, "compile_results")}
    return [name for name, kernel in kernels.items() if not _keep_right(kernel, is_wrong)]


def _keep_right(kernel: Any, is_wrong: Callable[[Path], bool]) -> bool:
    """Leaves a kernel the block sizes that are right, if need be further ones; returns whether it has any."""
    from torch._inductor.runtime.runtime_utils import triton_cache_dir, triton_hash_to_path_key

    cache = Path(triton_cache_dir(kernel.triton_meta["device"]))

    def is_right(variant: Any) -> bool:
        return not is_wrong(cache / triton_hash_to_path_key(variant.kernel.hash))

    right = list(filter(is_right, kernel.compile_results))
    if len(right) == len(kernel.compile_results):
        return True
    keys = {triton_hash_to_path_key(variant.kernel.hash) for variant in right}
    launchers = [one for one in kernel.launchers if one.cache_hash in keys]  # what fits on the GPU has one
    if launchers:
        kernel.compile_results, kernel.launchers = right, launchers
        return True
    found = next(filter(is_right, _further_variants(kernel, kernel.compile_results[0].config)), None)
    if found is not None:
        kernel.compile_results, kernel.launchers = [found], []
        _make_launchers(kernel)
    return found is not None


def _further_variants(kernel: CachingAutotuner, tried: Any) -> Iterator[Any]:
    """A kernel compiled with more and with fewer threads than one that was tried, then in smaller blocks."""
    function: Any = kernel.fn
    if function.fn is None:  # it was compiled in another process
        kernel.fn = kernel._reload_kernel().fn
    width, warps = tried.kwargs.get("XBLOCK", 1), tried.num_warps
    others = [{"num_warps": count} for count in (2 * warps, warps // 2) if 1 <= count <= 16]
    others += [{"XBLOCK": width >> shift} for shift in range(1, width.bit_length())]
    for other in others:
        blocks = copy.deepcopy(tried)
        blocks.num_warps = other.pop("num_warps", warps)
        blocks.kwargs.update(other)
        yield kernel._precompile_config(blocks)


def _make_launchers(kernel: CachingAutotuner) -> None:
    """Makes the functions that launch a kernel in its block sizes."""
    kernel._make_launchers()
