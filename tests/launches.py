"""Which of our own kernels a test launches or compiles."""

from typing import Any

import pytest


def noted(monkeypatch: pytest.MonkeyPatch, tiles: Any) -> list[str]:
    """The names of kernels of a module in `compiler/tiles`, from now on."""
    names: list[str] = []
    launch = tiles.launch

    def noting(kernel: Any, *arguments: Any, **settings: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *arguments, **settings)

    monkeypatch.setattr(tiles, "launch", noting)
    return names
