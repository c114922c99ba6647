"""Cases of the layer around a PyTorch module; its numbers are compared with PyTorch in `tests/test_torch_layer.py`."""

import numpy as np
import torch
from torch import nn

from stepgraph.errors import ShapeError
from stepgraph.layers.torch_layer import TorchLayer
from tests.layers.case import Bad, Case, normal

CASES = [
    Case(
        "module",
        lambda: TorchLayer(nn.Softsign()),
        (normal(4, 3, 2),),
        lambda x: x / (1 + np.abs(x)),
        torch.nn.functional.softsign,
        bad=(Bad(((4, 3), (4, 3)), ShapeError, "takes 2 positional arguments but 3 were given"),),
    ),
    Case(
        "module of two sources",
        lambda: TorchLayer(nn.CosineSimilarity(dim=1)),
        (normal(4, 3), normal(4, 3)),
        lambda x, y: (x * y).sum(1) / np.sqrt((x * x).sum(1) * (y * y).sum(1)),
        torch.cosine_similarity,
    ),
]
