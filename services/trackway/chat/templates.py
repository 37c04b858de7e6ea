"""Values in the form that chat templates expect."""

import contextlib
import json
from typing import Any

from pydantic import JsonValue

from trackway.wire.chat import Message, ToolCall


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
