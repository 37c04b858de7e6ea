"""Functions of this process as tools and as the scorer of one run.

A thread serves them on loopback with a token of the run's own: tools by MCP, the reward by the reward service's routes.
They are the apps of the two services, so calls have the same limits, conversions and errors there. Nothing is pickled.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from os import getpid
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr
from starlette.types import ASGIApp, Receive, Scope, Send

from trackway.reward.app import create_app as create_reward
from trackway.reward.functions import FunctionScorer
from trackway.reward.settings import RewardSettings
from trackway.serving.own_code import FunctionServer
from trackway.serving.tokens import AuthSettings, Token
from trackway.serving.user_code import located
from trackway.system.user_error import UserError
from trackway.tools import function_tool
from trackway.tools.app import create_app as create_tools
from trackway.tools.functions.tool import FunctionTool, is_function_tool
from trackway.tools.settings import ToolsSettings

Function = Callable[..., object]

_START_S = 30.0
_STOP_S = 10.0
_LOGS = ("trackway.tools", "trackway.reward")
_MAX_ERRORS = 5
"""Most different errors that are shown."""


class Functions:
    """Serves functions from a thread of this process until `close`, and describes that in `file`."""

    def __init__(self, tools: Sequence[Function], reward: Function | None, file: Path) -> None:
        self.file = file
        token = SecretStr(secrets.token_urlsafe(32))
        app = _app([_tool(function) for function in tools], _scorer(reward), token)
        listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, args=[listening], name="trackway-functions", daemon=True)
        self._once = _Once()
        for name in _LOGS:
            logging.getLogger(name).addFilter(self._once)
        self._thread.start()
        try:
            self._ready.result(_START_S)
        except TimeoutError:
            raise UserError(f"tools, reward: expected a server for these functions within {_START_S:g} s") from None
        FunctionServer(
            url=f"http://127.0.0.1:{listening.getsockname()[1]}",
            token=token,
            process=f"process {getpid()} on {socket.gethostname()}",
            has_tools=bool(tools),
            has_reward=reward is not None,
        ).write(file)

    def close(self) -> None:
        """Stop serving. Later calls fail with the name of this process."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        for name in _LOGS:
            logging.getLogger(name).removeFilter(self._once)
        self.file.unlink(missing_ok=True)

    def _serve(self, listening: socket.socket) -> None:
        try:
            asyncio.run(self._until_stopped(listening))
        except BaseException as error:  # the constructor raises it
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _until_stopped(self, listening: socket.socket) -> None:
        serving = asyncio.create_task(self._server.serve([listening]))
        while not self._server.started:
            if serving.done():
                raise UserError("tools, reward: expected a server for these functions, got one that ended at once")
            await asyncio.sleep(0.01)
        self._ready.set_result(None)
        await serving


def _tool(function: Function) -> FunctionTool:
    return FunctionTool(function if is_function_tool(function) else function_tool(function))


def _scorer(function: Function | None) -> list[FunctionScorer]:
    return [] if function is None else [FunctionScorer(function, getattr(function, "__name__", "reward"))]


def _app(tools: Sequence[FunctionTool], scorers: Sequence[FunctionScorer], token: SecretStr) -> FastAPI:
    """The two apps below `/tools` and `/reward`."""
    auth = AuthSettings(tokens={"run": Token(secret=token)})
    apps = {
        "/tools": create_tools(ToolsSettings(auth=auth), tools),
        "/reward": create_reward(RewardSettings(auth=auth), scorers),
    }

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for inner in apps.values():
                await stack.enter_async_context(inner.router.lifespan_context(inner))
            yield

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for path, inner in apps.items():
        app.mount(path, _Untraced(inner))
    return app


class _Untraced:
    """The app without the caller's trace: the span of the service that calls it has the content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [header for header in scope["headers"] if header[0] not in (b"traceparent", b"baggage")]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


class _Once(logging.Filter):
    """Shows each error of a function once, in one line, and not again for each trajectory."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether this error is new."""
        if isinstance(record.exc_info, tuple) and isinstance(record.exc_info[1], Exception):
            record.msg, record.args = f"{record.getMessage()}: {located(record.exc_info[1])}", ()
            record.exc_info = record.exc_text = None  # `trackway.system.logs` made the text
        text = record.getMessage()
        is_new = text not in self._seen and len(self._seen) < _MAX_ERRORS
        if is_new:
            self._seen.add(text)
        return is_new
