"""Tensors: their descriptors, the memory behind them, and their quantized form."""
