"""A part of a program, ready to run repeatedly on one device.

On the CPU, the recorded operators run as one Python function. On CUDA, the first call runs the same way and does real
work; the second call is captured as a CUDA graph. Each later call copies its inputs and replays the graph.
After some calls, or beside the first if the step is large, PyTorch's compiler starts to fuse the operators in the
background; when it is done, the next call uses its function and the one after that is captured again. If an earlier run
has fused them, the first call uses what it has left.
"""

from __future__ import annotations

import copy
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph.compiler import filters, fusion, operators
from stepgraph.compiler.fusion import Function, Fused
from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.passes.held import Allocation, write_into_arena
from stepgraph.compiler.program import Part, copied_as, fakes, notes
from stepgraph.compiler.step import NUMBERS, Fusion, Key, KeyKind, Step, value
from stepgraph.compiler.tuned.row import Launching
from stepgraph.errors import ExecutionError, StepgraphError, reason
from stepgraph.runtime import algorithms, steady_views, strides
from stepgraph.runtime.arena import Arena, ArenaViews
from stepgraph.runtime.loss_slots import Loss, Losses, Total
from stepgraph.runtime.results import Lending, Lent
from stepgraph.system import captures, openmp, surroundings, torch_private
from stepgraph.system.interrupts import Uninterrupted
from stepgraph.system.switch_interval import ShortSwitchInterval

logger = logging.getLogger("stepgraph")
# A part is worth fusing if it is called often or works for long: compiling takes longer than either.
FUSES_AT = 10  # calls
FUSES_AFTER = 1.0  # seconds from its first call on
# Bytes of all results. Nobody trains a step that moves this much for a few calls only.
LARGE = 2**32
_FILE = "<compiled step>"
_InferenceMode: Any = torch_private.InferenceMode  # `torch.inference_mode` without its Python wrapper


class Binding(NamedTuple):
    """An executable with some of its arrays; the others are passed with each call."""

    executable: Executable
    arrays: list[torch.Tensor | None]
    opened: tuple[tuple[int, Key], ...]
    views: Sequence[Any] | None  # of the arrays and what was prepared for them, if all that have any are there

    def filled(self, others: Mapping[Key, torch.Tensor]) -> list[torch.Tensor]:
        """All arrays of one call."""
        given: list[Any] = self.arrays.copy()
        for index, key in self.opened:
            given[index] = others[key]
        return given


class Executable:
    """Runs a part: arrays in, arrays by key out.

    Args:
        part: the part.
        step: what it computes.
        arena: memory for its results on the CPU.
        fused: what runs instead of its operators.
        is_first: whether its graph has no executable for another batch size, which may be that of a last short batch.
    """

    def __init__(
        self,
        part: Part,
        step: Step,
        arena: Arena | None = None,
        fused: Fused | None = None,
        is_first: bool = False,
    ) -> None:
        self.part, self.step, self._is_first = part, step, is_first
        self.results = tuple((key.owner, key) for key in part.outputs if key.kind == KeyKind.VALUE)
        self.others = tuple(key for key in part.outputs if key.kind != KeyKind.VALUE)  # mostly gradients
        self._function: Function = self._first
        self._replay: Launching | None = None
        # Where a gradient is 0 from some step on, its average shrinks until it is too small for full precision, and
        # stays so. Each operation with such a number takes a hundred times as long, so fused code in one thread takes
        # it as 0, as XLA does.
        self._flushes = False
        self._views = None
        if part.held:
            self._views = ArenaViews(arena or Arena(), part.held, self._code.allocations, part.module)
        kind = step.device.type
        self._surroundings = kind, part.is_open_to_switches, part.rounded if kind == "cpu" else ()
        self.images = frozenset(map(value, filters.images(step)))  # inputs whose channels may be first or last
        self.orders: Mapping[Key, tuple[int, ...]] = {}  # their strides, if fused operators require some
        self._bound: tuple[list[Any], Binding] | None = None
        self.runs_alone = step.device.type == "cpu" and part.is_tiny  # in one thread
        self.is_fused = self.was_fused_first = False
        self.is_included = False  # in a capture of more than itself
        self._fused_plan: Callable[[], MemoryPlan | None] = lambda: None
        self._fusing: Future[Fused] | None = None
        self._searches = step.fusion is Fusion.LATER and step.ownership is None and fused is None  # in its first call
        self.fusion_seconds = 0.0
        self._refused = ""
        self._capture = _Capture(self) if step.device.type == "cuda" else None
        if fused is not None:
            self._adopt(fused)
        elif step.fusion is Fusion.FIRST and self._is_fusible:
            self._fuse_now()

    @property
    def mode(self) -> str:
        """How calls run: `traced`, or `CUDA graph` once captured; preceded by `fused` if operators are fused."""
        captured = self.is_included or (self._capture is not None and self._capture.graph is not None)
        return ("fused " if self.is_fused else "") + ("CUDA graph" if captured else "traced")

    @property
    def fused_plan(self) -> MemoryPlan | None:
        """The memory that the fused operators need; None if they are not there, or unknown."""
        return self._fused_plan() if self.is_fused else None

    @property
    def allocates(self) -> bool:
        """Whether a call takes memory for its results that is worth mentioning; a CUDA graph has its own."""
        return not self.runs_alone and (self._capture is None or self._capture.graph is None)

    @property
    def fusing(self) -> str:
        """The state of fusion: `never`, `not yet`, `under way`, `done`, or why it failed."""
        if self.is_fused or self._refused:
            return self._refused or "done"
        if self._fusing is not None:
            return "under way"
        return "not yet" if self.step.fusion is Fusion.LATER else "never"

    @property
    def _is_fusible(self) -> bool:
        # Where every gradient is stopped, operators make constants, and no array names a device to compile for.
        return bool(self.part.nodes) and bool(self.part.inputs)

    def bound(self, memory: list[Any], arrays: Callable[[], Mapping[Key, torch.Tensor]]) -> Binding:
        """The arrays that persist between calls, looked up again if any of `memory` changed."""
        known = self._bound
        if known is None or len(known[0]) != len(memory) or not all(map(is_, known[0], memory)):
            known = self._bound = memory, self.bind(arrays())
        return known[1]

    def bind(self, arrays: Mapping[Key, torch.Tensor]) -> Binding:
        """The arrays that persist between calls, in their positions."""
        inputs = self.part.inputs
        opened = tuple((i, key) for i, key in enumerate(inputs) if key not in arrays)
        bound = [arrays.get(key) for key in inputs]
        # A CUDA graph has its own views, and fused operators have none.
        has_views = self._capture is None and arrays.keys() >= self._code.staying
        return Binding(self, bound, opened, self._code.views(bound) if has_views else None)

    @cached_property
    def _code(self) -> _Code:
        """The operators as code; not needed if an earlier run has fused them."""
        return _generated(self.part, self.step)

    def __call__(self, binding: Binding, others: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Runs once on the bound arrays and the others; results are valid until the next call."""
        if self._searches:
            self._search(others)
        if self._fusing is not None and self._fusing.done() and self.step.ownership is None:
            self.take_fused()
        capture, replay, self.is_included = self._capture, self._replay, False
        flushes = self._flushes and surroundings.keeps_subnormals()
        if flushes:
            torch.set_flush_denormal(True)
        try:
            if capture is not None:
                found = capture.run(binding, others)
            elif replay is not None and replay.is_direct:  # no operator is called: no modes needed
                found = replay.launch(binding.arrays, binding.opened, others)
            else:
                found = self.run(binding.filled(others), binding.views)
        except ExecutionError:  # of a collective, which names the ranks
            raise
        except Exception as error:  # whatever a kernel raises, the error names the layer
            raise self._explained(error) from error
        finally:
            if flushes:
                torch.set_flush_denormal(False)
        return dict(zip(self.part.outputs, found))  # noqa: B905 - every call pays for what is always true

    @property
    def can_be_included(self) -> bool:
        """Whether more than this part can be captured at once: this thread has run it, and nothing will replace it."""
        has_worked = self._capture is None or self._capture.has_worked
        return has_worked and self.fusing not in ("not yet", "under way")

    def discard_capture(self) -> None:
        """Releases what was captured of this part alone; the next call would capture it again."""
        if self._capture is not None:
            self._capture.discard()

    def include(self, binding: Binding, others: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Runs once inside a capture of more than this part."""
        with self.settings():
            found = self.run(binding.filled(self.fitted(others)))
        self.is_included = True
        return dict(zip(self.part.outputs, found, strict=True))

    @cached_property
    def writes_tensors(self) -> bool:
        """Whether a run changes what tensors hold: parameters or statistics."""
        return any(key.kind == KeyKind.VALUE for key in self.part.written)

    @cached_property
    def counts_steps(self) -> bool:
        """Whether a run advances the optimizer's step count; false if nothing is updated."""
        return NUMBERS in self.part.written

    @cached_property
    def loss_indices(self) -> tuple[int, ...]:
        """The indices of the losses among the results, in order; empty if one of them is not there."""
        losses, outputs = [value(node.results[0]) for node in self.step.losses], self.part.outputs
        return tuple(map(outputs.index, losses)) if set(losses) <= set(outputs) else ()

    @cached_property
    def _only_loss(self) -> Key | None:
        """The loss among the results, if there is one and no other."""
        return self.part.outputs[self.loss_indices[0]] if len(self.loss_indices) == 1 else None

    def loss(self, found: Mapping[Key, torch.Tensor]) -> torch.Tensor | Loss | Total:
        """The loss of the last call, or all of several, unaffected by later calls."""
        if self._capture is None and self._only_loss is not None:
            return found[self._only_loss]
        if len(self.loss_indices) == 1:
            return self._loss(found, 0)
        return Total(tuple(self._loss(found, place) for place in range(len(self.loss_indices))))

    def _loss(self, found: Mapping[Key, torch.Tensor], place: int) -> torch.Tensor | Loss:
        index, capture = self.loss_indices[place], self._capture
        array = found[self.part.outputs[index]]
        if capture is None or capture.graph is None or capture.results[index] is not array:
            return array
        slots = capture.losses[place]
        return array.clone() if slots is None else slots.latest()

    def result(self, found: Mapping[Key, torch.Tensor], key: Key) -> torch.Tensor | Lent:
        """One result of the last call, unaffected by later calls."""
        capture = self._capture
        if capture is None or capture.graph is None:
            return found[key]
        return capture.lending.lend(found[key])

    def release(self) -> None:
        """Releases what calls have left in memory; a further call would create it again."""
        self._bound = None
        self._capture = None if self._capture is None else _Capture(self)

    def fuse_later(self, given: Mapping[Key, torch.Tensor]) -> None:
        """Starts fusing operators, for images in the order of these, while calls continue unfused."""
        if self.fusing == "not yet" and self._is_fusible:
            self._start_fusing(self._ordered(given))

    def _start_fusing(self, part: Part) -> fusion.Fusing:
        began = time.perf_counter()
        self._fusing = fusing = fusion.fuse_in_background(part, self.step)
        fusing.add_done_callback(lambda _: self._note_fusion(began))
        return fusing

    def _search(self, given: Mapping[Key, torch.Tensor]) -> None:
        """Takes fused operators that an earlier run has left; if there are none, starts to fuse a large step."""
        self._searches = False
        if self.fusing != "not yet" or not self._is_fusible:
            return
        part = self._ordered(given)
        if fusion.was_fused(part):
            self._load(part)
        elif self._fuses_at_once:
            with Uninterrupted():  # a module that is half imported cannot be imported again
                fusion.load_compiler()
            self._start_fusing(part)

    def _load(self, part: Part) -> None:
        """Takes what an earlier run has left; if it cannot be used, it is compiled again, and nobody waits for that.

        Another thread loads it: as in the background, nothing there depends on the caller's modes.
        """
        fusing = self._start_fusing(part)
        fusing.has_searched.wait()
        self.was_fused_first = fusing.done()

    @property
    def _fuses_at_once(self) -> bool:
        """Whether to fuse beside the first call: a large step that trains, of the batch size that comes first.

        The first calls run under the settings of the step. If these are not the caller's, the compiler starts behind
        them: it distinguishes by them what it keeps.
        """
        if surroundings.reach(*self._surroundings) or self.step.precision.changes_products:
            return False
        return self._is_first and self.counts_steps and self._is_large

    @property
    def _is_large(self) -> bool:
        return sum(array.nbytes for node in self.part.nodes for array in fakes(node)) >= LARGE

    def _ordered(self, given: Mapping[Key, torch.Tensor]) -> Part:
        """The part for images in the order of these, which fused operators will require."""
        self.orders = {key: given[key].stride() for key in self.images if key in given}
        return self.part.reordered(self.orders)

    def fits(self, key: Key, image: torch.Tensor) -> bool:
        """Whether operators can read an image in its order; fused ones were compiled for one."""
        order = self.orders.get(key)
        return not self.is_fused or (image.is_contiguous() if order is None else image.stride() == order)

    def fitted(self, others: Mapping[Key, torch.Tensor]) -> Mapping[Key, torch.Tensor]:
        """The arrays of a call, with copies of images that operators cannot read."""
        unfit = [key for key in self.images if key in others and not self.fits(key, others[key])]
        return {**others, **{key: self.fitting(key, others[key]) for key in unfit}} if unfit else others

    def fitting(self, key: Key, given: torch.Tensor) -> torch.Tensor:
        """A copy of an input, in an order that operators can read."""
        if key not in self.images or self.fits(key, given):
            return given.clone()
        order = self.orders.get(key)
        return given.contiguous() if order is None else copied_as(given, order)

    def _fuse_now(self) -> None:
        began = time.perf_counter()
        try:
            fused = fusion.fuse(self.part, self.step)
            fused.plan()  # nothing runs beside it, so nobody gains if it comes later
            self._adopt(fused)
            self._note_fusion(began)
            self.was_fused_first = True
        except fusion.Unusable as error:  # nothing the caller can change
            self._stay_unfused(error)
        except StepgraphError:
            raise
        except Exception as error:  # whatever PyTorch's compiler raises
            fix = "see the cause above, or compile with fuse=False"
            raise ExecutionError("compile", f"PyTorch's compiler failed: {reason(error)}", fix=fix) from error

    def _note_fusion(self, began: float) -> None:
        self.fusion_seconds = time.perf_counter() - began

    def _stay_unfused(self, error: BaseException) -> None:
        self._refused = reason(error)
        logger.warning("operators remain unfused: %s", self._refused)

    def _adopt(self, fused: Fused) -> None:
        self._function, self._fused_plan, self.is_fused = fused.function, fused.plan, True
        self._replay = fused.function if isinstance(fused.function, Launching) else None
        self._flushes = self.runs_alone

    @property
    def fusion_has_failed(self) -> bool:
        """Whether operators could not be fused."""
        fusing = self._fusing
        return bool(self._refused) or (fusing is not None and fusing.done() and fusing.exception() is not None)

    @property
    def can_run_fused(self) -> bool:
        """Whether fused operators are in use, or ready to be."""
        return self.is_fused or (self._fusing is not None and self._fusing.done() and not self.fusion_has_failed)

    def take_fused(self) -> None:
        """Switches to the fused operators, which are ready, from the next call on; to none if they failed."""
        fusing, self._fusing = self._fusing, None
        if fusing is None:
            return
        error = fusing.exception()
        if error is not None:
            self._stay_unfused(error)
            return
        self._adopt(fusing.result())
        self._renew_capture()
        count, seconds = len(self.part.nodes), self.fusion_seconds
        if self.was_fused_first:
            logger.warning("loaded %d operators, fused by an earlier run, in %.1f s", count, seconds)
        else:
            logger.warning("fused %d operators in %.0f s; steps run faster from now on", count, seconds)

    def unfuse(self, reason: str) -> None:
        """Runs unfused from the next call on, whatever the compiler has made."""
        if self.fusion_has_failed:
            self.take_fused()
            return
        self._fusing, self._refused = None, reason
        if self.is_fused:
            self._function, self._replay, self.is_fused, self._flushes = self._first, None, False, False
            self._renew_capture()

    def _renew_capture(self) -> None:
        """Captures other operators from now on, in the memory of those before: both may not fit."""
        if self._capture is not None:
            self._capture = _Capture(self)
            torch.cuda.empty_cache()

    def _explained(self, error: Exception) -> ExecutionError:
        """The error to raise for what a kernel raised."""
        if not _is_out_of_memory(error):
            fix = "check the data of this call"
            if self.step.compute_type is not None and re.search("BFloat16|Half", str(error)):  # an operator without it
                fix = "compile without compute_type, or compute this part in float32, as by x.float()"
            return ExecutionError(self._failed(error), f"the device failed: {reason(error)}", fix=fix)
        return ExecutionError(
            self._failed(error),
            f"{self.step.device} is out of memory: {reason(error)}",
            fix="use a smaller batch size (fit can accumulate several) or compile with memory_limit=, which recomputes "
            "results; memory_plan shows what the step needs",
        )

    def _failed(self, error: Exception) -> str:
        """The layer and phase of the operator that raised, found by its line in the generated function."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != _FILE:
            trace = trace.tb_next
        name = "" if trace is None else self._code.source.splitlines()[trace.tb_lineno - 1].split("=")[0].strip()
        node = next((node for node in self.part.nodes if node.name == name), None)
        return "execute" if node is None else f"{notes(node).layer} ({notes(node).phase} pass)"

    def settings(self) -> AbstractContextManager[None]:
        """The settings of PyTorch's libraries for this step, which it reads when a kernel is launched or captured.

        cuDNN tries its algorithms for seconds in the first call. If operators are fused later, its rules choose them,
        so that training starts immediately, in the first run and in those that take what it has fused.
        """
        step = self.step
        deterministic = not (step.chooses_kernels and step.measures_kernels)
        if step.device.type == "cuda":
            return surroundings.cudnn(step.precision, tries=self.tries, deterministic=deterministic)
        return nullcontext()

    def choose_algorithms(self) -> None:
        """Lets cuDNN choose its algorithms before a call holds memory, under the settings of the step."""
        if self.tries:
            algorithms.load(self.part, self.step.device)
            algorithms.choose(self.part, self.step.device)

    @property
    def tries(self) -> bool:
        """Whether cuDNN tries its algorithms."""
        step = self.step
        return step.chooses_kernels and step.measures_kernels and step.fusion is not Fusion.LATER

    def run(self, given: Sequence[torch.Tensor], views: Sequence[Any] | None = None) -> Sequence[torch.Tensor]:
        """Runs operator by operator; without `views` of the given arrays, creates them."""
        if self._views is not None:
            self._views.prepare()
        if surroundings.reach(*self._surroundings):
            with surroundings.neutral(self._surroundings[-1]):
                return self._run(given, views)
        return self._run(given, views)

    def _run(self, given: Sequence[torch.Tensor], views: Sequence[Any] | None) -> Sequence[torch.Tensor]:
        with _InferenceMode(True):
            if self.is_fused:
                return self._function(*given)
            if views is None:
                views = self._code.views(given)
            return self._alone(*given, *views) if self.runs_alone else self._function(*given, *views)

    def _first(self, *given: torch.Tensor) -> Sequence[torch.Tensor]:
        """The first run, which compares the layout of results with the recording; later runs fix only mismatches."""
        layouts = strides.Layouts(self.part.nodes)
        found = self._code.function(self.part, strides.laying_out(self._code.source), layouts)(*given)
        source = strides.laying_out(self._code.source, layouts.surprises)
        self._function = self._code.function(self.part, source, layouts)
        for surprise in layouts.surprises.values():
            logger.debug("copied into the recorded layout: %s", surprise)
        return found

    def _alone(self, *given: Any) -> Sequence[torch.Tensor]:
        """Runs in this thread only: waking others would take longer than the work, much longer on a busy machine."""
        threads = torch.get_num_threads()
        if threads == 1:
            return self._function(*given)
        limit = openmp.limit()
        limit(1)
        try:
            return self._function(*given)
        finally:
            limit(threads)


@dataclass(frozen=True)
class _Code:
    """A part as Python code.

    Args:
        source: its lines.
        names: the names they use.
        allocations: the results that are in the arena.
        staying: the inputs that are the same arrays in every call; the code reads views of them as further inputs.
        create_views: creates these views.
    """

    source: str
    names: dict[str, Any]
    allocations: dict[str, Allocation]
    staying: frozenset[Key]
    create_views: Function

    def function(self, part: Part, source: str, layouts: strides.Layouts) -> Function:
        """A variant of the code, as a function of the part's arrays."""
        names = {**self.names, strides.LAID: layouts.laid_out}
        exec(compile(source, _FILE, "exec"), names)
        return partial(names["forward"], part.module)

    def views(self, given: Sequence[torch.Tensor | None]) -> Sequence[Any]:
        """The views that the code reads, of the inputs that stay; the others may be missing."""
        with _InferenceMode(True):
            return self.create_views(*given)


def _generated(part: Part, step: Step) -> _Code:
    """The code of a part; it calls operators with little overhead."""
    graph = copy.deepcopy(part.module.graph)
    allocations = write_into_arena(graph)
    staying = steady_views.staying(part, step)
    before = steady_views.move_out(graph, [index for index, key in enumerate(part.inputs) if key in staying])
    source, names = _called_directly(graph)
    create, its_names = _called_directly(before)
    exec(compile(create, _FILE, "exec"), its_names)
    return _Code(source, names, allocations, staying, partial(its_names["forward"], part.module))


def _called_directly(graph: fx.Graph) -> tuple[str, dict[str, Any]]:
    """A graph as a Python function, and the names it uses."""
    operators.call_directly(graph)
    code = graph.python_code("self")
    names = dict(code.globals)

    def bare(match: re.Match[str]) -> str:
        space, operator, overload = match.groups()
        name = f"{space}_{operator}_{overload}"
        names[name] = getattr(getattr(getattr(torch.ops, space), operator), overload).op  # without a Python wrapper
        return name

    return re.sub(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()", bare, code.src), names


class _Capture:
    """The CUDA graph of one executable.

    Bound arrays, and results passed on by an earlier part, are read in place. So is the caller's data, as long as
    its memory stays the same; data from elsewhere is copied into the graph's own memory.
    """

    def __init__(self, executable: Executable) -> None:
        self.executable = executable
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls, self.began, self.resting = 0, 0.0, 0.0
        self.waits = executable.fusing == "not yet"
        self.warm = threading.local()  # libraries have handles for each thread, which cannot be made in a capture
        self.binding: Binding | None = None
        step = executable.step
        elsewhere = (KeyKind.USER_GRADIENT, KeyKind.PARTIAL, KeyKind.NEWS)
        self.given = {key for key in executable.part.inputs if key.kind in elsewhere or key.owner in step.fed}
        self.copied: dict[Key, torch.Tensor] = {}
        like = [executable.part.results[executable.part.outputs[index]] for index in executable.loss_indices]
        self.losses = [Losses(one, step.device) if one.numel() == 1 else None for one in like]
        self.lending = Lending()
        self.arrays: list[torch.Tensor] = []
        self.results: Sequence[torch.Tensor] = ()
        self.in_place: dict[Key, int] = {}
        self.orders: dict[Key, tuple[int, ...]] = {}

    @property
    def has_worked(self) -> bool:
        """Whether this thread has run operator by operator, so that it can capture."""
        return hasattr(self.warm, "is_ready")

    def discard(self) -> None:
        """Releases the graph and its memory; a further call would capture it again."""
        self.lending.call_in()
        self.graph = self.binding = None
        self.arrays, self.results = [], ()

    def run(self, binding: Binding, others: Mapping[Key, torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.waits:
            self._count(others)
        unfit = [key for key in self.executable.images if key in others and not self._fits(key, others[key])]
        moved = unfit + [key for key, address in self.in_place.items() if others[key].data_ptr() != address]
        if self.orders:
            moved += [key for key, order in self.orders.items() if key not in moved and others[key].stride() != order]
        if self.graph is None or self.binding is not binding or moved:
            if not self.has_worked or time.monotonic() < self.resting:
                return self._work(binding, others)
            try:
                self._record(binding, others, moved)
            except captures.Broken as error:
                self._rest(error)
                return self._work(binding, others)
        if self.copied:
            torch_private.foreach_copy_(list(self.copied.values()), [others[key] for key in self.copied], True)
        assert self.graph is not None
        for slots in self.losses:
            if slots is not None:
                slots.expect()
        self.lending.call_in()
        self.graph.replay()
        return self.results

    def _rest(self, error: captures.Broken) -> None:
        """Leaves calls uncaptured for a while, because another thread waits for the device again and again."""
        self.resting = time.monotonic() + captures.RESTS
        problem = "the step runs without a CUDA graph, since another thread keeps breaking its capture: %s"
        logger.warning(f"{problem}; the next attempt is in %d s", reason(error), captures.RESTS)

    def _count(self, others: Mapping[Key, torch.Tensor]) -> None:
        """Counts a call, and starts fusing if the part is worth it, but not beside a capture.

        A capture changes settings of the process, by which the compiler distinguishes what it keeps.
        """
        self.calls += 1
        if self.calls == 1:
            self.began = time.perf_counter()
        is_long = self.graph is not None and time.perf_counter() - self.began > FUSES_AFTER
        if is_long or self.calls >= FUSES_AT:
            self.waits = False
            self.executable.fuse_later(others)

    def _work(self, binding: Binding, others: Mapping[Key, torch.Tensor]) -> Sequence[torch.Tensor]:
        """Runs operator by operator: real work, and the warm-up that libraries need in a thread before it captures."""
        self.lending.call_in()
        self.graph, self.warm.is_ready = None, True
        self._note(binding, others)
        with ShortSwitchInterval(), self.executable.settings():
            self.executable.choose_algorithms()
            return self.executable.run(binding.filled(self.executable.fitted(others)))

    def _fits(self, key: Key, image: torch.Tensor) -> bool:
        return key in self.copied or self.executable.fits(key, image)

    def _note(self, binding: Binding, others: Mapping[Key, torch.Tensor]) -> None:
        """Records the addresses of arrays that are read in place, and the orders of those that may have another one.

        These are images, and what an earlier part passes.
        """
        opened = [key for _, key in binding.opened if key not in self.copied]
        self.in_place = {key: others[key].data_ptr() for key in opened}
        images, given = self.executable.images, self.given
        self.orders = {key: others[key].stride() for key in opened if key not in given or key in images}

    def _record(self, binding: Binding, others: Mapping[Key, torch.Tensor], moved: Sequence[Key]) -> None:
        torch.cuda.synchronize(self.executable.step.device)
        self.discard()  # it would be in memory beside the new one, and still be there if that fails
        for key in moved:
            if key in self.given:
                self.copied[key] = self.executable.fitting(key, others[key])
        self._note(binding, others)
        arrays = binding.filled({**others, **self.copied})

        def run() -> Sequence[torch.Tensor]:
            results = self.executable.run(arrays)
            for slots, index in zip(self.losses, self.executable.loss_indices, strict=True):
                if slots is not None:
                    slots.capture(results[index])
            return results

        with ShortSwitchInterval(), self.executable.settings():
            graph, results = captures.capture(run, self.executable.step.device)
        # The arrays are kept alive: memory that is read in place must not be reused.
        self.binding, self.arrays, self.graph, self.results = binding, arrays, graph, results
        logger.info("captured %d operators as a CUDA graph", len(self.executable.part.nodes))


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory was refused; on the CPU, PyTorch has no class for that."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "not enough memory" in str(error)
    )
