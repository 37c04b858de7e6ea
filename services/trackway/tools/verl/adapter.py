"""Tools named by a verl `class_name`: our counterparts of verl's own, our BaseTool, or any class of verl's signature.

verl itself need not be installed: its own classes are known by name, a user's class by what it can do.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from typing import Protocol, cast

from pydantic import BaseModel, JsonValue

from trackway.serving.user_code import importing
from trackway.tools.base import BaseTool, ToolConfig
from trackway.tools.functions.results import numbers_of, text_of
from trackway.wire.chat import ToolSchema
from trackway.wire.tools import ToolResult

COUNTERPARTS = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "calc_gsm8k_reward",
    "verl.workers.tool.gsm8k_tool.Gsm8kTool": "calc_gsm8k_reward",
    "verl.tools.search_tool.SearchTool": "search",
    "verl.workers.tool.search_tool.SearchTool": "search",
}
"""verl's classes (0.7.1, and where they were before) and the built-in tool that stands for each."""

MCP_CLASSES = ("", "verl.tools.mcp_base_tool.MCPBaseTool", "verl.tools.mcp_search_tool.MCPSearchTool")
"""Class names of `type: mcp` entries; there is one MCP client here, and no class to choose."""

_INSTEAD = {
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": (
        "use the built-in tool `python` (setting `tools`), which runs code in a sandbox of this server"
    ),
}


class VerlClass(Protocol):
    """What verl expects of a tool, and calls of it."""

    create: Callable[..., Awaitable[object]]
    execute: Callable[..., Awaitable[object]]
    calc_reward: Callable[..., Awaitable[object]]
    release: Callable[..., Awaitable[object]]


def named_tool(
    class_name: str, config: ToolConfig, schema: ToolSchema | None, built_in: Mapping[str, type[BaseTool]]
) -> BaseTool:
    """The tool of a YAML entry. ValueError or TypeError when there is no such class or it is no tool."""
    if (instead := _INSTEAD.get(class_name)) is not None:
        raise ValueError(
            f"expected a class that runs here, got {class_name!r}, which needs a service of its own; {instead}"
        )
    counterpart = built_in.get(COUNTERPARTS.get(class_name, ""))
    found = counterpart or _imported(class_name)
    if isinstance(found, type) and issubclass(found, BaseTool):
        return ours(found, config, schema)
    missing = [
        name for name in ("create", "execute", "calc_reward", "release") if not callable(getattr(found, name, None))
    ]
    if not isinstance(found, type) or missing:
        lacks = f"without {', '.join(missing)}" if missing else f"{found!r}"
        raise TypeError(f"expected {class_name!r} to be a tool (a BaseTool of trackway or of verl), got one {lacks}")
    return VerlTool(found, config, schema)


def ours(tool_class: type[BaseTool], config: ToolConfig, schema: ToolSchema | None) -> BaseTool:
    """One of our classes; the schema given takes the place of the class's own."""
    if schema is None:
        return tool_class.default(config)
    return tool_class({**tool_class.default_config, **config}, schema)


class VerlTool(BaseTool):
    """A class of verl's signature behind ours; unlike in verl its instance lives as long as the trajectory.

    `create` is given `create_kwargs={...}` as verl's agent loop gives it, and those of them that its signature names.
    `agent_data` stays in the agent and is not given.
    """

    def __init__(self, tool_class: type, config: ToolConfig, schema: ToolSchema | None) -> None:
        self._tool = cast(VerlClass, tool_class(config=config, tool_schema=schema))
        super().__init__(config, schema or _own_schema(self._tool))
        self._parameters = inspect.signature(self._tool.create).parameters
        self._ids: dict[str, str] = {}

    async def create(self, instance_id: str, /, **create_kwargs: JsonValue) -> None:
        """Make the state; the tool may answer with an id of its own, alone or before a ToolResponse."""
        made = await self._tool.create(instance_id, **self._accepted(create_kwargs))
        own_id = made[0] if isinstance(made, tuple) and made else made
        self._ids[instance_id] = own_id if isinstance(own_id, str) else instance_id

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """One call; verl's triple as a ToolResult, of the metrics those that are numbers."""
        returned = await self._tool.execute(self._ids[instance_id], arguments, **execute_kwargs)
        response, reward, metrics = (
            returned if isinstance(returned, tuple) and len(returned) == 3 else (returned, None, None)
        )
        numbers = numbers_of(metrics) if isinstance(metrics, Mapping) else {}
        return ToolResult(text=text_of(response), reward=float(reward or 0.0), metrics=numbers)

    async def calc_reward(self, instance_id: str, /, **kwargs: JsonValue) -> float:
        """The tool's reward; 0.0 for what is no number (verl's search and sandbox tools give lists)."""
        reward = await self._tool.calc_reward(self._ids[instance_id], **kwargs)
        return float(reward) if isinstance(reward, int | float) else 0.0

    async def release(self, instance_id: str, /, **release_kwargs: JsonValue) -> None:
        """Forget the state."""
        await self._tool.release(self._ids.pop(instance_id), **release_kwargs)

    def _accepted(self, create_kwargs: dict[str, JsonValue]) -> dict[str, JsonValue]:
        takes_all = any(one.kind is one.VAR_KEYWORD for one in self._parameters.values())
        named = {name: value for name, value in create_kwargs.items() if name in self._parameters}
        if takes_all or "create_kwargs" in self._parameters:
            named["create_kwargs"] = create_kwargs
        return named


def _own_schema(tool: object) -> ToolSchema:
    getter = getattr(tool, "get_openai_tool_schema", None)
    schema = getattr(tool, "tool_schema", None) or (getter() if callable(getter) else None)
    if isinstance(schema, BaseModel):
        schema = schema.model_dump(exclude_none=True)
    if schema is None:
        raise ValueError(
            f"expected a tool_schema for {type(tool).__qualname__}, got none, and the class has none of its own"
        )
    return ToolSchema.model_validate(schema)


def _imported(class_name: str) -> object:
    module, _, name = class_name.rpartition(".")
    try:
        with importing(f"class_name {class_name!r}"):
            return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(sorted(COUNTERPARTS))
        raise ValueError(
            f"expected an importable class, got {class_name!r} ({error}); "
            f"install its package or put it on PYTHONPATH; known without verl: {known}"
        ) from error
