"""The formats of tool calls: whole texts, streams, forced beginnings, grammars, and the one that a template writes."""

import pytest
from pydantic import JsonValue

from tests.services.chat.families import FAMILIES
from trackway.chat.tokenizer import ChatTokenizer
from trackway.chat.tool_calls import Parsed, ParsedCall, ToolCallReader, ToolFormat, register_tool_format
from trackway.chat.tool_formats import Hermes, Llama3Json, Mistral, Pythonic, Qwen3Coder, tool_format
from trackway.wire.chat import FunctionCall
from trackway.wire.errors import ErrorCode, TrackwayError

ADD = ParsedCall("add", {"a": 1, "b": "é"}, '{"a": 1, "b": "é"}')
NOW = ParsedCall("now", {}, "{}")
SCHEMAS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\né\n</parameter>\n</function>\n"
    "</tool_call>"
)
CALLS: list[tuple[ToolFormat, str, str]] = [
    (
        Hermes(),
        'So.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call>',
        "So.",
    ),
    (Qwen3Coder(), f"So.\n{XML}\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "So."),
    (Llama3Json(), '{"name": "add", "parameters": {"a": 1, "b": "é"}}; {"name": "now", "parameters": {}}', ""),
    (Llama3Json(), '<|python_tag|>{"name": "add", "arguments": {"a": 1, "b": "é"}};{"name": "now"}<|eom_id|>', ""),
    (
        Mistral(),
        'So. [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "é"}, "id": "call00000"}, '
        '{"name": "now", "arguments": {}}]',
        "So.",
    ),
    (Mistral(), '[TOOL_CALLS]add[CALL_ID]call00000[ARGS]{"a": 1, "b": "é"}[TOOL_CALLS]now{}', ""),
    (Pythonic(), '[add(a=1, b="é"), now()]', ""),
    (Pythonic(), "<|python_start|>[add(a=1, b='é'), now()]<|python_end|>", ""),
]
PLAIN = [
    (Hermes(), "#### 18"),
    (Qwen3Coder(), "a <tool at all"),
    (Llama3Json(), '{"answer": 18}'),
    (Llama3Json(), 'It is {"name": "add", "parameters": {}}'),
    (Mistral(), "[1, 2]"),
    (Pythonic(), "[1, 2]"),
    (Pythonic(), "[link](add)"),
]
CUT = [
    (Hermes(), 'Hm <tool_call>{"name": "add", "argu', "Hm", '<tool_call>{"name": "add", "argu'),
    (Qwen3Coder(), "Hm <tool_call>\n<function=add>", "Hm", "<tool_call>\n<function=add>"),
    (Llama3Json(), '{"name": "add", "parameters": {"a": tr', "", '{"name": "add", "parameters": {"a": tr'),
    (Mistral(), 'Hm [TOOL_CALLS] [{"name": "add"', "Hm", '[TOOL_CALLS] [{"name": "add"'),
    (Mistral(), 'Hm [TOOL_CALLS]add[ARGS]{"a": "x', "Hm", '[TOOL_CALLS]add[ARGS]{"a": "x'),
    (Pythonic(), '[add(a="x', "", '[add(a="x'),
]
BAD = [
    (
        Hermes(),
        '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>',
        "add",
        "Invalid JSON in arguments for 'add'",
    ),
    (Qwen3Coder(), "<tool_call>add</tool_call>", "", "expected <function=name>...</function> in <tool_call>"),
    (Llama3Json(), '{"name": "add", "parameters": {"a": }}', "add", "Invalid JSON in arguments for 'add'"),
    (Llama3Json(), '{"name": "add", "parameters": {"a": NaN}}', "add", "NaN is not JSON"),
    (Mistral(), "[TOOL_CALLS] [{}]", "", 'expected {"name": "<function>", "arguments": {...}}'),
    (Mistral(), '[TOOL_CALLS]add[ARGS]{"a": }', "add", "Invalid JSON in arguments for 'add'"),
    (Pythonic(), "[add(1)]", "add", "expected arguments by keyword, got others"),
    (Pythonic(), "[add(a={1})]", "add", "Invalid JSON in arguments for 'add'"),
    (Pythonic(), "[add(a=open('x'))]", "", "Invalid tool call"),
    (Pythonic(), "[add(a=1), 2]", "", "expected [name(key=value), ...]"),
]


def read(tool: ToolFormat, text: str, size: int, prefix: str = "") -> tuple[str, list[FunctionCall]]:
    """Content and calls of the text in pieces of `size` characters."""
    reader = ToolCallReader(tool, prefix, parameters=SCHEMAS)
    parts = [part for place in range(0, len(text), size) for part in reader.push(text[place : place + size])]
    parts += reader.rest()
    plain = "".join(part for part in parts if isinstance(part, str))
    return plain, [part for part in parts if isinstance(part, FunctionCall)]


@pytest.mark.parametrize(("tool", "text", "content"), CALLS)
def test_calls_are_read_in_order_and_leave_the_text(tool: ToolFormat, text: str, content: str) -> None:
    assert tool.parse(text, SCHEMAS) == (content, [ADD, NOW], None)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("tool", "text", "content"), CALLS)
def test_a_stream_gives_what_the_whole_text_gives(tool: ToolFormat, text: str, content: str, size: int) -> None:
    calls = [FunctionCall(name=call.name, arguments=call.raw) for call in (ADD, NOW)]
    assert read(tool, text, size) == (content, calls)


@pytest.mark.parametrize(("tool", "text"), PLAIN)
def test_a_plain_answer_has_no_calls(tool: ToolFormat, text: str) -> None:
    assert tool.parse(text) == (text, [], None)
    assert [read(tool, text, size) for size in (1, 1000)] == [(text, [])] * 2


@pytest.mark.parametrize(("tool", "text", "content", "raw"), CUT)
def test_a_call_that_is_cut_is_none_and_keeps_its_text(tool: ToolFormat, text: str, content: str, raw: str) -> None:
    parsed = tool.parse(text)

    assert (parsed.content, parsed.calls) == (content, [])
    assert parsed.unclosed is not None and (parsed.unclosed.raw, parsed.unclosed.error is None) == (raw, False)
    assert [read(tool, text, size) for size in (1, 1000)] == [(text, [])] * 2


@pytest.mark.parametrize(("tool", "text", "name", "error"), BAD)
def test_a_malformed_call_carries_its_error_and_is_text_in_streams(
    tool: ToolFormat, text: str, name: str, error: str
) -> None:
    parsed = tool.parse(text)

    last = parsed.calls[-1]
    assert (parsed.unclosed, last.name) == (None, name)
    assert last.error is not None and error in last.error
    assert [read(tool, text, size) for size in (1, 1000)] == [(text, [])] * 2


@pytest.mark.parametrize(
    ("tool", "named", "behind"),
    [
        (Hermes(), '<tool_call>\n{"name": "add", "arguments":', ' {"a": 1, "b": "é"}}\n</tool_call>'),
        (Qwen3Coder(), "<tool_call>\n<function=add>\n", XML.partition("<function=add>\n")[2]),
        (Llama3Json(), '{"name": "add", "parameters":', ' {"a": 1, "b": "é"}}'),
        (Mistral(), '[TOOL_CALLS] [{"name": "add", "arguments":', ' {"a": 1, "b": "é"}}]'),
        (Pythonic(), "[add(", 'a=1, b="é")]'),
    ],
)
def test_a_forced_beginning_opens_the_call_that_follows(tool: ToolFormat, named: str, behind: str) -> None:
    assert tool.opening("add") == named
    assert (named + behind).startswith(str(tool.opening(None)))
    for size in (1, 1000):
        assert read(tool, behind, size, named) == ("", [FunctionCall(name="add", arguments=ADD.raw)])


def test_values_of_xml_have_the_types_of_their_schema() -> None:
    values = {
        "n": "1.5",
        "whole": "2",
        "flag": "True",
        "list": "[1]",
        "none": "null",
        "text": "3",
        "own": "4",
        "bad": "x",
    }
    types = {"n": "number", "whole": "integer", "flag": "boolean", "list": "array", "text": "string", "bad": "integer"}
    properties = {**{key: {"type": kind} for key, kind in types.items()}, "none": {"type": ["string", "null"]}}
    body = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())

    [call] = (
        Qwen3Coder()
        .parse(f"<tool_call><function=f>{body}</function></tool_call>", {"f": {"properties": properties}})
        .calls
    )

    expected = {"n": 1.5, "whole": 2, "flag": True, "list": [1], "none": None, "text": "3", "own": "4", "bad": "x"}
    assert call.arguments == expected


@pytest.mark.parametrize(
    ("tool", "begin", "end", "content"),
    [
        (Llama3Json(), '{"name": "add", "parameters": ', "}", "json_schema"),
        (Qwen3Coder(), "<tool_call>\n<function=add>\n", "\n</function>\n</tool_call>", "qwen_xml_parameter"),
    ],
)
def test_a_grammar_is_a_tag_around_the_arguments(tool: ToolFormat, begin: str, end: str, content: str) -> None:
    schema: JsonValue = {"type": "object"}
    inner = {"type": content, "json_schema": schema}
    assert tool.grammar("add", schema) == {"type": "tag", "begin": begin, "content": inner, "end": end}


@pytest.mark.parametrize("tool", [Mistral(), Pythonic()])
def test_a_format_without_grammar_refuses_to_guide(tool: ToolFormat) -> None:
    with pytest.raises(TrackwayError, match=f"expected a tool format that can guide calls, got {tool.name}") as caught:
        tool.grammar("add", {})
    assert (caught.value.code, caught.value.detail) == (ErrorCode.INVALID_REQUEST, {"param": "response_format"})


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen", "hermes"), ("llama3", "llama3_json"), ("mistral", "mistral"), ("gemma", "hermes"), ("phi3", "hermes")],
)
def test_the_format_is_the_one_that_the_template_writes(family: str, name: str) -> None:
    tokenizer = FAMILIES[family].tokenizer()
    assert ChatTokenizer(tokenizer).tool_format.name == name
    assert ChatTokenizer(tokenizer, "pythonic").tool_format.name == "pythonic"


def test_a_template_that_writes_xml_is_read_as_xml() -> None:
    call = (
        "<tool_call>\\n<function={{ call.function.name }}>\\n{% for key, value in call.function.arguments.items() %}"
        "<parameter={{ key }}>\\n{{ value }}\\n</parameter>\\n{% endfor %}</function>\\n</tool_call>"
    )
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\\n{{ message.content }}{% for call in "
        f"message.tool_calls or [] %}}{call}{{% endfor %}}<|im_end|>\\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
    ).replace("\\n", "\n")
    tokenizer = FAMILIES["qwen"].tokenizer()
    tokenizer.chat_template = template
    assert ChatTokenizer(tokenizer).tool_format.name == "qwen3_coder"


def test_names_of_other_engines_are_known_and_unknown_ones_refused() -> None:
    assert (tool_format("qwen25").name, tool_format("llama3").name) == ("hermes", "llama3_json")
    with pytest.raises(TrackwayError, match=r"tool_parser: expected one of .*'hermes', .*got 'nope'; add yours with"):
        tool_format("nope")


def test_a_format_of_parse_alone_holds_its_message_to_the_end() -> None:
    @register_tool_format("spoken_for_test")
    class Spoken(ToolFormat):
        def parse(self, text: str, parameters: object = None) -> Parsed:
            said, mark, words = text.partition("CALL ")
            return Parsed(
                said.strip(), [ParsedCall("add", {"words": words}, f'{{"words": "{words}"}}')] if mark else []
            )

    spoken = tool_format("spoken_for_test")
    assert read(spoken, "So. CALL 9+9", 1) == ("So.", [FunctionCall(name="add", arguments='{"words": "9+9"}')])
    assert read(spoken, "18 \n", 1) == ("18 \n", [])
    with pytest.raises(TrackwayError, match="expected a tool format that can force a call, got spoken_for_test"):
        spoken.opening(None)
