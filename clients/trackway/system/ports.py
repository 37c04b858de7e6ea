"""TCP ports of this machine."""

import socket


def free_port() -> int:
    """A free TCP port of 127.0.0.1; another program may take it before it is bound."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
