"""Calls in text, whole and character by character."""

import itertools
import json
import time

import pytest

from tests.time_limits import slowness
from trackway.chat.tool_calls import ToolCallReader
from trackway.chat.tool_formats import Hermes
from trackway.wire.chat import FunctionCall

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
MUL = '<tool_call>\n{"name": "mul", "arguments": {"b": "é"}}\n</tool_call>'
ADDED = FunctionCall(name="add", arguments='{"a": 1}')
MULTIPLIED = FunctionCall(name="mul", arguments='{"b": "é"}')


def read(text: str, size: int, prefix: str = "", only_one: bool = False) -> tuple[str, list[FunctionCall]]:
    """Content and calls of the text in pieces of `size` characters."""
    reader = ToolCallReader(Hermes(), prefix, only_one)
    parts = [part for place in range(0, len(text), size) for part in reader.push(text[place : place + size])]
    parts += reader.rest()
    calls = [part for part in parts if isinstance(part, FunctionCall)]
    assert len(calls) == reader.calls
    return "".join(part for part in parts if isinstance(part, str)), calls


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call <tool at all \n", "no call <tool at all \n", []),
        (ADD, "", [ADDED]),
        (f"\n\n{ADD}\n", "", [ADDED]),
        (f"Let me see.\n{ADD}\n{MUL}", "Let me see.", [ADDED, MULTIPLIED]),
        (f"a {ADD} b c\n", "ab c\n", [ADDED]),
        (f"a\n<tool_call>oops</tool_call>\n{ADD}", "a\n<tool_call>oops</tool_call>", [ADDED]),
        (f"{ADD} <tool_call>{{", "<tool_call>{", [ADDED]),
    ],
)
def test_text_and_calls_are_told_apart_however_they_come(
    size: int, text: str, content: str, calls: list[FunctionCall]
) -> None:
    assert read(text, size) == (content, calls)


@pytest.mark.parametrize("size", [1, 1000])
def test_a_forced_beginning_is_part_of_the_call_and_of_what_is_no_call(size: int) -> None:
    prefix = '<tool_call>\n{"name": "add", "arguments":'
    assert read(' {"a": 1}}\n</tool_call>', size, prefix) == ("", [ADDED])
    assert read("never", size, prefix) == (f"{prefix}never", [])


@pytest.mark.parametrize("size", [1, 1000])
def test_only_the_first_call_is_kept_when_one_was_asked_for(size: int) -> None:
    assert read(f"a {ADD} b {MUL} c", size, only_one=True) == ("a", [ADDED])


def test_text_comes_before_the_end_of_the_answer() -> None:
    reader = ToolCallReader(Hermes())
    assert [reader.push(piece) for piece in ("one", " <to", "ol", f"ing {ADD}")] == [
        ["one"],
        [],
        [],
        [" <tooling", ADDED],
    ]


SIZE = 2_000_000
"""Characters of a long text."""
CPU_S = 3.0
"""Bound for SIZE characters: several times what linear work takes, and a fraction of what quadratic work takes."""


def pushed(pieces: list[str]) -> list[str | FunctionCall]:
    """The parts of all pieces; fails as soon as they have taken CPU_S seconds of the process."""
    reader = ToolCallReader(Hermes())
    parts: list[str | FunctionCall] = []
    bound_s = CPU_S * slowness()
    begun = time.process_time()
    for number, piece in enumerate(pieces):
        parts += reader.push(piece)
        spent = time.process_time() - begun
        assert spent < bound_s, f"{spent:.1f} s for {number + 1} of {len(pieces)} pieces"
    return parts + reader.rest()


def in_pieces(text: str, size: int = 8) -> list[str]:
    return [text[place : place + size] for place in range(0, len(text), size)]


@pytest.mark.slow
def test_a_long_open_call_is_read_in_linear_time() -> None:
    arguments = json.dumps({"text": "abcdefg " * (SIZE // 8)})
    call = f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'
    assert pushed(in_pieces(call)) == [FunctionCall(name="write", arguments=arguments)]


@pytest.mark.slow
def test_long_white_space_is_held_in_linear_time() -> None:
    space = " " * SIZE
    assert pushed([*in_pieces(space), ADD]) == [ADDED]
    assert pushed([*in_pieces(space), "end"]) == [space + "end"]


@pytest.mark.slow
def test_many_calls_at_once_are_read_in_linear_time() -> None:
    call = '<tool_call>{"name":"f"}</tool_call>'
    count = SIZE // len(call)
    assert pushed([call * count]) == [FunctionCall(name="f", arguments="{}")] * count


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"a {MUL} b", "ab", [MULTIPLIED]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_</tool_call"}}</tool_call>',
            "",
            [FunctionCall(name="f", arguments='{"a": "</tool_</tool_call"}')],
        ),
        ("<tool_<tool_call></tool_</tool_call>", "<tool_<tool_call></tool_</tool_call>", []),
    ],
)
def test_tags_may_be_cut_at_any_two_places(text: str, content: str, calls: list[FunctionCall]) -> None:
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        parts = pushed([text[:first], text[first:second], text[second:]])
        got = [part for part in parts if isinstance(part, FunctionCall)]
        assert ("".join(part for part in parts if isinstance(part, str)), got) == (content, calls), (first, second)
