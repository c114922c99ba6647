"""Values that no file of ours would hold, and where in a file they could stand."""

from collections.abc import Iterator
from typing import Any

JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 10**6, 10**30, -(10**30), 10**400, 1.5, -0.0, 1e308, "", "junk", "0", "\x1b[2J",
    "\ud800", [], {}, [[1]], [None], [0, 0], [1, -1], {"tensor": 0}, {"tensor": -1}, {"tensor": 10**6}, {"tensor": "0"},
    {"layer": 0}, {"layer": 3}, {"array": "conv.weights"}, {"array": "none"}, {"tuple": [1, 2]}, {"tuple": 5},
    {"float": "nan"}, {"float": "inf"}, {"float": "junk"}, {"float": []}, {"enum": "DataType", "member": "FLOAT32"},
    {"enum": "DataType", "member": 10**9}, {"enum": "Tensor", "member": "x"}, {"enum": 5, "member": "x"},
    {"class": "AdamOptimizer", "fields": {}}, {"class": "os:system", "fields": {"command": "true"}},
    {"class": "TensorDescriptor", "fields": {"shape": 3}}, {"mapping": [[1]]}, {"mapping": [[{"tuple": []}, 1]]},
    {"mapping": [[[], 1]]}, {"opaque": "function"}, {"opaque": []},
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested JSON, as (container, key)."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def nested(depth: int) -> Any:
    made: Any = 0
    for _ in range(depth):
        made = {"tuple": [made]}
    return made
