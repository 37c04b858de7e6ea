"""Rows of a list: what they say and how they are ordered."""

from collections.abc import Iterator

import pytest
from story import STARTED, Story

from trackway.system.user_error import UserError
from trackway.traces.rows import TraceRow, ordered, row


def rows(*rewards: float | None) -> Iterator[TraceRow]:
    """One row per reward, their rollout being their place."""
    for place, reward in enumerate(rewards):
        story = Story(rollout_n=place, reward=reward or 0.0)
        if reward is None:
            story["r"].outputs = None
        yield row(story.tree())


def places(found: list[TraceRow]) -> list[str]:
    return [one.tags["rollout_n"] for one in found]


def test_a_row_says_what_matters() -> None:
    story = Story(feedback={"reward": 1.0, "advantage": 0.5, "fate": "used"})
    assert row(story.tree()) == TraceRow(
        trace_id="tr-" + "ab" * 16,
        name="s3/i17/n2",
        state="OK",
        tags=story.tags,
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
    found = [row(Story(step=step).tree()) for step in (10, 9, 100)]
    assert [one.tags["step"] for one in ordered(found, "step", 10)] == ["9", "10", "100"]


def test_the_newest_are_taken_without_reading_more() -> None:
    source = rows(1.0, 1.0, 1.0)
    assert places(ordered(source, "-time", 2)) == ["0", "1"]
    assert next(source).tags["rollout_n"] == "2"


def test_an_unknown_order_is_a_mistake_of_the_user() -> None:
    with pytest.raises(UserError, match=r"--sort: expected one of time, step, .* got '-luck'"):
        ordered(rows(), "-luck", 10)


def test_numbered_and_named_rows_are_sorted_together() -> None:
    stories = [Story(rollout_n=place) for place in range(4)]
    for story, index in zip(stories, ["b", "10", "a", "9"], strict=True):
        story.tags["sample_index"] = index

    found = ordered((row(story.tree()) for story in stories), "sample", 4)
    greatest = ordered((row(story.tree()) for story in stories), "-sample", 2)

    assert [one.tags["sample_index"] for one in found] == ["9", "10", "a", "b"]
    assert [one.tags["sample_index"] for one in greatest] == ["b", "a"]
