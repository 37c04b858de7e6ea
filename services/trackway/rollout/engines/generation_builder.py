"""Joins the parts of a generation: pieces of a stream, or the tokens before and after an update; top logprobs."""

import math
from collections.abc import Iterable

from trackway.rollout.engines.protocol import FinishReason, Generation, Piece
from trackway.wire.rollout import PromptLogprobs, TopLogprobs
from trackway.wire.trajectory import WeightSpan, add_span, settle_spans


def top_logprobs(candidates: Iterable[tuple[int, float]], token: int, logprob: float, count: int) -> TopLogprobs:
    """The sampled token and the `count - 1` most likely others, highest first, as vLLM selects them.

    Without a candidate of probability 0, so there may be fewer.
    """
    others = [(other, value) for other, value in candidates if other != token and value > -math.inf]
    others = sorted(others, key=_by_value)[: count - 1]
    return sorted([*others, (token, logprob)], key=_by_value)


def _by_value(pair: tuple[int, float]) -> float:
    return -pair[1]


class Collector:
    """Joins parts. The finish reason is `abort` until a part has one."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._spans: list[WeightSpan] = []
        self._finish_reason: FinishReason = "abort"
        self._cached_tokens = 0
        self._prompt_logprobs: PromptLogprobs | None = None

    def add(self, part: Piece | Generation) -> None:
        """The next part."""
        start = len(self.token_ids)
        if isinstance(part, Piece):
            add_span(self._spans, part.version, start, start + len(part.token_ids))
            settle_spans(self._spans, part.weight_versions)
        else:
            for span in part.spans:
                add_span(self._spans, span.version, start + span.start, start + span.end, span.kv_version)
        self.token_ids.extend(part.token_ids)
        self._logprobs.extend(part.logprobs)
        self._top_logprobs.extend(part.top_logprobs)
        self._finish_reason = part.finish_reason or self._finish_reason
        self._cached_tokens = self._cached_tokens or part.cached_tokens
        self._prompt_logprobs = part.prompt_logprobs or self._prompt_logprobs

    def generation(self, finish_reason: FinishReason | None = None) -> Generation:
        """The joined generation, with the last finish reason or the given one."""
        reason = finish_reason or self._finish_reason
        tops = tuple(self._top_logprobs)
        return Generation(
            self.token_ids, self._logprobs, reason, self._spans, tops, self._cached_tokens, self._prompt_logprobs
        )
