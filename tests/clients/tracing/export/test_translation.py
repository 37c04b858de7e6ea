"""What MLflow, Weave's calls and a GenAI backend get of the same spans: each fact once, under the names it reads."""

import json
import os
from collections.abc import Mapping

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.clients.tracing.export.example_spans import SAID, TAGS, example_spans
from trackway.tracing import Tracing, TracingSettings, trajectory_span
from trackway.tracing.export.translation import translated
from trackway.tracing.span_handle import activated
from trackway.wire.trajectory import TraceBackend

MLFLOW, WEAVE, GEN_AI = TraceBackend.MLFLOW, TraceBackend.WEAVE, TraceBackend.OTLP


@pytest.fixture(scope="module")
def spans() -> Mapping[str, ReadableSpan]:
    return example_spans()


def attributes(span: ReadableSpan, *readers: TraceBackend) -> dict[str, object]:
    shown = translated(span, readers).attributes or {}
    return {key: value for key, value in shown.items() if key != "agentic.process"}


def loaded(shown: Mapping[str, object], key: str) -> object:
    return json.loads(str(shown[key]))


def test_mlflow_gets_texts_in_its_own_attributes_alone(spans: Mapping[str, ReadableSpan]) -> None:
    root = attributes(spans["trajectory"], MLFLOW)
    assert loaded(root, "mlflow.spanOutputs") == {
        "reward": 1.0,
        "num_turns": 4,
        "messages": [
            *(message.model_dump(exclude_none=True) for message in SAID[:-1]),
            {"role": "assistant", "content": "\u200b#### 54"},  # MLflow draws messages as Markdown
        ],
    }
    assert not [key for key in root if key.endswith(".messages") or key.startswith(("wandb.", "weave."))]
    tags = {"experiment_name": "e", "step": "3", "sample_index": "7", "rollout_n": "1", "validate": "False"}
    named = {"mlflow.traceName": "s3/i7/n1"}
    assert {key: value for key, value in root.items() if key.startswith("mlflow.traceTag.")} == {
        f"mlflow.traceTag.{key}": value for key, value in (tags | named).items()
    }
    assert (root["mlflow.spanType"], root["session.id"]) == ("AGENT", "e/3/7")
    chat = attributes(spans["chat"], MLFLOW)
    assert chat == {
        "agentic.service": "agent",
        "agentic.weight_version": "4",
        "gen_ai.request.max_tokens": 256,
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 40,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.cache_read.input_tokens": 32,
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 9,
        "mlflow.llm.cost": "{}",
        "mlflow.spanInputs": '{"texts": [{"role": "user", "content": "<user>6*9?"}]}',
        "mlflow.spanOutputs": '{"texts": [{"role": "assistant", "content": "#### 54<end>"}]}',
        "mlflow.spanType": "CHAT_MODEL",
    }


def test_weave_gets_typed_tags_the_run_and_numbers_to_filter_by(spans: Mapping[str, ReadableSpan]) -> None:
    root = attributes(spans["trajectory"], WEAVE)
    tags = {"experiment_name": "e", "step": 3, "sample_index": 7, "rollout_n": 1, "validate": False}
    assert {key: value for key, value in root.items() if key.startswith(("wandb.", "weave."))} == {
        **{f"wandb.attributes.{key}": value for key, value in tags.items()},
        "wandb.display_name": "s3/i7/n1",
        "wandb.wb_run_id": "run7",
        "wandb.wb_run_step": 3,
        "weave.span.kind": "agent",
    }
    assert (root["gen_ai.conversation.id"], root["gen_ai.operation.name"]) == ("e/3/7", "invoke_agent")
    assert "gen_ai.conversation.id" not in attributes(spans["chat"], WEAVE)
    assert attributes(spans["chat"], WEAVE)["wandb.attributes.weight_version"] == "4"
    assert attributes(spans["optimizer_step"], WEAVE)["wandb.attributes.lr"] == 0.5
    trainers = attributes(spans["train"], WEAVE)
    assert (trainers["wandb.attributes.train_step"], trainers["wandb.wb_run_step"]) == (3, 3)


def test_a_collector_before_mlflow_and_weave_gets_the_text_once(spans: Mapping[str, ReadableSpan]) -> None:
    both = attributes(spans["trajectory"], MLFLOW, WEAVE)
    assert both == attributes(spans["trajectory"], MLFLOW) | attributes(spans["trajectory"], WEAVE)
    assert sum("#### 54" in str(value) for value in both.values()) == 1


def test_the_agent_span_has_the_conversation_and_the_reward(spans: Mapping[str, ReadableSpan]) -> None:
    span = translated(spans["trajectory"], [GEN_AI])
    shown = attributes(spans["trajectory"], GEN_AI)
    assert (span.name, shown["gen_ai.provider.name"]) == ("invoke_agent tool_agent", "trackway")
    assert loaded(shown, "gen_ai.system_instructions") == [{"type": "text", "content": "Be brief."}]
    assert loaded(shown, "gen_ai.input.messages") == [
        {"role": "user", "parts": [{"type": "text", "content": "6*9?"}]},
    ]
    call = {"type": "tool_call", "id": "c1", "name": "calculator", "arguments": {"expression": "6*9"}}
    assert loaded(shown, "gen_ai.output.messages") == [
        {"role": "assistant", "parts": [call], "finish_reason": "tool_call"},
        {
            "role": "tool",
            "parts": [{"type": "tool_call_response", "id": "c1", "response": "54"}],
            "finish_reason": "stop",
        },
        {"role": "assistant", "parts": [{"type": "text", "content": "#### 54"}], "finish_reason": "stop"},
    ]
    [evaluation] = span.events
    result = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 1.0}
    assert (evaluation.name, dict(evaluation.attributes or {})) == ("gen_ai.evaluation.result", result)
    assert evaluation.timestamp == span.end_time and "gen_ai.evaluation.name" not in shown
    assert loaded(shown, "gen_ai.tool.definitions") == [
        {"type": "function", "name": "calculator", "description": "", "parameters": {"type": "object"}},
    ]
    assert loaded(shown, "agentic.outputs") == {"num_turns": 4}
    assert (shown["agentic.group"], shown["agentic.tag.step"]) == ("e/3/7", 3)
    assert not [key for key in shown if key.startswith(("mlflow.", "wandb.", "weave."))]


def test_generations_and_tools_have_the_genai_attributes(spans: Mapping[str, ReadableSpan]) -> None:
    chat = attributes(spans["chat"], GEN_AI)
    assert loaded(chat, "gen_ai.input.messages") == [
        {"role": "user", "parts": [{"type": "text", "content": "<user>6*9?"}]},
    ]
    assert loaded(chat, "gen_ai.output.messages") == [
        {"role": "assistant", "parts": [{"type": "text", "content": "#### 54<end>"}], "finish_reason": "length"},
    ]
    assert (chat["gen_ai.operation.name"], chat["gen_ai.provider.name"]) == ("chat", "trackway")
    assert (chat["gen_ai.request.seed"], chat["gen_ai.request.top_k"], chat["gen_ai.response.model"]) == (7, 40, "tiny")
    assert (chat["gen_ai.request.top_p"], "gen_ai.request.top_p" in attributes(spans["chat"], MLFLOW)) == (1.0, False)
    tool = attributes(spans["execute_tool"], GEN_AI)
    assert loaded(tool, "gen_ai.tool.call.arguments") == {"expression": "6*9"}
    assert loaded(tool, "gen_ai.tool.call.result") == {"text": "54", "reward": 0.0}
    assert (tool["gen_ai.tool.type"], tool["error.type"]) == ("function", "tool_timeout")


def test_every_span_names_its_trajectory_and_agent_in_every_process(spans: Mapping[str, ReadableSpan]) -> None:
    trajectory = [spans[name] for name in ("trajectory", "turn", "chat", "execute_tool", "reward")]
    shown = [attributes(span, GEN_AI) for span in trajectory]
    assert {span["gen_ai.conversation.id"] for span in shown} == {"run/3/7/1"}
    assert {span["gen_ai.agent.name"] for span in shown} == {"tool_agent"}
    kinds = [span.get("gen_ai.operation.name", span.get("openinference.span.kind")) for span in shown]
    assert kinds == ["invoke_agent", "CHAIN", "chat", "execute_tool", "EVALUATOR"]
    assert "gen_ai.conversation.id" not in attributes(spans["train"], GEN_AI)


def test_service_and_process_are_sent_once_where_they_are_no_tags(spans: Mapping[str, ReadableSpan]) -> None:
    alone = [translated(spans[name], [GEN_AI]) for name in ("trajectory", "chat")]
    service = {"service.namespace": "trackway", "service.name": "agent", "process.pid": os.getpid()}
    assert [dict(span.resource.attributes) for span in alone] == [service, service]
    assert not any(key in (span.attributes or {}) for span in alone for key in ("agentic.service", "agentic.process"))
    shared = translated(spans["chat"], [MLFLOW, GEN_AI])
    assert dict(shared.resource.attributes) == {"service.name": "trackway"}
    assert (shared.attributes or {})["agentic.service"] == "agent"


def test_a_text_that_was_cut_whole_stays_under_our_own_name() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("agent", TracingSettings(max_text_bytes=256), exporter)
    with activated(tracing), trajectory_span(TAGS, "t", "agent", [], True) as root:
        root.outputs({"messages": [{"role": "user", "content": ""}] * 1000})
    tracing.shutdown()
    [span] = exporter.get_finished_spans()
    shown = attributes(span, GEN_AI)
    assert str(loaded(shown, "agentic.outputs")).endswith("bytes]")
    assert "gen_ai.output.messages" not in shown


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ({"role": "user", "content": [{"type": "image"}]}, [{"type": "text", "content": '[{"type":"image"}]'}]),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "function": "f"}]},
            [{"type": "tool_call", "id": "c", "name": "None", "arguments": None}],
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{cut"}}]},
            [{"type": "tool_call", "id": None, "name": "f", "arguments": "{cut"}],
        ),
        (
            {"role": "assistant", "content": "<think>6*9</think>54"},
            [{"type": "reasoning", "content": "6*9"}, {"type": "text", "content": "54"}],
        ),
        ({"role": "assistant", "content": "6*9</think>"}, [{"type": "reasoning", "content": "6*9"}]),
        ({"role": "user", "content": "</think>54"}, [{"type": "text", "content": "</think>54"}]),
    ],
)
def test_any_message_of_a_users_own_loop_is_shown(message: dict[str, object], parts: list[object]) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("agent", TracingSettings(), exporter)
    with activated(tracing), trajectory_span(TAGS, "t", "agent", [], True) as root:
        root.outputs({"messages": [message]})
    tracing.shutdown()
    [span] = exporter.get_finished_spans()
    [made] = json.loads(str(attributes(span, GEN_AI)["gen_ai.output.messages"]))
    assert (made["role"], made["parts"]) == (message["role"], parts)
