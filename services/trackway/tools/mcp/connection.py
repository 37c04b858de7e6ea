"""An MCP session with a server, held by one task (the SDK's client must be entered and left in the same task).

A call ends with its response or with the connection, whichever is first, so a lost server is an error and not a hang.
Results are converted between MCP and ours: `trackway/...` keys in `_meta` carry what MCP has no field for.

MCP clients share the format of the servers file: `{"mcpServers": {"<name>": {"url": ..} | {"command": ..}}}`.
`${NAME}` and `${NAME:-default}` in any value are replaced from the environment, so that the file needs no tokens.
"""

import asyncio
import contextvars
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from typing import Literal, Self, cast

import anyio
import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import (
    CONNECTION_CLOSED,
    UNSUPPORTED_PROTOCOL_VERSION,
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    RequestParamsMeta,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)
from pydantic import BaseModel, ConfigDict, Field, JsonValue, SecretStr, ValidationError, model_validator
from pydantic_core import to_json

from trackway.tools.base import ToolInputError
from trackway.tools.settings import UserEntry, filled, problems_of
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import SESSION_ID, header_text
from trackway.wire.tools import ToolResult


class _Meta(BaseModel):
    model_config = ConfigDict(extra="ignore", populate_by_name=True, alias_generator=lambda name: f"trackway/{name}")

    def to_wire(self) -> dict[str, JsonValue]:
        """The keys that are set."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


class RequestMeta(_Meta):
    """`_meta` of a call."""

    create_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """For the tool's state, created at the session's first call of the tool."""
    execute_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    want_reward: bool = False
    """True to return the instance's reward so far."""


class ResultMeta(_Meta):
    """`_meta` of a result."""

    reward: float = 0.0
    metrics: dict[str, float] = Field(default_factory=dict)
    instance_id: str | None = None
    instance_reward: float | None = None
    error: ErrorCode | None = None
    """The code of a failed call."""


def to_mcp(result: ToolResult, meta: ResultMeta) -> CallToolResult:
    """Our result in MCP's format."""
    return CallToolResult(content=[TextContent(text=result.text)], _meta=meta.to_wire())


def to_mcp_error(error: TrackwayError) -> CallToolResult:
    """A failed call in MCP's format: the message is for the model, the code is in `_meta`."""
    return CallToolResult(
        content=[TextContent(text=error.message)],
        is_error=True,
        _meta=ResultMeta(error=error.code).to_wire(),
    )


def meta_of(result: CallToolResult) -> ResultMeta:
    """Our keys of `_meta`. Invalid ones of another server are ignored."""
    try:
        return ResultMeta.model_validate(result.meta or {})
    except ValidationError:
        return ResultMeta()


def from_mcp(tool: str, result: CallToolResult) -> ToolResult:
    """An MCP server's result in our format.

    An error result is the call's fault and becomes an observation: ToolInputError. An error of another Trackway server
    keeps its code.
    """
    meta = meta_of(result)
    text = "\n".join(_shown(part) for part in result.content)
    if not text and result.structured_content is not None:
        text = to_json(result.structured_content).decode()
    if result.is_error and meta.error is not None:
        raise TrackwayError(meta.error, text, tool=tool)
    if result.is_error:
        raise ToolInputError(text or f"{tool}: the call failed without a reason from the server", tool=tool)
    return ToolResult(text=text, reward=meta.reward, metrics=meta.metrics)


def _shown(part: object) -> str:
    match part:
        case TextContent():
            return part.text
        case ImageContent() | AudioContent():
            return f"[{part.type}: {part.mime_type}]"
        case ResourceLink():
            return f"[resource: {part.uri}]"
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return resource.text
        case EmbeddedResource():
            return f"[resource: {part.resource.uri}]"
        case _:
            return f"[{type(part).__name__}]"


_ENVIRONMENT = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


class McpServer(UserEntry):
    """A server: reached by `url` (streamable HTTP), or started by `command` (stdio)."""

    type: Literal["http", "streamable-http", "streamable_http", "streamableHttp", "stdio"] | None = None
    """Written by other clients. Must match `url` or `command`."""
    url: str | None = None
    """URL of a server over streamable HTTP."""
    auth_token: SecretStr | None = None
    """Sent as `Authorization: Bearer ...`; verl's key."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Sent with each request."""
    command: str | None = None
    """Program of a server over stdio."""
    args: list[str] = Field(default_factory=list)
    """Its arguments."""
    env: dict[str, SecretStr] = Field(default_factory=dict)
    """Added to PATH, HOME and the like: the process gets nothing else of this process's environment."""
    cwd: Path | None = None
    """Its working folder."""
    name_prefix: str = ""
    """Prefix of its tools' names, for servers whose tools have the same names."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.url is None) is (self.command is None):
            raise ValueError("expected either 'url' (streamable HTTP) or 'command' (stdio), got both or none")
        if self.type is not None and (self.type == "stdio") is not (self.command is not None):
            raise ValueError(f"expected type 'stdio' for 'command' and 'http' for 'url', got {self.type!r}")
        alien = ("auth_token", "headers") if self.command is not None else ("args", "env", "cwd")
        unexpected = [name for name in alien if name in self.model_fields_set]
        if unexpected:
            raise ValueError(
                f"expected no {', '.join(unexpected)} for a server with {'command' if self.command else 'url'}"
            )
        return self

    @property
    def sent_headers(self) -> dict[str, str]:
        """The headers of each request, in clear text."""
        token = {"Authorization": f"Bearer {self.auth_token.get_secret_value()}"} if self.auth_token else {}
        return {**{name: value.get_secret_value() for name, value in self.headers.items()}, **token}

    @property
    def place(self) -> str:
        """The address for messages, without the query, which may hold a key."""
        return self.url.split("?")[0] if self.url is not None else f"command {self.command}"


def read_servers(path: Path, folder: Path) -> dict[str, McpServer]:
    """The servers of a file, by name. A relative path counts from the working directory, as in verl, or from `folder`.

    ValueError names the file and the server.
    """
    file = path if path.exists() else folder / path
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"expected a JSON file, got {str(path)!r} (also not in {folder}): {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON, got: {error}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ValueError(f'{file}: expected {{"mcpServers": {{"<name>": {{"url": ...}}}}}}, got no servers')
    return {str(name): _server(f"{file}, server {name!r}", raw) for name, raw in servers.items()}


def _server(where: str, raw: object) -> McpServer:
    try:
        return McpServer.model_validate(filled(raw, _ENVIRONMENT))
    except ValidationError as error:
        raise ValueError(f"{where}: {problems_of(error)}") from None
    except LookupError as error:
        raise ValueError(f"{where}: {error.args[0]}") from None


logger = logging.getLogger("trackway.tools")

Meta = dict[str, JsonValue]

_MAX_PAGES = 100
_PASSING = {429, 503}
"""HTTP statuses which mean that the request was not run."""


class ConnectionLost(Exception):
    """The server is gone, or has forgotten the session. The message says which."""

    no_handshake = False
    """True if the server responds and supports only protocols without sessions."""


class McpConnection:
    """A connection: opened once, used by any task, closed once.

    server: the server's address.
    name: for messages.
    session: sent as `x-session-id`, so that a router in front of the server keeps the session on one replica.
    mode: "legacy" is the handshake, which opens a session; "auto" uses the newest protocol, which has no sessions.
    """

    def __init__(self, server: McpServer, name: str, session: str | None, mode: Literal["legacy", "auto"]) -> None:
        self._server = server
        self._name = f"MCP server {name!r} ({server.place})"
        self._session = session
        self._mode: Literal["legacy", "auto"] = mode
        self._closing = asyncio.Event()
        self._client: Client | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._status = 200
        self.keeps_session = server.command is not None
        """True if the server keeps a session for us: it is our own process, or it returned a session id."""

    @property
    def alive(self) -> bool:
        """Return whether calls can be made."""
        return self._client is not None and self._keeper is not None and not self._keeper.done()

    async def open(self, timeout_s: float) -> None:
        """Connect. ConnectionLost, with the reason, when the server refuses or does not respond in time."""
        opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        # The connection outlives the request that opens it, and must not inherit its trace or deadline.
        self._keeper = asyncio.create_task(self._keep(opened), context=contextvars.Context())
        try:
            async with asyncio.timeout(timeout_s):
                self._client = await asyncio.shield(opened)
        except TimeoutError:
            raise ConnectionLost(f"{self._name}: expected an answer within {timeout_s:g} s, got none") from None
        finally:
            if self._client is None:
                opened.cancel()
                self._closing.set()
                self._keeper.cancel()

    async def tools(self, timeout_s: float) -> list[Tool]:
        """All tools of the server, from all pages. ConnectionLost when they do not arrive in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return [tool async for tool in self._pages()]
        except (MCPError, TimeoutError) as error:
            raise ConnectionLost(f"{self._name}: expected its tools within {timeout_s:g} s, got {error!r}") from error

    async def _pages(self) -> AsyncIterator[Tool]:
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await self._connected.list_tools(cursor=cursor)
            for tool in page.tools:
                yield tool
            cursor = page.next_cursor
            if cursor is None:
                return

    async def call(self, tool: str, arguments: dict[str, JsonValue], meta: Meta) -> CallToolResult:
        """Run a call. ConnectionLost, UNAVAILABLE, or MCPError when the server rejects the request."""
        assert self._keeper is not None
        request_meta = cast(RequestParamsMeta, meta) if meta else None
        call = asyncio.create_task(self._connected.call_tool(tool, arguments, meta=request_meta))
        call.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait({call, self._keeper}, return_when=asyncio.FIRST_COMPLETED)
            if call.done() and not call.cancelled():
                return call.result()
        except MCPError as error:
            message = f"{self._name}: {error.message}{self._said}"
            if self._status in _PASSING:
                raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error
            if error.code == CONNECTION_CLOSED or not self.alive or self._status == HTTPStatus.NOT_FOUND:
                raise ConnectionLost(message) from error
            raise
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise ConnectionLost(f"{self._name}: the connection is closed") from error
        finally:
            call.cancel()
        raise ConnectionLost(f"{self._name}: the connection ended during a call")

    async def close(self) -> None:
        """End the session and our server process, if any; bounded by the SDK, completes even when cancelled."""
        self._closing.set()
        if self._keeper is not None:
            await asyncio.shield(asyncio.wait({self._keeper}))

    @property
    def _connected(self) -> Client:
        assert self._client is not None
        return self._client

    @property
    def _said(self) -> str:
        return f" (HTTP {self._status})" if self._status >= 400 else ""

    async def _keep(self, opened: "asyncio.Future[Client]") -> None:
        try:
            async with AsyncExitStack() as stack:
                opened.set_result(await stack.enter_async_context(await self._entered(stack)))
                await self._closing.wait()
        except BaseException as error:
            cause = _first(error)
            if not opened.done():
                got = f"{type(cause).__name__}: {cause}{self._said}"
                lost = ConnectionLost(f"{self._name}: expected an answer, got {got}")
                lost.no_handshake = isinstance(cause, MCPError) and cause.code == UNSUPPORTED_PROTOCOL_VERSION
                opened.set_exception(lost)
            elif not self._closing.is_set():
                logger.warning("%s: the connection ended: %s: %s", self._name, type(cause).__name__, cause)
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _entered(self, stack: AsyncExitStack) -> Client:
        """The SDK's client for this server, not entered yet. Its resources are registered with the stack."""
        server = self._server
        if server.url is None:
            assert server.command is not None
            env = {name: value.get_secret_value() for name, value in server.env.items()}
            process = StdioServerParameters(command=server.command, args=server.args, env=env, cwd=server.cwd)
            return Client(stdio_client(process), mode=self._mode)
        affinity = {SESSION_ID: header_text(self._session)} if self._session is not None else {}
        http = httpx2.AsyncClient(
            headers={**affinity, **server.sent_headers},
            timeout=httpx2.Timeout(30.0, read=None),
            event_hooks={"response": [self._on_response]},
        )
        await stack.enter_async_context(http)
        return Client(streamable_http_client(server.url, http_client=http), mode=self._mode)

    async def _on_response(self, response: httpx2.Response) -> None:
        """Record the status and whether there is a session, which the SDK does not expose."""
        if response.request.method == "POST":
            self._status = response.status_code
            self.keeps_session |= "mcp-session-id" in response.headers


def _first(error: BaseException) -> BaseException:
    """The first leaf of nested exception groups, whose own messages are empty."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
