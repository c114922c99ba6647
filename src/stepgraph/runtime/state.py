"""The training state on the device: optimizer buffers, live numbers, the random stream, gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_

import numpy as np
import torch

from stepgraph.compiler.kernels import number_type
from stepgraph.compiler.ranks.slices import Ownership, Slice
from stepgraph.compiler.step import (
    AGREED,
    NUMBERS,
    OFFSETS,
    REFUSED,
    SCALE,
    SEEDS,
    SHARE,
    STREAM,
    Key,
    KeyKind,
    average,
    rounded,
    state,
)
from stepgraph.device import Device
from stepgraph.errors import ArgumentError, DataError
from stepgraph.layers.node import Node
from stepgraph.optimizers import Optimizer, ParameterGroup
from stepgraph.random import draw_seed
from stepgraph.runtime.sliced import Sliced, whole
from stepgraph.runtime.world import ALONE, World
from stepgraph.system import torch_private
from stepgraph.system.interrupts import Uninterrupted
from stepgraph.tensors import writes
from stepgraph.tensors.buffers import TensorData
from stepgraph.tensors.tensor import Tensor, TensorOptimizerDeviceData

Buffer = torch.Tensor | Sliced
_UNKNOWN = None, memoryview(b"")
_AVERAGE = 1_000  # the number of an average, behind those of all buffers
FIRST_SCALE = 2.0**16  # the largest for float16; halved until gradients are finite


@dataclass
class Progress:
    """The training state outside the tensors; None or empty means unknown or not started.

    Args:
        stream: seed and position of the random stream.
        scale: the loss scale, and the finite steps since it last changed.
        time_step: the step count of the next update.
        time_version: the optimizer's version when `time_step` was read; a step count assigned later takes precedence.
        buffers: the optimizer's buffers by parameter, in the order of its slots; several ranks have slices of them.
        gradients: gradients that no update has used yet, by parameter.
        averages: moving averages by parameter; several ranks have slices of them.
    """

    stream: list[int] | None = None
    scale: list[float] | None = None
    time_step: int | None = None
    time_version: int = 0
    buffers: dict[Tensor, tuple[Buffer, ...]] = field(default_factory=dict)
    gradients: dict[Tensor, torch.Tensor] = field(default_factory=dict)
    averages: dict[Tensor, Buffer] = field(default_factory=dict)


class TrainingState:
    """The state that one training graph keeps between calls."""

    def __init__(self, device: Device) -> None:
        self.device = device
        # Replaced as a whole: the identity of the dictionary identifies the arrays.
        self.arrays: dict[Key, torch.Tensor] = {STREAM: torch.zeros(2, dtype=torch.int64, device=device.torch)}
        self.optimizer: Optimizer | None = None
        self._slots: Mapping[Tensor, tuple[str, ...]] = {}
        self._zeros: frozenset[Key] = frozenset()  # buffers that are new and that nothing has written to
        self._buffered: dict[Tensor, int] = {}  # how many buffers tensors have, also those that are frozen now
        self._ownership: Ownership | None = None  # of which buffers this rank has a slice only
        self._world = ALONE
        self._groups: tuple[ParameterGroup, ...] = ()
        self._seen = (-1, -1)
        self._seen_groups = 0
        self._updates = 0
        self._counted: tuple[object, memoryview] = _UNKNOWN  # the arrays, and the step counts in them
        self.is_averaged = False  # whether parameters and averages are exchanged
        self.averages_version = 0  # another number after everything that may have changed averages, alike on all ranks
        # Parameters, while they hold averages of which ranks have slices.
        self.set_aside: dict[Tensor, torch.Tensor] = {}
        self._averaged: dict[Tensor, None] = {}  # those with averages, also those that are frozen now
        self._unaveraged: tuple[Tensor, ...] = ()  # whose averages follow them until the first update
        # What that update has found: the step count, the updates so far, and these tensors.
        self._first: tuple[tuple[int, int], int, tuple[Tensor, ...]] | None = None
        self.rounded: tuple[Tensor, ...] = ()  # those with copies in the compute type
        self._exposed: tuple[Tensor, ...] = ()  # those of them that others may write to unnoticed
        self.rounded_at: int | None = None  # the last note of a write when the copies were equal to their parameters

    def attached(
        self,
        optimizer: Optimizer | None,
        slots: Mapping[Tensor, tuple[str, ...]],
        *,
        scaled: bool,
        decay: float | None,
        factors: int,
        guarded: int,
        offsets: bool = False,
        decides: bool = False,
        ownership: Ownership | None = None,
        world: World = ALONE,
    ) -> TrainingState:
        """A state with an optimizer: buffers bound by the user, previous ones, or zeros.

        The buffers of the same optimizer are kept, even while their tensor is frozen, and so is a scale in use. This
        state and the tensors do not change until the new one begins.

        Args:
            optimizer: what updates the parameters.
            slots: the buffers of every trained tensor.
            scaled: whether the loss is scaled.
            decay: that of the averages; None if there are none.
            factors: the number of losses that have a factor each.
            guarded: the number of tensors whose indices steps check.
            offsets: whether they check parts of a batch, which begin somewhere in it.
            decides: whether the device decides if an update counts, by what ranks tell each other.
            ownership: the slices of buffers that each rank has; None if each has all of them.
            world: the ranks, all of which do the same.
        """
        new = TrainingState.__new__(TrainingState)
        new.__dict__.update(self.__dict__)
        new.arrays = dict(self.arrays)
        if not scaled:
            new.arrays.pop(SCALE, None)
        elif SCALE not in new.arrays:
            new.arrays[SCALE] = torch.tensor([FIRST_SCALE, 0.0], device=self.device.torch)
        new.arrays.pop(SEEDS, None)
        new.arrays.pop(REFUSED, None)  # what the device notes refers to one compilation
        if guarded:
            new.arrays[REFUSED] = torch.zeros(guarded, dtype=torch.int64, device=self.device.torch)
        new.arrays.pop(OFFSETS, None)
        if guarded and offsets:
            new.arrays[OFFSETS] = torch.zeros(guarded, dtype=torch.int64, device=self.device.torch)
        new.arrays.pop(AGREED, None)
        if decides:
            new.arrays[AGREED] = torch.ones(1, dtype=torch.bool, device=self.device.torch)
        if factors:
            new.arrays[SEEDS] = torch.ones(factors, device=self.device.torch)
        if optimizer is not None:
            new.attach(optimizer, slots, ownership, world)
        if optimizer is not None and decay is not None:
            new.attach_averages(decay)
        return new

    def attach(
        self,
        optimizer: Optimizer,
        slots: Mapping[Tensor, tuple[str, ...]],
        ownership: Ownership | None = None,
        world: World = ALONE,
    ) -> None:
        """Sets the optimizer; its buffers start as described in `attached`."""
        if self.optimizer is None or self.optimizer.rule != optimizer.rule:
            self.arrays = {key: array for key, array in self.arrays.items() if key.kind != KeyKind.STATE}
            self._buffered = {}
        self._redistribute(ownership, world)
        device, new = self.device.torch, []
        for tensor, own in slots.items():
            shape = tensor.shape if ownership is None else ownership.shape(tensor)
            for i in range(self._buffered.get(tensor, 0), len(own)):
                if ownership is None or tensor in ownership.owned:
                    self.arrays[state(tensor, i)] = torch.zeros(shape, dtype=tensor.data_type.torch, device=device)
                    new.append(state(tensor, i))
        self._buffered = self._buffered | {tensor: len(own) for tensor, own in slots.items()}
        self._slots, self._zeros = slots, frozenset(new)
        if self.optimizer is not optimizer:
            columns = len(optimizer.columns)
            shape = (1 + len(optimizer.groups), columns) if optimizer.groups else (columns,)
            self.arrays[NUMBERS] = torch.zeros(shape, dtype=number_type(device), device=device)
            self._counted = _UNKNOWN
            self.optimizer, self._seen, self._updates, self._first = optimizer, (-1, -1), 0, None
            self._groups = optimizer.groups
        for tensor in slots:
            self._take_bound(tensor)
        self._write_numbers(optimizer)

    def _redistribute(self, ownership: Ownership | None, world: World) -> None:
        """Moves buffers where ranks have other slices of them than before. All ranks do it at the same time."""
        before, after = self._ownership, ownership
        if before is not None and after is not None:  # those of frozen tensors stay where they are
            kept = {**self._buffered, **self._averaged}
            frozen = {t: own for t, own in before.slices.items() if t in kept and t not in after.slices}
            after = replace(after, slices={**after.slices, **frozen})
        buffers = [state(tensor, i) for tensor, count in self._buffered.items() for i in range(count)]
        for key in [*buffers, *map(average, self._averaged)]:
            tensor = key.owner
            if _slices(before, tensor) != _slices(after, tensor):
                found = whole(self._buffer(key), f"optimizer state of '{tensor.label}'")
                self.arrays.pop(key, None)
                for own in _pieces(after, tensor, found):
                    self.arrays[key] = own.clone()
        self._ownership, self._world = after, world

    def _buffer(self, key: Key) -> Buffer:
        """A buffer or an average, whole or as a slice."""
        slices, own = _slices(self._ownership, key.owner), self.arrays.get(key)
        if slices is not None:
            return Sliced(key.owner, own, slices, self._world)
        assert own is not None
        return own

    def attach_averages(self, decay: float) -> None:
        """Adds averages of trained tensors that have none yet: copies, until the first update."""
        new = tuple(tensor for tensor in self._slots if tensor not in self._averaged)
        device = self.device.torch
        for tensor in new:
            for own in _pieces(self._ownership, tensor, tensor.on(self.device)):
                self.arrays[average(tensor)] = own.to(device, copy=True)
        self.arrays[SHARE] = torch.tensor([1 - decay], dtype=torch.float32, device=device)
        self._averaged = self._averaged | dict.fromkeys(new)
        self._unaveraged, self._first = (*self._unaveraged, *new), None
        self.note_averages()

    def keep_rounded(
        self, tensors: tuple[Tensor, ...], dtype: torch.dtype | None, orders: Mapping[Tensor, tuple[int, ...]]
    ) -> None:
        """Keeps copies of parameters in a type; `round` fills them.

        Args:
            tensors: the parameters.
            dtype: the type.
            orders: strides of the copies that are in another order in memory than their parameters.
        """
        before = {key: array for key, array in self.arrays.items() if key.kind == KeyKind.ROUNDED}
        if not tensors and not before:
            return
        kept = [t for t in tensors if rounded(t) in before and before[rounded(t)].dtype is dtype]
        known = {rounded(t): before[rounded(t)] for t in kept}
        for tensor in tensors:
            array = known.get(rounded(tensor))
            strides = orders.get(tensor) or torch.empty(tensor.shape, device="meta").stride()
            if array is None or array.stride() != strides:
                new = torch.empty_strided(tensor.shape, strides, dtype=dtype, device=self.device.torch)
                known[rounded(tensor)] = new
        self.rounded, self.rounded_at = tensors, None
        others = {key: array for key, array in self.arrays.items() if key.kind != KeyKind.ROUNDED}
        self.arrays = others | {rounded(tensor): known[rounded(tensor)] for tensor in tensors}

    def round(self, *, again: bool = False) -> None:
        """Rounds parameters into their copies, `again` or if any but this graph's own steps may have written to them.

        After its own steps, which write both, only parameters that others can reach are rounded.
        """
        noted = writes.latest()
        stale = self.rounded if again or self.rounded_at != noted else self._exposed
        if stale:
            # Who no longer holds an array has written to it before.
            self._exposed = tuple(tensor for tensor in stale if tensor.is_exposed)
            with torch.inference_mode():
                copies = [self.arrays[rounded(tensor)] for tensor in stale]
                torch_private.foreach_copy_(copies, [tensor.array() for tensor in stale])
        self.rounded_at = noted

    @torch.inference_mode()
    def set_decay(self, decay: float) -> None:
        """Changes the decay of the averages from the next update on."""
        self.arrays[SHARE].fill_(1 - decay)

    @property
    def averages(self) -> dict[Tensor, Buffer]:
        """The averages by parameter, also of those that are frozen now; the arrays in use, or this rank's slices."""
        self._follow()
        return {tensor: self._buffer(average(tensor)) for tensor in self._averaged}

    @property
    def own_averages(self) -> dict[Tensor, torch.Tensor]:
        """What this rank has of the averages: the arrays in use."""
        self._follow()
        return {key.owner: array for key, array in self.arrays.items() if key.kind == KeyKind.AVERAGE}

    def whole_averages(self) -> dict[Tensor, torch.Tensor]:
        """The averages as whole arrays. All ranks must ask at the same time, unless nothing has been averaged yet."""
        found = self.averages
        return {
            tensor: tensor.array()
            if tensor in self._unaveraged
            else whole(one, f"the average of '{tensor.label}', which every rank must read")
            for tensor, one in found.items()
        }

    def note_averages(self) -> None:
        """Notes, on all ranks alike, that averages may have changed: whole copies of them are out of date."""
        self.averages_version += 1

    @property
    def averages_are_sliced(self) -> bool:
        """Whether ranks have slices of averages that have left their parameters."""
        return not self._unaveraged and any(_slices(self._ownership, tensor) is not None for tensor in self._averaged)

    def _follow(self) -> None:
        """Lets averages start from what parameters hold when the first update comes."""
        if not self._unaveraged:
            return
        with Uninterrupted(), torch.inference_mode():  # it is read outside of calls, too
            for tensor in self._unaveraged:
                for own in _pieces(self._ownership, tensor, tensor.array()):
                    self.arrays[average(tensor)].copy_(own)

    def begin(self, fresh: bool) -> None:
        """Takes over from the previous state: tensors show its buffers. A `fresh` state draws its own seed."""
        if fresh:
            self.arrays[STREAM].copy_(torch.tensor([draw_seed(), 0]))
        for tensor in self._slots:
            if not self._shows(tensor):
                self._publish(tensor, self._buffers(tensor))
        self._zeros = frozenset()  # from now on, steps write to them

    def _buffers(self, tensor: Tensor) -> list[torch.Tensor]:
        """The buffers that a tensor shows: none if they are slices."""
        if _slices(self._ownership, tensor) is not None:
            return []
        return [self.arrays[state(tensor, i)] for i in range(len(self._slots[tensor]))]

    def refresh(self) -> None:
        """Copies what the user assigned or bound since the last update to the device; nothing is compiled."""
        optimizer = self.optimizer
        if optimizer is None:
            return
        if self._updates == 0:
            for tensor in self._slots:
                self.adopt(tensor)
        if self._unaveraged:
            self._follow()
        if self._seen[0] != optimizer.version or (self._groups and self._seen_groups != optimizer.group_version):
            self._write_numbers(optimizer)

    def updated(self) -> None:
        """Mirrors the step count that the device has just advanced."""
        if self.optimizer is not None:
            if self._unaveraged:
                self._first = self._count, self._updates, self._unaveraged
                self._unaveraged = ()
            self._updates += 1
            self.averages_version += 1
            self.optimizer.__dict__["time_step"] += 1  # mirrors the device; nothing was assigned

    def count_steps(self) -> None:
        """Reads the step count if the device decides whether a step counts: with a scaled loss."""
        if SCALE in self.arrays:
            self.read_steps()

    def read_steps(self) -> None:
        """Reads the step count from the device."""
        if self.optimizer is not None and self._updates:
            self.optimizer.__dict__["time_step"] = int(self._steps[0])

    def refused(self) -> None:
        """Continues from before updates that the device has refused, as if they had never been made.

        If they include the first one, averages start from what parameters hold when it comes again.
        """
        self.read_steps()
        if self._first is not None and self._first[0] == self._count:
            _, self._updates, self._unaveraged = self._first
            self._first = None
            self.note_averages()

    @property
    def _count(self) -> tuple[int, int]:
        """The step count, and how often somebody has assigned it."""
        return (0, 0) if self.optimizer is None else (self.optimizer.time_step, self.optimizer.time_version)

    @property
    def _steps(self) -> torch.Tensor:
        """The step counts on the device, one per row of numbers; all are equal."""
        assert self.optimizer is not None
        return torch.atleast_2d(self.arrays[NUMBERS])[:, self.optimizer.columns.index("time_step")]

    @property
    def next_update(self) -> int:
        """The number of the next update, where the device is the host: read from the memory that a step counts in."""
        arrays, counts = self._counted
        if arrays is not self.arrays:
            counts = self._steps.numpy().data
            self._counted = self.arrays, counts
        return int(counts[0])

    @property
    def loss_factors(self) -> torch.Tensor:
        """The factor of each loss's gradient: 1, but for batches that are parts of a larger one."""
        return self.arrays[SEEDS]

    @property
    def loss_scale(self) -> float | None:
        """The current scale, or None."""
        return float(self.arrays[SCALE][0]) if SCALE in self.arrays else None

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if not _is_usable(scale):
            raise ArgumentError("loss_scale", f"the scale is {scale}, outside the range of float32", fix="use 65536.0")
        self.arrays[SCALE].copy_(torch.tensor([scale, 0.0]))

    def progress(self) -> Progress:
        """The current progress. Arrays are shared, not copied."""
        self.refresh()
        self.count_steps()
        scale = self.arrays[SCALE].tolist() if SCALE in self.arrays else None
        found = Progress(stream=self.arrays[STREAM].tolist(), scale=scale)
        if self.optimizer is not None:
            found.time_step = int(self._steps[0])
            counts = {tensor: count for tensor, count in self._buffered.items() if count}
            found.buffers = {t: tuple(self._buffer(state(t, i)) for i in range(count)) for t, count in counts.items()}
            found.averages = {t: array for t, array in self.averages.items() if t not in self._unaveraged}
        return found

    @torch.inference_mode()
    def resume(self, progress: Progress) -> None:
        """Continues from `progress`, writing into the buffers in use."""
        self._first = None
        if progress.stream is not None:
            self.arrays[STREAM].copy_(torch.tensor(progress.stream))
        if progress.scale is not None and SCALE in self.arrays:
            scale, finite_steps = progress.scale
            self.arrays[SCALE].copy_(torch.tensor([scale, finite_steps] if _is_usable(scale) else [FIRST_SCALE, 0.0]))
        optimizer = self.optimizer
        if optimizer is None:
            return
        if progress.stream is None:  # saved before it began: nothing has been learned about any parameter
            for array in (array for key, array in self.arrays.items() if key.kind == KeyKind.STATE):
                array.zero_()
        for tensor, buffers in progress.buffers.items():
            self._resume_buffers(tensor, buffers)
        self.refresh()
        if progress.time_step is not None and progress.time_version == optimizer.time_version:
            self._steps.fill_(progress.time_step)
        if SHARE in self.arrays and progress.averages:
            self._resume_averages(progress.averages)
        elif SHARE in self.arrays:  # saved without averages: they start again
            self._unaveraged = tuple(self._slots)

    @torch.inference_mode()
    def average_from(self, restored: Collection[Tensor], averages: Mapping[Tensor, Buffer]) -> None:
        """Continues the averages of restored parameters from other arrays, or from the parameters."""
        if SHARE not in self.arrays:
            return
        self._first = None
        self._resume_averages(averages)
        alone = (t for t in self._averaged if t in restored and t not in averages and t not in self._unaveraged)
        self._unaveraged = (*self._unaveraged, *alone)

    def _note_given(self, tensor: Tensor, buffers: Iterable[Buffer], first: int = 0) -> None:
        """Lets ranks compare what each of them was given as a whole, before it keeps a part."""
        for number, one in enumerate(buffers, start=first):
            if self._ownership is not None and not isinstance(one, Sliced):
                writes.watched(tensor).note_given(number, one)

    def _resume_averages(self, averages: Mapping[Tensor, Buffer]) -> None:
        for tensor, found in averages.items():
            self._note_given(tensor, [found], first=_AVERAGE)
            for array in _own(self._ownership, tensor, found):
                self.arrays = {**self.arrays, average(tensor): array.to(self.device.torch, copy=True)}
        self._averaged = self._averaged | dict.fromkeys(averages)
        self._unaveraged = tuple(t for t in self._unaveraged if t not in averages)
        self.note_averages()

    def _resume_buffers(self, tensor: Tensor, buffers: Sequence[Buffer]) -> None:
        self._note_given(tensor, buffers)
        for i, found in enumerate(buffers):
            for array in _own(self._ownership, tensor, found):
                mine = self.arrays.get(state(tensor, i))
                if mine is not None:
                    mine.copy_(array)
                else:  # of a parameter that is frozen now
                    self.arrays = {**self.arrays, state(tensor, i): array.to(self.device.torch, copy=True)}
        self._buffered = {**self._buffered, tensor: len(buffers)}
        if _slices(self._ownership, tensor) is None:
            self._publish(tensor, [self.arrays[state(tensor, i)] for i in range(len(buffers))])
            tensor.synchronize_optimizer_data()

    def _write_numbers(self, optimizer: Optimizer) -> None:
        names, numbers = optimizer.columns, torch.atleast_2d(self.arrays[NUMBERS])
        values = torch.tensor(optimizer.rows(), dtype=numbers.dtype)
        time = names.index("time_step")
        # The device holds this graph's own step count, unless the user has just assigned one.
        mine = slice(None) if self._seen[1] != optimizer.time_version else [i for i in range(len(names)) if i != time]
        numbers[:, mine] = values[:, mine].to(numbers.device)
        self._seen, self._seen_groups = (optimizer.version, optimizer.time_version), optimizer.group_version

    def adopt(self, tensor: Tensor) -> None:
        """Buffers bound by the user become the optimizer's; on the CPU the caller's memory is used in place."""
        if not self._shows(tensor):
            self._take_bound(tensor)
            self._publish(tensor, self._buffers(tensor))

    def _shows(self, tensor: Tensor) -> bool:
        """Whether a tensor shows the buffers in use."""
        if _slices(self._ownership, tensor) is not None:
            return not tensor.optimizer_data
        current = [device.array for device in tensor.optimizer_device_data]
        mine = self._buffers(tensor)
        return len(current) == len(mine) and all(map(is_, current, mine))

    def _take_bound(self, tensor: Tensor) -> None:
        """Adopts buffers that were bound since the tensor last showed any."""
        if tensor.optimizer_data and all(device.array is None for device in tensor.optimizer_device_data):
            self._check(tensor)
            count, dtype = tensor.descriptor.element_count, tensor.data_type.torch
            given = [data.array(dtype)[:count].view(tensor.shape) for data in tensor.optimizer_data]
            self._note_given(tensor, given)
            for i, bound in enumerate(given):
                for own in _pieces(self._ownership, tensor, bound):
                    self.arrays = {**self.arrays, state(tensor, i): own.to(self.device.torch)}
                    self._zeros -= {state(tensor, i)}

    def _check(self, tensor: Tensor) -> None:
        assert self.optimizer is not None
        given, slots = len(tensor.optimizer_data), self._slots[tensor]
        if given != len(slots):
            wanted = f"{len(slots)} ({', '.join(slots)})" if slots else "none"
            raise DataError(
                tensor.where, f"{given} optimizer buffers were bound, but {self.optimizer.rule} takes {wanted}"
            )

    def _publish(self, tensor: Tensor, arrays: Sequence[torch.Tensor]) -> None:
        handles = tensor.optimizer_device_data
        if len(handles) != len(arrays):
            handles = [TensorOptimizerDeviceData() for _ in arrays]
        for handle, array in zip(handles, arrays, strict=False):
            handle.array = array
        on_host = self.device.torch.type == "cpu"
        if on_host or len(tensor.optimizer_data) != len(arrays):
            tensor.optimizer_data = [self._on_host(state(tensor, i), array) for i, array in enumerate(arrays)]
        tensor.optimizer_device_data = list(handles)

    def _on_host(self, key: Key, array: torch.Tensor) -> TensorData:
        """A buffer as a tensor shows it: the memory in use on the CPU, otherwise a copy."""
        if self.device.torch.type == "cpu":
            return TensorData(array)
        if key in self._zeros:  # the system has zeros at once, and without memory until somebody writes to them
            return TensorData(np.zeros(array.nbytes, np.uint8))
        return TensorData(array.cpu())


def _slices(ownership: Ownership | None, tensor: Tensor) -> tuple[Slice, ...] | None:
    """The slices of a tensor's buffers; None if every rank has them whole."""
    return None if ownership is None else ownership.slices.get(tensor)


def _pieces(ownership: Ownership | None, tensor: Tensor, whole: torch.Tensor) -> list[torch.Tensor]:
    """What this rank has of a buffer: its slice, the whole, or nothing."""
    if ownership is None or tensor not in ownership.slices:
        return [whole]
    return [ownership.piece(whole, tensor)] if tensor in ownership.owned else []


def _own(ownership: Ownership | None, tensor: Tensor, found: Buffer) -> list[torch.Tensor]:
    """What this rank has of a buffer that was kept or read: as an array, or nothing."""
    if isinstance(found, Sliced):
        return [] if found.own is None else [found.own]
    return _pieces(ownership, tensor, found)


def _is_usable(scale: float) -> bool:
    """Whether a scale can be halved and doubled in float32; earlier versions saved 0 and infinity."""
    return 0 < float(torch.tensor(scale, dtype=torch.float32)) < float("inf")


def bound_buffers(nodes: Iterable[Node]) -> dict[Tensor, tuple[Buffer, ...]]:
    """Optimizer buffers that were bound to parameters before compilation."""
    tensors = dict.fromkeys(tensor for node in nodes for tensor in node.layer.parameters.values())
    return {
        tensor: tuple(
            data.array(tensor.data_type.torch)[: tensor.descriptor.element_count].view(tensor.shape)
            for data in tensor.optimizer_data
        )
        for tensor in tensors
        if tensor.optimizer_data
    }
