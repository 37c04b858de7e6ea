"""What the answers of both routes share: their head, the names of tokens, the counts, and the chunks of a stream."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NotRequired, TypedDict

from trackway.rollout.openai.stream_decoder import Delta
from trackway.rollout.tokenizer import Tokenizer
from trackway.wire.openai.replies import OpenAIReply
from trackway.wire.openai.requests import SampledRequest
from trackway.wire.rollout import Usage
from trackway.wire.trajectory import WeightSpan


class Head(TypedDict):
    """The fields with which every answer and every chunk begins."""

    id: str
    created: int
    model: str
    usage: NotRequired[Usage | None]


class Ids(TypedDict, total=False):
    """The fields of a choice that `return_token_ids` adds."""

    token_ids: list[int]
    weight_versions: list[WeightSpan]


class Answer(ABC):
    """One request being answered."""

    prefix: str

    def __init__(self, request: SampledRequest, tokenizer: Tokenizer, prompts: Sequence[list[int]]) -> None:
        self.prompts = prompts
        self._asked, self._tokenizer = request, tokenizer
        self._head: Head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }

    @property
    def id(self) -> str:
        """The answer's id, which is also the `request_id` of its generation."""
        return self._head["id"]

    @abstractmethod
    def whole(self, deltas: Sequence[Delta]) -> OpenAIReply:
        """The answer, from one delta for each choice."""

    @abstractmethod
    def _chunk(self, head: Head, index: int, delta: Delta, is_first: bool) -> OpenAIReply | None:
        """What a delta changes for the client, if anything."""

    @abstractmethod
    def _counts(self, head: Head) -> OpenAIReply:
        """The chunk without choices."""

    async def events(self, arriving: AsyncGenerator[tuple[int, Delta]]) -> AsyncGenerator[str]:
        """The answer in chunks."""
        options = self._asked.stream_options
        counted = options is not None and options.include_usage
        head: Head = {**self._head, "usage": None} if counted else self._head
        begun, made = set[int](), 0
        async with aclosing(arriving):
            async for index, delta in arriving:
                made += len(delta.token_ids)
                chunk = self._chunk(head, index, delta, index not in begun)
                begun.add(index)
                if chunk is not None:
                    yield chunk.sent()
        if counted:
            yield self._counts({**self._head, "usage": self._usage(made)}).sent()

    def _usage(self, made: int) -> Usage:
        given = sum(map(len, self.prompts))
        return Usage(prompt_tokens=given, completion_tokens=made, total_tokens=given + made)

    def _ids(self, delta: Delta) -> Ids:
        asked = self._asked.return_token_ids
        return {"token_ids": delta.token_ids, "weight_versions": delta.spans} if asked else {}

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._asked.return_tokens_as_token_ids else self._token_text(token_id)

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
