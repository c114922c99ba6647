"""CUDA kernels without headers, compiled by NVIDIA's runtime compiler.

PyTorch's own function for this first looks for CUDA's headers, for which it imports setuptools: that takes four times
as long as compiling one of our kernels, which include nothing.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

_turn = threading.Lock()
_made = dict[tuple[str, ...], tuple[bytes, str]]()


def remembered(library: Any, source: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """What `compiled` returns, compiled once; a thread that needs what another one is compiling waits for it."""
    wanted = (source, name, *options)
    with _turn:
        if wanted not in _made:
            _made[wanted] = compiled(library, source, name, options)
        return _made[wanted]


def compiled(library: Any, source: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """The assembled code of a source, and the name that a kernel has in it.

    Args:
        library: the runtime compiler.
        source: what to compile.
        name: the kernel, as the source names it.
        options: what a command line would pass to the compiler.
    """
    program = ctypes.c_void_p()
    _require(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        _require(library, library.nvrtcAddNameExpression(program, name.encode()))
        given = [one.encode() for one in options]
        status = library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        if status:
            log = _read(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise RuntimeError(f"a kernel does not compile: {log}")
        code, lowered = _read(library, program, "CUBIN"), ctypes.c_char_p()
        _require(library, library.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered)))
        return code, (lowered.value or b"").decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: Any, program: ctypes.c_void_p, what: str) -> bytes:
    """What the compiler has made."""
    size = ctypes.c_size_t()
    _require(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    found = ctypes.create_string_buffer(size.value)
    _require(library, getattr(library, f"nvrtcGet{what}")(program, found))
    return found.raw


def _require(library: Any, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"CUDA's runtime compiler failed: {library.nvrtcGetErrorString(status).decode()}")
