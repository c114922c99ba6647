"""Misuse is answered by the named class with the named words, in one format, and nothing is half done."""

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from tests.misuses import (
    CPU,
    EITHER,
    HERE,
    LAYERS,
    MAKING,
    MSE,
    NODES,
    OPTIMIZERS,
    STEP,
    TENSORS,
    Kit,
    R,
    Row,
    T,
    X,
    Y,
    read_only,
)

CLASSES = {
    sg.ArgumentError: ValueError,
    sg.ShapeError: ValueError,
    sg.DataTypeError: TypeError,
    sg.DataError: ValueError,
    sg.UnknownNameError: KeyError,
    sg.StateError: RuntimeError,
    sg.DeviceError: RuntimeError,
    sg.ExecutionError: RuntimeError,
    sg.CheckpointError: ValueError,
    sg.RunError: ValueError,
    sg.StorageError: OSError,
    sg.MemoryLimitError: MemoryError,
    sg.NumericsError: FloatingPointError,
}
INFERENCE = sg.ExecutionOptions.FORWARD_FOR_INFERENCE
LINK = sg.GraphCompilationOptions.LINK_GRAPHS


def step(*data: Any, **options: Any) -> Callable[[Kit], object]:
    """A whole step, with other data or options than the right ones."""
    return lambda k: k.t.execute(*(data or STEP), **options)


def out(destination: Any) -> Callable[[Kit], object]:
    """A whole step that writes its output there."""
    return lambda k: k.t.execute(*STEP, outputs_data={"out": destination})


def compiling(labels: Any = None, inputs: Any = None) -> Callable[[Kit], object]:
    """The kit's graph in another training graph, compiled with other labels and further inputs."""

    def misuse(k: Kit) -> None:
        training = sg.TrainingGraph([k.graph], MSE(label="mine"), sg.SGDOptimizer(0.1))
        training.add_inputs({"x": k.x, **(inputs or {})}, labels)
        training.compile(CPU)

    return misuse


DECLARING = [
    R("inputs: list", lambda k: k.t.add_inputs([k.x]), sg.DataTypeError, "input.*list.*dict"),
    R("inputs: array", lambda k: k.t.add_inputs({"a": X}), sg.DataTypeError, "'a'.*ndarray.*Tensor"),
    R("inputs: name taken", lambda k: k.t.add_inputs({"x": T(1)}), sg.StateError, r"'x'.*\[4, 3\]"),
    R("inputs: half right", lambda k: k.training.add_inputs({"a": T(1)}, {"b": 5}), sg.DataTypeError, "'b'.*int"),
    R("inputs: unread", compiling(labels={"y": T(4, 2)}, inputs={"a": T(1)}), sg.UnknownNameError, r"'a'.*\[1\]"),
    R("outputs: tensor", lambda k: k.t.add_outputs(k.out), sg.DataTypeError, "output.*Tensor.*dict"),
    R("outputs: foreign", lambda k: k.t.add_outputs({"a": T(1)}), sg.UnknownNameError, "'a'.*"),
    R("stop: a tensor", lambda k: k.t.stop_gradient(k.out), sg.DataTypeError, "stop_gradient.*Tensor"),
    R("stop: names", lambda k: k.t.stop_gradient(["out"]), sg.DataTypeError, "stop_gradient.*str"),
    R(
        "train: a tensor",
        lambda k: k.t.set_training_tensor_parameters([k.x]),
        sg.DataTypeError,
        "Tensor.*TensorParameter",
    ),
    R(
        "train: a layer's own",
        lambda k: k.t.set_training_tensor_parameters([sg.TensorParameter(k.dense.weights)]),
        sg.ArgumentError,
        r"\[2, 3\].*layer",
    ),
    R(
        "train: no data",
        lambda k: k.t.set_training_tensor_parameters([sg.TensorParameter(k.x)]),
        (sg.StateError, sg.DataError),
        "'x'.*no data",
    ),
    R("bind: unknown", lambda k: k.t.bind_and_write_data({"a": X}, {"x": k.x}, CPU), sg.UnknownNameError, "'a'.*'x'"),
    R(
        "bind: short",
        lambda k: k.t.bind_and_write_data({"x": X[:1]}, {"x": k.x}, CPU),
        sg.DataError,
        "'x'.*12.*48 bytes",
    ),
    R("bind: nowhere", lambda k: k.t.bind_and_write_data({"x": X}, {"x": k.x}, None), sg.DeviceError, "device|None"),
    R("bind: array", lambda k: k.t.bind_and_write_data({"x": X}, {"x": X}, CPU), sg.DataTypeError, "'x'.*ndarray"),
    R("bind: no names", lambda k: k.t.bind_and_write_data(X, {"x": k.x}, CPU), sg.DataTypeError, "ndarray.*dict"),
    R("bind: batch size", lambda k: k.bind(batch_size=-1), EITHER, "batch_size.*-1"),
]

COMPILING = [
    R("compile: no device", lambda k: k.training.compile(None), sg.DeviceError, r"TrainingGraph\.compile.*device"),
    R("compile: no engine", lambda k: k.training.compile(sg.Device.ane()), sg.DeviceError, "compile.*device"),
    R("compile: text", lambda k: k.training.compile("warp"), sg.DataTypeError, "'warp' is not a device"),
    R(
        "compile: no layers",
        lambda k: sg.InferenceGraph([sg.Graph()]).compile(CPU),
        sg.StateError,
        "InferenceGraph.*no layers",
    ),
    R("compile: options", lambda k: k.t.compile(CPU, "debug"), EITHER, "options.*'debug'"),
    R("compile: other options", lambda k: k.t.compile(CPU, INFERENCE), EITHER, "options.*ExecutionOptions"),
    R("compile: no labels", compiling(), sg.StateError, f"LossLayer 'mine' {HERE}.*labels"),
    R("compile: labels", compiling(labels={"y": T(4, 5)}), sg.ShapeError, rf"'mine' {HERE}.*\[4, 5\].*\[4, 2\]"),
    R("compile: constant", lambda k: k.t.compile(CPU, input_tensors={"x": k.x}), sg.DataError, "'x'.*no data"),
    R(
        "compile: constant short",
        lambda k: k.t.compile(CPU, input_tensors={"x": k.x}, input_tensors_data={"x": X[:1]}),
        sg.DataError,
        "'x'.*12 bytes.*48 bytes",
    ),
    R("compile: constant array", lambda k: k.t.compile(CPU, input_tensors={"x": X}), sg.DataTypeError, "'x'.*ndarray"),
    R("link: not compiled", lambda k: k.training.link([]), sg.StateError, "link.*not compiled"),
    R("link: no option", lambda k: k.t.link([]), sg.StateError, "link.*LINK_GRAPHS"),
    R(
        "optimizer: too early",
        lambda k: k.training.compile_optimizer(sg.SGDOptimizer(1)),
        sg.StateError,
        "not compiled",
    ),
    R("optimizer: a number", lambda k: k.t.compile_optimizer(0.1), sg.DataTypeError, "optimizer.*float"),
    R("early", lambda k: k.training.execute(*STEP), sg.StateError, r"TrainingGraph\.execute.*not compiled"),
    R("synchronize early", lambda k: k.training.synchronize_updates(), sg.StateError, "synchronize.*not compiled"),
]
if not torch.accelerator.is_available():
    COMPILING.append(R("compile: no GPU", lambda k: k.training.compile(sg.Device.gpu()), sg.DeviceError, "device"))

EXECUTING = [
    R("input short", step({"x": X[:2]}, {"y": Y}), sg.DataError, "'x'.*24 bytes.*48 bytes"),
    R("input bytes short", step({"x": X.tobytes()[:20]}, {"y": Y}), sg.DataError, "'x'.*20 bytes.*48 bytes"),
    R("input float64", step({"x": X.astype(float)}, {"y": Y}), sg.DataTypeError, "'x'.*float64.*float32"),
    R("input transposed", step({"x": X.T}, {"y": Y}), sg.ShapeError, r"'x'.*\(3, 4\).*\(4, 3\)"),
    R("input empty", step({"x": X[:0]}, {"y": Y}), sg.DataError, "'x'.*0 bytes.*48 bytes"),
    R("input unknown", step({"a": X}, {"y": Y}), sg.UnknownNameError, "'a'.*'x'"),
    R("input missing", step({}, {"y": Y}), sg.DataError, r"'x'.*\[4, 3\]"),
    R("input text", step({"x": "abc"}, {"y": Y}), sg.DataTypeError, "'x'.*str"),
    R(
        "input without data",
        step({"x": T(4, 3, label="a")}, {"y": Y}),
        (sg.DataError, sg.DataTypeError),
        "'x'.*'a'.*no data",
    ),
    R("inputs an array", step(X, Y), sg.DataTypeError, "inputs.*ndarray.*dict"),
    R("labels missing", step({"x": X}), sg.DataError, r"'y'.*\[4, 2\]"),
    R("labels unknown", step({"x": X}, {"a": Y}), sg.UnknownNameError, "'a'.*loss labels.*'y'"),
    R("labels short", step({"x": X}, {"y": Y[:3]}), sg.DataError, "'y'.*24 bytes.*32 bytes"),
    R("batch size negative", step(batch_size=-1), EITHER, "batch_size.*-1"),
    R("batch size broken", step(batch_size=2.5), EITHER, r"batch_size.*2\.5"),
    R("batch size above", step(batch_size=5), sg.DataError, "'x'.*48 bytes.*60 bytes"),
    R("options by name", step(options="sync"), EITHER, "options.*'sync'"),
    R("options of compile", step(options=LINK), EITHER, "options.*GraphCompilationOptions"),
    R("completion no function", step(completion="print"), sg.DataTypeError, "completion.*str"),
    R("output unknown", step(outputs_data={"a": Y.copy()}), sg.UnknownNameError, "'a'.*'out'"),
    R("output read-only", out(read_only(np.zeros((4, 2), "f"))), sg.DataError, "'out'.*read-only"),
    R("output read-only view", out(memoryview(bytes(32))), sg.DataError, "'out'.*read-only"),
    R("output bytes", out(bytes(32)), sg.DataError, "'out'.*bytes"),
    R("output short", out(np.zeros((3, 2), "f")), sg.DataError, "'out'.*24 bytes.*32 bytes"),
    R("output short bytes", out(bytearray(8)), sg.DataError, "'out'.*8 bytes.*32 bytes"),
    R("output float64", out(np.zeros((4, 2))), sg.DataTypeError, "'out'.*float64.*float32"),
    R("output transposed", out(np.zeros((2, 4), "f")), sg.ShapeError, r"'out'.*\(2, 4\).*\(4, 2\)"),
    R("output nothing", out(None), (sg.DataError, sg.DataTypeError), "'out'.*None"),
]

PHASES = [
    R("forward without data", lambda k: k.t.execute_forward(), sg.DataError, r"'x'.*\[4, 3\]"),
    R("gradient first", lambda k: k.t.execute_gradient(), sg.StateError, "execute_gradient.*forward"),
    R("update first", lambda k: k.t.execute_optimizer_update(), sg.StateError, "execute_optimizer_update.*gradients"),
    R(
        "gradient after inference",
        lambda k: k.t.execute_gradient(),
        sg.StateError,
        "execute_gradient.*forward",
        before=lambda k: (k.bind(), k.t.execute_forward(options=INFERENCE)),
    ),
    R(
        "gradient after a step",
        lambda k: k.t.execute_gradient(),
        sg.StateError,
        "forward",
        before=lambda k: k.t.execute(*STEP),
    ),
    R("other batch size", lambda k: k.t.execute_gradient(3), EITHER, "batch_size.*3.*4", before=Kit.forward),
    R("gradient for nobody", lambda k: k.t.allocate_user_gradient(T(1)), sg.UnknownNameError, r"\[1\].*result"),
    R(
        "gradient for an array",
        lambda k: k.t.allocate_user_gradient(X),
        sg.DataTypeError,
        "allocate_user_gradient.*ndarray",
    ),
    R("gradient of an array", lambda k: k.t.gradient_tensor(X), sg.DataTypeError, "gradient_tensor.*ndarray"),
    R("state of a stranger", lambda k: k.t.bind_optimizer_data([X, X], k.x), sg.UnknownNameError, "'x'.*train"),
    R(
        "state of an array",
        lambda k: k.t.bind_optimizer_data([X, X], X),
        sg.DataTypeError,
        "bind_optimizer_data.*ndarray",
    ),
    R(
        "state too little",
        lambda k: k.t.bind_optimizer_data([np.zeros((2, 3), "f")], k.dense.weights),
        (sg.ArgumentError, sg.DataError),
        "1 .*momentum, velocity",
    ),
    R(
        "state short",
        lambda k: k.t.bind_optimizer_data([bytearray(24), bytearray(8)], k.dense.weights),
        sg.DataError,
        "8 bytes.*24 bytes",
    ),
]

COMPILED_AGAIN = {  # afterwards, to see that they left nothing behind
    *("inputs: half right", "outputs: foreign", "stop: names", "train: no data"),
    *("compile: options", "compile: constant", "optimizer: a number"),
}
ON_GRAPHS = [*NODES, *DECLARING, *COMPILING, *EXECUTING, *PHASES]
ROWS = [*TENSORS, *OPTIMIZERS, *LAYERS, *MAKING, *ON_GRAPHS]
FORMAT = re.compile(r"[^\n]+: [^\n]*[^\n.]\.\n(    \S[^\n]*\n)*Fix: [^\n]*[^\n.]\.")


def each(rows: list[Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


@cache
def outcome(row: Row) -> tuple[Exception | None, Kit]:
    """The error of a row's misuse, and the kit afterwards."""
    kit = Kit()
    if row.before is not None:
        row.before(kit)
    try:
        row.misuse(kit)
    except Exception as error:
        return error, kit
    return None, kit


@cache
def twin(before: Callable[[Kit], object] | None, **how: bool) -> list[Any]:
    """The numbers of a kit that nobody misused."""
    kit = Kit()
    if before is not None:
        before(kit)
    return kit.numbers(**how)


def test_the_table_is_long_and_its_names_are_unique() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 50


@each(ROWS)
def test_misuse_raises_the_class_with_the_words(row: Row) -> None:
    error, _ = outcome(row)
    assert error is not None, "it was accepted"
    assert isinstance(error, row.error), f"{type(error).__name__}: {error}"
    assert isinstance(error, sg.StepgraphError)
    assert re.search(row.words, str(error), re.DOTALL), f"{row.words} is not in\n{error}"


@each(ROWS)
def test_messages_keep_the_format(row: Row) -> None:
    error, _ = outcome(row)
    if not isinstance(error, sg.StepgraphError):
        pytest.skip("its class is wrong, which another test tells")
    assert FORMAT.fullmatch(str(error)), str(error)
    facts = str(error).splitlines()[1:-1]
    column = 4 + max((len(name) for name in error.facts), default=0) + 3
    assert [line[column - 3 : column] + line[column:].strip() for line in facts] == [
        f"   {value}" for value in error.facts.values()
    ]


@each([*ON_GRAPHS, *(row for row in OPTIMIZERS if "later" in row.name)])
def test_a_misused_graph_trains_as_if_nothing_had_happened(row: Row) -> None:
    error, kit = outcome(row)
    if error is None:
        pytest.skip("it was accepted, which another test tells")
    how = {"again": row.name in COMPILED_AGAIN, "phases": row in PHASES or row.name.startswith("bind")}
    assert kit.numbers(**how) == twin(row.before, **how)


@pytest.mark.parametrize("compiled", [False, True], ids=["first", "again"])
def test_a_compilation_that_fails_late_leaves_the_graph_as_it_was(compiled: bool) -> None:
    kit = Kit()
    graph = kit.t if compiled else kit.training
    kit.dense.weights.bind_optimizer_data([bytearray(24)])  # Adam needs two
    before = [graph.device, graph.executables, graph.memory_plan]
    with pytest.raises(sg.DataError, match=r"1 optimizer buffers were bound.*2 \(momentum, velocity\)"):
        graph.compile(CPU, sg.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS)
    assert [graph.device, graph.executables, graph.memory_plan] == before
    assert ("not compiled" in str(graph)) != compiled
    kit.dense.weights.bind_optimizer_data([bytearray(24), bytearray(24)])
    assert kit.numbers() == twin(None)


@pytest.mark.parametrize("error", CLASSES)
def test_every_class_is_the_builtin_one_would_catch(error: type[sg.StepgraphError]) -> None:
    assert issubclass(error, CLASSES[error])
    with pytest.raises(CLASSES[error], match=r"^place: problem\.\n    some fact   1\n    b           two\nFix: it\.$"):
        raise error("place", "problem", fix="it", some_fact=1, b="two")


def test_every_error_class_stands_in_the_table() -> None:
    public = [
        value
        for value in [getattr(sg, name) for name in dir(sg)]
        if inspect.isclass(value) and issubclass(value, sg.StepgraphError)
    ]
    assert set(public) == {*CLASSES, sg.StepgraphError}


def test_messages_name_the_very_line_that_made_the_layer() -> None:
    line = inspect.currentframe().f_lineno + 1
    layer = sg.FullyConnectedLayer.create(3, 2, label="dense")
    with pytest.raises(sg.ShapeError, match=rf"^FullyConnectedLayer 'dense' \(.*test_errors\.py:{line}\): "):
        sg.Graph().node(layer, T(4, 5))


@pytest.mark.parametrize("labels", [[0, 1, 2, 0], [0, -1, 1, 0], [0, -100, 1, 0]], ids=str)
def test_class_numbers_out_of_range_are_refused_and_change_nothing(labels: list[int]) -> None:
    kit, classes = Kit(), T(4, kind="int64", label="classes")
    training = sg.TrainingGraph([kit.graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": kit.x}, {"classes": classes})
    training.compile(CPU)
    tensors = [*kit.norm.statistics.values(), *kit.norm.parameters.values(), *kit.dense.parameters.values()]
    before = [tensor.numpy().tobytes() for tensor in tensors]
    with pytest.raises(sg.StepgraphError, match=r"out of|class"):
        training.execute({"x": X}, {"classes": np.array(labels)})
    assert [tensor.numpy().tobytes() for tensor in tensors] == before
    assert training.optimizer.time_step == 1


@pytest.mark.parametrize("indices", [np.array([0, 7]), np.array([[0, 7, 0]])], ids=["slices", "elements"])
def test_indices_out_of_range_are_an_error_of_the_data(indices: np.ndarray) -> None:
    graph, x, places = sg.Graph(), T(4, 3), T(*indices.shape, kind="int64")
    graph.gather(0, x, places)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x, "places": places})
    inference.compile(CPU)
    with pytest.raises(sg.DataError, match=r"row \d(, position 1)? holds the index 7, but Gather takes 0 to 3"):
        inference.execute({"x": X, "places": indices})


@pytest.mark.parametrize(
    ("shapes", "words"), [([(2, 6)], "3.*4"), ([(2, 6), (4, 3)], rf"Reshape.*{HERE}.*3.*4")], ids=["result", "between"]
)
def test_a_batch_size_that_a_layer_rules_out_is_refused(shapes: list, words: str) -> None:
    graph, x = sg.Graph(), T(4, 3)
    last = x
    for shape in shapes:
        last = graph.reshape(shape, last)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(CPU)
    with pytest.raises((sg.ShapeError, sg.ArgumentError), match=words):
        inference.execute({"x": X}, batch_size=3)
    assert inference.execute({"x": X}).result.numpy().tolist() == X.reshape(shapes[-1]).tolist()


@pytest.mark.parametrize(
    "memory",
    [
        np.zeros((4, 2), "f")[::-1],
        np.zeros((4, 2), ">f4"),
        np.zeros((4, 4), "f")[:, ::2],
        np.zeros((5, 4), "f")[:, ::2],
        np.zeros((2, 4), "f").T,
        torch.zeros(2, 4).T,
        memoryview(bytearray(33))[1:],
    ],
    ids=["reversed", "big endian", "gaps", "long with gaps", "columns", "torch columns", "odd address"],
)
def test_outputs_arrive_or_are_refused_but_never_get_lost(memory: Any) -> None:
    kit = Kit()
    try:
        kit.t.execute(*STEP, outputs_data={"out": memory})
    except sg.DataError:
        assert kit.numbers() == twin(None)
        return
    found = np.frombuffer(memory, np.float32).reshape(4, 2) if isinstance(memory, memoryview) else np.asarray(memory)
    assert found[:4].tolist() == kit.out.numpy().tolist()


@pytest.mark.parametrize(
    ("shape", "fix"),
    [((64, 16, 14, 14), r"reshape the source to \[64, 3136\]"), ((64, 128), "make it take 128 inputs")],
)
def test_a_fully_connected_layer_names_the_fix_that_can_work(shape: tuple[int, ...], fix: str) -> None:
    with pytest.raises(sg.ShapeError, match=f"Fix: {fix}."):
        sg.Graph().node(sg.FullyConnectedLayer.create(3136, 10), T(*shape))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_compiled_graph_says_how_to_copy_it(copied: Callable[[object], object]) -> None:
    x = sg.Tensor((2, 3))
    graph = sg.Graph()
    graph.node(sg.ActivationLayer.relu(), x)
    inference = sg.InferenceGraph([graph])
    copy.deepcopy(inference)  # nothing is compiled yet
    inference.compile(sg.Device.cpu())
    with pytest.raises(sg.StateError, match=r"cannot be copied or pickled[\s\S]*sg.save"):
        copied(inference)
