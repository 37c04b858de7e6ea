"""Settings of the tool server: which tools, and how much of everything."""

from pydantic import Field

from trackway.serving import ServiceSettings
from trackway.tools.base import ToolConfig, ToolLimits


class ToolsSettings(ServiceSettings):
    """What this replica of the tool server offers."""

    tools: list[str] = Field(default_factory=lambda: ["calculator", "calc_gsm8k_reward"])
    """Built-in tools to offer, by name."""
    extra_tools: list[str] = Field(default_factory=list)
    """Further tools by import path `pkg.mod:Class`: subclasses of BaseTool with a `default_schema`."""
    tool_config: dict[str, ToolConfig] = Field(default_factory=dict)
    """Config by tool name, laid over the tool's own; it may lower the limits below for that tool."""
    call_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that one call of a tool may run; then it is cancelled and answered 504."""
    wait_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a call may wait for its instance and for a free place of its tool; then it is answered 429."""
    tool_concurrency: int = Field(default=64, ge=1)
    """Calls of one tool that run at the same time on this replica."""
    max_output_chars: int = Field(default=16384, ge=1)
    """Characters of a result's text that are kept; a marker says how many were cut."""
    max_instances: int = Field(default=16384, ge=1)
    """Instances that may live at once on this replica; one more is answered 429."""
    instance_ttl_s: float = Field(default=3600.0, gt=0)
    """Seconds without a call after which an instance is released: its trajectory died without saying so."""
    reap_interval_s: float = Field(default=30.0, gt=0)
    """Seconds between two looks for idle instances."""

    @property
    def limits(self) -> ToolLimits:
        """The bounds of every call."""
        return ToolLimits(
            call_timeout_s=self.call_timeout_s,
            wait_timeout_s=self.wait_timeout_s,
            tool_concurrency=self.tool_concurrency,
            max_output_chars=self.max_output_chars,
        )
