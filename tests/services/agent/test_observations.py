import pytest

from trackway.agent.observations import failed_call, not_run, truncated, unknown_function
from trackway.wire.agent import Limits


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
    assert failed_call("add", "no").text == "Error executing tool 'add': no"
    assert (unknown_function("add", []).reward, failed_call("add", "no").reward) == (0.0, 0.0)


def test_a_call_that_was_not_run_has_no_reward() -> None:
    told = not_run("add", 1)

    assert told.text == "The call of 'add' was not run: at most 1 tool call(s) run in one turn."
    assert told.reward is None
