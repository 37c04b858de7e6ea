"""An OpenEnv server for tests, after openenv 0.10's `core/env_server/http_server.py` and its echo environment.

The message of an action says what the server does: `end` ends the episode, `fail` raises, `gone` closes the connection,
`long` answers 100,000 bytes, `hang` never answers (it waits for the client to leave).
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer
from pydantic import JsonValue

ACTION: dict[str, JsonValue] = {
    "additionalProperties": False,
    "description": "Action for the Echo environment - just a message to echo.",
    "properties": {
        "metadata": {"additionalProperties": True, "type": "object"},
        "message": {"description": "Message to echo back", "title": "Message", "type": "string"},
    },
    "required": ["message"],
    "title": "EchoAction",
    "type": "object",
}
MCP_ACTION: dict[str, JsonValue] = {
    "properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {"type": "object"}},
    "type": "object",
}
MCP_TOOL: dict[str, JsonValue] = {
    "name": "echo_message",
    "description": "Echo.",
    "inputSchema": {"type": "object", "properties": {"message": {"type": "string"}}},
}


@dataclass
class EchoServer:
    """What the server was asked."""

    url: str = ""
    action: dict[str, JsonValue] = field(default_factory=lambda: ACTION)
    most_open: int = 64
    open: int = 0
    highest: int = 0
    resets: list[dict[str, JsonValue]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    """How each connection ended: with a `close` message, or without."""

    async def schema(self, request: web.Request) -> web.Response:
        """What an agent may do."""
        return web.json_response({"action": self.action, "observation": {}, "state": {}})

    async def connect(self, request: web.Request) -> web.WebSocketResponse:
        """One episode."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.open >= self.most_open:
            await socket.send_json(_failure("CAPACITY_REACHED", "Server at capacity"))
            await socket.close()
            return socket
        self.open += 1
        self.highest = max(self.highest, self.open)
        try:
            self.closed.append(await self._serve(socket))
        finally:
            self.open -= 1
        return socket

    async def _serve(self, socket: web.WebSocketResponse) -> str:
        steps = 0
        async for received in socket:
            assert received.type is WSMsgType.TEXT
            message = json.loads(received.data)
            if message["type"] == "close":
                return "close"
            if message["type"] == "reset":
                if message["data"].get("seed") == -1:
                    await socket.send_json(_failure("VALIDATION_ERROR", "seed"))
                    continue
                self.resets.append(message["data"])
                observation = {"echoed_message": "Ready!", "message_length": 0, "metadata": {}}
                await socket.send_json(_observation(observation, 0.0))
            elif message["type"] == "state":
                await socket.send_json({"type": "state", "data": {"episode_id": "e", "step_count": steps}})
            elif message["type"] == "mcp":
                reply = {"jsonrpc": "2.0", "id": message["data"]["id"], "result": {"tools": [MCP_TOOL]}}
                await socket.send_json({"type": "mcp", "data": reply})
            else:
                steps += 1
                if not await self._step(socket, message["data"]):
                    return "gone"
        return "dropped"

    async def _step(self, socket: web.WebSocketResponse, action: dict[str, JsonValue]) -> bool:
        calls_tool = action.get("type") == "call_tool"
        arguments = action["arguments"] if calls_tool else action
        assert isinstance(arguments, dict)
        text = arguments.get("message")
        match text:
            case "gone":
                await socket.close()
                return False
            case "hang":
                await socket.receive()
                return False
            case "fail":
                await socket.send_json(_failure("EXECUTION_ERROR", "it broke"))
            case None:
                await socket.send_json(_failure("VALIDATION_ERROR", "Invalid message"))
            case str():
                shown = "x" * 100_000 if text == "long" else text
                echoed = {"echoed_message": shown, "message_length": len(text), "metadata": {}}
                called = {"tool_name": "echo_message", "result": {"content": [{"type": "text", "text": shown}]}}
                reward = min(len(text) * 0.125, 1.0)
                await socket.send_json(_observation(called if calls_tool else echoed, reward, text == "end"))
        return True


def _observation(observation: object, reward: float, done: bool = False) -> dict[str, object]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def _failure(code: str, message: str) -> dict[str, object]:
    return {"type": "error", "data": {"code": code, "message": message}}


@asynccontextmanager
async def echo_server(**settings: object) -> AsyncIterator[EchoServer]:
    """The server at a port."""
    echo = EchoServer(**settings)  # pyright: ignore[reportArgumentType]
    app = web.Application()
    app.add_routes([web.get("/schema", echo.schema), web.get("/ws", echo.connect)])
    async with TestServer(app) as server:
        echo.url = str(server.make_url("")).rstrip("/")
        yield echo
