"""Admission of requests by any engine: the facts of a model, read without torch, the check of a prompt, and errors."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from trackway.rollout.engines.protocol import MemoryPart
from trackway.wire.errors import ErrorCode, TrackwayError


class _ConfigFile(BaseModel):
    """The `config.json` keys in use. A multimodal model has them in `text_config`."""

    model_config = ConfigDict(extra="ignore")

    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, object] | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Vocabulary size, maximum sequence length, stop ids, and whether the weights are quantized."""

    vocab_size: int
    max_positions: int
    eos_token_ids: frozenset[int]
    quantized: bool = False

    @classmethod
    def read(cls, folder: Path, max_positions: int | None = None) -> Self:
        """Reads `config.json`, and `generation_config.json` for the stop ids. Raises INVALID_REQUEST on failure.

        `max_positions` replaces `max_position_embeddings`.
        """
        try:
            raw = json.loads((folder / "config.json").read_text())
            file = _ConfigFile.model_validate({**raw, **raw.get("text_config", {})})
        except (OSError, ValueError, ValidationError) as error:
            message = (
                f"expected a Hugging Face model folder, got {folder}: {error}; set model_path (TRACKWAY_MODEL_PATH)"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from error
        longest, quantized = max_positions or file.max_position_embeddings, file.quantization_config is not None
        return cls(file.vocab_size, longest, _eos_ids(folder, file), quantized)


def _eos_ids(folder: Path, file: _ConfigFile) -> frozenset[int]:
    path = folder / "generation_config.json"
    eos_token_id = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    ids = file.eos_token_id if eos_token_id is None else eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])


_LEARNING = 0.1
_LONGEST_S = 60.0


class RetryAfterEstimator:
    """Spreads the retry times of rejected requests at the rate at which slots come free.

    Retries then arrive as they can be served, not all at once. Half of the queue is kept in reserve.
    """

    def __init__(self, slots: int, stay_s: float) -> None:
        self._slots = slots
        self._stay_s = stay_s
        self._promised_at = 0.0

    def left(self, stay_s: float, in_flight: int = 0) -> None:
        """Record that a request ended after so long in a slot, or in slot and queue if their count is given."""
        in_slot_s = stay_s * self._slots / max(self._slots, in_flight)  # Little's law (Little 1961)
        self._stay_s += _LEARNING * (in_slot_s - self._stay_s)

    def turn_away(self, waiting: int, now: float) -> float:
        """Seconds until a further request may find a slot, with `waiting` in the queue."""
        pace_s = self._stay_s / self._slots
        soonest = now + pace_s * max(1.0, waiting / 2)
        self._promised_at = max(soonest, min(self._promised_at + pace_s, now + _LONGEST_S))
        return self._promised_at - now


OF_POLICY = (
    "actor_rollout_ref.rollout.max_model_len, or data.max_prompt_length + data.max_response_length",
    "actor_rollout_ref.model.override_config.max_position_embeddings",
)
"""Keys of a run that set a context length, and the positions that the model is assumed to read."""
OF_REWARD_MODEL = ("reward.reward_model.rollout.max_model_len", "")


def too_long(max_model_len: int, positions: int, keys: tuple[str, str] = OF_POLICY) -> str:
    """Why a model that reads `positions` tokens cannot have this context length. Empty when it can.

    Rotary positions could be computed beyond, but the model was not trained on them. `keys` are the remedy in a run.
    """
    if max_model_len <= positions:
        return ""
    length, override = keys
    of_a_run = f"(of a run: {override}) " if override else ""
    return (
        f"max_model_len: expected at most {positions}, the most that the model's max_position_embeddings allow, got "
        f"{max_model_len}; lower it (of a run: {length}), or set max_position_embeddings {of_a_run}for a model that "
        "reads more"
    )


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
