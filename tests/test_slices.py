"""Which rank updates what: a function of parameters and the number of ranks."""

import math

import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import kernels
from stepgraph.compiler.ranks.shards import partial_nodes
from stepgraph.compiler.ranks.slices import BLOCK, BUCKET, Ownership, buckets, slices, traffic

# The parameters of GPT-2 with 124 million weights, in order.
WIDTH, WORDS = 768, 50257
LAYER = [(WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,)]
LAYER += [(4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)]
GPT2 = [(WORDS, WIDTH), (1024, WIDTH), *LAYER * 12, (WIDTH,), (WIDTH,)]


def tensors(shapes: list[tuple[int, ...]]) -> list[sg.Tensor]:
    return [sg.Tensor(shape) for shape in shapes]


def loads(parameters: list[sg.Tensor], world: int, whole: bool = False) -> list[int]:
    found = slices(parameters, lambda one: not (whole and len(one.shape) == 2), world)
    return [sum(found[one][rank].size for one in parameters) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 7, 64])
def test_slices_cover_every_element_once_and_begin_at_blocks(world: int) -> None:
    parameters = tensors([(5,), (BLOCK,), (BLOCK + 1,), (64, BLOCK), (3, 5 * BLOCK, 7)])
    found = slices(parameters, lambda one: len(one.shape) != 3, world)
    for tensor in parameters:
        full = sorted(one for one in found[tensor] if one.size)
        stops = [0, *(one.stop for one in full)]
        assert stops[-1] == math.prod(tensor.shape) and [one.start for one in full] == stops[:-1]
        assert all(one.start % BLOCK == 0 for one in found[tensor] if one.size)
    assert sum(one.size > 0 for one in found[parameters[4]]) == 1  # it cannot be cut


@pytest.mark.parametrize("world, most", [(2, 1.001), (8, 1.001), (64, 1.01), (1024, 1.05)])
def test_no_rank_has_much_more_than_its_share(world: int, most: float) -> None:
    parameters = tensors(GPT2)
    found = loads(parameters, world)
    assert sum(found) == sum(math.prod(shape) for shape in GPT2) == 124_439_808
    assert max(found) * world <= most * sum(found)


@pytest.mark.parametrize("shape", [(65, 65), (100,), (3, BLOCK + 1)])
def test_parameters_of_few_blocks_are_balanced_among_each_other(shape: tuple[int, ...]) -> None:
    found = loads(tensors([shape] * 60), 4)
    assert max(found) <= 1.1 * sum(found) / 4


def test_whole_matrices_are_spread_by_size() -> None:
    parameters = tensors(LAYER * 12)
    found = loads(parameters, 4, whole=True)
    assert max(found) <= 1.05 * sum(found) / 4


@pytest.mark.parametrize(
    "optimizer, cut",
    [
        (sg.AdamWOptimizer(0.1), [True, True]),
        (sg.SGDOptimizer(0.1, clip_norm=1.0), [True, True]),
        (sg.MuonOptimizer(0.1), [False, True]),
        (
            sg.SGDOptimizer(sg.OptimizerDescriptor(0.1, gradient_clipping_type=sg.GradientClippingType.BY_NORM)),
            [False, False],
        ),
    ],
)
def test_rules_that_need_a_whole_parameter(optimizer: sg.Optimizer, cut: list[bool]) -> None:
    matrix, bias = sg.Tensor((4, 4)), sg.Tensor((4,))
    assert [optimizer.cuts(optimizer.slots_of(one, ["x"])) for one in (matrix, bias)] == cut


RULES = [
    sg.SGDOptimizer(0.1),
    sg.SGDOptimizer(0.1, momentum=0.9, weight_decay=0.1),
    sg.SGDOptimizer(0.1, momentum=0.9, nesterov=True),
    sg.AdamOptimizer(0.01, clip_value=0.5),
    sg.AdamOptimizer(0.01, amsgrad=True),
    sg.AdamWOptimizer(0.01, weight_decay=0.1),
    sg.RMSPropOptimizer(0.01, momentum=0.9, weight_decay=0.1),
    sg.RMSPropOptimizer(0.01),
    sg.LionOptimizer(0.01, weight_decay=0.1),
]


@pytest.mark.parametrize("optimizer", RULES, ids=lambda one: one.rule)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_are_updated_to_the_bits_of_the_whole(optimizer: sg.Optimizer, dtype: torch.dtype) -> None:
    """Large enough for two threads, with an end that does not fill a vector."""
    count, numbers = 20 * BLOCK + 77, torch.tensor(optimizer.rows()[0], dtype=torch.float64)
    arrays = [torch.rand(count, dtype=dtype) for _ in range(2 + len(optimizer.slots))]

    def update(parameter: torch.Tensor, gradient: torch.Tensor, *state: torch.Tensor) -> None:
        given = kernels.Update([parameter], [gradient], [[one] for one in state], numbers, [], None, None)
        kernels.update(optimizer, given, lambda: kernels.named(optimizer, numbers))

    whole, cut = [one.clone() for one in arrays], [one.clone() for one in arrays]
    update(*whole)
    for start, stop in slices([sg.Tensor((count,))], lambda _: True, 3).popitem()[1]:
        pieces = [one[start:stop].clone() for one in cut[1:]]
        update(cut[0][start:stop], *pieces)
        for one, piece in zip(cut[1:], pieces, strict=True):
            one[start:stop] = piece
    assert all(map(torch.equal, whole, cut))


def test_pieces_are_views() -> None:
    matrix, bias = tensors([(3, BLOCK), (5,)])
    second = Ownership(1, 2, "", slices([matrix, bias], lambda _: True, 2))
    array = torch.zeros(3, BLOCK)
    second.piece(array, matrix).fill_(1)
    assert array.sum() == BLOCK and array[2].all()
    assert second.shape(bias) == (5,) and second.owned == {matrix, bias}
    first = Ownership(0, 2, "", second.slices)
    assert first.owned == {matrix} and first.shape(bias) == (0,)


def test_buckets_have_one_type_and_about_one_size() -> None:
    parameters = [*tensors([(BUCKET // 8,)] * 3), sg.Tensor((4,), "float64"), *tensors([(1,)])]
    found = buckets(parameters)
    assert found == ((parameters[0], parameters[1]), (parameters[2], parameters[4]), (parameters[3],))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_as_many_bytes_as_an_ordinary_reduction(world: int) -> None:
    parameters = tensors(GPT2)
    found = slices(parameters, lambda _: True, world)
    bytes_of_all = 4 * 124_439_808
    sent = [traffic(found, buckets(parameters), 8, world, rank).total for rank in range(world)]
    assert sent == pytest.approx([2 * (world - 1) / world * bytes_of_all] * world, rel=0.01)


def test_other_worlds_send_several_partial_sums() -> None:
    parameters = tensors([(6, BLOCK)])
    found = slices(parameters, lambda _: True, 3)
    for rank in range(3):
        sums = len(partial_nodes(8, rank, 3))
        sent = traffic(found, buckets(parameters), 8, 3, rank)
        assert (sent.gradients, sent.parameters) == (sums * 4 * BLOCK * 4, 2 * 2 * BLOCK * 4)
        assert traffic(found, buckets(parameters), 8, 3, rank, order=False).gradients == 2 * 2 * BLOCK * 4
