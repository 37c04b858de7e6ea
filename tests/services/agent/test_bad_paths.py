"""Whatever goes wrong on the way of a trajectory is seen in its trace, and in the trajectory where none is recorded."""

import asyncio
import logging
from functools import partial

import httpx
import pytest
from agent_world import World, open_world, until
from bad_paths import ANSWER, BUSY, COUNT, PATHS, BadPath, Seen, seen
from replaceable import Answer, answers
from time_limits import ENDS_SOON
from transformers import PreTrainedTokenizerFast

from trackway.agent.settings import AgentSettings
from trackway.wire.tracing import Incident
from trackway.wire.trajectory import Trajectory


async def run(world: World, path: BadPath, trace: bool) -> Trajectory:
    path.prepare(world)
    said = [words if isinstance(words, str) else partial(words, world) for words in path.says]
    return await world.say(*said, trace=trace, **path.asked)


@pytest.mark.anyio
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
async def test_it_is_in_the_tags_and_on_the_span_where_it_happened(
    world: World, path: BadPath, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL):
        trajectory = await run(world, path, trace=True)

    assert seen(world.spans()) == path.seen
    assert trajectory.incidents == path.incidents
    assert (trajectory.error.code if trajectory.error else None) == path.error


@pytest.mark.anyio
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
async def test_an_unrecorded_trajectory_knows_it_all_the_same(
    world: World, path: BadPath, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL):
        trajectory = await run(world, path, trace=False)

    assert (trajectory.incidents, trajectory.trace_bytes, world.spans()) == (path.incidents, 0, [])


@pytest.mark.anyio
async def test_a_refusal_for_stale_weights_is_seen_in_both_services(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with open_world(settings, tokenizer, weight_wait_s=0.0) as world:

        async def at_once(answer: Answer) -> httpx.Response:
            return await answer()

        async def after_a_load(answer: Answer) -> httpx.Response:
            world.model.version = 9
            return await answer()

        world.rollout.faults = [at_once, after_a_load]
        trajectory = await world.say(ANSWER, trace=True, min_weight_version=9)

        behind = ["weights_behind"]
        events = {"turn 0": behind, "chat tiny": [*behind, "exception"]}
        assert seen(world.spans()) == Seen("weights_behind", "weights_behind", events, ["chat tiny"])
        assert trajectory.incidents == [Incident.WEIGHTS_BEHIND]


@pytest.mark.anyio
async def test_an_event_says_what_where_and_which_try(world: World) -> None:
    world.rollout.faults = [answers(500, text="Internal Server Error")]
    world.reward.faults = [answers(429, json=BUSY)]

    await world.say(ANSWER, trace=True)

    told = {event.name: dict(event.attributes or {}) for span in world.spans() for event in span.events}
    assert told == {
        "replica_lost": {
            "url": "http://rollout/inference/v1/generate",
            "attempt": 1,
            "reason": "HTTP 500: Internal Server Error",
        },
        "retried": {"url": "http://reward/score", "attempt": 1, "reason": "overloaded: expected a free place"},
    }


@ENDS_SOON
@pytest.mark.anyio
async def test_the_time_limit_fails_the_root_and_what_it_interrupted(world: World) -> None:
    async def never() -> str:
        await asyncio.Event().wait()
        raise AssertionError

    await world.say(COUNT, never, trace=True, limits__timeout_s=2.0)

    await until(lambda: len(world.spans()) == 6)
    found = seen(world.spans())
    assert (found.outcome, found.failed) == ("error:deadline_exceeded", ["chat tiny", "trajectory", "turn 1"])
