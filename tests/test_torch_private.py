"""Private names of PyTorch: each one that stepgraph uses is there, and all of them are used in one file.

Nothing here imports stepgraph, so that a PyTorch with which that fails is told about, too.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SOURCE = Path(__file__).parent.parent / "src" / "stepgraph"
HOUSE = SOURCE / "system" / "torch_private.py"
CUDA_ONLY = {"torch._C._cuda_getCurrentRawStream"}
# Attributes that only objects have, not their types.
OBJECTS: dict[Any, Any] = {torch.fx.Graph: torch.fx.Graph(), type(torch.ops.aten.mm.default): torch.ops.aten.mm.default}
# Private names of others than PyTorch.
OTHERS = {"_SubParsersAction", "_actions", "_choices_actions", "_value_"}
OTHERS |= {"_current_frames", "_getframe", "_is_gil_enabled"}

# By path: the name in `torch_private` that stands for it, and what for.
PRIVATE = {
    "torch._C._InferenceMode": ("InferenceMode", "enter inference mode in every call"),
    "torch._C._is_any_autocast_enabled": ("any_autocast", "see in every call that autocast is off"),
    "torch._C._dynamo.guards.TensorGuards": ("Alike", "see in every call that data is like that of the last call"),
    "torch._C._get_fp32_precision_getter": ("rounding", "see in every call that oneDNN rounds no factors"),
    "torch._C._len_torch_function_stack": ("function_mode_count", "see whether a default device is set"),
    "torch._C._cuda_getCurrentRawStream": ("raw_stream", "know the stream that a call runs on"),
    "torch._C._cuda_endAllocateToPool": ("end_allocations", "capture a step again after another thread broke it"),
    "torch._C._cuda_releasePool": ("end_allocations", "capture a step again after another thread broke it"),
    "torch.Tensor._version": ("version", "know whether fed indices have changed since they were checked"),
    "torch.Tensor._base": ("base", "know the array that fed indices are a part of"),
    "torch.Tensor._backward_hooks": ("gradient_hooks", "refuse modules whose hooks a step would not call"),
    "torch.Tensor._post_accumulate_grad_hooks": (
        "later_gradient_hooks",
        "refuse modules whose hooks a step would not call",
    ),
    "torch._grouped_mm": ("grouped_mm", "record mixtures of experts"),
    "torch._foreach_add_": ("foreach_add_", "accumulate gradients"),
    "torch._foreach_copy_": ("foreach_copy_", "copy a batch into the memory of a CUDA graph"),
    "torch._fused_adam_": ("fused_adam_", "update parameters by Adam on the CPU"),
    "torch._fused_adamw_": ("fused_adamw_", "update parameters by AdamW on the CPU"),
    "torch._fused_sgd_": ("fused_sgd_", "update parameters by SGD on the CPU"),
    "torch.ops._c10d_functional": ("functional_collectives", "exchange arrays between ranks"),
    "torch.cuda._compile_kernel": ("compile_cuda", "update parameters with one kernel made from the rule, on ROCm"),
    "torch.cuda._utils._get_gpu_rtc_library": ("assemble_cuda", "compile that kernel"),
    "torch.cuda._utils._cuda_load_module": ("compile_cuda", "load that kernel"),
    "torch.cuda._utils._get_gpu_runtime_library": ("launch_cuda", "pass that kernel many arrays in one structure"),
    "torch.cuda._utils._check_cuda": ("launch_cuda", "raise an error if that kernel cannot be launched"),
    "torch._addmm_activation": ("addmm_activation", "compute a fully connected layer with ReLU on a GPU"),
    "torch._subclasses.FakeTensor": ("FakeTensor", "recognize arrays without memory"),
    "torch._subclasses.FakeTensorMode": ("FakeTensorMode", "record a step on arrays without memory"),
    "torch.utils._python_dispatch.TorchDispatchMode": ("DispatchMode", "record operators as they run"),
    "torch._dynamo.config": ("nothing_compiled", "record what compiled parts of a PyTorch module were made from"),
    "torch._dynamo.config.patch": ("nothing_compiled", "record what compiled parts of a PyTorch module were made from"),
    "torch.distributions.Distribution._validate_args": ("nothing_validated", "record modules with distributions"),
    "torch._C._functorch.is_functorch_wrapped_tensor": ("is_transformed", "keep transformed parts of a model together"),
    "torch.utils._python_dispatch._disable_current_modes": (
        "disable_modes",
        "ask cuDNN for sizes in the middle of a recording",
    ),
    "torch._C._DisableTorchDispatch": ("unseen", "note the results of recorded operators"),
    "torch.Tensor._make_subclass": ("_fake", "make arrays without memory in a fifth of the time"),
    "torch._C._set_warn_deprecated_on_mutable_data_ptr": ("laid_out", "make arrays without memory as PyTorch does"),
    "torch._C._set_throw_on_mutable_data_ptr": ("laid_out", "make arrays without memory as PyTorch does"),
    "torch._subclasses.FakeTensorMode._allow_unsafe_data_ptr_access": (
        "laid_out",
        "make arrays without memory as PyTorch does",
    ),
    "torch._C.DispatchKey.CompositeImplicitAutograd": ("is_composed", "record what an operator is composed of"),
    "torch._C._dispatch_key_for_device": ("is_composed", "record operators that a device has kernels for"),
    "torch._C._dispatch_has_kernel_for_dispatch_key": ("is_composed", "record operators that a device has kernels for"),
    "torch.fx.Graph._target_to_str": ("node_name", "name recorded operators as PyTorch's tracer does"),
    "torch._ops.OpOverload": ("OpOverload", "recognize PyTorch's operators in a recorded step"),
    "torch._ops.OpOverload._schema": ("schema", "know which arrays an operator changes"),
    "torch.UntypedStorage._cdata": ("identity", "know which arrays of a recorded step share memory"),
    "torch.fx.Graph._root": ("root", "put recorded operators into another order"),
    "torch.fx.graph_module._loader.eval_cache": ("module_sources", "free the source of compiled steps"),
    "torch.utils._pytree.tree_map_only": ("tree_map_only", "describe results that are computed twice"),
    "torch.ops.aten._scaled_dot_product_efficient_attention": (
        "efficient_attention",
        "find attention on CUDA in a recorded step",
    ),
    "torch.ops.aten._scaled_dot_product_efficient_attention_backward": (
        "efficient_attention_gradient",
        "find the gradient of attention on CUDA in a recorded step",
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": (
        "flash_attention_gradient",
        "know the workspace of attention's gradient on CUDA",
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention": (
        "flash_attention",
        "find attention in half precision in a recorded step",
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": (
        "flash_attention_on_cpu",
        "find attention on the CPU in a recorded step",
    ),
    "torch._softmax": ("softmax_in_python", "compute softmax with little overhead"),
    "torch._log_softmax": ("log_softmax_in_python", "compute a cross entropy with little overhead"),
    "torch._log_softmax_backward_data": (
        "log_softmax_gradient_in_python",
        "compute the gradient of a cross entropy with little overhead",
    ),
    "torch.ops.aten._softmax": ("softmax", "compute softmax and cross entropy together"),
    "torch.ops.aten._log_softmax": ("log_softmax", "find a cross entropy in a recorded step"),
    "torch.ops.aten._log_softmax_backward_data": (
        "log_softmax_gradient",
        "find the gradient of a cross entropy in a recorded step",
    ),
    "torch.ops.aten._to_copy": ("to_copy", "find conversions in a recorded step"),
    "torch.ops.aten._unsafe_view": ("unsafe_view", "find views in a recorded step"),
    "torch.ops.aten._unsafe_index": ("unsafe_index", "read pixels in the gradient of a small convolution"),
    "torch.ops.aten._nnpack_spatial_convolution": ("nnpack_convolution", "convolve by NNPACK"),
    "torch.ops.mkldnn._linear_pointwise": ("onednn_linear", "multiply matrices in float32 by oneDNN"),
    "torch.ops.aten._slow_conv2d_forward": ("slow_convolution", "multiply matrices by BLAS on ARM"),
    "torch.ops.aten._slow_conv2d_backward": (
        "slow_convolution_gradient",
        "compute the gradient of a convolution by products over patches",
    ),
    "torch.ops.aten._cudnn_rnn": ("cudnn_rnn", "run a recurrent layer by cuDNN"),
    "torch.ops.aten._cudnn_rnn_backward": ("cudnn_rnn_gradient", "compute the gradient of a recurrent layer by cuDNN"),
    "torch.ops.aten._cudnn_rnn_flatten_weight": ("cudnn_rnn_pack", "hand the weights of a recurrent layer to cuDNN"),
    "torch._functorch.compile_utils.fx_graph_cse": ("inductor", "compute equal operators of a fused step once"),
    "torch._inductor.compile_fx.compile_fx": ("inductor", "fuse a recorded step"),
    "torch._inductor.compile_fx.compile_fx_inner": ("inductor", "compile the kernels of a fused step"),
    "torch._functorch._aot_autograd.functional_utils.to_fun": ("Trace", "expand operators that change arrays"),
    "torch._functorch._aot_autograd.functional_utils.from_fun": ("Trace", "expand operators that change arrays"),
    "torch._subclasses.functional_tensor.FunctionalTensorMode": (
        "functional_trace",
        "expand operators that change arrays",
    ),
    "torch._C._ExcludeDispatchKeyGuard": ("functional_trace", "expand operators that change arrays"),
    "torch._C.DispatchKeySet": ("functional_trace", "expand operators that change arrays"),
    "torch._C.DispatchKey.Functionalize": ("functional_trace", "expand operators that change arrays"),
    "torch._inductor.compile_fx.select_decomp_table": ("functional_trace", "expand different operators once"),
    "torch._inductor.async_compile.AsyncCompile": ("compiling", "start the processes that compile kernels early"),
    "torch._inductor.async_compile.AsyncCompile.wakeup": (
        "compiling",
        "start the processes that compile kernels early",
    ),
    "torch._inductor.compile_fx.V": ("compiling", "compile an expanded step"),
    "torch._inductor.compile_fx.V.set_fake_mode": ("compiling", "compile an expanded step"),
    "torch._inductor.compile_fx._use_lazy_graph_module": ("compiling", "compile an expanded step"),
    "torch._inductor.compile_fx.config": ("compiling", "compile an expanded step"),
    "torch._inductor.compile_fx.config.patch": ("compiling", "compile an expanded step"),
    "torch._inductor.compile_fx.enable_python_dispatcher": ("compiling", "compile an expanded step"),
    "torch._inductor.compile_fx.BoxedBool": ("compile_expanded", "compile an expanded step"),
    "torch._inductor.compile_fx.BoxedDeviceIndex": ("compile_expanded", "compile an expanded step"),
    "torch._inductor.compile_fx._graph_counter": ("compile_expanded", "compile an expanded step"),
    "torch._inductor.compile_fx.compile_fx_forward": ("compile_expanded", "compile an expanded step"),
    "torch._inductor.compile_fx": ("propagated_by", "know the results of a fused step sooner"),
    "torch._inductor.compile_fx.fake_tensor_prop": ("propagated_by", "know the results of a fused step sooner"),
    "torch._inductor.fx_passes.joint_graph": ("_patterns_that_occur", "compile a step without attention sooner"),
    "torch._inductor.fx_passes.joint_graph.lazy_init": (
        "_patterns_that_occur",
        "compile a step without attention sooner",
    ),
    "torch._inductor.fx_passes.misc_patterns._misc_patterns_init": (
        "_patterns_without_attention",
        "compile a step without attention sooner",
    ),
    "torch._inductor.fx_passes.pad_mm._pad_mm_init": (
        "_patterns_without_attention",
        "compile a step without attention sooner",
    ),
    "torch._inductor.pattern_matcher.init_once_fakemode": (
        "_patterns_without_attention",
        "compile a step without attention sooner",
    ),
    "torch._inductor.dtype_propagation.DtypePropagationOpsHandler": (
        "_rules_of_types_once",
        "generate kernels sooner",
    ),
    "torch._inductor.inductor_prims.force_stride_order": (
        "written_to_memory",
        "compute constants of a fused step once, and store what several operators read once",
    ),
    "torch._inductor.lowering.clone": ("lower_to_buffer", "write the parts of a concatenation from one kernel"),
    "torch._inductor.lowering.register_lowering": ("_lower", "write the parts of a concatenation to their places"),
    "torch._inductor.ir.ConcatKernel": ("lower_to_places", "write the parts of a concatenation to their places"),
    "torch._inductor.ir.ConcatKernel.realize_into": (
        "lower_to_places",
        "write the parts of a concatenation to their places",
    ),
    "torch._inductor.ir.FixedLayout": ("lower_to_places", "write the parts of a concatenation to their places"),
    "torch._inductor.ir.ReinterpretView": ("lower_to_places", "write the parts of a concatenation to their places"),
    "torch._inductor.ir.StorageBox": ("lower_to_places", "write the parts of a concatenation to their places"),
    "torch._inductor.ir.TensorBox": ("lower_to_places", "write the parts of a concatenation to their places"),
    "torch._inductor.ir.ConcatKernel.unwrap_storage": (
        "lower_to_places",
        "write the parts of a concatenation to their places",
    ),
    "torch._inductor.virtualized.V": ("lower_to_places", "write the parts of a concatenation to their places"),
    "torch._inductor.virtualized.V.graph": ("lower_to_places", "write the parts of a concatenation to their places"),
    "torch._inductor.lowering.fallbacks": ("is_called", "know which operators of a fused step copy what they read"),
    "torch._inductor.lowering.lowerings": ("is_called", "know which operators of a fused step copy what they read"),
    "torch._inductor.output_code.CompiledFxGraph.current_callable": (
        "generated_code",
        "launch the kernels of a fused step directly",
    ),
    "torch._inductor.scheduler.ForeachKernelSchedulerNode": ("combined_up_to", "launch small kernels together"),
    "torch._inductor.scheduler.ForeachKernelSchedulerNode.combinable_nodes": (
        "combined_up_to",
        "launch small kernels together",
    ),
    "torch._inductor.scheduler.ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels": (
        "combined_up_to",
        "restore how kernels are chosen",
    ),
    "torch._inductor.scheduler.ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels": (
        "combined_up_to",
        "choose the kernels to launch together",
    ),
    "torch._inductor.codegen.simd.SIMDScheduling": ("combined_up_to", "launch kernels over tiles alone"),
    "torch._inductor.codegen.simd.SIMDScheduling.select_tiling": ("combined_up_to", "launch kernels over tiles alone"),
    **dict.fromkeys(
        (
            "torch._inductor.dependencies.StarDep",
            "torch._inductor.dependencies.WeakDep",
            "torch._inductor.scheduler.SchedulerNode",
            "torch._inductor.scheduler.SchedulerNode.recompute_size_and_body",
            "torch.utils._ordered_set.OrderedSet",
        ),
        ("order_kept", "update what a kernel reads behind that kernel"),
    ),
    **dict.fromkeys(
        (
            "torch._inductor.cpu_vec_isa",
            "torch._inductor.cpu_vec_isa.config.cpp.simdlen",
            "torch._inductor.cpu_vec_isa.supported_vec_isa_list",
            "torch._inductor.cpu_vec_isa.valid_vec_isa_list",
            "torch._inductor.cpu_vec_isa.x86_isa_checker",
        ),
        ("widest_vectors_first", "try no narrower vector instructions than the widest that work"),
    ),
    "torch._inductor.codegen.triton": ("named_briefly", "find the binary of a kernel again"),
    "torch._inductor.codegen.triton.get_fused_kernel_name": ("named_briefly", "find the binary of a kernel again"),
    "torch._inductor.codecache.FxGraphCache": ("_graph_cache", "find what an earlier run compiled"),
    "torch._inductor.codecache.FxGraphCache.prepare_key": ("_graph_cache", "know what decides a compiled step"),
    "torch._inductor.codecache.FxGraphCache.load_with_key": ("_graph_cache", "load what an earlier run compiled"),
    "torch._inductor.codecache.FxGraphCache._get_tmp_dir_for_key": ("_graph_cache", "forget a miscompiled step"),
    "torch._inductor.output_code.CompiledFxGraph._fx_graph_cache_key": (
        "cache_entry",
        "find what an earlier run compiled, and forget a miscompiled step",
    ),
    "torch._inductor.output_code.CompiledFxGraphConstants": ("load_compiled", "load what an earlier run compiled"),
    "torch._inductor.utils.BoxedBool": ("load_compiled", "load what an earlier run compiled"),
    "torch._inductor.config": ("_settings", "know what decides a compiled step"),
    "torch._inductor.config.fx_graph_cache": ("compiled_under", "know whether the compiler keeps what it makes"),
    "torch._inductor.config.force_disable_caches": ("compiled_under", "know whether the compiler keeps what it makes"),
    "torch._functorch.config": ("_settings", "know what decides a compiled step"),
    "torch._functorch.config.save_config_portable": ("compiled_under", "know what decides a compiled step"),
    "torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr": (
        "kernel_in",
        "launch kernels without the compiler",
    ),
    "torch._C._dynamo.guards._empty_strided_cpu": ("allocate_on_cpu", "allocate the results of a fused step"),
    "torch._guards.TracingContext": ("_tracing", "load what an earlier run compiled"),
    "torch._guards.tracing": ("_tracing", "load what an earlier run compiled"),
    "torch._inductor.output_code.CompiledFxGraph.cache_key": ("generated_module", "find the kernels of a fused step"),
    "torch._inductor.output_code.CompiledFxGraph.source_code": ("generated_module", "find the kernels of a fused step"),
    "torch._inductor.codecache.PyCodeCache": ("generated_module", "find the kernels of a fused step"),
    "torch._inductor.codecache.PyCodeCache.modules": ("generated_module", "find the kernels of a fused step"),
    "torch._inductor.runtime.runtime_utils.triton_cache_dir": ("_keep_right", "find the code of a kernel"),
    "torch._inductor.runtime.runtime_utils.triton_hash_to_path_key": ("_keep_right", "find the code of a kernel"),
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner.fn": (
        "_further_variants",
        "compile a kernel in other block sizes",
    ),
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner._reload_kernel": (
        "_further_variants",
        "compile a kernel in other block sizes",
    ),
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner._precompile_config": (
        "_further_variants",
        "compile a kernel in other block sizes",
    ),
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner._make_launchers": (
        "_make_launchers",
        "run a kernel in another block size",
    ),
}
ATTRIBUTES = {path.rpartition(".")[2] for path in PRIVATE}


# Whether they are there


@pytest.mark.parametrize("path", PRIVATE)
def test_pytorch_has_each_private_name(path: str) -> None:
    if path in CUDA_ONLY and not torch.backends.cuda.is_built():
        pytest.skip("this PyTorch is built without CUDA")
    require(path, *PRIVATE[path])


@pytest.mark.parametrize(
    "path",
    [
        "torch._C._Nothing",
        "torch._inductor.nothing.compile",
        "torch._ops.OpOverload._nothing",
        "torch.ops.aten._nothing",
        "torch.Tensor._nothing",
    ],
)
def test_a_missing_name_fails_with_a_sentence(path: str) -> None:
    expected = f"PyTorch {torch.__version__} has no {path}; stepgraph uses it to test tests (torch_private.nothing)."
    with pytest.raises(pytest.fail.Exception, match=re.escape(expected)):
        require(path, "nothing", "test tests")


def require(path: str, name: str, purpose: str) -> None:
    """Fails where PyTorch does not have what `path` says."""
    found: Any = torch
    try:
        for part in path.split(".")[1:]:
            found = member(found, part)
    except (AttributeError, ImportError):
        used = f"stepgraph uses it to {purpose} (torch_private.{name})"
        pytest.fail(f"PyTorch {torch.__version__} has no {path}; {used}.", pytrace=False)


def member(found: Any, name: str) -> Any:
    if hasattr(found, name):
        return getattr(found, name)
    if isinstance(found, ModuleType):
        return importlib.import_module(f"{found.__name__}.{name}")
    if isinstance(found, type) and name in found.__annotations__:
        return None  # of a dataclass, whose objects have it
    if found not in OBJECTS and isinstance(found, type) and is_assigned(found, name):
        return None
    return getattr(OBJECTS.get(found), name)


def is_assigned(found: type, name: str) -> bool:
    """Whether the methods of a class assign an attribute, which its objects have."""
    try:
        return re.search(rf"self\.{name}\b.* = ", inspect.getsource(found)) is not None
    except OSError:  # it is not written in Python
        return False


# Whether these are all, and all in one file


def test_the_table_is_complete() -> None:
    tree = parsed(HOUSE)
    known = aliases(tree)
    found = {(path, owner) for owner, node in owners(tree) for path in private_paths(node, known)}
    assert found == {(path, name) for path, (name, _) in PRIVATE.items()}
    asked = {name for node in nodes(tree) if (name := attribute(node)) is not None and is_private(name)}
    assert asked <= {part for path in PRIVATE for part in path.split(".")}


def test_each_name_says_what_it_is_for() -> None:
    body = parsed(HOUSE).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert ast.get_docstring(node), node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            text = following.value if isinstance(following, ast.Expr) else None
            assert isinstance(text, ast.Constant) and isinstance(text.value, str), ast.unparse(node)


def test_no_other_file_uses_a_private_name() -> None:
    found = {str(file.relative_to(SOURCE)): uses(file) for file in SOURCE.rglob("*.py") if file != HOUSE}
    wrong = {file: sorted(names) for file, names in found.items() if names}
    assert not wrong, "private names of PyTorch belong in torch_private.py"


def uses(file: Path) -> set[str]:
    """The private names of PyTorch in a file, those in its comments among them."""
    tree = parsed(file)
    found = {*private_paths(tree, aliases(tree)), *re.findall(r"\btorch\.(?:\w+\.)*_[A-Za-z]\w*", file.read_text())}
    return found | {name for node in nodes(tree) if (name := attribute(node)) is not None and is_foreign(name)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def attribute(node: ast.AST) -> str | None:
    """The attribute of something else than `self` that is asked for here, also by a string."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return None
        case ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return name
        case ast.Call(func=ast.Name(id="attrgetter"), args=[ast.Constant(value=str(name))]):
            return name
    return None


def is_foreign(name: str) -> bool:
    """Whether this is private, and nothing in stepgraph defines it."""
    return is_private(name) and (name in ATTRIBUTES or name not in defined() | OTHERS)


@cache
def defined() -> frozenset[str]:
    """The private names that stepgraph itself gives to anything."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        for node in nodes(parsed(file)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return frozenset(name for name in found if is_private(name))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All of a file, found once."""
    return list(ast.walk(tree))


def owners(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """What a module defines, by name."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node


def aliases(tree: ast.Module) -> dict[str, str]:
    """What names in a module stand for, if that is of PyTorch."""
    found: dict[str, str] = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {
                one.asname or "torch": one.name if one.asname else "torch" for one in node.names if of_torch(one.name)
            }
        elif isinstance(node, ast.ImportFrom) and of_torch(node.module or ""):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if (path := dotted(value, found)) is not None:
                found[name] = path
    return found


def of_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def dotted(node: ast.AST | None, known: dict[str, str]) -> str | None:
    """The path of a chain of attributes that begins at PyTorch."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    start = dotted(node.value, known) if isinstance(node, ast.Attribute) else None
    return None if start is None else f"{start}.{node.attr}"  # type: ignore[union-attr]


def private_paths(node: ast.AST, known: dict[str, str]) -> Iterator[str]:
    """Chains of attributes, imports and attributes by name that are private."""
    match node:
        case ast.FunctionDef():
            given = {one.arg: dotted(one.annotation, known) for one in node.args.args}
            known = known | {name: path for name, path in given.items() if path is not None}
        case ast.ImportFrom(module=str(module)) if of_torch(module):
            yield from (path for one in node.names if _has_private(path := f"{module}.{one.name}"))
        case ast.Import():
            yield from (one.name for one in node.names if of_torch(one.name) and _has_private(one.name))
        case ast.AnnAssign(
            annotation=ast.Subscript(slice=ast.Tuple(elts=[ast.List(elts=[kind]), _])),
            value=ast.Call(func=ast.Name(id="attrgetter"), args=[ast.Constant(value=str(name))]),
        ):
            yield f"{dotted(kind, known)}.{name}"
        case ast.Attribute() if (path := dotted(node, known)) is not None:
            if _has_private(path):
                yield path
            return
    for child in ast.iter_child_nodes(node):
        yield from private_paths(child, known)


def _has_private(path: str) -> bool:
    return any(map(is_private, path.split(".")))
