"""The tools of one server, by name: the built-in ones, and any class named by its import path."""

import pkgutil
from collections.abc import Iterable, Mapping, Sequence

from trackway.tools.base import BaseTool, ToolConfig
from trackway.tools.calculator import CalculatorTool
from trackway.tools.gsm8k import Gsm8kTool
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError

BUILT_IN: dict[str, type[BaseTool]] = {
    "calculator": CalculatorTool,
    "calc_gsm8k_reward": Gsm8kTool,
}


class ToolRegistry:
    """Tools by name. ValueError when two have one name."""

    def __init__(self, tools: Iterable[BaseTool]) -> None:
        self._tools: dict[str, BaseTool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ValueError(f"expected one tool of each name, got two named {tool.name!r}; rename one")
            self._tools[tool.name] = tool

    def get(self, name: str) -> BaseTool:
        """The tool of that name. UNKNOWN_TOOL lists those there are."""
        tool = self._tools.get(name)
        if tool is None:
            known = sorted(self._tools)
            raise TrackwayError(
                ErrorCode.UNKNOWN_TOOL,
                f"expected one of the tools {', '.join(known)}, got {name!r}; GET /tools lists them with their schemas",
                known=[*known],
            )
        return tool

    def stateless(self) -> list[str]:
        """Names of the tools that keep nothing between calls."""
        return [tool.name for tool in self._tools.values() if tool.stateless]

    def schemas(self) -> list[ToolSchema]:
        """Every tool as the model sees it."""
        return [tool.tool_schema for tool in self._tools.values()]


def load_tools(names: Sequence[str], paths: Sequence[str], configs: Mapping[str, ToolConfig]) -> list[BaseTool]:
    """Built-in tools by name and further ones by `pkg.mod:Class`, each with its config from `configs` by tool name.

    ValueError for an unknown name or a config without a tool; TypeError for a path that is no BaseTool with a schema.
    """
    classes = [_built_in(name) for name in names] + [_imported(path) for path in paths]
    defaults = [tool_class.default() for tool_class in classes]
    unused = sorted(set(configs) - {tool.name for tool in defaults})
    if unused:
        raise ValueError(f"expected tool_config for loaded tools only, got {unused}; loaded: {[*names, *paths]}")
    return [type(tool).default(configs.get(tool.name)) for tool in defaults]


def _built_in(name: str) -> type[BaseTool]:
    if name not in BUILT_IN:
        raise ValueError(f"expected built-in tools out of {sorted(BUILT_IN)}, got {name!r}; name others in extra_tools")
    return BUILT_IN[name]


def _imported(path: str) -> type[BaseTool]:
    found = pkgutil.resolve_name(path)
    if not (isinstance(found, type) and issubclass(found, BaseTool)):
        raise TypeError(f"expected {path!r} to be a subclass of trackway.tools.base.BaseTool, got {found!r}")
    return found
