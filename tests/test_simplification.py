"""Simplifications of recorded operators."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.passes.simplification import simplify
from stepgraph.compiler.program import operators, remove_dead, storage


def test_a_sum_of_one_summand_each_is_the_summand() -> None:
    def step(one: torch.Tensor, several: torch.Tensor) -> list[torch.Tensor]:
        return [one.sum([0], keepdim=True) * 2, several.sum([0], keepdim=True), one.sum([0], dtype=torch.float64)]

    given = torch.tensor([[1.0, 2.0]]), torch.ones(3, 2)
    traced = make_fx(step, tracing_mode="fake")(*given)
    simplify(traced)
    traced.recompile()
    assert len(traced.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)) == 2
    assert len(operators(traced.graph)) == 3
    for found, expected in zip(traced(*given), step(*given), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_views_of_a_summand_are_known_as_such() -> None:
    """Otherwise the memory of the summand could be reused while a view of it is still read."""

    def step(one: torch.Tensor) -> list[torch.Tensor]:
        made = one * 2
        return [made.sum([0], keepdim=True).view(2).view(2, 1) + 1, made + 1]

    traced = make_fx(step, tracing_mode="fake")(torch.tensor([[1.0, 2.0]]))
    simplify(traced)
    made, first, second = operators(traced.graph)[:3]
    assert first.args[0] is made and second.args[0] is first
    assert storage(first) == storage(second) == storage(made)


def test_arrays_keep_their_shapes() -> None:
    """One that stays between calls would have another shape in the next call."""

    def step(one: torch.Tensor) -> list[torch.Tensor]:
        made = (one * 2).squeeze_(0)
        return [made.unsqueeze_(1) + 1, made.t_() + 1, (one + 1).resize_(1)]

    given = torch.tensor([[1.0, 2.0]])
    traced = make_fx(step, tracing_mode="fake")(given)
    simplify(traced)
    traced.recompile()
    names = [str(node.target) for node in operators(traced.graph)]
    assert [name for name in names if "_." in name] == ["aten.resize_.default"]
    for found, expected in zip(traced(given), step(given), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_nothing_reads_is_removed_as_by_pytorch() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        x.view(-1).add_(1)  # nothing reads the sum, but the next product
        (x * 3).sum().neg()
        return [x * 2]

    own, theirs = (make_fx(step, tracing_mode="fake")(torch.ones(2), torch.ones(2)).graph for _ in range(2))
    remove_dead(own)
    theirs.eliminate_dead_code()
    assert str(own) == str(theirs) and len(operators(own)) == 3
