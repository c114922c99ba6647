"""The examples run as a user would run them, and reach what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DIGITS = Path(__file__).parent.parent / "examples" / "digits_cnn.py"
EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_reaches_its_target(example: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr or done.stdout
    assert "test accuracy" in done.stdout and "Memory plan" in done.stdout


def accuracy(*arguments: str) -> float:
    done = subprocess.run([sys.executable, DIGITS, "0", *arguments], capture_output=True, text=True, check=False)
    (found,) = re.findall(r"test accuracy ([\d.]+)%", done.stdout)
    return float(found)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_mixed_precision_recognizes_as_many_digits(kind: str) -> None:
    assert accuracy(kind) >= accuracy() - 0.5
