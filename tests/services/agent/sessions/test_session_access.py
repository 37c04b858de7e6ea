"""Who may call a session's model, and calls that arrive at another replica."""

from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, open_services
from tests.services.agent.scripted_model import END
from tests.services.agent.sessions.test_session import ANSWER, QUESTION, SAMPLE, ended, opened, retry
from trackway.agent.app import create_app
from trackway.agent.settings import AgentSettings
from trackway.clients.base import ServiceClient
from trackway.clients.direct import Address
from trackway.wire.sessions import SessionAccess

pytestmark = pytest.mark.anyio

TOKEN = "agent-0123456789abcdef"
BODY = {"model": "any", "messages": QUESTION}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(settings: AgentSettings, monkeypatch: pytest.MonkeyPatch) -> AgentSettings:
    """Settings of services that know one token."""
    monkeypatch.setenv("TRACKWAY_AUTH__TOKENS__AGENTS__SECRET", TOKEN)
    monkeypatch.setenv("TRACKWAY_TOKEN", TOKEN)
    return AgentSettings(**settings.model_dump(exclude={"token", "auth"}))


async def guarded_session(services: AgentServices) -> SessionAccess:
    services.model.scripts[0] = [ANSWER] * 4
    response = await services.client.post("/sessions", json={"sample": SAMPLE}, headers=bearer(TOKEN))
    return SessionAccess.model_validate_json(response.text)


async def test_opening_a_session_needs_the_services_token(
    guarded: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with open_services(guarded, tokenizer) as services:
        assert (await services.client.post("/sessions", json={"sample": SAMPLE})).status_code == 401


async def test_a_key_calls_its_sessions_model_and_nothing_else(
    guarded: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with open_services(guarded, tokenizer) as services:
        access, other = await guarded_session(services), await guarded_session(services)
        own, key = f"/sessions/{access.session_id}", bearer(access.api_key)

        async def status(path: str, headers: dict[str, str], **body: Any) -> int:
            return (await services.client.post(path, json=body, headers=headers)).status_code

        assert await status(f"{own}/v1/chat/completions", key, **BODY) == 200
        assert await status("/v1/chat/completions", key, **BODY) == 200
        assert await status("/v1/chat/completions", {"x-api-key": access.api_key}, **BODY) == 200
        assert await status(f"{own}/chat/completions", key, **BODY) == await status("/responses", key, **BODY) == 404
        assert await status(f"/sessions/{other.session_id}/chat/completions", key, **BODY) == 401
        assert await status(f"{own}/v1/chat/completions", bearer(TOKEN), **BODY) == 200
        assert await status(f"{own}/v1/chat/completions", bearer(access.api_key[:-1] + "x"), **BODY) == 401
        assert await status(f"/sessions/{other.session_id}/v1/chat/completions", key, **BODY) == 401
        assert await status(f"{own}/v1/chat/completions", {}, **BODY) == 401
        assert await status(f"{own}/reward", key, score=1.0) == 401
        assert await status(f"{own}/end", key) == 401
        assert await status("/sessions", key, sample=SAMPLE) == 401
        for base in (own, f"{own}/v1"):
            assert (await services.client.head(base, headers=key)).status_code == 200
        assert (await services.client.delete(own, headers=key)).status_code == 401


async def test_a_key_is_enough_without_a_url(services: AgentServices) -> None:
    access = await opened(services, ANSWER)

    response = await services.client.post("/v1/chat/completions", json=BODY, headers=bearer(access.api_key))

    assert response.json()["choices"][0]["message"]["content"] == ANSWER.removesuffix(END)
    assert len((await ended(services, access)).turns) == 1


async def test_a_call_without_a_session_is_told_how_to_get_one(services: AgentServices) -> None:
    response = await services.client.post("/v1/chat/completions", json=BODY)

    assert response.status_code == 404 and "POST /sessions" in response.json()["error"]["message"]


class OtherReplica(ServiceClient):
    """A client that finds the replica of `services` at its address, and no other one."""

    def __init__(self, services: AgentServices) -> None:
        super().__init__("http://agent", httpx.AsyncClient(transport=httpx.ASGITransport(services.agent)))
        self._replica = services.agent.state.settings.replica

    async def address_of(self, replica: str) -> Address | None:
        return Address(replica, "http://agent", SecretStr("")) if replica == self._replica else None


async def elsewhere(services: AgentServices, settings: AgentSettings) -> httpx.AsyncClient:
    """A client of another replica of the agent service."""
    app = create_app(settings.model_copy(update={"replica": "elsewhere"}), services.client)
    app.state.passing_on.client = OtherReplica(services)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://elsewhere")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_at_another_replica_is_passed_on(
    services: AgentServices, settings: AgentSettings, stream: bool
) -> None:
    access = await opened(services, ANSWER)
    client = await elsewhere(services, settings)

    path = f"/sessions/{access.session_id}/v1/chat/completions"
    response = await client.post(path, json={**BODY, "stream": stream})
    again = bearer(access.api_key) | retry(1)
    by_key = await client.post("/v1/chat/completions", json=BODY, headers=again)

    assert response.status_code == by_key.status_code == 200
    assert "#### 18" in response.text
    assert response.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    ending = await client.post(f"/sessions/{access.session_id}/end")
    assert ending.json()["response_ids"] == services.model.encode(ANSWER)


@pytest.mark.parametrize(("route", "is_anthropic"), [("chat/completions", False), ("messages", True)])
async def test_a_wrong_method_at_another_replica_is_refused_as_by_the_sessions_own(
    services: AgentServices, settings: AgentSettings, route: str, is_anthropic: bool
) -> None:
    access = await opened(services, ANSWER)
    client = await elsewhere(services, settings)

    for path, headers in ((f"/sessions/{access.session_id}", {}), ("", bearer(access.api_key))):
        own = await services.client.put(f"{path}/v1/{route}", headers=headers)
        passed_on = await client.put(f"{path}/v1/{route}", headers=headers)

        assert (passed_on.status_code, passed_on.json()) == (405, own.json())
        for name, value in (("allow", "POST"), ("x-should-retry", "false"), ("content-type", "application/json")):
            assert passed_on.headers[name] == own.headers[name] == value
        assert (passed_on.json().get("type") == "error") == is_anthropic and f"got PUT /v1/{route};" in passed_on.text


async def test_a_call_for_a_replica_that_does_not_answer_is_refused_by_name(
    services: AgentServices, settings: AgentSettings
) -> None:
    client = await elsewhere(services, settings)

    response = await client.post(f"/sessions/s-gone-{'0' * 32}/v1/chat/completions", json=BODY)

    assert response.status_code == 503
    assert "expected replica gone of session" in response.json()["error"]["message"]


async def test_a_full_replica_opens_no_further_session(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    few = settings.model_copy(update={"max_sessions": 1})
    async with open_services(few, tokenizer) as services:
        first = await opened(services)
        refused = await services.client.post("/sessions", json={"sample": SAMPLE})
        await services.client.delete(f"/sessions/{first.session_id}")

        assert refused.status_code == 429 and "max_sessions" in refused.json()["error"]["message"]
        await opened(services)


async def test_the_last_ended_sessions_are_kept(settings: AgentSettings, tokenizer: PreTrainedTokenizerFast) -> None:
    few = settings.model_copy(update={"max_sessions": 2})
    async with open_services(few, tokenizer) as services:
        begun: list[SessionAccess] = []
        for _ in range(3):
            begun.append(await opened(services))
            await services.client.post(f"/sessions/{begun[-1].session_id}/end")

        found = [await services.client.get(f"/sessions/{access.session_id}/trajectory") for access in begun]

    assert [response.status_code for response in found] == [404, 200, 200]
    assert "made room" in found[0].json()["error"]["message"]


async def test_the_key_of_a_session_that_is_gone_is_told_so_and_reaches_nothing_else(
    guarded: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with open_services(guarded, tokenizer) as services:
        access, other = await guarded_session(services), await guarded_session(services)
        own, key = f"/sessions/{access.session_id}", bearer(access.api_key)
        assert (await services.client.delete(own, headers=bearer(TOKEN))).status_code == 200

        for path in (f"{own}/v1/chat/completions", "/v1/chat/completions"):
            response = await services.client.post(path, content=b"never read", headers=key)
            assert response.status_code == 404
            assert "it was deleted, made room, or is none; open another one" in response.json()["error"]["message"]
        for path in (
            own,
            f"{own}/end",
            f"{own}/reward",
            "/sessions",
            "/groups",
            f"/sessions/{other.session_id}/v1/models",
        ):
            assert (await services.client.post(path, json={}, headers=key)).status_code == 401
        assert (await services.client.get(f"{own}/trajectory", headers=key)).status_code == 401
        assert (await services.client.get(f"{own}/v1/models", headers=bearer(access.api_key[:-1]))).status_code == 401
