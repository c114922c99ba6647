"""A tiny step on the CPU: unfused at first, fused from a fixed step on.

Fused operators round differently. So that a repeated or resumed run gives the same bits, the number of an update alone
decides which of the two computes it, never how long the compiler took.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from stepgraph.compiler import fusion
from stepgraph.compiler.fusion import Fused, Fusing
from stepgraph.compiler.program import Part
from stepgraph.compiler.step import Fusion, Step
from stepgraph.errors import reason
from stepgraph.runtime.executable import Executable
from stepgraph.system.interrupts import Uninterrupted

logger = logging.getLogger("stepgraph")

# The first run of a program compiles for ten seconds, some of them beside the steps in between. Later runs load what it
# has made, in milliseconds if that is kernels alone. So only a run of many steps waits, and mostly only the first.
STARTS_AT = 10_000  # the update before which the compiler starts
FUSED_FROM = 20_000  # the first update that is fused


def switches(part: Part, step: Step) -> bool:
    """Whether a whole step is fused at a fixed step.

    Other batch sizes than the declared one stay unfused, because each would have to be compiled. With a scaled loss,
    the device decides which updates count.
    """
    asked = step.fusion is Fusion.FIXED and step.optimizer is not None and step.memory_limit is None
    declared = step.batch[0] == step.batch[1]
    return asked and declared and not step.scales_loss and part.is_tiny and fusion.has_compiler()


class Switch:
    """Chooses what computes an update: the unfused step or, later, the fused one.

    Args:
        plain: the unfused step.
        record: records the same step for the compiler.
    """

    def __init__(self, plain: Executable, record: Callable[[], tuple[Part, Step]]) -> None:
        self._plain, self._record = plain, record
        self._recorded: tuple[Part, Step] | None = None
        self._fusing: Fusing | None = None
        self._process = 0
        self._seconds = 0.0  # that recording took
        self.fused: Executable | None = None
        self.refused = ""

    def at(self, update: int) -> Executable:
        """What computes the update of this number; from the fixed step on, waits for the compiler."""
        if update < STARTS_AT:
            return self._plain
        if self.fused is None:
            self._fuse(is_due=update >= FUSED_FROM)
        return self._plain if update < FUSED_FROM or self.fused is None else self.fused

    def _fuse(self, *, is_due: bool) -> None:
        """Starts the compiler, once, and waits for it if the result is due."""
        if self._fusing is None and not self.refused:
            self._start()
        if is_due and not self.refused:
            self._finish()

    @property
    def is_under_way(self) -> bool:
        """Whether the compiler has started and nothing has come of it yet."""
        return self._fusing is not None

    def _start(self) -> None:
        began, self._process = time.perf_counter(), os.getpid()
        with Uninterrupted():
            try:
                self._recorded = self._record()
            except Exception as error:  # whatever a layer raises when it is called again, training goes on
                self._refuse(error)
                return
            self._seconds = time.perf_counter() - began
            self._fusing = fusion.fuse_in_background(*self._recorded)

    def _refuse(self, error: BaseException) -> None:
        self.refused = reason(error)
        logger.warning("operators remain unfused: %s", self.refused)

    def _finish(self) -> None:
        """Waits for the compiler; an interrupt ends only the waiting."""
        assert self._fusing is not None and self._recorded is not None
        if not self._fusing.done() and self._process != os.getpid():  # the thread stayed behind in the parent
            self._start()
        if self.refused:
            return
        if not self._fusing.done():
            logger.warning("waiting for PyTorch's compiler: steps are fused from number %s on", f"{FUSED_FROM:,}")
        error = self._fusing.exception()
        with Uninterrupted():
            if error is None:
                self._take(*self._recorded, self._fusing.result(), self._fusing.seconds)
            else:
                self._refuse(error)
            self._fusing = self._recorded = None

    def _take(self, part: Part, step: Step, fused: Fused, seconds: float) -> None:
        self.fused = executable = Executable(part, step, fused=fused)
        executable.fusion_seconds = self._seconds + seconds
        if fused.was_kept:
            done = "loaded %d operators, fused by an earlier run, in %.1f s; steps run faster from now on"
        else:
            done = "fused %d operators in %.0f s; steps run faster from now on"
        logger.warning(done, len(part.nodes), executable.fusion_seconds)
