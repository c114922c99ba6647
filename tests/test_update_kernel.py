"""Update rules as generated kernels: the C code computes the same bits as the rule's own operators.

Without a GPU the code runs on the host: a C++ compiler reads it with a few definitions before it.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.kernels import update_kernel
from stepgraph.compiler.kernels.update import TOGETHER, named, reference, update
from stepgraph.compiler.kernels.update_kernel import HELPERS, SLOTS, kernel, written
from stepgraph.optimizers import Optimizer

COUNT = 1000
CLIPPED = {"clip_norm": 0.5, "weight_decay": 0.01}
RULES: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: sg.SGDOptimizer(0.1),
    "sgd momentum": lambda: sg.SGDOptimizer(0.1, momentum=0.9, weight_decay=0.1),
    "sgd nesterov": lambda: sg.SGDOptimizer(0.1, momentum=0.9, nesterov=True, clip_value=0.3),
    "sgd torch": lambda: sg.SGDOptimizer(0.1, momentum=0.9, formula="torch", dampening=0.1),
    "adam": lambda: sg.AdamOptimizer(1e-3, **CLIPPED),
    "adam amsgrad torch": lambda: sg.AdamOptimizer(1e-3, amsgrad=True, formula="torch"),
    "adamw": lambda: sg.AdamWOptimizer(1e-3, weight_decay=0.1),
    "adamw torch": lambda: sg.AdamWOptimizer(1e-3, weight_decay=0.1, formula="torch", clip_norm=1.0),
    "rmsprop": lambda: sg.RMSPropOptimizer(1e-3),
    "rmsprop both": lambda: sg.RMSPropOptimizer(1e-3, momentum=0.9, centered=True),
    "lion": lambda: sg.LionOptimizer(1e-4, weight_decay=1.0),
    "muon's adamw": lambda: sg.MuonOptimizer(1e-3),
    "l1": lambda: sg.SGDOptimizer(
        sg.OptimizerDescriptor(0.1, regularization_type=sg.RegularizationType.L1, regularization_scale=0.1)
    ),
}


def rule_of(optimizer: Optimizer, names: list[str]) -> Any:
    def rule(p: Any, g: Any, state: Any, norm: Any, live: Any) -> list[torch.Tensor]:
        n = SimpleNamespace(**dict(zip(names, live, strict=True)))
        new, new_state = optimizer.update(p, optimizer.prepare(p, g, norm, n), tuple(state), n)
        return [new, *new_state]

    return rule


class Case:
    """One rule with arrays to update, in float32 as on a GPU."""

    def __init__(self, optimizer: Optimizer, count: int = COUNT, device: str = "cpu") -> None:
        self.optimizer, generator = optimizer, torch.Generator().manual_seed(5)

        def array() -> torch.Tensor:
            return torch.randn(count, generator=generator).to(device)

        self.p, self.g = array(), array()
        self.g[3], self.g[4], self.p[5] = torch.nan, torch.inf, 0.0
        self.states = [array().abs() for _ in optimizer.slots]
        live = torch.tensor(optimizer.rows()[0], dtype=torch.float64)
        n = named(optimizer, live)
        self.names = [name for name in vars(n) if name != TOGETHER]
        self.numbers = getattr(n, TOGETHER).float().to(device)
        self.norm = torch.linalg.vector_norm(self.g[10:])

    @property
    def code(self) -> str | None:
        rule = rule_of(self.optimizer, self.names)
        return written(rule, self.p.shape, len(self.states), len(self.numbers))

    def expected(self) -> list[torch.Tensor]:
        p, states = self.p.clone(), [one.clone() for one in self.states]
        n = SimpleNamespace(**dict(zip(self.names, self.numbers.unbind(), strict=True)))
        copy = torch.empty(len(p), dtype=torch.bfloat16, device=p.device)
        reference(self.optimizer, [p], [self.g], [[one] for one in states], n, copies=[copy], norm=self.norm)
        return [p, *states, copy]


HOST = """
#include <math.h>
#include <string.h>
#define __device__ static inline
#define __global__
#define asm(...) bits = 0
static struct { long long x; int y; } blockIdx = {0, 2}, blockDim = {1, 1}, gridDim = {1, 1}, threadIdx = {0, 0};
static inline float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
"""


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    compiler, folder = shutil.which("g++"), tmp_path_factory.mktemp("kernels")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    parts = [HOST, HELPERS]
    for index, make in enumerate(RULES.values()):
        case = Case(make())
        assert case.code is not None
        code = kernel(case.code, len(case.states), len(case.numbers), torch.bfloat16)
        parts.append(code.replace(HELPERS, "").replace("void update(", f"void update{index}("))
    (folder / "k.cpp").write_text("\n".join(parts))
    command = [compiler, "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-o", "k.so", "k.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    yield ctypes.CDLL(str(folder / "k.so"))


@pytest.mark.parametrize("name", RULES)
def test_the_code_of_a_rule_computes_its_bits(name: str, on_host: ctypes.CDLL) -> None:
    case = Case(RULES[name]())
    copy = torch.zeros(COUNT, dtype=torch.bfloat16)
    mine = [case.p.clone(), *(one.clone() for one in case.states)]
    slot = [*mine, case.g, case.norm]
    arguments: list[Any] = [case.numbers.data_ptr(), None, 0]
    for index in range(SLOTS):  # the host's block is in row 2
        pointers = [one.data_ptr() if index == 2 else None for one in slot]
        arguments += [*pointers, COUNT if index == 2 else 0, copy.data_ptr() if index == 2 else None]
    given = [one if isinstance(one, int) and one < 2**20 else ctypes.c_void_p(one) for one in arguments]
    getattr(on_host, f"update{list(RULES).index(name)}")(*given)
    for ours, theirs in zip([*mine, copy], case.expected(), strict=True):
        np.testing.assert_array_equal(ours.float().numpy(), theirs.float().numpy())


def test_a_rule_that_is_not_elementwise_has_no_kernel() -> None:
    def written_with(rule: Any) -> str | None:
        return written(rule, (4, 6), 1, 3)

    assert written_with(lambda p, g, s, norm, n: [p - g, s[0]]) is not None
    assert written_with(lambda p, g, s, norm, n: [p - g.mean(), s[0]]) is None
    assert written_with(lambda p, g, s, norm, n: [p - g @ g.T @ g, s[0]]) is None
    assert written_with(lambda p, g, s, norm, n: [p - g.double(), s[0]]) is None
    assert written_with(lambda p, g, s, norm, n: [p - g.exp(), s[0]]) is None
    assert written_with(lambda p, g, s, norm, n: [p - g, s[0].mul_(2)]) is None
    assert written_with(lambda p, g, s, norm, n: [p + torch.ones(4, 6), s[0]]) is None
    assert written_with(lambda p, g, s, norm, n: [p - g]) is None
    assert written_with(lambda p, g, s, norm, n: [n[0], s[0]]) is None


@pytest.mark.parametrize("name", RULES)
def test_the_code_does_not_depend_on_the_caller(name: str) -> None:
    case = Case(RULES[name]())
    with torch.inference_mode():
        inside = case.code
    assert inside is not None and inside == case.code


def test_matrices_of_muon_run_operator_by_operator() -> None:
    case = Case(sg.MuonOptimizer(1e-3))
    rule = rule_of(case.optimizer, case.names)
    assert written(rule, (8, 6), 1, len(case.numbers)) is None


def launches() -> int:
    info = update_kernel._compiled.cache_info()
    return info.hits + info.misses


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_the_kernel_computes_the_bits_of_the_rule(name: str) -> None:
    before_this = launches()
    counts = [1, 255, 70_000, *range(300, 320)]  # more than one launch
    cases = [Case(RULES[name](), max(count, 6), "cuda") for count in counts]
    first = cases[0]
    optimizer, copies = first.optimizer, [torch.zeros_like(one.p, dtype=torch.bfloat16) for one in cases]
    expected = [case.expected() for case in cases]
    states = [[case.states[i] for case in cases] for i in range(len(first.states))]
    live = torch.tensor(optimizer.rows()[0], dtype=torch.float64, device="cuda")
    n = named(optimizer, live)
    norm = first.norm if optimizer.needs_global_norm else None
    for case in cases:
        case.norm = first.norm
    expected = [case.expected() for case in cases]
    with torch.inference_mode():
        parameters, gradients = [case.p for case in cases], [case.g for case in cases]
        update(optimizer, parameters, gradients, states, live, lambda: n, copies=copies, norm=norm)
        before = [case.p.clone() for case in cases]
        stopped = torch.tensor(False, device="cuda")
        update(optimizer, parameters, gradients, states, live, lambda: n, copies=copies, norm=norm, finite=stopped)
    for index, case in enumerate(cases):
        found = [case.p, *case.states, copies[index]]
        for ours, theirs in zip(found, expected[index], strict=True):
            np.testing.assert_array_equal(ours.float().cpu().numpy(), theirs.float().cpu().numpy())
        np.testing.assert_array_equal(case.p.cpu().numpy(), before[index].cpu().numpy())
    assert launches() > before_this
