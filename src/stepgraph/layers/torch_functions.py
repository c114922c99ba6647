"""PyTorch's functions by name: the only ones that a glue layer calls, also one that comes from a file.

The names are those of PyTorch's own list of functions that can be overridden, and of functions that create arrays.
Nothing on it reads files, runs code or changes settings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import get_overridable_functions

_NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "Tensor": torch.Tensor,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}
_CREATE = """
    arange bartlett_window blackman_window empty empty_strided eye full hamming_window hann_window kaiser_window
    linspace logspace normal ones rand rand_like randint randint_like randn randn_like randperm range scalar_tensor
    tensor as_tensor tril_indices triu_indices zeros complex polar
"""
_METHODS = "new_empty new_full new_ones new_tensor new_zeros new_empty_strided unflatten"
_ATTRIBUTES = ("T", "H", "mT", "mH", "real", "imag", "data")
# What reads numbers, or does something else than compute.
_EXCLUDED = """
    item tolist numpy __array__ __bool__ __int__ __float__ __index__ __reduce_ex__ __deepcopy__ __dlpack__ backward
    register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ set_ share_memory_ pin_memory resize_
    resize_as_ untyped_storage storage data_ptr __setstate__ __len__ __contains__ __format__ __repr__
"""


def _attribute(name: str) -> Callable[..., Any]:
    def read(x: torch.Tensor) -> Any:
        return getattr(x, name)

    return read


@cache
def _table() -> dict[str, Callable[..., Any]]:
    listed = {id(one) for functions in get_overridable_functions().values() for one in functions}
    excluded = set(_EXCLUDED.split())
    found: dict[str, Callable[..., Any]] = {}
    for prefix, space in _NAMESPACES.items():
        for name in set(dir(space)) - excluded:
            # The list leaves out some functions that work in place.
            if {id(getattr(space, one, None)) for one in (name, name.removesuffix("_"))} & listed:
                found[f"{prefix}.{name}"] = getattr(space, name)
    found |= {f"torch.{name}": getattr(torch, name) for name in _CREATE.split()}
    found |= {f"Tensor.{name}": getattr(torch.Tensor, name) for name in _METHODS.split()}
    found |= {f"Tensor.{name}": _attribute(name) for name in _ATTRIBUTES}
    return dict(sorted(found.items()))


@cache
def _names() -> dict[int, str]:
    found: dict[int, str] = {}
    for name, function in _table().items():
        found.setdefault(id(function), name)
    return found


def function(name: str) -> Callable[..., Any] | None:
    """The function with a name; None if there is none, or none that a layer may call.

    Example:
        >>> function("torch.add") is torch.add, function("torch.load")
        (True, None)
    """
    return _table().get(name)


def name_of(called: Any) -> str | None:
    """The name of a function as PyTorch reports it to a function mode; None if it is not on the list.

    Example:
        >>> name_of(torch.Tensor.view), name_of(torch.Tensor.T.__get__), name_of(torch.load)
        ('Tensor.view', 'Tensor.T', None)
    """
    if getattr(called, "__name__", "") == "__get__":
        name = getattr(getattr(called, "__self__", None), "__name__", "")
        return f"Tensor.{name}" if name in _ATTRIBUTES else None
    return _names().get(id(called))
