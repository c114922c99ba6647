"""Tensors: what they are, the memory behind them, and their quantized form."""
