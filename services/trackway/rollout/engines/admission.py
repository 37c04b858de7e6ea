"""Admission errors shared by all engines."""

from collections.abc import Iterable, Sequence

from trackway.rollout.engines.protocol import MemoryPart
from trackway.wire.errors import ErrorCode, TrackwayError


def check_prompt(token_ids: Sequence[int], max_len: int, vocab_size: int) -> None:
    """Raises INVALID_REQUEST for a prompt without room for an answer, or with unknown token ids."""
    if not 0 < len(token_ids) < max_len:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"expected 1 to {max_len - 1} prompt tokens, got {len(token_ids)}; raise max_model_len",
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"expected token ids in 0..{vocab_size - 1}, got {min(token_ids)}..{max(token_ids)}; "
            "use the served model's tokenizer",
        )


def overloaded(bound: int, retry_after_s: float) -> TrackwayError:
    """The error for a request beyond `bound`; `retry_after` in seconds."""
    return TrackwayError(
        ErrorCode.OVERLOADED,
        f"expected fewer than {bound} requests in flight, got one more; retry later or add replicas",
        bound=bound,
        retry_after_s=round(retry_after_s, 3),
    )


def paused() -> TrackwayError:
    """The error for a request while generation is paused."""
    return TrackwayError(ErrorCode.PAUSED, "generation is paused; retry after /resume")


def asleep(parts: Iterable[MemoryPart]) -> TrackwayError:
    """The error for a resume while these parts of the memory are released."""
    got = " and ".join(sorted(parts))
    return TrackwayError(ErrorCode.CONFLICT, f"expected all memory to be awake, got {got} asleep; POST /wake_up first")
