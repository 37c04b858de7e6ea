"""A prompt that is longer than its limit, when the limits say to cut it."""

import time

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from tests.services.agent.agent_services import AgentServices
from tests.services.agent.scripted_model import END
from tests.time_limits import slowness
from trackway.wire.trajectory import Incident, StopReason, Trajectory

ANSWER = "#### 18" + END


async def cut(services: AgentServices, side: str, limit: int) -> Trajectory:
    return await services.say(ANSWER, limits__max_prompt_length=limit, limits__prompt_truncation=side, trace=True)


def root_of(services: AgentServices) -> ReadableSpan:
    [root] = [span for span in services.spans() if span.parent is None]
    return root


@pytest.mark.anyio
@pytest.mark.parametrize(("side", "head", "tail"), [("left", 0, 11), ("right", 11, 0), ("middle", 5, 6)])
async def test_the_model_is_shown_what_is_kept_of_the_prompt(
    services: AgentServices, side: str, head: int, tail: int
) -> None:
    whole = (await services.say(ANSWER)).prompt_ids
    services.model.begin_again()

    trajectory = await cut(services, side, limit=11)

    assert trajectory.prompt_ids == whole[:head] + whole[len(whole) - tail :]
    assert services.model.seen()[-1].token_ids == trajectory.prompt_ids
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.ANSWERED, None)
    assert trajectory.reward is not None and trajectory.reward.score == 1.0


@pytest.mark.anyio
async def test_a_cut_prompt_is_an_incident_of_the_trajectory_and_of_its_trace(services: AgentServices) -> None:
    trajectory = await cut(services, "middle", limit=11)

    root = root_of(services)
    [event] = [event for event in root.events if event.name == "prompt_cut"]
    assert trajectory.incidents == [Incident.PROMPT_CUT]
    assert dict(event.attributes or {}) == {"tokens": 85, "kept": 11, "side": "middle"}
    tags = root.attributes or {}
    assert (tags["agentic.tag.outcome"], tags["agentic.tag.incidents"]) == ("prompt_cut", "prompt_cut")


@pytest.mark.anyio
async def test_a_prompt_within_its_limit_stays_whole_and_is_no_incident(services: AgentServices) -> None:
    trajectory = await cut(services, "left", limit=85)

    assert (len(trajectory.prompt_ids), trajectory.incidents) == (85, [])


@pytest.mark.anyio
@pytest.mark.parametrize(("side", "most"), [("error", 2048), ("left", 65_536)])
async def test_a_prompt_that_is_far_too_long_is_refused_and_not_sent_back(
    services: AgentServices, side: str, most: int
) -> None:
    prompt = [{"role": "user", "content": "1" * 4_000_000}]
    began = time.process_time()

    trajectory = await services.say(ANSWER, sample__prompt=prompt, limits__prompt_truncation=side)

    assert time.process_time() - began < 2.0 * slowness()
    assert (trajectory.stop_reason, trajectory.prompt_messages, trajectory.prompt_ids) == (StopReason.ERROR, [], [])
    assert trajectory.error is not None
    assert trajectory.error.message.startswith(f"expected a prompt of at most {most} tokens (max_prompt_length), got ")
