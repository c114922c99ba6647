"""Notes of who writes to the arrays of tensors, for those who keep something that was computed from them.

Whoever writes to an array that a tensor holds notes it: steps that train, tensors that are bound or loaded. The last
note having the same number as before means that nothing has changed in between. No array is looked at.
"""

from __future__ import annotations

import itertools

_numbers = itertools.count(1)  # unique, even if several threads write
_last = [0]


def note() -> int:
    """Notes that arrays are written to; returns the number of the note."""
    _last[0] = number = next(_numbers)
    return number


def latest() -> int:
    """The number of the last note."""
    return _last[0]
