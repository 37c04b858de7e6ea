"""Checks that weights and logprobs are finite before they are published, saved or loaded."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the trainer service reads checkpoints without torch; its runs have it
    from torch import Tensor

SHOWN_TENSORS = 3


class NotFiniteError(ValueError):
    """Weights, or values computed with them, contain NaN or infinities."""


def require_finite(tensors: Mapping[str, "Tensor"]) -> None:
    """Raises NotFiniteError, with the names of the tensors, unless every value of them all is finite.

    The sum of a tensor is NaN or infinite when one of its values is, and needs no mask of the tensor's size. The sum
    of huge finite values may overflow too, so each value is checked when the sum is not finite.
    """
    require_none(tensors, [not_finite(tensor) for tensor in tensors.values()])


def require_none(tensors: Mapping[str, "Tensor"], counts: Sequence[int]) -> None:
    """Raises NotFiniteError unless the number of values that are not finite is 0 for each of the tensors."""
    bad = {name: count for name, count in zip(tensors, counts, strict=True) if count}
    if not bad:
        return
    shown = ", ".join(
        f"{name} ({count} of {tensors[name].numel()})" for name, count in list(bad.items())[:SHOWN_TENSORS]
    )
    more = f" and {len(bad) - SHOWN_TENSORS} tensors more" if len(bad) > SHOWN_TENSORS else ""
    raise NotFiniteError(f"expected finite weights, got NaN or infinities in {shown}{more}")


def require_finite_logprobs(logprobs: Sequence[float]) -> None:
    """Raises NotFiniteError unless every logprob is finite."""
    bad = [logprob for logprob in logprobs if not math.isfinite(logprob)]
    if bad:
        raise NotFiniteError(
            f"expected finite logprobs, got {bad[0]} ({len(bad)} of {len(logprobs)} are not); the weights are finite, "
            "but too large to compute with"
        )


def not_finite(tensor: "Tensor") -> int:
    """The number of values that are not finite."""
    if not tensor.is_floating_point() or bool(tensor.detach().sum().isfinite()):
        return 0
    return int((~tensor.detach().isfinite()).sum())
