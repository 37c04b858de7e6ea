"""A Python program that can reach one port of this machine and nothing else of it.

It has a network of its own and sees none of the given folders, as on another machine. A socket file carries the
connections to the port.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

ADDRESS, PORT = "127.0.0.2", 8000


def run_elsewhere(
    code: str, port: int, hidden: Path, folder: Path, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run the code in `folder`. It reaches this machine's port at `ADDRESS:PORT`, and finds `hidden` empty."""
    carrier = folder / "port.socket"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(carrier))
        listening.listen(64)
        forward(listening, lambda: socket.create_connection(("127.0.0.1", port)))
        program = (
            "import socket\nfrom tests.e2e.another_machine import ADDRESS, PORT, carried, forward\n"
            f"forward(socket.create_server((ADDRESS, PORT)), lambda: carried({str(carrier)!r}))\n{code}"
        )
        own = ["--dev-bind", "/", "/", "--tmpfs", str(hidden), "--bind", str(folder), str(folder), "--unshare-net"]
        return subprocess.run(
            ["bwrap", *own, "--die-with-parent", "--chdir", str(folder), sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def carried(carrier: str) -> socket.socket:
    """A connection to the socket file."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(carrier)
    return connection


def forward(listening: socket.socket, connect: Callable[[], socket.socket]) -> None:
    """Copy the bytes of each accepted connection to a new one and back, in threads, until the listener is closed."""

    def accept() -> None:
        with suppress(OSError):
            while True:
                accepted, _ = listening.accept()
                connected = connect()
                for pair in ((accepted, connected), (connected, accepted)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    def copy(source: socket.socket, target: socket.socket) -> None:
        with source, suppress(OSError):  # the other thread closes the target
            while content := source.recv(65_536):
                target.sendall(content)
            target.shutdown(socket.SHUT_WR)

    threading.Thread(target=accept, daemon=True).start()
