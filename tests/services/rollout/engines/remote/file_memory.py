"""Memory that processes share as they share a GPU's: files in place of CUDA's allocations, for machines without one."""

import base64
from pathlib import Path

import torch
from torch import Tensor

from tests.services.rollout.engines.remote.file_handles import GPU
from trackway.wire.weights import SharedMemory


class FileMemory:
    """Buffers in a folder, and what CUDA would say of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths: dict[int, Path] = {}

    def allocate(self, size: int) -> Tensor:
        """A buffer of so many bytes."""
        path = self.folder / f"buffer-{len(self._paths)}"
        buffer = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        self._paths[buffer.data_ptr()] = path
        return buffer

    def share(self, buffer: Tensor) -> SharedMemory:
        """Its export; the handle is the file's path."""
        handle = base64.b64encode(str(self._paths[buffer.data_ptr()]).encode()).decode()
        return SharedMemory(
            gpu=GPU,
            handle=handle,
            size=buffer.nbytes,
            offset=0,
            counter=base64.b64encode(b"counter").decode(),
            counter_offset=3,
            event=base64.b64encode(b"event").decode(),
            event_sync=True,
        )
