"""The process whose forks are the workers of a local Ray: it has imported Ray Serve and the services.

`ray_head` starts it, and `ray_worker` asks it for forks. A fork takes over the environment, folder, output, limits and
signals of the process that asked, and runs Ray's own program of a worker. Only the imports are shared. Torch is not
among them, because it reads the environment and starts threads.
"""

import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from trackway.deploy.local.ray_worker import peer
from trackway.wire.service import ServiceName

SERVICES = [f"trackway.{service}.app" for service in get_args(ServiceName)]
RAY = [
    "ray._private.workers.default_worker",
    "ray.serve._private.controller",
    "ray.serve._private.proxy",
    "ray.serve._private.replica",
    "trackway.deploy.graph",
]
"""Ray keeps the environment in which it is imported. So these come last, in the raylet's environment."""
ANY_JOB = {"RAY_JOB_ID": "ffffffff"}
"""A fork registers as a worker that Ray has started ahead, which gets its job with its first task."""
OF_ONE_WORKER = {"CUDA_VISIBLE_DEVICES", "RAY_JOB_ID", "RAY_LD_PRELOAD_ON_WORKERS", "SPT_NOENV"}
"""Variables that no import reads. A worker with another difference starts as a new process."""
_OWN_THREADS = {"jemalloc_bg_thd"}
"""Threads of libraries that prepare for a fork themselves."""
_REQUEST_S = 5.0
_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]


def main() -> None:
    """Fork workers for requests at the socket of the first argument, a file descriptor, until standard input ends.

    Standard input begins with a line of JSON, the environment of the raylet. `sys.path` is a worker's.
    """
    listener = socket.socket(fileno=int(sys.argv[1]))
    _import(SERVICES)
    os.environ.update(json.loads(sys.stdin.readline()) | ANY_JOB)
    _import_ray()
    if _drawn_by_fork() == _drawn_by_fork():
        raise RuntimeError("expected forks that draw ids of their own, got the same ids; workers are not forked")
    if threads := _threads() - _OWN_THREADS:
        raise RuntimeError(f"expected imports that start no threads, got {sorted(threads)}; workers are not forked")
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory of all objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes forks that have ended
    program = _serve(listener, _files())
    if program:
        runpy.run_path(program, run_name="__main__")


def _import(names: Iterable[str]) -> None:
    """Import the modules whose packages are installed."""
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)


def _import_ray() -> None:
    """Import Ray's modules without seeding its generator of ids, whose state all forks would share.

    Calls with the same id get each other's results and end the process that serves them. Only the class of an actor
    draws an id when it is imported.
    """
    actor: Any = importlib.import_module("ray.actor")
    ids = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: ids(os.urandom(ids.size())))
    _import(RAY)
    actor.ActorClassID = ids


def _drawn_by_fork() -> bytes:
    """Return an id that a fork of this process draws from Ray's generator."""
    from ray._raylet import JobID, PlacementGroupID

    reads, writes = os.pipe()
    if not os.fork():
        os.write(writes, PlacementGroupID.of(JobID.from_int(1)).binary())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        drawn = pipe.read()
    os.wait()
    return drawn


def _threads() -> set[str]:
    """Return the names of the threads of this process, without the main thread."""
    others = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    return {task.joinpath("comm").read_text().strip() for task in others}


def _files() -> dict[str, int]:
    """Return the files of the imported modules, and when each was changed."""
    paths = {path for module in [*sys.modules.values()] if (path := getattr(module, "__file__", None))}
    return {path: os.stat(path).st_mtime_ns if os.path.exists(path) else 0 for path in paths}


def _serve(listener: socket.socket, files: dict[str, int]) -> str | None:
    """Fork a worker for each request. Returns None at the end of standard input, and in a fork the worker's program."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        with connection, suppress(OSError, ValueError):  # of a process that has ended
            request, output = _receive(connection)
            try:
                if refusal := _refusal(request["environment"], files):
                    connection.sendall(f"{refusal}\n".encode())
                elif not os.fork():
                    listener.close()
                    return _become(connection, request, output)
            finally:
                for descriptor in output:
                    os.close(descriptor)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request, and the standard input, output and error of its sender."""
    connection.settimeout(_REQUEST_S)
    if peer(connection)[1:] != (os.getuid(), os.getgid()):
        raise ValueError("a request of another user")
    _, output, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as lines:
        return json.loads(lines.readline()), output


def _refusal(environment: dict[str, str], files: dict[str, int]) -> str:
    """Return why a new process must be started for this environment, or nothing."""
    names = environment.keys() | os.environ.keys()
    differ = {name for name in names if environment.get(name) != os.environ.get(name)} - OF_ONE_WORKER
    if differ:
        return f"its environment differs in {', '.join(sorted(differ))}"
    changed = [path for path, time in _files().items() if files[path] != time]
    return f"changed since they were imported: {', '.join(sorted(changed))}" if changed else ""


def _become(connection: socket.socket, request: dict[str, Any], output: list[int]) -> str:
    """Take over everything from the process that asked, and tell it. Returns the worker's program."""
    try:
        asked, _, _ = peer(connection)
        for standard, descriptor in enumerate(output):
            os.dup2(descriptor, standard)
        os.setpgid(0, request["group"])
        os.umask(request["umask"])
        os.chdir(f"/proc/{asked}/cwd")
        Path("/proc/self/oom_score_adj").write_text(Path(f"/proc/{asked}/oom_score_adj").read_text())
        for limit in _LIMITS:
            resource.setrlimit(limit, resource.prlimit(asked, limit))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # Python reseeds its own generator in a fork
        sys.argv = request["arguments"]
        connection.sendall(b"\n")
        if not connection.recv(1):
            raise TimeoutError("the process that asked has ended")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    return sys.argv[0]
