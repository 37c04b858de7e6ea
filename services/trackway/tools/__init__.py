"""The tool server: tools whose state lives as long as a trajectory. `BaseTool` is what a new tool derives from."""

from trackway.tools.base import BaseTool, ToolConfig, ToolInputError

__all__ = ["BaseTool", "ToolConfig", "ToolInputError"]
