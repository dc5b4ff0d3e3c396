"""Kernels run compiled where there is a GPU, and in Triton's interpreter where there is none (small sizes: it is slow).

The variable is read when a kernel is defined, so it is set before any test module is imported.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
