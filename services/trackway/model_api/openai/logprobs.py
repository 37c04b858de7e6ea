"""Logprobs of a choice's tokens in OpenAI's formats."""

from typing import NamedTuple

from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.stream_decoder import Delta
from trackway.wire.openai.replies import ChatLogprob, CompletionLogprobs, TopLogprob
from trackway.wire.rollout import TopLogprobs


class _Named(NamedTuple):
    token: str
    bytes: list[int] | None


class LogprobWriter:
    """Names tokens by their text, or by `token_id:17`."""

    def __init__(self, tokenizer: ChatTokenizer, as_token_ids: bool) -> None:
        self._tokenizer, self._as_token_ids = tokenizer, as_token_ids
        self._named: dict[int, _Named] = {}

    def chat(self, delta: Delta) -> list[ChatLogprob]:
        """One entry for each token."""
        tops = delta.top_logprobs or [[] for _ in delta.token_ids]
        return [
            ChatLogprob(
                **self._name(token)._asdict(),
                logprob=logprob,
                top_logprobs=[TopLogprob(**self._name(other)._asdict(), logprob=value) for other, value in top],
            )
            for token, logprob, top in zip(delta.token_ids, delta.logprobs, tops, strict=True)
        ]

    def completion(self, delta: Delta) -> CompletionLogprobs:
        """The parallel lists of a text completion."""
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        return CompletionLogprobs(
            tokens=[self._name(token).token for token in delta.token_ids],
            token_logprobs=delta.logprobs,
            top_logprobs=[self._by_name(top) for top in delta.top_logprobs or [[pair] for pair in pairs]],
            text_offset=delta.offsets,
        )

    def _by_name(self, top: TopLogprobs) -> dict[str, float]:
        """Logprobs by text; of several tokens with the same text the most likely."""
        found: dict[str, float] = {}
        for token, logprob in top:
            found.setdefault(self._name(token).token, logprob)
        return found

    def _name(self, token_id: int) -> _Named:
        if token_id not in self._named:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            whole = "\ufffd" not in text
            name = f"token_id:{token_id}" if self._as_token_ids else text
            self._named[token_id] = _Named(name, list(text.encode()) if whole else None)
        return self._named[token_id]
