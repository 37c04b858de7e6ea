"""Rows of a list: what they say and how they are ordered."""

from collections.abc import Iterator

from tests.traces.example_trace import STARTED, ExampleTrace, framework
from tests.traces.framework_spans import GEN_AI, GEN_AI_TOOL, OPENINFERENCE
from trackway.traces.render import TraceRow, row
from trackway.traces.views import Tokens


def rows(*rewards: float | None) -> Iterator[TraceRow]:
    """One row per reward, their rollout being their place."""
    for place, reward in enumerate(rewards):
        example = ExampleTrace(rollout_n=place, reward=reward or 0.0)
        if reward is None:
            example["r"].outputs = None
        yield row(example.tree())


def places(found: list[TraceRow]) -> list[str]:
    return [row.tags["rollout_n"] for row in found]


def test_a_row_says_what_matters() -> None:
    example = ExampleTrace(feedback={"reward": 1.0, "advantage": 0.5, "fate": "used"})
    assert row(example.tree()) == TraceRow(
        trace_id="tr-" + "ab" * 16,
        name="s3/i17/n2",
        state="OK",
        tags=example.tags,
        started=STARTED,
        duration_ms=400,
        reward=1.0,
        advantage=0.5,
        fate="used",
        turns=2,
        prompt_tokens=30,
        response_tokens=20,
        tool_calls=1,
        other_tokens=None,
        weight_versions="3",
        answer="#### 54",
    )


def test_a_row_counts_the_calls_of_the_agents_framework_once() -> None:
    example = ExampleTrace()
    example.spans += [
        framework("f0", OPENINFERENCE, 6, 240),
        framework("f1", GEN_AI | {"gen_ai.usage.input_tokens": 7}, 252, 360),
        framework("f2", GEN_AI | {"gen_ai.usage.input_tokens": 8}, 252, 360),
        framework("f3", GEN_AI_TOOL, 150, 151),
        framework("f4", GEN_AI_TOOL | {"gen_ai.tool.name": "search"}, 160, 170),
    ]
    counted = row(example.tree())
    assert (counted.prompt_tokens, counted.response_tokens, counted.turns) == (30, 20, 2)
    assert (counted.tool_calls, counted.other_tokens) == (2, Tokens(prompt=15, response=8))
