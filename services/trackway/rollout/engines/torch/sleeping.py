"""Weights of the embedded engine while it sleeps: a GPU's in pinned main memory, a CPU's in a file.

Main memory is what a sleeping CPU engine gives away, so its copy goes to an unnamed file in the temporary folder. A
copy does not depend on the folder that the weights were read from, which may have been pruned from the store.
"""

import contextlib
import gc
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from trackway.rollout.engines.torch.decoder import DecoderWeights
from trackway.system import writing
from trackway.wire.errors import ErrorCode, TrackwayError

_SUMMED = 1 << 22
"""Values that are summed at a time: the sum widens each to 8 bytes."""


class SleepingWeights:
    """A copy of weights. `shapes` stands in for them and holds no memory."""

    def __init__(self, weights: DecoderWeights) -> None:
        """Copies the weights. Raises StorageError when the disk is full or not writable."""
        self._device = weights.embed.device
        tensors = weights.tensors()
        with torch.inference_mode():
            self.shapes = weights.mapped(lambda tensor: tensor.to("meta"))
            self._sums = bit_sums(tensors)
            on_gpu = self._device.type != "cpu"
            self._pinned = [_pinned(tensor) for tensor in tensors] if on_gpu else []
            self._file = None if on_gpu else _written(tensors)
        if self._file is not None:
            weakref.finalize(self, self._file.close)

    def restored(self) -> DecoderWeights:
        """The weights on their device. Raises ENGINE_FAILED unless their bits are those that went to sleep."""
        with torch.inference_mode():
            tensors = self._copied_back()
            if bit_sums(tensors) != self._sums:
                message = "expected the weights that went to sleep, got other bits; restart this replica"
                raise TrackwayError(ErrorCode.ENGINE_FAILED, message)
        restored = iter(tensors)
        return self.shapes.mapped(lambda _: next(restored))

    def _copied_back(self) -> list[Tensor]:
        if self._file is None:
            return [copy.to(self._device, non_blocking=True) for copy in self._pinned]
        return _read(self._file, self.shapes.tensors())


def bit_sums(tensors: Sequence[Tensor]) -> list[int]:
    """The sums of the tensors' bit patterns as integers, several of a large tensor."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    parts = [part for tensor in tensors for part in tensor.flatten().view(kinds[tensor.itemsize]).split(_SUMMED)]
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).tolist()  # one synchronization with the device


def release_cached_memory(device: torch.device) -> None:
    """Gives the GPU what PyTorch's cache holds of freed tensors, out of reach of other processes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _written(tensors: Sequence[Tensor]) -> IO[bytes]:
    with writing(Path(tempfile.gettempdir()), "the weights of a sleeping engine"):
        file = tempfile.TemporaryFile(prefix="trackway-asleep-")  # noqa: SIM115  open as long as the sleep
        try:
            for tensor in tensors:
                file.write(_bytes(tensor))
            file.flush()
        except BaseException:
            with contextlib.suppress(OSError):
                file.close()
            raise
    return file


def _read(file: IO[bytes], shapes: Sequence[Tensor]) -> list[Tensor]:
    file.seek(0)
    tensors = [torch.empty(shape.shape, dtype=shape.dtype) for shape in shapes]
    for tensor in tensors:
        file.readinto(_bytes(tensor))  # pyright: ignore[reportAttributeAccessIssue]
    return tensors


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data
