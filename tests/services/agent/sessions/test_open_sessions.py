"""Bounds of the sessions that callers open: slots of their own, shares of each token, room that idle ones make."""

import asyncio

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, group, open_services
from tests.services.agent.sessions.test_session import ANSWER, QUESTION, SAMPLE, opened
from trackway.agent.settings import AgentSettings
from trackway.serving import AuthSettings
from trackway.wire.sessions import SessionAccess

pytestmark = pytest.mark.anyio

SECRETS = {name: f"{name}-0123456789abcdef" for name in ("one", "other")}


async def called(services: AgentServices, access: SessionAccess) -> httpx.Response:
    url, body = f"/sessions/{access.session_id}/v1/chat/completions", {"model": "any", "messages": QUESTION}
    return await services.client.post(url, json=body)


async def test_rollouts_run_while_as_many_sessions_are_open_as_may_be(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    few = settings.model_copy(update={"max_concurrent_trajectories": 2, "max_sessions": 2})
    async with open_services(few, tokenizer) as services:
        for _ in range(2):
            await opened(services)
        services.model.scripts = {number: [ANSWER] for number in range(3)}
        async with asyncio.timeout(60):
            trajectories = await services.run(group(n=3))

    assert [trajectory.error for trajectory in trajectories] == [None] * 3


async def test_one_token_does_not_take_the_sessions_of_another(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    auth = AuthSettings.model_validate({"tokens": {name: {"secret": secret} for name, secret in SECRETS.items()}})
    few = settings.model_copy(update={"auth": auth, "max_sessions": 3, "max_sessions_per_token": 2})
    async with open_services(few, tokenizer) as services:

        async def asked(name: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {SECRETS[name]}"}
            return await services.client.post("/sessions", json={"sample": SAMPLE}, headers=headers)

        flood, other = [await asked("one") for _ in range(4)], await asked("other")

    assert [answer.status_code for answer in flood] == [200, 200, 429, 429]
    assert "2 open sessions of 'one' on this replica (max_sessions_per_token)" in flood[2].json()["error"]["message"]
    assert other.status_code == 200


async def test_the_session_idle_for_longest_ends_with_the_reason_and_makes_room(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    few = settings.model_copy(update={"max_sessions": 2, "session_room_s": 0.0})
    async with open_services(few, tokenizer) as services:
        first, second = await opened(services), await opened(services, ANSWER)
        assert (await called(services, first)).status_code == 200
        await opened(services)
        refused = await called(services, second)
        ending = await services.client.post(f"/sessions/{second.session_id}/end")
        goes_on = await services.client.get(f"/sessions/{first.session_id}/trajectory")

    reason = "it was idle for longest and made room for another session (max_sessions)"
    assert refused.status_code == 400 and reason in refused.json()["error"]["message"]
    assert ending.json()["error"]["code"] == "agent_failed" and reason in ending.json()["error"]["message"]
    assert goes_on.json()["ended"] is False


async def test_a_session_with_a_call_in_progress_does_not_make_room(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    arrived, answered = asyncio.Event(), asyncio.Event()

    async def answer() -> str:
        arrived.set()
        await answered.wait()
        return ANSWER

    few = settings.model_copy(update={"max_sessions": 1, "session_room_s": 0.0})
    async with open_services(few, tokenizer) as services:
        access = await opened(services)
        services.model.scripts[0] = [answer]
        call = asyncio.create_task(called(services, access))
        async with asyncio.timeout(60):
            await arrived.wait()
        refused = await services.client.post("/sessions", json={"sample": SAMPLE})
        answered.set()

        assert refused.status_code == 429
        assert (await call).status_code == 200
        assert (await services.client.post("/sessions", json={"sample": SAMPLE})).status_code == 200
