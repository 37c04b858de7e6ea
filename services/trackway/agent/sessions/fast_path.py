"""The calls of a session's model without FastAPI, whose routing and validation cost much of a short call.

Also notes which sessions have a request in progress.

Only ordinary calls of this replica's sessions are answered here. Others (a session elsewhere, another content type, no
body) are passed to FastAPI, whose routes are the documented ones. Answers and errors are the same.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.agent.sessions.passing_on import session_of_request
from trackway.agent.sessions.session import Session
from trackway.agent.sessions.store import Sessions
from trackway.serving.error_responses import body_problems
from trackway.serving.request_limits import again
from trackway.serving.routes import ErrorFormatRoute
from trackway.wire.errors import TrackwayError

B = TypeVar("B", bound=BaseModel)

_JSON = (b"content-type", b"application/json")


@dataclass(frozen=True)
class ModelCall(Generic[B]):
    """One of the model's routes."""

    read: Callable[[bytes, Session], B]
    """Validates the body. Raises ValidationError."""
    answer: Callable[[B, Session, Request], Awaitable[Response]]
    route: type[ErrorFormatRoute]
    """Answers its errors."""

    async def response(self, body: bytes, session: Session, request: Request) -> Response:
        """The response to a call with this body."""
        try:
            return await self.answer(self._parsed(body, session), session, request)
        except (TrackwayError, RequestValidationError) as error:
            return self.route.error_answer(error)

    def _parsed(self, body: bytes, session: Session) -> B:
        try:
            return self.read(body, session)
        except ValidationError as error:
            raise RequestValidationError(body_problems(error)) from None


@dataclass(frozen=True)
class _Route:
    path: str
    """The documented path, as shown in request metrics."""
    call: ModelCall[Any]


class SessionFastPath:
    """ASGI middleware. Must be the innermost, so that all others apply to its routes too."""

    def __init__(self, app: ASGIApp, sessions: Sessions, calls: Mapping[str, ModelCall[Any]]) -> None:
        self.app = app
        self._sessions = sessions
        self._pattern = re.compile(rf"(/sessions/[^/]+)?/v1/({'|'.join(calls)})")
        self._by_url = {name: _Route(f"/sessions/{{session_id}}/v1/{name}", call) for name, call in calls.items()}
        self._by_key = {name: _Route(f"/v1/{name}", call) for name, call in calls.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        session_id = session_of_request(path, scope["headers"])
        with self._sessions.opened.in_use(session_id):
            await self._answer(path, session_id, scope, receive, send)

    async def _answer(self, path: str, session_id: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and _JSON in scope["headers"]:
            match = self._pattern.fullmatch(path)
            if match and session_id is not None and session_id in self._sessions:
                message = await receive()
                if body := _whole_body(message):
                    scope["route"] = route = (self._by_url if match[1] else self._by_key)[match[2]]
                    session = self._sessions.find(session_id)
                    session.note_headers(scope["headers"])
                    response = await route.call.response(body, session, Request(scope, receive))
                    await response(scope, receive, send)
                    return
                receive = again(message, receive)
        await self.app(scope, receive, send)


def _whole_body(message: Message) -> bytes:
    """The body of the request. Empty when the message has a part of it."""
    is_whole = message["type"] == "http.request" and not message.get("more_body", False)
    return message.get("body", b"") if is_whole else b""


def add_fast_path(app: FastAPI, sessions: Sessions, calls: Mapping[str, ModelCall[Any]]) -> None:
    """Add the fast path to the app, before it serves."""
    app.user_middleware.append(Middleware(SessionFastPath, sessions=sessions, calls=calls))
