"""An inference server: its process, and the HTTP client with connections, deadlines, retries and error mapping.

    process = SideProcess([python, "-m", "server", "--port", "8123"], {"OMP_NUM_THREADS": "1"}, log, url)
    await process.start(healthy, deadline_s=600)   # ENGINE_FAILED when it exits, UNAVAILABLE on time-out
    process.check()                                # UNAVAILABLE with the end of its log once it has exited
    await process.stop()

    http = EngineHttp("http://127.0.0.1:8123", process.settle)
    reply = await http.post("/pause", params={"mode": "keep"}, idempotent=True)
    async for event in http.events("/generate", {...}): ...

The server runs under `process_guard.py`, which kills it and its children even when this process gets SIGKILL.

Transport errors become UNAVAILABLE (with the end of the server's log if it exited), 4xx INVALID_REQUEST with the
server's message, 429 OVERLOADED, 503 UNAVAILABLE, other 5xx ENGINE_FAILED.
"""

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from httpx_aiohttp import AiohttpTransport

from trackway.clients.http_client import text_lines
from trackway.system import log_tail, without_secrets
from trackway.wire.errors import ErrorCode, TrackwayError

_GUARD = Path(__file__).with_name("process_guard.py")
_POLL_S = 0.05
_HEALTH_S = 0.25
_GUARD_LINGER_S = 5.0
_LOG_END_BYTES = 2000
# Variables that point to our packages would break the server's interpreter.
_OURS = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"})


class SideProcess:
    """One server process. `env` is added to our environment without secrets, `folder` is removed after its end.

    The programs beside its interpreter are first on PATH, as in an activated environment: vLLM looks for `ninja` there.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, url: str, folder: Path | None = None
    ) -> None:
        self.command, self.log, self.url, self._folder = list(command), log, url, folder
        own = {name: value for name, value in without_secrets(os.environ).items() if name not in _OURS}
        beside = [str(Path(command[0]).absolute().parent)] if os.sep in command[0] else []
        self._env = {**own, "PATH": os.pathsep.join([*beside, own.get("PATH", os.defpath)]), **env}
        self._guard: subprocess.Popen[bytes] | None = None
        self._status: int | None = None

    @property
    def alive(self) -> bool:
        """Return whether the server is running."""
        return self._guard is not None and not self._ended(self._guard)

    def check(self) -> None:
        """Raises UNAVAILABLE with the end of the log when the server has exited."""
        if not self.alive:
            raise TrackwayError(ErrorCode.UNAVAILABLE, self._story("expected a running server, got its exit"))

    async def settle(self, within_s: float = 1.0) -> None:
        """Do `check` after a moment: a dying server closes its connections before its exit is visible."""
        end = time.monotonic() + within_s
        while self.alive and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
        self.check()

    async def start(self, healthy: Callable[[], Awaitable[bool]], deadline_s: float) -> None:
        """Start the server and wait until `healthy` returns true. An error of `healthy` counts as false.

        Raises:
            TrackwayError: ENGINE_FAILED when it exited, UNAVAILABLE on time-out, after which it is stopped.
        """
        self._spawn()
        try:
            async with asyncio.timeout(deadline_s):
                await self._until(healthy)
        except TimeoutError:
            story = self._story(f"expected a healthy server within {deadline_s:g} s, got none; raise engine_start_s")
            await self.stop(grace_s=1.0)
            raise TrackwayError(ErrorCode.UNAVAILABLE, story) from None
        except BaseException:
            await self.stop(grace_s=1.0)
            raise

    async def stop(self, grace_s: float = 10.0) -> None:
        """Stop the server and its children: TERM, then KILL after the grace period. Waits for exit. Idempotent."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        if guard.poll() is None:
            _write(guard, f"{grace_s}\n")
        deadline = time.monotonic() + grace_s + _GUARD_LINGER_S
        while guard.poll() is None:
            if time.monotonic() > deadline:
                guard.kill()
            await asyncio.sleep(_POLL_S)
        _close(guard)

    def _spawn(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log.write(b"$ " + shlex.join(self.command).replace("\n", "\\n").encode() + b"\n")
            log.flush()
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(self._folder or ""), *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        assert self._guard.stdout is not None
        os.set_blocking(self._guard.stdout.fileno(), False)

    async def _until(self, healthy: Callable[[], Awaitable[bool]]) -> None:
        while True:
            if not self.alive:
                message = "expected a healthy server, got its exit; see the cause in its log"
                raise TrackwayError(ErrorCode.ENGINE_FAILED, self._story(message))
            with contextlib.suppress(TrackwayError, httpx.HTTPError, OSError):
                if await healthy():
                    return
            await asyncio.sleep(_HEALTH_S)

    def _ended(self, guard: "subprocess.Popen[bytes]") -> bool:
        if self._status is None:
            assert guard.stdout is not None
            status = guard.stdout.read(16)  # None: open and empty
            if status is not None:
                self._status = int(status) if status else guard.wait()
        return self._status is not None

    def _story(self, what: str) -> str:
        status = "" if self._status is None else f" with status {self._status}"
        end = log_tail(self.log, lines=30, max_bytes=_LOG_END_BYTES)
        return f"{self.command[0]} at {self.url}: {what}{status}. The end of {self.log}:\n{end}"


def _write(guard: "subprocess.Popen[bytes]", line: str) -> None:
    assert guard.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it exited meanwhile
        guard.stdin.write(line.encode())
        guard.stdin.flush()


def _close(guard: "subprocess.Popen[bytes]") -> None:
    for pipe in (guard.stdin, guard.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


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
