import pytest
from pydantic import JsonValue

from trackway.chat.tokenizer import template_call
from trackway.wire.chat import FunctionCall, ToolCall

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(("arguments", "shown"), [('{"a": 1}', {"a": 1}), ('{"a": }', '{"a": }'), (DEEP, DEEP)])
def test_arguments_are_shown_as_an_object_or_as_they_are_when_they_cannot_be_read(
    arguments: str, shown: JsonValue
) -> None:
    call = ToolCall(id="c", function=FunctionCall(name="add", arguments=arguments))

    assert template_call(call) == {"id": "c", "type": "function", "function": {"name": "add", "arguments": shown}}
