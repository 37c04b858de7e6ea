"""Rows of a list: what they say and how they are ordered."""

from collections.abc import Iterator

from tests.traces.example_trace import STARTED, ExampleTrace
from trackway.traces.rows import TraceRow, row


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
        weight_versions="3",
        answer="#### 54",
    )
