"""Whatever goes wrong on the way of a trajectory is seen in its trace, and in the trajectory where none is recorded."""

import asyncio
import logging
from functools import partial

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, open_services
from tests.services.agent.bad_paths import ANSWER, BUSY, COUNT, PATHS, BadPath, Seen, seen
from tests.services.agent.replaceable import Answer, answers
from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from trackway.agent.settings import AgentSettings
from trackway.wire.trajectory import Incident, Trajectory

pytestmark = pytest.mark.slow


async def run(services: AgentServices, path: BadPath, trace: bool) -> Trajectory:
    path.prepare(services)
    said = [words if isinstance(words, str) else partial(words, services) for words in path.says]
    return await services.say(*said, trace=trace, **path.asked)


@pytest.mark.anyio
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
async def test_it_is_in_the_tags_and_on_the_span_where_it_happened(
    services: AgentServices, path: BadPath, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL):
        trajectory = await run(services, path, trace=True)

    assert seen(services.spans()) == path.seen
    assert trajectory.incidents == path.incidents
    assert (trajectory.error.code if trajectory.error else None) == path.error


@pytest.mark.anyio
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
async def test_an_unrecorded_trajectory_knows_it_all_the_same(
    services: AgentServices, path: BadPath, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL):
        trajectory = await run(services, path, trace=False)

    assert (trajectory.incidents, trajectory.trace_bytes, services.spans()) == (path.incidents, 0, [])


@pytest.mark.anyio
async def test_a_refusal_for_stale_weights_is_seen_in_both_services(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with open_services(settings, tokenizer, weight_wait_s=0.0) as services:

        async def at_once(answer: Answer) -> httpx.Response:
            return await answer()

        async def after_a_load(answer: Answer) -> httpx.Response:
            services.model.version = 9
            return await answer()

        services.rollout.faults = [at_once, after_a_load]
        trajectory = await services.say(ANSWER, trace=True, min_weight_version=9)

        behind = ["weights_behind"]
        events = {"turn 0": behind, "chat tiny": [*behind, "exception"]}
        assert seen(services.spans()) == Seen("weights_behind", "weights_behind", events, ["chat tiny"])
        assert trajectory.incidents == [Incident.WEIGHTS_BEHIND]


@pytest.mark.anyio
async def test_an_event_says_what_where_and_which_try(services: AgentServices) -> None:
    services.rollout.faults = [answers(500, text="Internal Server Error")]
    services.reward.faults = [answers(429, json=BUSY)]

    await services.say(ANSWER, trace=True)

    told = {event.name: dict(event.attributes or {}) for span in services.spans() for event in span.events}
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
async def test_the_time_limit_fails_the_root_and_what_it_interrupted(services: AgentServices) -> None:
    async def never() -> str:
        await asyncio.Event().wait()
        raise AssertionError

    await services.say(COUNT, never, trace=True, limits__timeout_s=2.0)

    await async_until(lambda: len(services.spans()) == 6)
    found = seen(services.spans())
    assert (found.outcome, found.failed) == ("error:deadline_exceeded", ["chat tiny", "trajectory", "turn 1"])
