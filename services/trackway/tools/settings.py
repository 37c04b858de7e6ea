"""Settings of the tool server: the tools, and their limits."""

from pathlib import Path

from pydantic import Field

from trackway.serving import ServiceSettings
from trackway.tools.base import ToolConfig, ToolLimits


class ToolsSettings(ServiceSettings):
    """Settings of a tool server replica."""

    tools: list[str] = Field(default_factory=lambda: ["calculator", "calc_gsm8k_reward"])
    """Built-in tools to offer, by name; none by default when tool_config_path or function_tool_path is given."""
    extra_tools: list[str] = Field(default_factory=list)
    """Additional tools by import path `pkg.mod:name`: subclasses of BaseTool, or functions with `@function_tool`."""
    tool_config_path: Path | None = None
    """verl's tool_config YAML: classes and MCP servers."""
    function_tool_path: Path | None = None
    """A Python file; its functions with `@function_tool` are offered."""
    tool_config: dict[str, ToolConfig] = Field(default_factory=dict)
    """Config by tool name, merged over the tool's own; it may lower the limits below for that tool."""
    call_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit of a tool call in seconds; a slower call is cancelled and answered 504."""
    stop_timeout_s: float = Field(default=2.0, gt=0)
    """Seconds for a cancelled call to stop; after that its instance is lost, and its slot stays taken."""
    wait_timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait of a call for its instance and for a free slot of its tool, in seconds; then it is answered 429."""
    tool_concurrency: int = Field(default=64, ge=1)
    """Concurrent calls of a tool on this replica."""
    max_output_chars: int = Field(default=16384, ge=1)
    """Characters of a result's text that are kept; a marker says how many were cut."""
    max_instances: int = Field(default=16384, ge=1)
    """Maximum instances on this replica; one more is answered 429."""
    instance_ttl_s: float = Field(default=3600.0, gt=0)
    """Seconds without a call after which an instance is released, as when its trajectory's process was killed."""
    reap_interval_s: float = Field(default=30.0, gt=0)
    """Seconds between checks for idle instances."""
    mcp_max_sessions: int = Field(default=1024, ge=1)
    """MCP sessions (`Mcp-Session-Id`) open at once on this replica, 40 kB each; one more is answered 429."""
    mcp_session_idle_s: float = Field(default=1800.0, gt=0)
    """Seconds without a request after which an MCP session ends; its id is then answered 404."""
    direct_host: str | None = None
    """Under Ray Serve: address at which each replica also answers directly, on a free port that `/replicas` lists.
    `node` is the node's own address, for callers on other nodes; None takes 127.0.0.1 when base_url is on this machine,
    else `node`; with an empty one replicas answer only through the proxy."""
    drain_s: float = Field(default=10.0, ge=0)
    """Under Ray Serve: seconds that a stopping replica waits for its instances to be released; keep it below Serve's
    graceful_shutdown_timeout_s."""

    @property
    def built_in(self) -> list[str]:
        """The built-in tools to offer."""
        files_alone = "tools" not in self.model_fields_set and (self.tool_config_path or self.function_tool_path)
        return [] if files_alone else self.tools

    @property
    def limits(self) -> ToolLimits:
        """The limits of every call."""
        return ToolLimits(
            call_timeout_s=self.call_timeout_s,
            stop_timeout_s=self.stop_timeout_s,
            wait_timeout_s=self.wait_timeout_s,
            tool_concurrency=self.tool_concurrency,
            max_output_chars=self.max_output_chars,
        )
