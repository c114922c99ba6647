"""One self-contained HTML file: style, script and data are inline, and it loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from stepgraph.errors import readable
from stepgraph.report.run import Run
from stepgraph.report.view import name, view
from stepgraph.system.storage import storage

FILE = "report.html"
SCRIPTS = (
    "format.js",
    "elements.js",
    "scales.js",
    "lines.js",
    "chart.js",
    "curves.js",
    "layer.js",
    "camera.js",
    "graph.js",
    "profile.js",
    "memory.js",
    "gradients.js",
    "histograms.js",
    "environment.js",
    "main.js",
)


def write(path: Path, runs: Sequence[Run]) -> None:
    """Writes the page of some runs, replacing an existing one."""
    content = page(runs)
    partial = path.with_name(path.name + ".partial")
    with storage(path.parent, "written"):
        try:
            partial.write_text(content, encoding="utf-8")
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def page(runs: Sequence[Run], live: bool = False) -> str:
    """The page. A live one polls its server, and nothing else."""
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    parts = {
        "title": html.escape(readable(" · ".join(name(run) for run in runs))),
        "policy": html.escape(policy + ("; connect-src 'self'" if live else "")),
        "style": _asset("style.css"),
        "data": embedded(data(runs, live)),
        "script": script,
    }
    # In one pass, so that nothing in the data is mistaken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def data(runs: Sequence[Run], live: bool = False) -> dict[str, Any]:
    """The data for the page's script."""
    return {"live": live, "runs": [view(run) for run in runs]}


def embedded(value: Any) -> str:
    """JSON that is safe inside a script element: labels cannot close it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _script() -> str:
    body = "\n".join(_asset(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{body}\n}})();\n'


@cache
def _asset(name: str) -> str:
    return (files("stepgraph.report") / "assets" / name).read_text(encoding="utf-8")
