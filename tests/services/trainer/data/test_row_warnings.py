"""What is said about the rows before a run."""

from collections.abc import Callable

import pytest
from pydantic import JsonValue

from trackway.run_config import compose
from trackway.trainer.data.dataset import agent_name_note, tools_kwargs_note
from trackway.wire.agent import Sample

ENABLE = "actor_rollout_ref.rollout.multi_turn.enable"
DEFAULT = "actor_rollout_ref.rollout.agent.default_agent_loop"
REMEDY = f"add the column agent_name to choose another, or set {ENABLE}=true to give them tools"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], f"single_turn_agent, in one turn without tools ({DEFAULT}=single_turn_agent); {REMEDY}"),
        (
            [f"{ENABLE}=true"],
            f"tool_agent, in several turns with all tools of the tool server ({ENABLE}=true); "
            "add the column agent_name to choose another",
        ),
        (
            [f"{DEFAULT}=tool_agent", "trackway.tools=[calculator,search]"],
            f"tool_agent, in several turns with the tools calculator, search ({DEFAULT}=tool_agent); "
            "add the column agent_name to choose another",
        ),
        ([f"{DEFAULT}=my_agent"], f"my_agent ({DEFAULT}=my_agent); {REMEDY}"),
    ],
)
def test_the_note_says_as_what_rows_without_agent_name_run_and_how_to_change_it(
    overrides: list[str], told: str, sample: Callable[[int], Sample]
) -> None:
    named = sample(2).model_copy(update={"agent_name": "tool_agent"})
    unnamed = sample(1).model_copy(update={"agent_name": ""})

    note = agent_name_note([sample(0), unnamed, named], compose(overrides))

    assert note == f"2 of 3 rows have no agent_name and run as {told}"


def test_rows_that_all_name_their_agent_need_no_note(sample: Callable[[int], Sample]) -> None:
    assert agent_name_note([sample(0).model_copy(update={"agent_name": "a"})], compose([])) is None


def test_rows_whose_tools_need_arguments_that_are_not_there_are_counted(sample: Callable[[int], Sample]) -> None:
    kwargs: dict[str, JsonValue] = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1"}}}
    infos: list[dict[str, JsonValue]] = [
        {"need_tools_kwargs": True, "tools_kwargs": kwargs},
        {"need_tools_kwargs": True, "tools_kwargs": {}},
        {"need_tools_kwargs": True},
        {},
    ]
    rows = [sample(0).model_copy(update={"extra_info": info}) for info in infos]

    assert tools_kwargs_note(rows[:1]) is None
    assert (tools_kwargs_note(rows) or "").startswith("2 of 4 rows have need_tools_kwargs and no tools_kwargs")
