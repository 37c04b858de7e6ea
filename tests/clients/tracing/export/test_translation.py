"""What MLflow, Weave's calls and a GenAI backend get of the same spans: each fact once, under the names it reads."""

import json
from collections.abc import Mapping

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from trackway.tracing import (
    Tracing,
    TracingSettings,
    chat_span,
    extracted,
    inject,
    optimizer_step_span,
    reward_span,
    tool_span,
    train_step_span,
    trajectory_span,
    turn_span,
)
from trackway.tracing.active import activated
from trackway.tracing.export.translation import translated
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.rollout import SamplingParams
from trackway.wire.tracing import TraceBackend, TraceTarget
from trackway.wire.trajectory import Tags, WeightSpan

MLFLOW, WEAVE, GEN_AI = TraceBackend.MLFLOW, TraceBackend.WEAVE, TraceBackend.OTLP
TAGS = Tags.model_validate({"experiment_name": "e", "step": 3, "sample_index": 7, "rollout_n": 1, "validate": False})
PROMPT = [Message(role="system", content="Be brief."), Message(role="user", content="6*9?")]
CALL = ToolCall(id="c1", function=FunctionCall(name="calculator", arguments='{"expression": "6*9"}'))
SAID = [
    Message(role="assistant", content="", tool_calls=[CALL]),
    Message(role="tool", content="54", tool_call_id="c1"),
    Message(role="assistant", content="#### 54"),
]


@pytest.fixture(scope="module")
def spans() -> Mapping[str, ReadableSpan]:
    """A trajectory whose generation, tool and reward are other services', and a step of the trainer."""
    exporter = InMemorySpanExporter()
    tracing = Tracing("agent", TracingSettings(), exporter)
    headers: dict[str, str] = {}
    target = TraceTarget(wandb_run_id="run7")
    with (
        activated(tracing),
        trajectory_span(TAGS, "run/3/7/1", "tool_agent", PROMPT, True, target) as root,
        turn_span(0),
    ):
        inject(headers)
        root.outputs({"reward": 1.0, "num_turns": 4, "messages": SAID})
    with activated(tracing), extracted(headers):
        with chat_span("tiny", SamplingParams(temperature=0.5)) as chat:
            chat.usage(40, 9)
            chat.finish_reasons(["stop"])
            chat.weight_versions([WeightSpan(version=4, start=0, end=9)])
            chat.inputs({"messages": [{"role": "user", "content": "<user>6*9?"}]})
            chat.outputs({"messages": [{"role": "assistant", "content": "#### 54<end>"}]})
        with tool_span("calculator", {"expression": "6*9"}, "c1") as tool:
            tool.outputs({"text": "54", "reward": 0.0})
            tool.error("slow", "tool_timeout")
        with reward_span("gsm8k") as reward:
            reward.score(1.0)
    with activated(tracing), train_step_span(3, "e", target), optimizer_step_span(0, []) as step:
        step.set("agentic.lr", 0.5)
    tracing.shutdown()
    return {span.name.split(" ")[0]: span for span in exporter.get_finished_spans()}


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
        "messages": [message.model_dump(exclude_none=True) for message in SAID],
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
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 9,
        "mlflow.llm.cost": "{}",
        "mlflow.spanInputs": '{"messages": [{"role": "user", "content": "<user>6*9?"}]}',
        "mlflow.spanOutputs": '{"messages": [{"role": "assistant", "content": "#### 54<end>"}]}',
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
    assert span.name == "invoke_agent tool_agent"
    assert loaded(shown, "gen_ai.system_instructions") == [{"type": "text", "content": "Be brief."}]
    assert loaded(shown, "gen_ai.input.messages") == [
        {"role": "user", "parts": [{"type": "text", "content": "6*9?"}]},
    ]
    call = {"type": "tool_call", "id": "c1", "name": "calculator", "arguments": {"expression": "6*9"}}
    assert loaded(shown, "gen_ai.output.messages") == [
        {"role": "assistant", "parts": [call]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "54"}]},
        {"role": "assistant", "parts": [{"type": "text", "content": "#### 54"}]},
    ]
    assert (shown["gen_ai.evaluation.name"], shown["gen_ai.evaluation.score.value"]) == ("reward", 1.0)
    assert loaded(shown, "agentic.outputs") == {"reward": 1.0, "num_turns": 4}
    assert (shown["agentic.group"], shown["agentic.tag.step"]) == ("e/3/7", 3)
    assert not [key for key in shown if key.startswith(("mlflow.", "wandb.", "weave."))]


def test_generations_and_tools_have_the_genai_attributes(spans: Mapping[str, ReadableSpan]) -> None:
    chat = attributes(spans["chat"], GEN_AI)
    assert loaded(chat, "gen_ai.input.messages") == [
        {"role": "user", "parts": [{"type": "text", "content": "<user>6*9?"}]},
    ]
    assert loaded(chat, "gen_ai.output.messages") == [
        {"role": "assistant", "parts": [{"type": "text", "content": "#### 54<end>"}], "finish_reason": "stop"},
    ]
    assert (chat["gen_ai.operation.name"], chat["gen_ai.provider.name"]) == ("chat", "trackway")
    tool = attributes(spans["execute_tool"], GEN_AI)
    assert loaded(tool, "gen_ai.tool.call.arguments") == {"expression": "6*9"}
    assert loaded(tool, "gen_ai.tool.call.result") == {"text": "54", "reward": 0.0}
    assert (tool["gen_ai.tool.type"], tool["error.type"]) == ("function", "tool_timeout")


def test_every_span_names_its_trajectory_and_agent_in_every_process(spans: Mapping[str, ReadableSpan]) -> None:
    trajectory = [spans[name] for name in ("trajectory", "turn", "chat", "execute_tool", "reward")]
    shown = [attributes(span, GEN_AI) for span in trajectory]
    assert {span["gen_ai.conversation.id"] for span in shown} == {"run/3/7/1"}
    assert {span["gen_ai.agent.name"] for span in shown} == {"tool_agent"}
    kinds = [span["openinference.span.kind"] for span in shown]
    assert kinds == ["AGENT", "CHAIN", "LLM", "TOOL", "EVALUATOR"]
    assert "gen_ai.conversation.id" not in attributes(spans["train"], GEN_AI)


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
