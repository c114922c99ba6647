"""Imported once by the server that forks training processes, so that each of them compiles without importing again."""

from tests.checkpoint_runs import compiled, network

compiled(network())
