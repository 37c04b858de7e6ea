"""Settings of the tool server: the tools and their limits.

User files that the settings name refuse unknown keys, get their variables replaced, and have their problems reported in
one line.
"""

import os
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import SettingsConfigDict

from trackway.serving.user_code import OwnCodeSettings
from trackway.tools.base import ToolConfig, ToolLimits


class UserEntry(BaseModel):
    """A section of a user's file: an unknown key is an error that lists the known ones."""

    # A message must not quote a token.
    model_config = ConfigDict(hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, raw: object) -> object:
        unknown = sorted(map(str, set(raw) - set(cls.model_fields))) if isinstance(raw, dict) else []
        if unknown:
            raise ValueError(f"expected keys out of {', '.join(cls.model_fields)}, got {', '.join(unknown)}")
        return raw


def problems_of(error: ValidationError) -> str:
    """Each invalid key with what was expected."""
    return "; ".join(_problem(detail) for detail in error.errors(include_url=False, include_input=False))


def _problem(detail: ErrorDetails) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    message = "expected this key, got none" if detail["type"] == "missing" else detail["msg"]
    message = message.removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def filled(value: object, pattern: re.Pattern[str]) -> object:
    """`value` with each match of the pattern's `name` (or its `default`) replaced in its texts, recursively.

    LookupError when a variable is not set and has no default.
    """
    if isinstance(value, dict):
        return {key: filled(item, pattern) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, pattern) for item in value]
    return pattern.sub(_from_environment, value) if isinstance(value, str) else value


def _from_environment(match: re.Match[str]) -> str:
    value = os.environ.get(match["name"], match["default"])
    if value is None:
        raise LookupError(f"expected the environment variable {match['name']}, got none; set it or give a default")
    return value


class ToolsSettings(ToolLimits, OwnCodeSettings):
    """Settings of a tool server replica."""

    model_config = SettingsConfigDict(frozen=False)

    tools: list[str] = Field(default_factory=lambda: ["calculator", "calc_gsm8k_reward"])
    """Built-in tools to offer, by name. None by default when `modules` or functions_file define tools, or
    tool_config_path or function_tool_path is given."""
    extra_tools: list[str] = Field(default_factory=list)
    """Additional tools by import path `pkg.mod:name`: subclasses of BaseTool, or functions with `@function_tool`.
    Those that `modules` define are offered without it."""
    tool_config_path: Path | None = None
    """verl's tool_config YAML: classes and MCP servers."""
    function_tool_path: Path | None = None
    """A Python file. Its functions with `@function_tool` are offered."""
    functions_file: Path | None = None
    """The file of a process that serves functions as tools. `trackway.train` writes it."""
    tool_config: dict[str, ToolConfig] = Field(default_factory=dict)
    """Config by tool name, merged over the tool's own. It may lower the limits of a call for that tool."""
    max_instances: int = Field(default=16384, ge=1)
    """Maximum instances on this replica. One more is answered 429. So is one of a run that holds three times as many as
    are left, so that another run finds places."""
    instance_ttl_s: float = Field(default=3600.0, gt=0)
    """Seconds without a call after which an instance is released, as when its trajectory's process was killed."""
    reap_interval_s: float = Field(default=30.0, gt=0)
    """Seconds between checks for idle instances."""
    mcp_max_sessions: int = Field(default=1024, ge=1)
    """MCP sessions (`Mcp-Session-Id`) open at once on this replica, 40 kB each. For one more the session that has been
    idle for longest ends, or 429 is the answer."""
    mcp_max_sessions_per_token: int = Field(default=512, ge=1)
    """MCP sessions that were opened with one token. Without tokens `mcp_max_sessions` alone holds."""
    mcp_session_room_s: float = Field(default=60.0, ge=0)
    """Seconds without a request after which an MCP session may end to make room for another."""
    mcp_session_idle_s: float = Field(default=1800.0, gt=0)
    """Seconds without a request after which an MCP session ends. Its id is then answered 404."""

    nemo_gym: bool = False
    """Serve NeMo-Gym's routes `/seed_session`, `/verify` and one for each tool, as a resources server of its own. Its
    agents call them at the root of a port, so run such a tool server by itself, with uvicorn."""

    def built_in(self, own_tools: bool) -> list[str]:
        """The built-in tools to offer. `own_tools` says whether `modules` or functions_file define tools."""
        own_alone = "tools" not in self.model_fields_set
        return [] if own_alone and (own_tools or self.tool_config_path or self.function_tool_path) else self.tools

    @property
    def limits(self) -> ToolLimits:
        """The limits of every call."""
        return ToolLimits(**{name: getattr(self, name) for name in ToolLimits.model_fields})

    @property
    def own_files(self) -> list[Path]:
        """Files of own code that the settings name."""
        paths = (self.tool_config_path, self.function_tool_path, self.functions_file)
        return [path for path in paths if path is not None]
