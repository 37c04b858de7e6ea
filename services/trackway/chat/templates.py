"""Values as chat templates want them."""

import contextlib
import json
from typing import Any

from pydantic import JsonValue

from trackway.wire.chat import Message, ToolCall


def template_message(message: Message) -> dict[str, Any]:
    """A message with the arguments of its past tool calls as objects."""
    shown = message.model_dump(mode="json", exclude_none=True)
    if message.tool_calls is not None:
        shown["tool_calls"] = [template_call(call) for call in message.tool_calls]
    return shown


def template_call(call: ToolCall) -> dict[str, JsonValue]:
    """A past tool call with its arguments as an object, which chat templates turn into JSON."""
    shown = call.model_dump(mode="json")
    with contextlib.suppress(ValueError, RecursionError):  # what is no JSON, the template shows as it is
        shown["function"]["arguments"] = json.loads(call.function.arguments)
    return shown
