"""What the rollout service needs of an engine: torch, vLLM, SGLang and sim differ behind this Protocol."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from trackway.rollout.engines.weight_proof import Judgement
from trackway.wire.rollout import MemoryPart, PauseMode, SamplingParams
from trackway.wire.trajectory import WeightSpan
from trackway.wire.weights import WeightProof

FinishReason = Literal["stop", "length", "abort"]


class Capability(StrEnum):
    """What an engine can do beyond generating; a route that needs more than there is refuses."""

    WAIT = "wait"
    """Pause by letting requests finish."""
    ABORT = "abort"
    """Pause by cutting requests, which return what they have."""
    KEEP = "keep"
    """Pause by freezing requests, which go on with their KV cache after resume."""
    SLEEP = "sleep"
    """Give its memory back while the trainer needs it, and take it again, part by part."""
    SPANS = "spans"
    """Say which weights generated which tokens when they changed under a request."""
    CANARY = "canary"
    """Prove new weights by what it answers before a request sees them."""


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt: ids, their logprobs under the sampling distribution, and weight spans."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    spans: list[WeightSpan]


@dataclass(frozen=True)
class Piece:
    """The next tokens of a streamed continuation; `finish_reason` is None but in the last piece, which may be empty."""

    token_ids: list[int]
    logprobs: list[float]
    version: int
    """Of the weights that made these tokens."""
    finish_reason: FinishReason | None = None


class EngineStats(NamedTuple):
    """Counts since the start (tokens, steps) and of now (running, waiting)."""

    running: int
    waiting: int
    steps: int
    generated_tokens: int
    prefilled_tokens: int
    reused_tokens: int
    """Prompt tokens whose KV was taken from a slot instead of computed."""


class Engine(Protocol):
    """One model on one replica. All methods are called on one event loop."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What it can do."""
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
        """What is known of the weights that serve; None for the base weights and for those without a proof."""
        ...

    @property
    def paused(self) -> bool:
        """Whether new requests are refused."""
        ...

    @property
    def asleep(self) -> frozenset[MemoryPart]:
        """Parts of its memory that are given back; empty for an engine without SLEEP."""
        ...

    async def start(self) -> None:
        """Load the base weights (version 0) and be able to generate."""
        ...

    async def stop(self) -> None:
        """End; requests in flight return as aborted."""
        ...

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> Generation:
        """Continue a prompt; cancelling the call aborts the request.

        Raises INVALID_REQUEST for a prompt that is too long or has unknown ids, OVERLOADED when the queue is full,
        PAUSED while paused, ENGINE_FAILED when the model's output is not finite or a step failed.
        """
        ...

    def stream(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> AsyncGenerator[Piece]:
        """As `generate`, in pieces as they are made; joined they equal what `generate` returns for the same seed.

        Closing the iterator aborts the request.
        """
        ...

    async def abort(self, request_id: str) -> int:
        """Cut the requests of this id, which return what they have; returns how many there were."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Refuse new requests; return when those in flight have finished, are cut, or are frozen."""
        ...

    async def resume(self) -> None:
        """Take requests again and go on with the frozen ones; raises CONFLICT while memory is given back."""
        ...

    async def load_weights(self, folder: Path, version: int, proof: WeightProof | None) -> None:
        """All or nothing: replace the weights between two steps, after the files and the proof were right.

        Requests in flight go on with their KV cache, or are cut as by `abort` where the engine lacks KEEP; nothing
        computed by old weights is reused by new requests. An engine that can score only what it has loaded rolls back
        when the proof fails: it never returns a token of the weights that failed. Raises WEIGHTS_STALE or
        WEIGHTS_CORRUPT and keeps the old weights otherwise. Called by one caller at a time, also while paused.
        """
        ...

    async def sleep(self, parts: Sequence[MemoryPart]) -> None:
        """Give the memory of these parts back; needs SLEEP and a paused engine. Idempotent."""
        ...

    async def wake_up(self, parts: Sequence[MemoryPart]) -> None:
        """Take the memory of these parts again; weights come back as they were or are loaded anew. Idempotent."""
        ...

    def stuck_for(self) -> float:
        """Seconds since the engine last got anything done although it had something to do; 0.0 when it is idle."""
        ...

    def stats(self) -> EngineStats:
        """What it has done and is doing."""
        ...
