"""Random graphs of images, where layouts in memory differ most: on CUDA they train as on the CPU, in full float32.

STEPGRAPH_FUZZ_SEED=154 STEPGRAPH_FUZZ_COUNT=1 pytest -m gpu tests/fuzz/test_fuzz_gpu.py     one seed
STEPGRAPH_FUZZ_FUSED=300 pytest -m gpu -n 8 tests/fuzz/test_fuzz_gpu.py -k fused            fuses all of them
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import stepgraph as sg
from tests.fuzz.build import Built
from tests.fuzz.case import Case, named
from tests.fuzz.generate import generate
from tests.fuzz.shrink import program

pytestmark = pytest.mark.gpu
Options = sg.GraphCompilationOptions
SEED = int(os.environ.get("STEPGRAPH_FUZZ_SEED", "0"))
COUNT = int(os.environ.get("STEPGRAPH_FUZZ_COUNT", "300"))
GROUP = 25  # graphs of one test
FUSED_GROUP = 5  # of one test that fuses them, which takes seconds each
FUSED = int(os.environ.get("STEPGRAPH_FUZZ_FUSED", "40"))


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """No TF32, which would round to ten bits."""
    was = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = was


def on_gpu(case: Case, options: Options) -> None:
    """The first step on CUDA, whole and in phases, is that of the CPU up to rounding."""
    device = sg.Device.gpu()
    assert device is not None
    wanted, start = case.straight[0], case.start
    assert start
    case.restart().phases(0)
    values = case.first.values()
    for way in ("whole", "phases"):
        built = Built(case.recipe, options, device=device)
        losses = built.whole(0) if way == "whole" else built.phases(0)
        case.near_one_step(f"CUDA, {way}", values, named(losses) | built.snapshot(), wanted)


def failures(seeds: range, options: Options) -> list[str]:
    """What goes wrong in which seed, each with a program that makes the graph."""
    found = []
    for seed in seeds:
        recipe = generate(seed, images=True)
        with Case(recipe) as case:
            try:
                on_gpu(case, options)
            except Exception as error:  # all of them are wanted, not the first
                text = f"seed {seed}: {type(error).__name__}: {error}"
                found.append(f"{text}\n{program('deterministic', recipe)}")
    return found


def groups(count: int, size: int) -> list[range]:
    """So many seeds, in groups for one test each."""
    return [range(first, min(first + size, SEED + count)) for first in range(SEED, SEED + count, size)]


@pytest.mark.parametrize("seeds", groups(COUNT, GROUP), ids=str)
def test_graphs_of_images_train_like_on_the_cpu(seeds: range) -> None:
    found = failures(seeds, Options.DISABLE_LAYER_FUSION)
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("seeds", groups(min(FUSED, COUNT), FUSED_GROUP), ids=str)
def test_fused_graphs_of_images_train_like_on_the_cpu(seeds: range) -> None:
    found = failures(seeds, Options.FUSE_LAYERS)
    assert not found, "\n\n".join(found)
