"""What PyTorch's compiler made for a fused step is there for the next run, and only for the same step."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from stepgraph.compiler import fusion
from stepgraph.compiler.program import set_fake
from stepgraph.system import torch_private

PROGRAM = Path(__file__).parent / "fused_runs.py"
CORRUPT = b"\0 neither a library nor a program"


def run(cache: Path, width: int = 8) -> dict[str, Any]:
    """One process that fuses and trains."""
    given = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, PROGRAM, str(width)]
    done = subprocess.run(command, check=False, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
def test_a_second_run_takes_what_the_first_compiled(tmp_path: Path) -> None:
    first, second, wider = run(tmp_path), run(tmp_path), run(tmp_path, width=9)
    assert (first["hit"], first["miss"], first["bypass"]) == (0, 1, 0)
    assert (second["hit"], second["miss"], second["bypass"]) == (1, 0, 0)
    assert second["losses"] == first["losses"]
    assert first["direct"] and second["direct"]
    assert wider["hit"] == 0  # another step


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
@pytest.mark.parametrize("damaged", ["fxgraph/**/*", "**/*"])
def test_a_damaged_cache_is_replaced(tmp_path: Path, damaged: str) -> None:
    first = run(tmp_path)
    for file in list(tmp_path.glob(damaged)):
        if file.is_file():
            file.write_bytes(CORRUPT)
    assert run(tmp_path)["losses"] == first["losses"]
    assert run(tmp_path)["losses"] == first["losses"]


def test_the_results_of_operators_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's cache compares operators, not what they return: a custom operator may have changed."""

    def fingerprint(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
        graph = fx.Graph()
        with torch_private.FakeTensorMode():
            set_fake(graph.placeholder("x"), torch.empty_strided(shape, stride))
        return fusion._fingerprint(graph)

    found = [fingerprint((2, 3), (3, 1)), fingerprint((3, 2), (3, 1)), fingerprint((2, 3), (1, 2))]
    assert fingerprint((2, 3), (3, 1)) == found[0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    found.append(fingerprint((2, 3), (3, 1)))
    monkeypatch.setattr(fusion, "_source", lambda: "another version")
    found.append(fingerprint((2, 3), (3, 1)))
    assert len(set(found)) == len(found)


def test_arrays_are_as_they_were_after_fusing() -> None:
    with torch_private.FakeTensorMode() as mode:
        array = torch.empty(2)
    with torch_private.kept_between_runs([array]):
        assert mode.shape_env is not None
    assert mode.shape_env is None
    with torch_private.kept_between_runs([]):
        pass


def test_a_miscompiled_step_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    folders = [tmp_path / "fxgraph" / key[1:3] / key for key in ("fabc", "fdef")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "entry").write_text("compiled")
    torch_private.drop(SimpleNamespace(cache_key="", _fx_graph_cache_key="fabc"))  # type: ignore[arg-type]
    torch_private.drop(SimpleNamespace(cache_key="", _fx_graph_cache_key=None))  # type: ignore[arg-type]
    torch_private.drop(len)  # type: ignore[arg-type]
    assert [folder.exists() for folder in folders] == [False, True]


# Block sizes that NVIDIA's assembler gets wrong


def key_of(text: str) -> str:
    """The folder in which Triton keeps a kernel."""
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    return triton_hash_to_path_key(hashed(text))


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def kernel(folder: Path, *texts: str, launched: slice = slice(None)) -> SimpleNamespace:
    """A kernel of generated code with a block size for each text, which stands for its code."""
    for text in texts:
        (folder / key_of(text)).mkdir()
        (folder / key_of(text) / "kernel.ptx").write_text(text)
    results = [SimpleNamespace(kernel=SimpleNamespace(hash=hashed(text))) for text in texts]
    launchers = [SimpleNamespace(cache_hash=key_of(text)) for text in texts][launched]
    return SimpleNamespace(triton_meta={"device": 0}, compile_results=results, launchers=launchers)


def is_wrong(folder: Path) -> bool:
    return "wrong" in (folder / "kernel.ptx").read_text()


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a compiled graph of kernels."""
    from torch._inductor.codecache import PyCodeCache

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def make(**kernels: SimpleNamespace) -> Any:
        monkeypatch.setattr(PyCodeCache, "modules", [SimpleNamespace(key="code", other=5, **kernels)])
        return SimpleNamespace(cache_key="code", _fx_graph_cache_key=None)

    return make


def test_only_the_wrong_block_sizes_of_a_kernel_are_dropped(tmp_path: Path, generated: Callable[..., Any]) -> None:
    mixed, right = kernel(tmp_path, "wrong 1", "right 1", "wrong 2", "right 2"), kernel(tmp_path, "right 3", "right 4")
    expected = mixed.compile_results[1::2], mixed.launchers[1::2]
    graph = generated(mixed=mixed, right=right)
    assert torch_private.drop_variants(graph, is_wrong) == []
    assert (mixed.compile_results, mixed.launchers) == expected
    assert len(right.compile_results) == len(right.launchers) == 2
    fusion._require_right([graph])


def test_a_kernel_without_a_right_block_size_is_named(tmp_path: Path, generated: Callable[..., Any]) -> None:
    wrong = kernel(tmp_path, "wrong 1", "wrong 2")
    graph = generated(triton_a=kernel(tmp_path, "right"), triton_b=wrong)
    assert torch_private.drop_variants(graph, is_wrong) == ["triton_b"]
    assert len(wrong.compile_results) == len(wrong.launchers) == 2
    # The right one needs more memory than the GPU has, so that it has no launcher.
    graph = generated(triton_c=kernel(tmp_path, "right 5", "wrong 5", launched=slice(1, None)))
    assert torch_private.drop_variants(graph, is_wrong) == ["triton_c"]


def test_a_step_with_a_kernel_that_cannot_be_right_stays_unfused(tmp_path: Path, generated: Callable[..., Any]) -> None:
    # Without its assembled code, a kernel that may be wrong is.
    graph = generated(triton_a=kernel(tmp_path, "add.s16x2 \t%r4, %r2, 20;"))
    with pytest.raises(fusion.Miscompiled, match="triton_a"):
        fusion._require_right([graph])
