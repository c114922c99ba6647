"""Inductor: a part of a step compiled into few large kernels.

Everything PyTorch does not promise about its compiler is used in this file alone.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.join import join_products
from stepgraph.compiler.phases import Part
from stepgraph.compiler.small_products import spell_out_small_products
from stepgraph.compiler.trace import recording

Function = Callable[..., Sequence[torch.Tensor]]

# The step is captured as a CUDA graph by its executable. Small independent kernels (the update of each parameter) are
# launched together.
SETTINGS: dict[str, Any] = {"triton.cudagraphs": False, "combo_kernels": True}


def fuse(part: Part) -> Function:
    """The part as a function of its arrays, compiled; it takes long (seconds to a minute)."""
    from torch._inductor.compile_fx import compile_fx

    module = fx.GraphModule(part.module, copy.deepcopy(part.module.graph))
    arrays = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    if all(array.device.type == "cpu" for array in arrays):
        spell_out_small_products(module.graph)
    join_products(module.graph)
    module.recompile()
    with recording, torch.no_grad():
        return cast(Function, compile_fx(module, arrays, config_patches=SETTINGS))


def fuse_in_background(part: Part) -> Future[Function]:
    """The same in a thread of its own."""
    future: Future[Function] = Future()

    def work() -> None:
        try:
            future.set_result(fuse(part))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="stepgraph fusion", daemon=True).start()
    return future
