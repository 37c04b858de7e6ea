"""The protocol of classifiers, implemented for torch, vLLM and SGLang."""

from collections.abc import Sequence
from typing import Protocol

from trackway.rollout.engines.protocol import EngineStats


class Classifier(Protocol):
    """One model on one replica. All methods are called on the same event loop."""

    @property
    def max_len(self) -> int:
        """Longest input in tokens."""
        ...

    async def start(self) -> None:
        """Load the weights and become ready."""
        ...

    async def stop(self) -> None:
        """Stop. Inputs that wait are answered UNAVAILABLE."""
        ...

    async def classify(self, token_ids: Sequence[int]) -> float:
        """Return the logit of an input. Cancelling the call frees its place in the queue.

        Raises INVALID_REQUEST for an input that is too long or has unknown ids, OVERLOADED when the queue is full,
        ENGINE_FAILED when the logit is not finite or the model failed, UNAVAILABLE for a server that has ended.
        """
        ...

    def stuck_for(self) -> float:
        """Seconds without progress although there is work. 0.0 when idle, infinite when a server is lost."""
        ...

    def stats(self) -> EngineStats:
        """Inputs in work and in the queue, and totals since the start. A batch is a step."""
        ...
