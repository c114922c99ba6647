"""The YOLO loss beyond the table: descriptor, gradients under rescoring, edge cases, and training with it."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stepgraph as sg
from stepgraph.errors import ArgumentError, DataError, DataTypeError, ShapeError
from stepgraph.layers.layer import Scope
from stepgraph.layers.loss import LossDescriptor, LossLayer, LossType
from stepgraph.layers.yolo import YOLOLossDescriptor, YOLOLossLayer
from stepgraph.tensors.buffers import TensorData
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import ReductionType
from tests.layers.cases_yolo import ANCHORS, differing, predicted_iou, scene, yolo

RAW = np.array(ANCHORS, np.float32)


def losses(layer: YOLOLossLayer, p: torch.Tensor, q: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
    return layer.forward(p, q, *w, scope=Scope({layer.anchor_boxes: layer.anchor_boxes.torch().to(p.dtype)}))


def slopes(layer: YOLOLossLayer, p: torch.Tensor, q: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
    leaf = p.detach().requires_grad_()
    return torch.autograd.grad(losses(layer, leaf, q, *w).sum(), leaf)[0]


def example(batch: int = 2, objects: int = 2, dtype: type = np.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """A prediction and labels for the three anchors and four classes."""
    generator = np.random.default_rng(4)
    labels = scene(batch, 3, 4, 3, 3, objects=objects)(generator)
    return torch.tensor(generator.standard_normal(labels.shape).astype(dtype)), torch.tensor(labels.astype(dtype))


class TestDescriptor:
    def test_defaults_are_those_of_the_original(self) -> None:
        d = YOLOLossDescriptor(ANCHORS)
        assert (d.anchor_boxes, d.anchor_box_count, d.should_rescore) == (ANCHORS, 3, True)
        assert (d.scale_spatial_position_loss, d.scale_spatial_size_loss) == (10, 10)
        assert (d.scale_no_object_confidence_loss, d.scale_object_confidence_loss, d.scale_class_loss) == (5, 100, 2)
        assert (d.minimum_iou_for_object_presence, d.maximum_iou_for_object_absence) == (0.7, 0.3)

    @pytest.mark.parametrize(
        "boxes",
        [
            RAW,
            RAW.tolist(),
            RAW.tobytes(),
            bytearray(RAW.tobytes()),
            memoryview(RAW),
            memoryview(b"." + RAW.tobytes())[1:],
            TensorData(RAW.copy()),
        ],
        ids=["array", "lists", "bytes", "bytearray", "memoryview", "odd address", "TensorData"],
    )
    @pytest.mark.parametrize("count", [0, 3])
    def test_boxes_in_every_form(self, boxes: Any, count: int) -> None:
        d = YOLOLossDescriptor(boxes, count)
        assert (d.anchor_boxes, d.anchor_box_count) == (tuple(map(tuple, RAW.tolist())), 3)
        assert hash(d) == hash(YOLOLossDescriptor(RAW.tolist()))

    def test_longer_memory_is_taken_up_to_the_count(self) -> None:
        assert YOLOLossDescriptor(RAW.tobytes() + b"...", 2).anchor_boxes == tuple(map(tuple, RAW[:2].tolist()))

    @pytest.mark.parametrize(
        ("boxes", "count", "error", "words"),
        [
            (RAW.tobytes(), 4, DataError, "anchor_boxes has 24 bytes, but 4 boxes need 32"),
            (b"1234567", 0, DataError, "anchor_boxes has 7 bytes, but 1 boxes need 8"),
            (b"", 0, ShapeError, "anchor_boxes is"),
            (RAW.tobytes() + b".", 0, DataError, "anchor_boxes has 25 bytes"),
            (ANCHORS, 2, ArgumentError, "anchor_box_count is 2, but there are 3 boxes"),
            (ANCHORS, -1, ArgumentError, "anchor_box_count is -1"),
            (ANCHORS, 3.0, ArgumentError, "anchor_box_count is 3.0"),
            (ANCHORS, True, ArgumentError, "anchor_box_count is True"),
            ([], 0, ShapeError, "anchor_boxes is []"),
            ([1.0, 2.0], 0, ShapeError, "pass pairs (width, height)"),
            ([(1.0, 2.0, 3.0)], 0, ShapeError, "pass pairs (width, height)"),
            ([(1.0, 2.0), (3.0,)], 0, ShapeError, "pass pairs (width, height)"),
            (None, 0, ShapeError, "anchor_boxes is None"),
            ([(1.0, 0.0)], 0, ArgumentError, "non-positive sizes: [[1.0, 0.0]]"),
            ([(1.0, math.nan)], 0, ArgumentError, "non-positive sizes"),
            ([(1.0, math.inf)], 0, ArgumentError, "non-positive sizes"),
        ],
    )
    def test_refused_boxes(self, boxes: Any, count: Any, error: type[Exception], words: str) -> None:
        with pytest.raises(error) as raised:
            YOLOLossDescriptor(boxes, count)
        assert words in str(raised.value)

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("should_rescore", 1),
            ("scale_spatial_position_loss", -1.0),
            ("scale_spatial_size_loss", math.nan),
            ("scale_no_object_confidence_loss", math.inf),
            ("scale_object_confidence_loss", "5"),
            ("scale_class_loss", True),
            ("minimum_iou_for_object_presence", 1.5),
            ("maximum_iou_for_object_absence", -0.1),
        ],
    )
    def test_refused_numbers(self, setting: str, value: Any) -> None:
        with pytest.raises(ArgumentError, match=f"{setting} is"):
            YOLOLossDescriptor(ANCHORS, **{setting: value})


class TestLayer:
    def test_is_a_loss_layer_that_sums(self) -> None:
        d = YOLOLossDescriptor(ANCHORS)
        layer = YOLOLossLayer(d)
        assert isinstance(layer, LossLayer)
        assert layer.is_loss
        assert layer.yolo_loss_descriptor is d
        assert isinstance(layer.descriptor, LossDescriptor)
        assert layer.descriptor.reduction_type is ReductionType.SUM
        assert (layer.label, YOLOLossLayer(d, label="boxes").label) == ("YOLOLoss", "boxes")

    def test_has_no_parameters_and_reads_its_boxes(self) -> None:
        layer = YOLOLossLayer.create(ANCHORS, weights=Tensor((2,), fill=1.0), scale_class_loss=1.0, label="boxes")
        assert layer.parameters == {}
        assert set(layer.constants) == {"weights", "anchor_boxes"}
        np.testing.assert_array_equal(layer.anchor_boxes.numpy(), RAW)
        assert (layer.label, layer.yolo_loss_descriptor.scale_class_loss) == ("boxes", 1)

    def test_takes_no_other_descriptor(self) -> None:
        with pytest.raises(DataTypeError, match="its yolo_loss_descriptor is LossDescriptor, not YOLOLossDescriptor"):
            YOLOLossLayer(LossDescriptor(LossType.HUBER))  # type: ignore[arg-type]

    def test_does_not_change(self) -> None:
        layer = YOLOLossLayer.create(ANCHORS)
        for name in ("descriptor", "yolo_loss_descriptor", "anchor_boxes", "weights"):
            with pytest.raises(sg.StateError, match=f"{name} cannot change"):
                setattr(layer, name, None)

    def test_half_precision_is_computed_in_single(self) -> None:
        layer = YOLOLossLayer.create(ANCHORS)
        source = TensorDescriptor((2, 27, 3, 3), "float16")
        assert layer.infer(source, TensorDescriptor((2, 27, 3, 3)))[0].data_type is sg.DataType.FLOAT16
        p, q = example(dtype=np.float32)
        half = p.half()
        assert torch.equal(losses(layer, half, q), losses(layer, half.float(), q).half())
        assert slopes(layer, half, q).dtype == torch.float16


class TestNumbers:
    def test_exact_prediction_costs_nothing(self) -> None:
        _, q = example()
        boxes = q.unflatten(1, (3, 9))
        p = torch.full_like(boxes, -40.0)
        found = boxes[:, :, 4:5] == 1
        anchors = torch.tensor(ANCHORS)[:, :, None, None].double()
        p[:, :, :2] = torch.logit(boxes[:, :, :2].clamp(0.01, 0.99))
        p[:, :, 2:4] = torch.log(boxes[:, :, 2:4] / anchors + 1e-5)
        p[:, :, 4:5] = torch.where(found, 40.0, -40.0)
        p[:, :, 5:] = 80 * boxes[:, :, 5:] - 40
        labels = boxes.clone()
        labels[:, :, :2] = boxes[:, :, :2].clamp(0.01, 0.99)
        layer = YOLOLossLayer.create(ANCHORS, maximum_iou_for_object_absence=0.01, should_rescore=False)
        # In cells with an object, anchors that are not responsible fit better than 0.01: nobody asks for their number.
        value = losses(layer, p.flatten(1, 2), labels.flatten(1, 2))
        assert value.abs().max().item() < 1e-9

    def test_image_without_objects_pays_for_confidence_only(self) -> None:
        p, q = example(objects=0)
        layer = YOLOLossLayer.create(ANCHORS)
        confidence = p.unflatten(1, (3, 9))[:, :, 4]
        wanted = 5 * torch.logaddexp(confidence, torch.zeros(1)).sum((1, 2, 3))
        torch.testing.assert_close(losses(layer, p, q), wanted)
        gradient = slopes(layer, p, q).unflatten(1, (3, 9))
        torch.testing.assert_close(gradient[:, :, 4], 5 * torch.sigmoid(confidence))
        assert not gradient[:, :, [0, 1, 2, 3, 5, 6, 7, 8]].any()

    def test_anchors_between_the_thresholds_are_left_alone(self) -> None:
        boxes = [(2.0, 2.0), (2.0, 1.0), (0.2, 0.2)]  # fits of 1, 0.5 and 0.01 to the true box
        q = torch.tensor([0.5, 0.5, 2.0, 2.0, 1.0, 1.0, 0.0]).repeat(3)[None, :, None, None]
        p = torch.randn(1, 21, 1, 1, generator=torch.Generator().manual_seed(0))
        best, between, bad = slopes(YOLOLossLayer.create(boxes), p, q).reshape(3, 7)
        assert best.ne(0).all()
        assert not between.any()
        assert bad[4] == 5 * torch.sigmoid(p[0, 18, 0, 0])
        assert not bad[[0, 1, 2, 3, 5, 6]].any()
        better = slopes(YOLOLossLayer.create(boxes, minimum_iou_for_object_presence=0.4), p, q).reshape(3, 7)
        assert better[1].ne(0).all()

    def test_label_needs_a_confidence_of_one(self) -> None:
        p, q = example()
        almost = q.clone().unflatten(1, (3, 9))
        almost[:, :, 4] *= 0.999
        gradient = slopes(YOLOLossLayer.create(ANCHORS), p, almost.flatten(1, 2)).unflatten(1, (3, 9))
        assert not gradient[:, :, [0, 1, 2, 3, 5, 6, 7, 8]].any()

    def test_confidence_is_pulled_to_the_overlap(self) -> None:
        q = torch.tensor([0.3, 0.6, 1.5, 0.8, 1.0, 1.0, 0.0]).double()
        p = torch.tensor([0.2, -0.4, 0.3, -0.5, 0.75, 0.1, 0.2]).double()
        target = predicted_iou(p.numpy(), q.numpy(), np.array([1.25, 1.5]))
        for should, wanted in ((True, target), (False, 1.0)):
            layer = YOLOLossLayer.create([(1.25, 1.5)], should_rescore=should)
            found = slopes(layer, p[None, :, None, None], q[None, :, None, None])[0, 4, 0, 0].item()
            assert found == pytest.approx(100 * (1 / (1 + math.exp(-0.75)) - wanted), rel=1e-12)
        assert 0 < target < 1

    @pytest.mark.parametrize("rescore", [False, True])
    def test_gradient_equals_central_differences_with_the_overlap_held(self, rescore: bool) -> None:
        d = YOLOLossDescriptor(ANCHORS, should_rescore=rescore)
        p, q = example(batch=1)
        found, base, step = slopes(YOLOLossLayer(d), p, q).numpy(), p.numpy(), 1e-6
        for index in np.ndindex(base.shape):
            sides = []
            for move in (step, -step):
                moved = base.copy()
                moved[index] += move
                sides.append(yolo(d)(moved, q.numpy(), anchor_boxes=RAW.astype(np.float64), frozen=base)[0])
            assert found[index] == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-6), index

    @pytest.mark.parametrize("rescore", [False, True])
    @pytest.mark.parametrize("size", [-200.0, -90.0, 90.0, 200.0])
    def test_extreme_predictions_stay_finite(self, size: float, rescore: bool) -> None:
        p, q = example(dtype=np.float32)
        sign = torch.where(torch.arange(p.shape[1]) % 2 == 0, 1.0, -1.0)[:, None, None]
        layer, extreme = YOLOLossLayer.create(ANCHORS, should_rescore=rescore), (p + 10).sign() * size * sign
        assert losses(layer, extreme, q).isfinite().all()
        assert slopes(layer, extreme, q).isfinite().all()

    def test_samples_do_not_see_each_other(self) -> None:
        p, q = example(batch=3)
        layer = YOLOLossLayer.create(ANCHORS)
        alone = torch.cat([losses(layer, p[i : i + 1], q[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(losses(layer, p, q), alone, rtol=1e-12, atol=0)


@st.composite
def drawn_problems(draw: st.DrawFn) -> tuple[YOLOLossDescriptor, np.ndarray, np.ndarray]:
    """Any legal descriptor, with a small prediction and labels for it."""
    side = st.floats(0.25, 5, width=32)
    boxes = draw(st.lists(st.tuples(side, side), min_size=1, max_size=4))
    scale, share = st.floats(0, 50), st.floats(0, 1)
    descriptor = YOLOLossDescriptor(
        boxes, len(boxes), draw(st.booleans()), *(draw(scale) for _ in range(5)), draw(share), draw(share)
    )
    extents = draw(st.tuples(st.integers(1, 2), st.just(len(boxes)), st.integers(0, 3), *[st.integers(1, 3)] * 2))
    make = draw(st.sampled_from([scene, differing]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    labels = make(*extents)(generator)
    return descriptor, generator.normal(0, draw(st.floats(0.1, 3)), labels.shape), labels


def agrees_with_the_reference(problem: tuple[YOLOLossDescriptor, np.ndarray, np.ndarray]) -> None:
    descriptor, p, q = problem
    layer, reference = YOLOLossLayer(descriptor), yolo(descriptor)
    anchors = np.array(descriptor.anchor_boxes)
    found = losses(layer, torch.tensor(p), torch.tensor(q))
    assert found.shape == layer.infer(TensorDescriptor(p.shape), TensorDescriptor(q.shape))[0].shape
    np.testing.assert_allclose(found.numpy(), reference(p, q, anchor_boxes=anchors), rtol=1e-9, atol=1e-9)
    way, step = np.random.default_rng(1).standard_normal(p.shape), 1e-6
    up, down = (reference(p + s * way, q, anchor_boxes=anchors, frozen=p).sum() for s in (step, -step))
    along = (slopes(layer, torch.tensor(p), torch.tensor(q)).numpy() * way).sum()
    assert along == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-4)


@given(drawn_problems())
@settings(max_examples=25, deadline=None)
def test_every_setting_gives_the_right_numbers(problem: tuple[YOLOLossDescriptor, np.ndarray, np.ndarray]) -> None:
    agrees_with_the_reference(problem)


@pytest.mark.deep
@given(drawn_problems())
@settings(max_examples=400, deadline=None)
def test_every_setting_gives_the_right_numbers_deep(
    problem: tuple[YOLOLossDescriptor, np.ndarray, np.ndarray],
) -> None:
    agrees_with_the_reference(problem)


class TestTraining:
    """A detector of one convolution, trained on four images."""

    def detector(self, *, node: bool = False, weights: sg.Tensor | None = None) -> tuple[sg.TrainingGraph, sg.Tensor]:
        sg.set_seed(3)
        images, labels = sg.Tensor.image(6, 6, 3, 4), sg.Tensor((4, 14, 3, 3))
        graph, layer = sg.Graph(), YOLOLossLayer.create([(1.0, 1.0), (2.0, 2.0)], weights=weights)
        head = sg.ConvolutionLayer.create(3, 14, 2, strides=2)
        boxes = graph.node(head, images)
        if node:
            graph.node(layer, boxes, loss_labels=[labels])
        training = sg.TrainingGraph([graph], None if node else layer, sg.AdamOptimizer(learning_rate=0.02))
        training.add_inputs({"image": images}, {"label": labels})
        training.compile(sg.Device.cpu())
        return training, head.weights

    def data(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        generator = np.random.default_rng(0)
        images = generator.standard_normal((4, 3, 6, 6)).astype(np.float32)
        return {"image": images}, {"label": scene(4, 2, 2, 3, 3, objects=1)(generator).astype(np.float32)}

    @pytest.mark.parametrize("node", [False, True], ids=["loss layer", "loss node"])
    def test_loss_of_every_image_falls(self, node: bool) -> None:
        training, _ = self.detector(node=node)
        history = [training.execute(*self.data()).loss for _ in range(60)]
        assert history[0].shape == (4,)
        assert (history[-1] < 0.6 * history[0]).all()

    def test_whole_step_equals_the_loss_and_gradient_of_the_function(self) -> None:
        training, weights = self.detector()
        before = weights.numpy().copy()
        inputs, labels = self.data()
        first = training.execute(inputs, labels).loss
        kernel = torch.tensor(before).reshape(14, 3, 2, 2).requires_grad_()
        p = torch.nn.functional.conv2d(torch.tensor(inputs["image"]), kernel, stride=2)
        layer = YOLOLossLayer.create([(1.0, 1.0), (2.0, 2.0)])
        value = losses(layer, p, torch.tensor(labels["label"]))
        np.testing.assert_allclose(first, value.detach().numpy(), rtol=1e-5)
        (slope,) = torch.autograd.grad(value.sum(), kernel)
        moved = weights.numpy().reshape(14, 3, 2, 2) - before.reshape(14, 3, 2, 2)
        np.testing.assert_allclose(moved, -0.02 * np.sign(slope.numpy()), rtol=1e-2)  # Adam's first step

    def test_smaller_batch_and_label_weights(self) -> None:
        inputs, labels = self.data()
        plain, _ = self.detector()
        weighted, _ = self.detector(weights=sg.Tensor((4,), data=np.array([1, 0, 2, 1], np.float32)))
        once, twice = plain.execute(inputs, labels).loss, weighted.execute(inputs, labels).loss
        np.testing.assert_allclose(twice, once * [1, 0, 2, 1], rtol=1e-6)
        fewer, _ = self.detector()
        np.testing.assert_allclose(fewer.execute(inputs, labels, batch_size=2).loss, once[:2], rtol=1e-5)
