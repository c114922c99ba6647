"""Ways in and out: PyTorch modules, safetensors, ONNX."""
