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
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler import fusion, outline
from stepgraph.compiler.program import set_fake
from stepgraph.system import torch_private

PROGRAM = Path(__file__).parent / "fused_runs.py"
CORRUPT = b"\0 neither a library nor a program"


def run(cache: Path, width: int = 8) -> dict[str, Any]:
    """One process that fuses and trains."""
    given = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(cache / "home")}
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
    assert (first["started"], second["started"], wider["started"]) == (1, 0, 1)
    assert second["losses"] == first["losses"]
    assert first["direct"] and second["direct"]
    assert wider["hit"] == 0  # another step


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
@pytest.mark.parametrize("damaged", ["fxgraph/**/*", "home/**/*", "**/*"])
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
        return outline.fingerprint(graph)

    found = [fingerprint((2, 3), (3, 1)), fingerprint((3, 2), (3, 1)), fingerprint((2, 3), (1, 2))]
    assert fingerprint((2, 3), (3, 1)) == found[0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    found.append(fingerprint((2, 3), (3, 1)))
    monkeypatch.setattr(outline, "source", lambda: "another version")
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


class Kernel:
    """A kernel of generated code with some block sizes, as the compiler keeps it; texts stand for their code.

    Args:
        folder: where Triton keeps the code.
        texts: the code of each block size.
        launched: those that fit on the GPU.
        further: the code of other block sizes, by width and number of warps.
    """

    def __init__(
        self,
        folder: Path,
        *texts: str,
        launched: slice = slice(None),
        further: dict[tuple[int, int], str] | None = None,
    ) -> None:
        self.triton_meta = {"device": 0}
        self.fn = SimpleNamespace(fn=None)
        self._folder, self._further = folder, further or {}
        blocks = SimpleNamespace(kwargs={"XBLOCK": 8}, num_warps=2)
        self.compile_results = [self._variant(text, blocks) for text in texts]
        self._make_launchers()
        self.launchers = self.launchers[launched]

    def _variant(self, text: str, config: Any) -> SimpleNamespace:
        (self._folder / key_of(text)).mkdir()
        (self._folder / key_of(text) / "kernel.ptx").write_text(text)
        return SimpleNamespace(kernel=SimpleNamespace(hash=hashed(text)), config=config, text=text)

    def _reload_kernel(self) -> SimpleNamespace:
        return SimpleNamespace(fn=SimpleNamespace(fn="loaded"))

    def _precompile_config(self, config: Any) -> SimpleNamespace:
        assert self.fn.fn == "loaded"
        shape = config.kwargs["XBLOCK"], config.num_warps
        return self._variant(self._further.get(shape, f"wrong {shape}"), config)

    def _make_launchers(self) -> None:
        self.launchers = [SimpleNamespace(cache_hash=key_of(one.text)) for one in self.compile_results]


def is_wrong(folder: Path) -> bool:
    return "wrong" in (folder / "kernel.ptx").read_text()


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a compiled graph of kernels."""
    from torch._inductor.codecache import PyCodeCache

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def make(**kernels: Kernel) -> Any:
        monkeypatch.setattr(PyCodeCache, "modules", [SimpleNamespace(key="code", other=5, **kernels)])
        return SimpleNamespace(cache_key="code", _fx_graph_cache_key=None)

    return make


def test_only_the_wrong_block_sizes_of_a_kernel_are_dropped(tmp_path: Path, generated: Callable[..., Any]) -> None:
    mixed, right = Kernel(tmp_path, "wrong 1", "right 1", "wrong 2", "right 2"), Kernel(tmp_path, "right 3", "right 4")
    expected = mixed.compile_results[1::2], mixed.launchers[1::2]
    graph = generated(mixed=mixed, right=right)
    assert torch_private.drop_variants(graph, is_wrong) == []
    assert (mixed.compile_results, mixed.launchers) == expected
    assert len(right.compile_results) == len(right.launchers) == 2
    fusion._require_right([graph])


@pytest.mark.parametrize("shape", [(8, 4), (8, 1), (4, 2), (1, 2)])
def test_a_kernel_without_a_right_block_size_gets_another(
    tmp_path: Path, generated: Callable[..., Any], shape: tuple[int, int]
) -> None:
    one = Kernel(tmp_path, "wrong 1", "wrong 2", further={shape: "right"})
    assert torch_private.drop_variants(generated(one=one), is_wrong) == []
    assert [variant.text for variant in one.compile_results] == ["right"]
    assert [launcher.cache_hash for launcher in one.launchers] == [key_of("right")]


def test_a_kernel_whose_right_block_size_does_not_fit_gets_another(
    tmp_path: Path, generated: Callable[..., Any]
) -> None:
    one = Kernel(tmp_path, "right 5", "wrong 5", launched=slice(1, None), further={(2, 2): "right 6"})
    assert torch_private.drop_variants(generated(one=one), is_wrong) == []
    assert [variant.text for variant in one.compile_results] == ["right 6"]


def test_a_kernel_that_is_never_right_is_named(tmp_path: Path, generated: Callable[..., Any]) -> None:
    wrong = Kernel(tmp_path, "wrong 1", "wrong 2")
    graph = generated(triton_a=Kernel(tmp_path, "right"), triton_b=wrong)
    assert torch_private.drop_variants(graph, is_wrong) == ["triton_b"]
    assert len(wrong.compile_results) == len(wrong.launchers) == 2


def test_a_step_with_a_kernel_that_cannot_be_right_stays_unfused(tmp_path: Path, generated: Callable[..., Any]) -> None:
    # Without its assembled code, a kernel that may be wrong is.
    add = "add.s16x2 \t%r4, %r2, {};".format
    shapes = (8, 4), (8, 1), (4, 2), (2, 2), (1, 2)
    further = {shape: add(1 + index) for index, shape in enumerate(shapes)}
    graph = generated(triton_a=Kernel(tmp_path, add(20), further=further))
    with pytest.raises(fusion.Miscompiled, match="triton_a"):
        fusion._require_right([graph])


@pytest.mark.gpu
def test_a_kernel_runs_in_block_sizes_that_the_compiler_did_not_choose() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x * 3 + 1).sum(1), torch.sin(x) * 0.37]

    x, compiled = torch.rand(500, 700, device="cuda"), list[Any]()
    compiler = torch_private.inductor()

    def compile_inner(*arguments: Any, **settings: Any) -> Any:
        compiled.append(compiler.compile_kernels(*arguments, **settings))
        return compiled[-1]

    with torch.no_grad():
        run = compiler.compile_graph(make_fx(function)(x), [x], compile_inner)
    tried: set[str] = set()
    assert torch_private.drop_variants(compiled[0], lambda folder: tried.add(folder.name) is not None) == []
    assert tried
    assert torch_private.drop_variants(compiled[0], lambda folder: folder.name in tried) == []
    for found, expected in zip(run(x), function(x), strict=True):
        torch.testing.assert_close(found, expected)
