"""Kernels that NVIDIA's assembler gets wrong are recognized in what it assembles."""

from pathlib import Path

import pytest
import torch

from stepgraph.compiler import assembly

CONSTANT = "mov.b32 \t%r3, 20;"
SUM = "add.s16x2 \t%r4, %r2, %r3;"
WRONG = "VIADD.16x2 R20, R20, 0x0 ;"
RIGHT = "VIADD.16x2 R20, R20, 0x10001 ;"


@pytest.mark.parametrize(
    "lines",
    [(CONSTANT, SUM), (CONSTANT, "add.u16x2 \t%r4, %r3, %r2;"), ("add.s16x2 \t%r4, %r2, -5;",), (SUM, SUM, CONSTANT)],
    ids=["register", "constant first", "immediate", "several"],
)
def test_packed_additions_of_constants_may_lose_them(lines: tuple[str, ...]) -> None:
    assert assembly.adds_packed_constants("\n\t".join(lines))


@pytest.mark.parametrize(
    "lines",
    [
        ("mov.b32 \t%r3, {%rs5, %rs6};", SUM),
        (CONSTANT, "add.s32 \t%r9, %r1, %r3;"),
        (CONSTANT, "mul.lo.s16x2 \t%r4, %r2, %r3;"),
        ("mov.b32 \t%r33, 20;", SUM),
    ],
    ids=["no constant", "not packed", "product", "another register"],
)
def test_other_kernels_lose_nothing(lines: tuple[str, ...]) -> None:
    assert not assembly.adds_packed_constants("\n\t".join(lines))


@pytest.mark.parametrize("code", [WRONG, "VIADD.16x2 R7, R20.reuse, 0x0 ;", "VIADDMNMX.S16x2 R0, R0, 0x0, R6, PT ;"])
def test_a_lost_constant_is_a_zero_that_is_added(code: str) -> None:
    assert assembly.loses_a_constant(f"/*1440*/ {RIGHT}\n/*1450*/   {code}")


@pytest.mark.parametrize(
    "code",
    [RIGHT, "VIADD.16x2 R0, R0, RZ ;", "VIADD.16x2 R3, R0, R6 ;", "VIADD R3, R0, 0x0 ;", "VIADD.16x2 R0, R0, 0x01 ;"],
)
def test_what_is_added_otherwise_is_right(code: str) -> None:
    assert not assembly.loses_a_constant(f"/*1450*/ {code}\n/*1460*/ MOV R1, 0x0 ;")


def kernel(folder: Path, ptx: str, *assembled: str) -> Path:
    """What Triton keeps of a kernel."""
    (folder / "kernel.ptx").write_text(ptx)
    for index, code in enumerate(assembled):
        (folder / f"kernel{index}.cubin").write_text(code)
    return folder


@pytest.fixture
def disassembler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disassembler of code that is text already; it refuses what says so."""
    tool = tmp_path / "nvdisasm"
    tool.write_text('#!/bin/sh\n! grep -q refused "$2" && cat "$2"\n')
    tool.chmod(0o755)
    monkeypatch.setattr(assembly, "disassembler", lambda: str(tool))


@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize(
    "ptx, assembled, expected",
    [
        ([CONSTANT, SUM], [RIGHT], False),
        ([CONSTANT, SUM], [WRONG], True),
        ([CONSTANT, SUM], [RIGHT, WRONG], True),
        ([CONSTANT, SUM], ["refused"], True),
        ([CONSTANT, SUM], [""], True),
        ([CONSTANT, SUM], [], True),
        ([CONSTANT], ["refused"], False),
    ],
    ids=["right", "wrong", "one of two", "refused", "empty", "not kept", "not affected"],
)
def test_the_assembled_code_decides(tmp_path: Path, ptx: list[str], assembled: list[str], expected: bool) -> None:
    assert assembly.is_miscompiled(kernel(tmp_path, "\n".join(ptx), *assembled)) is expected


def test_without_a_disassembler_what_may_be_wrong_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "disassembler", lambda: None)
    assert assembly.is_miscompiled(kernel(tmp_path, f"{CONSTANT}\n{SUM}", RIGHT))
    assert not assembly.is_miscompiled(kernel(tmp_path, CONSTANT, RIGHT))


@pytest.mark.gpu
def test_assembled_kernels_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    torch.compile(lambda x: torch.sin(x) * 2.71 + 1.41)(torch.ones(1001, device="cuda"))
    assembled = list(tmp_path.rglob("*.cubin"))
    assert assembled and assembly.disassembler() is not None
    for path in assembled:
        assert "EXIT" in (assembly._disassembled(path) or "")
        assert not assembly.is_miscompiled(path.parent)
