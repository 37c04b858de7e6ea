"""Decodes a streamed generation: its text, the stop string, and the text offset of each token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trackway.chat.tokenizer import ChatTokenizer
from trackway.chat.tool_calls import begun
from trackway.wire.openai import ChatRequest, SampledRequest
from trackway.wire.rollout import PromptLogprobs, TopLogprobs
from trackway.wire.trajectory import WeightSpan


class StopStrings:
    """Passes text up to the first stop string. A possible start of one is held back."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops, self._include = stops, include
        self._held = ""
        self.found: str | None = None
        """The stop string."""

    def push(self, text: str) -> str:
        """The text that is known to precede the stop string."""
        self._held += text
        hits = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if hits:
            place, stop = min(hits)
            self.found = stop
            return self._held[: place + len(stop) * self._include]
        kept = len(self._held) - begun(self._held, self._stops)
        passed, self._held = self._held[:kept], self._held[kept:]
        return passed

    def rest(self) -> str:
        """Text that was held back and is not a stop string."""
        return "" if self.found is not None else self._held


WholeEnd = Literal["stop", "length"]
Decode = Callable[[list[int]], str]

_BROKEN = "\ufffd"


@dataclass(frozen=True)
class Delta:
    """The new part of a choice. `finish_reason` is None except in the last."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    offsets: list[int]
    """Each token's offset in the choice's text. Empty unless the request needs them for its logprobs."""
    finish_reason: WholeEnd | None
    spans: list[WeightSpan] = field(default_factory=list)
    """Weight spans of the choice up to here; final in the last delta."""
    stop: str | None = None
    """The stop string that ended the choice; in the last."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """The most likely tokens of each position. Empty unless asked for."""
    prompt_logprobs: PromptLogprobs | None = None
    """The scored prompt, if asked for; in one delta."""


NOTHING = Delta("", [], [], [], None)
"""State of a choice before its first token."""


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join the deltas of a choice."""
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[logprob for delta in deltas for logprob in delta.logprobs],
        offsets=[offset for delta in deltas for offset in delta.offsets],
        finish_reason=deltas[-1].finish_reason,
        spans=deltas[-1].spans,
        stop=deltas[-1].stop,
        top_logprobs=[top for delta in deltas for top in delta.top_logprobs],
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None),
    )


def by_token(delta: Delta, begun: int) -> list[Delta]:
    """The text and logprobs of each token of a delta with offsets. `begun` is the length of the text before it.

    Text that was held back comes with the token that completed it.
    """
    if len(delta.token_ids) < 2 or len(delta.offsets) != len(delta.token_ids):
        return [delta]
    cuts = [0, *(max(0, offset - begun) for offset in delta.offsets[1:]), len(delta.text)]
    last = len(delta.token_ids) - 1
    return [
        replace(
            delta,
            text=delta.text[cuts[place] : cuts[place + 1]],
            token_ids=[token],
            logprobs=[delta.logprobs[place]],
            offsets=[delta.offsets[place]],
            finish_reason=delta.finish_reason if place == last else None,
            top_logprobs=delta.top_logprobs[place : place + 1],
        )
        for place, token in enumerate(delta.token_ids)
    ]


class Detokenizer:
    """Incremental detokenization: the pieces joined equal the text of all ids decoded at once.

    Text is returned once it is final: a character with incomplete bytes waits for the next token.

    A token's text may depend on the preceding ones (a leading space, the bytes of a character), so new ids are decoded
    together with those of the last returned text. vLLM and TGI do the same.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        """The ids of the last returned text, and the pending ones."""
        self._given_ids = 0
        self._given = ""
        """Text of the first `_given_ids` ids."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        self._ids += ids
        text = self._decode(self._ids)
        if text.endswith(_BROKEN) or len(text) <= len(self._given):
            return ""
        new = text[len(self._given) :]
        if self._given_ids:
            del self._ids[: self._given_ids]
            text = self._decode(self._ids)
        self._given_ids, self._given = len(self._ids), text
        return new

    def rest(self) -> str:
        """Incomplete characters at the end, as replacement characters."""
        if self._given_ids == len(self._ids):
            return ""
        return self._decode(self._ids)[len(self._given) :]


class Reader:
    """The state of one choice."""

    def __init__(self, tokenizer: ChatTokenizer, request: SampledRequest) -> None:
        self._ends = set() if request.include_stop_str_in_output else set(request.stop_token_ids)
        if not request.ignore_eos and tokenizer.eos_token_id is not None:
            self._ends.add(tokenizer.eos_token_id)
        calls = isinstance(request, ChatRequest) and request.offers_tools and tokenizer.tool_format.special
        skip = request.skip_special_tokens and not calls
        self._detokenizer = Detokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=skip))
        self._stops = StopStrings(request.stop, request.include_stop_str_in_output)
        self.has_stops = bool(request.stop)
        self._with_offsets = request.with_offsets
        self._characters = 0

    def read(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: WholeEnd | None,
        top_logprobs: Sequence[TopLogprobs] = (),
        spans: Sequence[WeightSpan] = (),
    ) -> Delta:
        """Decode the next tokens. A stop string ends the choice with the token that completes it."""
        token_by_token = self.has_stops or self._with_offsets
        text, count, offsets = "", 0, list[int]()
        for batch in [[token] for token in token_ids] if token_by_token else [list(token_ids)]:
            offsets.append(self._characters)
            text += self._stops.push(self._text(batch))
            count += len(batch)
            if self._stops.found is not None:
                break
        if finish_reason is not None and self._stops.found is None:
            text += self._stops.push(self._detokenizer.rest()) + self._stops.rest()
        return Delta(
            text=text,
            token_ids=list(token_ids[:count]),
            logprobs=list(logprobs[:count]),
            offsets=offsets if self._with_offsets else [],
            finish_reason="stop" if self._stops.found is not None else finish_reason,
            spans=list(spans),
            stop=self._stops.found,
            top_logprobs=list(top_logprobs[:count]),
        )

    def _text(self, batch: Sequence[int]) -> str:
        text = self._detokenizer.push([token for token in batch if token not in self._ends])
        self._characters += len(text)
        return text
