"""Imported once by the process that ranks are forked from: compiling a network imports most of PyTorch.

It has differentiated then, so these tests also show that processes forked from such a one can still compile.
"""

import torch

from tests.parallel_runs import trained

torch.set_num_threads(1)
trained("mlp", 1)
