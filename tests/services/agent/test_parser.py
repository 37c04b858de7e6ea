import pytest

from trackway.agent.parser import tool_parser
from trackway.chat.tool_calls import ParsedCall
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


def test_a_call_that_is_not_closed_is_malformed_and_said_to_be_unclosed() -> None:
    parsed = hermes.parse('Hm <tool_call>{"name": "add", "argu')

    assert (parsed.content, parsed.unclosed) == ("Hm", True)
    assert (
        parsed.calls[0].error == "Invalid tool call: expected </tool_call> after <tool_call>, got the end of the turn."
    )


def test_an_unknown_parser_names_those_there_are() -> None:
    with pytest.raises(TrackwayError, match=r"expected one of \['hermes'\], got 'pythonic'"):
        tool_parser("pythonic")
