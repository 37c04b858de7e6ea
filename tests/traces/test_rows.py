"""Rows of a list: what they say and how they are ordered."""

from collections.abc import Iterator

import pytest

from tests.traces.example_trace import STARTED, ExampleTrace
from trackway.system.user_error import UserError
from trackway.traces.rows import TraceRow, ordered, row


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


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("-time", ["0", "1", "2", "3"]),
        ("reward", ["2", "1", "0", "3"]),
        ("-reward", ["0", "1", "2", "3"]),
        ("-name", ["3", "2", "1", "0"]),
    ],
)
def test_rows_without_a_value_come_last_either_way(sort: str, expected: list[str]) -> None:
    assert places(ordered(rows(1.0, 0.5, 0.0, None), sort, 10)) == expected


def test_numbers_are_ordered_as_numbers() -> None:
    found = [row(ExampleTrace(step=step).tree()) for step in (10, 9, 100)]
    assert [row.tags["step"] for row in ordered(found, "step", 10)] == ["9", "10", "100"]


def test_the_newest_are_taken_without_reading_more() -> None:
    source = rows(1.0, 1.0, 1.0)
    assert places(ordered(source, "-time", 2)) == ["0", "1"]
    assert next(source).tags["rollout_n"] == "2"


def test_an_unknown_order_is_a_mistake_of_the_user() -> None:
    with pytest.raises(UserError, match=r"--sort: expected one of time, step, .* got '-luck'"):
        ordered(rows(), "-luck", 10)


def test_numbered_and_named_rows_are_sorted_together() -> None:
    examples = [ExampleTrace(rollout_n=place) for place in range(4)]
    for example, index in zip(examples, ["b", "10", "a", "9"], strict=True):
        example.tags["sample_index"] = index

    found = ordered((row(example.tree()) for example in examples), "sample", 4)
    greatest = ordered((row(example.tree()) for example in examples), "-sample", 2)

    assert [row.tags["sample_index"] for row in found] == ["9", "10", "a", "b"]
    assert [row.tags["sample_index"] for row in greatest] == ["b", "a"]
