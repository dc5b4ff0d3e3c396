"""The operations of `ops/reference` as Triton kernels: same names, same meaning, for CUDA devices of any generation.

Each file has the launchers first and the kernels behind them. Grids depend on shapes and host-side bounds only, nothing
waits for the device and nothing is read back, so that every launcher can be captured in a CUDA graph. With
TRITON_INTERPRET=1 (set before the first import) the same kernels run on the CPU, slowly, for tests.
"""
