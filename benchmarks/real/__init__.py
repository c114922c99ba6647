"""Models of the sizes people train, in bfloat16 on a GPU: GPT-2, Llama, BERT, ViT, ResNet-50 and U-Net.

`modules.py` has each model for `torch.nn`, `graphs.py` for stepgraph's own layers, from the same weights.
"""
