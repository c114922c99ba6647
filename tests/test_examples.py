"""The examples run as a user would run them, reach what they promise, and stay short."""

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
DIGITS = FOLDER / "03_digits_cnn.py"


def quick(example: Path) -> Any:
    """An example of the ordinary suite; the deep checks run those whose features other tests of it have."""
    alike = example.stem[:2] not in ("01", "03")
    return pytest.param(example, id=example.stem, marks=[pytest.mark.deep] if alike else [])


def run(example: Path, *arguments: str, folder: Path) -> str:
    """What the example prints; it writes into `folder`, if anything."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONWARNINGS": "error"}
    command = [sys.executable, str(example), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


@pytest.mark.parametrize("example", [quick(path) for path in EXAMPLES])
def test_example_reaches_its_quick_target(example: Path, tmp_path: Path) -> None:
    assert re.search(METRICS.get(example.stem, "test accuracy"), run(example, "--quick", folder=tmp_path))
    pictures = list(tmp_path.iterdir())
    assert len(pictures) == (example.stem == "10_image_fitting")  # nothing else leaves a file behind
    for path in pictures:
        with Image.open(path) as picture:
            assert picture.size == (160, 53) and len(picture.convert("RGB").getcolors(10**6)) > 1000


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_reaches_its_target(example: Path, tmp_path: Path) -> None:
    assert re.search(METRICS.get(example.stem, "test accuracy"), run(example, folder=tmp_path))


METRICS = {  # what they print beside an accuracy
    "01_linear_regression": "variance explained",
    "04_character_model": "bits per character",
    "05_sequence_lstm": "mean squared error",
    "06_phases_with_scipy": "by the adjoint",
    "08_linked_graphs": "missed by",
    "10_image_fitting": "PSNR",
    "14_gan": "recognized as what was asked for",
    "16_small_llama": "bits per character",
    "19_fine_tune_transformers": "bits per character",
    "20_parallel": "of the test digits",
}


def test_examples_are_numbered_and_short() -> None:
    assert [path.stem[:3] for path in EXAMPLES] == [f"{number:02}_" for number in range(1, len(EXAMPLES) + 1)]
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES}
    assert {name: count for name, count in lines.items() if count > 100} == {}


def test_the_table_lists_every_example() -> None:
    table = (FOLDER / "README.md").read_text()
    assert re.findall(r"^\| \[`(\w+)`\]\((\w+)\.py\)", table, re.MULTILINE) == [(path.stem,) * 2 for path in EXAMPLES]
    for path in EXAMPLES:  # and every one says how to run it
        assert f"python examples/{path.name} [--quick]" in path.read_text()


# One run's accuracy counts in steps of 0.28 points (360 test digits) and moves by more than that between seeds, so
# single runs cannot show that two types differ by less than half a point. Means over the same seeds can.
SEEDS = range(5)


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_mixed_precision_recognizes_as_many_digits(kind: str, tmp_path: Path) -> None:
    def mean_accuracy(*arguments: str) -> float:
        printed = [run(DIGITS, "--seed", str(seed), *arguments, folder=tmp_path) for seed in SEEDS]
        return statistics.mean(float(*re.findall(r"test accuracy ([\d.]+)%", text)) for text in printed)

    plain, mixed = mean_accuracy(), mean_accuracy("--compute-type", kind)
    print(f"mean test accuracy {plain:.2f}% in float32, {mixed:.2f}% in {kind}")
    assert plain >= 98
    assert mixed >= plain - 0.5


@pytest.mark.deep
def test_several_processes_learn_the_numbers_of_one(tmp_path: Path) -> None:
    example = FOLDER / "20_parallel.py"
    alone = run(example, "--quick", folder=tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(example)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "--quick"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert alone.splitlines()[-1].replace("ranks: 1", "ranks: 2") == done.stdout.splitlines()[-1]
