"""Bad programs: nothing is raised through the face, nothing crashes, nothing changes."""

import itertools
import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.mlc.names import CLASSES
from stepgraph.mlc.tables.enumerations import ENUMERATIONS
from tests.mlc.arguments import arguments, instance
from tests.mlc.kit import CPU, Kit, M, X, Y, data, tensor


class Broken:
    """An object that fails whatever is asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("broken")

    __len__ = __iter__ = __index__ = __float__ = __eq__ = __bool__ = __repr__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


GARBAGE: list[Any] = [
    *(None, -1, 2**70, 0.5, float("nan"), "text", b"", object(), Broken(), True),
    *([], [None], [-1], [2.5], ["x"], {}, {"x": None}, {1: 2}, {"x": "y"}, ()),
    *(lambda: None, M.MLCTensor, M.MLCTensor.new(), M.MLCLayer.new(), np.zeros((2, 2, 2)), np.array("x")),
]


def variants(row: Any, fine: list[Any]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Wrong numbers of arguments, names, and each argument replaced by each piece of garbage."""
    yield [*fine, None], {}
    yield fine, {"extra": 1}
    if fine:
        yield fine[:-1], {}
        yield [None] * len(fine), {}
    for position, garbage in itertools.product(range(len(fine)), GARBAGE):
        yield [*fine[:position], garbage, *fine[position + 1 :]], {}


def is_refusal(answer: Any) -> bool:
    return answer is None or answer is False or (isinstance(answer, list) and not answer)


OURS = {one.native.__name__ for one in (*CLASSES, *ENUMERATIONS) if one.native is not None}
SPELLINGS = {row.spelling for table in CLASSES for row in table.rows}
MEMBERS = {member for one in ENUMERATIONS for _, member in one.pairs if "_" in member or len(member) > 4}


def words_of_ours(error: Any) -> list[str]:
    """What a message says in stepgraph's words, which a program over the face does not know; quoted text is its own."""
    text = re.sub(r"""(?<!\w)'[^'\n]*'|"[^"\n]*"|numpy\.str_|\(\S+:\d+\)""", "", error.localizedDescription())
    found = re.findall(r"[A-Za-z_]\w*", text)
    return [one for one in found if one in OURS | MEMBERS or ("_" in one and one not in SPELLINGS)]


@pytest.mark.parametrize("table", [one for one in CLASSES if "Graph" not in one.name], ids=lambda table: table.name)
def test_garbage_for_every_selector(table: Any) -> None:
    kit, kind = Kit(), getattr(M, table.name)
    kit.step()
    state, count = kit.state(), 0
    for row in table.rows:
        if row.kind in ("new", "init", "property", "class property"):
            continue
        receiver = kind if row.is_class_method else instance(kit, table.name, row.selector)
        given = [getattr(receiver, row.swift)()] if row.kind.endswith("setter") else arguments(kit, table.name, row)
        for values, named in variants(row, given):
            getattr(receiver, row.spelling)(*values, **named)
            count += 1
            assert M.lastError() is None or not words_of_ours(M.lastError()), M.lastError()
    assert kit.state() == state, "a call changed what training works on"
    assert count > 0 or table.name in ("MLCTensorOptimizerDeviceData",)


@pytest.mark.parametrize("name", ["MLCGraph", "MLCInferenceGraph", "MLCTrainingGraph"])
def test_garbage_for_every_selector_of_graphs(name: str) -> None:
    refused = accepted = 0
    kit = Kit()
    kit.step(), kit.gradient(), kit.inference, kit.evaluation
    state = kit.state()
    for row in getattr(M, name).table.rows:
        if row.kind in ("new", "init", "property"):
            continue
        receiver = getattr(M, name) if row.is_class_method else instance(kit, name, row.selector)
        for values, named in variants(row, arguments(kit, name, row)):
            answer = getattr(receiver, row.spelling)(*values, **named)
            if is_refusal(answer):
                refused += 1
                assert M.lastError() is None or not words_of_ours(M.lastError()), M.lastError()
                assert kit.state() == state, f"{row.selector} was refused and changed something: {values} {named}"
            else:  # garbage of one kind is another's right value: -1 is a seed, {} no inputs
                accepted += 1
                state = kit.state()
    assert refused > 100 and accepted < refused / 4, (refused, accepted)


@pytest.mark.parametrize("table", CLASSES, ids=lambda table: table.name)
def test_what_every_object_has_is_refused_as_well(table: Any) -> None:
    kind = getattr(M, table.name)
    made = kind.new()
    calls = (kind.alloc, kind.new, made.init, made.copy, made.copyWithZone_, made.isKindOfClass_, made.isEqual_)
    for call in (*calls, made.description):
        assert call(1, 2, 3) is None and M.lastError() is not None
    assert made.copyWithZone_() is made.isKindOfClass_() is made.isKindOfClass_("MLCTensor") is None
    assert made.init() is made and made.isEqual_(made) and not made.isEqual_(Broken())
    assert kind.new() is not made and made.isKindOfClass_(kind) and table.name in made.description()


def test_errors_that_cannot_be_told_are_told_by_their_kind() -> None:
    class Mute(Exception):
        __str__ = __repr__ = Broken.__repr__  # type: ignore[assignment]

    assert "Mute" in M.MLCError(Mute()).localizedDescription()


def bad_programs(kit: Kit) -> dict[str, Any]:
    """Calls in the wrong order, unknown tensors, short buffers; the graph at hand is compiled and has had a step."""
    t, other = kit.training, tensor([4, 3])
    short, alone = data(np.zeros(2)), M.MLCTrainingGraph.graphWithGraphObjects_lossLayer_optimizer_([], None, None)
    run = "executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_"
    return {
        "gradient before forward": lambda: t.executeGradientWithBatchSize_options_completionHandler_(4, 0, None),
        "update before gradient": lambda: t.executeOptimizerUpdateWithOptions_completionHandler_(0, None),
        "compile of nothing": lambda: alone.compileWithOptions_device_(0, CPU),
        "execute of nothing": lambda: getattr(alone, run)({}, None, None, 0, 0, None),
        "update of nothing": lambda: alone.executeOptimizerUpdateWithOptions_completionHandler_(0, None),
        "optimizer of nothing": lambda: alone.compileOptimizer_(kit.adam),
        "short input": lambda: getattr(t, run)({"x": short}, {"y": data(Y)}, None, 4, 0, None),
        "short label": lambda: getattr(t, run)({"x": data(X)}, {"y": short}, None, 4, 0, None),
        "unknown input": lambda: getattr(t, run)({"z": data(X)}, {"y": data(Y)}, None, 4, 0, None),
        "missing label": lambda: getattr(t, run)({"x": data(X)}, None, None, 4, 0, None),
        "label weights": lambda: getattr(t, run)({"x": data(X)}, {"y": data(Y)}, {"w": data(Y)}, 4, 0, None),
        "huge batch": lambda: getattr(t, run)({"x": data(X)}, {"y": data(Y)}, None, 4000, 0, None),
        "negative batch": lambda: getattr(t, run)({"x": data(X)}, {"y": data(Y)}, None, -1, 0, None),
        "negative options": lambda: getattr(t, run)({"x": data(X)}, {"y": data(Y)}, None, 4, -1, None),
        "no handler": lambda: getattr(t, run)({"x": data(X)}, {"y": data(Y)}, None, 4, 0, "handler"),
        "unknown user gradient": lambda: t.allocateUserGradientForTensor_(other),
        "gradient of a stranger": lambda: t.gradientTensorForInput_(other),
        "gradients of a stranger": lambda: t.sourceGradientTensorsForLayer_(M.MLCActivationLayer.reluLayer()),
        "data of a stranger": lambda: t.gradientDataForParameter_layer_(other, kit.dense),
        "state for a stranger": lambda: t.bindOptimizerData_deviceData_withTensor_([data(X), data(X)], None, other),
        "too little state": lambda: t.bindOptimizerData_deviceData_withTensor_([data(np.zeros(6))], None, kit.weights),
        "short state": lambda: t.bindOptimizerData_deviceData_withTensor_([short, short], None, kit.weights),
        "a layer's parameter as input": lambda: t.setTrainingTensorParameters_([kit.dense.weightsParameter()]),
        "another tensor by a known name": lambda: t.addInputs_lossLabels_({"x": other}, None),
        "an optimizer without a rule": lambda: t.compileOptimizer_(M.MLCOptimizer.new()),
        "an output nobody makes": lambda: t.addOutputs_({"z": other}),
        "a link to another kind": lambda: t.linkWithGraphs_([kit.inference]),
        "a layer of another graph": lambda: Kit().graph.nodeWithLayer_source_(kit.dense, kit.x),
        "a read of too much": lambda: kit.weights.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_(
            bytearray(99), 99, False
        ),
        "a write to bytes": lambda: kit.weights.copyDataFromDeviceMemoryToBytes_length_synchronizeWithDevice_(
            bytes(24), 24, False
        ),
        "short weights": lambda: kit.weights.bindAndWriteData_toDevice_(short, CPU),
    }


@pytest.mark.parametrize("name", list(bad_programs(Kit())))
def test_calls_out_of_order_and_unfit_data(name: str) -> None:
    kit = Kit()
    kit.step()
    state = kit.state()
    asks = ("gradient of a stranger", "gradients of a stranger", "data of a stranger")
    call = bad_programs(kit)[name]
    assert is_refusal(call())
    error = M.lastError()
    assert kit.state() == state
    assert (error is None) == (name in asks)
    assert error is None or (error.localizedDescription() and not words_of_ours(error)), error
    again, fresh = kit.step(), Kit()
    fresh.step()
    assert np.array_equal(again[0].native.numpy(), fresh.step()[0].native.numpy())  # training goes on as if nothing was


def test_each_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stepgraph.mlc")
    for _ in range(3):
        assert M.MLCPaddingLayer.layerWithZeroPadding_([1, 2, 3, 4, 5]) is None
    (line,) = [one.getMessage() for one in caplog.records]
    assert (
        line.startswith("rejected MLCPaddingLayer.layerWithZeroPadding_: ") and "\n" not in line and "Fix: pass" in line
    )
    assert isinstance(M.lastError().native, sg.ArgumentError) and M.lastError().domain() == "stepgraph"


def test_the_last_error_is_the_thread_s_own() -> None:
    assert M.MLCReshapeLayer.layerWithShape_(None) is None
    mine, theirs = M.lastError(), []
    thread = threading.Thread(target=lambda: theirs.append(M.lastError()))
    thread.start()
    thread.join()
    assert theirs == [None] and M.lastError() is mine


@pytest.mark.parametrize("handler", [lambda: None, lambda *_: 1 / 0])
def test_a_handler_that_fails_does_not_undo_the_step(handler: Any, caplog: pytest.LogCaptureFixture) -> None:
    kit = Kit()
    execute = (
        kit.training.executeWithInputsData_lossLabelsData_lossLabelWeightsData_batchSize_options_completionHandler_
    )
    assert execute({"x": data(X)}, {"y": data(Y)}, None, 4, 0, handler) is True
    assert kit.adam.timeStep() == 2 and "a completion handler raised" in caplog.text


def test_work_that_fails_reaches_the_handler_once() -> None:
    graph, source, scores = M.MLCGraph.graph(), tensor([3, 2]), tensor([2, 8])
    reduce = M.MLCReductionLayer.layerWithReductionType_dimension_(M.MLCReductionTypeArgMax, 1)
    found = graph.nodeWithLayer_source_(reduce, scores)  # an index that nobody can check before the work
    indices = graph.reshapeWithShape_source_([2], found)
    assert graph.gatherWithDimension_source_indices_(0, source, indices) is not None, M.lastError()
    inference, got = M.MLCInferenceGraph.graphWithGraphObjects_([graph]), []
    assert inference.addInputs_({"x": source, "s": scores}) and inference.compileWithOptions_device_(0, CPU)
    execute = inference.executeWithInputsData_batchSize_options_completionHandler_
    outside = {"x": data(np.zeros(6)), "s": data(np.tile(np.arange(8), 2))}
    assert execute(outside, 0, 0, lambda *given: got.append(given)) is True
    ((result, error, _),) = got
    assert result is None and isinstance(error.native, sg.ExecutionError) and "Gather" in error.localizedDescription()
    assert execute(outside, 0, 0, None) is False


def test_data_that_cannot_be_right_is_refused_before_the_work() -> None:
    graph, source, indices = M.MLCGraph.graph(), tensor([3, 2]), tensor([2], kind=M.MLCDataTypeInt32)
    graph.gatherWithDimension_source_indices_(0, source, indices)
    inference, got = M.MLCInferenceGraph.graphWithGraphObjects_([graph]), []
    assert inference.addInputs_({"x": source, "i": indices}) and inference.compileWithOptions_device_(0, CPU)
    execute = inference.executeWithInputsData_batchSize_options_completionHandler_
    given = {"x": data(np.zeros(6)), "i": data([0, 7], np.int32)}
    assert execute(given, 0, 0, lambda *answer: got.append(answer)) is False and got == []
    assert isinstance(M.lastError().native, sg.DataError) and not words_of_ours(M.lastError()), M.lastError()
