"""The engine protocol, implemented for torch, vLLM, SGLang and engines by `module:Class`.

`GenerationBuilder` joins the parts of a generation: pieces of a stream, or the tokens before and after an update.
"""

import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from trackway.rollout.engines.weight_proof import Judgement
from trackway.wire.rollout import EngineLoad, MemoryPart, PauseMode, PromptLogprobs, SamplingParams, TopLogprobs
from trackway.wire.trajectory import WeightSpan, add_span, settle_spans
from trackway.wire.weights import WeightProof

FinishReason = Literal["stop", "length", "abort"]
Swapping = Callable[[], AbstractAsyncContextManager[None]]
"""Opens a context around the part of a load that changes what the engine serves."""


class Capability(StrEnum):
    """Optional features of an engine. A route that needs a missing one is refused."""

    WAIT = "wait"
    """Pause after the requests in flight have finished."""
    ABORT = "abort"
    """Pause by aborting requests, which return their tokens so far."""
    KEEP = "keep"
    """Pause by freezing requests, which continue with their KV cache after resume."""
    SLEEP = "sleep"
    """Release memory for the trainer and allocate it again, in parts."""
    SPANS = "spans"
    """Report which weights generated which tokens when they change during a request."""
    TOP_LOGPROBS = "top_logprobs"
    """Return the most likely tokens of each position."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """Score the prompt of a request."""
    STRUCTURED_OUTPUTS = "structured_outputs"
    """Guide the sampling by a grammar."""


@dataclass(frozen=True)
class Generation:
    """The generation for a prompt: ids, logprobs under the sampling distribution, and weight spans."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    spans: list[WeightSpan]
    top_logprobs: Sequence[TopLogprobs] = ()
    """The most likely tokens of each position. Empty unless asked for."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused from the cache, if the engine tells."""
    prompt_logprobs: PromptLogprobs | None = None
    """The scored prompt, if asked for. None if the request was aborted before."""


@dataclass(frozen=True)
class Piece:
    """The next tokens of a stream. `finish_reason` is None except in the last piece, which may be empty."""

    token_ids: list[int]
    logprobs: list[float]
    version: int
    """Version of the weights that generated these tokens, or the oldest that it can be, until a later piece has
    `weight_versions`."""
    finish_reason: FinishReason | None = None
    top_logprobs: Sequence[TopLogprobs] = ()
    """Same as in Generation."""
    weight_versions: Sequence[WeightSpan] = ()
    """Spans of all tokens of the request, which replace the versions of its pieces. In the last piece of an engine
    that learns them at the end."""
    cached_tokens: int = 0
    """Same as in Generation; in the last piece."""
    prompt_logprobs: PromptLogprobs | None = None
    """The scored prompt, if asked for; in one piece."""


class EngineStats(NamedTuple):
    """Totals since the start (tokens, steps) and current numbers (running, waiting)."""

    running: int
    waiting: int
    steps: int
    generated_tokens: int
    prefilled_tokens: int
    reused_tokens: int
    """Prompt tokens whose KV was reused from the cache."""
    transferred_weights: int = 0
    """Weight versions taken from the learner's memory."""
    weight_fallbacks: int = 0
    """Versions that were offered there and then read from the store."""


class Engine(Protocol):
    """One model on one replica. All methods are called on the same event loop."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The engine's optional features."""
        ...

    @property
    def version(self) -> int:
        """Weight version of the next token."""
        ...

    @property
    def max_len(self) -> int:
        """Longest prompt plus response in tokens."""
        ...

    @property
    def judgement(self) -> Judgement | None:
        """The verdict on the current weights, or None for the base weights."""
        ...

    @property
    def paused(self) -> bool:
        """Return whether new requests are refused."""
        ...

    @property
    def asleep(self) -> frozenset[MemoryPart]:
        """Parts of the memory that are released. Empty for an engine without SLEEP."""
        ...

    async def start(self) -> None:
        """Load the base weights (version 0) and become ready."""
        ...

    async def stop(self) -> None:
        """Stop. Requests in flight return as aborted."""
        ...

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> Generation:
        """Continue a prompt. Cancelling the call aborts the request.

        Raises INVALID_REQUEST for a prompt that is too long or has unknown ids, OVERLOADED when the queue is full,
        PAUSED while paused, ENGINE_FAILED when the model's output is not finite or a step failed.
        """
        ...

    def stream(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> AsyncGenerator[Piece]:
        """Like `generate`, in pieces; joined they equal the result of `generate` for the same seed.

        Closing the iterator aborts the request.
        """
        ...

    async def abort(self, request_id: str) -> int:
        """Abort the requests with this id, which return their tokens so far. Returns their number."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Refuse new requests. Returns when those in flight have finished, are aborted, or are frozen."""
        ...

    async def resume(self) -> None:
        """Accept requests again and continue frozen ones. Raises CONFLICT while memory is released."""
        ...

    async def load_weights(
        self, folder: Path, version: int, proof: WeightProof, swapping: Swapping = nullcontext
    ) -> None:
        """Replace the weights between two steps, once files and proof are verified; all or nothing.

        What can be read and verified beside the old weights is, before `swapping` is entered.
        Requests in flight continue with their KV cache, or are aborted if the engine lacks KEEP; new requests reuse
        nothing computed by old weights. An engine that can score only loaded weights rolls back when the proof fails
        and never returns a token of the rejected weights. On failure the old weights stay, and WEIGHTS_STALE or
        WEIGHTS_CORRUPT is raised. Raises CONFLICT while the weights sleep. Not called concurrently; allowed while
        paused.
        """
        ...

    async def sleep(self, parts: Sequence[MemoryPart]) -> None:
        """Release the memory of these parts. Needs SLEEP and a paused engine without requests. Idempotent."""
        ...

    async def wake_up(self, parts: Sequence[MemoryPart]) -> None:
        """Allocate the memory of these parts. Weights are restored or loaded again, and are those that slept.

        Idempotent. Raises UNAVAILABLE without the memory for them.
        """
        ...

    def stuck_for(self) -> float:
        """Seconds without progress although there is work. 0.0 when idle."""
        ...

    def stats(self) -> EngineStats:
        """The engine's counters."""
        ...

    async def load(self) -> EngineLoad:
        """The engine's requests and KV cache. Raises UNAVAILABLE."""
        ...


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
