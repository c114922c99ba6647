"""Streams for what runs beside steps.

PyTorch hands out 32 streams per device in turn, so that two of them may be the same. What runs in the stream of a
capture becomes part of it, whichever thread launches it; therefore captures have a stream that nothing else here gets.
"""

from __future__ import annotations

from functools import cache

import torch


def of_captures(device: torch.device) -> torch.cuda.Stream:
    """The stream in which all captures on a device are made."""
    return of_index(torch.cuda.current_device() if device.index is None else device.index)


@cache
def of_index(index: int) -> torch.cuda.Stream:
    """The same for the device with a number."""
    return torch.cuda.Stream(index)


def beside(device: torch.device) -> torch.cuda.Stream:
    """A stream for work of another thread."""
    found, taken = torch.cuda.Stream(device), of_captures(device)
    return torch.cuda.Stream(device) if found.cuda_stream == taken.cuda_stream else found
