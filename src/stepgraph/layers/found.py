"""Layers that find their input size when they are wired.

`create` of such a layer can be called without it: `FullyConnectedLayer.create(128)` has 128 outputs and takes as many
inputs as its first source has features. Its tensors are created by `graph.node`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from stepgraph.errors import ShapeError
from stepgraph.layers.layer import Layer
from stepgraph.tensors.extents import BatchExtent
from stepgraph.tensors.tensor import TensorDescriptor

Made = TypeVar("Made", bound=Layer)
NOTE = "Without `{name}`, it is found when the layer is wired."


def last_extent(source: TensorDescriptor) -> int:
    """The features of a source: its last dimension."""
    return source.shape[-1]


def channels(source: TensorDescriptor) -> int:
    """The channels of images: dimension 1."""
    return source.shape[min(1, len(source.shape) - 1)]


def found_at_node(
    name: str, find: Callable[[TensorDescriptor], int]
) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Lets a class method `create` be called without its first argument, `name`.

    Args:
        name: the argument that is found.
        find: its value for the layer's first source.
    """

    def decorate(create: Callable[..., Made]) -> Callable[..., Made]:
        every = inspect.signature(create)
        first, *others = (one for one in every.parameters.values() if one.name != name)
        without = every.replace(parameters=[first, *others])

        @wraps(create)
        def created(cls: type[Made], *given: Any, **settings: Any) -> Made:
            if _binds(every, cls, *given, **settings) or not _binds(without, cls, *given, **settings):
                return create(cls, *given, **settings)
            bound = without.bind(cls, *given, **settings)

            def make(*sources: TensorDescriptor) -> Made:
                number = _number(cls.__name__, name, find, sources[0])
                return create(cls, number, *bound.args[1:], **bound.kwargs)

            return cls.deferred(make, bound.arguments.get("label", settings.get("label", "")))

        created.found_at_node = name  # type: ignore[attr-defined]
        created.__doc__ = f"{inspect.getdoc(create) or ''}\n\n{NOTE.format(name=name)}"
        return created

    return decorate


def _binds(signature: inspect.Signature, *given: Any, **settings: Any) -> bool:
    try:
        signature.bind(*given, **settings)
    except TypeError:
        return False
    return True


def _number(layer: str, name: str, find: Callable[[TensorDescriptor], int], source: TensorDescriptor) -> int:
    found = find(source)
    if isinstance(found, BatchExtent):
        raise ShapeError(layer, f"{name} would be {found}", source=source, fix="pass it, or transpose the source")
    return found
