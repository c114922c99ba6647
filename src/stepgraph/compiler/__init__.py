"""Pure transformations from a wired graph to what a device runs; nothing here holds user-visible state.

`step` describes what to compute, `trace` records it once as a graph of operators, `phases` splits that graph into
parts that run separately, `kernels` holds faster implementations, `memory` computes the lifetime of every buffer.
"""
