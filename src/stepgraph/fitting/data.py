"""The data of a training loop as batches by name, from arrays, tables, loaders or any iterable of batches.

Rows in memory (`Rows`) are split and shuffled here; existing batches (`Stream`) keep their own order.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from stepgraph.errors import ArgumentError, DataError, DataTypeError, ShapeError, StateError, UnknownNameError
from stepgraph.graphs.compiled import CompiledGraph
from stepgraph.system import background
from stepgraph.tensors import buffers
from stepgraph.tensors.tensor import Tensor

BATCH_SIZE = 32  # rows of a batch in a graph that declares none
KINDS = ("input", "loss label", "loss label weight")
GIVE = "pass arrays (inputs, labels), a dictionary of arrays, or an iterable of such batches"


@dataclass(frozen=True)
class Batch:
    """The data of one call: inputs, labels and label weights, each by name.

    Args:
        parts: the data.
        rows: the number of rows.
        origin: the same data on the host, if it was checked there and copied to the device.
    """

    parts: tuple[Mapping[str, Any], ...]
    rows: int
    origin: tuple[Mapping[str, Any], ...] | None = None

    def pinned(self) -> Batch:
        """The same in pinned memory, which a GPU reads asynchronously."""
        parts = ({name: _pin(values) for name, values in part.items()} for part in self.parts)
        return Batch(tuple(parts), self.rows)


class BatchReader:
    """Reads a user's batches as data by name, for the names that a graph declares."""

    def __init__(self, graph: CompiledGraph, what: str, inputs_only: bool = False) -> None:
        feeds = graph.declaration.feeds
        self.what, self.feeds, self.inputs_only = what, feeds, inputs_only
        if not feeds.tensors:
            raise StateError(what, "the graph takes no data: all its inputs are held", fix="call execute in a loop")
        self.first = next((tensor for tensor in feeds.tensors if feeds.is_batched(tensor)), feeds.tensors[0])
        groups = (graph.inputs, graph.loss_labels, graph.loss_label_weights)
        fed = set(feeds.tensors)
        self.kinds = [{name: t for name, t in names.items() if t in fed} for names in groups]

    def named(self, item: Any) -> tuple[dict[str, Any], ...]:
        """Inputs, labels and label weights of a user's batch, or of the whole data. Other names are left alone."""
        further: list[tuple[str, str]] = []
        if isinstance(item, Mapping):
            found = [{name: item[name] for name in names if name in item} for names in self.kinds]
            known = {name for names in self.kinds for name in names}
            further = [("input or label", name) for name in item if name not in known]
        else:
            given = item if isinstance(item, tuple | list) else (item,)
            if not 1 <= len(given) <= 3:
                raise DataError(
                    self.what, f"a batch has {len(given)} parts", fix="pass (inputs, labels) or a dictionary"
                )
            given = given[:1] if self.inputs_only else given
            found = [self._part(i, part) for i, part in enumerate((*given, None, None)[:3])]
            for kind, part in enumerate(given):
                if isinstance(part, Mapping):
                    further += [(KINDS[kind], name) for name in part if name not in self.kinds[kind]]
        self._require_all(found, further)
        return tuple(found)

    def batch(self, item: Any) -> Batch:
        """One batch, with as many rows as its first input."""
        parts = self.named(item)
        candidates = [(t, parts[k][name]) for k, names in enumerate(self.kinds) for name, t in names.items()
                      if name in parts[k]]  # fmt: skip
        if not candidates:
            raise DataError(self.what, "a batch is empty", fix=GIVE)
        batched = [pair for pair in candidates if self.feeds.is_batched(pair[0])]
        tensor, values = next((pair for pair in candidates if pair[0] is self.first), candidates[0])
        rows = self.feeds.rows_in(values, tensor)
        if rows == 0:
            raise DataError(self.what, "a batch has no rows", fix="leave out empty batches")
        counts = {self.feeds.titles[tensor]: self.feeds.rows_in(values, tensor) for tensor, values in batched}
        if max(counts.values(), default=rows) > rows:  # too few rows are noticed when they are read
            raise ShapeError(self.what, "a batch has different numbers of rows", fix="pass equally many", **counts)
        return Batch(parts, rows)

    def tensor(self, kind: int, name: str) -> Tensor:
        """The tensor with a name."""
        return self.kinds[kind][name]

    def where(self, kind: int, name: str) -> str:
        """The name of one array in messages."""
        return f"{self.what}, {KINDS[kind]} '{name}'"

    def _part(self, kind: int, part: Any) -> dict[str, Any]:
        """Data of one kind: by name, or an array if there is only one name."""
        names = self.kinds[kind]
        if part is None:
            return {}
        if isinstance(part, Mapping):
            return {name: values for name, values in part.items() if name in names}
        # A single array is for the one tensor without data: a tensor created with data needs none.
        waiting = [name for name, t in names.items() if t.is_bound or not t.has_data] if len(names) > 1 else list(names)
        if len(waiting) != 1:
            known = ", ".join(f"'{name}'" for name in names) or "none"
            raise DataError(
                self.what,
                f"{'a tuple' if isinstance(part, tuple) else 'one array'} was passed as {KINDS[kind]}, "
                f"but the graph has {len(names)}",
                names=known,
                fix="pass a dictionary by name",
            )
        return {waiting[0]: part}

    def _require_all(self, found: list[dict[str, Any]], further: list[tuple[str, str]]) -> None:
        """Rejects missing data; a name that the graph does not have is then the likely cause."""
        for kind, names in enumerate(self.kinds):
            for name, tensor in names.items():
                if name not in found[kind] and not tensor.has_data:
                    if further:
                        what, other = further[0]
                        problem = f"the graph has no {what} '{other}', and there is no data for '{name}'"
                        raise UnknownNameError(self.what, problem, known=self._known(), fix="rename it")
                    raise DataError(
                        self.where(kind, name),
                        "there is no data for it",
                        needed=tensor.descriptor,
                        fix="pass (inputs, labels), or all by name",
                    )

    def _known(self) -> str:
        return ", ".join(f"'{name}'" for names in self.kinds for name in names)


@dataclass
class Rows:
    """Data with indexable rows, shuffled and split into batches here.

    Args:
        reader: reads a batch as data by name.
        count: number of rows.
        take: returns the item for some rows, given as a slice or an array of indices.
        batch_size: rows of a batch; the last one of an epoch has the remaining rows.
        shuffle: whether each epoch has its own order.
    """

    reader: BatchReader
    count: int
    take: Callable[[Any], Any]
    batch_size: int
    shuffle: bool
    repeats: bool = True
    wants_a_thread: bool = False
    may_overwrite: bool = False

    @property
    def batches(self) -> int | None:
        """Batches per epoch."""
        return math.ceil(self.count / self.batch_size)

    @property
    def sizes(self) -> set[int]:
        """The numbers of rows of batches."""
        size = min(self.batch_size, self.count)
        return {size, self.count % size or size}

    @property
    def division(self) -> dict[str, Any]:
        """What decides which rows are in which batch, besides a seed."""
        return {"rows": self.count, "batch_size": self.batch_size, "shuffle": bool(self.shuffle)}

    def epoch(self, number: int, seed: tuple[int, ...], skip: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from `skip` on; their order depends only on `seed` and `number`."""
        order = np.random.default_rng((*seed, number)).permutation(self.count) if self.shuffle else None
        for start in range(skip * self.batch_size, self.count, self.batch_size):
            stop = min(start + self.batch_size, self.count)
            rows = slice(start, stop) if order is None else order[start:stop]
            yield self.reader.batch(self.take(rows))


@dataclass
class Stream:
    """Data that is already in batches, in its own order.

    Args:
        reader: reads a batch as data by name.
        open: returns the batches of an epoch, by its number.
        known: the number of batches, if known beforehand.
        repeats: whether there is a second epoch.
        generator: that of a loader, which is seeded for each epoch.
        rows: the rows of a batch, if the data says so.
        items: the batches themselves, if they are a list.
    """

    reader: BatchReader
    open: Callable[[int], Iterable[Any]]
    known: int | None = None
    repeats: bool = True
    generator: Any = None
    rows: int | None = None
    items: Sequence[Any] = ()
    wants_a_thread: bool = True
    _walked: int | None = field(default=None, init=False)

    @property
    def batches(self) -> int | None:
        """Batches per epoch: the length of the data, or the count of the previous epoch."""
        return self.known if self._walked is None else self._walked

    @property
    def may_overwrite(self) -> bool:
        """Whether reading a batch may change the one before: a program may fill the same memory again."""
        return not self.items

    @property
    def sizes(self) -> set[int]:
        """The numbers of rows of batches, as far as they are known beforehand."""
        known = {self.reader.batch(item).rows for item in self.items} | {self.rows}
        return {rows for rows in known if rows is not None}

    @property
    def division(self) -> dict[str, Any]:
        """What is known beforehand of which rows are in which batch."""
        return {"batches": self.known, "batch_size": self.rows}

    def epoch(self, number: int, seed: tuple[int, ...], skip: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from `skip` on; those before are read and discarded."""
        if isinstance(self.generator, torch.Generator):
            mixed = np.random.SeedSequence((*seed, number)).generate_state(1)[0]
            self.generator.manual_seed(int(mixed))
        count = skip
        for item in islice(iter(self.open(number)), skip, None):
            yield self.reader.batch(item)
            count += 1
        if count == 0:
            raise DataError(self.reader.what, f"there are no batches in epoch {number + 1}", fix=GIVE)
        self._walked = count


Source = Rows | Stream


def source(
    graph: CompiledGraph,
    data: Any,
    batch_size: int | None = None,
    shuffle: bool = False,
    what: str = "data",
    strict: bool = True,
    inputs_only: bool = False,
) -> Source:
    """The data of a loop, of any kind. Rejects errors that can be detected early.

    Args:
        graph: the graph that the data is for.
        data: see `fit`.
        batch_size: rows of a batch, unless the data is already in batches.
        shuffle: whether to shuffle rows.
        what: the name of the data in messages.
        strict: whether to reject a batch size for data that is already in batches.
        inputs_only: whether to ignore labels and unknown names.
    """
    reader = BatchReader(graph, what, inputs_only)
    size = batch_size or (BATCH_SIZE if reader.feeds.is_open else reader.feeds.batch)
    if hasattr(data, "column_names") and hasattr(data, "__getitem__") and hasattr(data, "__len__"):  # a dataset's table
        return _checked(Rows(reader, len(data), lambda rows: _columns(data, rows), size, shuffle, wants_a_thread=True))
    if isinstance(data, Mapping | tuple | np.ndarray | torch.Tensor) or hasattr(data, "__dlpack__"):
        return _arrays(reader, data, size, shuffle)
    if hasattr(data, "column_names") and hasattr(data, "iter"):  # a streaming dataset

        def opened(epoch: int) -> Any:
            if hasattr(data, "set_epoch"):
                data.set_epoch(epoch)
            return data.iter(batch_size=size)

        return Stream(reader, opened, rows=size)
    if batch_size is not None and strict:
        kind = type(data).__name__
        raise ArgumentError(what, f"batch_size is {batch_size}, but {kind} is already in batches", fix="leave it out")
    if isinstance(data, torch.utils.data.Dataset) and not hasattr(data, "__iter__"):
        kind = type(data).__name__
        raise DataTypeError(what, f"{kind} returns single samples", fix="wrap it: DataLoader(dataset, batch_size=…)")
    if callable(data):
        return Stream(reader, data)
    if not isinstance(data, Iterable):
        raise DataTypeError(what, f"{type(data).__name__} is not data", fix=GIVE)
    repeats = not isinstance(data, Iterator)
    rows = getattr(data, "batch_size", None)
    generator = getattr(data, "generator", None)
    rows = rows if isinstance(rows, int) else None
    items = data if isinstance(data, list) else ()
    return Stream(reader, lambda epoch: data, _length(data), repeats, generator=generator, rows=rows, items=items)


def _arrays(reader: BatchReader, data: Any, batch_size: int, shuffle: bool) -> Rows:
    """Arrays that hold all rows, checked before the first step instead of at the end of an epoch."""
    parts = reader.named(data)
    found: list[dict[str, Any]] = [{}, {}, {}]
    counts: dict[str, int] = {}
    for kind, part in enumerate(parts):
        for name, values in part.items():
            tensor, where = reader.tensor(kind, name), reader.where(kind, name)
            if tensor.shape[0] != reader.feeds.batch:
                raise ShapeError(
                    where,
                    f"it has {tensor.shape[0]} rows in a batch, but the first input has {reader.feeds.batch}",
                    fix="pass an iterable of batches, or make it a constant in compile",
                )
            found[kind][name] = array = _whole(values, tensor, where)
            counts[f"{KINDS[kind]} '{name}'"] = len(array)
    if not counts:
        raise DataError(reader.what, "there are no arrays", fix=GIVE)
    if len(set(counts.values())) > 1:
        raise ShapeError(reader.what, "the arrays have different numbers of rows", fix="pass equally many", **counts)

    def take(rows: Any) -> tuple[dict[str, Any], ...]:
        return tuple({name: _taken(array, rows) for name, array in part.items()} for part in found)

    return _checked(Rows(reader, next(iter(counts.values())), take, batch_size, shuffle))


def _whole(values: Any, tensor: Tensor, where: str) -> Any:
    """An array with one row per sample, of the tensor's shape and type."""
    if isinstance(values, list | tuple):
        return buffers.read(values, (len(values), *tensor.shape[1:]), tensor.data_type, where)
    if isinstance(values, np.ndarray):
        array: Any = buffers.unmasked(values, where)
    else:
        array = buffers.as_array(values, where)
    if array.ndim == 0 or (len(array) and array.ndim == 1 and math.prod(tensor.shape[1:]) != 1):
        wanted = ("rows", *tensor.shape[1:])
        raise ShapeError(where, f"the array has shape {tuple(array.shape)}", needed=wanted, fix="reshape it")
    if len(array):
        buffers.read(array[:1], (1, *tensor.shape[1:]), tensor.data_type, where)  # raises if type or shape differ
    return array


def _checked(rows: Rows) -> Rows:
    if rows.count == 0:
        raise DataError(rows.reader.what, "there are no rows", fix=GIVE)
    return rows


def _taken(array: Any, rows: Any) -> Any:
    if isinstance(rows, slice):
        return array[rows]
    if isinstance(array, torch.Tensor):
        return array.index_select(0, torch.from_numpy(rows).to(array.device))
    return array.take(rows, axis=0)  # releases the GIL, unlike indexing


def _columns(table: Any, rows: Any) -> dict[str, Any]:
    """Some rows of a table as columns."""
    return dict(table[rows] if isinstance(rows, slice) else table[rows.tolist()])


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def _pin(values: Any) -> Any:
    if not isinstance(values, torch.Tensor | np.ndarray):
        return values
    array = buffers.as_array(values, "data")
    return array.pin_memory() if array.device.type == "cpu" and not array.is_pinned() else array


def kept(batches: Iterator[Batch], held: int) -> Iterator[Batch]:
    """The same batches, copied where the data writes a later one into the same memory.

    At first all are copied. Memory that is new in each of the next `held` batches is then used as it is.

    Args:
        batches: what a program yields; it may write to a batch as soon as it is asked for the next one.
        held: how many batches are held while others are read.
    """
    looks: dict[tuple[int, str], _Look] = {}
    for batch in batches:
        parts = tuple(
            {name: looks.setdefault((kind, name), _Look()).kept(values, held) for name, values in part.items()}
            for kind, part in enumerate(batch.parts)
        )
        yield replace(batch, parts=parts)


class _Look:
    """Finds out whether the arrays of one name share memory."""

    def __init__(self) -> None:
        self._first: list[Any] = []  # held, so that no later one gets their memory
        self._is_shared: bool | None = None

    def kept(self, values: Any, held: int) -> Any:
        """An array that nobody writes to."""
        if not isinstance(values, np.ndarray | torch.Tensor) or self._is_shared is False:
            return values
        if self._is_shared is None:
            shared = any(_share(values, one) for one in self._first)
            self._first.append(values)
            if shared or len(self._first) > held:
                self._is_shared, self._first = shared, []
        return values.copy() if isinstance(values, np.ndarray) else values.clone()


def _share(one: Any, other: Any) -> bool:
    """Whether two arrays have bytes in common; those of a view that skips some count, too."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.may_share_memory(one, other)
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    (start, stop), (begin, end) = _span(one), _span(other)
    return start < end and begin < stop


def _span(array: torch.Tensor) -> tuple[int, int]:
    """The addresses of an array: of its first byte, and behind its last one."""
    if array.layout is not torch.strided or not array.numel():
        return 0, 0
    last = sum((extent - 1) * step for extent, step in zip(array.shape, array.stride(), strict=True))
    return array.data_ptr(), array.data_ptr() + (last + 1) * array.element_size()


def ahead(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """The same batches, up to `count` of them prepared ahead by a thread that ends with this iterator."""
    if count == 0:
        yield from batches
        return
    waiting: queue.Queue[tuple[Batch | None, BaseException | None]] = queue.Queue(count)
    over = threading.Event()

    def hand(batch: Batch | None, error: BaseException | None = None) -> None:
        while not over.is_set():
            try:
                return waiting.put((batch, error), timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            with closing(batches):  # type: ignore[type-var]
                for batch in batches:
                    hand(batch)
                    if over.is_set():
                        return
            hand(None)
        except BaseException as error:
            hand(None, error)

    try:
        thread = background.start("stepgraph data", work)
    except RuntimeError:  # the system allows no more threads
        thread = None
    if thread is None:
        yield from batches
        return
    try:
        while True:
            batch, error = waiting.get()
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
    finally:
        over.set()
        thread.join(timeout=1)  # it ends when its current batch is ready
