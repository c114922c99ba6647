"""Kernels that NVIDIA's assembler gets wrong are recognized in their PTX."""

import pytest

from stepgraph.compiler.assembly import loses_a_constant


def kernel(*lines: str) -> str:
    """A kernel whose index is at first `%r2`, two packed numbers, and in the end `%r9`."""
    start = ".reg .b16 %rs<9>;", ".reg .b32 %r<10>;", "mov.u32 \t%r1, %tid.x;", "mov.b32 \t%r2, {%rs1, %rs2};"
    return "\n\t".join((*start, *lines, "@%p1 st.global.b32 [ %rd1 + 0 ], { %r9 };"))


CONSTANT = "mov.b32 \t%r3, 20;"
SUM = "add.s16x2 \t%r4, %r2, %r3;"
FIRST = "mov.b32 \t{%rs3, _}, %r4;"
BOTH = "mov.b32 \t{%rs3, %rs4}, %r4;"
READ = "cvt.u32.u16 \t%r9, %rs3;"
READ_OTHER = "cvt.u32.u16 \t%r8, %rs4;"


@pytest.mark.parametrize(
    "lines",
    [
        (CONSTANT, SUM, FIRST, READ),
        (CONSTANT, SUM, "mov.b32 \t{_, %rs3}, %r4;", READ),
        (CONSTANT, SUM, BOTH, READ),
        (CONSTANT, "add.u16x2 \t%r4, %r3, %r2;", FIRST, READ),
        ("add.s16x2 \t%r4, %r2, -5;", FIRST, READ),
        (CONSTANT, SUM, "mul.lo.s16x2 \t%r5, %r4, %r2;", "mov.b32 \t{%rs3, _}, %r5;", READ),
        (CONSTANT, SUM, "and.b32 \t%r9, %r4, 255;"),
    ],
    ids=["first half", "second half", "other half unread", "constant first", "immediate", "through another", "masked"],
)
def test_a_constant_is_lost_where_half_of_a_sum_is_unread(lines: tuple[str, ...]) -> None:
    assert loses_a_constant(kernel(*lines))


@pytest.mark.parametrize(
    "lines",
    [
        (CONSTANT, SUM, BOTH, READ, READ_OTHER),
        ("mov.b32 \t%r3, {%rs5, %rs6};", SUM, FIRST, READ),
        ("add.s32 \t%r9, %r1, 20;",),
        (CONSTANT, SUM, "min.s16x2 \t%r5, %r4, %r2;", "mov.b32 \t{%rs3, %rs4}, %r5;", READ, READ_OTHER),
    ],
    ids=["both halves", "no constant", "not packed", "through another"],
)
def test_other_kernels_are_right(lines: tuple[str, ...]) -> None:
    assert not loses_a_constant(kernel(*lines))


def test_functions_have_registers_of_their_own() -> None:
    right = kernel(CONSTANT, SUM, BOTH, READ, READ_OTHER)
    other = kernel("and.b32 \t%r9, %r4, 255;")
    assert not loses_a_constant(f".func one()\n{{{right}}}\n.visible .entry two()\n{{{other}}}")
    assert loses_a_constant(
        f".func one()\n{{{right}}}\n.visible .entry two()\n{{{kernel(CONSTANT, SUM, FIRST, READ)}}}"
    )
