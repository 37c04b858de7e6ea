"""verl's `tool_config` YAML: entries of `class_name`, `config`, `tool_schema` and `mcp`.

A `tool_schema` is kept whole: nested `items` and `properties`, `$defs`, unknown keywords (verl drops them).
`${oc.env:NAME}` and `${oc.env:NAME,default}` are replaced as OmegaConf does for verl. Any other `${...}` stays text.
"""

import re
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import Field, JsonValue, ValidationError, model_validator

from trackway.tools.base import ToolConfig
from trackway.tools.user_files import UserEntry, filled, problems_of
from trackway.wire.chat import FunctionSchema, ToolSchema

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
