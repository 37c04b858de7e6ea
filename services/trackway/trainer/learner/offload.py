"""Tensors that wait in main memory while their device is not needed for them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_MAIN_MEMORY = torch.device("cpu")


class CpuOffload:
    """Where some tensors are: on `device` inside at_hand(), and outside of it in main memory if they are offloaded.

    `tensors` is asked anew at each move, since an optimizer makes its state at the first step. Tensors stay the same
    objects: only their data moves, so a parameter and what an optimizer knows of it are one still. `frozen` tensors
    never change on the device, so the originals are kept and nothing is copied back.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        *,
        offload: bool = False,
        frozen: bool = False,
    ) -> None:
        self.here = not offload
        """Whether the tensors are on their device now."""
        self._tensors = tensors
        self._device = device
        self._offload = offload
        self._keeps_originals = offload and frozen
        self._originals: dict[int, Tensor] = {}

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """While open the tensors are on their device; opening it again inside changes nothing."""
        if self._offload and self.here:
            yield
            return
        self._arrive()
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Puts the tensors where they are outside of at_hand(), wherever something else has put them."""
        if not self._offload:
            return
        for tensor in self._tensors():
            tensor.data = self._originals.get(id(tensor), tensor.data).to(_MAIN_MEMORY)
        self._originals.clear()
        self.here = False
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _arrive(self) -> None:
        for tensor in self._tensors():
            if self._keeps_originals:
                self._originals[id(tensor)] = tensor.data
            tensor.data = tensor.data.to(self._device)
        self.here = True
