"""Kernels are compiled by CUDA's runtime compiler; a stand-in answers like it where there is none."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stepgraph.system import nvrtc
from stepgraph.system.torch_private import compile_cuda

CODE, LOG = b"code\0with zeros\0", b"kernel.cu(1): error: expected a declaration\0"


class Library:
    """Answers like NVIDIA's library; sources with `wrong` in them do not compile."""

    def __init__(self) -> None:
        self.source, self.options, self.alive = b"", list[bytes](), 0

        def error_string(status: int) -> bytes:
            return f"NVRTC_ERROR_{status}".encode()

        self.nvrtcGetErrorString = error_string

    def nvrtcCreateProgram(self, program: Any, source: bytes, *_: Any) -> int:
        self.source, self.alive = source, self.alive + 1
        return 2 if b"unreadable" in source else 0

    def nvrtcAddNameExpression(self, program: Any, name: bytes) -> int:
        return 0 if name in self.source else 9

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:
        self.options = [options[i] for i in range(count)]
        return 6 if b"wrong" in self.source else 0

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(CODE)
        return 0

    def nvrtcGetCUBIN(self, program: Any, found: Any) -> int:
        found[:] = CODE
        return 0

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(LOG)
        return 0

    def nvrtcGetProgramLog(self, program: Any, found: Any) -> int:
        found[:] = LOG
        return 0

    def nvrtcGetLoweredName(self, program: Any, name: bytes, found: Any) -> int:
        found._obj.value = b"_Z" + name
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        self.alive -= 1
        return 0


def test_code_and_name_are_returned() -> None:
    library = Library()
    assert nvrtc.compiled(library, "void update()", "update", ["--fmad=false"]) == (CODE, "_Zupdate")
    assert library.options == [b"--fmad=false"] and library.alive == 0


def test_a_source_is_compiled_once_whoever_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[Any, ...]]()
    begun, may_end = threading.Event(), threading.Event()

    def compiled(*given: Any) -> tuple[bytes, str]:
        asked.append(given[1:])
        begun.set()
        assert may_end.wait(60)
        return CODE, "_Zupdate"

    monkeypatch.setattr(nvrtc, "_made", {})
    monkeypatch.setattr(nvrtc, "compiled", compiled)
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(nvrtc.remembered, None, "void update()", "update", ["-G"]) for _ in range(2)]
        assert begun.wait(60)
        may_end.set()
        assert [one.result(60) for one in found] == [(CODE, "_Zupdate")] * 2
    nvrtc.remembered(None, "void update()", "update", [])
    assert asked == [("void update()", "update", ["-G"]), ("void update()", "update", [])]


def test_what_is_wrong_is_said() -> None:
    library = Library()
    with pytest.raises(RuntimeError, match=r"does not compile: kernel.cu\(1\): error: expected a declaration$"):
        nvrtc.compiled(library, "wrong update", "update", [])
    with pytest.raises(RuntimeError, match="NVRTC_ERROR_9"):
        nvrtc.compiled(library, "void other()", "update", [])
    assert library.alive == 0
    with pytest.raises(RuntimeError, match="NVRTC_ERROR_2"):
        nvrtc.compiled(library, "unreadable", "update", [])


PROGRAM = """
import sys
import torch
from stepgraph.system.torch_private import compile_cuda
source = 'extern "C" __global__ void twice(float* x, int n) { int i = threadIdx.x; if (i < n) x[i] = 2 * x[i]; }'
x = torch.arange(5.0, device="cuda")
compile_cuda(source, "twice", ["--fmad=false"])(grid=(1, 1, 1), block=(32, 1, 1), args=[x, 5])
assert x.tolist() == [0, 2, 4, 6, 8]
assert "setuptools" not in sys.modules and "torch.utils.cpp_extension" not in sys.modules
"""


@pytest.mark.gpu
def test_a_kernel_runs_and_nobody_looks_for_headers() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
    with pytest.raises(RuntimeError, match="does not compile"):
        compile_cuda("wrong", "wrong")
