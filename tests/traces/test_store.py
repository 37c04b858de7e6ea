"""Ranges of steps, and which traces a filter lets pass."""

import pytest

from tests.traces.example_trace import ExampleTrace, framework
from tests.traces.framework_spans import OPENINFERENCE
from trackway.system.process import UserError
from trackway.traces.mlflow_store import filter_string
from trackway.traces.store import Steps, TraceFilter, TraceKind
from trackway.traces.weave_store import query_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", Steps(3, 3)), ("3-7", Steps(3, 7)), ("3-", Steps(3, None)), ("-7", Steps(0, 7)), (" 0 ", Steps(0, 0))],
)
def test_a_range_of_steps_is_read(text: str, expected: Steps) -> None:
    assert Steps.parse(text) == expected


@pytest.mark.parametrize("text", ["", "-", "x", "3-x", "7-3", "1,2", "1.5"])
def test_anything_else_is_a_mistake_of_the_user(text: str) -> None:
    with pytest.raises(UserError, match="--step: expected"):
        Steps.parse(text)


@pytest.mark.parametrize(
    ("wanted", "passes"),
    [
        (TraceFilter(), True),
        (TraceFilter(kind=TraceKind.STEP), False),
        (TraceFilter(steps=Steps(3, 3)), True),
        (TraceFilter(steps=Steps(4, None)), False),
        (TraceFilter(steps=Steps(0, 2)), False),
        (TraceFilter(tags={"rollout_n": "2", "outcome": "ok"}), True),
        (TraceFilter(tags={"rollout_n": "20"}), False),
        (TraceFilter(tags={"unknown": "1"}), False),
        (TraceFilter(tags={"experiment_name": "ti*"}), True),
        (TraceFilter(tags={"experiment_name": "t?ny"}), False),
        (TraceFilter(tags={"experiment_name": "[t]iny"}), False),
        (TraceFilter(reward_min=0.5), True),
        (TraceFilter(reward_min=0.5, reward_max=0.5), True),
        (TraceFilter(reward_min=0.6), False),
        (TraceFilter(reward_max=0.4), False),
    ],
)
def test_a_filter_lets_pass_what_is_wanted(wanted: TraceFilter, passes: bool) -> None:
    assert wanted.matches(ExampleTrace(reward=0.5).tree()) is passes


def test_without_a_reward_no_range_of_rewards_matches() -> None:
    example = ExampleTrace()
    example["r"].outputs = None
    assert not TraceFilter(reward_min=-1e9).matches(example.tree())


def test_steps_of_the_trainer_are_a_kind_of_their_own() -> None:
    example = ExampleTrace()
    example.tags = {"train_step": "3", "experiment_name": "tiny"}
    assert TraceFilter(kind=TraceKind.STEP, steps=Steps(3, 3)).matches(example.tree())
    assert not TraceFilter().matches(example.tree())


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (TraceFilter(), "tags.step IS NOT NULL"),
        (TraceFilter(kind=TraceKind.STEP), "tags.train_step IS NOT NULL"),
        (TraceFilter(steps=Steps(3, 3)), "tags.step = '3'"),
        (TraceFilter(steps=Steps(3, 5)), "tags.step RLIKE '^(3|4|5)$'"),
        (TraceFilter(steps=Steps(3, None)), "tags.step IS NOT NULL"),
        (TraceFilter(steps=Steps(0, 999)), "tags.step IS NOT NULL"),
        (TraceFilter(tags={"a": "it's"}), 'tags.step IS NOT NULL AND tags.`a` = "it\'s"'),
        (TraceFilter(tags={"outcome": "error:*"}), "tags.step IS NOT NULL AND tags.`outcome` LIKE 'error:%'"),
    ],
)
def test_mlflow_is_asked_for_what_its_filter_knows(wanted: TraceFilter, expected: str) -> None:
    assert filter_string(wanted) == expected


@pytest.mark.parametrize("tags", [{"a' OR 1": "x"}, {"a": "both ' and \""}])
def test_a_tag_that_mlflows_filter_cannot_hold_is_a_mistake_of_the_user(tags: dict[str, str]) -> None:
    with pytest.raises(UserError, match="--tag"):
        filter_string(TraceFilter(tags=tags))


def test_weave_is_asked_for_a_tag_as_text_and_as_number_and_for_a_range_by_number() -> None:
    step = {"$convert": {"input": {"$getField": "attributes.step"}, "to": "int"}}
    name = {"$getField": "attributes.rollout_n"}
    query = query_of(TraceFilter(tags={"rollout_n": "2", "outcome": "error:*"}, steps=Steps(3, 7)))
    assert query == {
        "$expr": {
            "$and": [
                {"$or": [{"$eq": [name, {"$literal": "2"}]}, {"$eq": [name, {"$literal": 2}]}]},
                {"$gte": [step, {"$literal": 3}]},
                {"$not": [{"$gt": [step, {"$literal": 7}]}]},
            ]
        }
    }
    assert query_of(TraceFilter()) is None


@pytest.mark.parametrize(
    ("name", "matches"), [("Chat*", True), ("chat tiny", True), ("Chat", False), ("[C]hat*", False)]
)
def test_a_span_is_found_by_its_name_whoever_recorded_it(name: str, matches: bool) -> None:
    example = ExampleTrace()
    example.spans.append(framework("f", OPENINFERENCE, 6, 240))
    assert TraceFilter(span=name).matches(example.tree()) == matches
