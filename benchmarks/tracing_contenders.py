"""The same 5-span trajectory in our tracing, in MLflow's and in Weave's own decorators."""

import os
from collections.abc import Callable

from trackway.tracing import (
    Tracing,
    TracingSettings,
    chat_span,
    reward_span,
    set_outcome,
    tool_span,
    trajectory_span,
    turn_span,
)
from trackway.tracing.span_handle import activated
from trackway.wire.chat import Message
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Tags

QUESTION = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. " * 4
ANSWER = "Natalia sold 48/2 = 24 clips in May. <tool_call>{...}</tool_call> " * 8
"""1.3 KB of text in a trajectory, as in GSM8K."""
TAGS = {"step": 1, "sample_index": 17, "validate": False, "experiment_name": "benchmark"}

Contender = tuple[Callable[[int], object], Callable[[], object]]


def ours(url: str) -> Tracing:
    """Our tracing into the MLflow at the URL."""
    return Tracing("benchmark", TracingSettings(mlflow_uri=url))


def _ours(url: str) -> Contender:
    tracing = ours(url)
    params, messages = SamplingParams(), [Message(role="user", content=QUESTION)]

    def trajectory(number: int) -> None:
        tags = Tags(experiment_name="benchmark", step=1, sample_index=17, rollout_n=number)
        identity = f"benchmark/1/17/{number}"
        with (
            activated(tracing),
            trajectory_span(tags, identity, "tool_agent", messages, record=True) as root,
        ):
            with turn_span(0):
                with chat_span("model", params) as chat:
                    chat.usage(120, 160)
                    chat.inputs({"messages": [{"role": "user", "content": QUESTION}]})
                    chat.outputs({"messages": [{"role": "assistant", "content": ANSWER}]})
                with tool_span("calculator", {"expression": "48/2"}, "call_0") as tool:
                    tool.outputs({"text": "24", "reward": 0.0})
            with reward_span("gsm8k") as reward:
                reward.score(1.0)
                reward.outputs({"score": 1.0})
            set_outcome(root)
            root.outputs({"reward": 1.0, "messages": [{"role": "assistant", "content": ANSWER}]})

    return trajectory, lambda: tracing.flush(120)


def trajectory_of_eight_spans(tracing: Tracing, number: int) -> None:
    """Two turns, each with a generation and the first with a tool: what a GSM8K rollout makes."""
    params, messages = SamplingParams(), [Message(role="user", content=QUESTION)]
    tags = Tags(experiment_name="benchmark", step=1, sample_index=17, rollout_n=number)
    identity = f"benchmark/1/17/{number}"
    with activated(tracing), trajectory_span(tags, identity, "tool_agent", messages, record=True) as root:
        for index in range(2):
            with turn_span(index):
                with chat_span("model", params) as chat:
                    chat.usage(120, 160)
                    chat.outputs({"messages": [{"role": "assistant", "content": ANSWER[:300]}]})
                with tool_span("calculator", {"expression": "48/2"}, f"call_{index}") as tool:
                    tool.outputs({"text": "24", "reward": 0.0})
        with reward_span("gsm8k") as reward:
            reward.outputs({"score": 1.0})
        set_outcome(root)
        root.outputs({"reward": 1.0, "messages": [{"role": "assistant", "content": ANSWER}]})


def _mlflow(url: str) -> Contender:
    import mlflow
    from mlflow.config import enable_async_logging

    mlflow.set_tracking_uri(url)
    enable_async_logging()

    @mlflow.trace(span_type="CHAT_MODEL")
    def chat(prompt_text: str) -> dict[str, str]:
        return {"response_text": ANSWER}

    @mlflow.trace(span_type="TOOL")
    def execute_tool(expression: str) -> dict[str, object]:
        return {"text": "24", "reward": 0.0}

    @mlflow.trace(span_type="CHAIN")
    def turn(index: int) -> None:
        chat(QUESTION)
        execute_tool("48/2")

    @mlflow.trace(span_type="EVALUATOR")
    def reward(solution: str) -> dict[str, float]:
        return {"score": 1.0}

    @mlflow.trace(name="trajectory", span_type="AGENT")
    def trajectory(messages: list[dict[str, str]], number: int) -> dict[str, object]:
        mlflow.update_current_trace(tags={key: str(value) for key, value in {**TAGS, "rollout_n": number}.items()})
        turn(0)
        reward("24")
        return {"reward": 1.0, "response_text": ANSWER}

    return lambda number: trajectory([{"role": "user", "content": QUESTION}], number), mlflow.flush_trace_async_logging


def _weave(url: str) -> Contender:
    os.environ |= {"WF_TRACE_SERVER_URL": url, "WANDB_BASE_URL": url, "WANDB_API_KEY": "0123456789" * 4}
    os.environ |= {"WEAVE_USE_CALLS_COMPLETE": "false", "WEAVE_PRINT_CALL_LINK": "false", "WEAVE_LOG_LEVEL": "ERROR"}
    import weave

    client = weave.init("benchmark/tracing")

    @weave.op
    def chat(prompt_text: str) -> dict[str, str]:
        return {"response_text": ANSWER}

    @weave.op
    def execute_tool(expression: str) -> dict[str, object]:
        return {"text": "24", "reward": 0.0}

    @weave.op
    def turn(index: int) -> None:
        chat(QUESTION)
        execute_tool("48/2")

    @weave.op
    def reward(solution: str) -> dict[str, float]:
        return {"score": 1.0}

    @weave.op
    def trajectory(messages: list[dict[str, str]], number: int) -> dict[str, object]:
        turn(0)
        reward("24")
        return {"reward": 1.0, "response_text": ANSWER}

    def traced(number: int) -> None:
        with weave.attributes({**TAGS, "rollout_n": number}):
            trajectory([{"role": "user", "content": QUESTION}], number)

    return traced, client.flush


CONTENDERS: dict[str, Callable[[str], Contender]] = {"ours": _ours, "mlflow": _mlflow, "weave": _weave}
