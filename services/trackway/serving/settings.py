"""Settings that every service shares. Each service adds its own in a subclass.

A value comes from the Serve config (`args`), else from the environment (`TRACKWAY_TOOLS_URL`,
`TRACKWAY_TRACING__TOKEN2TEXT`), else from the default.
"""

import uuid

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from trackway.serving.auth import AuthSettings
from trackway.tracing import TracingSettings
from trackway.wire.service import ServiceName


class ConnectionSettings(BaseSettings):
    """Connection limits of a server. Ray Serve's proxy reads them from the environment."""

    model_config = SettingsConfigDict(
        env_prefix="TRACKWAY_",
        env_nested_delimiter="__",
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
        hide_input_in_errors=True,  # an invalid token must not be printed
    )

    header_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds for a request's header to be complete; then its connection is closed."""
    max_connections: int = Field(default=4096, ge=1)
    """Connections of one process, at most three quarters of its limit of open files. Beyond it the longest idle
    connection is closed. When none is idle, a new connection is answered 429. Serve's proxy in a Ray of your own has
    these limits with `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=trackway.deploy.http_proxy.bound_connections` in Ray's
    environment."""


class ServiceSettings(ConnectionSettings):
    """URLs of the other services, tracing, authentication, and limits of a request."""

    base_url: str = "http://127.0.0.1:8000"
    """Root URL of the services, each below its own prefix: `{base_url}/tools`, `{base_url}/reward`, ..."""
    rollout_url: str | None = None
    """URL of the rollout service if it is not under `base_url`."""
    agent_url: str | None = None
    """URL of the agent service if it is not under `base_url`."""
    tools_url: str | None = None
    """URL of the tool server if it is not under `base_url`."""
    reward_url: str | None = None
    """URL of the reward service if it is not under `base_url`."""
    trainer_url: str | None = None
    """URL of the trainer service if it is not under `base_url`."""
    token: SecretStr | None = None
    """Bearer token that this service sends to the others."""
    direct: bool = True
    """Call the other services' replicas at their own ports where these are reachable, else through Serve's proxy."""
    direct_host: str | None = None
    """Under Ray Serve: address at which each replica also answers directly, on a port that `/replicas` lists. `node` is
    the node's own address, for callers on other nodes. None takes 127.0.0.1 when base_url is on this machine, else
    `node`. With an empty one replicas answer only through the proxy."""
    direct_port: int = Field(default=0, ge=0, le=65535)
    """Port at `direct_host`, for a service of one replica. 0 takes a free one."""
    probe_dir: str | None = Field(default=None, min_length=1, max_length=56)
    """Under Ray Serve: folder in which each replica answers readiness probes at a Unix socket of its own
    (`python -m trackway.deploy.probe`), or None for none."""
    drain_s: float = Field(default=10.0, ge=0)
    """Under Ray Serve: longest time in seconds that a stopping replica takes further calls at its own port, until its
    tool instances are released and its callers have left. Keep it below Serve's graceful_shutdown_timeout_s."""
    auth: AuthSettings = Field(default_factory=AuthSettings)
    """Tokens of this service's callers. Without any, only callers on this machine are answered."""
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    """Export of spans."""
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Longest request body in bytes. A longer one is answered 413."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for a request's body to be complete. A slower one is answered 408."""
    max_json_items: int = Field(default=500_000, ge=1024)
    """List items and object members in a request's JSON, token ids included. More are answered 413."""
    max_json_nodes: int = Field(default=100_000, ge=1024)
    """Lists, objects and object members in a request's JSON, up to 800 bytes of memory each. More are answered 413."""
    replica: str = Field(default_factory=lambda: uuid.uuid4().hex[:12], pattern="^[0-9a-z]{4,32}$")
    """Name of this process among the service's replicas."""

    def url(self, service: ServiceName) -> str:
        """Base URL of a service, without a trailing slash."""
        service_url: str | None = getattr(self, f"{service}_url")
        return (service_url or f"{self.base_url.rstrip('/')}/{service}").rstrip("/")
