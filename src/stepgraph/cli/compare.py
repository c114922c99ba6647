"""`stepgraph compare FILE`: whether a saved graph computes the same on several devices, and as an ONNX file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgraph.cli import device_argument, opening
from stepgraph.errors import ArgumentError, StorageError

if TYPE_CHECKING:
    from stepgraph.cli.differences import Difference, What

HELP = "run one batch on several devices, or as ONNX, and show where the numbers differ"
TOLERANCE = 1e-3

EXAMPLES = """
what is compared:
  The result of every layer, then the gradient of every parameter, against
  the first device: the largest difference, and its ratio to the largest number
  in that result, or in the gradients of that layer. Dropout drops the same
  elements everywhere.
  With an ONNX file, the graph runs in inference mode, and only results are
  compared: those of layers that have operators of their own in the file.

examples:
  stepgraph compare --devices cpu,gpu run/model
  stepgraph compare --devices cpu:deterministic,cpu:default run/model
                       PyTorch's kernels and those chosen by measurement
  stepgraph compare --devices cpu:default,cpu:bfloat16 --tolerance 0.05 run/model
  stepgraph compare --devices cpu,gpu --data batch.npz run/model
                       a file that numpy.savez("batch.npz", image=…, label=…) wrote
  stepgraph compare run/model model.onnx
                       a file that inference.save_onnx("model.onnx") wrote

exit codes:
  0  every difference is within the tolerance
  1  one is beyond it, or an error
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `compare`."""
    parser.epilog = f"{device_argument.SYNTAX}{EXAMPLES}"
    opening.arguments(parser)
    parser.add_argument(
        "onnx", metavar="MODEL.onnx", nargs="?", type=Path, help="an ONNX file, run with ONNX Runtime on the CPU"
    )
    parser.add_argument(
        "--devices",
        metavar="DEVICE,DEVICE,…",
        type=device_argument.parse_several,
        help="two or more; the others are compared with the first (with an ONNX file: cpu)",
    )
    parser.add_argument(
        "--tolerance",
        metavar="SHARE",
        type=_share,
        default=TOLERANCE,
        help=f"the largest acceptable difference, relative to the largest number of an array ({TOLERANCE})",
    )
    parser.add_argument("--data", metavar="FILE", type=Path, help="arrays by name in an .npz file; by default random")
    parser.add_argument("--batch-size", metavar="ROWS", type=_rows, help="rows of the random batch (as declared)")
    parser.add_argument("--seed", metavar="NUMBER", type=opening.seed, default=0, help="the seed of random numbers (0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(refuse=parser.error)


def _share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a tolerance: use a number such as 1e-4")
    return found


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a batch size: use a number ≥ 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Runs the batch everywhere and shows the differences."""
    from stepgraph.cli import differences

    first, *others = _numbers(arguments)
    compared = [differences.differences(first, other) for other in others]
    rows = {what: [one[what] for one in compared] for what in first}
    beyond = [what for what, found in rows.items() if any(one.share > arguments.tolerance for one in found)]
    if arguments.json:
        _show_json(arguments, rows, beyond)
    else:
        _show(arguments, rows, beyond)
    return 1 if beyond else 0


def _numbers(arguments: argparse.Namespace) -> list[Any]:
    """What the graph computes in each place, from the same batch and the same random numbers."""
    from stepgraph import set_seed
    from stepgraph.cli import differences, saved

    if arguments.data is not None and arguments.batch_size is not None:
        raise ArgumentError("compare", "--data has its own rows", fix="leave out --batch-size")
    if arguments.onnx is None and arguments.devices is None:
        arguments.refuse("there is nothing to compare with: pass --devices A,B or an ONNX file")
    if arguments.onnx is not None and not arguments.onnx.is_file():
        fix = "check the path; inference.save_onnx(path) writes such a file"
        raise StorageError(f"{arguments.onnx}", "there is no such file", fix=fix)
    devices = _devices(arguments)
    content, custom = opening.read(arguments.file), opening.classes(arguments.custom)
    for device in devices:
        device.device()  # fails before anything is compiled
    found, data, rows, asked, graphs = [], None, 0, None, ()
    for device in devices:
        set_seed(arguments.seed)  # a graph that was saved before compilation draws its stream now
        graphs = opening.load(content, custom, device, inference=arguments.onnx is not None).linked_graphs
        if data is None:
            asked = None if arguments.onnx is None else differences.prediction(graphs)
            data, rows = _batch(arguments, graphs, saved.labels(content))
        found.append(differences.run(graphs, data, rows, arguments.seed))
    if asked is None:
        return found
    there = differences.run_onnx(asked, data or {}, arguments.onnx)
    return [{what: one[what] for what in there} for one in (*found, there)]


def _batch(arguments: argparse.Namespace, graphs: Sequence[Any], unused: Collection[str]) -> tuple[Any, int]:
    """The data to run, and its rows; a file may also hold arrays with the `unused` names."""
    from stepgraph.cli import batch

    if arguments.data is not None:
        data = batch.read(arguments.data, graphs, unused)
        return data, batch.rows_of(data, graphs)
    rows = arguments.batch_size or int(graphs[0].declaration.feeds.batch)
    return batch.drawn(graphs, rows, arguments.seed), rows


def _devices(arguments: argparse.Namespace) -> list[Any]:
    return arguments.devices or [device_argument.parse("cpu")]


def _places(arguments: argparse.Namespace) -> list[str]:
    """What is compared, as it was written on the command line."""
    onnx = [] if arguments.onnx is None else [f"{arguments.onnx}"]
    return [*(device.text for device in _devices(arguments)), *onnx]


def _show(arguments: argparse.Namespace, rows: Mapping[What, Sequence[Difference]], beyond: Sequence[What]) -> None:
    from stepgraph.cli import screen

    first, *others = _places(arguments)
    names = [name for other in others for name in (other, "share")]
    title = f"Differences from {first}"
    table = screen.columns("layer or parameter", "", "largest", *names, title=title, numbers=1 + len(names))
    if beyond:
        table.add_column("")
    for what, found in rows.items():
        numbers = [text for one in found for text in (_short(one.absolute), _short(one.share))]
        mark = "← first beyond" if beyond[:1] == [what] else "beyond" if what in beyond else ""
        table.add_row(what.name, what.kind, _short(found[0].largest), *numbers, *([mark] if beyond else []))
    tolerance = f"{arguments.tolerance:g} of the largest number"
    if beyond:
        verdict = (
            f"{len(beyond)} of {len(rows)} beyond {tolerance}; the first is the {beyond[0].kind} of {beyond[0].name}."
        )
    else:
        worst = max((one.share for found in rows.values() for one in found), default=0.0)
        verdict = f"All {len(rows)} within {tolerance}; the largest ratio is {_short(worst)}."
    screen.show(table, "", verdict)


def _short(number: float) -> str:
    return "0" if number == 0 else f"{number:.2e}" if math.isfinite(number) else "not finite"


def _show_json(
    arguments: argparse.Namespace, rows: Mapping[What, Sequence[Difference]], beyond: Sequence[What]
) -> None:
    from stepgraph.cli import screen

    devices = _places(arguments)
    shown = [
        {
            "name": what.name,
            "kind": what.kind,
            "largest": found[0].largest,
            "beyond": what in beyond,
            "differences": [
                {"device": text, "absolute": one.absolute, "share": one.share}
                for text, one in zip(devices[1:], found, strict=True)
            ],
        }
        for what, found in rows.items()
    ]
    first = {"name": beyond[0].name, "kind": beyond[0].kind} if beyond else None
    screen.show_json({"devices": devices, "tolerance": arguments.tolerance, "first_beyond": first, "rows": shown})
