import asyncio
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest

from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.clients import AgentClient
from trackway.trainer.loop.rollout_client import GroupTemplate, RetryPolicy, Rollouts, checked
from trackway.wire.agent import Limits, Sample
from trackway.wire.errors import ErrorCode
from trackway.wire.rollout import SamplingParams
from trackway.wire.service import Wait
from trackway.wire.trajectory import Reward, StopReason, TraceTarget, Trajectory, Turn

pytestmark = pytest.mark.anyio

TEMPLATE = GroupTemplate(
    "run", "experiment", 4, SamplingParams(), Limits(), "tool_agent", trace_target=TraceTarget(mlflow_experiment_id="7")
)


def rollouts(url: str, http: httpx.AsyncClient, **changes: float) -> Rollouts:
    given = RetryPolicy(**{"backoff_s": 0.01, **changes})  # pyright: ignore[reportArgumentType]
    return Rollouts(AgentClient(url, http), TEMPLATE, given)


@pytest.fixture
async def http():
    async with httpx.AsyncClient() as client:
        yield client


async def test_every_rollout_comes_back_in_the_order_of_the_batch(agent, agent_url, http, sample):
    got = await rollouts(agent_url, http).collect([sample(5), sample(2)], 3, 9, traced=frozenset({1}))

    assert [(trajectory.tags.sample_index, trajectory.tags.rollout_n) for trajectory in got] == [
        (5, n) for n in range(4)
    ] + [(2, n) for n in range(4)]
    by_index = {request.sample.index: request for request in agent.requests}
    assert (by_index[5].trace, by_index[2].trace, by_index[2].trace_target.mlflow_experiment_id) == (False, True, "7")
    assert (by_index[5].step, by_index[5].min_weight_version) == (3, 9)
    assert by_index[5].sample.agent_name == "tool_agent"


async def test_a_request_says_what_its_template_says(sample):
    limits = Limits(max_prompt_length=9, max_response_length=8, max_assistant_turns=7)
    sampling = SamplingParams(temperature=0.7, top_p=0.8, top_k=11, max_tokens=8, seed=5)
    template = replace(TEMPLATE, sampling_params=sampling, limits=limits, tools=["calculator"], validation=True)

    request = template.group(sample(5), 3, 9, True)

    assert (request.sampling_params, request.limits, request.tools) == (sampling, limits, ["calculator"])
    assert (request.run, request.experiment_name, request.n, request.validation) == ("run", "experiment", 4, True)


async def test_a_stream_that_breaks_is_asked_again_for_exactly_what_is_missing(agent, agent_url, http, sample):
    agent.breaks = [3]

    got = await rollouts(agent_url, http).collect([sample(1)], 1, 0)

    assert [request.rollouts for request in agent.requests] == [None, [3]]
    assert [trajectory.tags.rollout_n for trajectory in got] == [0, 1, 2, 3]
    assert all(trajectory.error is None for trajectory in got)


async def test_a_group_that_is_waited_for_says_what_is_missing_and_why(agent, agent_url, http, sample):
    agent.breaks = [1]
    asking = rollouts(agent_url, http, backoff_s=60.0)
    collecting = asyncio.create_task(asking.collect([sample(1)], 1, 0))
    await async_until(lambda: any("asked again" in wait.progress for wait in asking.waits.current()))
    current = asking.waits.current()
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)

    assert current[0].who == "group 1/1"
    assert current[0].progress.startswith("1 of 4 rollouts have ended; asked again after: POST ")
    assert asking.waits.current() == []


async def test_what_the_rollouts_of_a_group_wait_for_is_below_its_own_wait(agent, agent_url, http, sample):
    agent.waits, agent.holding_at = [Wait(who="rollout 1/1/0", waits_for="tool python", since=1_000)], 1
    asking = rollouts(agent_url, http)
    collecting = asyncio.create_task(asking.collect([sample(1)], 1, 0))
    await async_until(lambda: any(wait.because for wait in asking.waits.current()))
    current = asking.waits.current()
    agent.released.set()
    got = await collecting

    assert current[0].because == agent.waits
    assert [trajectory.tags.rollout_n for trajectory in got] == [0, 1, 2, 3]


async def test_waits_are_told_by_this_machines_clock(agent, agent_url, http, sample):
    since = round(time.time() * 1000) + 3_600_000 - 9_000
    slot = Wait(who="the replica r1", waits_for="a slot", since=since + 1_000)
    wait = Wait(who="rollout 1/1/0", waits_for="tool python", since=since, until=since + 60_000, because=[slot])
    agent.waits, agent.clock_ahead_s, agent.holding_at = [wait], 3600.0, 1
    asking = rollouts(agent_url, http)
    collecting = asyncio.create_task(asking.collect([sample(1)], 1, 0))
    await async_until(lambda: any(wait.because for wait in asking.waits.current()))
    current = asking.waits.current()
    agent.released.set()
    await collecting

    [told] = current[0].because
    assert told.until is not None and told.until - told.since == 60_000
    assert told.because[0].since - told.since == 1_000
    assert 9.0 <= time.time() - told.since / 1000 < 60.0
    assert told.progress == "its agent's clock is 3600 s ahead of this machine's"


async def test_what_stays_missing_is_recorded_as_failed_and_nothing_else(agent, agent_url, http, sample):
    agent.breaks = [2, 0, 0]

    got = await rollouts(agent_url, http, attempts=2).collect([sample(1)], 1, 0)

    failed = got[2:]
    assert [trajectory.error for trajectory in got[:2]] == [None, None]
    assert [trajectory.id for trajectory in failed] == ["run/1/1/2", "run/1/1/3"]
    assert {trajectory.stop_reason for trajectory in failed} == {StopReason.ERROR}
    assert {trajectory.error.code for trajectory in failed if trajectory.error} == {ErrorCode.UNAVAILABLE}


async def test_a_stream_that_broke_after_a_further_trajectory_is_no_failed_attempt(agent, agent_url, http, sample):
    agent.breaks = [1, 1, 1]

    asking = rollouts(agent_url, http, attempts=1)
    got = await asking.collect([sample(1)], 1, 0)

    assert [trajectory.error for trajectory in got] == [None] * 4
    assert [request.rollouts for request in agent.requests] == [None, [1, 2, 3], [2, 3], [3]]
    assert asking.retries == 3 + 2 + 1


async def test_with_a_greedy_baseline_its_score_is_in_each_reward_and_its_rollout_is_one_more(
    agent, agent_url, http, sample
):
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=9, seed=1)
    template = replace(TEMPLATE, n=3, sampling_params=params)
    asking = Rollouts(AgentClient(agent_url, http), template, RetryPolicy(backoff_s=0.01), greedy_baseline=True)
    got = await asking.collect([sample(5)], 3, 9, traced=frozenset({0}))

    sampled, greedy = sorted(agent.requests, key=lambda request: request.n)
    assert (sampled.n, sampled.rollouts, sampled.sampling_params) == (3, None, params)
    assert (greedy.n, greedy.rollouts, greedy.trace) == (4, [3], True)
    assert (sampled.is_baseline, greedy.is_baseline) == (False, True)
    assert greedy.sampling_params == SamplingParams(temperature=0.0, max_tokens=9, seed=1)
    assert (greedy.step, greedy.min_weight_version, greedy.tags(3).rollout_n) == (3, 9, 3)
    assert asking.n == 4
    assert [(trajectory.tags.rollout_n, trajectory.is_baseline) for trajectory in got] == [
        *((number, False) for number in range(3)),
        (3, True),
    ]
    rewards = [(t.reward.score, t.reward.components) for t in got[:3] if t.reward]
    assert rewards == [(float(n % 2), {"acc": float(n % 2), "reward_baseline": 1.0}) for n in range(3)]
    assert asking.retries == 0


async def test_a_group_without_its_greedy_score_fails_and_a_broken_greedy_rollout_is_asked_again(
    agent, agent_url, http, sample
):
    def unscored(trajectory: Trajectory) -> Trajectory:
        return trajectory.model_copy(update={"reward": None}) if trajectory.tags.rollout_n == 4 else trajectory

    agent.change, agent.breaks = unscored, [0, 0]  # the first streams of both requests
    asking = Rollouts(AgentClient(agent_url, http), TEMPLATE, RetryPolicy(backoff_s=0.01), greedy_baseline=True)
    got = await asking.collect([sample(1)], 1, 0)

    assert [trajectory.error is None for trajectory in got] == [False] * 4 + [True]
    assert [trajectory.error.message for trajectory in got if trajectory.error] == [
        "the greedy rollout run/1/1/4 of the group failed: expected a reward, got none"
    ] * 4
    assert {trajectory.stop_reason for trajectory in got[:4]} == {StopReason.ERROR}
    assert asking.retries == 4 + 1


@ENDS_SOON
async def test_a_deadline_ends_the_waiting_and_keeps_what_came(agent, agent_url, http, sample):
    agent.holding_at = 1

    got = await rollouts(agent_url, http, timeout_s=0.2).collect([sample(1)], 1, 0)

    assert {trajectory.error.code for trajectory in got if trajectory.error} == {ErrorCode.DEADLINE_EXCEEDED}
    assert len(agent.requests) == 1


@ENDS_SOON
async def test_a_group_that_ends_by_its_deadline_names_what_it_waited_for(agent, agent_url, http, sample):
    replica = Wait(who="the replica r1", waits_for="a slot", since=3_000, until=9_000)
    tool = Wait(who="rollout 1/1/2", waits_for="tool python", since=2_000, progress="replica r1", because=[replica])
    agent.waits, agent.holding_at = [Wait(who="rollout 1/1/3", waits_for="tool search", since=5_000), tool], 0

    got = await rollouts(agent_url, http, timeout_s=0.2).collect([sample(1)], 1, 0)

    [message] = {trajectory.error.message for trajectory in got if trajectory.error}
    said = re.sub(r", \d+ s", ", N s", message)
    assert said.endswith(
        "; at the end rollout 1/1/2 waits for tool python, N s: replica r1; the replica r1 waits for a slot, N s of 6 s"
    )


async def test_a_service_that_is_not_there_fails_each_rollout_with_its_address(http, sample: Callable[[int], Sample]):
    got = await rollouts("http://127.0.0.1:9", http, attempts=2).collect([sample(1)], 1, 0)

    errors = [trajectory.error for trajectory in got]
    assert len(errors) == 4
    assert all(error is not None and "http://127.0.0.1:9/groups" in error.message for error in errors)


async def test_no_more_groups_are_in_flight_than_allowed(agent, agent_url, http, sample):
    agent.holding_at = 1
    batch = [sample(index) for index in range(5)]

    got = await rollouts(agent_url, http, max_inflight=2, timeout_s=0.3).collect(batch, 1, 0)

    assert len(got) == 20
    assert {request.sample.index for request in agent.requests[:2]} == {0, 1}
    assert len(agent.requests) <= 5


TURN = Turn(index=0, messages=[], response_start=0, response_end=2, finish_reason="stop")


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({"turn_scores": [1.0, 2.0]}, "expected 1 turn_scores, one for each turn of the response, or none, got 2"),
        ({"token_scores": [1.0]}, "expected 6 token_scores, one for each token of the response, or none, got 1"),
        ({"turn_scores": [1.0], "token_scores": [0.0] * 6}, "expected turn_scores or token_scores, got both"),
        ({"turn_scores": [math.nan]}, "expected the score to be finite"),
        ({"token_scores": [0.0] * 5 + [math.inf]}, "expected the score to be finite"),
        ({"turn_scores": [1.0]}, None),
        ({"token_scores": [1.0] * 6}, None),
        ({}, None),
    ],
)
def test_a_trajectory_whose_parts_of_the_score_fit_nowhere_fails(rollout, scores: dict, message: str | None):
    found = checked(rollout(turns=[TURN], reward=Reward(score=1.0, **scores)))

    assert (found.error is None) == (message is None)
    assert message is None or (found.error is not None and message in found.error.message)
