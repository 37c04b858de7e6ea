"""A resources server of NeMo-Gym for tests, after its `example_session_state_mgmt`: a counter for each session."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from openai.types.responses import Response
from pydantic import BaseModel

COOKIE = "StatefulCounterResourcesServer___counter"
FUNCTION = {"type": "function", "strict": True, "description": ""}
COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
ROW: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "add 1 then add 2 then get the count"}],
        "tools": [
            {**FUNCTION, "name": "increment_counter", "parameters": COUNT},
            {**FUNCTION, "name": "get_counter_value", "parameters": {"type": "object", "properties": {}}},
        ],
    },
    "expected_count": 6,
    "initial_count": 3,
}
"""The first row of its `data/example.jsonl`."""


class Verify(BaseModel):
    """NeMo-Gym's BaseVerifyRequest, whose response is OpenAI's, and this server's field."""

    responses_create_params: dict[str, Any]
    response: Response
    expected_count: int


@dataclass
class CounterServer:
    """The counters, and what was to be verified."""

    url: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    verified: list[Verify] = field(default_factory=list)
    verify_status: int = 200

    async def handle(self, request: web.Request) -> web.Response:
        """Answer a request of a session. Each answer sets the session's cookie again."""
        session = request.cookies.get(COOKIE, uuid.uuid4().hex)
        answer = self._answer(request.match_info["route"], session, await request.json())
        answer.set_cookie(COOKIE, session)
        return answer

    def _answer(self, route: str, session: str, body: dict[str, Any]) -> web.Response:
        match route:
            case "seed_session" if "initial_count" not in body:
                return web.json_response({"detail": "initial_count: field required"}, status=422)
            case "seed_session":
                self.counts[session] = body["initial_count"]
                return web.json_response({})
            case "increment_counter" if "count" not in body:
                return web.json_response({"detail": "count: field required"}, status=422)
            case "increment_counter":
                self.counts[session] += body["count"]
                return web.json_response({"success": True})
            case "get_counter_value":
                return web.json_response({"count": self.counts[session]})
            case "verify" if self.verify_status != 200:
                return web.json_response("repr(e)", status=self.verify_status)
            case "verify":
                self.verified.append(asked := Verify.model_validate(body))
                reward = float(asked.expected_count == self.counts[session])
                return web.json_response({**body, "reward": reward, "reward_components": {"count": reward}})
        return web.Response(status=404)


@asynccontextmanager
async def counter_server() -> AsyncIterator[CounterServer]:
    """The server at a port."""
    counter = CounterServer()
    app = web.Application()
    app.add_routes([web.post("/{route}", counter.handle)])
    async with TestServer(app) as server:
        counter.url = str(server.make_url("")).rstrip("/")
        yield counter
