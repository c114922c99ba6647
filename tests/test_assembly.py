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
SECOND = "mov.b32 \t{_, %rs4}, %r4;"
LOW_BYTES = "and.b32 \t%r5, %r4, 16711935;"  # 0x00ff00ff: the low byte of each half


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
        (CONSTANT, SUM, LOW_BYTES, "mov.b32 \t{%rs3, _}, %r5;", READ),
        (CONSTANT, SUM, "cvt.s32.s16 \t%r9, %r4;"),
        (CONSTANT, SUM, "cvt.s32.s8 \t%r9, %r4;"),
        (CONSTANT, SUM, "cvt.u16.u32 \t%rs3, %r4;", READ),
        (CONSTANT, SUM, "cvt.s32.s16 \t%r9, %r4;", "setp.gt.s32 \t%p1, %r4, 7;"),
    ],
    ids=[
        "first half",
        "second half",
        "other half unread",
        "constant first",
        "immediate",
        "through another",
        "masked",
        "masked, then first half",
        "converted",
        "first byte",
        "truncated",
        "unknown reader",
    ],
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
        (CONSTANT, SUM, "cvt.s32.s16 \t%r9, %r4;", SECOND, READ_OTHER),
        (CONSTANT, SUM, "cvt.u16.u32 \t%rs3, %r4;", READ, SECOND, READ_OTHER),
        (CONSTANT, SUM, LOW_BYTES, "mov.b32 \t{%rs3, %rs4}, %r5;", READ, READ_OTHER),
    ],
    ids=["both halves", "no constant", "not packed", "through another", "converted", "truncated", "masked"],
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


def test_the_gradient_of_a_maximum_pool_is_right() -> None:
    """As Triton compiles it for ResNet's first pool: both ends of a window from a row, halved with a sign."""
    assert not loses_a_constant(
        kernel(
            "prmt.b32 \t%r3, %r1, %r2, 0x5410U;",
            "mov.b32 \t%r4, 65537;",
            "add.s16x2 \t%r5, %r3, %r4;",
            "and.b32 \t%r6, %r5, 16711935;",
            "mov.b32 \t{%rs3, %rs4}, %r6;",
            "shr.u16 \t%rs5, %rs4, 7;",
            "shr.u16 \t%rs6, %rs3, 7;",
            "mov.b32 \t%r7, {%rs6, %rs5};",
            "add.s16x2 \t%r8, %r5, %r7;",
            "mov.b32 \t{%rs7, %rs8}, %r8;",
            "cvt.s16.s8 \t%rs9, %rs8;",
            "cvt.s16.s8 \t%rs10, %rs7;",
            "mov.b32 \t%r10, {%rs10, %rs9};",
            "add.s16x2 \t%r11, %r10, %r4;",
            "cvt.s32.s16 \t%r9, %r11;",
            "mov.b32 \t{_, %rs11}, %r11;",
            "cvt.s32.s16 \t%r12, %rs11;",
        )
    )
