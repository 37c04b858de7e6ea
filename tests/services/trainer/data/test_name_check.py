"""Names in rows that no service knows: told before the first step, with the rows."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
from fastapi import FastAPI

from trackway.reward.app import create_app as create_reward
from trackway.run_config import compose
from trackway.tools.app import create_app as create_tools
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.trainer.data.dataset import RowLocation, Rows
from trackway.trainer.data.name_check import Served, ask_services, check_names, unserved
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.agent import Sample
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError

Make = Callable[[int], Sample]
Serving = Callable[[FastAPI], AbstractContextManager[str]]

SERVED = Served(
    agents=frozenset({"single_turn_agent", "tool_agent"}),
    data_sources=frozenset({"openai/gsm8k"}),
    tools=frozenset({"calculator"}),
)
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn.enable=true"
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"


def rows_of(sample: Make, count: int, changed: dict[int, dict[str, object]]) -> Rows:
    """Rows that are all served, but for those whose fields are changed."""
    rows = [sample(index).model_copy(update=changed.get(index, {})) for index in range(count)]
    return Rows(rows, [RowLocation("t.parquet", index + 1) for index in range(count)])


def problems(rows: Rows, *words: str, served: Served = SERVED) -> list[str]:
    return unserved(compose([*words]), {"data.train_files": rows}, served)


def test_rows_that_every_service_knows_are_no_problem(sample: Make) -> None:
    named: dict[int, dict[str, object]] = {1: {"agent_name": "tool_agent", "extra_info": {"tool_selection": []}}}
    assert problems(rows_of(sample, 4, named), "trackway.tools=[calculator]") == []


def test_an_agent_that_4_of_48_rows_ask_for_in_vain_is_told_with_those_rows(sample: Make) -> None:
    rows = rows_of(sample, 48, {index: {"agent_name": "my_agent"} for index in (2, 9, 30, 47)})

    assert problems(rows) == [
        "data.train_files: expected agent_name out of single_turn_agent, tool_agent, got 'my_agent' in 4 of 48 rows "
        "(t.parquet rows 3, 10, 31, 48); correct the rows, or name the module that registers it in "
        "trackway.modules"
    ]


def test_every_unknown_name_is_told_at_once_and_many_are_counted(sample: Make) -> None:
    changed: dict[int, dict[str, object]] = {index: {"data_source": f"src/{index}"} for index in range(7)}
    changed[7] = {"agent_name": "nobody"}
    changed[8] = {"agent_name": "tool_agent", "extra_info": {"tool_selection": ["calculator", "abacus"]}}

    told = problems(rows_of(sample, 9, changed))

    assert [message.partition(",")[0].partition(" out of")[0] for message in told] == [
        "data.train_files: expected agent_name",
        *["data.train_files: expected data_source"] * 6,
        "data.train_files: expected tool_selection",
    ]
    assert "got 'src/4' in 1 of 9 rows (t.parquet row 5)" in told[5]
    assert "got 2 further names in 2 of 9 rows (t.parquet rows 6, 7)" in told[6]
    assert "got 'abacus' in 1 of 9 rows (t.parquet row 9)" in told[7]


def test_a_selection_of_tools_counts_only_where_the_agent_offers_tools(sample: Make) -> None:
    rows = rows_of(sample, 2, {0: {"extra_info": {"tool_selection": ["abacus"]}}})

    assert problems(rows) == []  # both run in one turn without tools
    assert len(problems(rows, MULTI_TURN)) == 1


def test_an_unknown_default_loop_or_tool_of_the_configuration_is_told(sample: Make) -> None:
    [loop, tools] = problems(rows_of(sample, 3, {}), f"{LOOP}=mine", "trackway.tools=[calculator,abacus]")

    assert loop.startswith(f"{LOOP}: expected one of single_turn_agent, tool_agent, got 'mine', the loop of 3 rows")
    assert tools.startswith("trackway.tools: expected tools out of calculator, got 'abacus';")


def test_agents_with_tools_are_refused_for_a_template_without_them(sample: Make) -> None:
    rows = rows_of(sample, 3, {1: {"agent_name": "tool_agent"}})
    offered = (ToolSchema(function=FunctionSchema(name="calculator")),)
    without = replace(
        SERVED, schemas=offered, tool_agents=frozenset({"tool_agent"}), without_tools="expected tools, got none"
    )

    refused = "data.train_files: expected tools, got none. An agent of 1 of 3 rows (t.parquet row 2) offers tools."
    assert problems(rows, served=without) == [refused]
    assert problems(rows, served=replace(without, without_tools="")) == []
    assert problems(rows, served=replace(without, schemas=())) == []
    assert problems(rows, "trackway.tools=[]", served=without) == []


def test_what_could_not_be_learned_is_not_held_against_a_row(sample: Make) -> None:
    rows = rows_of(sample, 1, {0: {"agent_name": "x", "data_source": "y", "extra_info": {"tool_selection": ["z"]}}})

    assert problems(rows, "trackway.tools=[abacus]", served=Served()) == []


@pytest.mark.anyio
@pytest.mark.usefixtures("shared_http")
async def test_the_services_are_asked_and_the_run_is_refused_with_every_name(
    sample: Make, serving: Serving, agent_url: str
) -> None:
    changed: dict[int, dict[str, object]] = {
        0: {"agent_name": "nobody"},
        1: {"data_source": "lighteval/MATH"},
        2: {"agent_name": "tool_agent", "extra_info": {"tool_selection": ["abacus"]}},
    }
    rows = rows_of(sample, 4, changed)
    with serving(create_tools(tools=[CalculatorTool.default()])) as tools, serving(create_reward()) as reward:
        urls = ServiceUrls(agent_url=agent_url, tools_url=tools, reward_url=reward, weights_url="w")
        with pytest.raises(TrackwayError) as caught:
            await check_names(compose([]), {"data.train_files": rows}, urls)

    message = caught.value.message
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert "agent_name out of single_turn_agent, tool_agent, got 'nobody' in 1 of 4 rows" in message
    assert "data_source out of openai/gsm8k, trackway/tiny_math, got 'lighteval/MATH' in 1 of 4 rows" in message
    assert "tool_selection out of calculator, got 'abacus' in 1 of 4 rows" in message


@pytest.mark.anyio
@pytest.mark.usefixtures("shared_http")
async def test_a_service_that_does_not_answer_is_named_and_no_obstacle(
    sample: Make, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = "http://127.0.0.1:9"
    urls = ServiceUrls(agent_url=nowhere, tools_url=nowhere, reward_url=nowhere, weights_url="w")

    await check_names(compose([]), {"data.train_files": rows_of(sample, 1, {0: {"agent_name": "nobody"}})}, urls)

    asked = {message.partition(" service knows cannot be checked")[0] for message in caplog.messages}
    assert asked == {"the names that the agent", "the names that the reward"}  # no row selects tools
    served, errors = await ask_services(urls)
    assert (served, sorted(errors)) == (Served(), ["agent", "reward", "tools"])
