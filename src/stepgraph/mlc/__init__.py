"""ML Compute's API as spelled by PyObjC, on top of stepgraph's own objects.

    import stepgraph.mlc as MLCompute

    graph = MLCompute.MLCGraph.graph()
    result = graph.nodeWithLayer_source_(MLCompute.MLCActivationLayer.reluLayer(), tensor)

Classes, constants and functions come from the tables under `tables/`; `python -m stepgraph.mlc --coverage` counts them.
Rejected calls return nil (None) or NO (False), never an exception: `lastError()` says why, and the log has one line
per reason. `face.native` is the stepgraph object, and stepgraph objects are accepted wherever a face is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepgraph.mlc.names import NAMES as NAMES
from stepgraph.mlc.refusals import MLCError as MLCError, lastError as lastError

globals().update(NAMES)
__all__ = [*NAMES, "MLCError", "lastError"]  # noqa: PLE0604  # they are strings

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
