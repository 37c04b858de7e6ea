"""Keeps tensors in main memory while nothing computes with them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_MAIN_MEMORY = torch.device("cpu")


class CpuOffload:
    """Moves tensors to `device` inside on_device() and, with `offload`, back to main memory after it.

    `tensors` is called at each move, since an optimizer creates its state at the first step. Only the data of a tensor
    moves: the object stays the same, so an optimizer still finds the state of its parameters. `frozen` tensors do not
    change on the device, so their originals are kept and nothing is copied back.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        *,
        offload: bool = False,
        frozen: bool = False,
    ) -> None:
        self.is_on_device = not offload
        """Whether the tensors are on their device now."""
        self._tensors = tensors
        self._device = device
        self._enabled = offload
        self._keeps_originals = offload and frozen
        self._originals: dict[int, Tensor] = {}

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context in which the tensors are on their device; it may be nested."""
        if self._enabled and self.is_on_device:
            yield
            return
        self._load()
        try:
            yield
        finally:
            self.offload()

    def offload(self) -> None:
        """Moves the tensors to main memory, wherever they are; does nothing without `offload`."""
        if not self._enabled:
            return
        for tensor in self._tensors():
            tensor.data = self._originals.get(id(tensor), tensor.data).to(_MAIN_MEMORY)
        self._originals.clear()
        self.is_on_device = False
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self) -> None:
        for tensor in self._tensors():
            if self._keeps_originals:
                self._originals[id(tensor)] = tensor.data
            tensor.data = tensor.data.to(self._device)
        self.is_on_device = True
