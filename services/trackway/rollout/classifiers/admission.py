"""Admission of inputs, shared by all classifiers: a bounded number in flight, of known tokens and bounded length."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trackway.rollout.classifiers.model_info import ClassifierInfo
from trackway.rollout.engines.admission import RetryAfterEstimator, check_prompt, overloaded
from trackway.rollout.settings import DEFAULT_MAX_LEN, RolloutSettings

_FIRST_GUESS_S = 1.0


class Admission:
    """Counts inputs in flight: up to `max_num_seqs` in work and `max_queue` that wait."""

    def __init__(self, settings: RolloutSettings, info: ClassifierInfo) -> None:
        self.max_len = settings.max_model_len or min(info.max_positions, DEFAULT_MAX_LEN)
        """Longest input in tokens."""
        self.in_flight = 0
        self.tokens = 0
        """Tokens of all inputs so far."""
        self._vocab_size = info.vocab_size
        self._slots, self._bound = settings.max_num_seqs, settings.max_num_seqs + settings.max_queue
        self._retry_after = RetryAfterEstimator(settings.max_num_seqs, _FIRST_GUESS_S)

    @contextmanager
    def admit(self, token_ids: Sequence[int]) -> Iterator[None]:
        """Hold a place for an input. Raises INVALID_REQUEST and OVERLOADED as `Classifier.classify`."""
        check_prompt(token_ids, self.max_len + 1, self._vocab_size)
        began = time.monotonic()
        if self.in_flight >= self._bound:
            raise overloaded(self._bound, self._retry_after.turn_away(self.in_flight - self._slots, began))
        self.in_flight += 1
        self.tokens += len(token_ids)
        try:
            yield
        finally:
            self._retry_after.left(time.monotonic() - began, self.in_flight)
            self.in_flight -= 1
