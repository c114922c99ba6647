"""What is asked of PyTorch, Python and the operating system around every call: modes, signals, files."""
