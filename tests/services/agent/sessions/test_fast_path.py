"""Calls of a session's model that bypass FastAPI are answered as by its routes."""

from typing import Any

import pytest
from fastapi import APIRouter
from starlette.types import Receive, Scope, Send

from tests.services.agent.agent_services import AgentServices
from tests.services.agent.sessions.test_session import ANSWER, QUESTION, opened

pytestmark = pytest.mark.anyio

JSON, OTHER_JSON = "application/json", "application/json; charset=utf-8"
"""The second one is left to FastAPI."""

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "any", "messages": QUESTION},
    "completions": {"model": "any", "prompt": "What is 9 + 9?"},
    "responses": {"model": "any", "input": "What is 9 + 9?"},
    "messages": {"model": "any", "messages": QUESTION, "max_tokens": 64},
}
WRONG: dict[str, dict[str, Any]] = {path: {**body, "stream": "perhaps"} for path, body in BODIES.items()}


async def answered(services: AgentServices, url: str, kind: str, body: object) -> tuple[int, dict[str, Any]]:
    response = await services.client.post(url, json=body, headers={"content-type": kind})
    return response.status_code, response.json()


@pytest.mark.parametrize("path", BODIES)
async def test_a_call_is_answered_without_fastapi(
    services: AgentServices, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"/sessions/{(await opened(services, ANSWER)).session_id}/v1/{path}"
    routed: list[str] = []
    route = APIRouter.__call__

    async def noted(self: APIRouter, scope: Scope, receive: Receive, send: Send) -> None:
        routed.append(scope["path"])
        await route(self, scope, receive, send)

    monkeypatch.setattr(APIRouter, "__call__", noted)
    status, answer = await answered(services, url, JSON, BODIES[path])
    assert (status, url in routed, "18" in str(answer)) == (200, False, True)

    await answered(services, url, OTHER_JSON, BODIES[path])
    assert url in routed


@pytest.mark.parametrize("path", BODIES)
async def test_a_wrong_call_has_the_errors_of_fastapis_route(services: AgentServices, path: str) -> None:
    url = f"/sessions/{(await opened(services, ANSWER)).session_id}/v1/{path}"

    fast = await answered(services, url, JSON, WRONG[path])

    assert fast == await answered(services, url, OTHER_JSON, WRONG[path])
    assert fast[0] == 400 and "stream" in str(fast[1])


async def test_a_call_after_the_end_has_the_error_of_fastapis_route(services: AgentServices) -> None:
    url = f"/sessions/{(await opened(services, ANSWER)).session_id}"
    await services.client.post(f"{url}/reward", json={"score": 1.0})
    await services.client.post(f"{url}/end")
    call = f"{url}/v1/chat/completions", BODIES["chat/completions"]

    fast = await answered(services, call[0], JSON, call[1])

    assert fast == await answered(services, call[0], OTHER_JSON, call[1])
    assert fast[0] == 400 and "the session has ended" in str(fast[1])


async def test_calls_count_under_the_documented_path(services: AgentServices) -> None:
    access = await opened(services, ANSWER, ANSWER)
    for kind in (JSON, OTHER_JSON):
        await answered(services, f"/sessions/{access.session_id}/v1/chat/completions", kind, BODIES["chat/completions"])

    metrics = (await services.client.get("/metrics")).text

    route = 'route="/sessions/{session_id}/v1/chat/completions"'
    assert f'trackway_requests_total{{method="POST",{route},status="200"}} 2.0' in metrics
