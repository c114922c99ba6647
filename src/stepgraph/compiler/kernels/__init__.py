"""Faster implementations of what a step computes, besides the reference; tests compare the two."""

from stepgraph.compiler.kernels.batch_norm import expand_batch_norms
from stepgraph.compiler.kernels.choose import choose_kernels
from stepgraph.compiler.kernels.gelu import expand_gelu
from stepgraph.compiler.kernels.layer_norm import expand_layer_norms
from stepgraph.compiler.kernels.preferences import preferred
from stepgraph.compiler.kernels.statistics import expand_statistics
from stepgraph.compiler.kernels.update import (
    MANY,
    Rules,
    named,
    number_type,
    expand_updates,
    remember_updates,
    update,
)
from stepgraph.compiler.kernels.update_kernel import Update

__all__ = [
    "MANY",
    "choose_kernels",
    "named",
    "number_type",
    "expand_batch_norms",
    "expand_gelu",
    "expand_layer_norms",
    "expand_statistics",
    "expand_updates",
    "preferred",
    "remember_updates",
    "Rules",
    "Update",
    "update",
]
