"""Detects kernels that NVIDIA's assembler miscompiles.

For compute capability 9.0 and later, ptxas 12.8 to 13.0 loses the constant of a packed addition if one half of the
sum is never read: `add.s16x2 d, a, 20` then adds 0. LLVM packs index arithmetic like this, so that a kernel reads the
wrong elements. `torch.compile` alone reproduces it, in the gradient of nearest upsampling from 3×6 to 4×7.

PTX does not show it: the assembler may repeat an addition of which both halves are read, close to a reader of one half.
The assembled kernel does: a lost constant is the number `0x0`, where a constant of zero would be the register `RZ`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

_REGISTER = r"%r\d+"
_NUMBER = r"-?\d+|0[xX][\da-fA-F]+"
_CONSTANT = re.compile(rf"mov\.b32\s+({_REGISTER}), (?:{_NUMBER});")
_PACKED_SUM = re.compile(rf"add\.[su]16x2\s+{_REGISTER}, ({_REGISTER}|{_NUMBER}), ({_REGISTER}|{_NUMBER});")
_NOTHING_ADDED = re.compile(r"ADD\w*\.[\w.]*16x2\s+\S+, \S+, 0x0\b")


def is_miscompiled(folder: Path) -> bool:
    """Whether a kernel would compute something else than its PTX says.

    Without a disassembler, a kernel that may be affected counts as miscompiled.

    Args:
        folder: where Triton keeps the PTX and the assembled code of the kernel.
    """
    if not any(adds_packed_constants(path.read_text()) for path in folder.glob("*.ptx")):
        return False
    codes = [_disassembled(path) for path in folder.glob("*.cubin")]
    return not codes or any(code is None or loses_a_constant(code) for code in codes)


def adds_packed_constants(ptx: str) -> bool:
    """Whether the assembler may lose the constant of an addition in this PTX."""
    constants = set(_CONSTANT.findall(ptx))
    return any(one in constants or one[0] != "%" for terms in _PACKED_SUM.findall(ptx) for one in terms)


def loses_a_constant(code: str) -> bool:
    """Whether the assembler has lost the constant of an addition in this code."""
    return _NOTHING_ADDED.search(code) is not None


def _disassembled(path: Path) -> str | None:
    """The instructions of an assembled kernel; None if they cannot be known."""
    tool = disassembler()
    if tool is None:
        return None
    done = subprocess.run([tool, "-c", path], check=False, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 and done.stdout else None


@cache
def disassembler() -> str | None:
    """The path of `nvdisasm`, which comes with Triton and with CUDA; None if there is none."""
    try:
        from triton import knobs

        return str(knobs.nvidia.nvdisasm.path)
    except (ImportError, AttributeError, RuntimeError):
        return shutil.which("nvdisasm")
