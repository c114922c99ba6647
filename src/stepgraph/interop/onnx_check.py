"""Runs ONNX files with ONNX Runtime, and compares every layer with the graph."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import torch

from stepgraph.errors import ExecutionError, StateError, reason
from stepgraph.interop.difference import Difference, largest_of
from stepgraph.interop.module import Prediction, module_of
from stepgraph.interop.onnx_names import result_names, value_names
from stepgraph.layers.integers import accepted
from stepgraph.system import surroundings
from stepgraph.tensors.extents import PROBES, BatchExtent, shape_at
from stepgraph.tensors.tensor import Tensor

logger = logging.getLogger("stepgraph")

TOLERANCE = 1e-5  # of the largest number of a result
ROWS = (1, 3)  # the numbers of rows that are tried
SAMPLES = 8  # batches that tell how large the numbers of a result are
Batch = Mapping[str, torch.Tensor]


def check_file(prediction: Prediction, path: Path, batch_size: int | None) -> None:
    """Raises an error if ONNX Runtime computes other numbers than the graph; without it, does nothing."""
    try:
        import_module("onnxruntime")
    except ImportError:
        logger.info("onnxruntime is not installed: %s was not checked", path)
        return
    for rows in (batch_size,) if batch_size else _row_counts(prediction):
        batch = drawn(prediction, rows, seed=0)
        expected, found = results(prediction, batch), run(path, prediction.outputs, batch)
        for name, tensor in prediction.outputs.items():
            if _differs(expected[tensor], found[name]):
                sizes = _sizes(prediction, rows)
                if _differs(expected[tensor], found[name], sizes[tensor]):
                    raise _first_difference(prediction, path, batch, name, sizes)


def _sizes(prediction: Prediction, rows: int) -> dict[Tensor, float]:
    """The largest number of each result in several batches; the only one of a single batch may be near 0 by chance."""
    found = [results(prediction, drawn(prediction, rows, seed)) for seed in range(SAMPLES)]
    return {tensor: max(largest_of(one[tensor]) for one in found) for tensor in found[0]}


def _first_difference(
    prediction: Prediction, path: Path, batch: Batch, output: str, sizes: Mapping[Tensor, float]
) -> ExecutionError:
    """The error that names the first layer whose results differ."""
    expected, found = results(prediction, batch), layer_values(prediction, path, batch)
    where, since, facts = "save_onnx", "", {}
    for tensor, name in result_names(prediction.nodes).items():
        if tensor in found and _differs(expected[tensor], found[tensor], sizes[tensor]):
            where = next(node.where for node in prediction.nodes if tensor in node.results)
            since, facts = f" from '{name}' on", _facts(expected[tensor], found[tensor])
            break
    problem = f"ONNX Runtime computes other numbers{since} than the graph, and so another output '{output}'"
    fix = "use optimize=False or another opset, or replace the layer; check=False writes the file anyway"
    return ExecutionError(where, problem, **facts, fix=fix)


def _facts(expected: torch.Tensor, found: torch.Tensor) -> dict[str, str]:
    if expected.shape != found.shape:
        return {"graph": f"{list(expected.shape)}", "ONNX_Runtime": f"{list(found.shape)}"}
    one = Difference.between(expected, found)
    return {"largest_number": f"{one.largest:.3g}", "largest_difference": f"{one.absolute:.3g}"}


def _differs(expected: torch.Tensor, found: torch.Tensor, size: float | None = None) -> bool:
    if expected.shape != found.shape:
        return True
    kind = expected.dtype
    rounding = 4 * torch.finfo(kind).eps if kind.is_floating_point else 0.0
    return Difference.between(expected, found, size).share > max(TOLERANCE, rounding)


def results(prediction: Prediction, batch: Batch) -> dict[Tensor, torch.Tensor]:
    """What every layer computes, in plain PyTorch."""
    with surroundings.tracing(), torch.no_grad():
        values = module_of(prediction).cpu().results(*(batch[name] for name in prediction.inputs))
    return {tensor: values[tensor] for node in prediction.nodes for tensor in node.results}


def layer_values(prediction: Prediction, path: Path, batch: Batch) -> dict[Tensor, torch.Tensor]:
    """What the operators of a file compute, by the result of the graph that has their name."""
    ir = _package("onnx_ir", "onnx")
    model = ir.load(path)
    names = value_names(prediction)
    _require_inputs(path, [one.name for one in model.graph.inputs], prediction)
    there = {value.name: value for node in model.graph for value in node.outputs}
    wanted = {tensor: name for tensor, name in names.items() if name in there}
    returned = {value.name for value in model.graph.outputs}
    if not wanted:
        return {}
    model.graph.outputs.extend(there[name] for name in dict.fromkeys(wanted.values()) if name not in returned)
    with_all = path.with_name(f".{path.name}.{token_hex(4)}.partial")
    try:
        ir.save(model, with_all)  # beside the file, since weights may be in another one there
        found = run(with_all, {name: tensor for tensor, name in wanted.items()}, batch)
    finally:
        with suppress(OSError):
            with_all.unlink(missing_ok=True)
    return {tensor: found[name] for tensor, name in wanted.items()}


def _require_inputs(path: Path, found: Sequence[str], prediction: Prediction) -> None:
    unknown = [name for name in found if name not in prediction.inputs]
    if unknown:
        wanted, problem = ", ".join(prediction.inputs), f"it has an input {unknown[0]!r}, but the graph has none"
        raise ExecutionError(f"{path}", problem, graph=wanted, fix="pass the file that was written from this graph")


def run(path: Path, outputs: Mapping[str, Any], batch: Batch) -> dict[str, torch.Tensor]:
    """What ONNX Runtime computes on the CPU."""
    runtime = _package("onnxruntime", "onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors; its warnings are about its own optimizer
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = runtime.InferenceSession(f"{path}", options, providers=["CPUExecutionProvider"])
        taken = {one.name for one in session.get_inputs()}
        given = {name: array.numpy() for name, array in batch.items() if name in taken}
        found = session.run(list(outputs), given)
    except Exception as error:  # of the runtime, which has no common class of its own
        problem = f"ONNX Runtime cannot run it: {reason(error)}"
        raise ExecutionError(f"{path}", problem, fix="export it again, for another opset") from error
    return {name: torch.from_numpy(np.array(array)) for name, array in zip(outputs, found, strict=True)}


def _package(name: str, install: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise StateError("ONNX", f"the package {name} is missing", fix=f"pip install {install}") from error


# Data


def _row_counts(prediction: Prediction) -> Sequence[int]:
    if not any(tensor.shape[0] == prediction.batch for tensor in prediction.inputs.values()):
        return (int(prediction.batch),)
    extents = [e for node in prediction.nodes for t in node.results for e in t.shape if isinstance(e, BatchExtent)]
    return PROBES if any(extent.multiple.denominator != 1 for extent in extents) else ROWS


def drawn(prediction: Prediction, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Random inputs: normal, and integers that all layers accept."""
    generator = np.random.default_rng(seed)
    found = {}
    for name, tensor in prediction.inputs.items():
        shape = shape_at(tensor.shape, prediction.batch, rows)
        if tensor.data_type.is_floating:
            numbers: np.ndarray = generator.standard_normal(shape)
        else:
            numbers = generator.integers(*accepted(tensor, prediction.nodes), shape)
        found[name] = torch.from_numpy(np.asarray(numbers)).to(tensor.data_type.torch)
    return found
