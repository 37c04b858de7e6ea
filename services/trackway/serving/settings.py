"""Settings that every service shares; each service adds its own in a subclass.

A value comes from the Serve config (`args`), else from the environment (`TRACKWAY_TOOLS_URL`,
`TRACKWAY_TRACING__TOKEN2TEXT`), else from the default.
"""

import uuid
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from trackway.serving.tokens import AuthSettings
from trackway.tracing import TracingSettings

ServiceName = Literal["rollout", "agent", "tools", "reward", "trainer"]


class ServiceSettings(BaseSettings):
    """Where the other services are, where traces go, and what a request may cost."""

    model_config = SettingsConfigDict(
        env_prefix="TRACKWAY_",
        env_nested_delimiter="__",
        extra="forbid",
        protected_namespaces=(),
        hide_input_in_errors=True,  # a token that does not fit must not be printed
    )

    base_url: str = "http://127.0.0.1:8000"
    """Root under which every service has its prefix: `{base_url}/tools`, `{base_url}/reward`, ..."""
    rollout_url: str | None = None
    """Rollout service, when it is not under base_url."""
    agent_url: str | None = None
    """Agent service, when it is not under base_url."""
    tools_url: str | None = None
    """Tool server, when it is not under base_url."""
    reward_url: str | None = None
    """Reward service, when it is not under base_url."""
    trainer_url: str | None = None
    """Trainer service, when it is not under base_url."""
    token: SecretStr | None = None
    """Bearer token that this service sends to the others; the environment's TRACKWAY_TOKEN."""
    auth: AuthSettings = Field(default_factory=AuthSettings)
    """Tokens of this service's callers; without any, only callers on this machine are answered."""
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    """Export of spans."""
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Longest request body in bytes; a longer one is answered 413."""
    max_json_depth: int = Field(default=64, ge=8)
    """Levels that the JSON of a request may nest; a deeper body is answered 422."""
    replica: str = Field(default_factory=lambda: uuid.uuid4().hex[:12], pattern="^[0-9a-z]{4,32}$")
    """Name of this process among the service's replicas."""

    def url(self, service: ServiceName) -> str:
        """Base URL of a service, without a trailing slash."""
        own: str | None = getattr(self, f"{service}_url")
        return (own or f"{self.base_url.rstrip('/')}/{service}").rstrip("/")
