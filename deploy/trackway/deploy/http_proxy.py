"""Ray Serve's HTTP proxy: it is a uvicorn server in a process of Ray's, and has no limits of its connections.

Serve calls `bound_connections` in each proxy before it listens, where the environment that Ray was started with has
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=trackway.deploy.http_proxy.bound_connections`.
"""

from starlette.middleware import Middleware
from uvicorn.config import HTTP_PROTOCOLS

from trackway.serving.connections import bounded_protocol
from trackway.serving.settings import ConnectionSettings

CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "trackway.deploy.http_proxy.bound_connections"}
"""What Ray's environment needs."""


def bound_connections() -> list[Middleware]:
    """Have the next uvicorn server of this process keep `ConnectionSettings`; Serve wants a list of middleware."""
    HTTP_PROTOCOLS["auto"] = bounded_protocol(ConnectionSettings())  # pyright: ignore[reportArgumentType]  as Config
    return []
