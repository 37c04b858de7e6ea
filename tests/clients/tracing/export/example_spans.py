"""A trajectory whose generation, tool and reward are other services', and a step of the trainer."""

from collections.abc import Mapping

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
    set_tools,
    tool_span,
    train_step_span,
    trajectory_span,
    turn_span,
)
from trackway.tracing.span_handle import activated
from trackway.wire.chat import FunctionCall, FunctionSchema, Message, ToolCall, ToolSchema
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Tags, TraceTarget, WeightSpan

TAGS = Tags.model_validate({"experiment_name": "e", "step": 3, "sample_index": 7, "rollout_n": 1, "validate": False})
PROMPT = [Message(role="system", content="Be brief."), Message(role="user", content="6*9?")]
CALL = ToolCall(id="c1", function=FunctionCall(name="calculator", arguments='{"expression": "6*9"}'))
SAID = [
    Message(role="assistant", content="", tool_calls=[CALL]),
    Message(role="tool", content="54", tool_call_id="c1"),
    Message(role="assistant", content="#### 54"),
]


def example_spans() -> Mapping[str, ReadableSpan]:
    """The spans by the first word of their names."""
    exporter = InMemorySpanExporter()
    tracing = Tracing("agent", TracingSettings(), exporter)
    headers: dict[str, str] = {}
    target = TraceTarget(wandb_run_id="run7")
    with (
        activated(tracing),
        trajectory_span(TAGS, "run/3/7/1", "tool_agent", PROMPT, True, target) as root,
    ):
        with turn_span(0):
            inject(headers)
        set_tools([ToolSchema(function=FunctionSchema(name="calculator", parameters={"type": "object"}))])
        root.outputs({"reward": 1.0, "num_turns": 4, "messages": SAID})
    with activated(tracing), extracted(headers):
        with chat_span("tiny", SamplingParams(temperature=0.5, top_k=40, seed=7)) as chat:
            chat.usage(40, 9, 32)
            chat.finish_reasons(["length"])
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
