"""Faster implementations of what a step does, beside the reference; tests compare the two."""

from stepgraph.compiler.kernels.update import named, number_type, update

__all__ = ["named", "number_type", "update"]
