"""Moving averages of the parameters, and computing with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from stepgraph.compiler.step import SHARE
from stepgraph.device import Device
from stepgraph.errors import ArgumentError, StateError
from stepgraph.graphs.session import Session
from stepgraph.optimizers import number
from stepgraph.runtime.execution import turn
from stepgraph.runtime.sliced import Sliced
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
    """The averages by parameter, as whole arrays. If ranks have slices of them, all must ask."""
    state = require_averages(session, call)
    # While they are exchanged, the parameters' own memory has them.
    return {t: t.array() for t in state.averages} if state.is_averaged else state.whole_averages()


def require_averages(session: Session, call: str) -> TrainingState:
    """The state of a graph that has averages; an error if there are none."""
    state = session.state
    if state is None or SHARE not in state.arrays:
        lacks = "no optimizer" if session.compilation.declaration.optimizer is None else "no averages"
        raise StateError(call, f"the graph has {lacks}", fix="create it with an optimizer and average=0.999")
    return state


class AverageTensors:
    """Tensors that have a training graph's averages: the parameters of an inference graph.

    They share the memory of the averages. Where ranks have slices of these, they are copies, which all ranks make
    together when an update has changed the averages.

    Args:
        session: returns the session of the training graph, which compiling replaces.
        meet: makes sure that every rank reads averages.
    """

    def __init__(self, session: Callable[[], Session], meet: Callable[[], None]) -> None:
        self._session, self._meet = session, meet
        found = require_averages(session(), "inference").averages
        self.of = {tensor: Tensor(tensor.descriptor, label=tensor.label) for tensor in found}
        self._copies: dict[Tensor, torch.Tensor] = {}
        self._copied: tuple[Any, ...] = ()  # the state and the version of the averages that the copies have

    def refresh(self, device: Device) -> None:
        """Points the tensors to the arrays that hold the averages now."""
        state = require_averages(self._session(), "execute")
        version = ref(state), state.averages_version, state.is_averaged
        if state.averages_are_sliced and version == self._copied:
            return
        self._meet()
        sliced = {tensor for tensor, one in state.averages.items() if isinstance(one, Sliced)}
        with torch.inference_mode(False), torch.no_grad():
            for tensor, array in averages_of(self._session(), "execute").items():
                if tensor in self.of:
                    shared = tensor not in sliced or array is tensor.array()
                    self._point(tensor, array if shared else self._copy(tensor, array), device)
        self._copied = version

    def _copy(self, tensor: Tensor, array: torch.Tensor) -> torch.Tensor:
        """An average where its copy has been before, so that captured graphs find it there."""
        if tensor not in self._copies or self._copies[tensor].device != array.device:
            self._copies[tensor] = torch.empty_like(array)
        return self._copies[tensor].copy_(array)

    def _point(self, tensor: Tensor, array: torch.Tensor, device: Device) -> None:
        own = self.of[tensor]
        if own.current is not array or array.device != device.torch:
            own.hold(array.to(device.torch))
            own.device = device


@torch.inference_mode()
def exchange(session: Session) -> None:
    """Swaps parameters with their averages, in place: whatever shares their memory sees it.

    Where ranks have slices of averages, parameters are set aside: all ranks begin together, each can end alone.
    """
    with turn(session.device), Uninterrupted():
        state = require_averages(session, "averaged")
        found = averages_of(session, "averaged")
        for tensor, one in state.averages.items():
            current = tensor.array()
            kept = current.clone()
            if not isinstance(one, Sliced):
                current.copy_(one)
                one.copy_(kept)
            elif state.is_averaged:
                current.copy_(state.set_aside.pop(tensor))
            else:
                current.copy_(found[tensor])
                state.set_aside[tensor] = kept
        writes.note()
        state.is_averaged = not state.is_averaged


def require_own(state: TrainingState, call: str) -> None:
    """Rejects a call while parameters hold their averages."""
    if state.is_averaged:
        raise StateError(call, "the parameters hold their averages", fix="leave the block of averaged() first")
