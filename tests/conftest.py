"""What every test shares: few threads, no hidden defects of fused steps, no GPU test where there is no GPU."""

import gc
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator

import pytest
import torch

CACHE = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="stepgraph-tests-")  # kernels chosen here stay here
MANY = 100_000  # objects; a full collection then takes 50 ms
torch.set_num_threads(int(os.environ.get("STEPGRAPH_TEST_THREADS", "1")))


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Leaves out of later garbage collections what has been imported or cached so far, which stays.

    Tests ask for hundreds of full collections; each would look at a million objects that other tests need.
    """
    if len(gc.get_objects(generation=2)) > MANY:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def onednn() -> Iterator[None]:
    """Kept on: where a CPU has no bfloat16, PyTorch's first product of that type switches oneDNN off for the process.

    Later tests would then run other kernels than the memory plan counts.
    """
    was = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.set_flags(was)


@pytest.fixture(autouse=True)
def expansions(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails where a fused step was left to PyTorch because of a defect: it computes the same, only later."""
    yield
    assert not [one.message for one in caplog.get_records("call") if "PyTorch expands its operators" in one.message]


@pytest.fixture
def nothing_fuses() -> None:
    """No step of another test is still being fused, which would use the cache folder and PyTorch's compiler."""
    from stepgraph.compiler import fusion

    for thread in threading.enumerate():
        if thread.name == fusion.THREAD:
            thread.join(120)
            assert not thread.is_alive()


def pytest_sessionfinish() -> None:
    """Plugins that work behind the tests find everything again."""
    gc.unfreeze()


def pytest_unconfigure() -> None:
    """Leaves nothing behind."""
    shutil.rmtree(CACHE, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `gpu` on a machine without a CUDA device."""
    if torch.cuda.is_available():
        return
    reason = pytest.mark.skip(reason="needs a CUDA device, torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(reason)
