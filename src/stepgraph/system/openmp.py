"""How many threads the operators of this thread use, set in OpenMP itself.

PyTorch's own function sets it for threads to come, too, and lets oneDNN forget the convolutions it has prepared.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

LIBRARIES = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib"}


@cache
def limit() -> Callable[[int], object]:
    """The function that sets the number: that of the OpenMP that PyTorch has loaded, or PyTorch's own.

    A library finds the functions of those that it depends on, also where several versions of OpenMP are loaded. A build
    without OpenMP may accept one number for ever, so there it stays as it is.
    """
    library = Path(torch.__file__).parent / "lib" / LIBRARIES.get(sys.platform, "none")
    if "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return lambda number: None
    try:
        function = ctypes.PyDLL(str(library)).omp_set_num_threads
    except (OSError, AttributeError):  # it is elsewhere, or hides its functions
        return torch.set_num_threads
    function.argtypes, function.restype = [ctypes.c_int], None
    return function


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Lets a block have as many threads as the program had earlier."""
    before = torch.get_num_threads()
    if number != before:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number != before:
            torch.set_num_threads(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets the operators of a block use this thread only."""
    threads = torch.get_num_threads()
    limit()(1)
    try:
        yield
    finally:
        limit()(threads)
