"""Moving averages of the parameters, and computing with them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stepgraph.compiler.step import SHARE
from stepgraph.device import Device
from stepgraph.errors import ArgumentError, StateError
from stepgraph.graphs.session import Session
from stepgraph.optimizers import number
from stepgraph.runtime.execution import turn
from stepgraph.runtime.state import TrainingState
from stepgraph.system.interrupts import Uninterrupted
from stepgraph.tensors import writes
from stepgraph.tensors.tensor import Tensor


def checked_decay(given: float) -> float:
    """The decay of moving averages, after a check."""
    if not 0 <= number("TrainingGraph", "average", given) < 1:
        raise ArgumentError("TrainingGraph", f"average is {given}, not in [0, 1)", fix="use 0.999")
    return float(given)


def averages_of(session: Session, call: str) -> dict[Tensor, torch.Tensor]:
    """The averages in use, by parameter."""
    state = session.state
    if state is None or SHARE not in state.arrays:
        lacks = "no optimizer" if session.compilation.declaration.optimizer is None else "no averages"
        raise StateError(call, f"the graph has {lacks}", fix="create it with an optimizer and average=0.999")
    # While they are exchanged, the parameters' own memory has them.
    return {t: t.array() for t in state.averages} if state.is_averaged else state.averages


class AverageTensors:
    """Tensors that share the memory of a training graph's averages: the parameters of an inference graph.

    Args:
        session: returns the session of the training graph, which compiling replaces.
    """

    def __init__(self, session: Callable[[], Session]) -> None:
        self._session = session
        found = averages_of(session(), "inference")
        self.of = {tensor: Tensor(tensor.descriptor, label=tensor.label) for tensor in found}

    def refresh(self, device: Device) -> None:
        """Points the tensors to the arrays that hold the averages now."""
        for tensor, array in averages_of(self._session(), "execute").items():
            if tensor in self.of and self.of[tensor].current is not array:
                self.of[tensor].hold(array.to(device.torch))
                self.of[tensor].device = device


@torch.inference_mode()
def exchange(session: Session) -> None:
    """Swaps parameters with their averages, in place: whatever shares their memory sees it."""
    with turn(session.device), Uninterrupted():
        averages_of(session, "averaged")  # raises if there are none
        assert session.state is not None
        for tensor, array in session.state.averages.items():
            current = tensor.array()
            kept = current.clone()
            current.copy_(array)
            array.copy_(kept)
        writes.note()
        session.state.is_averaged = not session.state.is_averaged


def require_own(state: TrainingState, call: str) -> None:
    """Rejects a call while parameters hold their averages."""
    if state.is_averaged:
        raise StateError(call, "the parameters hold their averages", fix="leave the block of averaged() first")
