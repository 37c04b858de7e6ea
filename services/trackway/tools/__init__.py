"""The tool server: tools with state per trajectory. A new tool derives from `BaseTool`."""

from trackway.serving.user_code import in_thread
from trackway.tools.base import BaseTool, ToolConfig, ToolInputError
from trackway.tools.functions import function_tool
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
