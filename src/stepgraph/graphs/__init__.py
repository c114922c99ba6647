"""Graphs that are compiled and executed: training and inference."""
