"""A trajectory that nobody waits for any more: its tools are given back, and its trace says `aborted`."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, call, group, open_services
from tests.services.agent.scripted_model import END
from tests.waiting import async_until
from trackway.agent.context import AgentContext
from trackway.agent.groups import Groups
from trackway.agent.settings import AgentSettings
from trackway.clients import AgentClient
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.anyio

COUNT = call("counter") + END
ANSWER = "#### 18" + END


async def never() -> str:
    await asyncio.Event().wait()
    raise AssertionError


def roots(services: AgentServices) -> list[ReadableSpan]:
    return [span for span in services.spans() if span.parent is None]


def tag(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(f"agentic.tag.{name}")


async def first_of(stream: AsyncIterator[Trajectory]) -> Trajectory:
    return await anext(stream)


async def test_a_client_that_leaves_aborts_what_still_runs(services: AgentServices, agent: AgentClient) -> None:
    services.model.scripts = {0: [ANSWER], 1: [COUNT, never]}
    async with aclosing(agent.group(group(n=2, trace=True))) as stream:  # pyright: ignore[reportArgumentType]
        assert (await first_of(stream)).tags.rollout_n == 0
        await async_until(lambda: len(services.model.requests) == 3)

    await async_until(lambda: len(roots(services)) == 2)
    outcomes = {tag(root, "rollout_n"): tag(root, "outcome") for root in roots(services)}
    assert outcomes == {0: "ok", 1: "aborted"}
    assert services.counter.released == list(services.counter.counts)


async def test_the_root_of_an_aborted_trajectory_is_failed_and_tells_how_far_it_came(
    services: AgentServices, settings: AgentSettings
) -> None:
    services.model.scripts = {0: [COUNT, never]}
    asking = asyncio.create_task(services.run(group(trace=True)))
    await async_until(lambda: len(services.model.requests) == 2)
    asking.cancel()
    await asyncio.wait([asking])

    await async_until(lambda: len(roots(services)) == 1)
    [root] = roots(services)
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "the group was closed before this rollout ended"
    outputs = json.loads(str((root.attributes or {})["agentic.outputs"]))
    said = len(services.model.encode(COUNT))
    assert (outputs["stop_reason"], outputs["num_turns"], outputs["reward"]) == ("aborted", 3, None)
    assert outputs["response_tokens"] > said and "response_text" not in outputs


async def test_incidents_of_an_aborted_trajectory_are_kept(services: AgentServices) -> None:
    services.model.scripts = {0: [call("counter", '{"refuse": true}') + END, never]}
    asking = asyncio.create_task(services.run(group(trace=True)))
    await async_until(lambda: len(services.model.requests) == 2)
    asking.cancel()
    await asyncio.wait([asking])

    await async_until(lambda: len(roots(services)) == 1)
    [root] = roots(services)
    assert (tag(root, "outcome"), tag(root, "incidents")) == ("aborted", "tool_failed")


async def test_a_trajectory_that_waited_for_its_turn_leaves_no_trace(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with open_services(settings.model_copy(update={"max_concurrent_trajectories": 1}), tokenizer) as services:
        services.model.scripts = {number: [never] for number in range(3)}
        asking = asyncio.create_task(services.run(group(n=3, trace=True)))
        await async_until(lambda: len(services.model.requests) == 1)
        asking.cancel()
        await asyncio.wait([asking])

        await async_until(lambda: len(roots(services)) == 1)
        assert [tag(root, "rollout_n") for root in roots(services)] == [0]


@pytest.mark.parametrize(("route", "n", "status"), [("/groups", 2, 200), ("/trajectories", 1, 503)])
async def test_a_service_that_stops_aborts_its_trajectories_before_it_ends(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast, route: str, n: int, status: int
) -> None:
    async with open_services(settings, tokenizer) as services:
        services.model.scripts = {0: [COUNT, never], 1: [ANSWER]}
        body = group(n=n, trace=True).model_dump(mode="json")
        asking = asyncio.create_task(services.client.post(route, json=body))
        await async_until(lambda: len(services.model.seen(0)) == 2 and (n == 1 or len(roots(services)) == 1))

    response = await asking
    assert (response.status_code, len(response.text.splitlines())) == (status, 1)
    finished = [span for span in services.exporter.get_finished_spans() if span.parent is None]
    [root] = [span for span in finished if tag(span, "rollout_n") == 0]
    assert (tag(root, "outcome"), root.status.description) == ("aborted", "the agent service stops")
    assert services.counter.released == list(services.counter.counts)


async def test_a_service_that_stops_takes_no_new_group(settings: AgentSettings) -> None:
    async with httpx.AsyncClient() as http:
        groups = Groups(AgentContext.connect(settings, http))
        await groups.close()
        with pytest.raises(TrackwayError) as caught:
            groups.start(group())

    assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, True)
