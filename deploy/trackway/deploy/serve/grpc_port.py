"""The gRPC server that Ray Serve starts in each replica, for handles between deployments."""

from ray.serve._private import constants, replica


def keep_on_loopback() -> None:
    """Bind this process's server to 127.0.0.1, before Serve starts it.

    Serve binds it to all interfaces, and it unpickles the requests of any client. Trackway's handles use Ray's actor
    calls, as is Serve's default (`RAY_SERVE_USE_GRPC_BY_DEFAULT`).
    """
    if not constants.RAY_SERVE_USE_GRPC_BY_DEFAULT:
        bind = replica.add_port_to_grpc_server  # pyright: ignore[reportPrivateImportUsage]
        replica.add_port_to_grpc_server = lambda server, _: bind(server, "127.0.0.1:0")  # pyright: ignore[reportPrivateImportUsage]
