"""What sums over rows need in addition on a GPU: the plan counts it."""

from types import SimpleNamespace

import pytest
import torch

from stepgraph.compiler.kernels import row_sums


def asked(rows: int, columns: int, axes: list[int], kind: torch.dtype = torch.bfloat16, device: str = "cuda") -> int:
    array = SimpleNamespace(
        shape=(rows, columns),
        ndim=2,
        device=torch.device(device),
        is_contiguous=lambda: True,
        element_size=lambda: kind.itemsize,
    )
    return row_sums.workspace([array, axes], 0)


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)


def test_biases_of_many_classes_take_a_quarter_of_their_gradient() -> None:
    assert asked(32768, 32768, [0]) == 32768 * 32768 * 2 // 4


def test_arrays_that_one_kernel_cannot_reach_are_added_up_in_parts() -> None:
    assert asked(32768, 32768, [0], torch.float32) == asked(16384, 32768, [0], torch.float32) > 0
    assert asked(65536 * 4, 32768, [0]) == asked(32768, 32768, [0])


def test_little_work_is_not_divided() -> None:
    assert asked(64, 512, [0]) == 0
    assert asked(512, 1 << 20, [0]) == 0  # enough blocks without that


@pytest.mark.parametrize(("axes", "device"), [([1], "cuda"), ([0, 1], "cuda"), ([], "cuda"), ([0], "cpu")])
def test_other_sums_take_nothing(axes: list[int], device: str) -> None:
    assert asked(32768, 32768, axes, device=device) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns"), [(32768, 32768), (100_000, 16384), (65536, 3072), (4096, 777), (1000, 6), (64, 512)]
)
def test_pytorch_takes_as_much(rows: int, columns: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    array = torch.ones(rows, columns, dtype=kind, device="cuda")
    array.sum(0)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    array.sum(0)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken == pytest.approx(row_sums.workspace([array, [0]], 0), rel=0.05, abs=1 << 20)
