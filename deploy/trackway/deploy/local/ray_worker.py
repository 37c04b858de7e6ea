"""Ray starts each worker with this program: `python -IS ray_worker.py SOCKET SETUP_WORKER DEFAULT_WORKER ARGUMENT...`.

It has `ray_forks` fork the worker, and ends: Ray knows a worker by the id among its arguments, and learns its pid when
it registers. Where that is not possible, this process becomes the worker as Ray would have started it. Every start of a
worker waits for this program, so it imports little.
"""

import json
import os
import signal
import socket
import struct
import sys

FORK_S = 40.0
"""A worker that is not forked by then starts as a new process. Busy cores need 20 s for the imports before a fork, and
each new process would import the same. Ray gives up after 60 s."""
_CONTEXT = "--serialized-runtime-env-context"
_LANGUAGE = "--language"


def main() -> None:
    """Have the worker forked, else become it."""
    address, setup_worker, *command = sys.argv[1:]
    context, arguments = _split(command)
    try:
        reason = _peculiarity(context, arguments)
        reason = reason or _ask(address, arguments, {**os.environ, **context.get("env_vars", {})})
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        print(f"trackway: a worker starts as a new process instead of a fork: {reason}", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *([setup_worker, *command] if context else arguments)])


def _split(command: list[str]) -> tuple[dict, list[str]]:
    """Separate the two arguments for `setup_worker.py`, the runtime environment and the language, from the worker's."""
    context: dict = {}
    arguments: list[str] = []
    for argument in command:
        name, _, value = argument.partition("=")
        if name == _CONTEXT:
            context = json.loads(value)
        elif name != _LANGUAGE:
            arguments.append(argument)
    return context, arguments


def _peculiarity(context: dict, arguments: list[str]) -> str:
    """Return why this worker cannot be a fork, or nothing."""
    names = [name for name, value in context.items() if value and name not in ("env_vars", "py_executable")]
    if context.get("py_executable", sys.executable) != sys.executable:
        names.append("py_executable")
    if any("$" in value for value in context.get("env_vars", {}).values()):
        names.append("env_vars with $")
    if arguments[0].startswith("-"):
        names.append(f"Python's {arguments[0]}")
    return f"it has {', '.join(names)}" if names else ""


def _ask(address: str, arguments: list[str], environment: dict[str, str]) -> str:
    """Have the worker forked. Returns why it is not, or nothing."""
    request = {
        "arguments": arguments,
        "environment": environment,
        "group": 0 if os.getpgid(0) == os.getpid() else os.getpgid(0),
        "umask": os.umask(0o077),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    os.umask(request["umask"])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(FORK_S)
        connection.connect(f"\0{address}")
        if peer(connection)[1:] != (os.getuid(), os.getgid()):
            return "its socket is of another user"
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as lines:
            answer = lines.readline()
        if answer == b"\n":
            connection.sendall(answer)
        return answer.decode().strip() if answer else "the fork has ended"


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group at the other end."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))


if __name__ == "__main__":
    main()
