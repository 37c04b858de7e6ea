"""Deterministic kernels for a learner's process."""

import os

import torch
from transformers import set_seed


def make_deterministic(seed: int) -> None:
    """Seeds the generators of Python, NumPy and PyTorch, and takes PyTorch's deterministic kernels, in this process.

    As verl's `enable_full_determinism` does, an operation without such a kernel is warned of. Call it before the first
    computation on a GPU, which reads the environment.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    set_seed(seed % 2**32)  # NumPy's range
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
