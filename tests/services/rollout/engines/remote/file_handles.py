"""The worker's side of `file_memory`, for interpreters without Trackway."""

from typing import Any

import torch
from torch import Tensor

GPU = "GPU-0"


def opened(handles: dict[str, tuple[Any, ...]]) -> Tensor:
    """The buffer of an export that was made for `rebuild_cuda_tensor`, as vLLM's worker has it."""
    tensor_cls, size, stride, at, _, dtype, _, handle, size_bytes, offset, grad, *rest = handles[GPU]
    if (tensor_cls, stride, at, dtype, offset, grad) != (Tensor, (1,), 0, torch.uint8, 0, False):
        raise ValueError(f"expected the export of a buffer of bytes, got {handles[GPU]}")
    if rest != [b"counter", 3, b"event", True] or list(size) != [size_bytes]:
        raise ValueError(f"expected the counter and the event of the export, got {rest}")
    return torch.from_file(handle.decode(), shared=True, size=size_bytes, dtype=torch.uint8)
