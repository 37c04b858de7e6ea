"""Services over ASGI that can be taken down, replaced, or disturbed on the way."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from fastapi import FastAPI

from tests.services.agent.scripted_model import ScriptedModel
from tests.services.agent.streaming_transport import StreamingTransport
from trackway.wire.rollout import GenerateRequest

Answer = Callable[[], Awaitable[httpx.Response]]
Fault = Callable[[Answer], Awaitable[httpx.Response]]
"""What happens to one request on its way; it may let the service answer."""


class Replaceable(httpx.AsyncBaseTransport):
    """A service that can be taken down, replaced by a fresh process, or disturbed while the agent runs."""

    def __init__(self, app: FastAPI) -> None:
        self.app: FastAPI | None = app
        self.requests: list[httpx.Request] = []
        self.faults: list[Fault] = []
        """One for each of the next requests."""
        self.transport: type[httpx.ASGITransport | StreamingTransport] = httpx.ASGITransport
        """The ordinary one gives an answer once it is complete."""

    @property
    def paths(self) -> list[str]:
        """Method and last part of the path of every request that came through."""
        return [f"{request.method} {request.url.path.split('/')[-1]}" for request in self.requests]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.app is None:
            raise httpx.ConnectError("connection refused")
        self.requests.append(request)
        service = self.transport(app=self.app)

        async def answer() -> httpx.Response:
            return await service.handle_async_request(request)

        return await (self.faults.pop(0)(answer) if self.faults else answer())


def answers(status: int, **content: Any) -> Fault:
    """Something between us and the service answers in its place."""

    async def fault(answer: Answer) -> httpx.Response:
        return httpx.Response(status, **content)

    return fault


def breaks(error: Exception) -> Fault:
    """The request does not get through."""

    async def fault(answer: Answer) -> httpx.Response:
        raise error

    return fault


def loses_the_answer(error: Exception) -> Fault:
    """The service answers, and the connection breaks before that arrives."""

    async def fault(answer: Answer) -> httpx.Response:
        await (await answer()).aread()
        raise error

    return fault


class ModelLine(Replaceable):
    """The rollout service; the model keeps what it is asked."""

    def __init__(self, app: FastAPI, model: ScriptedModel) -> None:
        super().__init__(app)
        self._model = model

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            asked = GenerateRequest.model_validate_json(await request.aread())
            self._model.requests.append((request.headers["x-session-id"], asked))
        return await super().handle_async_request(request)
