"""Weights that are not finite: never published, saved, or loaded."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

SHOWN_TENSORS = 3


class NotFiniteError(ValueError):
    """Weights, or what a model computes with them, hold NaN or infinities."""


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises NotFiniteError, with the names of the tensors, unless every value of them all is finite.

    A sum is NaN or infinite when one of its values is: it reads the tensor once, and makes no mask of its size. Only
    when the sum is not finite, which that of huge finite values may be too, is each value looked at.
    """
    bad = {name: count for name, tensor in tensors.items() if (count := _count(tensor))}
    if not bad:
        return
    shown = ", ".join(
        f"{name} ({count} of {tensors[name].numel()})" for name, count in list(bad.items())[:SHOWN_TENSORS]
    )
    more = f" and {len(bad) - SHOWN_TENSORS} tensors more" if len(bad) > SHOWN_TENSORS else ""
    raise NotFiniteError(f"expected finite weights, got NaN or infinities in {shown}{more}")


def require_finite_logprobs(logprobs: Sequence[float]) -> None:
    """Raises NotFiniteError unless they are what a working model gives."""
    bad = [logprob for logprob in logprobs if not math.isfinite(logprob)]
    if bad:
        raise NotFiniteError(
            f"expected finite logprobs, got {bad[0]} ({len(bad)} of {len(logprobs)} are not); the weights are finite, "
            "but too large to compute with"
        )


def _count(tensor: Tensor) -> int:
    """Values that are not finite."""
    if not tensor.is_floating_point() or bool(tensor.detach().sum().isfinite()):
        return 0
    return int((~tensor.detach().isfinite()).sum())
