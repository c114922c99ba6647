"""Inductor: a part of a step compiled into few large kernels."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler import pipeline
from stepgraph.compiler.assembly import loses_a_constant
from stepgraph.compiler.kernels.choices import processor
from stepgraph.compiler.modules import Module
from stepgraph.compiler.program import Part, fake, fakes
from stepgraph.compiler.step import Step
from stepgraph.compiler.trace import recording
from stepgraph.compiler.tuned import MANIFEST
from stepgraph.system import torch_private

Function = Callable[..., Sequence[torch.Tensor]]

# The executable captures the step as a CUDA graph. Small independent kernels (the update of each parameter) are
# launched together.
SETTINGS: dict[str, Any] = {"triton.cudagraphs": False, "combo_kernels": True}
ALONE = {"cpp.threads": 1}  # for work that finishes before other threads wake up


class Miscompiled(Exception):
    """A kernel would not compute the same as the operators it fuses."""


def fuse(part: Part, step: Step) -> Function:
    """The part as a compiled function of its arrays; compilation takes seconds to a minute."""
    inductor = torch_private.inductor()
    module = Module(part.module, copy.deepcopy(part.module.graph))
    arrays = [fake(node) for node in part.placeholders]
    on_cpu = step.device.type == "cpu"
    for row in pipeline.rows(pipeline.FUSED, step, None):
        row.run(module, step)
    _keep_strides(module.graph, part)
    module.generate()
    generated: list[Any] = []

    def compile_inner(module: fx.GraphModule, *arguments: Any, **settings: Any) -> Any:
        module.graph = inductor.without_repeats(module.graph)
        with torch_private.compiled_for(_fingerprint(module.graph)):
            generated.append(inductor.compile_kernels(module, *arguments, **settings))
        return generated[-1]

    settings = SETTINGS | (ALONE if on_cpu and part.is_tiny else {})
    with recording, torch.no_grad(), torch_private.kept_between_runs(arrays):
        function = cast(Function, inductor.compile_graph(module, arrays, compile_inner, config_patches=settings))
    if not on_cpu and any(map(loses_a_constant, chain(*map(torch_private.kernel_assembly, generated)))):
        for one in generated:
            torch_private.drop(one)
        raise Miscompiled("NVIDIA's assembler would miscompile a kernel")
    if len(generated) == 1:
        for tuned in MANIFEST:
            if tuned.launches is not None and tuned.applies(step):
                function = tuned.launches(function, torch_private.generated_code(generated[0]))
    return function


def _fingerprint(graph: fx.Graph) -> str:
    """What kernels depend on besides what PyTorch's cache already compares: operators, settings and versions.

    PyTorch knows custom operators by name only, so their results and our source count too; and it assumes that all
    processors that see the cache are alike.
    """
    results = [(one.shape, one.stride(), one.dtype, one.device) for node in graph.nodes for one in fakes(node)]
    machine = processor(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return hashlib.sha256(f"{_source()} {machine} {results}".encode()).hexdigest()


@cache
def _source() -> str:
    """The hash of stepgraph's source."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return found.hexdigest()


def _keep_strides(graph: fx.Graph, part: Part) -> None:
    """Keeps the memory layout of results as before the graph was changed, since readers depend on it."""
    (end,) = graph.find_nodes(op="output")
    with graph.inserting_before(end):
        results = zip(end.args[0], part.results.values(), strict=True)
        ordered = [graph.call_function(_laid_out, (one, recorded.stride())) for one, recorded in results]
    end.args = (ordered,)


def _laid_out(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    return x if x.stride() == stride else torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def fuse_in_background(part: Part, step: Step) -> Future[Function]:
    """The same in a separate thread."""
    future: Future[Function] = Future()

    def work() -> None:
        try:
            future.set_result(fuse(part, step))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="stepgraph fusion", daemon=True).start()
    return future
