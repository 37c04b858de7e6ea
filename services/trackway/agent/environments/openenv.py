"""An environment that speaks OpenEnv's protocol (github.com/huggingface/OpenEnv): reset, step and state over `/ws`.

An environment with one kind of action is one tool, whose arguments are the action. One whose actions are MCP calls has
MCP's tools. The connection is the episode: the server closes its environment when this process goes away.
"""

import asyncio
import contextlib
import json
import re

import aiohttp
from pydantic import JsonValue, TypeAdapter

from trackway.agent.environments.base import Environment, Step
from trackway.agent.observations import CallFailed
from trackway.wire.agent import EnvFailure, EnvMessage, EnvObservation, EnvSchema, EnvTool
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError

_HEARTBEAT_S = 20.0
"""Seconds between pings, so that a connection whose other side is gone ends."""
_CLOSE_S = 2.0
_TOOLS = TypeAdapter(list[EnvTool])
_OF_THE_CALL = {"VALIDATION_ERROR": ErrorCode.INVALID_REQUEST, "EXECUTION_ERROR": ErrorCode.TOOL_FAILED}
"""Errors after which the episode goes on. The others end it."""


class _Refused(Exception):
    def __init__(self, failure: EnvFailure) -> None:
        super().__init__(f"{failure.code}: {failure.message}")
        self.failure = failure


class OpenEnv(Environment):
    """An episode of an OpenEnv environment."""

    _socket: aiohttp.ClientWebSocketResponse | None = None
    _calls_mcp = False

    async def begin(self) -> str:
        """Connect and `reset` with the row's `env_kwargs`. INVALID_REQUEST when the environment refuses these."""
        url = self.settings.url.rstrip("/")
        async with self.http.get(f"{url}/schema", raise_for_status=True) as answer:
            action = EnvSchema.model_validate_json(await self.body(answer)).action
        self._socket = await self.http.ws_connect(
            f"{url}/ws".replace("http", "ws", 1),
            heartbeat=_HEARTBEAT_S,
            max_msg_size=self.settings.max_reply_bytes,
            timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),  # pyright: ignore[reportCallIssue]  a class of attrs
        )
        try:
            reply = await self._ask("reset", {"episode_id": self.episode_id, **self.sample.env_kwargs})
        except _Refused as refused:
            if refused.failure.code in _OF_THE_CALL:
                message = f"{self.place}: expected it to reset with the row's env_kwargs, got {refused}"
                raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from refused
            raise self.failed("it to reset", str(refused)) from refused
        self._calls_mcp = {"tool_name", "arguments"} <= _properties(action).keys()
        self.tools = await self._mcp_tools() if self._calls_mcp else [_action_tool(self.name, action)]
        return self._text(EnvObservation.model_validate(reply).observation)

    async def step(self, tool: str, arguments: dict[str, JsonValue]) -> Step:
        """One action. CallFailed when the environment refuses it, or fails at it."""
        action = {"type": "call_tool", "tool_name": tool, "arguments": arguments} if self._calls_mcp else arguments
        try:
            reply = EnvObservation.model_validate(await self._ask("step", action))
        except _Refused as refused:
            code = _OF_THE_CALL.get(refused.failure.code)
            if code is None:
                raise self.failed("it to step", str(refused)) from refused
            raise CallFailed(TrackwayError(code, str(refused))) from refused
        seen = reply.observation
        return Step(_mcp_text(seen) if self._calls_mcp else self._text(seen), reply.reward or 0.0, reply.done)

    async def state(self) -> dict[str, JsonValue]:
        """The environment's state."""
        try:
            return await self._ask("state")
        except _Refused as refused:
            raise self.failed("its state", str(refused)) from refused

    async def close(self) -> None:
        """Tell the environment, and disconnect."""
        try:
            if self._socket is not None:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with asyncio.timeout(_CLOSE_S):
                        await self._socket.send_json({"type": "close"})
                        await self._socket.close()
                self._socket = None
        finally:
            await super().close()

    async def _mcp_tools(self) -> list[ToolSchema]:
        try:
            reply = await self._ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        except _Refused as refused:
            raise self.failed("its tools", str(refused)) from refused
        result = reply.get("result")
        tools = _TOOLS.validate_python(result.get("tools") if isinstance(result, dict) else None)
        return [
            ToolSchema(
                function=FunctionSchema(
                    name=tool.name, description=tool.description or "", parameters=tool.input_schema
                )
            )
            for tool in tools
        ]

    async def _ask(self, kind: str, data: dict[str, JsonValue] | None = None) -> dict[str, JsonValue]:
        """The data of the answer. _Refused for an error, UNAVAILABLE when the connection ends."""
        if self._socket is None:
            raise self.failed(f"an answer to {kind}", "no connection")
        message: dict[str, JsonValue] = {"type": kind} if data is None else {"type": kind, "data": data}
        with contextlib.suppress(ConnectionError):  # a server that is full says so, and closes before it has read
            await self._socket.send_str(json.dumps(message))
        received = await self._socket.receive()
        if received.type is not aiohttp.WSMsgType.TEXT:
            ended = self._socket.exception() or f"the end of the connection (code {self._socket.close_code})"
            raise self.failed(f"an answer to {kind} of at most {self.settings.max_reply_bytes} bytes", str(ended))
        reply = EnvMessage.model_validate_json(received.data)
        if reply.type == "error":
            raise _Refused(EnvFailure.model_validate(reply.data))
        return reply.data

    def _text(self, observation: dict[str, JsonValue]) -> str:
        """Text for the model: the configured field, the only text, or all fields as JSON."""
        field = self.settings.observation_field
        shown: dict[str, JsonValue] = {
            name: value for name, value in observation.items() if name != "metadata" and value is not None
        }
        if field is not None:
            return _plain(shown.get(field, ""))
        return _plain(next(iter(shown.values())) if len(shown) == 1 else shown) if shown else ""


def _action_tool(name: str, action: dict[str, JsonValue]) -> ToolSchema:
    properties: JsonValue = {key: value for key, value in _properties(action).items() if key != "metadata"}
    parameters = {key: value for key, value in action.items() if key not in {"title", "description"}}
    function = FunctionSchema(
        name=re.sub("[^A-Za-z0-9_-]", "_", name),
        description=str(action.get("description", "")),
        parameters={**parameters, "properties": properties},
    )
    return ToolSchema(function=function)


def _properties(action: dict[str, JsonValue]) -> dict[str, JsonValue]:
    properties = action.get("properties")
    return properties if isinstance(properties, dict) else {}


def _mcp_text(observation: dict[str, JsonValue]) -> str:
    """The result of an MCP call, or its error."""
    error, result = observation.get("error"), observation.get("result")
    if isinstance(error, dict):
        return f"Error: {error.get('message', error)}"
    if not isinstance(result, dict):
        return _plain(result)
    if result.get("data") is not None:
        return _plain(result["data"])
    content = result.get("content")
    parts = (
        [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        if isinstance(content, list)
        else []
    )
    return "\n".join(map(_plain, parts)) or _plain(result)


def _plain(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
