"""Pure transformations from a wired graph to what a device runs; nothing here holds user-visible state.

`step` describes what to compute, `trace` records it once as a graph of operators, `phases` splits that graph into
parts that run separately. `pipeline` lists the `passes` that rewrite it, `kernels` and `tuned` hold faster
implementations, `memory` computes the lifetime of every buffer, `fusion` asks PyTorch's compiler for larger kernels.
`ranks` has what several processes need besides.
"""
