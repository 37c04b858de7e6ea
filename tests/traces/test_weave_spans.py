"""A framework's span as Weave keeps it, its attributes nested at their dots."""

from types import SimpleNamespace

from tests.traces.framework_spans import GEN_AI
from trackway.traces.weave_store import trees_of

TRACE_ID = "ab" * 16
OPENINFERENCE = {
    "openinference": {"span": {"kind": "LLM"}},
    "llm": {
        "token_count": {"prompt": 30, "completion": 8},
        "input_messages": {"0": {"message": {"role": "user", "content": "6*9?"}}},
    },
}


def test_a_frameworks_span_in_weave_has_its_kind_tokens_and_messages() -> None:
    def call(span_id: str, attributes: object) -> SimpleNamespace:
        span = {
            "name": "ChatCompletion",
            "context": {"span_id": span_id},
            "start_time": "2026-11-28T05:00:00",
            "attributes": attributes,
        }
        return SimpleNamespace(trace_id=TRACE_ID, attributes={"otel_span": span}, summary={})

    tree = trees_of([call("a", OPENINFERENCE), call("b", {"gen_ai.operation.name": "chat", **GEN_AI})])[TRACE_ID]

    [first, second] = tree.of_frameworks("chat")
    assert first.inputs == {"messages": [{"role": "user", "content": "6*9?"}]}
    assert first.attributes["gen_ai.usage.input_tokens"] == 30
    assert second.outputs == {"messages": [{"role": "assistant", "content": "#### 54"}]}
