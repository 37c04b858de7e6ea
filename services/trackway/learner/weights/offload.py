"""Keeps tensors in main memory while nothing computes with them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_MAIN_MEMORY = torch.device("cpu")


class CpuOffload:
    """Moves tensors to `device` inside on_device() and, with `offload`, back to main memory after it.

    `tensors` is called at each move, since an optimizer creates its state at the first step. Only the data of a tensor
    moves: the object stays the same, so an optimizer still finds the state of its parameters. A GPU's copies in main
    memory are pinned, which transfers at the full speed of the bus, and kept for the next time. `frozen` tensors do not
    change on the device, so they are copied back once.
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
        """True if the tensors are on their device now."""
        self._tensors = tensors
        self._device = device
        self._enabled = offload
        self._frozen = frozen
        self._copies = WeakIdKeyDictionary()
        """The data of each tensor in main memory."""

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context in which the tensors are on their device. It may be nested."""
        if self._enabled and self.is_on_device:
            yield
            return
        self._load()
        try:
            yield
        finally:
            self.offload()

    def load(self) -> None:
        """Move the tensors to their device until offload()."""
        if not self.is_on_device:
            self._load()

    def offload(self) -> None:
        """Move the tensors to main memory, wherever they are. Do nothing without `offload`."""
        if not self._enabled:
            return
        self.is_on_device = False
        if self._device.type != "cuda":
            return
        for tensor in self._tensors():
            copy = self._copies.get(tensor)
            if copy is None or not self._frozen:
                copy = pinned_like(tensor.data) if copy is None else copy
                copy.copy_(tensor.data, non_blocking=True)
            self._copies[tensor] = tensor.data = copy
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _load(self) -> None:
        for tensor in self._tensors():
            tensor.data = tensor.data.to(self._device, non_blocking=True)
        self.is_on_device = True


def pinned_like(data: Tensor) -> Tensor:
    """Return a tensor of this shape and type in pinned main memory."""
    return torch.empty_like(data, device=_MAIN_MEMORY, pin_memory=True)
