"""Inference graphs as ONNX files, through `torch.onnx.export`.

Layers are PyTorch code already, so there is no second set of formulas. The exporter's optimizer has produced wrong
numbers silently more than once; it is off by default, and what was written is run and compared.
"""

from __future__ import annotations

import logging
import os
import warnings
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import escape
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch

from stepgraph.errors import ArgumentError, ExecutionError, StateError, StepgraphError, reason
from stepgraph.interop.module import Prediction, module_of
from stepgraph.interop.onnx_check import check_file
from stepgraph.interop.onnx_lowering import ForExport
from stepgraph.interop.onnx_names import unused, value_names
from stepgraph.interop.onnx_recurrent import translations
from stepgraph.layers.node import Node
from stepgraph.system import surroundings
from stepgraph.system.storage import as_path, storage
from stepgraph.tensors.extents import PROBES, BatchExtent, follows_batch, shape_at
from stepgraph.tensors.tensor import Tensor

WHERE = "save_onnx"
OPSETS = range(18, 24)  # what the exporter implements, and what it converts to
LARGEST = 2**31 - 2**24  # bytes of weights in one file: a protocol buffer ends at 2 GiB
SCOPES = "pkg.torch.onnx.name_scopes"  # where the exporter notes which submodule an operator comes from
Exported = Any  # an onnx_ir.Model


@dataclass(frozen=True)
class Request:
    """What to export, and how.

    Args:
        prediction: what the graph computes.
        batch_size: a fixed number of rows; None leaves it free.
        opset: the version of ONNX's operators.
        optimize: whether the exporter may merge operators.
    """

    prediction: Prediction
    batch_size: int | None = None
    opset: int = 20
    optimize: bool = False


def save(request: Request, path: str | os.PathLike[str], check: bool) -> Path:
    """Writes an ONNX file atomically, after it was checked."""
    target = as_path(WHERE, path)
    _require(request)
    model = exported(request)
    partial = target.with_name(f".{target.name}.{token_hex(4)}.partial")
    data = f"{target.name}.{token_hex(4)}.data" if _size(model) > LARGEST else None
    try:
        with storage(target, "written"):
            target.parent.mkdir(parents=True, exist_ok=True)
            import_module("onnx_ir").save(model, partial, external_data=data)
        if check:
            check_file(request.prediction, partial, request.batch_size)
        with storage(target, "written"):
            old = [file for file in _external(target) if file.name != data]
            _synchronize(partial)
            partial.replace(target)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
            if data is not None:
                target.with_name(data).unlink(missing_ok=True)
        raise
    for file in old:
        with suppress(OSError):
            file.unlink(missing_ok=True)
    return target


def exported(request: Request) -> Exported:
    """The model, with the graph's names."""
    prediction = request.prediction
    results = {tensor: None for node in prediction.nodes for tensor in node.results}
    everything = {**prediction.outputs, **{f"result {i}": tensor for i, tensor in enumerate(results)}}
    try:
        model = _converted(replace(request, prediction=replace(prediction, outputs=everything)))
    except StepgraphError:
        raise
    except Exception as error:  # the exporter raises whatever an operator makes it raise
        raise _blamed(request, error) from error
    _Names(model, prediction).apply(list(everything.values()))
    return model


def _converted(request: Request) -> Exported:
    prediction = request.prediction
    rows = request.batch_size or _example_rows(prediction)
    arrays = tuple(_example(tensor, prediction, rows) for tensor in prediction.inputs.values())
    shapes = None if request.batch_size else _free(prediction)
    with _quiet(), surroundings.tracing(), torch.no_grad():
        module = module_of(prediction, ForExport).cpu()
        program = torch.onnx.export(
            module,
            arrays,
            dynamo=True,
            opset_version=request.opset,
            optimize=request.optimize,
            dynamic_shapes=shapes,
            custom_translation_table=dict(translations()),
            verbose=False,
        )
    assert program is not None
    _require_free(program.model, prediction, shapes or ())
    return program.model


def _require_free(model: Exported, prediction: Prediction, shapes: Sequence[Mapping[int, Any]]) -> None:
    """Rejects a model in which the exporter has fixed an extent that should be free, which it does silently."""
    for name, value, free in zip(prediction.inputs, model.graph.inputs, shapes, strict=False):
        for axis in free:
            if isinstance(value.shape[axis], int):
                raise RuntimeError(f"the rows of '{name}' are fixed to {value.shape[axis]}")


def _example_rows(prediction: Prediction) -> int:
    """A number of rows to trace with: with a single one, PyTorch would take it for fixed."""
    if isinstance(prediction.batch, BatchExtent):
        return PROBES[0]
    return max(2, prediction.batch)


def _example(tensor: Tensor, prediction: Prediction, rows: int) -> torch.Tensor:
    shape = shape_at(tensor.shape, prediction.batch, rows)
    return torch.zeros(shape, dtype=tensor.data_type.torch)


def _free(prediction: Prediction) -> tuple[dict[int, Any], ...] | None:
    """Which extents of the inputs follow the batch, in PyTorch's terms; None if there are none."""
    batch, found = torch.export.Dim("batch"), []
    for tensor in prediction.inputs.values():
        free: dict[int, Any] = {}
        for axis, extent in enumerate(tensor.shape):
            if isinstance(extent, BatchExtent):
                free[axis] = _symbolic(extent, batch)
            elif axis == 0 and follows_batch(extent, prediction.batch):
                free[axis] = batch
        found.append(free)
    return tuple(found) if any(found) else None


def _symbolic(extent: BatchExtent, batch: Any) -> Any:
    times, share, offset = extent.multiple.numerator, extent.multiple.denominator, extent.offset
    if share != 1:
        problem = f"an input has {extent} rows, and ONNX knows no fraction of a batch"
        raise ArgumentError(WHERE, problem, fix="export for a number of rows: batch_size=…")
    scaled = batch if times == 1 else times * batch
    return scaled + offset if offset else scaled


def _blamed(request: Request, error: Exception) -> StepgraphError:
    """The error of an export, with the first layer that cannot be exported by itself."""
    for node in request.prediction.nodes:
        try:
            _converted(replace(request, prediction=_alone(node, request.prediction)))
        except Exception as own:  # the same
            free = "" if request.batch_size else ", or export for one number of rows: batch_size=…"
            problem = f"it cannot be exported to ONNX: {_why(own)}"
            return ExecutionError(node.where, problem, fix=f"replace the layer{free}")
    return ExecutionError(WHERE, f"the graph cannot be exported: {_why(error)}", fix="report this graph")


def _why(error: BaseException) -> str:
    """The first cause of an exporter's error: its own message is a list of attempts."""
    while error.__cause__ is not None:
        error = error.__cause__
    return reason(error)


def _alone(node: Node, prediction: Prediction) -> Prediction:
    """One node as a graph, whose inputs are its sources."""
    own = {*node.layer.parameters.values(), *node.layer.statistics.values(), *node.layer.constants.values()}
    held = {*prediction.names.values(), *prediction.constants, *own}
    inputs = {f"source{i}": t for i, t in enumerate(dict.fromkeys(node.arguments)) if t not in held}
    outputs = {f"result{i}": tensor for i, tensor in enumerate(node.results)}
    names = {name: t for name, t in prediction.names.items() if t in own or t in node.arguments}
    return replace(prediction, nodes=(node,), inputs=inputs, outputs=outputs, names=names)


class _Names:
    """Gives the values and operators of a model the graph's names."""

    def __init__(self, model: Exported, prediction: Prediction) -> None:
        self.ir, self.graph, self.prediction = import_module("onnx_ir"), model.graph, prediction

    def apply(self, results: Sequence[Tensor]) -> None:
        """Renames everything; `results` are those that the model returns, of which the graph's outputs stay."""
        self._merge_tied()
        returned = list(self.graph.outputs)
        wanted = value_names(self.prediction)
        names: dict[Any, str] = dict(zip(self.graph.inputs, self.prediction.inputs, strict=True))
        count = len(self.prediction.outputs)
        outputs = []
        for name, value in zip(self.prediction.outputs, returned[:count], strict=True):
            if value in names or value.producer() is None:  # another output, an input or a constant
                value = self._identity(value)
            names[value] = name
            outputs.append(value)
        for tensor, value in zip(results[count:], returned[count:], strict=True):
            if value not in names and value.producer() is not None and wanted[tensor] not in names.values():
                names[value] = wanted[tensor]
        self._rename(names)
        self.graph.outputs[:] = outputs
        self._name_operators()

    def _identity(self, value: Any) -> Any:
        node = self.ir.node("Identity", [value])
        self.graph.append(node)
        (found,) = node.outputs
        found.type, found.shape = value.type, value.shape
        return found

    def _merge_tied(self) -> None:
        """Keeps one initializer of each parameter that several layers share."""
        first: dict[Any, Any] = {}
        for name, value in list(self.graph.initializers.items()):
            array = getattr(value.const_value, "raw", None)
            if not isinstance(array, torch.Tensor) or array.numel() == 0:
                continue
            kept = first.setdefault((array.data_ptr(), tuple(array.shape), array.stride(), array.dtype), value)
            if kept is not value and value not in self.graph.outputs:
                self.ir.convenience.replace_all_uses_with(value, kept)
                del self.graph.initializers[name]

    def _rename(self, names: Mapping[Any, str]) -> None:
        """Renames values; others that have one of these names get out of the way."""
        taken = {*names.values()}
        every = [*self.graph.inputs, *self.graph.initializers.values()]
        every += [value for node in self.graph for value in node.outputs]
        used = taken | {value.name for value in every}
        for value in every:
            if value not in names and value.name in taken:
                value.name = unused(str(value.name), used)
        for index, value in enumerate(names):  # no name may be given twice at any moment
            value.name = unused(f"renamed {index}", used)
        for value, name in names.items():
            value.name = name

    def _name_operators(self) -> None:
        """`layer/Operator`, numbered."""
        layers, used = {*self.prediction.layers.values()}, set[str]()
        for node in self.graph:
            scopes = literal_eval(node.metadata_props.get(SCOPES, "[]"))
            layer = next((name for name in reversed(scopes) if name in layers), None)
            node.name = unused(node.op_type if layer is None else f"{layer}/{node.op_type}", used)


# Files


def _external(target: Path) -> list[Path]:
    """Weights beside a file of this name."""
    return [one for one in target.parent.glob(f"{escape(target.name)}.*.data") if one.is_file()]


def _size(model: Exported) -> int:
    arrays = (value.const_value for value in model.graph.initializers.values())
    return sum(array.nbytes for array in arrays if array is not None)


def _synchronize(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


# Surroundings


def _require(request: Request) -> None:
    """Rejects invalid settings, names that ONNX cannot have, and missing packages."""
    rows, opset = request.batch_size, request.opset
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ArgumentError(WHERE, f"batch_size is {rows!r}", fix="pass a number of rows, or None to leave it free")
    if isinstance(opset, bool) or opset not in OPSETS:
        problem = f"opset is {opset!r}, not one of {OPSETS[0]} to {OPSETS[-1]}"
        raise ArgumentError(WHERE, problem, fix="use 20, which runtimes of the last years accept")
    both = sorted({*request.prediction.inputs} & {*request.prediction.outputs})
    if both:
        raise ArgumentError(WHERE, f"an input and an output are both named '{both[0]}'", fix="rename one of them")
    for package in ("onnx", "onnxscript", "onnx_ir"):
        try:
            import_module(package)
        except ImportError as error:
            problem = f"the package {package.replace('_', '-')} is missing: {reason(error)}"
            raise StateError(WHERE, problem, fix="pip install 'stepgraph[onnx]'") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the exporter's remarks about itself away from the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
