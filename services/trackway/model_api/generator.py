"""Protocol that a user of this package provides: it continues token ids."""

from collections.abc import AsyncGenerator, Sequence
from typing import Literal, Protocol

from trackway.wire.rollout import GenerateReply, GenerateRequest, PromptLogprobs, TopLogprobs
from trackway.wire.trajectory import WeightSpan

FinishReason = Literal["stop", "length", "abort"]


class StreamedTokens(Protocol):
    """The next tokens of a stream. `finish_reason` is None except in the last, which may be empty."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def logprobs(self) -> list[float]: ...

    @property
    def top_logprobs(self) -> Sequence[TopLogprobs]:
        """The most likely tokens of each position. Empty unless asked for."""
        ...

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The scored prompt, if asked for; once in a stream."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights that generated these tokens, or the oldest that it can be."""
        ...

    @property
    def weight_versions(self) -> Sequence[WeightSpan]:
        """Spans of the last tokens up to here, which replace the versions told before."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None: ...


class Generates(Protocol):
    """Continues a prompt of token ids, whole or streamed. Raises TrackwayError."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """The whole continuation. Cancelling the call aborts it."""
        ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[StreamedTokens]:
        """Stream `generate` as the tokens come. Closing the iterator aborts the generation."""
        ...
