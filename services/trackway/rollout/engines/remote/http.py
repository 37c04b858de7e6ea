"""HTTP client of an inference server: connections, deadlines, retries and error mapping.

    http = EngineHttp("http://127.0.0.1:8123", process.settle)
    reply = await http.post("/pause", params={"mode": "keep"}, idempotent=True)
    async for event in http.events("/generate", {...}): ...

Transport errors become UNAVAILABLE (with the end of the server's log if it exited), 4xx INVALID_REQUEST with the
server's message, 429 OVERLOADED, 503 UNAVAILABLE, other 5xx ENGINE_FAILED.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
from httpx_aiohttp import AiohttpTransport

from trackway.clients.http_client import text_lines
from trackway.wire.errors import ErrorCode, TrackwayError

Json = dict[str, Any]
Params = Mapping[str, str | Sequence[str]]

_CONNECT_S = 5.0
_KEEP_ALIVE_S = 2.0  # uvicorn closes idle connections after 5: never send on one that it is closing
_CODES = {429: ErrorCode.OVERLOADED, 503: ErrorCode.UNAVAILABLE}


class EngineHttp:
    """Calls one server. `died` is called after a broken connection and raises if the server has exited."""

    def __init__(self, base_url: str, died: Callable[[], Awaitable[None]] | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._died = died
        self._http = _client()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def get(self, path: str, *, params: Params | None = None, timeout_s: float = 30.0) -> Json:
        """GET; retried once on a new connection when the connection breaks."""
        return await self._call("GET", path, None, params, timeout_s, idempotent=True)

    async def post(
        self,
        path: str,
        json: Json | None = None,
        *,
        params: Params | None = None,
        timeout_s: float | None = 60.0,
        idempotent: bool = False,
    ) -> Json:
        """POST. An `idempotent` one is retried once on a new connection when the connection breaks.

        A response that is not a JSON object is returned as {"text": ...}.
        """
        return await self._call("POST", path, json, params, timeout_s, idempotent=idempotent)

    async def events(self, path: str, json: Json) -> AsyncGenerator[Json]:
        """The JSON events of a server-sent event stream; closing the iterator cancels the request."""
        async with aclosing(self.lines(path, json)) as lines:
            async for line in lines:
                if line.startswith("data:"):
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield self._parse(path, data)

    async def lines(self, path: str, json: Json) -> AsyncGenerator[str]:
        """The lines of a streamed response; closing the iterator cancels the request."""
        async with self._explained("POST", path, None), self._http.stream("POST", self._url(path), json=json) as reply:
            if reply.is_error:
                await reply.aread()
                raise self._refused(reply)
            async for line in text_lines(reply):
                yield line

    async def _call(
        self,
        method: str,
        path: str,
        body: Json | None,
        params: Params | None,
        timeout_s: float | None,
        idempotent: bool,
    ) -> Json:
        async with self._explained(method, path, timeout_s):
            try:
                reply = await self._http.request(method, self._url(path), json=body, params=params)
            except httpx.TransportError:
                if not idempotent:
                    raise
                async with _client() as fresh:
                    reply = await fresh.request(method, self._url(path), json=body, params=params)
        if reply.is_error:
            raise self._refused(reply)
        return _object(reply)

    @asynccontextmanager
    async def _explained(self, method: str, path: str, timeout_s: float | None) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            message = f"{method} {self._url(path)}: expected a response within {timeout_s:g} s, got none; is it hung?"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message) from None
        except httpx.TransportError as error:
            if self._died is not None:
                await self._died()
            message = f"{method} {self._url(path)}: the connection broke: {type(error).__name__}: {error}"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error

    def _url(self, path: str) -> str:
        return self.base_url + path

    def _refused(self, reply: httpx.Response) -> TrackwayError:
        code = ErrorCode.ENGINE_FAILED if reply.is_server_error else ErrorCode.INVALID_REQUEST
        where = f"{reply.request.method} {reply.request.url}"
        message = f"{where}: the server answered {reply.status_code}: {_message(reply)}"
        return TrackwayError(_CODES.get(reply.status_code, code), message, status=reply.status_code)

    def _parse(self, path: str, data: str) -> Json:
        try:
            return json.loads(data)
        except ValueError as error:
            message = f"{self._url(path)}: expected JSON events, got {data[:200]!r}; check the server's URL"
            raise TrackwayError(ErrorCode.ENGINE_FAILED, message) from error


def _client() -> httpx.AsyncClient:
    """No limit of its own: the engine limits requests, and control requests must not queue behind them."""
    transport = AiohttpTransport(limits=httpx.Limits(max_connections=0, keepalive_expiry=_KEEP_ALIVE_S))
    return httpx.AsyncClient(transport=transport, timeout=httpx.Timeout(None, connect=_CONNECT_S))


def _object(reply: httpx.Response) -> Json:
    try:
        body = reply.json()
    except ValueError:
        return {"text": reply.text}
    return body if isinstance(body, dict) else {"text": reply.text}


def _message(reply: httpx.Response) -> str:
    """vLLM and SGLang send {"error": {"message"}} or {"message"}, FastAPI sends {"detail"}."""
    body = _object(reply)
    error = body.get("error", body)
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return str(message or reply.text)[:2000]
