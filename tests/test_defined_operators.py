"""Operators exist wherever fused code can call them, also if an earlier process compiled it."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stepgraph.compiler
from stepgraph.compiler import triton_launch

ROOT = Path(stepgraph.__file__).parent
ELSEWHERE = {"stepgraph.interop.onnx_recurrent"}  # only in graphs that become files
DEFINES = {"custom_op", "define", "Library"}  # of `torch.library`

LAZY = """
def replace_tanh(graph):
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
        node.target = late_tanh

def late_tanh(x):
    from stepgraph.compiler.late_kernels import tanh_of_late_kernels
    return tanh_of_late_kernels(x)
"""
KERNELS = """
from stepgraph.compiler.triton_launch import operator

@operator
def tanh_of_late_kernels(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)
"""
PROGRAM = """
import json, logging, sys, torch
import stepgraph.compiler
stepgraph.compiler.__path__.append(sys.argv[1])
import stepgraph as sg
from stepgraph.compiler import fusion, late, triton_launch, pipeline

torch.set_num_threads(1)
triton_launch.run_on = lambda *_: True
late_row = pipeline.Pass("late", pipeline.FUSED, pipeline._graph(late.replace_tanh), lambda step, part: True)
pipeline.TABLE = (*pipeline.TABLE, late_row)
compile_kernels, started = fusion._compiled, []
fusion._compiled = lambda *given: (started.append(given), compile_kernels(*given))[1]
messages = []
logging.getLogger("stepgraph").addFilter(lambda record: messages.append(record.getMessage()) or True)
sg.set_seed(3)
x, y, graph = sg.Tensor((2, 6)), sg.Tensor((2, 5)), sg.Graph()
graph.node(sg.ActivationLayer.tanh(), graph.node(sg.FullyConnectedLayer.create(6, 5), x))
training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
training.add_inputs({"x": x}, {"y": y})
stepgraph.compiler.__path__ = [sys.argv[1]]  # other kernels need Triton
training.compile("cpu", fuse=True)
losses = [training.execute({"x": torch.ones(2, 6)}, {"y": torch.ones(2, 5)}).loss for _ in range(3)]
(executable,) = training.compilation.programs.executables.values()
found = {"losses": losses, "started": len(started), "messages": messages}
print(json.dumps({**found, "fused": executable.is_fused, "planned": executable.fused_plan is not None}))
"""


def ran(folder: Path) -> dict[str, Any]:
    """What a new process says that fuses a step with an operator of a module that only a pass imports."""
    given = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "kernels"), "XDG_CACHE_HOME": str(folder / "home")}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, check=False, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
def test_code_of_an_earlier_process_finds_operators_that_only_passes_import(tmp_path: Path) -> None:
    for name, text in (("late", LAZY), ("late_kernels", KERNELS)):
        (tmp_path / f"{name}.py").write_text(f"import torch\n{text}")
    first, second = ran(tmp_path), ran(tmp_path)
    assert (first["started"], second["started"]) == (1, 0)
    assert first["fused"] and second["fused"] and second["planned"] and second["messages"] == []
    assert second["losses"] == first["losses"]


def test_kernels_are_imported_only_where_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "stepgraph.compiler.kernels_of_a_test.more_kernels"
    folder = tmp_path / "kernels_of_a_test"
    folder.mkdir()
    for file in ("__init__.py", "more_kernels.py", "more.py"):
        (folder / file).touch()
    monkeypatch.setattr(stepgraph.compiler, "__path__", [str(tmp_path)])
    triton_launch.define_operators(torch.device("cpu"))
    assert name not in sys.modules
    monkeypatch.setattr(triton_launch, "run_on", lambda device: True)
    monkeypatch.setattr(triton_launch, "_import_kernels", triton_launch._import_kernels.__wrapped__)  # not only once
    triton_launch.define_operators(torch.device("cpu"))
    assert sys.modules.pop(name) and name.removesuffix("_kernels") not in sys.modules
    del sys.modules[name.rpartition(".")[0]]


def defines_operators(file: Path) -> bool:
    """Whether a module calls what defines operators, directly or as `triton_launch.operator`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in DEFINES and ast.unparse(node.value) == "torch.library":
            return True
        names = (
            node.names if isinstance(node, ast.ImportFrom) and node.module == "stepgraph.compiler.triton_launch" else []
        )
        if any(one.name == "operator" for one in names):
            return True
    return False


def test_operators_are_defined_by_modules_that_are_imported_where_code_is_fused() -> None:
    """With what fuses, or as kernels in Triton's language, which `define_operators` imports."""
    program = "import sys, stepgraph.compiler.fusion; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    imported = set(done.stdout.split())
    files = {
        ".".join(("stepgraph", *file.relative_to(ROOT).with_suffix("").parts)): file for file in ROOT.rglob("*.py")
    }
    defining = {name for name, file in files.items() if defines_operators(file)} - {"stepgraph.compiler.triton_launch"}
    assert len(defining) > 15
    late = defining - imported - ELSEWHERE
    assert late and all(name.startswith("stepgraph.compiler.") and name.endswith("_kernels") for name in late)
