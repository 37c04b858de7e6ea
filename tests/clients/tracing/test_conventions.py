"""Spans of frameworks, read as our own: kind, model, tokens, tool, and messages with a role and a text."""

import pytest
from pydantic import JsonValue

from tests.traces.framework_spans import GEN_AI, GEN_AI_TOOL, OPENINFERENCE
from trackway.tracing import attributes as names
from trackway.tracing.conventions import as_our_own, is_foreign, work_of

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*9?"}]
CALLED = {"role": "assistant", "content": 'calculator({"expression": "6*9"})'}
READ = (names.MODEL, names.INPUT_TOKENS, names.OUTPUT_TOKENS, names.INPUTS, names.OUTPUTS)


def test_an_openinference_generation_has_our_names() -> None:
    own = as_our_own(OPENINFERENCE)
    assert [own[name] for name in READ] == ["tiny", 30, 8, {"messages": ASKED}, {"messages": [CALLED]}]


def test_a_genai_generation_has_its_messages_as_texts() -> None:
    own = as_our_own(GEN_AI)
    result = {"role": "user", "content": "54"}
    said = {"messages": [{"role": "assistant", "content": "#### 54"}]}
    assert [own[name] for name in READ] == ["policy", 46, 4, {"messages": [*ASKED, CALLED, result]}, said]


def test_a_tool_call_has_its_arguments_and_result() -> None:
    own = as_our_own(GEN_AI_TOOL)
    assert (own[names.TOOL_NAME], own[names.INPUTS], own[names.OUTPUTS]) == ("calculator", {"expression": "6*9"}, 54)


@pytest.mark.parametrize(
    ("attributes", "kind"),
    [
        (OPENINFERENCE, "chat"),
        (GEN_AI, "chat"),
        (GEN_AI_TOOL, "execute_tool"),
        ({"openinference.span.kind": "TOOL"}, "execute_tool"),
        ({"openinference.span.kind": "AGENT"}, "operation"),
        ({"gen_ai.operation.name": "invoke_agent"}, "operation"),
        ({"mlflow.spanType": "CHAT_MODEL"}, "chat"),
        ({}, "operation"),
    ],
)
def test_the_work_is_said_by_each_convention(attributes: dict[str, JsonValue], kind: str) -> None:
    assert work_of(attributes) == kind


def test_a_value_that_is_no_message_stays_as_it_is() -> None:
    own = as_our_own({"input.value": "what is 6*9?", "gen_ai.output.messages": '[{"parts": 1}, 2]'})
    assert (own[names.INPUTS], own[names.OUTPUTS]) == ("what is 6*9?", [{"parts": 1}, 2])


def test_a_span_that_names_one_of_our_services_is_ours() -> None:
    assert (is_foreign(GEN_AI), is_foreign({"agentic.service": "rollout"})) == (True, False)
