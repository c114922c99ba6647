"""What `make structure` counts: each measure on a small package written for it, and limits in both directions."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tools import structure

pytest.importorskip("ruff", reason="the tool runs ruff, which only the development extra installs")

ZERO = {limit.measure: 0 for limit in structure.LIMITS}


def package(folder: Path, files: Mapping[str, str]) -> Path:
    """Writes a package `house`; every folder in it is a package, too."""
    root = folder / "house"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in [root, *(one for one in root.rglob("*") if one.is_dir())]:
        (path / "__init__.py").touch()
    return root


def circles_in(folder: Path, files: Mapping[str, str]) -> list[set[str]]:
    return structure.circles(structure.edges(structure.sources(package(folder, files))))


def private_in(folder: Path, text: str) -> tuple[set[str], set[str]]:
    return structure.private_names(structure.sources(package(folder, {"a.py": text}))["house.a"])


# ------------------------------------------------------------------------------------------------------- circles


@pytest.mark.parametrize(
    "text",
    [
        "import house.a",
        "import house.a as other",
        "from house import a",
        "from house.a import x",
        "from . import a",
        "from .a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.a import x",
        "import typing\nif typing.TYPE_CHECKING:\n    from house.a import x",
        "def f():\n    from house.a import x",
        "class C:\n    async def f(self):\n        import house.a",
        "from importlib import import_module\nimport_module('house.a')",
    ],
)
def test_a_circle_of_two(tmp_path: Path, text: str) -> None:
    assert circles_in(tmp_path, {"a.py": "from house.b import y", "b.py": text}) == [{"house.a", "house.b"}]


def test_a_package_makes_no_false_circles(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from house.rooms import kitchen\nfrom house.rooms.hall import door",
        "rooms/__init__.py": "from house.rooms.kitchen import stove as stove\nfrom house.rooms import hall",
        "rooms/kitchen.py": "import house.rooms.hall\nfrom house.rooms import hall\nfrom . import hall",
        "rooms/hall.py": "from house import errors\nfrom ..errors import Fire",
        "errors.py": "import houses\nfrom torch import house",
    }
    assert circles_in(tmp_path, files) == []


def test_a_name_that_only_the_package_has_is_a_circle(tmp_path: Path) -> None:
    files = {
        "rooms/__init__.py": "from .kitchen import stove",
        "rooms/kitchen.py": "from house.rooms import hall, stove",
        "rooms/hall.py": "",
    }
    assert circles_in(tmp_path, files) == [{"house.rooms", "house.rooms.kitchen"}]


def test_circles_are_apart_and_print_their_shortest_cycle(tmp_path: Path) -> None:
    files = {
        "a.py": "import house.b",
        "b.py": "import house.c",
        "c.py": "import house.a\ndef f():\n    import house.b",
        "d.py": "import house.a\nimport house.e",
        "e.py": "import house.d",
        "f.py": "import house.a",
    }
    numbers, details = structure.measure(package(tmp_path, files))
    assert (numbers[structure.CIRCLES], numbers[structure.IN_CIRCLES]) == (2, 5)
    text = "\n".join(details)
    assert "  3 modules:\n    house.a  house.b  house.c\n" in text
    assert "house.c → house.b  (c.py:3, in a function)" in text
    assert "house.d → house.e  (d.py:2)" in text
    assert "house.a → house.b" not in text  # the longer cycle


# ----------------------------------------------------------------------------------------------- private reaches


def test_reaches_are_own_pytorchs_or_others(tmp_path: Path) -> None:
    files = {
        "graph.py": """
class Graph:
    __slots__ = ("_slot",)
    _field: int = 0

    def __init__(self):
        self._nodes = self._field

    def _add(self): ...
""",
        "user.py": """
import argparse
import torch
from torch.fx import graph_module
from house import graph as wiring

aten = torch.ops.aten
print("×", one._nodes, one.graph._field, many[0]._add(), one._slot)  # noqa: SLF001
wiring._helper
(
    one
    .graph
    ._nodes
)
torch._C, graph_module._loader, aten._softmax
array._version, argparse._SubParsersAction
""",
    }
    root = package(tmp_path, files)
    found = structure.reaches(root, structure.sources(root))
    assert found == {"user.py": {"own": 6, "PyTorch": 3, "other": 2}}


def test_no_cache_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = package(tmp_path, {"a.py": "b._c"})
    monkeypatch.chdir(tmp_path)
    structure.measure(root)
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["__init__.py", "a.py", "house"]


# --------------------------------------------------------------------------------------- private names of PyTorch


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch\ntorch._C._x()", "torch._C._x"),
        ("import torch\ntorch.cuda._lazy_init()", "torch.cuda._lazy_init"),
        ("import torch as t\nt._C", "torch._C"),
        ("import torch._inductor.config", "torch._inductor.config"),
        ("from torch._subclasses import FakeTensor\nFakeTensor.x", "torch._subclasses.FakeTensor"),
        ("from torch.utils import _pytree as pytree\npytree.x", "torch.utils._pytree"),
        ("from torch import fx\nfx._compatibility.x", "torch.fx._compatibility.x"),
        ("def f():\n    from torch import _C", "torch._C"),
        ("from importlib import import_module\nimport_module('torch._dynamo')", "torch._dynamo"),
        ("import importlib\nimportlib.import_module('torch.fx._x')", "torch.fx._x"),
        ("import torch\ncuda = torch.cuda\ncuda._x", "torch.cuda._x"),
    ],
)
def test_private_names_of_pytorch(tmp_path: Path, text: str, name: str) -> None:
    assert private_in(tmp_path, text) == ({name}, set())


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.__version__",
        "import torch\ntorch.nn.functional.relu",
        "from torch import fx",
        "self.torch._x",
        "from house import _torch\n_torch.x",
        "'says that torch._C is private'",
        "import_module('torch.fx')",
    ],
)
def test_public_names_of_pytorch(tmp_path: Path, text: str) -> None:
    assert private_in(tmp_path, text) == (set(), set())


def test_operators_are_apart(tmp_path: Path) -> None:
    text = "import torch\naten = torch.ops.aten\naten._softmax.default\naten.relu.default"
    assert private_in(tmp_path, text) == (set(), {"torch.ops.aten._softmax.default"})


# ------------------------------------------------------------------------------------------------- other measures


def test_entries_leave_out_caches_and_markers(tmp_path: Path) -> None:
    root = package(tmp_path, {"a.py": "", "py.typed": "", ".hidden": "", "rooms/b.py": ""})
    for name in ("__pycache__", "gone/__pycache__"):
        (root / name).mkdir(parents=True)
        (root / name / "a.pyc").touch()
    assert structure.entries(root) == ["__init__.py", "a.py", "rooms"]


def test_the_longest_chain_below_graph(tmp_path: Path) -> None:
    files = {
        "graph.py": "class Graph: ...",
        "public.py": "from house.graph import Graph as Graph",
        "declared.py": "from house import public\nclass Declared(public.Graph): ...",
        "compiled.py": "from house.declared import Declared as Base\nclass Compiled(Mixin, Base[int]): ...",
        "training.py": "from .compiled import Compiled\nclass Training(Compiled): ...\nclass Inference(Compiled): ...",
        "short.py": "from house import graph\nclass Short(graph.Graph): ...",
        "fx.py": "from torch.fx import Graph\nclass A(Graph): ...\nclass B(A): ...\nclass C(B): ...\nclass D(C): ...",
    }
    found = structure.sources(package(tmp_path, files))
    assert structure.longest_chain(found) == ["Graph", "Declared", "Compiled", "Training"]
    del found["house.declared"]
    assert structure.longest_chain(found) == ["Graph", "Short"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node.meta['val']", True),
        ("node.args[0].meta.get('val')", True),
        ("node.meta.update(x)", True),
        ("node.meta = {}", True),
        ("'val' in node.meta", True),
        ("descriptor.meta()", False),
        ("meta = {}\nmeta['val']", False),
        ("torch.device('meta')", False),
    ],
)
def test_what_touches_meta(tmp_path: Path, text: str, expected: bool) -> None:
    assert structure.touches_meta(structure.sources(package(tmp_path, {"a.py": text}))["house.a"]) is expected


def test_the_largest_are_printed(tmp_path: Path) -> None:
    files = {f"f{count}.py": "def f():\n" + "    x = 1\n" * count for count in range(1, 9)}
    text = "\n".join(structure.measure(package(tmp_path, files))[1])
    assert "     9  f8.py\n" in text and "     9  f8.py:1 f\n" in text
    assert "f4.py:1" in text and "f3.py:1" not in text


# -------------------------------------------------------------------------------------------------------- limits


def test_numbers_at_their_limits_are_right() -> None:
    numbers = {limit.measure: limit.now for limit in structure.LIMITS}
    assert structure.verdicts(numbers, structure.LIMITS) == []


@pytest.mark.parametrize("limit", structure.LIMITS, ids=lambda limit: limit.measure)
def test_a_number_above_its_limit(limit: structure.Limit) -> None:
    [message] = structure.verdicts(ZERO | {limit.measure: limit.now + 1}, [limit])
    assert f"{limit.measure}: {limit.now + 1}, the limit is {limit.now}." in message
    assert f"Fix: {limit.advice}." in message


def test_a_number_below_its_limit() -> None:
    [message] = structure.verdicts({"circles": 3}, [structure.Limit("circles", 5, 0, "x")])
    assert "circles: 3, which is better than the limit of 5." in message
    assert "Fix: lower the limit to 3 in tools/structure.py" in message


def test_a_limit_is_not_below_its_target() -> None:
    assert all(limit.now >= limit.target for limit in structure.LIMITS)


@pytest.mark.parametrize(("now", "code"), [(1, 1), (2, 0), (3, 1)])
def test_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str], now: int, code: int) -> None:
    root = package(tmp_path, {"a.py": ""})
    assert structure.main([str(root)], [structure.Limit(structure.ENTRIES, now, 1, "move it")]) == code
    first, row, *rest = capsys.readouterr().out.splitlines()
    assert first.split() == ["number", "limit", "target"]
    assert row.split()[-3:] == ["2", str(now), "1"]
    assert rest[-1].startswith("Fix: " if code else "All numbers")


def test_a_folder_that_is_no_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        structure.main([str(tmp_path)])
    assert stopped.value.code == 2
    assert "no __init__.py" in capsys.readouterr().err
