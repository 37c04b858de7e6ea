"""Somebody else's MCP server: notes by session, and tools that misbehave. `python notes_server.py` speaks stdio."""

import asyncio
import base64
import os
from collections import defaultdict
from dataclasses import dataclass, field

import anyio
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types import (
    UNSUPPORTED_PROTOCOL_VERSION,
    CallToolRequestParams,
    CallToolResult,
    ImageContent,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)
from mcp.types.version import LATEST_MODERN_VERSION
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

Context = ServerRequestContext[dict[str, object], Request]

NOTE_SCHEMA: dict[str, JsonValue] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "x-hint": "short"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}},
    },
    "required": ["text"],
    "$defs": {"Tag": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}
NO_ARGUMENTS: dict[str, JsonValue] = {"type": "object", "properties": {}}


@dataclass
class NotesServer:
    """What it heard, for the test to look at."""

    notes: dict[str | None, list[str]] = field(default_factory=lambda: defaultdict(list))
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    stateless: bool = False
    statuses: list[int] = field(default_factory=list)
    """Given to the next requests in place of an answer."""
    without_handshake: bool = False

    @property
    def server(self) -> Server[dict[str, object]]:
        """The MCP server itself."""
        return Server("notes", on_list_tools=self._list, on_call_tool=self._call)

    def http(self) -> "NotesApp":
        """The server as an ASGI app, to be run once."""
        return NotesApp(self)

    def deleted(self) -> int:
        """How many sessions were ended by their client."""
        return sum(method == "DELETE" for method, _ in self.requests)

    async def _list(self, context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        """In two pages."""
        tools = [
            Tool(name="note", description="Write a note.", input_schema=NOTE_SCHEMA),
            *(Tool(name=name, input_schema=NO_ARGUMENTS) for name in ("notes", "picture", "refuse")),
            *(Tool(name=name, input_schema=NO_ARGUMENTS) for name in ("stall", "die", "env.names")),
        ]
        if params is None or params.cursor is None:
            return ListToolsResult(tools=tools[:3], next_cursor="rest")
        return ListToolsResult(tools=tools[3:])

    async def _call(self, context: Context, params: CallToolRequestParams) -> CallToolResult:
        session = context.request.headers.get("mcp-session-id") if context.request else None
        match params.name:
            case "note":
                self.notes[session].append(str((params.arguments or {})["text"]))
                return said(f"{len(self.notes[session])} kept")
            case "notes":
                return said(" ".join(self.notes[session]))
            case "picture":
                image = ImageContent(data=base64.b64encode(b"png").decode(), mime_type="image/png")
                return CallToolResult(content=[TextContent(text="before"), image, TextContent(text="after")])
            case "refuse":
                return CallToolResult(content=[TextContent(text="no such page, try 1 to 9")], is_error=True)
            case "stall":
                await asyncio.Event().wait()
            case "die":
                os._exit(1)
        return said(" ".join(sorted(os.environ)))


class NotesApp:
    """ASGI: every path is the MCP endpoint."""

    def __init__(self, notes: NotesServer) -> None:
        self.notes = notes
        self.manager = StreamableHTTPSessionManager(notes.server, json_response=True, stateless=notes.stateless)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        self.notes.requests.append((request.method, dict(request.headers)))
        if self.notes.statuses and request.method == "POST":
            await Response(status_code=self.notes.statuses.pop(0))(scope, receive, send)
        elif self.notes.without_handshake and "mcp-method" not in request.headers:
            message = await Request(scope, receive).json()
            data = {"supported": [LATEST_MODERN_VERSION], "requested": "2025-11-25"}
            error = {"code": UNSUPPORTED_PROTOCOL_VERSION, "message": "no handshake", "data": data}
            await JSONResponse({"jsonrpc": "2.0", "id": message["id"], "error": error})(scope, receive, send)
        else:
            await self.manager.handle_request(scope, receive, send)


def said(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=text)])


async def speak_stdio() -> None:
    server = NotesServer().server
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(speak_stdio)
