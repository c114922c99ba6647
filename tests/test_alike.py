"""Results that are repeated are those that PyTorch would give: layouts, memory in common, bytes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import fx

from stepgraph.compiler import alike
from stepgraph.compiler.alike import Known
from stepgraph.compiler.program import call, fake, refresh, set_fake, storages
from stepgraph.system import torch_private

aten = torch.ops.aten


@contextmanager
def repetitions() -> Iterator[list[Any]]:
    """The results that are repeated meanwhile, without the trials after PyTorch was asked."""
    found = list[Any]()
    repeat, form = alike._Form.repeat, alike._form

    def noted(known: Any, *given: Any) -> Any:
        found.append(known)
        return repeat(known, *given)

    def tried(*given: Any) -> Any:
        before = len(found)
        made = form(*given)
        del found[before:]
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike._Form, "repeat", noted)
        patch.setattr(alike, "_form", tried)
        yield found


def arrays(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Any]:
    with torch_private.FakeTensorMode():
        return [torch.empty(shape, dtype=dtype) for shape in shapes]


def described(result: Any, given: list[Any]) -> Any:
    """Layouts, bytes, types, and the arrays that share memory, by their places."""
    found = list(alike._arrays([result]))
    memory = [alike._memory(one) for one in (*given, *found)]
    layouts = [(torch_private.layout(one), one.untyped_storage().nbytes()) for one in found]
    return layouts, [memory.index(one) for one in memory], alike.mapped(type, torch.Tensor, result)


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "new": lambda ask, x: ask(aten.mm.default, x, x),
    "view": lambda ask, x: ask(aten.t.default, x),
    "view of a view": lambda ask, x: ask(aten.view.default, ask(aten.slice.Tensor, x, 0, 1, 3), [-1]),
    "several views": lambda ask, x: ask(aten.split.Tensor, x, 3),
    "several": lambda ask, x: ask(aten.var_mean.correction, x, [1]),
    "copy": lambda ask, x: ask(aten.reshape.default, ask(aten.t.default, x), [-1]),
    "list": lambda ask, x: ask(aten.cat.default, [x, x]),
    "expanded": lambda ask, x: ask(aten.expand.default, ask(aten.slice.Tensor, x, 0, 0, 1), [4, 4]),
    "gaps": lambda ask, x: ask(aten.new_empty_strided.default, x, [2, 2], [8, 2]),
    "other type": lambda ask, x: ask(torch_private.to_copy.default, x, dtype=torch.float64),
    "settings by name": lambda ask, x: ask(aten.sum.dim_IntList, x, [0], keepdim=True),
    "nothing": lambda ask, x: ask(aten._foreach_add_.List, [x], [x]),
    "complex": lambda ask, x: ask(aten.complex.default, x, x),
}


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_result_is_that_of_pytorch(name: str) -> None:
    x, y = arrays((4, 4), (4, 4))
    known = Known.of(x.fake_mode)
    first = CASES[name](lambda operator, *given, **named: known.result(operator, given, named), x)
    with repetitions() as repeated:
        again = CASES[name](lambda operator, *given, **named: known.result(operator, given, named), y)
    with x.fake_mode:
        wanted = CASES[name](lambda operator, *given, **named: operator(*given, **named), y)
    assert repeated and described(first, [x]) == described(again, [y]) == described(wanted, [y])


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    found = torch.library.Library("stepgraph", "FRAGMENT")
    yield found
    found._destroy()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1).view(2, 2, 4)[1],
        lambda x: (y := x + 1, y.view(-1)),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: x,
    ],
    ids=["inside of new memory", "shared new memory", "conjugate", "negative", "argument"],
)
def test_what_cannot_be_repeated_is_asked_each_time(function: Callable[..., Any], library: Any) -> None:
    count = "Tensor, Tensor" if isinstance(function(torch.ones(4, 4)), tuple) else "Tensor"
    library.define(f"strange(Tensor x) -> ({count})")
    library.impl("strange", function, "CompositeExplicitAutograd")
    x, y = arrays((4, 4), (4, 4))
    operator = torch.ops.stepgraph.strange.default
    known = Known.of(x.fake_mode)
    with repetitions() as repeated:
        known.result(operator, (x,), {})
        again = known.result(operator, (y,), {})
    with x.fake_mode:
        assert described(again, [y]) == described(operator(y), [y])
    assert not repeated


@pytest.mark.parametrize(
    ("operator", "given"),
    [(aten.add_.Tensor, (1,)), (aten.sym_size.int, (0,)), (aten.t_.default, ())],
    ids=["in place", "number", "other strides in place"],
)
def test_changes_and_numbers_are_asked_each_time(operator: Any, given: tuple[int, ...]) -> None:
    x, y = arrays((3, 4), (3, 4))
    known = Known.of(x.fake_mode)
    with repetitions() as repeated:
        known.result(operator, (x, *given), {})
        found = known.result(operator, (y, *given), {})
    assert not repeated and (found is y or found == 3)


def test_operators_of_others_are_asked_each_time() -> None:
    library = torch.library.Library("stepgraph_test_alike", "DEF")
    library.define("varying(Tensor x) -> Tensor")
    sizes = iter((1, 2))
    library.impl("varying", lambda x: x.new_empty(next(sizes)), "CompositeExplicitAutograd")
    (x,) = arrays((3,))
    known = Known.of(x.fake_mode)
    found = [known.result(torch.ops.stepgraph_test_alike.varying.default, (x,), {}).shape for _ in range(2)]
    assert found == [(1,), (2,)]
    library._destroy()


def test_arguments_that_share_memory_are_no_others() -> None:
    """A view of the first argument stays one if both arguments are the same array."""
    x, y = arrays((3,), (3,))
    known = Known.of(x.fake_mode)
    for given in ((x, y), (x, x), (y, x)):
        with x.fake_mode:
            wanted = described(aten.view_as.default(*given), list(given))
        assert described(known.result(aten.view_as.default, given, {}), list(given)) == wanted


@pytest.mark.parametrize("kind", ["default type", "inference mode"])
def test_settings_of_the_process_are_distinguished(kind: str) -> None:
    (x,) = arrays((3,))
    known = Known.of(x.fake_mode)

    def ask() -> Any:
        found = known.result(aten.full.default, ([2], 1.0), {})
        return found.dtype, found.is_inference()

    before = ask()
    if kind == "default type":
        torch.set_default_dtype(torch.float64)
        try:
            assert ask() == (torch.float64, False)
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        with torch.inference_mode():
            assert ask() == (torch.float32, True) == ask()
    assert ask() == before == (torch.float32, False)


def test_new_operators_that_are_alike_are_asked_for_once() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for node, array in zip((x, y), arrays((2, 3), (2, 3)), strict=True):
        set_fake(node, array)
    with repetitions() as repeated:
        turned = call(x, aten.t.default, (x,)), call(y, aten.t.default, (y,))
        sums = [call(one, aten.sum.dim_IntList, (one, [0]), keepdim=True) for one in turned]
        refresh(turned[0])
    assert len(repeated) == 3
    assert [storages(one) for one in turned] == [storages(x), storages(y)]
    assert [fake(one).shape for one in sums] == [(1, 2), (1, 2)] and storages(sums[0]) != storages(sums[1])


def test_what_is_known_ends_with_its_mode() -> None:
    x, y = arrays((3,), (3,))
    known = Known.of(x.fake_mode)
    assert known is Known.of(y.fake_mode)
    made = known.result(aten.add.Tensor, (x, y), {}), known.result(aten.add.Tensor, (y, x), {})
    mode, array = weakref.ref(x.fake_mode), weakref.ref(x)
    del x, y, made
    gc.collect()
    assert mode() is None and array() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_arrays_are_as_their_constructor_makes_them(dtype: torch.dtype) -> None:
    mode = torch_private.FakeTensorMode()
    mode._allow_unsafe_data_ptr_access = False
    meta = torch.empty((2, 3), dtype=dtype, device="meta")
    wanted = torch_private.FakeTensor(mode, meta, torch.device("cpu"))
    layout = torch_private.layout(wanted)
    made = [torch_private.snapshot(wanted), torch_private.another(wanted), torch_private.laid_out(layout, mode, None)]
    for one in made:
        assert vars(one) == vars(wanted) and type(one) is type(wanted)
        assert torch._C._dispatch_keys(one) == torch._C._dispatch_keys(wanted)
        assert torch_private.layout(one) == layout and not one.requires_grad
        with pytest.raises(RuntimeError, match="data pointer"):
            one.data_ptr()
