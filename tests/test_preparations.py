"""What PyTorch's compiler prepares for a fused step: what it needs, once; for others, everything."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.fx_passes import joint_graph, serialized_patterns
from torch._inductor.pattern_matcher import PatternExpr
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler import fusion
from stepgraph.compiler.expansion import expand
from stepgraph.compiler.program import fake
from stepgraph.system import torch_private


def compiled(function: Callable[..., Any], shape: tuple[int, ...], see: Callable[[], Any]) -> None:
    """Compiles a function up to its kernels, then calls another one."""
    with torch_private.FakeTensorMode() as mode:
        graph = make_fx(function)(mode.from_tensor(torch.empty(shape))).graph
    arrays = [fake(node) for node in graph.find_nodes(op="placeholder")]

    def inner(*_: Any, **__: Any) -> Any:
        see()
        raise InterruptedError  # nothing need be compiled

    with torch.no_grad(), pytest.raises(InterruptedError), torch_private.compiling(arrays, fusion.SETTINGS):
        torch_private.compile_expanded(expand(graph, arrays), arrays, inner)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The patterns that are prepared for the CPU from now on, by their function."""
    found: list[str] = []
    for module, name in PREPARED.items():
        patterns = importlib.import_module(f"torch._inductor.fx_passes.{module}")
        monkeypatch.setattr(patterns, name, lambda *_, name=name: found.append(name))
    joint_graph.lazy_init.cache_clear()
    torch_private._patterns_without_attention.cache_clear()
    yield found
    joint_graph.lazy_init.cache_clear()
    torch_private._patterns_without_attention.cache_clear()


PREPARED = {"pad_mm": "_pad_mm_init", "fuse_attention": "_sfdp_init", "misc_patterns": "_misc_patterns_init"}


def test_attention_is_prepared_only_for_batches_of_products(prepared: list[str]) -> None:
    compiled(lambda x: (x @ x,), (3, 3), lambda: None)
    assert prepared == ["_pad_mm_init", "_misc_patterns_init"]
    prepared.clear()
    compiled(lambda x: (x @ x,), (2, 3, 3), lambda: None)
    assert prepared == list(PREPARED.values())


def test_other_threads_prepare_everything_meanwhile(prepared: list[str]) -> None:
    def see() -> None:
        prepared.clear()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(joint_graph.lazy_init, None).result()
        assert prepared == list(PREPARED.values())

    before = joint_graph.lazy_init
    compiled(lambda x: (x @ x,), (3, 3), see)
    assert joint_graph.lazy_init is before


def test_no_patterns_are_forgotten() -> None:
    found = re.findall(r"(\w+)\(input_device\)$", inspect.getsource(joint_graph.lazy_init), re.MULTILINE)
    assert found == list(PREPARED.values())


def test_all_patterns_of_attention_multiply_batches() -> None:
    names = [one.name for one in pkgutil.iter_modules(serialized_patterns.__path__)]
    modules = [importlib.import_module(f"{serialized_patterns.__name__}.{name}") for name in names if "sfdp" in name]
    patterns = {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, PatternExpr) and name.startswith("_sfdp")
    }
    assert len(patterns) > 20
    assert [name for name, value in patterns.items() if "aten.bmm.default" not in repr(value)] == []


def test_types_of_results_are_known_as_before() -> None:
    def described() -> dict[str, Any]:
        table = vars(DtypePropagationOpsHandler())
        return {name: (one.func, one.keywords) for name, one in table.items()}

    expected, inside = described(), []

    def see() -> None:
        rule = DtypePropagationOpsHandler().add  # type: ignore[attr-defined]
        assert DtypePropagationOpsHandler().add is rule, "the table was filled again"  # type: ignore[attr-defined]
        inside.append(described())

    before = DtypePropagationOpsHandler.__init__
    compiled(lambda x: (x + 1,), (3,), see)
    assert inside == [expected]
    assert DtypePropagationOpsHandler.__init__ is before
