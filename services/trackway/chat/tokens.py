"""Messages to token ids, append-only: generated text is never re-tokenized.

The prompt is rendered once. Generated ids are then appended unchanged. An observation appends only the ids of the text
that the chat template puts after an assistant turn (its end, the tool messages, the next generation prompt), which is
obtained by rendering a stand-in conversation. The scheme is verl's "continuous token"
(verl/utils/tokenizer/continuous_token.py).
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from cachetools import LRUCache, cached
from pydantic import JsonValue
from pydantic_core import from_json, to_json

from trackway.chat.tokenizer import (
    REJECTIONS,
    AssistantTurn,
    ChatTokenizer,
    TemplateSupport,
    chars_per_token,
    check_chars,
    encode_within,
    encoded_behind,
    ids_after_answer,
    offload,
    template_message,
)
from trackway.chat.tool_calls import ToolFormat
from trackway.wire.chat import Message, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CACHE_CHARS = 16 * 1024 * 1024
"""Cache size in characters, for prompts and for observations. An id counts as four."""
_NEXT_QUESTION = to_json([{"role": "user", "content": "question"}])


class _Rendered(NamedTuple):
    ids: tuple[int, ...]
    chars: int


def _weight(rendered: _Rendered) -> int:
    return 4 * len(rendered.ids) + rendered.chars


class ChatTokens:
    """A tokenizer with its chat template."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template_kwargs: Mapping[str, JsonValue] | None = None,
        tool_parser: str | None = None,
    ) -> None:
        if tokenizer.chat_template is None:
            name = tokenizer.name_or_path
            raise ValueError(f"{name}: expected a tokenizer with a chat template, got none; add one to its folder")
        self.tokenizer = tokenizer
        """The tokenizer itself, for loops that render text on their own."""
        self.fast = ChatTokenizer(tokenizer, tool_parser, template_kwargs)
        """The same tokenizer, without the time that transformers takes around it."""
        self.template_kwargs: dict[str, Any] = dict(template_kwargs or {})
        """Variables of the chat template."""
        self._most_chars = chars_per_token(tokenizer.get_vocab(), tokenizer.unk_token_id)
        # The rollouts of a group share a prompt, and observations repeat.
        self._prompt = cached(LRUCache(_CACHE_CHARS, _weight), lock=Lock())(self._render_prompt)
        self._behind = cached(LRUCache(_CACHE_CHARS, _weight), lock=Lock())(self._render_behind)

    @classmethod
    def load(
        cls,
        model_path: str,
        template_kwargs: Mapping[str, JsonValue] | None = None,
        tool_parser: str | None = None,
    ) -> Self:
        """The tokenizer of a model folder or Hugging Face name.

        Raises:
            ValueError: it has no chat template.
            TrackwayError: `invalid_request` for an unknown `tool_parser`.
            OSError: the tokenizer is missing.
        """
        from transformers import AutoTokenizer

        # Texts come one by one; handing each to a pool of threads doubles its cost.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return cls(AutoTokenizer.from_pretrained(model_path), template_kwargs, tool_parser)

    async def prompt(self, messages: Sequence[Message], schemas: Sequence[ToolSchema], max_tokens: int) -> list[int]:
        """Ids of the conversation and the tools' schemas, including the generation prompt.

        Raises:
            TooLong: the ids exceed `max_tokens`.
            TrackwayError: `invalid_request` when the chat template rejects the messages, or does not show tools.
        """
        if schemas and self.support.lacks:
            raise TrackwayError(ErrorCode.INVALID_REQUEST, self.support.lacks, param="tools")
        check_chars(sum(len(message.content) for message in messages), max_tokens, self._most_chars)
        conversation = json.dumps([template_message(message) for message in messages])
        tools = json.dumps([schema.model_dump(mode="json") for schema in schemas])
        size = len(conversation) + len(tools)
        try:
            return list((await offload(size, self._prompt, conversation, tools, max_tokens)).ids)
        except REJECTIONS as error:
            raise _rejected(error) from error

    async def observation(self, messages: Sequence[Message], written: Sequence[int]) -> list[int]:
        """Ids to append after the generated ids `written`: end of turn, tool messages, generation prompt.

        The end of the turn is left out if `written` ends with it, as it does unless the turn was truncated.
        """
        return await self.following([template_message(message) for message in messages], written)

    async def following(
        self,
        messages: Sequence[Mapping[str, JsonValue]],
        written: Sequence[int],
        template_kwargs: Mapping[str, JsonValue] | None = None,
    ) -> list[int]:
        """The same for messages of any role, in the form of chat templates. `template_kwargs` replace the tokenizer's.

        Raises:
            TrackwayError: `invalid_request` when the chat template rejects them, or leaves out the results of tools.
        """
        if self.support.lacks_results and any(message["role"] == "tool" for message in messages):
            raise TrackwayError(ErrorCode.INVALID_REQUEST, self.support.lacks_results, param="messages")
        shown = to_json([*messages])
        kwargs = to_json({**(self.template_kwargs if template_kwargs is None else template_kwargs)})
        try:
            ids = (await offload(len(shown), self._behind, shown, kwargs)).ids
        except REJECTIONS as error:
            raise _rejected(error) from error
        return list(ids[1:] if written and written[-1] == ids[0] in self._added else ids)

    async def written(self, message: Message) -> list[int]:
        """Ids that the model writes for an assistant's message, with the token that ends the turn.

        Raises:
            TrackwayError: `invalid_request` when the chat template rejects the message, or shows it elsewhere than
                behind its generation prompt.
        """
        try:
            text = self._turn.written(template_message(message))
            end = self._behind(_NEXT_QUESTION, to_json(self.template_kwargs)).ids[0]
        except REJECTIONS as error:
            raise _rejected(error) from error
        ids = encoded_behind("\n", text, self._encode)
        last = end if end in self._added else self.fast.eos_token_id
        return ids if last is None else [*ids, last]

    async def places(self, text: str) -> list[tuple[int, int]]:
        """Start and end offset of each token's characters in the text.

        Raises:
            TrackwayError: `invalid_request` when the tokenizer has no offsets.
        """
        return await offload(len(text), self._char_spans, text)

    async def text(self, ids: Sequence[int]) -> str:
        """The decoded text, with special tokens."""
        return await offload(len(ids), self._decode, list(ids), False)

    async def turn_text(self, ids: Sequence[int]) -> str:
        """The text of an assistant turn, with special tokens except the end-of-turn token."""
        ended = bool(ids) and ids[-1] in self._ends_of_turn
        return await self.text(ids[:-1] if ended else ids)

    async def plain_text(self, ids: Sequence[int]) -> str:
        """The decoded text without special tokens. `<tool_call>` is not a special token."""
        return await offload(len(ids), self._decode, list(ids), True)

    @property
    def support(self) -> TemplateSupport:
        """Support for tools in the chat template."""
        return self.fast.support

    @property
    def tool_format(self) -> ToolFormat:
        """Return how the model writes tool calls."""
        return self.fast.tool_format

    @cached_property
    def _turn(self) -> AssistantTurn:
        return AssistantTurn(self.fast, self.template_kwargs)

    @cached_property
    def _added(self) -> frozenset[int]:
        """Tokens such as `<|im_end|>`, which stand for themselves in any text."""
        return frozenset(self.tokenizer.added_tokens_decoder)

    @cached_property
    def _ends_of_turn(self) -> set[int | None]:
        """The tokens that end a turn of the model: the end of text, and what the template writes after an answer."""
        try:
            end_of_turn = self._behind(_NEXT_QUESTION, to_json(self.template_kwargs)).ids[0]
        except REJECTIONS:
            return {self.fast.eos_token_id}
        return {self.fast.eos_token_id, *({end_of_turn} & self._added)}

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.fast.decode(ids, skip_special_tokens=skip_special_tokens)

    def _char_spans(self, text: str) -> list[tuple[int, int]]:
        if not self.tokenizer.is_fast:
            name = self.tokenizer.name_or_path
            message = (
                f"max_tool_response_tokens: expected a fast tokenizer, got that of {name}; limit characters instead"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(start, end) for start, end in encoded["offset_mapping"]]

    def _render_prompt(self, conversation: str, tools: str, max_tokens: int) -> _Rendered:
        text = self._render(json.loads(conversation), json.loads(tools) or None, self.template_kwargs)
        ids = encode_within(max_tokens, text, self._encode, self._most_chars)
        return _Rendered(tuple(ids), len(conversation) + len(tools))

    def _render_behind(self, messages: bytes, template_kwargs: bytes) -> _Rendered:
        variables = from_json(template_kwargs)

        def render(conversation: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
            return self._render(conversation, tools, variables)

        ids = ids_after_answer(from_json(messages), render, self._encode)
        return _Rendered(tuple(ids), len(messages))

    def _render(
        self, conversation: list[dict[str, Any]], tools: list[dict[str, Any]] | None, template_kwargs: dict[str, Any]
    ) -> str:
        return self.fast.apply_chat_template(
            conversation, tools, add_generation_prompt=True, tokenize=False, **template_kwargs
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.fast.encode(text, add_special_tokens=False))


def _rejected(error: Exception) -> TrackwayError:
    message = f"messages: the model's chat template rejects them: {error}; send messages that it supports"
    return TrackwayError(ErrorCode.INVALID_REQUEST, message, param="messages")
