"""The vector instructions that PyTorch's compiler chooses on x86 processors: trying each takes seconds."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from stepgraph.system import torch_private

NAMES = ("avx512 amx_tile", "avx512", "avx2", "asimd")  # the widest first; the last are those of other processors


class Instructions:
    """As PyTorch describes them: true if a program with them compiles, which is tried once."""

    def __init__(self, name: str, works: bool, tried: list[str]) -> None:
        self.name, self.works, self.tried = name, works, tried

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        if self.name not in self.tried:
            self.tried.append(self.name)
        return self.works


@pytest.fixture
def instructions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """PyTorch's module on an x86 processor, that has chosen none yet."""
    from torch._inductor import cpu_vec_isa

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512", "amx_tile"])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    yield cpu_vec_isa
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def listed(instructions: Any, monkeypatch: pytest.MonkeyPatch, *working: str) -> list[str]:
    """Instructions of which some work; returns the names of those that were tried, once there are any."""
    tried: list[str] = []
    made = [Instructions(name, name in working, tried) for name in NAMES]
    monkeypatch.setattr(instructions, "supported_vec_isa_list", made)
    return tried


@pytest.mark.parametrize("first", range(3))
def test_nothing_narrower_is_tried_than_what_works(
    instructions: Any, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    tried = listed(instructions, monkeypatch, *NAMES[first:])
    with torch_private.widest_vectors_first():
        assert str(instructions.pick_vec_isa()) == NAMES[first]
        assert str(instructions.pick_vec_isa()) == NAMES[first]
    assert tried == [*NAMES[: first + 1]]


def test_without_any_that_works_there_are_none(instructions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = listed(instructions, monkeypatch)
    with torch_private.widest_vectors_first():
        assert instructions.pick_vec_isa() is instructions.invalid_vec_isa
    assert tried == [*NAMES[:3]]


def test_others_find_all_of_them_afterwards(instructions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listed(instructions, monkeypatch, *NAMES)
    with torch_private.widest_vectors_first():
        assert [*map(str, instructions.valid_vec_isa_list())] == [NAMES[0]]
    assert [*map(str, instructions.valid_vec_isa_list())] == [*NAMES[:3]]
    with torch_private.widest_vectors_first():  # what is known need not be found again
        assert [*map(str, instructions.valid_vec_isa_list())] == [*NAMES[:3]]


def test_whoever_asks_for_narrow_ones_gets_them(instructions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listed(instructions, monkeypatch, *NAMES)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with torch_private.widest_vectors_first():
        assert str(instructions.pick_vec_isa()) == "avx2"
