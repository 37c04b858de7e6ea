"""The arguments of a Python call: keys as overrides of a command line, rows as a file, functions as services.

A thread serves functions on loopback with a token of the run's own: tools by MCP, the reward by the reward service's
routes. They are the apps of the two services, so calls have the same limits, conversions and errors there. Nothing is
pickled.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import re
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from os import getpid
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import uvicorn
from fastapi import FastAPI
from pydantic import JsonValue, SecretStr
from starlette.types import ASGIApp, Receive, Scope, Send

from trackway.reward.app import create_app as create_reward
from trackway.reward.functions import FunctionScorer
from trackway.reward.settings import RewardSettings
from trackway.run_config.compose import Tree, leaves
from trackway.serving.auth import AuthSettings, Token
from trackway.serving.user_code import FunctionServer, located
from trackway.system import atomic_write
from trackway.system.process import UserError
from trackway.tools import function_tool
from trackway.tools.app import create_app as create_tools
from trackway.tools.functions import FunctionTool, is_function_tool
from trackway.tools.settings import ToolsSettings
from trackway.wire.errors import ErrorCode, TrackwayError

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
            record.exc_info = record.exc_text = None  # `trackway.system.process` made the text
        text = record.getMessage()
        is_new = text not in self._seen and len(self._seen) < _MAX_ERRORS
        if is_new:
            self._seen.add(text)
        return is_new


ROWS = "rows"
"""Subfolder of the outputs folder for the rows of Python calls."""
_DATA_SOURCE = "python"
_COLUMNS = ("data_source", "prompt", "ability", "reward_model", "agent_name", "extra_info")


@runtime_checkable
class Frame(Protocol):
    """A pandas DataFrame."""

    def to_dict(self, orient: str) -> list[dict[str, Any]]: ...


@runtime_checkable
class HubDataset(Protocol):
    """A `datasets.Dataset` of Hugging Face."""

    def to_list(self) -> list[dict[str, Any]]: ...


RowsGiven = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]] | Frame | HubDataset
"""Files of rows, or the rows: dicts, a DataFrame or a Hugging Face dataset."""


def overrides(keys: Mapping[str, object]) -> list[str]:
    """The keys as overrides of a command line. Sections are nested dicts, `trainer={"save_freq": 5}`."""
    return [f"{key}={_in_hydra(value)}" for key, value in leaves(cast(Tree, dict(keys))).items()]


def _in_hydra(value: object) -> str:
    """The value in Hydra's grammar, whose quoted text escapes nothing but quotes and the backslashes before them."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(_in_hydra, value))}]"
    text = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), str(value))
    return f"'{text}'"


def row_files(rows: RowsGiven, outputs: Path) -> list[str]:
    """Files of the rows. Rows that are not files are written to one in the outputs folder, named by its content.

    Raises TrackwayError(INVALID_REQUEST) for a row without prompt, and StorageError.
    """
    if isinstance(rows, str | Path):
        return [str(rows)]
    items = _listed(rows)
    if items and all(isinstance(item, str | Path) for item in items):
        return [str(item) for item in items]
    lines = [json.dumps(_row(number, item), ensure_ascii=False, default=_plain) for number, item in enumerate(items)]
    if not lines:
        raise _invalid("rows: expected at least one row, got none")
    text = "\n".join(lines) + "\n"
    file = outputs.resolve() / ROWS / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, text, what="rows")
    return [str(file)]


def _listed(rows: object) -> list[Any]:
    if isinstance(rows, Frame) and not isinstance(rows, Mapping):
        return rows.to_dict("records")
    if isinstance(rows, HubDataset):
        return rows.to_list()
    return list(cast(Iterable[Any], rows))


def _row(number: int, given: object) -> dict[str, JsonValue]:
    """The row in verl's schema. `prompt` may be text, and `answer` stands for `reward_model.ground_truth`."""
    if not isinstance(given, Mapping):
        raise _invalid(f"rows[{number}]: expected a dict with 'prompt' and 'answer', got {type(given).__name__}")
    row: dict[str, JsonValue] = {str(key): value for key, value in given.items()}
    answer = row.pop("answer", None)
    unknown = [key for key in row if key not in _COLUMNS]
    if "prompt" not in row or unknown:
        got = f"the column {unknown[0]!r}" if unknown else f"the columns {', '.join(row) or 'none'}"
        raise _invalid(
            f"rows[{number}]: expected 'prompt', 'answer' and columns out of {', '.join(_COLUMNS)}, got {got}; put "
            "other values into 'extra_info'"
        )
    if isinstance(row["prompt"], str):
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    row.setdefault("data_source", _DATA_SOURCE)
    row.setdefault("reward_model", {"ground_truth": "" if answer is None else str(answer)})
    extra = row.get("extra_info") or {}
    row["extra_info"] = {"index": number, **extra} if isinstance(extra, dict) else extra
    return row


def _plain(value: object) -> JsonValue:
    """A NumPy value as Python's."""
    if hasattr(value, "tolist"):
        return cast(JsonValue, value.tolist())  # pyright: ignore[reportAttributeAccessIssue]
    raise TypeError(f"expected values of JSON, got {type(value).__name__}")


def _invalid(message: str) -> TrackwayError:
    return TrackwayError(ErrorCode.INVALID_REQUEST, message)
