"""Takes the place of SGLang's compiled kernels: SGLang runs its PyTorch code for a dense text model without them.

SGLang imports the kernels' names when it starts and calls none of them here. Every process of SGLang imports this
module, so it also replaces pinned memory, which PyTorch has beside an accelerator only, by ordinary memory.
"""

from collections.abc import Callable
from typing import Any

import torch


def __getattr__(name: str) -> Callable[..., Any]:
    if name.endswith("_cpu"):
        return _missing(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _missing(name: str) -> Callable[..., Any]:
    def kernel(*_: object, **__: object) -> None:
        raise NotImplementedError(f"expected no call of sgl_kernel.{name} on this machine, which has no such kernel")

    return kernel


def _without_pinning(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def created(*args: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return create(*args, **options)

    return created


if not torch.accelerator.is_available():
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # pyright: ignore[reportAttributeAccessIssue]
    for _create in (torch.arange, torch.empty, torch.full, torch.ones, torch.tensor, torch.zeros):
        setattr(torch, _create.__name__, _without_pinning(_create))
