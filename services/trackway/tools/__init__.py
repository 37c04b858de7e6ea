"""The tool server: tools with state per trajectory. A new tool derives from `BaseTool`."""

from trackway.serving.threads import in_thread
from trackway.tools.base import BaseTool, ToolConfig, ToolInputError
from trackway.tools.functions.tool import function_tool
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.tools import ToolResult

__all__ = [
    "BaseTool",
    "FunctionSchema",
    "ToolConfig",
    "ToolInputError",
    "ToolResult",
    "ToolSchema",
    "function_tool",
    "in_thread",
]

_MOVED = {
    "calculator": "builtin.calculator",
    "function_schema": "functions.schema",
    "gsm8k": "builtin.gsm8k",
    "mcp_source": "mcp.source",
    "python_tool": "builtin.python",
    "registry": "loading",
    "search": "builtin.search.tool",
    "verl_tools": "verl.adapter",
}


def __getattr__(name: str) -> object:
    if name in _MOVED:
        raise AttributeError(f"expected trackway.tools.{_MOVED[name]}, got trackway.tools.{name}: the module has moved")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
