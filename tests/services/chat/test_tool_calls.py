import time

import pytest

from tests.time_limits import slowness
from trackway.chat.tool_calls import ParsedCall, blocks_in, read_call


def test_arguments_may_be_missing_an_object_or_json_in_a_string() -> None:
    assert read_call('{"name": "now"}') == ParsedCall("now", {}, "{}")
    assert read_call('{"name": "add", "arguments": {"a": "é"}}') == ParsedCall("add", {"a": "é"}, '{"a": "é"}')
    assert read_call('{"name": "add", "arguments": "{\\"a\\": 1}"}') == ParsedCall("add", {"a": 1}, '{"a": 1}')


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ('{"name": "add", "arguments": {"a": }}', "Expecting value: line 1 column 36 (char 35)"),
        ('{"name": "add", "arguments": "no json"}', "Expecting value: line 1 column 1 (char 0)"),
        ('{"name": "add", "arguments": [1]}', "expected an object, got list"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not JSON"),
    ],
)
def test_malformed_arguments_carry_what_the_model_is_told(block: str, error: str) -> None:
    assert read_call(block) == ParsedCall("add", raw=block, error=f"Invalid JSON in arguments for 'add': {error}")


@pytest.mark.parametrize("block", ["", "[]", "add 1 and 2", '{"arguments": {}}', '{"name": 3}', "[" * 100_000])
def test_what_names_no_function_carries_what_was_expected(block: str) -> None:
    error = (
        'Invalid tool call: expected {"name": "<function>", "arguments": {...}} in '
        f"<tool_call>...</tool_call>, got {block!r}"
    )

    assert read_call(block) == ParsedCall("", raw=block, error=error)


@pytest.mark.parametrize("value", [r'"\ud800"', "[" * 100_000, "[" * 200 + "]" * 200, "1" * 5000, "1e400"])
def test_json_that_cannot_be_sent_on_is_malformed(value: str) -> None:
    call = read_call(f'{{"name": "add", "arguments": {{"a": {value}}}}}')

    assert call.error is not None
    assert call.name == "add"


def test_a_call_may_nest_as_deeply_as_a_request() -> None:
    lists = "[" * 199 + "]" * 199

    assert read_call(f'{{"name": "add", "arguments": {{"a": {lists}}}}}').error is None


@pytest.mark.parametrize(
    ("text", "blocks", "outside", "behind"),
    [
        ("", [], "", None),
        ("a<b>1</b>c<b>2</b>d", ["1", "2"], "acd", None),
        ("a<b>1<b>2</b>c", ["1<b>2"], "ac", None),
        ("a</b>b<b>1</b><b>2", ["1"], "a</b>b", "2"),
        ("<b></b>", [""], "", None),
        ("a<b>", [], "a", ""),
    ],
)
def test_blocks_are_told_from_what_stands_outside(
    text: str, blocks: list[str], outside: str, behind: str | None
) -> None:
    assert blocks_in(text, "<b>", "</b>") == (blocks, outside, behind)


def test_blocks_that_never_end_are_found_in_one_pass() -> None:
    text = "<tool_call>" * 200_000
    began = time.process_time()
    assert blocks_in(text, "<tool_call>", "</tool_call>") == ([], "", text[len("<tool_call>") :])
    assert time.process_time() - began < 1.0 * slowness()
