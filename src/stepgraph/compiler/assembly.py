"""Detects, in their PTX, kernels that NVIDIA's assembler miscompiles.

For compute capability 9.0 and later, ptxas 12.8 to 13.0 loses the constant of a packed addition if one half of the
sum is never read: `add.s16x2 d, a, 20` then adds 0. LLVM packs index arithmetic like this for small blocks,
so that a kernel reads the wrong elements. `torch.compile` alone reproduces it, in the gradient of nearest upsampling
from 3×6 to 4×7. In the assembled kernel it is `VIADD.16x2 d, a, 0x0` (`ptxas`, then `nvdisasm -c`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

_FUNCTION = re.compile(r"\.(?:entry|func)\b")
_REGISTER = r"%r\d+"
_NUMBER = r"-?\d+|0[xX][\da-fA-F]+"
_CONSTANT = re.compile(rf"mov\.b32\s+({_REGISTER}), (?:{_NUMBER});")
_PACKED = re.compile(rf"\.\w*16x2\s+({_REGISTER}),")
_PACKED_SUM = re.compile(rf"add\.[su]16x2\s+({_REGISTER}), ({_REGISTER}|{_NUMBER}), ({_REGISTER}|{_NUMBER});")
_UNPACKED = re.compile(r"mov\.b32\s+\{\s*(%rs\d+|_),\s*(%rs\d+|_)\s*\},")
_MASKED = re.compile(rf"and\.b32\s+({_REGISTER}), {_REGISTER}, ({_NUMBER});")
_FIRST_HALF = re.compile(rf"cvt\.(?:[su]\d+\.[su](?:8|16)|[su](?:8|16)\.[su]32)\s+%rs?\d+, {_REGISTER};")
_WRITTEN = re.compile(rf"[\w.]+\s+({_REGISTER}),")
_NAME = re.compile(r"%rs?\d+")

HALVES = frozenset((0, 1))


def loses_a_constant(ptx: str) -> bool:
    """Whether the assembler would lose the constant of an addition."""
    return any(map(_loses_a_constant, _FUNCTION.split(ptx)))  # each has its own registers


def _loses_a_constant(function: str) -> bool:
    sums = _PACKED_SUM.findall(function)
    if not sums:
        return False
    constants, code = set(_CONSTANT.findall(function)), _Registers(function)
    of_constants = (total for total, *terms in sums if any(one in constants or one[0] != "%" for one in terms))
    return any(code.halves_read(total) != HALVES for total in of_constants)


class _Registers:
    """The readers of a function's registers; each register is written once."""

    def __init__(self, function: str) -> None:
        self._mentions: dict[str, list[str]] = defaultdict(list)
        for line in function.splitlines():
            for name in set(_NAME.findall(line)):
                self._mentions[name].append(line)

    def halves_read(self, register: str) -> frozenset[int]:
        """Which halves of a packed register are read; none if that is uncertain."""
        found: frozenset[int] = frozenset()
        for line in self._readers(register):
            if unpacked := _UNPACKED.search(line):
                found |= {half for half, name in enumerate(unpacked.groups()) if len(self._mentions[name]) > 1}
            elif packed := _PACKED.search(line):
                found |= self.halves_read(packed[1])
            elif masked := _MASKED.search(line):
                found |= self.halves_read(masked[1]) & _halves_of(int(masked[2], 0))
            elif _FIRST_HALF.search(line):
                found |= {0}
            else:
                return frozenset()
        return found

    def _readers(self, register: str) -> Iterator[str]:
        for line in self._mentions[register]:
            written = _WRITTEN.search(line)
            if written is None or written[1] != register:
                yield line


def _halves_of(mask: int) -> frozenset[int]:
    """The halves in which a mask of 32 bits keeps something."""
    return frozenset(half for half in HALVES if mask >> 16 * half & 0xFFFF)
