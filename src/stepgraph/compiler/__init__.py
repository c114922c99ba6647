"""Pure transformations from a wired graph to what a device runs; nothing here holds user-visible state.

`step` says what to compute, `trace` records it once as a graph of operators, `phases` cuts that graph into the
parts that run on their own, `kernels` holds faster implementations, `memory` knows every buffer's birth and death.
"""
