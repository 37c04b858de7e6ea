"""Calls that arrive at another replica than the one their session lives in are passed on to it."""

from collections.abc import AsyncGenerator

import httpx
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from trackway.agent.sessions.session import RETRY_COUNT
from trackway.agent.sessions.store import Sessions, replica_of, session_of
from trackway.clients.base import ServiceClient
from trackway.clients.token import authorization
from trackway.model_api.choices import while_connected
from trackway.serving.auth import RawHeaders, presented_key
from trackway.serving.routes import Handler, JsonRoute
from trackway.tracing import inject
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.headers import REPLICA

PASSED_ON = "x-trackway-passed-on"
"""Set on a call that was passed on, which is not passed on again."""

_KEPT = (
    *("accept", "content-type", "authorization", "x-api-key", "anthropic-version", "anthropic-beta", "user-agent"),
    RETRY_COUNT,
)
"""Headers of a call that are passed on, beside the agent's own session ids."""
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
