"""Every layer of the library, checked in the same ways against its row of the table.

A family's file `cases_<family>.py` holds `CASES`. Each case is checked for the promised shapes, the numbers (NumPy
reference, PyTorch twin), the gradients (central differences, twin), the traced function and the refused sources. A
layer class or a kind of layer without a case fails the last tests.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph.layers
import stepgraph.random
from stepgraph.layers.layer import Layer, Scope
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import DataType, PaddingPolicy, RawEnum, ReductionType
from tests.layers.case import Bad, Case

FAMILIES = [
    importlib.import_module(f"tests.layers.{path.stem}") for path in sorted(Path(__file__).parent.glob("cases_*.py"))
]
CASES: list[Case] = [case for family in FAMILIES for case in family.CASES]
REFUSALS = [(case, bad) for case in CASES for bad in case.bad]

STEP = 1e-6  # of the central differences
TOGETHER, MOST_PROBES = 8, 150  # elements that are moved at once, and how often elements of one array are moved


@cache
def layers() -> list[Layer]:
    """The layer of each case, for looking at."""
    return [case.make() for case in CASES]


def each(cases: list[Case]) -> pytest.MarkDecorator:
    deep = {case.name: [pytest.mark.deep] if case.deep else [] for case in cases}
    rows = [pytest.param(case, id=case.name, marks=deep[case.name]) for case in cases]
    return pytest.mark.parametrize("case", rows)


@dataclasses.dataclass
class Run:
    """One forward pass: the layer, its sources and its tensors' arrays, and what came out."""

    layer: Layer
    sources: list[torch.Tensor]
    arrays: dict[Tensor, torch.Tensor]
    training: bool
    stream: torch.Tensor = dataclasses.field(default_factory=lambda: torch.tensor([1, 2]))

    def forward(self) -> tuple[list[torch.Tensor], Scope]:
        scope = Scope(self.arrays, training=self.training, stream=self.stream)
        results = self.layer.forward(*self.sources, scope=scope)
        return list(results) if isinstance(results, tuple | list) else [results], scope

    def leaves(self) -> dict[str, torch.Tensor]:
        """The arrays that a gradient is due for: floating sources (of a loss: the prediction) and parameters."""
        sources = self.sources[:1] if self.layer.is_loss else self.sources
        found = {f"source {i}": array for i, array in enumerate(sources) if array.is_floating_point()}
        return found | {name: self.arrays[tensor] for name, tensor in self.layer.parameters.items()}

    def to(self, dtype: torch.dtype) -> "Run":
        """The same numbers in another floating type."""
        arrays = {tensor: as_type(array, dtype) for tensor, array in self.arrays.items()}
        return dataclasses.replace(self, sources=[as_type(x, dtype) for x in self.sources], arrays=arrays)

    def with_leaves(self) -> "Run":
        """The same run over fresh leaves, so that gradients can be asked for."""
        fresh = [array.detach().requires_grad_(array.is_floating_point()) for array in self.sources]
        parameters = set(self.layer.parameters.values())
        arrays = {tensor: array.detach().requires_grad_(tensor in parameters) for tensor, array in self.arrays.items()}
        return dataclasses.replace(self, sources=fresh, arrays=arrays)


@pytest.fixture(autouse=True)
def same_numbers_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepgraph.random, "_seed", None)  # other tests find the seed as it was
    stepgraph.random.set_seed(11)


def start(case: Case, dtype: torch.dtype) -> Run:
    """A fresh layer with the case's sources, everything floating as `dtype`."""
    generator = np.random.default_rng(zlib.crc32(case.name.encode()))
    layer = case.make()
    sources = [as_type(torch.from_numpy(np.array(draw(generator))), dtype) for draw in case.sources]
    tensors = {**layer.parameters, **layer.statistics, **layer.constants}.values()
    return Run(layer, sources, {tensor: as_type(tensor.torch(), dtype).clone() for tensor in tensors}, case.training)


def as_type(array: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return array.to(dtype) if array.is_floating_point() else array


def by_field(run: Run) -> dict[str, Any]:
    """The arrays of the layer's tensors by field name; a list for a field that holds several."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(run.layer):
        value = getattr(run.layer, field.name)
        if isinstance(value, Tensor):
            found[field.name] = run.arrays[value]
        elif isinstance(value, tuple | list) and value and all(isinstance(item, Tensor) for item in value):
            found[field.name] = [run.arrays[item] for item in value]
    return found


def call(function: Any, run: Run, convert: Any) -> list[Any]:
    """Results of a reference or twin on the run's arrays."""
    tensors = {
        name: [convert(one) for one in value] if isinstance(value, list) else convert(value)
        for name, value in by_field(run).items()
    }
    results = function(*map(convert, run.sources), **tensors)
    return list(results) if isinstance(results, tuple | list) else [results]


def cotangents(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients to send backwards, one for each floating result."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in results if one.is_floating_point()]


def gradients(
    results: list[torch.Tensor], weights: list[torch.Tensor], leaves: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    floating = [one for one in results if one.is_floating_point()]
    found = torch.autograd.grad(floating, list(leaves.values()), weights, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def assert_close(ours: torch.Tensor, wanted: Any, rtol: float, atol: float, name: str) -> None:
    values, wanted = ours.detach().numpy(), np.asarray(wanted)
    assert values.shape == wanted.shape, f"{name}: shape {values.shape}, wanted {wanted.shape}"
    if np.issubdtype(values.dtype, np.floating):
        np.testing.assert_allclose(values, wanted, rtol=rtol, atol=atol, err_msg=name)
    else:
        np.testing.assert_array_equal(values, wanted, err_msg=name)


@each(CASES)
def test_inferred_descriptors_are_what_forward_gives(case: Case) -> None:
    run = start(case, torch.float32)
    promised = run.layer.infer(*(TensorDescriptor(tuple(x.shape), DataType.of(x.dtype)) for x in run.sources))
    real, _ = run.forward()
    assert [(one.shape, one.data_type.torch) for one in promised] == [(tuple(one.shape), one.dtype) for one in real]


@each(CASES)
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(torch.float64, 1e-10, 1e-11), (torch.float32, 1e-4, 1e-5)], ids=["float64", "float32"]
)
def test_forward_equals_the_numpy_reference(case: Case, dtype: torch.dtype, rtol: float, atol: float) -> None:
    run = start(case, torch.float64)
    results, _ = run.to(dtype).forward()
    wanted = call(case.reference, run, lambda array: array.numpy())
    assert len(results) == len(wanted)
    for i, (ours, theirs) in enumerate(zip(results, wanted, strict=True)):
        assert not ours.is_floating_point() or ours.dtype == dtype
        assert_close(ours, theirs, rtol, atol, f"result {i}")


@each([case for case in CASES if case.differentiable])
def test_gradients_equal_central_differences(case: Case) -> None:
    run = start(case, torch.float64).with_leaves()
    results, _ = run.forward()
    weights = cotangents(results)
    analytic = gradients(results, weights, run.leaves())
    generator = np.random.default_rng(3)
    plain = dataclasses.replace(
        run, sources=[x.detach() for x in run.sources], arrays={t: x.detach() for t, x in run.arrays.items()}
    )
    assert analytic, "a differentiable case needs a floating source or a parameter"
    for name, leaf in plain.leaves().items():
        flat, slopes = leaf.view(-1), analytic[name].reshape(-1)
        groups = min(-(-flat.numel() // TOGETHER), MOST_PROBES)
        for moved in np.array_split(generator.permutation(flat.numel()), groups):
            signs = torch.from_numpy(generator.choice([-1.0, 1.0], len(moved)))
            numeric = central_difference(plain, flat, torch.from_numpy(moved), signs, weights)
            slope = (slopes[moved] * signs).sum().item()
            # A hundredth of what one slope may be off, since the sum can be that much larger than it.
            assert slope == pytest.approx(numeric, rel=1e-7, abs=2e-7), f"{name}, elements {moved}"


def central_difference(
    run: Run, flat: torch.Tensor, moved: torch.Tensor, signs: torch.Tensor, weights: list[torch.Tensor]
) -> float:
    """Slope of `Σ weights · results` along some elements, which are moved in place, up or down, and put back."""
    middle, sides = flat[moved], []
    for step in (STEP, -STEP):
        flat[moved] = middle + step * signs
        floating = [one for one in run.forward()[0] if one.is_floating_point()]
        sides.append(sum((one * weight).sum().item() for one, weight in zip(floating, weights, strict=True)))
    flat[moved] = middle
    return (sides[0] - sides[1]) / (2 * STEP)


@each([case for case in CASES if case.twin])
def test_forward_and_gradients_equal_the_torch_twin(case: Case) -> None:
    run = start(case, torch.float64).with_leaves()
    other = run.with_leaves()
    results, wanted = run.forward()[0], call(case.twin, other, lambda array: array)
    assert len(results) == len(wanted)
    for i, (ours, theirs) in enumerate(zip(results, wanted, strict=True)):
        assert_close(ours, theirs.detach().numpy(), 1e-10, 1e-11, f"result {i}")
    if not case.differentiable:
        return
    weights = cotangents(results)
    ours, theirs = gradients(results, weights, run.leaves()), gradients(wanted, weights, other.leaves())
    for name, gradient in ours.items():
        assert_close(gradient, theirs[name].numpy(), 1e-9, 1e-10, f"gradient of {name}")


@each([case for case, layer in zip(CASES, layers(), strict=True) if case.differentiable and layer.is_loss])
def test_loss_sends_gradients_to_the_prediction_only(case: Case) -> None:
    run = start(case, torch.float64).with_leaves()
    results, _ = run.forward()
    others = {f"source {i}": x for i, x in enumerate(run.sources) if i > 0 and x.is_floating_point()}
    if others:
        for name, gradient in gradients(results, cotangents(results), others).items():
            assert not gradient.any(), name


@each(CASES)
def test_traced_equals_untraced(case: Case) -> None:
    run = start(case, torch.float32)
    weights = cotangents(run.forward()[0])
    tensors = list(run.arrays)

    def step(
        sources: list[torch.Tensor], arrays: list[torch.Tensor], stream: torch.Tensor, sent: list[torch.Tensor]
    ) -> Any:
        inner = Run(run.layer, sources, dict(zip(tensors, arrays, strict=True)), case.training, stream).with_leaves()
        results, scope = inner.forward()
        found = gradients(results, sent, inner.leaves()) if case.differentiable else {}
        return [*results, *scope.updates.values(), *found.values()]

    given = (run.sources, list(run.arrays.values()), run.stream, weights)
    untraced = step(*given)
    traced = make_fx(step, tracing_mode="fake")(*given)(*given)
    assert len(untraced) == len(traced)
    for i, (one, other) in enumerate(zip(untraced, traced, strict=True)):
        assert one.dtype == other.dtype
        assert torch.equal(bits(one), bits(other)), f"value {i}"


def bits(array: torch.Tensor) -> torch.Tensor:
    """The array as whole numbers, so that NaN and -0.0 compare by what is stored."""
    return array.detach().contiguous().view(torch.uint8) if array.ndim else array.detach().reshape(1).view(torch.uint8)


@pytest.mark.parametrize(("case", "bad"), REFUSALS, ids=[f"{case.name}-{bad.words}" for case, bad in REFUSALS])
def test_bad_sources_are_refused_by_name(case: Case, bad: Bad) -> None:
    with pytest.raises(bad.error, match=re.escape(bad.words)):
        case.make().infer(*map(as_descriptor, bad.sources))


def as_descriptor(source: Any) -> TensorDescriptor:
    """A source of a refusal: a shape (of float32), an array or a descriptor."""
    if isinstance(source, TensorDescriptor):
        return source
    if isinstance(source, np.ndarray):
        return TensorDescriptor(source.shape, np.float32 if source.dtype == np.float64 else source.dtype)
    return TensorDescriptor(tuple(source))


def modules() -> list[ModuleType]:
    return [
        importlib.import_module(f"stepgraph.layers.{one.name}")
        for one in pkgutil.iter_modules(stepgraph.layers.__path__)
        if not one.name.endswith("_triton")  # kernels, and only where Triton is
    ]


def defined(base: type) -> list[type]:
    """The public subclasses of `base` that stand in `stepgraph.layers`."""
    return [
        member
        for module in modules()
        for name, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, base)
        and member.__module__ == module.__name__
        and not name.startswith("_")
        and getattr(member, "forward", None) is not Layer.forward  # a base for others
    ]


def kinds(value: object) -> Iterator[RawEnum]:
    """Every enumeration member among the settings of a layer or descriptor."""
    if isinstance(value, RawEnum):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from kinds(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from kinds(getattr(value, field.name))


@pytest.mark.parametrize("layer", defined(Layer), ids=lambda layer: layer.__name__)
def test_every_layer_has_a_case(layer: type) -> None:
    assert layer in set(map(type, layers()))


@pytest.mark.parametrize("kind", [*defined(RawEnum), ReductionType, PaddingPolicy], ids=lambda kind: kind.__name__)
def test_every_kind_has_a_case(kind: type[RawEnum]) -> None:
    # A kind counts with the layer it stands next to: an LSTM with a tanh gate is no case for the tanh activation.
    next_to = [one for one in layers() if kind.__module__ in (type(one).__module__, "stepgraph.types")]
    covered = {member for layer in next_to for member in kinds(layer) if type(member) is kind}
    assert set(kind) <= covered, f"no case for {sorted(member.name for member in set(kind) - covered)}"


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
