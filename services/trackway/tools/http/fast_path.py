"""The two execute routes without FastAPI, whose overhead is several times the work of a small tool.

Only ordinary requests are answered here. Others (another route, another content type, no body) are passed to FastAPI,
whose routes are the documented ones. Errors are the same.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.serving.error_responses import body_problems, misfit
from trackway.serving.request_limits import again
from trackway.tools.core.server import ToolServer
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ExecuteRequest, OneShotRequest

M = TypeVar("M", bound=BaseModel)

_JSON = (b"content-type", b"application/json")


class FastPathRoute(Generic[M]):
    """A POST route with one name in its path and a model as its body."""

    def __init__(self, path: str, body: type[M], answer: Callable[[str, M], Awaitable[BaseModel]]) -> None:
        self.path = path
        """The documented path, as shown in request metrics."""
        self._pattern = re.compile(re.sub(r"\{\w+\}", "([A-Za-z0-9._-]{1,128})", path))
        self._body = body
        self._answer = answer

    def name_in(self, path: str) -> str | None:
        """The name in a path of this route, or None."""
        match = self._pattern.fullmatch(path)
        return match[1] if match else None

    def parsed(self, message: Message) -> M | None:
        """The body, or None when it is not for this route. Raises INVALID_REQUEST, as FastAPI's route would."""
        body = message.get("body", b"")
        if message["type"] != "http.request" or message.get("more_body", False) or not body:
            return None
        try:
            return self._body.model_validate_json(body)
        except ValidationError as error:
            problems = RequestValidationError(body_problems(error))
            raise TrackwayError(ErrorCode.INVALID_REQUEST, misfit(problems)) from None

    async def answer(self, name: str, request: M, send: Send) -> None:
        """Run the call and send the result as JSON."""
        body = (await self._answer(name, request)).model_dump_json().encode()
        headers = [(b"content-length", b"%d" % len(body)), _JSON]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class FastPathMiddleware:
    """ASGI middleware. Must be the innermost, so that all others apply to its routes too."""

    def __init__(self, app: ASGIApp, routes: Sequence[FastPathRoute]) -> None:
        self.app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or _JSON not in scope["headers"]:
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        for route in self._routes:
            if (name := route.name_in(path)) is not None:
                message = await receive()
                if (request := route.parsed(message)) is not None:
                    scope["route"] = route
                    await route.answer(name, request, send)
                    return
                receive = again(message, receive)
                break
        await self.app(scope, receive, send)


def add_fast_path(app: FastAPI, server: ToolServer) -> None:
    """Add the fast path to the app, before it serves."""
    routes = [
        FastPathRoute("/instances/{instance_id}/execute", ExecuteRequest, server.execute),
        FastPathRoute("/tools/{name}/execute", OneShotRequest, server.one_shot),
    ]
    app.user_middleware.append(Middleware(FastPathMiddleware, routes=routes))
