"""Interfaces to PyTorch, Python and the operating system around every call: modes, signals, files."""
