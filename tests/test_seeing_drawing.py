"""Pictures of graphs: what they contain, that nothing overlaps, that they stay quick."""

import time
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

import stepgraph as sg
from stepgraph import draw
from stepgraph.draw.placement import BEND, Edge, layered

SVG = "{http://www.w3.org/2000/svg}"


def _chain(length: int) -> sg.Graph:
    graph, x = sg.Graph(), sg.Tensor((4, 8), label="x")
    for _ in range(length):
        x = graph.node(sg.ActivationLayer.relu(), x)
    return graph


def _residual(blocks: int) -> sg.Graph:
    """Blocks of two layers with a way around them, then a loss."""
    graph, x = sg.Graph(), sg.Tensor((4, 8), label="x")
    for _ in range(blocks):
        inner = graph.node(sg.ActivationLayer.relu(), graph.node(sg.FullyConnectedLayer.create(8, 8), x))
        x = graph.node(sg.ArithmeticLayer.add(), x, inner)
    graph.node(sg.LossLayer.mean_squared_error(), x, loss_labels=sg.Tensor((4, 8), label="y"))
    return graph


def _drawn(graph: sg.Graph, **settings: object) -> ET.Element:
    return ET.fromstring(draw.svg(graph.nodes, **settings))


def _with_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [element for element in root.iter() if name in element.get("class", "").split()]


def test_every_layer_is_a_group_with_its_unique_name_and_every_edge_a_path():
    graph = _residual(2)
    root = _drawn(graph)
    names = draw.unique_names(node.layer for node in graph.nodes)
    assert [group.get("data-layer") for group in _with_class(root, "node")] == list(names.values())
    assert {group.get("data-input") for group in _with_class(root, "input")} == {"x", "y"}
    edges = {(path.get("data-from"), path.get("data-to")) for path in _with_class(root, "edge")}
    assert edges == {
        ("x", "FullyConnected1"), ("FullyConnected1", "Activation1"), ("Activation1", "Arithmetic1"),
        ("Arithmetic1", "FullyConnected2"), ("FullyConnected2", "Activation2"), ("Activation2", "Arithmetic2"),
        ("x", "Arithmetic1"), ("Arithmetic1", "Arithmetic2"), ("Arithmetic2", "Loss"), ("y", "Loss"),
    }  # fmt: skip


def test_names_are_unique_also_where_a_label_looks_like_a_numbered_one():
    layers = [sg.ActivationLayer.relu(label=label) for label in ("a", "a", "a1", "a", "b")]
    assert list(draw.unique_names(layers).values()) == ["a2", "a3", "a1", "a4", "b"]


def test_a_box_tells_which_of_its_kind_a_layer_is():
    text = draw.svg(_residual(1).nodes)
    for words in (
        "Activation ReLU · 4×8",
        "Arithmetic Add · 4×8",
        "FullyConnected · 4×8",
        "Loss Mean Squared Error · 1",
    ):
        assert words in text


def test_edges_are_stopped_where_no_gradient_flows():
    graph = _residual(1)
    inner = graph.nodes[1].results[0]
    root = _drawn(graph, stopped={inner})
    stopped = {(path.get("data-from"), path.get("data-to")) for path in _with_class(root, "stopped")}
    assert stopped == {("Activation", "Arithmetic"), ("y", "Loss")}


def test_labels_are_quoted_and_long_ones_shortened_with_the_whole_in_the_title():
    long = "encoder.block_of_attention.12." + "x" * 200 + ".output"
    graph, x = sg.Graph(), sg.Tensor((2, 3), label='<script>"&\x00')
    graph.node(sg.ActivationLayer.relu(label=long), x)
    root = _drawn(graph)
    (node,), (given,) = _with_class(root, "node"), _with_class(root, "input")
    assert node.get("data-layer") == long and long in node.findtext(f"{SVG}title")
    assert len(node.findtext(f"{SVG}text")) < 30 and node.findtext(f"{SVG}text").endswith(".output")
    assert given.get("data-input") == '<script>"&\\x00'
    assert "<script>" not in draw.svg(graph.nodes)


def test_a_picture_stands_alone():
    text = draw.svg(_residual(1).nodes)
    assert text.startswith("<svg ") and "viewBox" in text and "<script" not in text
    assert text.count("http") == 1  # the name of the format, nothing to fetch


def test_an_empty_graph_is_an_empty_picture():
    assert not _with_class(_drawn(sg.Graph()), "node")


def _overlaps(root: ET.Element) -> list[tuple[str | None, str | None]]:
    boxes: dict[float, list[tuple[float, float, str | None]]] = {}
    for group in [*_with_class(root, "node"), *_with_class(root, "input")]:
        rect = group.find(f"{SVG}rect")
        left, top, width = (float(rect.get(name)) for name in ("x", "y", "width"))
        boxes.setdefault(top, []).append((left, left + width, group.get("data-layer") or group.get("data-input")))
    return [(a[2], b[2]) for row in boxes.values() for a, b in pairwise(sorted(row)) if a[1] > b[0]]


@pytest.mark.parametrize("graph", [_chain(5), _residual(4)], ids=["chain", "residual"])
def test_boxes_do_not_overlap_and_stay_inside(graph: sg.Graph):
    root = _drawn(graph)
    assert not _overlaps(root)
    _, _, width, height = map(float, root.get("viewBox").split())
    for rect in root.iter(f"{SVG}rect"):
        left, top, wide, high = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        assert min(left, top) >= 0 and left + wide <= width and top + high <= height


def test_a_chain_is_a_straight_line():
    layout = layered([100.0] * 6, [Edge(i, i + 1) for i in range(5)], [False] * 6)
    assert layout.rank == list(range(6)) and len(set(layout.x)) == 1


def test_the_main_path_of_a_residual_graph_stays_straight_and_the_way_around_has_one_line():
    edges = [Edge(0, 1), Edge(1, 2), Edge(2, 3), Edge(3, 4), Edge(0, 4)]
    layout = layered([120.0, 80.0, 150.0, 60.0, 100.0], edges, [False] * 5)
    assert max(layout.x[:5]) - min(layout.x[:5]) < 1
    bends = layout.bends[Edge(0, 4)]
    assert len(bends) == 3 and len({layout.x[bend] for bend in bends}) == 1
    assert layout.x[bends[0]] - layout.x[2] >= 75 + BEND / 2  # beside the widest box it passes


def test_crossings_are_avoided_where_the_order_allows():
    # Two pairs whose readers were added the other way round.
    layout = layered([50.0] * 5, [Edge(0, 1), Edge(0, 2), Edge(2, 3), Edge(1, 4)], [False] * 5)
    assert (layout.x[1] < layout.x[2]) == (layout.x[4] < layout.x[3])


def test_an_input_stands_just_above_its_first_reader():
    edges = [Edge(0, 1), Edge(1, 2), Edge(2, 3), Edge(4, 3)]
    assert layered([50.0] * 5, edges, [True, False, False, False, True]).rank == [0, 1, 2, 3, 2]


def test_time_grows_no_faster_than_the_graph():
    """600 layers take a tenth of a second; a few seconds would be another order of growth, not a slow machine."""
    graph = _residual(200)
    started = time.perf_counter()
    draw.svg(graph.nodes)
    assert time.perf_counter() - started < 4


def test_many_long_edges_have_a_bound():
    """Layers that all read the first, and ways around one another: bends stay few."""
    count = 400
    chain = [Edge(i, i + 1) for i in range(count - 1)]
    star = [Edge(0, i) for i in range(2, count)]
    nested = [Edge(i, count - 1 - i) for i in range(1, count // 2 - 1)]
    layout = layered([50.0] * count, [*chain, *star, *nested], [False] * count)
    assert len(layout.x) < count + 21_000
