"""Ways in and out: PyTorch's modules."""
