"""The meaning of messages: equal for what a model wrote and for what a client wrote down again of it.

Clients serialise arguments again, strip text, reorder items, and flatten calls to prose
(`[{'id': ..., 'function': ...}]` after "Calling tools:", smolagents).
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import JsonValue

from trackway.wire.chat import Message, ToolCall
from trackway.wire.openai.requests import ChatMessage, ChatRequest

_FLATTENED = "Calling tools:"
_MAX_FLATTENED = 65_536
"""Characters of a flattened call that are parsed."""
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_MAX_KNOWN = 1024
"""Messages of one session whose meaning is kept."""
_TITLE = re.compile(r"\btitle generator\b|\bgenerate an? [^.\n]{0,80}\btitle\b", re.IGNORECASE)
"""Instructions of a call that names a conversation, as opencode and Claude Code make beside the task."""


class CallMeaning(NamedTuple):
    """One tool call: arguments as canonical JSON."""

    id: str
    name: str
    arguments: str


class Meaning(NamedTuple):
    """One message up to white space and serialisation."""

    role: str
    text: str
    """Words joined by single spaces."""
    calls: tuple[CallMeaning, ...] = ()
    call_id: str = ""
    """Id of the call that a tool's message answers."""


def joined_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with neighbouring ones of the model joined: Responses sends its text and calls one by one."""
    joined: list[ChatMessage] = []
    for message in messages:
        if joined and message.role == "assistant" == joined[-1].role:
            joined[-1] = _both(joined[-1], message)
        else:
            joined.append(message)
    return joined


def meaning(message: ChatMessage) -> Meaning:
    """Meaning of the message."""
    role = "system" if message.role == "developer" else message.role
    text = text_of(message)
    calls = tuple(_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls)
    if role == "assistant" and not calls:
        text, calls = _unflattened(text)
    if message.reasoning_content:
        text = f"{message.reasoning_content} {text}"
    return Meaning(role, _words(text), calls, message.tool_call_id or "")


class KnownMeanings:
    """The meanings of a session's messages: most of a call's messages were in the call before."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Meaning] = {}

    def __call__(self, message: ChatMessage) -> Meaning:
        """Meaning of the message."""
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
        key = (message.role, text_of(message), *calls, message.tool_call_id, message.reasoning_content)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = meaning(message)
        return known


def text_of(message: ChatMessage) -> str:
    """The text of a message, its parts joined by newlines."""
    content = message.content
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def plain_message(message: ChatMessage) -> Message:
    """The message with its text in one piece, and a role that chat templates know."""
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=text_of(message),
        tool_calls=message.tool_calls or None,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def is_auxiliary(chat: ChatRequest) -> bool:
    """Return whether the call looks as if beside the task: its first message asks for a title, and it offers no
    tools."""
    first = chat.messages[0]
    return (
        not chat.tools
        and first.role in ("system", "developer")
        and all(message.role != "assistant" for message in chat.messages)
        and bool(_TITLE.search(text_of(first)))
    )


def without_reasoning(said: Meaning) -> Meaning:
    """The message without what stands between <think> and </think>."""
    before, tag, behind = said.text.partition("</think>")
    return said._replace(text=behind.strip()) if tag else said._replace(text=before)


def canonical(value: JsonValue) -> str:
    """JSON with sorted keys and without white space."""
    return _CANONICAL.encode(value)


def _both(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    texts = [text for message in (first, second) if (text := text_of(message))]
    return first.model_copy(
        update={
            "content": "\n".join(texts),
            "tool_calls": [*first.tool_calls, *second.tool_calls],
            "reasoning_content": first.reasoning_content or second.reasoning_content,
        }
    )


def _call(call_id: str, name: str, arguments: str) -> CallMeaning:
    try:
        return CallMeaning(call_id, name, canonical(json.loads(arguments)))
    except (ValueError, RecursionError):
        return CallMeaning(call_id, name, _words(arguments))


def _unflattened(text: str) -> tuple[str, tuple[CallMeaning, ...]]:
    """The text before smolagents' list of calls, and the calls. The text alone if it ends with none.

    A call whose arguments are in the text is not one: CodeAgent repeats the code of its text as a call.
    """
    before, marker, listed = text.rpartition(_FLATTENED)
    if not marker or len(listed) > _MAX_FLATTENED:
        return text, ()
    try:
        calls = [ToolCall.model_validate(_with_json_arguments(call)) for call in ast.literal_eval(listed.strip())]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text, ()
    calls = [call for call in calls if not _is_quoted(call.function.arguments, before)]
    return before, tuple(_call(call.id, call.function.name, call.function.arguments) for call in calls)


def _is_quoted(arguments: str, text: str) -> bool:
    """Return whether the arguments are code of the text, and no JSON object."""
    code = _words(arguments)
    return bool(code) and not code.startswith("{") and code in _words(text)


def _words(text: str) -> str:
    return " ".join(text.split())


def _with_json_arguments(call: dict[str, dict[str, JsonValue]]) -> dict[str, object]:
    function = call["function"]
    arguments = function["arguments"]
    return {
        **call,
        "function": {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)},
    }
