"""cuDNN's algorithms, loaded before they are timed, and timed before a step needs memory.

PyTorch lets cuDNN try its algorithms once per shape and keeps the fastest. The first use of an algorithm also loads
it, which makes it look slow. The choice is kept per thread, but loaded algorithms are shared by all threads: if the
convolutions have already run in another thread, their timing is accurate.

While it tries them, cuDNN needs more memory than any of its choices. In the middle of a step, that would come on top
of all that the step holds, so the thread that steps tries them before.

PyTorch keeps a choice whether algorithms were tried or cuDNN's rules chose one, and tries nothing for shapes that have
already run in a thread. A step whose convolutions have run unfused has nothing left to try. So steps that are fused
later never try: also not in a run that starts with the fused step, which would otherwise wait for seconds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.program import Part, fake
from stepgraph.errors import reason
from stepgraph.system import surroundings
from stepgraph.system.surroundings import Precision

logger = logging.getLogger("stepgraph")
aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


class _Chosen(threading.local):
    """The kinds of convolutions for which PyTorch has chosen algorithms in this thread."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()


_chosen = _Chosen()


class Loading(threading.Thread):
    """Runs each kind of convolution of a part once that has not run in the thread that made it, in a temporary one."""

    def __init__(self, part: Part, device: torch.device) -> None:
        super().__init__(name="stepgraph convolutions")
        self._convolutions, self._device = list(_left(part, device).values()), device

    def run(self) -> None:
        _run(self._convolutions, self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def load(part: Part, device: torch.device) -> None:
    """Loads the algorithms of a part that are to be tried in this thread, and waits for it."""
    loading = Loading(part, device)
    try:
        loading.start()
    except RuntimeError:  # the system allows no more threads: trials also measure how long algorithms take to load
        return
    loading.join()


def choose(part: Part, device: torch.device) -> None:
    """Lets cuDNN choose algorithms in this thread for all convolutions of a part, under the current settings."""
    for kind, node in _left(part, device).items():
        if not _run([node], device):
            return
        _chosen.kinds.add(kind)


@torch.inference_mode()
def _run(convolutions: Iterable[fx.Node], device: torch.device) -> bool:
    """Runs convolutions on new arrays; False if one failed, for example because its trials need too much memory.

    The step runs what it needs itself, and raises if that fails too.
    """

    def empty(node: fx.Node) -> torch.Tensor:
        array = fake(node)
        return torch.empty_strided(array.shape, array.stride(), dtype=array.dtype, device=device)

    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with surroundings.neutral(), on_device:
            for node in convolutions:
                cast(Any, node.target)(*fx.map_arg(node.args, empty))
    except RuntimeError as error:
        logger.debug("cuDNN's algorithms are left to the step: %s", reason(error))
        return False
    return True


def _left(part: Part, device: torch.device) -> dict[str, fx.Node]:
    """The convolutions of a part that have not run in this thread, one of each kind."""
    under = device, torch.backends.cudnn.deterministic, Precision.of(None).convolutions
    nodes = [node for node in part.nodes if node.target in CONVOLUTIONS]
    found = {str((under, node.target, fx.map_arg(node.args, _kind))): node for node in nodes}
    return {kind: node for kind, node in found.items() if kind not in _chosen.kinds}


def _kind(node: fx.Node) -> Any:
    array = fake(node)
    return tuple(array.shape), array.stride(), array.dtype
