"""A fast step trains the same: 20 losses in a row are those of PyTorch's own kernels."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.curves import curve, difference, measure
from benchmarks.in_stepgraph import Reference, Stepgraph
from benchmarks.models import FURTHER, MODELS, SMALL, Model
from benchmarks.peers import set_tf32

TOLERANCE = 1e-4
# What float32 leaves open where losses fall to a tenth: PyTorch's own loop is that far from the losses in float64, and
# two results in float32 can be as far as both of them together (`python -m benchmarks.curves`).
ROUNDED = {"resnet18": 2e-4}
# In the small network one activation comes so close to 0 that rounding decides whether ReLU lets its gradient through.
# With random choices of kernels, 70 curves were at most 4e-6 from the reference or between 1.2e-4 and 1.4e-4.
ROUNDED_SMALL = {"resnet18": 2e-4}
ROUNDED_TO_TF32 = 2**-11  # half of the last bit that TF32 keeps: each product's operands are that uncertain


def distance(model: Model, device: str) -> float:
    """How far our losses are from the reference's."""
    ours, reference = (curve(made(model, device, dropout=False)) for made in (Stepgraph, Reference))
    return difference(ours, reference)


SLOW = {"resnet18", *FURTHER}  # in the deep checks


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.deep] if one in SLOW else []) for one in SMALL])
def test_a_small_model_learns_as_its_reference(name: str) -> None:
    assert distance(SMALL[name], "cpu") <= ROUNDED_SMALL.get(name, TOLERANCE)


@pytest.mark.deep
@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_as_its_reference(name: str) -> None:
    assert distance(MODELS[name], "cpu") <= ROUNDED.get(name, TOLERANCE)


@pytest.fixture(params=[False, True], ids=["float32", "tf32"])
def tf32(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    set_tf32(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_learns_as_its_reference(name: str, tf32: bool) -> None:
    assert distance(MODELS[name].on("cuda"), "cuda") <= (ROUNDED_TO_TF32 if tf32 else TOLERANCE)


def test_a_curve_is_compared_with_float64() -> None:
    found = measure(SMALL["cnn"], ["stepgraph", "pytorch", "channels_last"], "cpu")
    assert set(found["to_float64"]) == {"stepgraph", "pytorch", "channels_last", "reference"}
    assert all(0 < one < TOLERANCE for one in found["to_float64"].values())
    exact = found["losses"]["float64"]
    assert len(exact) == 20 and exact[-1] < exact[0]
    assert difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
