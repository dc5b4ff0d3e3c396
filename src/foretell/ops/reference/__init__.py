"""Every operation in plain PyTorch: the specification of the kernels, and the CPU path."""
