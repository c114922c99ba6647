"""`import stepgraph`: nothing is loaded until a name is used, in every process alike."""

import subprocess
import sys

import pytest

WITHOUT_TORCH = {
    "nothing is loaded at first": "import stepgraph, sys; assert 'torch' not in sys.modules",
    "a private name": "import stepgraph, sys; assert not hasattr(stepgraph, '__x__') and 'torch' not in sys.modules",
}
WITH_TORCH = {
    "a name loads them all": "import stepgraph as sg; sg.Tensor; assert 'fit' in vars(sg) and callable(sg.fit)",
    "a module before a name": "import stepgraph.fitting.fit, stepgraph as sg; assert callable(sg.fit)",
    "from": "from stepgraph import Graph, fit; assert callable(fit)",
    "star": "from stepgraph import *; assert callable(fit) and Graph",
    "dir": "import stepgraph; assert {'Tensor', 'fit', '__version__'} <= set(dir(stepgraph))",
    "a submodule": "import stepgraph; from stepgraph import mlc; assert mlc.__name__ == 'stepgraph.mlc'",
    "errors by their module": "import stepgraph as sg; assert issubclass(sg.errors.ShapeError, sg.StepgraphError)",
    "types for annotations": "import stepgraph as sg; assert issubclass(sg.RankPlan, sg.MemoryPlan) and sg.World",
    "an unknown name": "import stepgraph; assert not hasattr(stepgraph, 'Tensr') and not hasattr(stepgraph, 'x.y')",
}
# PyTorch takes seconds to import: one process does, and forks for each program.
FORKING = """
import os, sys, torch
assert not any(name.split(".")[0] == "stepgraph" for name in sys.modules)
failed = []
for name, program in PROGRAMS.items():
    child = os.fork()
    if not child:
        status = 1
        try:
            exec(program, {})
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(", ".join(failed) or 0)
"""


@pytest.mark.parametrize("program", WITHOUT_TORCH)
def test_names_come_when_they_are_used(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH[program]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_that_need_torch_come_when_they_are_used() -> None:
    program = f"PROGRAMS = {WITH_TORCH!r}{FORKING}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
