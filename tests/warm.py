"""Imported once by the process that others are forked from: compiling a network imports most of PyTorch.

It has differentiated then, so these tests also show that processes forked from such a one can still compile.
"""

import torch

from tests import checkpoint_runs, report_runs  # noqa: F401
from tests.parallel_runs import trained

torch.set_num_threads(1)
trained("mlp", 1)
