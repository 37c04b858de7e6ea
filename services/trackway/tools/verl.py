"""Tools of verl's `tool_config` files: our counterparts of verl's, a BaseTool, or any class with verl's signature.

verl itself need not be installed: its classes are recognized by name, a user's class by its methods.

A `tool_schema` is kept whole: nested `items` and `properties`, `$defs`, unknown keywords (verl drops them).
`${oc.env:NAME}` and `${oc.env:NAME,default}` are replaced as OmegaConf does for verl. Any other `${...}` stays text.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol, Self, cast

import yaml
from pydantic import BaseModel, Field, JsonValue, ValidationError, model_validator

from trackway.serving.user_code import importing, offer_stand_ins
from trackway.tools.base import BaseTool, ToolConfig
from trackway.tools.functions import numbers_of, text_of
from trackway.tools.settings import UserEntry, filled, problems_of
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.tools import ToolResult

_ENVIRONMENT = re.compile(r"\$\{oc\.env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:,\s*(?P<default>[^}]*))?\}")


class FunctionEntry(UserEntry):
    """The function of a `tool_schema`."""

    name: str
    description: str = ""
    parameters: dict[str, JsonValue] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False
    """Unused, as in verl. Arguments are always checked against the schema here."""


class SchemaEntry(UserEntry):
    """An OpenAI function schema in the form of verl's files."""

    type: Literal["function"] = "function"
    function: FunctionEntry

    def to_wire(self) -> ToolSchema:
        """The schema in the form of our tools."""
        named = self.function.model_dump(include={"name", "description", "parameters"})
        return ToolSchema(function=FunctionSchema.model_validate(named))


class McpEntry(UserEntry):
    """The servers, and the selected tools."""

    mcp_servers_config_path: Path
    tool_selected_list: list[str] | None = None


class ToolEntry(UserEntry):
    """An element of `tools`."""

    class_name: str = ""
    config: ToolConfig = Field(default_factory=dict)
    tool_schema: SchemaEntry | None = None
    mcp: McpEntry | None = None

    @property
    def own_config(self) -> ToolConfig:
        """The config without verl's `type`, which only says how to read the entry."""
        return {key: value for key, value in self.config.items() if key != "type"}

    @model_validator(mode="after")
    def _type_fits(self) -> Self:
        kind = self.config.get("type", "mcp" if self.mcp else "native")
        if kind not in ("native", "mcp"):
            raise ValueError(f"expected config.type to be 'native' or 'mcp', got {kind!r}")
        if (kind == "mcp") is not (self.mcp is not None):
            raise ValueError(f"expected a section 'mcp' for config.type 'mcp' and only for it, got type {kind!r}")
        if not self.class_name and self.mcp is None:
            raise ValueError("expected a class_name such as 'verl.tools.gsm8k_tool.Gsm8kTool', got none")
        if self.mcp is not None and self.tool_schema is not None:
            raise ValueError("expected no tool_schema beside 'mcp': the server gives the schemas")
        return self


def read_tool_config(path: Path) -> list[ToolEntry]:
    """The entries of a file, in order. ValueError names the file, the entry and what to write instead."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"tool_config_path: expected a YAML file, got {str(path)!r}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: expected YAML, got: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or set(content) != {"tools"} or not isinstance(content["tools"], list):
        keys = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path}: expected one key, 'tools', with a list of entries, got {keys}")
    return [_entry(path, number, raw) for number, raw in enumerate(content["tools"], start=1)]


def _entry(path: Path, number: int, raw: object) -> ToolEntry:
    try:
        return ToolEntry.model_validate(filled(raw, _ENVIRONMENT))
    except ValidationError as error:
        raise ValueError(f"{path}, entry {number}: {problems_of(error)}") from None
    except LookupError as error:
        raise ValueError(f"{path}, entry {number}: {error.args[0]}") from None


COUNTERPARTS = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "calc_gsm8k_reward",
    "verl.workers.tool.gsm8k_tool.Gsm8kTool": "calc_gsm8k_reward",
    "verl.tools.search_tool.SearchTool": "search",
    "verl.workers.tool.search_tool.SearchTool": "search",
}
"""verl's classes (0.7.1, and their older paths), each with the built-in tool that replaces it."""

MCP_CLASSES = ("", "verl.tools.mcp_base_tool.MCPBaseTool", "verl.tools.mcp_search_tool.MCPSearchTool")
"""Class names of `type: mcp` entries. All use the same MCP client."""

_INSTEAD = {
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": (
        "use the built-in tool `python` (setting `tools`), which runs code in a sandbox of this server"
    ),
}


class VerlClass(Protocol):
    """The methods that verl calls on a tool."""

    create: Callable[..., Awaitable[object]]
    execute: Callable[..., Awaitable[object]]
    calc_reward: Callable[..., Awaitable[object]]
    release: Callable[..., Awaitable[object]]


def named_tool(
    class_name: str,
    config: ToolConfig,
    schema: ToolSchema | None,
    built_in: Mapping[str, type[BaseTool]],
    folder: Path,
) -> BaseTool:
    """The tool of an entry of a YAML file in `folder`.

    ValueError or TypeError when the class does not exist or is not a tool.
    """
    if (instead := _INSTEAD.get(class_name)) is not None:
        raise ValueError(
            f"expected a class that runs here, got {class_name!r}, which needs a service of its own; {instead}"
        )
    counterpart = built_in.get(COUNTERPARTS.get(class_name, ""))
    tool_class = counterpart or _imported(class_name)
    if isinstance(tool_class, type) and issubclass(tool_class, BaseTool):
        return ours(tool_class, _with_paths(config, tool_class.path_keys, folder), schema)
    missing = [
        name
        for name in ("create", "execute", "calc_reward", "release")
        if not callable(getattr(tool_class, name, None))
    ]
    if not isinstance(tool_class, type) or missing:
        lacks = f"without {', '.join(missing)}" if missing else f"{tool_class!r}"
        raise TypeError(f"expected {class_name!r} to be a tool (a BaseTool of trackway or of verl), got one {lacks}")
    return VerlTool(tool_class, config, schema)


def _with_paths(config: ToolConfig, keys: Sequence[str], folder: Path) -> ToolConfig:
    """The config with absolute paths under these keys. Relative ones are relative to `folder`."""
    paths = {key: str(folder.absolute() / path) for key in keys if isinstance(path := config.get(key), str)}
    return {**config, **paths}


def ours(tool_class: type[BaseTool], config: ToolConfig, schema: ToolSchema | None) -> BaseTool:
    """One of our classes. A given schema replaces the class's own."""
    if schema is None:
        return tool_class.default(config)
    return tool_class({**tool_class.default_config, **config}, schema)


class VerlTool(BaseTool):
    """Adapts a class with verl's signature; unlike in verl its instance lasts as long as the trajectory.

    `create` gets `create_kwargs={...}` as from verl's agent loop, and those of them that its signature names.
    `agent_data` stays in the agent and is not passed.
    """

    def __init__(self, tool_class: type, config: ToolConfig, schema: ToolSchema | None) -> None:
        self._tool = cast(VerlClass, tool_class(config=config, tool_schema=schema))
        super().__init__(config, schema or _own_schema(self._tool))
        self._parameters = inspect.signature(self._tool.create).parameters
        self._ids: dict[str, str] = {}

    async def create(self, instance_id: str, /, **create_kwargs: JsonValue) -> None:
        """Create the state. The tool may return its own id, alone or before a ToolResponse."""
        created = await self._tool.create(instance_id, **self._accepted(create_kwargs))
        own_id = created[0] if isinstance(created, tuple) and created else created
        self._ids[instance_id] = own_id if isinstance(own_id, str) else instance_id

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """Run a call; converts verl's triple to a ToolResult, with the numeric metrics."""
        returned = await self._tool.execute(self._ids[instance_id], arguments, **execute_kwargs)
        response, reward, metrics = (
            returned if isinstance(returned, tuple) and len(returned) == 3 else (returned, None, None)
        )
        numbers = numbers_of(metrics) if isinstance(metrics, Mapping) else {}
        return ToolResult(text=text_of(response), reward=float(reward or 0.0), metrics=numbers)

    async def calc_reward(self, instance_id: str, /, **kwargs: JsonValue) -> float:
        """The tool's reward. 0.0 unless it is a number (verl's search and sandbox tools return lists)."""
        reward = await self._tool.calc_reward(self._ids[instance_id], **kwargs)
        return float(reward) if isinstance(reward, int | float) else 0.0

    async def release(self, instance_id: str, /, **release_kwargs: JsonValue) -> None:
        """Release the state."""
        await self._tool.release(self._ids.pop(instance_id), **release_kwargs)

    def _accepted(self, create_kwargs: dict[str, JsonValue]) -> dict[str, JsonValue]:
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values())
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
    offer_stand_ins()
    try:
        with importing(f"class_name {class_name!r}"):
            return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(sorted(COUNTERPARTS))
        raise ValueError(
            f"expected an importable class, got {class_name!r} ({error}); "
            f"install its package or put it on PYTHONPATH; known without verl: {known}"
        ) from error
