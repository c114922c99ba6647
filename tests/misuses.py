"""The table of misuses: what a user may get wrong, and the words that must come back.

A row's `misuse` gets a `Kit`, a small training graph; `before` is what the program had done rightly by then. The rows
about compiled graphs stand in `tests/test_errors.py`, which walks them all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

import stepgraph as sg

CPU = sg.Device.cpu()
HERE = r"\((?:tests/)?(?:misuses|test_errors)\.py:\d+\)"  # the line of the user's program, here a row's
EITHER = (sg.ArgumentError, sg.DataTypeError)
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)
NAN = math.nan
STEP = ({"x": X}, {"y": Y})


class Kit:
    """`x → batch normalization → fully connected → mean squared error`, trained by Adam, always the same numbers."""

    def __init__(self) -> None:
        generator = np.random.default_rng(2)
        self.x, self.y, self.graph = T(4, 3, label="x"), T(4, 2, label="y"), sg.Graph()
        weights, biases = (sg.Tensor(s, data=generator.normal(size=s).astype("f")) for s in ((2, 3), (2,)))
        self.norm = sg.BatchNormalizationLayer.create(3, label="norm")
        self.dense = sg.FullyConnectedLayer(weights, biases, sg.ConvolutionDescriptor(1, 3, 2), label="dense")
        self.hidden = self.graph.node(self.norm, self.x)
        self.out = self.graph.node(self.dense, self.hidden)
        self.out.label = "out"
        loss = sg.LossLayer.mean_squared_error(label="mse")
        self.training = sg.TrainingGraph([self.graph], loss, sg.AdamOptimizer(learning_rate=0.1))
        self.training.add_inputs({"x": self.x}, {"y": self.y})
        self.training.add_outputs({"out": self.out})

    @cached_property
    def t(self) -> sg.TrainingGraph:
        """The training graph, compiled."""
        self.training.compile(CPU)
        return self.training

    def bind(self, **options: Any) -> None:
        self.t.bind_and_write_data({"x": X, "y": Y}, {"x": self.x, "y": self.y}, CPU, **options)

    def forward(self) -> None:
        self.bind()
        self.t.execute_forward()

    def numbers(self, *, again: bool = False, phases: bool = False) -> list[Any]:
        """Everything that training changes, after two steps; if wanted, compiled again and with a step in phases."""
        losses = [self.t.execute(*STEP).loss]
        if again:
            self.training.compile()
        losses.append(self.t.execute(*STEP).loss)
        if phases:
            self.forward()
            self.t.execute_gradient()
            self.t.execute_optimizer_update()
        tensors = [*self.dense.parameters.values(), *self.norm.parameters.values(), *self.norm.statistics.values()]
        state = [bytes(data.bytes) for tensor in tensors for data in tensor.optimizer_data]
        return [losses, self.t.optimizer.time_step, [one.numpy().tobytes() for one in tensors], state]


@dataclass(frozen=True)
class Row:
    """One misuse, the class of its error and a pattern that its message must match."""

    name: str
    misuse: Callable[[Kit], object]
    error: type[Exception] | tuple[type[Exception], ...]
    words: str
    before: Callable[[Kit], object] | None = None


def T(*shape: int, kind: str = "float32", **settings: Any) -> sg.Tensor:
    return sg.Tensor(shape, kind, **settings)


def node(layer: Any, *sources: Any, **settings: Any) -> Callable[[Kit], object]:
    """Adding a node; `layer` is a function, so that the row's own line makes the layer."""
    return lambda k: sg.Graph().node(layer(), *sources, **settings)


def read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


class Broken(sg.Layer):
    """A layer whose forward gives whatever it is told."""

    gives: Any = None

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> Any:
        return x @ x if self.gives == "failure" else self.gives


R = Row
RELU, MSE = sg.ActivationLayer.relu, sg.LossLayer.mean_squared_error
D, S, A = sg.OptimizerDescriptor, sg.SGDOptimizer, sg.AdamOptimizer
FC, CD = sg.FullyConnectedLayer, sg.ConvolutionDescriptor
C, P, N = sg.ConvolutionLayer, sg.PoolingLayer, sg.BatchNormalizationLayer
W = T(2, fill=1.0, label="w")

TENSORS = [
    R("shape a number", lambda k: sg.Tensor(4), (*EITHER, sg.ShapeError), "4"),
    R("shape nothing", lambda k: sg.Tensor(None), (*EITHER, sg.ShapeError), "None"),
    R("data short", lambda k: T(2, 2, data=np.zeros(3, "f"), label="w"), sg.DataError, "'w'.*12 bytes.*16 bytes"),
    R("bytes short", lambda k: T(2, 2, data=bytes(8), label="w"), sg.DataError, "'w'.*8 bytes.*16 bytes"),
    R("data float64", lambda k: T(2, data=np.zeros(2), label="w"), sg.DataTypeError, "'w'.*float64.*float32"),
    R(
        "transposed",
        lambda k: T(2, 3, data=np.zeros((3, 2), "f"), label="w"),
        sg.ShapeError,
        r"'w'.*\(3, 2\).*\(2, 3\)",
    ),
    R("ragged data", lambda k: T(2, 2, data=[[1, 2], [3]], label="w"), sg.DataTypeError, "'w'.*list"),
    R("None in data", lambda k: T(2, data=[None, 1], label="w"), sg.DataTypeError, "'w'.*list"),
    R("text as data", lambda k: T(2, data="ab", label="w"), sg.DataTypeError, "'w'.*str"),
    R("data too large", lambda k: T(2, kind="uint8", data=[1, 300], label="w"), EITHER, "'w'.*uint8"),
    R("fill text", lambda k: T(2, fill="a", label="w"), EITHER, "'w'.*fill.*'a'"),
    R("fill NaN", lambda k: T(2, kind="int32", fill=NAN, label="w"), EITHER, "'w'.*fill.*nan.*int32"),
    R("fill too large", lambda k: T(2, kind="uint8", fill=300, label="w"), EITHER, "'w'.*fill.*300.*uint8"),
    R("data and fill", lambda k: T(2, data=[1, 2], fill=1.0, label="w"), sg.ArgumentError, "'w'.*data.*fill"),
    R("random name", lambda k: T(2, random="xavier"), EITHER, "'xavier'.*RandomInitializerType"),
    R("random int32", lambda k: T(2, kind="int32", random=sg.RandomInitializerType.XAVIER), EITHER, "XAVIER.*int32"),
    R("no data yet", lambda k: T(2, label="w").numpy(), sg.StateError, "'w'.*no data"),
    R("read too much", lambda k: W.copy_data_from_device_memory(bytearray(99), 12), sg.DataError, "'w'.*12 bytes.*8"),
    R("read a negative count", lambda k: W.copy_data_from_device_memory(bytearray(8), -4), EITHER, "'w'.*-4"),
    R("room too small", lambda k: W.copy_data_from_device_memory(bytearray(4)), sg.DataError, "'w'.*8 bytes.*4"),
    R("read into bytes", lambda k: W.copy_data_from_device_memory(bytes(8)), sg.DataError, "'w'.*bytes"),
    R("read into a list", lambda k: W.copy_data_from_device_memory([0, 0]), sg.DataError, "'w'.*list"),
    R(
        "read into read-only memory",
        lambda k: W.copy_data_from_device_memory(read_only(np.zeros(2, "f"))),
        sg.DataError,
        "'w'.*read-only",
    ),
    R(
        "bind nowhere",
        lambda k: T(2, label="w").bind_and_write_data([1, 2], None),
        sg.DeviceError,
        "'w'.*no device|None",
    ),
    R("bind short", lambda k: T(2).bind_and_write_data(bytearray(4), CPU), sg.DataError, "4 bytes.*8 bytes"),
    R("parameter of an array", lambda k: sg.TensorParameter(X), sg.DataTypeError, "TensorParameter.*ndarray.*Tensor"),
    R("memory of None", lambda k: sg.TensorData(None), sg.DataTypeError, "TensorData.*None"),
    R("memory with gaps", lambda k: sg.TensorData(X[:, 0]), sg.DataError, "TensorData.*contiguous"),
    R("seed a float", lambda k: sg.set_seed(1.5), EITHER, r"set_seed.*1\.5"),
]

OPTIMIZERS = [
    R("rate NaN", lambda k: D(NAN), sg.ArgumentError, "learning_rate.*nan"),
    R(
        "rate beyond float32",
        lambda k: S(1e39),
        sg.ArgumentError,
        "learning_rate is 1e.39, beyond .* float32",
    ),
    R("rate infinite", lambda k: S(math.inf), sg.ArgumentError, "learning_rate.*inf"),
    R("rate text", lambda k: A("0.1"), sg.DataTypeError, r"learning_rate.*'0\.1'"),
    R("no rate", lambda k: S(), sg.ArgumentError, "SGDOptimizer.*learning rate"),
    R("two rates", lambda k: A(0.1, descriptor=D(0.1)), sg.ArgumentError, "AdamOptimizer.*learning_rate"),
    R("rate of others", lambda k: A(lr=0.1), sg.ArgumentError, "AdamOptimizer.*lr(.|\n)*learning_rate"),
    R("rate negative", lambda k: A(-0.1), sg.ArgumentError, "AdamOptimizer.*learning_rate is -0.1"),
    R("two clippings", lambda k: A(0.1, clip_norm=1.0, clip_value=1.0), sg.ArgumentError, "clip_norm and clip_value"),
    R("bounds crossed", lambda k: D(0.1, gradient_clip_min=2, gradient_clip_max=-3), sg.ArgumentError, "2.*-3"),
    R("clipping by name", lambda k: D(0.1, gradient_clipping_type="norm"), EITHER, "gradient_clipping_type.*'norm'"),
    R("regularizing by name", lambda k: D(0.1, regularization_type="l2"), EITHER, "regularization_type.*'l2'"),
    R("norm negative", lambda k: D(0.1, maximum_clipping_norm=-1.0), sg.ArgumentError, "maximum_clipping_norm.*-1"),
    R("clipping text", lambda k: D(0.1, applies_gradient_clipping="no"), EITHER, "applies_gradient_clipping.*'no'"),
    R("momentum NaN", lambda k: S(0.1, momentum_scale=NAN), sg.ArgumentError, "momentum_scale.*nan"),
    R("momentum later", lambda k: setattr(S(0.1), "momentum_scale", 0.9), sg.StateError, "momentum"),
    R("rate NaN later", lambda k: setattr(k.t.optimizer, "learning_rate", NAN), sg.ArgumentError, "learning_rate.*nan"),
    R("rate text later", lambda k: setattr(k.t.optimizer, "learning_rate", "a"), EITHER, "learning_rate.*'a'"),
    R("bound crossed later", lambda k: setattr(k.t.optimizer, "gradient_clip_min", 5.0), sg.ArgumentError, "5.*1"),
    R(
        "clipping type later",
        lambda k: setattr(k.t.optimizer, "gradient_clipping_type", 1),
        sg.StateError,
        "clipping_type",
    ),
    R("beta of 1", lambda k: A(0.1, beta1=1.0), sg.ArgumentError, r"beta1.*1\.0"),
    R("beta negative", lambda k: setattr(k.t.optimizer, "beta2", -0.1), sg.ArgumentError, r"beta2.*-0\.1"),
    R("epsilon negative", lambda k: A(0.1, epsilon=-1.0), sg.ArgumentError, "epsilon.*-1"),
    R("time step 0", lambda k: setattr(k.t.optimizer, "time_step", 0), sg.ArgumentError, "time_step.*0"),
    R("time step and a half", lambda k: A(0.1, time_step=1.5), EITHER, r"time_step.*1\.5"),
]

DENSE = rf"FullyConnectedLayer 'dense' {HERE}.*"
CONVOLUTION, POOL, NORM = (rf"{name} 'a' {HERE}.*" for name in ("ConvolutionLayer", "PoolingLayer", "BatchNormal.*"))
VALID = sg.PaddingPolicy.VALID

LAYERS = [
    R("dense: inputs", node(lambda: FC.create(3, 2, label="dense"), T(4, 5)), sg.ShapeError, DENSE + "5.*3"),
    R(
        "dense: integers",
        node(lambda: FC.create(3, 2, label="dense"), T(4, 3, kind="int64")),
        sg.DataTypeError,
        DENSE + "int64",
    ),
    R(
        "dense: float64",
        node(lambda: FC.create(3, 2, label="dense"), T(4, 3, kind="float64")),
        sg.DataTypeError,
        DENSE + "float64",
    ),
    R("dense: weights", lambda k: FC(T(2, 2), None, CD(1, 3, 4), label="dense"), sg.ShapeError, DENSE + "4.*12"),
    R(
        "dense: weights array",
        lambda k: FC(X, None, CD(1, 3, 4), label="dense"),
        sg.DataTypeError,
        DENSE + "weights.*ndarray",
    ),
    R("dense: text", lambda k: FC.create("a", 4), (*EITHER, sg.ShapeError), "'a'"),
    R(
        "convolution: channels",
        node(lambda: C.create(3, 4, 3, label="a"), T(2, 5, 8, 8)),
        sg.ShapeError,
        CONVOLUTION + "5.*3",
    ),
    R(
        "convolution: rank",
        node(lambda: C.create(3, 4, 3, label="a"), T(2, 3)),
        sg.ShapeError,
        CONVOLUTION + "2 dimensions.*4",
    ),
    R(
        "convolution: room",
        node(lambda: C.create(3, 4, 9, padding_policy=VALID, label="a"), T(2, 3, 4, 4)),
        sg.ShapeError,
        CONVOLUTION + "9 × 9.*4 × 4",
    ),
    R(
        "convolution: float16",
        node(lambda: C.create(3, 4, 3, label="a"), T(2, 3, 8, 8, kind="float16")),
        sg.DataTypeError,
        CONVOLUTION + "float16",
    ),
    R(
        "convolution: weights",
        lambda k: C(T(4, 3, 3, 3), None, CD(3, 5, 4), label="a"),
        sg.ShapeError,
        CONVOLUTION + "108.*180",
    ),
    R(
        "convolution: biases",
        lambda k: C(T(4, 3, 1, 1), T(3), CD(1, 3, 4), label="a"),
        sg.ShapeError,
        CONVOLUTION + "3.*4",
    ),
    R(
        "convolution: no weights",
        lambda k: C(None, None, CD(1, 3, 4), label="a"),
        sg.DataTypeError,
        CONVOLUTION + "weights",
    ),
    R(
        "convolution: descriptor",
        lambda k: C(T(1), None, None, label="a"),
        EITHER,
        CONVOLUTION + "descriptor",
    ),
    R("kernel 0", lambda k: CD(0, 3, 4), sg.ArgumentError, "ConvolutionDescriptor.*kernel_sizes.*0"),
    R("kernel None", lambda k: CD(None, 3, 4), EITHER, "ConvolutionDescriptor.*kernel_sizes.*None"),
    R("groups", lambda k: CD(3, 3, 4, group_count=2), sg.ArgumentError, "2 groups.*3.*4"),
    R("padding by name", lambda k: CD(3, 3, 4, padding_policy="same"), EITHER, "padding_policy.*'same'.*PaddingPolicy"),
    R("pooling by name", lambda k: sg.PoolingDescriptor("max", 2), EITHER, "'max'.*PoolingType"),
    R("pooling: descriptor", lambda k: P("max", label="a"), EITHER, POOL + "descriptor"),
    R("pooling: rank", node(lambda: P.max(2, label="a"), T(2, 3)), sg.ShapeError, POOL + "2 dimensions.*4"),
    R("pooling: room", node(lambda: P.max(9, label="a"), T(2, 3, 4, 4)), sg.ShapeError, POOL + "9 × 9.*4 × 4"),
    R("norm: channels", node(lambda: N.create(4, label="a"), T(2, 3)), sg.ShapeError, NORM + "4 channels.*3"),
    R("norm: counts", lambda k: N(4, T(3), T(4), label="a"), sg.ShapeError, NORM + "mean.*3.*4"),
    R("norm: no mean", lambda k: N(4, None, None, label="a"), sg.DataTypeError, NORM + "mean"),
    R("norm: momentum", lambda k: N.create(4, momentum=1.5, label="a"), sg.ArgumentError, NORM + r"momentum.*1\.5"),
    R("norm: epsilon", lambda k: N.create(4, variance_epsilon=NAN, label="a"), sg.ArgumentError, NORM + "epsilon.*nan"),
    R("dropout: all", lambda k: sg.DropoutLayer(1.0, label="a"), sg.ArgumentError, rf"'a' {HERE}.*rate.*1\.0"),
    R("dropout: NaN", lambda k: sg.DropoutLayer(NAN, label="a"), sg.ArgumentError, rf"'a' {HERE}.*rate.*nan"),
    R("dropout: text", lambda k: sg.DropoutLayer("a"), EITHER, f"Dropout.*{HERE}.*rate.*'a'"),
    R("softmax: dimension", node(sg.SoftmaxLayer.softmax, T(4)), sg.ShapeError, "Softmax.*dimension 1.*1 dimension"),
    R("softmax: negative", lambda k: sg.SoftmaxLayer.softmax(-1), sg.ArgumentError, f"Softmax.*{HERE}.*-1"),
    R("add: one source", node(sg.ArithmeticLayer.add, T(2)), sg.ShapeError, "Add.*2 sources.*1"),
    R("add: shapes", node(sg.ArithmeticLayer.add, T(2, 3), T(2, 4)), sg.ShapeError, r"\[2, 3\].*\[2, 4\]"),
    R("activation by name", lambda k: sg.ActivationDescriptor("relu"), EITHER, "'relu'.*ActivationType"),
    R("activation: descriptor", lambda k: sg.ActivationLayer("relu"), EITHER, f"{HERE}.*descriptor.*(str|relu)"),
    R("activation: NaN", lambda k: sg.ActivationLayer.leaky_relu(NAN), sg.ArgumentError, "ReLU.*nan"),
    R("activation: integers", node(sg.ActivationLayer.relu, T(2, kind="int32")), sg.DataTypeError, "int32.*floating"),
    R("loss: reduction", lambda k: sg.LossLayer.huber(sg.ReductionType.MAX), sg.ArgumentError, "LossDescriptor.*MAX"),
    R("loss: delta", lambda k: sg.LossLayer.huber(delta=0.0), sg.ArgumentError, "delta.*0"),
    R("loss: smoothing", lambda k: sg.LossLayer.softmax_cross_entropy(label_smoothing=1.5), EITHER, r"smoothing.*1\.5"),
    R(
        "loss: weights",
        lambda k: sg.LossLayer.hinge(weights=X),
        sg.DataTypeError,
        f"LossLayer.*{HERE}.*weights.*ndarray",
    ),
    R("loss: labels", node(sg.LossLayer.hinge, T(2, 3), loss_labels=T(2, 4)), sg.ShapeError, r"\[2, 4\].*\[2, 3\]"),
    R("loss: no labels", node(sg.LossLayer.hinge, T(2, 3)), (sg.ShapeError, sg.StateError), "LossLayer.*labels"),
    R("reshape: count", lambda k: k.graph.reshape((7,), T(2, 3)), sg.ShapeError, rf"Reshape.*{HERE}.*6.*\[7\]"),
    R("reshape: a number", lambda k: k.graph.reshape(6, T(2, 3)), (*EITHER, sg.ShapeError), "[Rr]eshape.*6"),
    R("reshape: exchanged", lambda k: k.graph.reshape(T(2, 3), (6,)), (*EITHER, sg.ShapeError), "[Rr]eshape.*Tensor"),
    R("transpose: rank", lambda k: k.graph.transpose((0,), T(2, 3)), sg.ShapeError, f"Transpose.*{HERE}.*1.*2"),
    R("concatenate: dimension", lambda k: k.graph.concatenate([T(2), T(2)], 3), sg.ShapeError, f"{HERE}.*3.*1"),
    R(
        "concatenate: types",
        lambda k: k.graph.concatenate([T(2), T(2, kind="int32")], 0),
        sg.DataTypeError,
        "float32.*int32",
    ),
    R("concatenate: a tensor", lambda k: k.graph.concatenate(T(2, 3)), EITHER, "[Cc]oncat.*Tensor"),
    R("split: sum", lambda k: k.graph.split(T(2, 3), None, [1, 5], dimension=1), sg.ShapeError, f"Split.*{HERE}.*6.*3"),
    R("split: both", lambda k: k.graph.split(T(2, 3), 3, [1, 2], dimension=1), sg.ArgumentError, "Split.*3.*1, 2"),
    R("select: floats", lambda k: k.graph.select([T(2), T(2)], T(2)), sg.DataTypeError, "Selection.*float32.*boolean"),
    R("gather: floats", lambda k: k.graph.gather(0, T(2), T(2)), sg.DataTypeError, f"Gather.*{HERE}.*float32.*int"),
    R(
        "scatter: rows",
        lambda k: k.graph.scatter(0, T(2, 3), T(3, kind="int32"), T(4, 3)),
        sg.ShapeError,
        r"\[3\].*\[2, 3\]",
    ),
    R("layer changed", lambda k: setattr(k.dense, "descriptor", None), sg.StateError, DENSE + "descriptor"),
    R(
        "own layer fails",
        node(lambda: Broken("failure", label="b"), T(2, 3)),
        sg.ShapeError,
        rf"Broken 'b' {HERE}.*\[2, 3\]",
    ),
    R(
        "own layer gives a number",
        node(lambda: Broken(torch.tensor(1.0), label="b"), T(2, 3)),
        sg.ShapeError,
        rf"Broken 'b' {HERE}.*\[\].*reshape\(1\)",
    ),
    *(
        R(
            f"own layer gives {value!r}",
            node(lambda value=value: Broken(value), T(2, 3)),
            sg.DataTypeError,
            f"Broken.*{HERE}",
        )
        for value in (5, None, ())
    ),
]

NODES = [
    R("node: torch module", lambda k: k.graph.node(torch.nn.Linear(3, 2), k.x), sg.DataTypeError, "node.*Linear"),
    R("node: class", lambda k: k.graph.node(sg.DropoutLayer, k.x), sg.DataTypeError, "node.*not a layer"),
    R("node: array", lambda k: k.graph.node(RELU(), X), sg.DataTypeError, f"Activation.*{HERE}.*ndarray"),
    R("node: no source", lambda k: k.graph.node(RELU()), sg.ShapeError, f"Activation.*{HERE}.*0.*1"),
    R("node: two sources", lambda k: k.graph.node(RELU(), k.x, k.x), sg.ShapeError, f"Activation.*{HERE}.*2.*1"),
    R("node: label array", lambda k: k.graph.node(MSE(), k.out, loss_labels=Y), sg.DataTypeError, "LossLayer.*ndarray"),
    R("node: label number", lambda k: k.graph.node(MSE(), k.out, loss_labels=3), sg.DataTypeError, "LossLayer.*int"),
    R(
        "node: half frozen",
        lambda k: k.graph.node(k.dense, k.x, disable_update=True),
        sg.StateError,
        "'dense'.*True.*False",
    ),
]

MAKING = [
    R("graphs: a graph", lambda k: sg.TrainingGraph(k.graph), sg.DataTypeError, "TrainingGraph.*Graph"),
    R(
        "graphs: layers",
        lambda k: sg.InferenceGraph([k.dense]),
        sg.DataTypeError,
        "InferenceGraph.*FullyConnectedLayer",
    ),
    R(
        "loss: function",
        lambda k: sg.TrainingGraph([k.graph], torch.nn.functional.mse_loss),
        sg.DataTypeError,
        "function",
    ),
    R("optimizer: class", lambda k: sg.TrainingGraph([], None, sg.SGDOptimizer), sg.DataTypeError, "optimizer.*type"),
    R("optimizer: base", lambda k: sg.TrainingGraph([], None, sg.Optimizer(0.1)), sg.DataTypeError, "Optimizer"),
]
