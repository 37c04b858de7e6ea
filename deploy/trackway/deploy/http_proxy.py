"""Ray Serve's HTTP proxy: a uvicorn server in a process of Ray's, without limits of its connections.

Serve calls `bound_connections` in each proxy before it listens, where the environment that Ray was started with has
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=trackway.deploy.http_proxy.bound_connections`.
"""

from starlette.middleware import Middleware
from uvicorn.config import HTTP_PROTOCOLS

from trackway.deploy.sigterm import end_at_sigterm
from trackway.serving.connections import bounded_protocol
from trackway.serving.settings import ConnectionSettings

ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "trackway.deploy.http_proxy.bound_connections",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}
"""What Ray's environment needs. Serve replaces a proxy after three failed checks: 30 s after its death by default."""


def bound_connections() -> list[Middleware]:
    """Have the next uvicorn server of this process keep `ConnectionSettings`; Serve wants a list of middleware."""
    HTTP_PROTOCOLS["auto"] = bounded_protocol(ConnectionSettings())  # pyright: ignore[reportArgumentType]  as Config
    end_at_sigterm()
    return []
