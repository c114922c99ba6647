"""Whether functions make the same numbers for every row, however many rows there are.

Computing some numbers of rows cannot show it: a mask may change from the hundredth row on. So it follows from the
functions: each one here makes such arrays from such arrays. What is not known here counts as different.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.interop.arguments import extents_in, makes, numbers_in
from stepgraph.interop.capture import Capture, Event
from stepgraph.layers.glue import Value
from stepgraph.tensors.extents import BatchExtent

_SHAPING = ("ones", "zeros", "new_ones", "new_zeros", "expand", "broadcast_to")  # take the number of rows
_FILLING = {"full": 1, "new_full": 2}  # also, and the position of what they fill with
_ALONG = {"cumsum": 1, "diff": 2}  # work along a dimension, and the position of its number
_VIEWS = ("getitem", "unsqueeze", "expand", "to", "long", "int")
_BY_ELEMENT = """
    ones_like zeros_like full_like expand_as clone contiguous type type_as bool float half bfloat16 double and or xor
    invert logical_and logical_or logical_xor logical_not eq ne lt le gt ge add radd sub rsub mul rmul neg where
    masked_fill
"""


def are_alike(found: Capture, events: Sequence[Event]) -> bool:
    """Whether all that functions make is the same for every row, but for the numbers of rows themselves."""
    positions = set[int]()  # arrays that hold the numbers of the rows
    for event in events:
        if not _follows_rows(found, event):
            continue
        if event.called == "torch.arange":
            positions.update(event.results)
        elif positions.isdisjoint(numbers_in(event.arguments)):
            if not _is_alike(found, event):
                return False
        elif _name(event) in _VIEWS and _reads_one(event):
            positions.update(event.results)
        elif not _selects_rows(found, event, positions):
            return False
    return positions.isdisjoint(makes(events[-1]))


def _follows_rows(found: Capture, event: Event) -> bool:
    values = {*numbers_in(event.arguments), *makes(event)}
    return any(True for _ in extents_in(event.arguments)) or any(_batch(found, number) for number in values)


def _batch(found: Capture, number: int) -> list[int]:
    """The dimensions of a value that follow the batch."""
    return [n for n, one in enumerate(found.known[number].shape) if isinstance(one, BatchExtent)]


def _name(event: Event) -> str:
    return str(event.called).rpartition(".")[2].strip("_")


def _reads_one(event: Event) -> bool:
    return len({*numbers_in(event.arguments)}) == 1


def _is_alike(found: Capture, event: Event) -> bool:
    """Whether a function of arrays whose rows are alike makes such an array."""
    name, (arguments, settings) = _name(event), event.arguments
    if event.changed:  # perhaps through a view of one row
        return False
    if name in _FILLING:
        return not [*extents_in((arguments[_FILLING[name] :], settings.get("fill_value")))]
    if name == "repeat":  # side by side, rows would be parts of one dimension
        return _repeats_ones(found, event)
    if name in _SHAPING:
        return True
    if [*extents_in(event.arguments)]:
        return False
    if name in _ALONG:
        dimension = next(iter(arguments[_ALONG[name] :]), settings.get("dim", -1))
        dimensions = len(found.known[arguments[0].number].shape)
        return dimension % dimensions not in _batch(found, arguments[0].number)
    return name in _VIEWS or name in _BY_ELEMENT.split()


def _repeats_ones(found: Capture, event: Event) -> bool:
    """Whether the dimensions that follow the batch in a repeated array had one element before, or none."""
    before, after = (found.known[n].shape[::-1] for n in (event.arguments[0][0].number, event.results[0]))
    return all(n >= len(before) or before[n] == 1 for n, one in enumerate(after) if isinstance(one, BatchExtent))


def _selects_rows(found: Capture, event: Event, positions: set[int]) -> bool:
    """Whether numbers of rows only say which rows are read, which are all alike."""
    if event.called != "Tensor.__getitem__" or event.changed:
        return False
    array, index = event.arguments[0]
    index = index if isinstance(index, tuple) else (index,)
    if array.number in positions or not all(isinstance(one, Value) for one in index):
        return False
    return {n for n, one in enumerate(index) if one.number in positions} <= {*_batch(found, array.number)}
