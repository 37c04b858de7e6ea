"""Support for tools in a chat template, and the ids that it puts after an assistant turn.

Both are found by rendering sentinels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError
from pydantic import JsonValue

from trackway.chat.tool_calls import ToolFormat

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


def written_call(tokenizer: Renders, variables: Mapping[str, JsonValue] | None = None) -> WrittenCall | None:
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
