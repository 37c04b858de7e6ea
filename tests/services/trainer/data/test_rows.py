"""Rows in verl's schema."""

import pytest
from pydantic import JsonValue, ValidationError

from trackway.trainer.data.rows import (
    ExtraInfo,
    InteractionKwargs,
    ToolKwargs,
    from_record,
    make_row,
    prune,
    to_record,
)
from trackway.wire.chat import Message


def _extra_info(**changes: object) -> ExtraInfo:
    return ExtraInfo.model_validate({"split": "train", "index": 3, "answer": "#### 7", "question": "5+2?"} | changes)


def test_prune_removes_null_and_empty_structs_at_every_depth() -> None:
    record: dict[str, JsonValue] = {
        "a": None,
        "b": {"c": {"d": None}},
        "e": [{"f": None, "g": 0}],
        "h": "",
        "i": [],
    }

    assert prune(record) == {"e": [{"g": 0}], "h": "", "i": []}


def test_list_items_keep_their_places() -> None:
    assert prune({"a": [None, 1, {"b": None}]}) == {"a": [None, 1, {}]}


def test_a_row_carries_the_tool_and_interaction_kwargs_that_it_was_given() -> None:
    extra_info = _extra_info(
        need_tools_kwargs=True,
        tools_kwargs={"calculator": ToolKwargs(create_kwargs={"precision": 2})},
        interaction_kwargs=InteractionKwargs(query="5+2?", ground_truth="7"),
    )

    row = make_row(
        data_source="x",
        prompt=[Message(role="user", content="5+2?")],
        ground_truth="7",
        extra_info=extra_info,
    )

    assert row.index == 3
    assert row.tool_kwargs("calculator", "create_kwargs") == {"precision": 2}
    assert row.tool_kwargs("calculator", "execute_kwargs") == {}
    assert row.extra_info["interaction_kwargs"] == {"query": "5+2?", "ground_truth": "7"}


def test_a_stored_record_has_verls_columns_and_no_null() -> None:
    row = make_row(
        data_source="x",
        prompt=[Message(role="user", content="5+2?")],
        ground_truth="7",
        extra_info=_extra_info(),
    )

    assert to_record(row) == {
        "data_source": "x",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": "5+2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {
            "split": "train",
            "index": 3,
            "answer": "#### 7",
            "question": "5+2?",
            "need_tools_kwargs": False,
        },
    }


def test_a_record_without_agent_name_and_tools_kwargs_is_a_row() -> None:
    row = from_record(
        {
            "data_source": "x",
            "prompt": [{"role": "user", "content": "q"}],
            "reward_model": {"ground_truth": "1"},
        }
    )

    assert row.agent_name is None
    assert row.extra_info == {"need_tools_kwargs": False, "tools_kwargs": {}}


@pytest.mark.parametrize(("given", "text"), [(1, "1"), (-2.5, "-2.5"), ("1", "1")])
def test_a_number_as_ground_truth_is_its_text(given: JsonValue, text: str) -> None:
    assert from_record(answered(given)).reward_model.ground_truth == text


def test_a_list_as_ground_truth_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"reward_model\.ground_truth"):
        from_record(answered([1]))


def answered(ground_truth: JsonValue) -> dict[str, JsonValue]:
    """A record with this ground truth."""
    prompt: JsonValue = [{"role": "user", "content": "q"}]
    return {"data_source": "x", "prompt": prompt, "reward_model": {"ground_truth": ground_truth}}
