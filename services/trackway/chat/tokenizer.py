"""Tokenizers of models, loaded with their chat templates and formats of tool calls; slow work in threads.

A template's support for tools, and the ids that it puts after an assistant turn, are found by rendering sentinels.

A text far over its limit of tokens is not encoded in full: encoding costs more than a microsecond and 100 bytes per
character, so 16 MB of text take 20 seconds and 2 GB.
"""

import asyncio
import contextlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from jinja2 import TemplateError
from pydantic import JsonValue

from trackway.chat.tool_calls import ToolFormat, registered
from trackway.chat.tool_formats import Hermes, tool_format
from trackway.wire.chat import Message, ToolCall

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerBase


_ANSWER = "trackway stands here for what the model wrote"
_RESULT = "trackway stands here for what the tool returned"
_TOOL = "trackway_stands_here"
_SCHEMA = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "A text."}}},
    },
}
_QUESTION = {"role": "user", "content": "question"}
_TOOL_MESSAGE = {"role": "tool", "content": _RESULT, "name": _TOOL, "tool_call_id": "call00000"}

REJECTIONS = (TemplateError, TypeError, ValueError, RecursionError)
"""Errors of chat templates for messages that they do not support."""

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]
"""Renders messages and tools with a generation prompt."""


class Renders(Protocol):
    """The method in use of a tokenizer."""

    def apply_chat_template(self, conversation: Any, tools: Any, **kwargs: Any) -> Any: ...


class TemplateSupport(NamedTuple):
    """The reasons why a template cannot carry tools. Empty where it can."""

    schemas: str
    results: str

    @property
    def lacks(self) -> str:
        """Why a model with this template cannot be offered tools, with the remedy. Empty when it can."""
        reasons = " and ".join(reason for reason in self if reason)
        return _refusal(reasons) if reasons else ""

    @property
    def lacks_results(self) -> str:
        """Why the model cannot be shown a tool's result, with the remedy. Empty when it can."""
        return _refusal(self.results) if self.results else ""


def template_support(tokenizer: Renders, variables: Mapping[str, JsonValue] | None = None) -> TemplateSupport:
    """Render a tool's schema and its result. A template may reject them, or leave them out without a word."""

    def render(messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        options = {"add_generation_prompt": True, "tokenize": False, **(variables or {})}
        return str(tokenizer.apply_chat_template([*messages], tools, **options))

    answer = {"role": "assistant", "content": _ANSWER}
    return TemplateSupport(
        _reason("the schemas of tools", _TOOL, lambda: render([_QUESTION], [_SCHEMA])),
        _reason("the results of tools", _RESULT, lambda: render([_QUESTION, answer, _TOOL_MESSAGE], None)),
    )


class WrittenCall(NamedTuple):
    """A tool call as a chat template writes it."""

    text: str
    name: str
    arguments: dict[str, JsonValue]

    def is_read_by(self, tool_format: ToolFormat) -> bool:
        """Return whether the format reads back this one call."""
        return [(call.name, call.arguments) for call in tool_format.parse(self.text).calls] == [
            (self.name, self.arguments)
        ]


class AssistantTurn:
    """An assistant's turn behind a stand-in question, as `ids_after_answer` renders what follows it."""

    def __init__(self, tokenizer: Renders, variables: Mapping[str, JsonValue] | None = None) -> None:
        """Raises TemplateError, TypeError or ValueError for a template that rejects a question or an answer."""
        self._tokenizer, self._variables = tokenizer, variables or {}
        self.before = self._render([_QUESTION], ends_open=True)
        """The question with the generation prompt."""
        answered = self.rendered({"role": "assistant", "content": _ANSWER})
        self.end = answered.partition(_ANSWER)[2]
        """The text that ends the turn."""

    def rendered(self, message: Mapping[str, Any]) -> str:
        """The question with the message. Raises TemplateError, TypeError or ValueError for a rejected message."""
        return self._render([_QUESTION, message], ends_open=False)

    def written(self, message: Mapping[str, Any]) -> str:
        """The text that a model writes for the message, without what ends the turn.

        Raises ValueError for a template that shows it elsewhere than behind the generation prompt, and as `rendered`.
        """
        text = self.rendered(message)
        if not (text.startswith(self.before) and text.endswith(self.end) and self.end):
            raise ValueError(
                "expected a chat template that shows the assistant's message behind its generation prompt, got "
                f"{text[-80:]!r} and the prompt {self.before[-40:]!r}; set the template's variables, or use another"
            )
        return text[len(self.before) : len(text) - len(self.end)]

    def _render(self, messages: Sequence[Mapping[str, Any]], *, ends_open: bool) -> str:
        options = {"add_generation_prompt": ends_open, "tokenize": False, **self._variables}
        return str(self._tokenizer.apply_chat_template([*messages], None, **options))


def _written_call(tokenizer: Renders, variables: Mapping[str, JsonValue] | None = None) -> WrittenCall | None:
    """The text of an assistant turn that is one call, or None when the template writes none."""
    arguments: dict[str, JsonValue] = {"text": _RESULT}
    call = {"id": "call00000", "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
    try:
        turn = AssistantTurn(tokenizer, variables)
        called = turn.rendered({"role": "assistant", "content": "", "tool_calls": [call]})
    except REJECTIONS:
        return None
    pairs = enumerate(zip(turn.before, called, strict=False))
    shared = next((place for place, (a, b) in pairs if a != b), len(turn.before))
    text = called[shared:].removesuffix(turn.end)
    return WrittenCall(text, _TOOL, arguments) if _TOOL in text else None


def encoded_behind(mark: str, text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
    """The ids of a text behind a mark, since some tokenizers put one of their own before the first word of a text.

    Where mark and text share a token, the ids of the text alone.
    """
    before, ids = [*encode(mark)], [*encode(mark + text)]
    return ids[len(before) :] if ids[: len(before)] == before else [*encode(text)]


def ids_after_answer(
    messages: Sequence[Mapping[str, Any]], render: Render, encode: Callable[[str], Sequence[int]]
) -> list[int]:
    """The ids that follow an assistant turn: its end, the messages, and the next generation prompt.

    Raises:
        ValueError: the template does not show the assistant's content, or puts nothing behind it.
        TemplateError, TypeError: the template rejects the messages.
    """
    conversation = [_QUESTION, {"role": "assistant", "content": _ANSWER}, *map(dict, messages)]
    _, answer, behind = render(conversation, None).partition(_ANSWER)
    ids = encoded_behind(_ANSWER[-1], behind, encode)
    if not answer or not ids:
        raise ValueError("the chat template does not show the assistant's content; use one that does")
    return ids


def _reason(what: str, sentinel: str, render: Callable[[], str]) -> str:
    try:
        return "" if sentinel in render() else f"leaves out {what}"
    except REJECTIONS as error:
        return f"rejects {what} ({error})"


def _refusal(reasons: str) -> str:
    return (
        f"expected a chat template that shows tools and their results, got one that {reasons}; give the tokenizer a "
        "template with tools, or run an agent without tools"
    )


_FIRST_CHARS = 65_536
"""Texts up to this many characters are always encoded: a tenth of a second, 10 MB."""
_GROWTH = 4
_CUT_TOKENS = 64
"""A text cut inside a word may have this many more tokens than within the whole text."""
_COMPOSED = 2
"""Characters that NFC normalisation may merge into one."""

Encode = Callable[[str], Sequence[int]]


class TooLong(Exception):
    """The text has more tokens than allowed."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens")
        self.at_least = at_least


def chars_per_token(vocabulary: Iterable[str], unknown_token: object) -> int | None:
    """The most characters in a token, or None when the tokenizer maps unknown text to a single token."""
    return None if unknown_token is not None else _COMPOSED * max(map(len, vocabulary))


def check_chars(chars: int, max_tokens: int, most_chars: int | None) -> None:
    """Raises TooLong when this many characters must have more than `max_tokens` of at most `most_chars` each."""
    if most_chars is not None and chars > max_tokens * most_chars:
        raise TooLong(-(-chars // most_chars))


def encode_within(max_tokens: int, text: str, encode: Encode, most_chars: int | None) -> Sequence[int]:
    """The token ids of a text. Raises TooLong when there are more than `max_tokens`.

    A long text is rejected by its number of characters (see `check_chars`) or by encoding growing prefixes.
    """
    check_chars(len(text), max_tokens, most_chars)
    chars = max(_FIRST_CHARS, max_tokens)
    while chars < len(text):
        count = len(encode(text[:chars])) - _CUT_TOKENS
        if count > max_tokens:
            raise TooLong(count)
        chars *= _GROWTH
    ids = encode(text)
    if len(ids) > max_tokens:
        raise TooLong(len(ids))
    return ids


def template_message(message: Message) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects."""
    shown = message.model_dump(mode="json", exclude_none=True)
    if message.tool_calls is not None:
        shown["tool_calls"] = [template_call(call) for call in message.tool_calls]
    return shown


def template_call(call: ToolCall) -> dict[str, JsonValue]:
    """The tool call with its arguments as an object, which chat templates serialize."""
    shown = call.model_dump(mode="json")
    with contextlib.suppress(ValueError, RecursionError):  # invalid JSON is passed to the template unchanged
        shown["function"]["arguments"] = json.loads(call.function.arguments)
    return shown


T = TypeVar("T")

_INLINE_SIZE = 16384
"""Inputs up to this size (about a millisecond of work) are not worth a thread."""


async def offload(size: int, function: Callable[..., T], *args: object) -> T:
    """Run `function` directly when its input is small, else in a thread."""
    if size <= _INLINE_SIZE:
        return function(*args)
    return await asyncio.to_thread(function, *args)


_PYTHON = ("encode", "_encode_plus", "decode", "_decode")
"""Methods of transformers around the Rust code."""
_ALIASED = frozenset({"reasoning_content", "thinking", "reasoning"})
"""Fields of messages that transformers repeats under each other's names."""

logger = logging.getLogger("trackway.chat")


class ChatTokenizer:
    """Return the tokenizer's result without the Python around its Rust code, which is slow for a short text.

    The tokenizer must not be changed afterwards.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        tool_parser: str | None = None,
        template_kwargs: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """`tool_parser` names the format of tool calls. By default the one that the chat template writes.

        Raises:
            TrackwayError: `invalid_request` for an unknown format.
        """
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._rust = _rust_alone(tokenizer)
        if self._rust is not None:  # as each call of transformers does
            self._rust.no_truncation()
            self._rust.no_padding()
            self._rust.encode_special_tokens = tokenizer.split_special_tokens
        self.chat_template: object = tokenizer.chat_template
        self._template = _template_alone(tokenizer)
        self._own_parameters = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._special_tokens = tokenizer.special_tokens_map
        eos, unk = tokenizer.eos_token_id, tokenizer.unk_token_id
        self.eos_token_id = eos if isinstance(eos, int) else None
        self.unk_token_id = unk if isinstance(unk, int) else None
        self.tool_format: ToolFormat = tool_format(tool_parser) if tool_parser else self._written_format()

    @cached_property
    def support(self) -> TemplateSupport:
        """Support for tools in the chat template."""
        return template_support(self, self._template_kwargs)

    def _written_format(self) -> ToolFormat:
        """The format that reads back the call that the chat template writes. Hermes' if none does."""
        written = _written_call(self, self._template_kwargs) if self.chat_template is not None else None
        for kind in dict.fromkeys(registered().values()):
            if written is not None and written.is_read_by(kind()):
                logger.info("tool_parser: %s, which the chat template writes", kind.name)
                return kind()
        logger.info("tool_parser: %s, as the chat template writes no call of a known format", Hermes.name)
        return Hermes()

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""
        return self._tokenizer.get_vocab()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text."""
        if self._rust is None:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        [encoding] = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of ids."""
        if self._rust is None:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))
        return self._rust.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: list[dict[str, JsonValue]],
        tools: list[dict[str, JsonValue]] | None,
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **kwargs: Any,
    ) -> str:
        """The conversation as the model's chat template writes it."""
        are_variables = self._own_parameters.isdisjoint(kwargs)  # others, such as `documents`, are not only shown
        if self._template is not None and conversation and are_variables and all(map(_is_plain, conversation)):
            variables = {**self._special_tokens, **kwargs}
            return self._template.render(
                messages=conversation,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        rendered = self._tokenizer.apply_chat_template(
            conversation,  # pyright: ignore[reportArgumentType]  invariance of list in transformers' signature
            tools=tools,  # pyright: ignore[reportArgumentType]
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            **kwargs,
        )
        return str(rendered)


def _rust_alone(tokenizer: "PreTrainedTokenizerBase") -> "RustTokenizer | None":
    """The Rust code when transformers adds nothing to what it does."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.clean_up_tokenization_spaces:
        return None
    is_plain = all(getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) for name in _PYTHON)
    return tokenizer.backend_tokenizer if is_plain else None


def _template_alone(tokenizer: "PreTrainedTokenizerBase") -> "Template | None":
    """The only chat template, as transformers compiles it, or None when transformers does something else with it."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    # Private: a release without it only costs time.
    compiled = getattr(chat_template_utils, "_compile_jinja_template", None)
    template = tokenizer.chat_template
    own = getattr(tokenizer.apply_chat_template, "__func__", None)
    is_plain = own is PreTrainedTokenizerBase.apply_chat_template
    return compiled(template) if compiled is not None and is_plain and isinstance(template, str) else None


def _is_plain(message: dict[str, JsonValue]) -> bool:
    """Return whether transformers passes this message, of JSON's types, to the template unchanged."""
    return None not in message.values() and _ALIASED.isdisjoint(message)
