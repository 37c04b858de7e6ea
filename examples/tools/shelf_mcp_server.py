"""An MCP server of its own, written with the official SDK: it knows nothing of Trackway. It speaks stdio."""

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shelf")
shelf: dict[str, str] = {}


@server.tool()
def put(name: str, text: str) -> str:
    """Put a text on the shelf under a name."""
    shelf[name] = text
    return f"{len(shelf)} on the shelf"


@server.tool()
def take(name: str) -> str:
    """Take a text from the shelf."""
    if name not in shelf:
        raise ToolError(f"expected a name on the shelf, got {name!r}; there are {sorted(shelf)}")
    return shelf.pop(name)


if __name__ == "__main__":
    server.run()
