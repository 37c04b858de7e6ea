"""The tools of a server by name."""

import re
from collections.abc import Iterable

from trackway.tools.base import BaseTool
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError

_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
"""OpenAI's rule for function names. Such a name also needs no escaping in a URL path."""


class ToolRegistry:
    """Tools by name. ValueError for a duplicate or invalid name."""

    def __init__(self, tools: Iterable[BaseTool] = ()) -> None:
        self._tools: dict[str, BaseTool] = {}
        for tool in tools:
            self.add(tool)

    def add(self, tool: BaseTool) -> None:
        """One tool more."""
        if not _NAME.fullmatch(tool.name):
            raise ValueError(
                f"{tool.origin}: expected a name of 1 to 64 of A-Z a-z 0-9 _ -, got {tool.name!r}; rename it"
            )
        if (other := self._tools.get(tool.name)) is not None:
            raise ValueError(
                f"expected one tool of each name, got two named {tool.name!r}: "
                f"from {other.origin} and from {tool.origin}; rename one or leave it out"
            )
        self._tools[tool.name] = tool

    def get(self, name: str) -> BaseTool:
        """The tool of that name. UNKNOWN_TOOL lists the known ones."""
        tool = self._tools.get(name)
        if tool is None:
            known = sorted(self._tools)
            raise TrackwayError(
                ErrorCode.UNKNOWN_TOOL,
                f"expected one of the tools {', '.join(known)}, got {name!r}; GET /tools lists them with their schemas",
                known=[*known],
            )
        return tool

    def names(self) -> list[str]:
        """The tools' names, in their order."""
        return [*self._tools]

    def stateless(self) -> list[str]:
        """Names of the stateless tools."""
        return [tool.name for tool in self._tools.values() if tool.stateless]

    def schemas(self) -> list[ToolSchema]:
        """All tools as the model sees them."""
        return [tool.tool_schema for tool in self._tools.values()]
