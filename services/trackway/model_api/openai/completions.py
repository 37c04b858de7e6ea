"""Answers of `/v1/completions`."""

from collections.abc import Sequence

from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.message_reader import MessageReader
from trackway.model_api.openai.chunks import ChunkedResponseBuilder, Head
from trackway.model_api.stream_decoder import Delta
from trackway.wire.openai.replies import Completion, CompletionChoice
from trackway.wire.openai.requests import CompletionRequest


class CompletionResponseBuilder(ChunkedResponseBuilder):
    """Builds text completions."""

    prefix = "cmpl-"

    def __init__(self, request: CompletionRequest, tokenizer: ChatTokenizer, prompts: Sequence[list[int]]) -> None:
        super().__init__(request, tokenizer, prompts, [MessageReader() for _ in range(len(prompts) * request.n)])
        self._request = request

    def whole(self, deltas: Sequence[Delta]) -> str:
        """The choices of all prompts."""
        usage = self._usage(sum(len(delta.token_ids) for delta in deltas))
        choices = [self._choice(index, delta, True) for index, delta in enumerate(deltas)]
        return Completion(**{**self._head, "usage": usage}, object="text_completion", choices=choices).sent()

    def _chunk(self, head: Head, index: int, delta: Delta, is_first: bool) -> Completion | None:
        choice = self._choice(index, delta, is_first)
        tokens = choice.text or choice.logprobs or self._request.return_token_ids
        if not (tokens or choice.finish_reason or choice.prompt_logprobs):
            return None
        return Completion(**head, object="text_completion", choices=[choice])

    def _counts(self, head: Head) -> Completion:
        return Completion(**head, object="text_completion", choices=[])

    def _choice(self, index: int, delta: Delta, is_first: bool) -> CompletionChoice:
        choice = CompletionChoice(
            index=index,
            text=self._readers[index].read(delta).content,
            finish_reason=delta.finish_reason,
            logprobs=None if self._request.logprobs is None else self._logprob_writer.completion(delta),
            **self._ids(delta),
        )
        if self._request.return_token_ids and is_first:
            choice.prompt_token_ids = self.prompts[index // self._request.n]
        if delta.prompt_logprobs is not None:
            choice.prompt_logprobs = delta.prompt_logprobs
        return choice
