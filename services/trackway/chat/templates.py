"""Values as chat templates want them."""

import contextlib
import json

from pydantic import JsonValue

from trackway.wire.chat import ToolCall


def template_call(call: ToolCall) -> dict[str, JsonValue]:
    """A past tool call with its arguments as an object, which chat templates turn into JSON."""
    shown = call.model_dump(mode="json")
    with contextlib.suppress(ValueError, RecursionError):  # what is no JSON, the template shows as it is
        shown["function"]["arguments"] = json.loads(call.function.arguments)
    return shown
