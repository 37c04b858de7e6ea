import pytest

from trackway.agent.toolbox import failed_call, not_run, truncated, unknown_function
from trackway.chat.tokens import ChatTokens
from trackway.wire.agent import Limits
from trackway.wire.trajectory import ToolCallRecord


@pytest.mark.parametrize(
    ("side", "size", "expected"),
    [
        ("left", 4, "(truncated)...6789"),
        ("right", 4, "0123...(truncated)"),
        ("middle", 4, "01...(truncated)...89"),
        ("middle", 5, "01...(truncated)...89"),
        ("middle", 1, "...(truncated)..."),
        ("middle", 10, "0123456789"),
    ],
)
def test_texts_are_cut_as_verl_cuts_them(side: str, size: int, expected: str) -> None:
    limits = Limits(max_tool_response_length=size, tool_response_truncate_side=side)

    assert truncated("0123456789", limits) == expected


def test_errors_are_told_in_verls_words() -> None:
    assert unknown_function("add", ["a", "b"]).text == "Unknown function 'add'. Available tools: ['a', 'b']"
    failed = failed_call(ToolCallRecord(tool="add", tool_call_id="c"), "no")
    assert failed.text == "Error executing tool 'add': no"
    assert (unknown_function("add", []).reward, failed.reward) == (0.0, 0.0)


def test_a_call_that_was_not_run_has_no_reward() -> None:
    told = not_run("add", 1)

    assert told.text == "The call of 'add' was not run: at most 1 tool call(s) run in one turn."
    assert told.reward is None


def limits(tokens: int, side: str, characters: int | None = None) -> Limits:
    return Limits(
        max_tool_response_tokens=tokens, tool_response_truncate_side=side, max_tool_response_length=characters
    )


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("side", "bound", "expected"),
    [
        ("right", 1, "...(truncated)"),
        ("right", 2, "\u00e4...(truncated)"),
        ("right", 4, "\u00e4b...(truncated)"),
        ("right", 6, "\u00e4b\u20ac...(truncated)"),
        ("right", 10, "\u00e4b\u20ac\U0001f600"),
        ("left", 3, "(truncated)..."),
        ("left", 4, "(truncated)...\U0001f600"),
        ("left", 6, "(truncated)...\U0001f600"),
        ("left", 8, "(truncated)...b\u20ac\U0001f600"),
        ("middle", 1, "...(truncated)..."),
        ("middle", 8, "\u00e4b...(truncated)...\U0001f600"),
        ("middle", 9, "\u00e4b...(truncated)...\U0001f600"),
    ],
)
async def test_a_bound_in_tokens_never_splits_a_character(
    tokens: ChatTokens, side: str, bound: int, expected: str
) -> None:
    text = "\u00e4b\u20ac\U0001f600"  # 2, 1, 3 and 4 tokens

    assert truncated(text, limits(bound, side), await tokens.places(text)) == expected


@pytest.mark.anyio
async def test_a_long_text_is_cut_at_the_same_place(tokens: ChatTokens) -> None:
    text = "\u00e4b" * 20000

    cut = truncated(text, limits(3001, "middle"), await tokens.places(text))

    assert cut == "\u00e4b" * 500 + "...(truncated)..." + "\u00e4b" * 500


@pytest.mark.parametrize(("side", "expected"), [("right", "ab cd...(truncated)"), ("left", "(truncated)... cd ef")])
def test_a_space_stays_with_its_token_when_the_tokenizer_does_not_count_it(side: str, expected: str) -> None:
    places = [(0, 2), (3, 5), (6, 8)]  # as Llama's tokenizer places the tokens of "ab", " cd" and " ef"

    assert truncated("ab cd ef", limits(2, side), places) == expected


@pytest.mark.parametrize(
    ("characters", "bound", "expected"),
    [(None, 6, "012...(truncated)...789"), (4, 6, "01...(truncated)...89"), (99, 2, "0...(truncated)...9")],
)
def test_the_tighter_of_two_bounds_holds(characters: int | None, bound: int, expected: str) -> None:
    places = [(place, place + 1) for place in range(10)]

    assert truncated("0123456789", limits(bound, "middle", characters), places) == expected


@pytest.mark.parametrize("size", [None, 10])
def test_a_text_within_its_bounds_is_left_whole(size: int | None) -> None:
    places = [(place, place + 1) for place in range(10)]

    assert truncated("0123456789", Limits(max_tool_response_length=size)) == "0123456789"
    assert truncated("0123456789", limits(10, "left", size), places) == "0123456789"
    assert truncated("", limits(1, "right", size), []) == ""
