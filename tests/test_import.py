"""`import stepgraph`: nothing is loaded until a name is used, in every process alike."""

import subprocess
import sys

import pytest

PROGRAMS = {
    "nothing is loaded at first": "import stepgraph, sys; assert 'torch' not in sys.modules",
    "a name loads them all": "import stepgraph as sg; sg.Tensor; assert 'fit' in vars(sg) and callable(sg.fit)",
    "a module before a name": "import stepgraph.fitting.fit, stepgraph as sg; assert callable(sg.fit)",
    "from": "from stepgraph import Graph, fit; assert callable(fit)",
    "star": "from stepgraph import *; assert callable(fit) and Graph",
    "dir": "import stepgraph; assert {'Tensor', 'fit', '__version__'} <= set(dir(stepgraph))",
    "a submodule": "import stepgraph; from stepgraph import mlc; assert mlc.__name__ == 'stepgraph.mlc'",
    "an unknown name": "import stepgraph; assert not hasattr(stepgraph, 'Tensr')",
    "a private name": "import stepgraph, sys; assert not hasattr(stepgraph, '__x__') and 'torch' not in sys.modules",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_names_come_when_they_are_used(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAMS[program]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
