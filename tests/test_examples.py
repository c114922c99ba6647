"""The examples run as a user would run them, and reach what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_reaches_its_target(example: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr or done.stdout
    assert "test accuracy" in done.stdout and "Memory plan" in done.stdout
