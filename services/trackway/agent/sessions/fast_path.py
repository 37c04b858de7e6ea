"""The calls of a session's model without FastAPI, whose routing and validation cost much of a short call.

Also notes which sessions have a request in progress.

Only ordinary calls of this replica's sessions are answered here. Others (a session elsewhere, another content type, no
body) are passed to FastAPI, whose routes are the documented ones. Answers and errors are the same.
"""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trackway.agent.sessions.session import RETRY_COUNT, Session
from trackway.agent.sessions.store import Sessions, replica_of, session_of
from trackway.clients.base import ServiceClient
from trackway.clients.http_client import authorization
from trackway.model_api.choices import while_connected
from trackway.serving.auth import RawHeaders, presented_key
from trackway.serving.limits import again
from trackway.serving.routes import ErrorFormatRoute, Handler, JsonRoute, body_problems
from trackway.tracing import inject
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import REPLICA

PASSED_ON = "x-trackway-passed-on"
"""Set on a call that was passed on, which is not passed on again."""

_KEPT = (
    *("accept", "content-type", "authorization", "x-api-key", "anthropic-version", "anthropic-beta", "user-agent"),
    RETRY_COUNT,
)
"""Headers of a call that are passed on, in addition to the agent's own session ids."""
_ANSWERED = ("allow", "content-type", "x-should-retry", "retry-after")
"""Headers of an answer that are passed on."""
_KEYS = ("authorization", "x-api-key")
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)


def session_of_request(path: str, headers: RawHeaders) -> str | None:
    """The session that a call is for: the one in its path, else the one of its key."""
    parts = path.split("/")
    if "sessions" in parts[:-1]:
        return parts[parts.index("sessions") + 1] or None
    key = presented_key(headers)
    return session_of(key) if key is not None else None


class PassingOn:
    """Passes calls on to the replica that their session lives in."""

    def __init__(self, sessions: Sessions, client: ServiceClient) -> None:
        self.sessions = sessions
        self.client = client

    async def __call__(self, request: Request) -> Response | None:
        """The answer of the session's replica, or None when that is this one.

        Raises:
            TrackwayError: `not_found` for a call without a session, or for one that is gone, before the body is read;
                `unavailable` when its replica does not answer.
        """
        session_id = session_of_request(request.scope["path"], request.scope["headers"])
        replica = None if session_id is None else replica_of(session_id)
        if replica is None:
            got = "neither" if session_id is None else repr(session_id[:80])
            message = f"expected a session's URL (/sessions/<id>/v1) or its key, got {got}; open one: POST /sessions"
            raise TrackwayError(ErrorCode.NOT_FOUND, message)
        if replica == self.sessions.replica or PASSED_ON in request.headers:
            self.sessions.find(session_id or "")
            return None
        address = await self.client.address_of(replica)
        if address is None:
            message = f"expected replica {replica} of session {session_id} to answer, it does not"
            raise TrackwayError(
                ErrorCode.UNAVAILABLE, f"{message}; if it has gone, its sessions have ended: open another"
            )
        own = {name: value for name, value in request.headers.items() if name in _KEPT or name.endswith("-id")}
        key = presented_key(request.headers.raw)
        if key is None or session_of(key) is None:  # a service's token is not shown to a replica; a session's key is
            own = {name: value for name, value in own.items() if name not in _KEYS} | authorization(address.token)
        own[PASSED_ON] = self.sessions.replica
        inject(own)
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        url = f"{address.url}{path}" + (f"?{request.url.query}" if request.url.query else "")
        passed = httpx.Request(
            request.method, url, content=await request.body(), headers=own, extensions={"timeout": _TIMEOUT.as_dict()}
        )
        try:
            answer = await while_connected(request, self.client.http.send(passed, stream=True))
        except httpx.TransportError as error:
            message = f"replica {replica} of session {session_id} did not answer ({type(error).__name__}: {error})"
            raise TrackwayError(ErrorCode.UNAVAILABLE, f"{message}; try again") from error
        if answer.headers.get(REPLICA) != replica:
            await answer.aclose()
            message = f"expected replica {replica} of session {session_id} at {address.url}, another one answered"
            raise TrackwayError(ErrorCode.UNAVAILABLE, f"{message}; try again")
        headers = {name: value for name, value in answer.headers.items() if name in _ANSWERED}
        return StreamingResponse(_body(answer), answer.status_code, headers)


async def _body(answer: httpx.Response) -> AsyncGenerator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()


class PassedOnRoute(JsonRoute):
    """A route of a session, which is served by the session's replica."""

    def get_route_handler(self) -> Handler:
        """The handler of the session's replica."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            passing_on: PassingOn = request.app.state.passing_on
            passed = await passing_on(request)
            return await handle(request) if passed is None else passed

        return answer


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
