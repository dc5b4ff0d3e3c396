"""The small operations of a CPU, compiled: what stands between the matrix products, in one call each.

At one row a step is some hundred products and several hundred small operations, and each of those costs more in
dispatch than in arithmetic. Here each is a loop that Numba compiles once per machine; what they mean is said in
`ops/reference`. Matrix products and attention over prompts stay with PyTorch.
"""
