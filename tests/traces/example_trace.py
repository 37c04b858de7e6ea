"""A trajectory with a whole trace, made by hand: two turns, one tool call, a reward. Tests spoil it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import JsonValue

from trackway.traces.store import TraceFilter
from trackway.traces.tree import SpanNode, State, TraceTree, assemble, facts_of, kind_of
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.trajectory import Reward, StopReason, Tags, Trajectory, Turn

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*9"}}\n</tool_call>'
STARTED = datetime(2026, 11, 21, 6, 0, 0, tzinfo=UTC)


def span(
    span_id: str, parent_id: str | None, name: str, service: str, start_ms: float, end_ms: float | None, **rest: Any
) -> SpanNode:
    """A span without children yet."""
    return SpanNode(
        span_id=span_id,
        parent_id=parent_id,
        name=name,
        kind=kind_of(name),
        service=service,
        start_ms=start_ms,
        end_ms=end_ms,
        **rest,
    )


def chat(span_id: str, parent_id: str, start_ms: float, text: str, given: int, written: int) -> SpanNode:
    """A generation of weights 3 that took 100 ms."""
    attributes = {
        "gen_ai.usage.input_tokens": given,
        "gen_ai.usage.output_tokens": written,
        "agentic.weight_version": "3",
        "agentic.process": 2,
    }
    return span(
        span_id,
        parent_id,
        "chat tiny",
        "rollout",
        start_ms,
        start_ms + 100,
        inputs={"messages": [{"role": "user", "content": "the prompt\n"}]},
        outputs={"messages": [{"role": "assistant", "content": text}]},
        attributes=attributes,
    )


def framework(
    span_id: str, attributes: dict[str, JsonValue], start_ms: float, end_ms: float | None, parent_id: str = "r"
) -> SpanNode:
    """A span that the agent's framework recorded, as a store reads it."""
    facts = facts_of("ChatCompletion", attributes)
    return SpanNode(
        span_id=span_id, parent_id=parent_id, name="ChatCompletion", start_ms=start_ms, end_ms=end_ms, **facts
    )


@dataclass
class ExampleTrace:
    """The parts of a trace, to be changed before `tree` puts them together."""

    step: int = 3
    sample_index: int = 17
    rollout_n: int = 2
    validate: bool = False
    reward: float = 1.0
    answer: str = "#### 54"
    call: str = CALL
    arguments: dict[str, JsonValue] = field(default_factory=lambda: {"expression": "6*9"})
    result: str = "54"
    feedback: dict[str, JsonValue] = field(default_factory=dict)
    state: State = "OK"
    trace_id: str = "tr-" + "ab" * 16

    def __post_init__(self) -> None:
        prompt: list[JsonValue] = [{"role": "user", "content": "What is 6*9?"}]
        outputs: JsonValue = {"reward": self.reward, "num_turns": 4, "stop_reason": "answered"}
        agent = {"attributes": {"agentic.process": 1}}
        self.tags = {
            "experiment_name": "tiny",
            "step": str(self.step),
            "sample_index": str(self.sample_index),
            "rollout_n": str(self.rollout_n),
            "validate": str(self.validate),
            "outcome": "ok",
        }
        self.spans = [
            span("r", None, "trajectory", "agent", 0, 400, inputs={"messages": prompt}, outputs=outputs, **agent),
            span("t0", "r", "turn 0", "agent", 5, 250, **agent),
            chat("c0", "t0", 10, self.call, given=30, written=8),
            span(
                "x0",
                "t0",
                "execute_tool calculator",
                "tools",
                150,
                151,
                inputs=self.arguments,
                outputs={"text": self.result, "reward": 0.0},
                attributes={"agentic.process": 3, "gen_ai.tool.name": "calculator"},
            ),
            span("t1", "r", "turn 1", "agent", 251, 370, **agent),
            chat("c1", "t1", 260, self.answer, given=46, written=4),
            span(
                "s",
                "r",
                "reward",
                "reward",
                380,
                381,
                inputs={"ground_truth": "54"},
                outputs={"score": self.reward},
                attributes={"agentic.process": 4},
            ),
        ]

    @property
    def name(self) -> str:
        """As lists show it."""
        return f"{'val' if self.validate else 's'}{self.step}/i{self.sample_index}/n{self.rollout_n}"

    def __getitem__(self, span_id: str) -> SpanNode:
        return next(span for span in self.spans if span.span_id == span_id)

    def drop(self, *span_ids: str) -> None:
        """Lose spans."""
        self.spans = [span for span in self.spans if span.span_id not in span_ids]

    def tree(self) -> TraceTree:
        """The trace as a store gives it."""
        return TraceTree(
            trace_id=self.trace_id,
            name=self.name,
            state=self.state,
            tags=self.tags,
            started=STARTED,
            duration_ms=400,
            feedback=self.feedback,
            roots=assemble(span.model_copy(deep=True) for span in self.spans),
        )

    def trajectory(self, **changes: Any) -> Trajectory:
        """What the trainer's dump has of it."""
        tool_call = ToolCall(id="call_0_0", function=FunctionCall(name="calculator", arguments='{"expression": "6*9"}'))
        said = [
            Message(role="assistant", content="", tool_calls=[tool_call]),
            Message(role="tool", content=self.result, tool_call_id="call_0_0"),
        ]
        answer = Message(role="assistant", content=self.answer)
        tags = Tags(
            experiment_name="tiny",
            step=self.step,
            sample_index=self.sample_index,
            rollout_n=self.rollout_n,
            validate=self.validate,
        )
        known: dict[str, Any] = {
            "id": f"tiny/{self.step}/{self.sample_index}/{self.rollout_n}",
            "session_id": "s",
            "tags": tags,
            "agent_name": "tool_agent",
            "data_source": "tiny",
            "turns": [turn(0, said, calls_executed=1), turn(1, [answer])],
            "reward": Reward(score=self.reward),
            "num_turns": 4,
            "stop_reason": StopReason.ANSWERED,
            "trace_id": self.trace_id.removeprefix("tr-"),
        }
        return Trajectory(**(known | changes))


def turn(index: int, messages: list[Message], calls_executed: int = 0) -> Turn:
    """A turn of the model that ended by itself."""
    return Turn(
        index=index,
        messages=messages,
        response_start=0,
        response_end=0,
        finish_reason="stop",
        calls_executed=calls_executed,
    )


class MemoryStore:
    """Traces at hand, as a TraceStore."""

    def __init__(self, *examples: ExampleTrace) -> None:
        self.trees = [example.tree() for example in examples]
        self.asked: list[list[str]] = []

    def search(self, wanted: TraceFilter) -> Iterator[TraceTree]:
        return (tree for tree in self.trees if wanted.matches(tree))

    def get(self, trace_ids: Sequence[str]) -> dict[str, TraceTree]:
        self.asked.append(list(trace_ids))
        return {tree.hex_id: tree for tree in self.trees if tree.hex_id in trace_ids}

    def ids_with_prefix(self, prefix: str, limit: int) -> list[str]:
        return [tree.hex_id for tree in self.trees if tree.hex_id.startswith(prefix)][:limit]
