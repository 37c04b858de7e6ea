"""Connection limits for Ray Serve's HTTP proxy, a uvicorn server in a Ray process that has none by default.

Serve calls `bound_connections` in each proxy before it listens, if the environment of the Ray process has
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=trackway.deploy.http_proxy.bound_connections`.
"""

from starlette.middleware import Middleware
from uvicorn.config import HTTP_PROTOCOLS

from trackway.deploy.sigterm import end_at_sigterm
from trackway.serving.limits import bounded_protocol
from trackway.serving.settings import ConnectionSettings

ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "trackway.deploy.http_proxy.bound_connections",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}
"""Variables for Ray's environment. Serve replaces a proxy after three failed health checks, by default after 30 s."""


def bound_connections() -> list[Middleware]:
    """Apply `ConnectionSettings` to the next uvicorn server of this process. Returns no middleware."""
    HTTP_PROTOCOLS["auto"] = bounded_protocol(ConnectionSettings())  # pyright: ignore[reportArgumentType]  as Config
    end_at_sigterm()
    return []
