"""Why a layer's forward failed, from what PyTorch raised while there were no numbers yet."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from stepgraph.errors import DataTypeError, DeviceError, StateError, StepgraphError, StorageError, reason


class _Known(NamedTuple):
    """A failure that is recognized by what PyTorch says."""

    says: tuple[str, ...]
    kind: type[StepgraphError]
    problem: str
    fix: str


OWN_SEED = "a forward seeds a generator"

_READS_NUMBERS = _Known(
    (
        "item() cannot be called on",
        "meta device type tensor to numpy",
        "Cannot copy out of meta tensor",
        "nonzero",
        "data-dependent",
        "DataDependentOutput",
        "DynamicOutputShape",
        "Cannot access data pointer",
        ".numpy() is not supported",
        "GuardOnDataDependent",
    ),
    StateError,
    "its forward reads numbers (item, tolist, numpy, if, a mask as index), but it is recorded before there are any",
    "compute with arrays: torch.where instead of if, x.sum() instead of x.sum().item(), x * mask instead of x[mask]",
)
_OTHER_DEVICE = _Known(
    ("is not on the expected device", "two different devices", "on the same device", "different device from other"),
    DeviceError,
    "its forward combines sources with an array that is on another device",
    "create it where a source is, as in torch.ones(3, device=x.device), or hold it in a field: "
    "mask: sg.Tensor = sg.constant()",
)
_DECLARATION = _Known(
    ("'Tensor' and 'Tensor'", ", not Tensor", "'Scope' object is not subscriptable", "'Scope' object is not callable"),
    DataTypeError,
    "its forward computes with a field of the layer, not with the array of that field",
    "read the array: scope.array(self.weights)",
)
_ASSIGNS_DATA = _Known(
    ("an array's .data is assigned",),
    StateError,
    "its forward assigns the .data of an array, which a recording does not see",
    "assign the buffer itself, or write into it: with torch.no_grad(): self.mean.copy_(new)",
)
_OWN_SEED = _Known(
    (OWN_SEED,),
    StateError,
    "its forward draws from a generator with a seed of its own, but a step draws from the graph's stream",
    "leave out generator= and manual_seed for new numbers in every step; for numbers that stay the same, draw them in "
    "__init__ and register a buffer",
)
KNOWN = (_OWN_SEED, _READS_NUMBERS, _OTHER_DEVICE, _DECLARATION, _ASSIGNS_DATA)


def explained(where: str, forward: Callable[..., Any], error: Exception) -> StepgraphError | None:
    """The error to raise for a forward that failed; None if nothing is known about it."""
    if isinstance(error, TypeError) and not _takes_scope(forward):
        return DataTypeError(
            where, "its forward does not take scope", fix="add it as a keyword: def forward(self, x, *, scope)"
        )
    if isinstance(error, OSError):  # the first operators may load PyTorch's compiler, which creates its cache folder
        return StorageError(
            where,
            f"its forward needs a file or folder that cannot be used: {reason(error)}",
            fix="check path and permissions; PyTorch keeps files in TORCHINDUCTOR_CACHE_DIR or in TMPDIR",
        )
    text = f"{type(error).__name__}: {error}"
    found = next((one for one in KNOWN if any(part in text for part in one.says)), None)
    return None if found is None else found.kind(where, found.problem, fix=found.fix, raised=reason(error)[:200])


def _takes_scope(forward: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(one.name == "scope" or one.kind is one.VAR_KEYWORD for one in parameters)
