import pytest

from trackway.agent.parser import ParsedCall, tool_parser
from trackway.wire.errors import TrackwayError

hermes = tool_parser("hermes")


def test_a_plain_answer_has_no_calls() -> None:
    assert hermes.parse("#### 18") == ("#### 18", [], False)


def test_calls_are_read_in_order_and_leave_the_text_around_them() -> None:
    text = (
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call> done'
    )

    parsed = hermes.parse(text)

    assert parsed.content == "Let me see.\n\n done"
    assert parsed.calls == [ParsedCall("add", {"a": [1, 2]}, '{"a": [1, 2]}'), ParsedCall("now", {}, "{}")]


def test_arguments_may_be_a_json_string() -> None:
    [call] = hermes.parse('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>').calls

    assert (call.arguments, call.error) == ({"a": 1}, None)


@pytest.mark.parametrize(
    ("block", "error"),
    [
        (
            '{"name": "add", "arguments": {"a": }}',
            "Invalid JSON in arguments for 'add': Expecting value: line 1 column 36 (char 35)",
        ),
        ('{"name": "add", "arguments": [1]}', "Invalid JSON in arguments for 'add': expected an object, got list"),
        ('{"name": "add", "arguments": {"a": NaN}}', "Invalid JSON in arguments for 'add': NaN is not JSON"),
        (
            "add 1 and 2",
            'Invalid tool call: expected {"name": "<function>", "arguments": {...}} in '
            "<tool_call>...</tool_call>, got 'add 1 and 2'",
        ),
        (
            '{"arguments": {}}',
            'Invalid tool call: expected {"name": "<function>", "arguments": {...}} in '
            "<tool_call>...</tool_call>, got '{\"arguments\": {}}'",
        ),
    ],
)
def test_a_malformed_call_carries_what_the_model_is_told(block: str, error: str) -> None:
    [call] = hermes.parse(f"<tool_call>{block}</tool_call>").calls

    assert call.error == error


@pytest.mark.parametrize("value", [r'"\ud800"', "[" * 100_000, "1" * 5000])
def test_json_that_cannot_be_sent_on_is_malformed(value: str) -> None:
    [call] = hermes.parse(f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>').calls

    assert call.error is not None
    assert call.name == "add"


def test_a_call_that_is_not_closed_is_malformed_and_said_to_be_unclosed() -> None:
    parsed = hermes.parse('Hm <tool_call>{"name": "add", "argu')

    assert (parsed.content, parsed.unclosed) == ("Hm", True)
    assert (
        parsed.calls[0].error == "Invalid tool call: expected </tool_call> after <tool_call>, got the end of the turn."
    )


def test_an_unknown_parser_names_those_there_are() -> None:
    with pytest.raises(TrackwayError, match=r"expected one of \['hermes'\], got 'pythonic'"):
        tool_parser("pythonic")
