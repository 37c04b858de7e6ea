"""Which calls are read out of what a model wrote for verl-tool, and the marks around their answers."""

import time

import pytest
from pydantic import JsonValue

from tests.time_limits import slowness
from trackway.tools.get_observation import read_action

ALL = ["calculator", "python", "search"]
HERMES = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
CODE = {"code": "print(1)"}


@pytest.mark.parametrize(
    ("text", "tool", "arguments", "wrapped"),
    [
        (HERMES, "calculator", {"expression": "1+1"}, "\n<tool_response>\nA\n</tool_response>\n"),
        ("Let me see. <python>print(1)</python>", "python", CODE, "\n<result>\nA\n</result>\n"),
        ("<python>print(1)</python>\n<output>", "python", CODE, "\nA\n</output>\n"),
        ("```python\nprint(1)\n```", "python", CODE, "\n```result\nA\n```\n"),
        ("```py\nprint(1)\n```\n```output", "python", CODE, "\nA\n```\n"),
        ("```python\nprint(1)\n``` and ```python\nprint(2)```", "python", {"code": "print(1)\nprint(2)"}, None),
        ("<python>print(1)</python> <python>print(2)</python>", "python", {"code": "print(1)\nprint(2)"}, None),
        (
            "<search>a</search> <search> b </search>",
            "search",
            {"query_list": ["b"]},
            "\n\n<information>A</information>\n\n",
        ),
    ],
)
def test_a_call_is_read_in_each_form(
    text: str, tool: str, arguments: dict[str, JsonValue], wrapped: str | None
) -> None:
    action = read_action(text, ALL)

    assert action is not None
    assert [(call.name, call.arguments, call.error) for call in action.calls] == [(tool, arguments, None)]
    assert wrapped is None or action.wrap("A") == wrapped


def test_documents_are_shown_without_the_json_around_them() -> None:
    action = read_action("<search>a</search>", ["search"])

    assert action.wrap('{"result": "Doc 1"}') == "\n\n<information>Doc 1</information>\n\n"
    assert action.wrap("[1]") == "\n\n<information>[1]</information>\n\n"


def test_several_hermes_calls_are_all_read_and_code_within_them_is_no_call() -> None:
    code = '<tool_call>{"name": "python", "arguments": {"code": "```python\\nprint(1)\\n```"}}</tool_call>'

    action = read_action(f"{HERMES}{code}", ALL)

    assert [call.name for call in action.calls] == ["calculator", "python"]


@pytest.mark.parametrize("text", ["<tool_call>{'name': 1}</tool_call>", '<tool_call>{"name": "calculator"'])
def test_a_call_that_cannot_be_read_says_why(text: str) -> None:
    (call,) = read_action(text, ALL).calls

    assert call.error is not None and "tool call" in call.error


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("The answer is 2.", ALL),
        ("", ALL),
        ("<python>print(1)</python>", ["calculator", "search"]),
        ("```python\nprint(1)\n```", ["search"]),
        ("<search>a</search>", ["python"]),
        ("```sql\nselect\n```", ALL),
        ("<python>print(1)", ALL),
    ],
)
def test_what_is_no_call_for_the_tools_offered_is_none(text: str, offered: list[str]) -> None:
    assert read_action(text, offered) is None


@pytest.mark.parametrize("mark", ["<tool_call>", "<python>", "<search>", "```py ", "<result>"])
def test_marks_without_an_end_are_read_in_one_pass(mark: str) -> None:
    began = time.process_time()
    read_action(mark * 200_000, ALL)
    assert time.process_time() - began < 1.0 * slowness()


@pytest.mark.parametrize(("count", "run"), [(64, 64), (65, 64), (100_000, 64)])
def test_only_so_many_calls_of_an_action_run(count: int, run: int) -> None:
    action = read_action(HERMES * count, ALL)
    assert action is not None
    assert [call.name for call in action.calls if call.error is None] == ["calculator"] * run
    told = [call.error for call in action.calls if call.error is not None]
    refusal = f"expected at most 64 tool calls in one action, got {count}; call fewer at once"
    assert told == ([] if count == run else [refusal])
