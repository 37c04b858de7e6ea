"""TCP ports of this machine."""

import socket
from contextlib import suppress
from random import SystemRandom

_PORTS = range(20_000, 32_768)
_TRIES = 1000


def free_port() -> int:
    """Choose a free TCP port of 127.0.0.1. Another program may take it before it is bound.

    It is above the ports of Ray's workers and below Linux's range for outgoing connections. Raises OSError when none is
    found.
    """
    for port in SystemRandom().sample(_PORTS, _TRIES):
        with socket.socket() as server, suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port
    raise OSError(f"expected a free port from {_PORTS.start} to {_PORTS.stop - 1}, got none in {_TRIES} tries")
