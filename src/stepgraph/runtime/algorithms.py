"""cuDNN's algorithms, loaded before they are timed, and timed before a step needs memory.

PyTorch lets cuDNN try its algorithms once per shape and keeps the fastest. The first use of an algorithm also loads
it, which makes it look slow. The choice is kept per thread, but loaded algorithms are shared by all threads: if the
convolutions have already run in another thread, their timing is accurate.

While it tries them, cuDNN needs more memory than any of its choices. In the middle of a step, that would come on top
of all that the step holds, so the thread that steps tries them before.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.program import Part, fake

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


class Loading(threading.Thread):
    """Runs each kind of convolution of a part once, as a temporary thread."""

    def __init__(self, part: Part, device: torch.device) -> None:
        super().__init__(name="stepgraph convolutions")
        kinds = {str(fx.map_arg(node.args, _kind)): node for node in part.nodes if node.target in CONVOLUTIONS}
        self._convolutions, self._device, self._is_cancelled = list(kinds.values()), device, False

    def cancel(self) -> None:
        """Ends it behind the current convolution."""
        self._is_cancelled = True

    @torch.inference_mode()
    def run(self) -> None:
        device = self._device
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with on_device, contextlib.suppress(torch.OutOfMemoryError):  # the step itself may need less
            for node in self._convolutions:
                if self._is_cancelled:
                    return
                cast(Any, node.target)(*fx.map_arg(node.args, self._empty))
            if device.type == "cuda":
                torch.cuda.synchronize()

    def _empty(self, node: fx.Node) -> Any:
        array = fake(node)
        return torch.empty_strided(array.shape, array.stride(), dtype=array.dtype, device=self._device)


def load(part: Part, device: torch.device, is_fused: bool = False) -> None:
    """Loads them, and waits for it; then runs the convolutions in this thread, too.

    Fused steps may have convolutions of other kinds, so theirs are tried in the step.
    """
    loading = Loading(part, device)
    loading.start()
    loading.join()
    if not is_fused:
        loading.run()


def _kind(node: fx.Node) -> Any:
    array = fake(node)
    return tuple(array.shape), array.stride(), array.dtype
