"""Code written for one kind of hardware or shape. Each row of the manifest is one file, and stays while it pays.

A row stays if a whole step gets at least 3% faster on two networks of the benchmark, or 10% on one where its pattern
is general and not that network's shape: `python -m benchmarks.rent` measures it. To remove a row, delete it here, its
file and its tests. Files named `…_kernels` hold what a row launches; `gpus` serves all of them.
"""

from __future__ import annotations

from stepgraph.compiler.tuned import (
    attention_in_tiles,
    narrow_products,
    pool_gradients,
    products_by_onednn,
    replay,
    small_convolutions,
    small_products,
    sums_by_convolution,
    weight_gradients_in_tiles,
    winograd,
)
from stepgraph.compiler.tuned.row import Tuned

# In the order in which their passes run.
MANIFEST: tuple[Tuned, ...] = (
    sums_by_convolution.ROW,
    products_by_onednn.ROW,
    winograd.ROW,
    small_products.ROW,
    narrow_products.ROW,
    small_convolutions.ROW,
    pool_gradients.ROW,
    attention_in_tiles.ROW,
    weight_gradients_in_tiles.ROW,
    replay.ROW,
)
