"""Update rules as generated kernels: the C code computes the same bits as the rule's own operators.

Without a GPU the code runs on the host: a C++ compiler reads it with a few definitions before it.
"""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

import stepgraph as sg
from stepgraph.compiler.kernels import update_kernel
from stepgraph.compiler.kernels.update import (
    MANY,
    TOGETHER,
    expand_updates,
    named,
    reference,
    remember_updates,
    update,
)
from stepgraph.compiler.kernels.update_kernel import (
    ARGUMENT_BYTES,
    HELPERS,
    NO_BLOCK,
    THREADS,
    Form,
    Update,
    arguments,
    is_ordered,
    kernel,
    prepare,
    tables,
    written,
)
from stepgraph.compiler.program import set_fake
from stepgraph.optimizers import Optimizer
from stepgraph.system import torch_private
from stepgraph.system.torch_private import launch_cuda

update_module = sys.modules[update.__module__]  # the package shows the function under the same name
COUNTS = [7, 255, 3 * 4096 - 1, *range(300, 395), 4096, 4100]
ODD = 3
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
    """One rule with arrays to update, in float32 as on a GPU; the last of them are at odd addresses."""

    def __init__(self, optimizer: Optimizer, device: str = "cpu", gradient: torch.dtype = torch.float32) -> None:
        self.optimizer, generator = optimizer, torch.Generator().manual_seed(5)

        def array(count: int, odd: bool) -> torch.Tensor:
            return torch.randn(count + odd, generator=generator).to(device)[int(odd) :]

        def arrays() -> list[torch.Tensor]:
            return [array(count, index >= len(COUNTS) - ODD) for index, count in enumerate(COUNTS)]

        parameters, gradients = arrays(), [one.to(gradient) for one in arrays()]
        gradients[0][3], gradients[0][4], gradients[0][6], parameters[0][5] = torch.nan, torch.inf, 3e-7, 0.0
        states = [[one.abs() for one in arrays()] for _ in optimizer.slots]
        self.live = torch.tensor(optimizer.rows()[0], dtype=torch.float64, device=device)
        self.named = named(optimizer, self.live)
        self.names = [name for name in vars(self.named) if name != TOGETHER]
        numbers = getattr(self.named, TOGETHER).float()
        norm = torch.linalg.vector_norm(gradients[1].float())
        copies = [one.to(torch.bfloat16) for one in parameters]
        self.arrays = Update(parameters, gradients, states, numbers, copies, norm)

    @property
    def code(self) -> str | None:
        rule = rule_of(self.optimizer, self.names)
        return written(rule, (COUNTS[0],), len(self.arrays.states), len(self.names))

    @property
    def form(self) -> Form:
        assert self.code is not None
        return Form(self.code, len(self.arrays.states), len(self.names), self.arrays.gradients[0].dtype, torch.bfloat16)

    def expected(self) -> Update:
        """The arrays that the rule's own operators change."""
        changed = [[one.clone() for one in some] for some in changing(self.arrays)]
        parameters, copies, *states = changed
        n = SimpleNamespace(**dict(zip(self.names, self.arrays.numbers.unbind(), strict=True)))
        arrays = self.arrays._replace(parameters=parameters, copies=copies, states=states)
        with ExactRoots() if self.live.device.type == "cpu" else nullcontext():
            reference(self.optimizer, arrays, n)
        return arrays


class ExactRoots(TorchDispatchMode):
    """Rounds square roots to the nearest number, as GPUs and compilers do; MKL, which PyTorch asks on x86, does not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sqrt.default:
            return args[0].double().sqrt().to(args[0].dtype)
        return func(*args, **(kwargs or {}))


class Reordered(Case):
    """Filters whose gradients and copies have their channels last, or those of a transposed convolution."""

    SHAPES = ((5, 7, 3, 3), (64, 33, 3, 3), (4, 3, 2, 2), (1, 6, 1, 1), (8, 1, 3, 3), (6, 4), (9,), (2, 3, 5, 7, 3))

    def __init__(self, optimizer: Optimizer, device: str = "cpu", gradient: torch.dtype = torch.bfloat16) -> None:
        super().__init__(optimizer, device, gradient)
        generator = torch.Generator().manual_seed(6)

        def arrays(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
            return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in self.SHAPES]

        parameters, states = arrays(), [[one.abs() for one in arrays()] for _ in optimizer.slots]
        gradients = [moved(one, index % 3) for index, one in enumerate(arrays(gradient))]
        copies = [moved(one, (index + 1) % 3) for index, one in enumerate(arrays(torch.bfloat16))]
        self.arrays = self.arrays._replace(parameters=parameters, gradients=gradients, states=states, copies=copies)

    @property
    def form(self) -> Form:
        return super().form._replace(reorders=True)


def moved(array: torch.Tensor, kind: int) -> torch.Tensor:
    """The same numbers in another order in memory: the second or the first dimension last, or none."""
    if array.ndim < 2 or kind == 2:
        return array
    order = [0, *range(2, array.ndim), 1] if kind == 0 else [*range(1, array.ndim), 0]
    return array.permute(order).contiguous().permute(*np.argsort(order).tolist())


def changing(arrays: Update) -> list[Sequence[torch.Tensor]]:
    return [arrays.parameters, arrays.copies, *arrays.states]


def same(found: Update, expected: Update) -> None:
    for some, others in zip(changing(found), changing(expected), strict=True):
        for ours, theirs in zip(some, others, strict=True):
            np.testing.assert_array_equal(ours.float().cpu().numpy(), theirs.float().cpu().numpy())


HOST = """
#include <math.h>
#include <string.h>
#define __device__ static inline
#define __global__ static
#define __launch_bounds__(threads)
#define asm(...) bits = 0
static struct { int x; } blockIdx, threadIdx;
static inline float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
"""
RUN = """
extern "C" void run{0}(const k{0}::Table* table, int blocks) {{
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < {1}; ++threadIdx.x) k{0}::update(*table);
}}
"""
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CASES: dict[str, Callable[[], Case]] = {
    **{name: lambda make=make: Case(make()) for name, make in RULES.items()},
    **{name: lambda kind=kind: Case(RULES["adamw"](), gradient=kind) for name, kind in HALVES.items()},
    "reordered": lambda: Reordered(RULES["adamw"]()),
}


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    compiler, folder = shutil.which("g++"), tmp_path_factory.mktemp("kernels")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    parts = [HOST, HELPERS]
    for index, make in enumerate(CASES.values()):
        code = kernel(make().form).replace(HELPERS, "").replace('extern "C"', "")
        parts += [f"namespace k{index} {{", code, "}", RUN.format(index, THREADS)]
    (folder / "k.cpp").write_text("\n".join(parts))
    command = [compiler, "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-o", "k.so", "k.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    yield ctypes.CDLL(str(folder / "k.so"))


@pytest.mark.parametrize("name", CASES)
def test_the_code_of_a_rule_computes_its_bits(name: str, on_host: ctypes.CDLL) -> None:
    case, run = CASES[name](), getattr(on_host, f"run{list(CASES).index(name)}")
    assert case.arrays.norm is not None
    count = len(case.arrays.parameters)
    expected, norms = case.expected(), [case.arrays.norm] * count
    launched = list(tables(case.arrays, case.form, norms, range(count)))
    assert len(launched) == -(-count // case.form.slots) == (1 if name == "reordered" else 2)  # as few as possible
    for allowed in (False, True):
        for table, blocks in launched:
            finite = torch.tensor(allowed)
            table.ALLOWED = finite.data_ptr()
            run(ctypes.byref(table), blocks)
        if not allowed:
            assert torch.equal(case.arrays.parameters[2], CASES[name]().arrays.parameters[2])
    same(case.arrays, expected)


@pytest.mark.parametrize("name", CASES)
def test_the_arguments_of_a_kernel_fit_into_a_launch(name: str) -> None:
    form = CASES[name]().form
    assert ARGUMENT_BYTES - 128 < ctypes.sizeof(arguments(form)) <= ARGUMENT_BYTES


def test_orders_that_a_kernel_follows() -> None:
    filters = torch.empty(4, 3, 5, 5)
    for one in (filters, moved(filters, 0), moved(filters, 1), filters[:, :, 1:2], filters.expand(2, 4, 3, 5, 5)[0]):
        assert is_ordered(one)
    for one in (filters[:, :, 1:3, :4], filters.transpose(2, 3)):
        assert not is_ordered(one)
    assert is_ordered(torch.empty(1 << 32, device="meta"))  # in the order of its parameter, its size does not matter
    assert not is_ordered(torch.empty(1 << 16, 1 << 16, device="meta").t())


def test_blocks_are_spread_over_parameters_by_their_size() -> None:
    case = Case(sg.SGDOptimizer(0.1))
    ((table, blocks), *_) = tables(case.arrays, case.form, case.arrays.gradients, range(3))
    assert list(table.FIRST[:4]) == [0, 1, 2, NO_BLOCK] and blocks == 5  # 6, 255 and 3 × 4096 - 1 elements
    assert list(table.COUNT[:4]) == [*COUNTS[:3], 0]


def test_no_launch_without_elements() -> None:
    nothing = torch.zeros(0)
    form = Form("P = p - g;", 0, 1)
    arrays = Update([nothing], [nothing], [], torch.zeros(1))
    assert list(tables(arrays, form, [torch.zeros(())], [0])) == []


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
    assert written(rule, (8, 6), 1, len(case.names)) is None


def test_a_step_writes_the_code_of_a_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def noting(rule: Any, shape: tuple[int, ...], *rest: Any) -> str | None:
        shapes.append(shape)
        return written(rule, shape, *rest)

    monkeypatch.setattr(update_module, "written", noting)
    case = Case(sg.AdamOptimizer(1e-3))
    with torch_private.FakeTensorMode():
        vector, matrix = (torch.empty(shape, device="cuda") for shape in ((3,), (3, 2)))
    known: dict[Any, Any] = {}

    def rules(*arrays: torch.Tensor, names: list[str] = case.names) -> list[str]:
        given = Update(arrays, arrays, [arrays, arrays], vector)
        return update_module._rules(case.optimizer, given, names, known)

    (code,) = rules(vector)
    assert rules(vector, matrix, vector) == [code] * 3 and shapes == [(3,), (3, 2)]
    assert rules(matrix) == [code] and len(shapes) == 2
    rules(vector, names=[*case.names, "another"])
    assert len(shapes) == 3
    known[(3, 2), 2, tuple(case.names)] = None  # has no code
    assert rules(vector, matrix) == []


@pytest.mark.parametrize("kind", [Case, Reordered])
@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_what_is_prepared_is_what_a_launch_needs(
    kind: type[Case], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails beforehand is left to the launch; what has begun does not begin again."""
    asked = list[tuple[Any, ...]]()

    def assemble(*given: Any) -> Any:
        asked.append(given)
        raise error("CUDA's runtime compiler failed")

    case = kind(RULES["adamw"](), gradient=torch.bfloat16)
    with torch_private.FakeTensorMode():
        numbers = torch.empty(len(case.names), device="cuda:1")
    arrays, rules = case.arrays._replace(numbers=numbers), [case.code or ""] * len(case.arrays.parameters)
    threads = list[str]()
    monkeypatch.setattr(update_kernel, "_begun", set())
    monkeypatch.setattr(update_kernel, "assemble_cuda", assemble)
    monkeypatch.setattr(update_kernel.background, "do", lambda name, work: (threads.append(name), work()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prepare(arrays, rules)
    assert not asked
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    prepare(arrays, rules)
    assert asked[0] == (kernel(next(iter(update_kernel._forms(arrays, rules)))), "update", ("--fmad=false",), 1)
    assert case.form in update_kernel._forms(arrays, rules)
    prepare(arrays, rules)
    assert len(threads) == 1


@pytest.mark.parametrize(("count", "rules"), [(MANY + 1, True), (MANY, True), (MANY + 1, False)])
def test_a_later_run_knows_the_kernels_that_fused_steps_call(
    count: int, rules: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their numbers, without expanding updates again."""
    optimizer, recorded = sg.SGDOptimizer(0.1), fx.Graph()
    with torch_private.FakeTensorMode() as mode:
        nodes = [recorded.placeholder(f"a{index}") for index in range(2 * count + 1)]
        for node in nodes:
            set_fake(node, torch.empty(3))
    parameters, gradients, numbers = nodes[:count], nodes[count:-1], nodes[-1]
    code = ["P -= G;"] * count if rules else []
    number = update_module.number_of(optimizer)
    recorded.call_function(
        update_module.UPDATE, (parameters, gradients, [], [], numbers, None, None, number, "rate", code)
    )
    recorded.output(())
    monkeypatch.setattr(update_module, "_kernels", {})
    found = [*remember_updates(recorded).values()]
    assert found == [*update_module._kernels] and bool(found) is (count > MANY and rules)
    with mode:
        expand_updates(recorded)
    called = recorded.find_nodes(op="call_function", target=update_module.BY_KERNEL)
    assert [node.args[-1] for node in called] == found


@pytest.mark.gpu
@pytest.mark.parametrize("gradient", [torch.float32, *HALVES.values()], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_the_kernel_computes_the_bits_of_the_rule(
    name: str, gradient: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []

    def counted(kernel: Any, blocks: int, *rest: Any) -> None:
        launched.append(blocks)
        launch_cuda(kernel, blocks, *rest)

    monkeypatch.setattr(update_kernel, "launch_cuda", counted)
    case = Case(RULES[name](), "cuda", gradient)
    expected = case.expected()
    norm = case.arrays.norm if case.optimizer.needs_global_norm else None
    arrays = case.arrays._replace(numbers=case.live, norm=norm)
    with torch.inference_mode():
        update(case.optimizer, arrays, lambda: case.named)
        same(arrays, expected)
        stopped = torch.tensor(False, device="cuda")
        update(case.optimizer, arrays._replace(finite=stopped), lambda: case.named)
    same(arrays, expected)
    assert len(launched) == 4


@pytest.mark.gpu
def test_the_kernel_follows_other_orders() -> None:
    case = Reordered(RULES["adamw"](), "cuda")
    expected = case.expected()
    with torch.inference_mode():
        update(case.optimizer, case.arrays._replace(numbers=case.live, norm=None), lambda: case.named)
    same(case.arrays, expected)


@pytest.mark.gpu
def test_a_captured_update_keeps_its_arguments() -> None:
    """A graph copies the arguments of a launch; nothing has to be kept alive for it."""
    case, eager = (Case(RULES["adamw"](), "cuda", torch.bfloat16) for _ in range(2))
    with torch.inference_mode():
        for one in (case, eager):  # also compiles the kernel
            update(one.optimizer, one.arrays._replace(numbers=one.live, norm=None), lambda one=one: one.named)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            update(case.optimizer, case.arrays._replace(numbers=case.live, norm=None), lambda: case.named)
        for _ in range(3):
            graph.replay()
            update(eager.optimizer, eager.arrays._replace(numbers=eager.live, norm=None), lambda: eager.named)
    same(case.arrays, eager.arrays)
