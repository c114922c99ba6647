"""Merges products that share an operand: `x Aᵀ, x Bᵀ, x Cᵀ` are the columns of `x [A; B; C]ᵀ`.

Query, key and value of a self-attention are such products, and so are their gradients: with respect to the weights
`[g₁ g₂ g₃]ᵀ x`, to the source `[g₁ g₂ g₃] [A; B; C]`. One large product uses a GPU better than three small ones. The
numbers are the same up to the order of sums, so this applies to fused steps, not to the reference.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.program import call, fake, inherit, notes, remove_dead, writes
from stepgraph.system import torch_private

aten = torch.ops.aten
VIEWS = (aten.view.default, torch_private.unsafe_view.default, aten.detach.default, aten.alias.default)


@dataclass(frozen=True)
class _Family:
    """Products `x Wᵢᵀ (+ bᵢ)` of one source."""

    source: fx.Node
    weights: tuple[fx.Node, ...]
    joint: fx.Node  # [W₁; W₂; …]


def join_products(graph: fx.Graph) -> None:
    """Merges products in place. Operators keep their order as far as possible."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    products: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default) and not node.kwargs and _weights(node) is not None:
            again = notes(node).recomputed
            products[node.target, _viewed(node.args[-2]), fake(node).dtype, again].append(node)
    for members in products.values():
        weights = tuple(filter(None, map(_weights, members)))
        if len(set(weights)) == len(members) > 1:
            family = _join_forward(graph, members, weights, order)
            gradients = _join_weight_gradients(graph, family, order)
            if gradients is not None:
                _join_source_gradient(graph, family, *gradients, order)
    _sort(graph, order)
    remove_dead(graph)


def join_activations(graph: fx.Graph) -> None:
    """`relu(b + a Wᵀ)` as one cuBLAS operator, which writes the product only once."""
    for node in list(graph.nodes):
        product: Any = node.args[0] if node.target is aten.relu.default else None
        plain = product is not None and product.target is aten.addmm.default and not product.kwargs
        if plain and len(product.users) == 1 and fake(product.args[0]).ndim == 1:
            node.target, node.args = torch.ops.stepgraph.sum_and_relu.default, product.args
            graph.erase_node(product)


@torch.library.custom_op("stepgraph::sum_and_relu", mutates_args=())
def sum_and_relu(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`relu(c + a b)`; PyTorch's compiler would decompose its own operator for this."""
    return torch_private.addmm_activation(c, a, b)


@sum_and_relu.register_fake
def _(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(len(a), b.shape[1])


def _join_forward(
    graph: fx.Graph, members: Sequence[fx.Node], weights: tuple[fx.Node, ...], order: dict[fx.Node, int]
) -> _Family:
    first = members[0]
    with graph.inserting_before(first):
        joint = call(first, aten.cat.default, (list(weights),))
        turned = call(first, aten.t.default, (joint,))
        sums = [call(first, aten.cat.default, ([one.args[0] for one in members],))] if first.args[:-2] else []
        source: Any = first.args[-2]
        whole = call(first, first.target, (*sums, source, turned))
        parts = _split(whole, 1, [fake(one).shape[0] for one in weights])
    _replace(members, parts)
    _date(order, order[first], (joint, turned, *sums, whole, *parts))
    return _Family(source, weights, joint)


def _join_weight_gradients(
    graph: fx.Graph, family: _Family, order: dict[fx.Node, int]
) -> tuple[tuple[fx.Node, ...], fx.Node] | None:
    """The gradients `gᵢᵀ x` as one product; the `gᵢ` and `[g₁ g₂ …]`, if each weight has one."""
    shapes = {fake(one).shape for one in family.weights}
    members = {
        node.args[0].args[0]: node
        for node in _products_with(family.source, order)
        if node.args[0].target is aten.t.default and fake(node) is not None and fake(node).shape in shapes
    }
    if len(members) != len(family.weights):
        return None
    last = max(members.values(), key=order.__getitem__)
    attention = _attention(members)
    with graph.inserting_before(last):
        if attention is None:
            joint = call(last, aten.cat.default, (list(members), 1))
        else:
            members = dict(sorted(members.items(), key=lambda member: _place(member[0])))
            whole, rows = _write_together(graph, attention, order), len(fake(next(iter(members))))
            joint = call(last, aten.view.default, (whole, [rows, -1]))
        turned = call(last, aten.t.default, (joint,))
        whole = call(last, aten.mm.default, (turned, family.source))
        parts = _split(whole, 0, [fake(one).shape[1] for one in members])
    _date(order, order[last], (joint, turned, whole, *parts))
    _replace(list(members.values()), parts)
    return tuple(members), joint


def _products_with(source: fx.Node, order: dict[fx.Node, int]) -> list[Any]:
    """The products `… source`, in order."""
    found, views, shape = [], [_root(source)], fake(source).shape
    for view in views:  # grows meanwhile
        views += [user for user in view.users if user.target in VIEWS]
        if fake(view) is not None and fake(view).shape == shape:
            found += [user for user in view.users if user.target is aten.mm.default and user.args[1] is view]
    return sorted(found, key=order.__getitem__)


def _attention(gradients: Iterable[fx.Node]) -> fx.Node | None:
    """The operator that computes the gradients of query, key and value, if it is a single one and they are alike."""
    origins = [_origin(one) for one in gradients]
    # A gradient that was rotated or summed over shared heads is not the operator's own result.
    sources = {one.args[0] if one.target is operator.getitem else None for one in origins}
    (found,) = sources if len(sources) == 1 else (None,)
    is_attention = isinstance(found, fx.Node) and str(found.target) == "stepgraph.attend_gradients.default"
    alike = len({fake(one).shape for one in origins}) == 1
    return found if is_attention and alike and len(set(origins)) == 3 else None  # type: ignore[return-value]


def _write_together(graph: fx.Graph, attention: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """The same gradients adjacent in one array `[batch, steps, 3, heads, width]`."""
    with graph.inserting_before(attention):
        whole = call(attention, torch.ops.stepgraph.attend_joint_gradients.default, attention.args)
    _date(order, order[attention], [whole])
    for one in list(attention.users):
        with graph.inserting_before(one):
            part = call(one, aten.select.int, (whole, 2, one.args[1]))
            turned = call(one, aten.transpose.int, (part, 1, 2))
        _date(order, order[one], (part, turned))
        _replace([one], [turned])
    return whole


def _place(gradient: fx.Node) -> int:
    """The index of the operator's result that this is a view of."""
    return int(_origin(gradient).args[1])  # type: ignore[arg-type]


def _join_source_gradient(
    graph: fx.Graph, family: _Family, gradients: tuple[fx.Node, ...], joint: fx.Node, order: dict[fx.Node, int]
) -> None:
    """The sum of `gᵢ Wᵢ` as one product, if nothing else reads its parts."""
    products = {
        one: node
        for one in gradients
        for node in one.users
        if node.target is aten.mm.default and node.args[0] is one and node.args[1] in family.weights
    }
    if set(products) != set(gradients):
        return
    totals = {_total(node) for node in products.values()}
    (total,) = totals if len(totals) == 1 else (None,)
    terms = [] if total is None else list(_terms(total))
    if total is None or not set(products.values()) <= {_root(one) for one in terms}:
        return
    rest = [one for one in terms if _root(one) not in products.values()]
    weights = [products[one].args[1] for one in gradients]
    with graph.inserting_before(total):
        right = family.joint
        if weights != list(family.weights):
            right = call(total, aten.cat.default, (weights,))
            _date(order, order[family.joint], [right])
        new = call(total, aten.mm.default, (joint, right))
        made = [new, call(total, aten.view.default, (new, list(fake(total).shape)))]
        for one in rest:
            made.append(call(total, aten.add.Tensor, (made[-1], one)))
    _date(order, order[total], made)
    _replace([total], made[-1:])


def _weights(node: fx.Node) -> fx.Node | None:
    """The weights of a product with transposed weights."""
    right = node.args[-1]
    is_turned = isinstance(right, fx.Node) and right.target is aten.t.default
    return right.args[0] if is_turned else None  # type: ignore[union-attr, return-value]


def _viewed(node: Any) -> tuple[fx.Node, tuple[int, ...]]:
    """An array, whatever its name: its source and its shape."""
    return _root(node), tuple(fake(node).shape)


def _root(node: fx.Node) -> fx.Node:
    while node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _origin(node: fx.Node) -> fx.Node:
    while node.target in (*VIEWS, aten.transpose.int):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _total(node: fx.Node) -> fx.Node | None:
    """The last of the sums that a result, alone, contributes to."""
    total = None
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.add.Tensor and not user.kwargs:
            total = user
        elif user.target not in VIEWS:
            break
        node = user
    return total


def _terms(node: fx.Node) -> Iterable[fx.Node]:
    """The terms of a chain of sums."""
    for one in node.args:
        inner = _root(one)  # type: ignore[arg-type]
        if inner.target is aten.add.Tensor and not inner.kwargs and len(inner.users) == 1:
            yield from _terms(inner)
        else:
            yield one  # type: ignore[misc]


def _split(whole: fx.Node, axis: int, sizes: Sequence[int]) -> list[fx.Node]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        call(whole, aten.slice.Tensor, (whole, axis, start, start + size))
        for start, size in zip(starts, sizes, strict=True)
    ]


def _replace(olds: Sequence[fx.Node], news: Sequence[fx.Node]) -> None:
    for old, new in zip(olds, news, strict=True):
        inherit(new, old)
        old.replace_all_uses_with(new)


def _date(order: dict[fx.Node, int], place: int, nodes: Iterable[fx.Node]) -> None:
    order |= dict.fromkeys(nodes, place)


def _changed(node: fx.Node) -> list[fx.Node]:
    """The arrays that an operator writes into, through views."""
    return [_root(one) for one in writes(node)]


def _sort(graph: fx.Graph, order: dict[fx.Node, int]) -> None:
    """Sorts operators after what they read, and in-place changes after the readers of the old values."""
    nodes = list(graph.nodes)
    needs = {node: set(node.all_input_nodes) for node in nodes}
    for node in nodes:
        for user in {user for one in _changed(node) for user in one.users} - {node}:
            before, after = (user, node) if order[user] < order[node] else (node, user)
            needs[after].add(before)
    waiting = {node: len(needs[node]) for node in nodes}
    followers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        for one in needs[node]:
            followers[one].append(node)
    ready = [(order[node], i, node) for i, node in enumerate(nodes) if not waiting[node]]
    numbers = {node: i for i, node in enumerate(nodes)}
    heapq.heapify(ready)
    last = torch_private.root(graph)
    while ready:
        *_, node = heapq.heappop(ready)
        last.append(node)
        last = node
        for one in followers[node]:
            waiting[one] -= 1
            if not waiting[one]:
                heapq.heappush(ready, (order[one], numbers[one], one))
