"""Real servers on real ports of this event loop, and the files that name them."""

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.services.tools import notes_server
from tests.services.tools.notes_server import NotesServer
from tests.serving import served

HERE = Path(notes_server.__file__)
STDIO: dict[str, object] = {"command": sys.executable, "args": [str(HERE)]}


@asynccontextmanager
async def serving_notes(notes: NotesServer, port: int = 0) -> AsyncIterator[str]:
    """The URL of the notes server's endpoint."""
    app = notes.http()
    async with app.manager.run(), served(app, port, lifespan="off") as url:
        yield f"{url}/mcp"


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
