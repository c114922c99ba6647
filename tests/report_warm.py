"""Imported once by the server that forks training processes, so that each of them compiles without importing again."""

from tests.report_runs import network

network()
