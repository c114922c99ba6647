"""PyTorch modules in a checkpoint: noted by class and constructor arguments, handed over by the program that loads.

A file never holds a module's code. Its arrays are tensors of the layer around it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

PLAIN = (bool, int, float, str)


def constructor_arguments(module: nn.Module) -> dict[str, Any] | None:
    """The arguments that a module was created with, where each is an attribute of the same name; otherwise None.

    Example:
        >>> constructor_arguments(nn.Conv1d(2, 4, 3, bias=False))["bias"]
        False
        >>> constructor_arguments(nn.Sequential()) is None
        True
    """
    found: dict[str, Any] = {}
    if type(module).__init__ is nn.Module.__init__:  # no arguments of its own
        return found
    for name, one in inspect.signature(type(module)).parameters.items():
        if name in ("device", "dtype"):
            continue
        value = getattr(module, name, inspect.Parameter.empty)
        if isinstance(one.default, bool) and not isinstance(value, bool):  # `bias=True` becomes an array
            value = value is not None
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) or not _is_plain(value):
            return None
        found[name] = value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, PLAIN)


class HandedOver:
    """The modules that a program hands over, or knows how to create.

    Args:
        custom: among others, modules, and functions without arguments that return one.
    """

    def __init__(self, custom: Sequence[Any]) -> None:
        self._waiting = [one for one in custom if isinstance(one, nn.Module)]
        self._parts = [dict(one.named_modules()) for one in self._waiting]
        self._factories: list[Callable[[], Any]] = [one for one in custom if is_factory(one)]
        self._found: dict[int, nn.Module] = {}

    def module(self, number: int, name: str, path: str, create: Callable[[], nn.Module | None]) -> nn.Module | None:
        """The module with a number in a file, the same each time: handed over, or created; None if there is none.

        Args:
            number: the number.
            name: the name of its class.
            path: the label of its layer, which is where an imported model has it.
            create: creates one from its class, if that is known.
        """
        if number not in self._found:
            found = self._part(name, path) or self._take(name) or create() or self._make(name)
            if found is None:
                return None
            self._found[number] = found
        return self._found[number]

    def _part(self, name: str, path: str) -> nn.Module | None:
        """The part with a path of a model that was handed over."""
        found = (parts[path] for parts in self._parts if path in parts)
        return next((one for one in found if path and type(one).__qualname__ == name), None)

    def _take(self, name: str) -> nn.Module | None:
        """The first module of a class that was handed over and is not used yet."""
        found = next((one for one in self._waiting if type(one).__qualname__ == name), None)
        if found is not None:
            self._waiting = [one for one in self._waiting if one is not found]
        return found

    def _make(self, name: str) -> nn.Module | None:
        """A module of a class from the first function that returns one."""
        for make in self._factories:
            one = make()
            if isinstance(one, nn.Module) and type(one).__qualname__ == name:
                return one
        return None


def is_factory(one: Any) -> bool:
    """Whether something handed over is a function that creates a module."""
    return callable(one) and not isinstance(one, type | nn.Module)


def known_class(name: str, custom: Mapping[str, type]) -> type[nn.Module] | None:
    """The class of a module by its name in a file: one of PyTorch's, or one that was passed."""
    path, _, qualified = name.rpartition(":")
    found = vars(nn).get(qualified) if path.startswith("torch.nn.") else custom.get(qualified)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None
