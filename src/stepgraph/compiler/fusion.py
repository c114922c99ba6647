"""Inductor: a part of a step compiled into few large kernels."""

from __future__ import annotations

import copy
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import fx

from stepgraph.compiler import fused_cache, fused_memory, kept_launches, kernels, memory, outline, pipeline
from stepgraph.compiler.assembly import is_miscompiled
from stepgraph.compiler.expansion import ExpansionFailed, Unexpandable, expand
from stepgraph.compiler.launch_record import Record
from stepgraph.compiler.memory import MemoryPlan, Timeline
from stepgraph.compiler.modules import Module
from stepgraph.compiler.passes import beside
from stepgraph.compiler.program import (
    EXCHANGE,
    Part,
    adopt_tags,
    attach_tags,
    complete_notes,
    copied_as,
    fake,
    notes,
    set_fake,
)
from stepgraph.compiler.propagation import propagate
from stepgraph.compiler.step import Step
from stepgraph.compiler.trace import recording
from stepgraph.compiler.triton_launch import define_operators, prepared_beside
from stepgraph.compiler.tuned import MANIFEST
from stepgraph.draw import size
from stepgraph.errors import DeviceError, reason
from stepgraph.system import background, captures, cxx, forks, streams, surroundings, torch_private
from stepgraph.system.garbage import FullCollectionsDeferred
from stepgraph.system.unwarned import without_warnings

logger = logging.getLogger("stepgraph")
Function = Callable[..., Sequence[torch.Tensor]]
Known = TypeVar("Known")

# The executable captures the step as a CUDA graph, so the compiler need not look for what it could capture. Small
# independent kernels (updates, statistics) are launched together. Operators that write to views take the views
# themselves: version 2 would take their base with the recorded strides, although the compiler may pad the product that
# the base is.
SETTINGS: dict[str, Any] = {
    "triton.cudagraphs": False,
    "graph_partition": False,
    "combo_kernels": True,
    "enable_auto_functionalized_v2": False,
}
THREAD = "stepgraph fusion"  # the name of a thread that fuses in the background
PAUSE = 3.0  # seconds after which a plan is computed; the first fused steps need Python's lock, too
SMALL = 1 << 22  # elements; a kernel that fills a GPU for long gains nothing from a shared launch
LOCKING = ("concurrent.futures.thread", "filelock")  # used by the compiler; forks hold their locks until they are done
# For work that finishes before other threads wake up. Threads of the compiler would keep the process alive at its end.
ALONE = {"cpp.threads": 1, "compile_threads": 1}
# Other ranks read what an exchange sends until it is waited for, so nothing else may be written there. All ranks start
# exchanges in the same order, whatever the sizes of their slices.
EXCHANGING = {"allow_buffer_reuse": False, "reorder_for_peak_memory": False}


_planning = threading.RLock()
forks.wait_for(_planning)


@cache
def has_compiler() -> bool:
    """Whether there is a C++ compiler, under the name by which PyTorch's compiler calls it."""
    return cxx.path() is not None


def _require_compiler() -> None:
    """Raises if the C++ compiler is missing: PyTorch's would print its operators before it says so."""
    if not cxx.works():
        problem = f"on the CPU it calls a C++ compiler, but {cxx.name()!r} does not run"
        raise DeviceError("PyTorch's compiler", problem, fix=f"{cxx.how_to_get()}; or compile without FUSE_LAYERS")


def load_compiler() -> None:
    """Imports PyTorch's compiler: beside other imports, its own thread might find half of a module."""
    fused_cache.start_hashing()
    with without_warnings():
        torch_private.inductor()


@cache
def _hold_forks_first() -> None:
    """Lets forks wait for a fusion before they take the locks that it may still need, which none would ever get."""
    for name in LOCKING:
        importlib.import_module(name)
    forks.wait_for(recording)
    surroundings.hold_forks_first()


class Unusable(Exception):
    """The compiled function cannot be used, through no fault of the caller."""


class Miscompiled(Unusable):
    """A kernel would not compute the same as the operators it fuses."""


class TooLarge(Unusable):
    """The compiled function needs more memory than the step may."""


class Fused(NamedTuple):
    """A compiled function.

    Args:
        function: the function.
        plan: the memory that the step needs with it, if known. The first to ask waits for it about a second, and keeps
            it for later runs.
        was_kept: whether an earlier run has compiled it.
    """

    function: Function
    plan: Callable[[], MemoryPlan | None]
    was_kept: bool = False


class _Once(Generic[Known]):
    """What is computed when somebody asks, by one thread: arrays without memory are not for several."""

    def __init__(self, compute: Callable[[], Known | None]) -> None:
        self._compute: Callable[[], Known | None] | None = compute
        self._found: Known | None = None

    def __call__(self) -> Known | None:
        with _planning:
            if self._compute is not None:
                with without_warnings():
                    self._found = self._compute()
                self._compute = None  # it refers to everything that was compiled
            return self._found


class _Compiled(NamedTuple):
    """A function of arrays.

    Args:
        function: the function.
        graphs: what PyTorch's compiler made for it.
        is_alone: whether it is the only graph and no more.
        takes: what each graph takes, as arrays without memory: constants of the step, too.
    """

    function: Function
    graphs: list[Any]
    is_alone: bool
    takes: Sequence[Sequence[torch.Tensor]]

    @classmethod
    def alone(cls, graph: Any, takes: Sequence[torch.Tensor]) -> _Compiled:
        """A graph that takes just these arrays."""
        return cls(lambda *arrays: graph([*arrays]), [graph], True, [takes])


_under_way: set[Fusing] = set()


def is_under_way() -> bool:
    """Whether anything is being fused in the background, by a thread that needs a processor."""
    return bool(_under_way)


class Fusing(Future[Fused]):
    """A part that is being fused in the background."""

    def __init__(self) -> None:
        super().__init__()
        self.has_searched = threading.Event()  # for what earlier runs have left; if there was nothing, it compiles now
        self.seconds = 0.0  # that it took, once it is done


def fuse(part: Part, step: Step, searched: Callable[[], None] = lambda: None) -> Fused:
    """The part as a compiled function of its arrays; compilation takes seconds to a minute.

    A compiled function needs less memory than operators that run one by one, so a part that recomputes results to stay
    within a limit is first compiled without that.

    Args:
        part: the part.
        step: what it computes.
        searched: is called before a wait that is not worth waiting for: no earlier run has compiled it, or another
            step is being compiled.
    """
    _hold_forks_first()
    with FullCollectionsDeferred(), without_warnings():
        for one in _candidates(part)[:-1]:
            with suppress(TooLarge):
                return _fused(one, step, searched)
        return _fused(part, step, searched)


def _candidates(part: Part) -> list[Part]:
    """What to compile, the best first."""
    return [part] if part.unlimited is None else [part.unlimited, part]


def was_fused(part: Part) -> bool:
    """Whether an earlier run seems to have fused a part; this takes little time."""
    outlines = map(outline.of, _candidates(part))
    return bool(fused_cache.files()) and any(map(fused_cache.knows, outlines))


def _fused(part: Part, step: Step, searched: Callable[[], None] = lambda: None) -> Fused:
    settings = config(part, step)
    relaunch = next((row.relaunches for row in MANIFEST if row.relaunches is not None and row.applies(step)), None)
    launched = None if relaunch is None else kept_launches.key(part, *_decided(step, settings))
    kept = kept_launches.load(launched)
    if relaunch is None or kept is None:
        fused = _by_the_compiler(part, step, settings, searched, launched)
    else:
        fused = Fused(relaunch(kept.record), _plan(step, part, lambda: kept.live), was_kept=True)
    if step.memory_limit is not None:
        _require_fit(fused.plan(), step.memory_limit)
    return fused


def _by_the_compiler(
    part: Part, step: Step, settings: Mapping[str, Any], searched: Callable[[], None], launched: str | None
) -> Fused:
    """What PyTorch's compiler makes, or has made; `launched` is where later runs find its launches."""
    given, on_cpu = [fake(node) for node in part.placeholders], step.device.type == "cpu"
    define_operators(step.device)
    kernels.remember_updates(part.module.graph)
    choosing = torch_private.widest_vectors_first() if on_cpu else nullcontext()
    with _recording(searched), torch.no_grad(), _beside_steps(given), prepared_beside(), choosing:
        known = _key(part, step, given, settings)
        kept = fused_cache.load(known, given)
        if kept is None:
            searched()
            if on_cpu:
                _require_compiler()
        # What was compiled, and what it allocates, is enough.
        module = _prepared(part, step) if kept is None or kept.live is None else Module(part.module, fx.Graph())
        inputs = _inputs(module)
        made = _compiled(module, step, inputs, settings) if kept is None else _Compiled.alone(kept.compiled, inputs)
    function, generated, is_alone, takes = made
    if not on_cpu:
        _require_right(generated)

    places = _places(part, module) if kept is None else kept.places
    keeps = is_alone and outline.is_known(module.graph) if kept is None else kept.live is None
    if keeps and kept is None:
        fused_cache.keep(known, fused_cache.Kept(generated[0], places, None))

    def looked() -> Timeline | None:
        found = _timeline(module, takes, generated) if kept is None or kept.live is None else kept.live
        if keeps:
            fused_cache.keep(known, fused_cache.Kept(generated[0], places, found))
        return found

    live = _Once(looked)

    def understood(record: Record) -> None:
        found = live()
        if known is not None and found is not None and len(places) == len(given):
            kept_launches.keep(launched, kept_launches.Kept(record, found))

    if len(generated) == 1:
        for tuned in MANIFEST:
            if tuned.launches is not None and tuned.applies(step):
                function = tuned.launches(function, torch_private.generated_code(generated[0]), understood)
    return Fused(_of_all(function, places, len(given)), _plan(step, part, live), was_kept=kept is not None)


def _plan(step: Step, part: Part, live: Callable[[], Timeline | None]) -> _Once[MemoryPlan]:
    """The memory plan, from what the fused operators allocate."""

    def planned() -> MemoryPlan | None:
        found = live()
        return None if found is None else memory.plan(step, part, found)

    return _Once(planned)


def _require_fit(plan: MemoryPlan | None, limit: int) -> None:
    if plan is None or plan.total > limit:
        needed = "an unknown amount of memory" if plan is None else size(plan.total)
        raise TooLarge(f"fused, the step would need {needed}; the limit is {size(limit)}")


@contextmanager
def _recording(searched: Callable[[], None]) -> Iterator[None]:
    """The lock of all recordings; if another step is being compiled, nobody waits for what comes after it."""
    if not recording.acquire(blocking=False):
        searched()
        recording.acquire()
    try:
        yield
    finally:
        recording.release()


def _beside_steps(arrays: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """A stream of its own: PyTorch's compiler reads constants from the device, and would wait for a step each time."""
    device = _gpu(arrays)
    return nullcontext() if device is None else torch.cuda.stream(streams.beside(device))


def _key(part: Part, step: Step, arrays: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> str | None:
    """Where the compiled function is kept.

    Passes behind the recording depend on the operators alone, so it is enough to know which ones run.
    """
    recorded = outline.of(part)
    return fused_cache.key(recorded, part.module.graph, arrays, *_decided(step, settings), _hardware(arrays))


def _decided(step: Step, settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides the code beside operators and hardware."""
    passes = [row.name for stage in (pipeline.FUSED, pipeline.LOWERED) for row in pipeline.rows(stage, step, None)]
    return settings, passes, SMALL


def _prepared(part: Part, step: Step) -> Module:
    """The operators as PyTorch's compiler gets them."""
    module = Module(part.module, copy.deepcopy(part.module.graph))
    for row in pipeline.rows(pipeline.FUSED, step, None):
        row.run(module, step)
    _keep_strides(module.graph, part)
    attach_tags(module.graph)
    return module


def _inputs(module: fx.GraphModule) -> list[torch.Tensor]:
    return [fake(node) for node in module.graph.find_nodes(op="placeholder")]


def _places(part: Part, module: Module) -> list[int]:
    """The places of what is compiled among the part's arrays; the others reach updates beside it."""
    compiled = {node.name for node in module.graph.find_nodes(op="placeholder")}
    return [place for place, node in enumerate(part.placeholders) if node.name in compiled]


def _compiled(module: Module, step: Step, arrays: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> _Compiled:
    """The operators as a compiled function of the arrays."""
    inductor = torch_private.inductor()
    generated: list[Any] = []
    complete: list[bool] = []
    takes: list[list[torch.Tensor]] = []

    def compile_inner(module: fx.GraphModule, *arguments: Any, **settings: Any) -> Any:
        adopt_tags(module.graph)
        complete_notes(module.graph)
        for row in pipeline.rows(pipeline.LOWERED, step, None):
            row.run(module, step)
        compiled_for = torch_private.compiled_for(outline.fingerprint(module.graph))
        with torch_private.kept_between_runs(arrays), compiled_for, _rules():
            generated.append(inductor.compile_kernels(module, *arguments, **settings))
        complete.append(torch_private.is_complete())
        takes.append(_inputs(module))
        return generated[-1]

    try:
        with torch_private.compiling(arrays, settings), torch_private.propagated_by(propagate):
            torch_private.compile_expanded(expand(module.graph, arrays), arrays, compile_inner)
        return _Compiled.alone(generated[0], arrays)
    except ExpansionFailed as error:
        logger.warning("the step takes seconds longer to compile, since PyTorch expands its operators: %s", error)
    except Unexpandable as error:
        logger.debug("PyTorch expands the operators itself: %s", error)
    module.generate()
    around = inductor.compile_graph(module, arrays, compile_inner, config_patches=settings)
    # A later run has only the graph, so this one does not depend on what PyTorch would do around it, either: for
    # constants of the step, it passes them.
    takes_these = [len(one) for one in takes] == [len(arrays)]
    if complete == [True] and takes_these and torch_private.cache_entry(generated[0]) is not None:
        return _Compiled.alone(generated[0], arrays)
    return _Compiled(around, generated, False, takes)


@contextmanager
def _rules() -> Iterator[None]:
    """What the compiler does otherwise here than by itself."""
    with torch_private.combined_up_to(SMALL), torch_private.order_kept(), torch_private.named_briefly():
        yield


def _gpu(arrays: Sequence[torch.Tensor]) -> torch.device | None:
    return next((one.device for one in arrays if one.device.type == "cuda"), None)


def _hardware(arrays: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What kernels for a GPU depend on."""
    device = _gpu(arrays)
    if device is None:
        return ()
    found = torch.cuda.get_device_properties(device)
    return found.name, found.major, found.minor, found.multi_processor_count, found.total_memory


def config(part: Part, step: Step) -> dict[str, Any]:
    """The settings of PyTorch's compiler for a part."""
    alone = step.device.type == "cpu" and part.is_tiny
    exchanges = any(notes(node).layer == EXCHANGE for node in part.nodes)
    return SETTINGS | (ALONE if alone else {}) | (EXCHANGING if exchanges else {})


def _of_all(function: Function, places: Sequence[int], count: int) -> Function:
    """A function of the arrays at some places as one of all; the others reach updates beside it."""
    if len(places) == count:
        return function

    def run(*arrays: torch.Tensor) -> Sequence[torch.Tensor]:
        with beside.passing(arrays):
            return function(*(arrays[place] for place in places))

    return run


def _require_right(generated: Sequence[Any]) -> None:
    """Keeps the block sizes of each kernel that NVIDIA's assembler compiles right; raises if a kernel has none."""
    hopeless = [name for one in generated for name in torch_private.drop_variants(one, is_miscompiled)]
    if hopeless:
        for one in generated:
            torch_private.drop(one)
        raise Miscompiled(f"NVIDIA's assembler would miscompile {', '.join(hopeless)}")


def _timeline(
    module: fx.GraphModule, takes: Sequence[Sequence[torch.Tensor]], generated: Sequence[Any]
) -> Timeline | None:
    """What the generated code allocates; None if a new version of PyTorch generates code of another kind."""
    known = {node.name: notes(node) for node in module.graph.nodes}
    codes = zip(map(torch_private.generated_module, generated), takes, strict=True)
    try:
        return [row for code, one in codes if code is not None for row in fused_memory.timeline(code, one, known)]
    except Exception as error:  # code of another kind may raise anything here; the step runs without its plan
        logger.warning("the memory plan remains that of unfused operators: %s", reason(error))
        return None


def _keep_strides(graph: fx.Graph, part: Part) -> None:
    """Keeps the memory layout of results as before the graph was changed, since readers depend on it."""
    (end,) = graph.find_nodes(op="output")
    with graph.inserting_before(end):
        results = zip(end.args[0], part.results.values(), strict=True)
        end.args = ([_ordered(one, recorded.stride()) for one, recorded in results],)


def _ordered(node: fx.Node, stride: Sequence[int]) -> fx.Node:
    new = node.graph.call_function(_laid_out, (node, stride))
    with fake(node).fake_mode:
        set_fake(new, _laid_out(fake(node), stride))
    return new


def _laid_out(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    return x if x.stride() == stride else copied_as(x, stride)


def fuse_in_background(part: Part, step: Step) -> Fusing:
    """The same in a separate thread."""
    future = Fusing()
    searched = future.has_searched.set

    def work() -> None:
        began = time.perf_counter()
        fused: Fused | None = None
        try:
            try:
                fused = fuse(part, step, searched)
            except RuntimeError as error:
                if not captures.met_capture(error):
                    raise
                fused = fuse(part, step, searched)  # kernels were being measured while another thread captured
            future.seconds = time.perf_counter() - began
            future.set_result(fused)
        except BaseException as error:
            future.set_exception(error)
        finally:
            _under_way.discard(future)
            searched()
        if fused is not None:
            time.sleep(PAUSE)
            fused.plan()

    _under_way.add(future)
    try:
        background.start(THREAD, work)
    except RuntimeError as error:  # the system allows no more threads; the step remains unfused
        _under_way.discard(future)
        future.set_exception(error)
        searched()
    return future
