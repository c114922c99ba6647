"""Draws what the other programs wrote with `--json`: one picture (SVG) beside each file, or one of several together.

python -m benchmarks.plot benchmarks/results/*.json
python -m benchmarks.plot --together docs/images/steps-cpu.svg benchmarks/results/step-cpu*.json
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "stepgraph", "font.size": 9}  # the same numbers give the same file

import matplotlib.pyplot as plt  # noqa: E402  # after the choice of its output
from matplotlib.axes import Axes  # noqa: E402

COLORS = {
    "stepgraph": "#1b6ca8",
    "fused": "#5fa8d3",
    "unfused": "#5fa8d3",
    "pytorch": "#e4572e",
    "eager": "#e4572e",
    "channels_last": "#f3a712",
    "compile": "#a05195",
    "reduce": "#d45087",
    "jax": "#669d31",
}
Report = dict[str, Any]


def main() -> None:
    """Draws the files of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="results of step, first_step, memory, scaling or real")
    parser.add_argument("--together", type=Path, help="one picture of all files, which are of one program and device")
    options = parser.parse_args()
    reports = {file: json.loads(file.read_text()) for file in options.files}
    if options.together:
        reports = {options.together: together(list(reports.values()))}
    for file, report in reports.items():
        program = kind(report)
        if program is None:
            print(f"{file}: not a result of {', '.join(DRAWINGS)}; left out")
        else:
            print(draw(report, program, file.with_suffix(".svg")))


def together(reports: list[Report]) -> Report:
    """All models in one report; of a model that several have, the first one's numbers count."""
    if len({(report.get("program"), report.get("device")) for report in reports}) > 1:
        raise SystemExit("files of several programs or devices cannot be drawn together")
    models = {name: model for report in reversed(reports) for name, model in report["models"].items()}
    return reports[0] | {"models": models, "command": "\n".join(map(command, reports))}


def kind(report: Report) -> str | None:
    """The program that wrote a report, if its reports can be drawn."""
    program = report.get("program")
    return program if program in DRAWINGS else None


def command(report: Report) -> str:
    """The commands that measured a report, each on a line; some programs keep one per model."""
    each = [report["command"]] if "command" in report else [model["command"] for model in report["models"].values()]
    return "\n".join(dict.fromkeys(each))


def draw(report: Report, program: str, target: Path) -> Path:
    """Writes the picture of a report."""
    figure = DRAWINGS[program](report)
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    precision = ", TF32" if report.get("tf32") else ""
    footer = f"{command(report)}\n{report['device']}{precision} · {versions}"
    figure.text(0.01, 0.005, footer, fontsize=6, color="gray")
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)
    return target


def step(report: Report) -> Any:
    """Ratios to stepgraph's time, with quartiles: twice as fast and half as fast are equally far from 1."""
    figure, axes = _chart(
        report, "peer's step time ÷ stepgraph's (above 1: stepgraph is faster)", _ratio, skipped="stepgraph", start=1
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axvline(1, color="black", linewidth=0.8)
    return figure


def first_step(report: Report) -> Any:
    """Seconds to the first step, with the range."""
    figure, axes = _chart(report, "seconds to the first step", _seconds)
    axes.set_xscale("log")
    return figure


def memory(report: Report) -> Any:
    """Peaks relative to eager PyTorch's, and the plan."""

    def share(model: Report, peer: str) -> tuple[float, float, float]:
        value = model["measured"][peer] / model["measured"]["pytorch"]
        return value, value, value

    models = {name: model | {"peers": model["measured"]} for name, model in report["models"].items()}
    figure, axes = _chart(report | {"models": models}, "peak memory of a step ÷ eager PyTorch's", share)
    for row, model in enumerate(models.values()):
        planned = model["planned"] / model["measured"]["pytorch"]
        label = "stepgraph's plan" if row == 0 else None
        axes.plot([planned, planned], [row - 0.4, row + 0.4], color="black", linewidth=1, label=label)
    _legend(axes)
    return figure


def real(report: Report) -> Any:
    """Step times and peak memory of peers relative to stepgraph's, side by side."""

    def size(model: Report, peer: str) -> tuple[float, float, float]:
        ours, theirs = (model["rows"][one]["peak"]["allocated"] for one in (model.get("ours", "stepgraph"), peer))
        return theirs / ours, theirs / ours, theirs / ours

    models = {
        name: model | {"peers": {peer: row for peer, row in model["contenders"].items() if "ratio" in row}}
        for name, model in report["models"].items()
    }
    measured = report | {"models": models, "command": command(report)}
    figure, (times, sizes) = plt.subplots(1, 2, figsize=(7, _height(models)), sharey=True)
    _bars(measured, "step time ÷ stepgraph's", lambda model, peer: model["peers"][peer]["ratio"], axes=times)
    _bars(measured, "peak memory ÷ stepgraph's", size, axes=sizes)
    for axes in (times, sizes):
        axes.axvline(1, color="black", linewidth=0.8)
    times.invert_yaxis()  # of both
    _legend(times)
    _fit(figure, measured)
    return figure


def scaling(report: Report) -> Any:
    """Times against each size on logarithmic axes."""
    lines = report["lines"]
    figure, all_axes = plt.subplots(1, len(lines), figsize=(3.2 * len(lines), 3.4), squeeze=False, sharey=True)
    for axes, (name, line) in zip(all_axes[0], lines.items(), strict=True):
        sizes = [point["size"] for point in line["points"]]
        for what, color in (("wire", COLORS["jax"]), ("compile", COLORS["pytorch"]), ("step", COLORS["stepgraph"])):
            slope = f" (slope {line['slopes'][what][0]:.2f})" if line["slopes"] else ""
            axes.loglog(sizes, [point[what] for point in line["points"]], "o-", color=color, label=what + slope, ms=3)
        axes.set_xlabel(name)
        axes.legend(fontsize=7)
    all_axes[0][0].set_ylabel("seconds")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return figure


DRAWINGS: dict[str, Callable[[Report], Any]] = {
    "step": step,
    "first_step": first_step,
    "memory": memory,
    "scaling": scaling,
    "real": real,
}


def _ratio(model: Report, peer: str) -> tuple[float, float, float]:
    low, middle, high = model["peers"][peer]["ratio_quartiles"]
    return low, middle, high


def _seconds(model: Report, peer: str) -> tuple[float, float, float]:
    row = model["peers"][peer]
    return min(row["rounds_seconds"]), row["median_seconds"], max(row["rounds_seconds"])


def _chart(
    report: Report,
    title: str,
    number: Callable[[Report, str], tuple[float, float, float]],
    skipped: str = "",
    start: float = 0,
) -> tuple[Any, Axes]:
    """A figure of one chart."""
    figure, axes = plt.subplots(figsize=(7, _height(report["models"], skipped)))
    _bars(report, title, number, axes, skipped, start)
    axes.invert_yaxis()
    _legend(axes)
    _fit(figure, report)
    return figure, axes


def _peers(models: Report, skipped: str = "") -> list[str]:
    """The peers that ran any of the models, in the order of their colors."""
    return [name for name in COLORS if name != skipped and any(name in model["peers"] for model in models.values())]


def _height(models: Report, skipped: str = "") -> float:
    """Inches for the bars of all models."""
    return 0.8 + 0.17 * (len(_peers(models, skipped)) + 1) * len(models)


def _fit(figure: Any, report: Report) -> None:
    """Leaves room for the commands below, which need more of a low figure."""
    lines = 2 + report["command"].count("\n")
    figure.tight_layout(rect=(0, max(0.02, 0.09 / figure.get_figheight()) * lines, 1, 1))


def _bars(
    report: Report,
    title: str,
    number: Callable[[Report, str], tuple[float, float, float]],
    axes: Axes,
    skipped: str = "",
    start: float = 0,
) -> None:
    """A group of bars for each model, one for each peer that ran it, with its spread as a line."""
    models = report["models"]
    peers = _peers(models, skipped)
    thick = 0.8 / len(peers)
    for place, peer in enumerate(peers):
        rows = [row for row, model in enumerate(models.values()) if peer in model["peers"]]
        found = [number(model, peer) for model in models.values() if peer in model["peers"]]
        middles = [middle for _, middle, _ in found]
        spread = [[middle - low for low, middle, _ in found], [high - middle for _, middle, high in found]]
        heights = [row - 0.4 + (place + 0.5) * thick for row in rows]
        style: Any = {"left": start, "color": COLORS[peer], "label": peer, "error_kw": {"linewidth": 0.8}}
        axes.barh(heights, [middle - start for middle in middles], thick, xerr=spread, **style)
    axes.set_yticks(range(len(models)), list(models))
    axes.set_xlabel(title)


def _legend(axes: Axes) -> None:
    axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(COLORS) + 1, frameon=False)


if __name__ == "__main__":
    main()
