"""Real servers on real ports of this event loop, and the files that name them."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from tests.services.tools import notes_server
from tests.services.tools.notes_server import NotesServer

HERE = Path(notes_server.__file__)
STDIO: dict[str, object] = {"command": sys.executable, "args": [str(HERE)]}


@asynccontextmanager
async def serving(app: ASGIApp, port: int = 0) -> AsyncIterator[str]:
    """Its URL while it runs under uvicorn; it must stop at once, open sessions or not."""
    lifespan = "on" if isinstance(app, FastAPI) else "off"
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", ws="none", lifespan=lifespan))
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(10):
            while not server.started:
                assert not task.done(), "the server did not start"
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        async with asyncio.timeout(10):
            await task


@asynccontextmanager
async def serving_notes(notes: NotesServer, port: int = 0) -> AsyncIterator[str]:
    """The URL of the notes server's endpoint."""
    app = notes.http()
    async with app.manager.run(), serving(app, port) as url:
        yield f"{url}/mcp"


def port_of(url: str) -> int:
    return int(url.split(":")[2].split("/")[0])


def yaml_for(
    folder: Path, servers: Mapping[str, object], *, selected: list[str] | None = None, **config: object
) -> Path:
    """verl's tool_config for those servers."""
    (folder / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    mcp = {"mcp_servers_config_path": "servers.json", **({"tool_selected_list": selected} if selected else {})}
    entry = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"type": "mcp", **config},
        "mcp": mcp,
    }
    path = folder / "mcp.yaml"
    path.write_text(json.dumps({"tools": [entry]}))
    return path
