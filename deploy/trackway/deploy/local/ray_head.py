"""Runs Ray's command line for a machine that only serves: `python -m trackway.deploy.local.ray_head start --head ...`.

A dashboard that it starts loads nothing but Serve's REST API, and no server for Ray's remote clients starts. Workers
are forks of one process (`ray_forks`). `ray start` has no options for these.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DASHBOARD_MODULES = "--modules-to-load=ServeHead"
"""An option of the dashboard's own program."""
OTHER_COMMANDS = ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")
"""Commands of `ray` that are not `ray start`. They import pandas and FastAPI while the start waits."""
_FORKS = "import sys; sys.path[0] = sys.argv[2]; from trackway.deploy.local import ray_forks; ray_forks.main()"


def main() -> None:
    """Start the process that forks workers, then run Ray's command line."""
    address, programs = f"trackway-{secrets.token_hex(16)}", workers()
    forks = start_forks(address, programs) if sys.platform == "linux" else None  # it needs /proc
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(OTHER_COMMANDS))  # their imports fail, and `ray` goes on without them
    from ray._private import ray_constants, services
    from ray.scripts import scripts

    start = services.start_ray_process

    def start_ray_process(command: list[str], process_type: str, *arguments: Any, **options: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_DASHBOARD:
            command = [*command, DASHBOARD_MODULES]
        if process_type != ray_constants.PROCESS_TYPE_RAYLET or forks is None or forks.stdin is None:
            return start(command, process_type, *arguments, **options)
        command = [with_forks(option, programs / "setup_worker.py", address) for option in command]
        started = start(command, process_type, *arguments, **options)
        environment = {**os.environ, "RAY_RAYLET_PID": str(started.process.pid)}
        with suppress(BrokenPipeError):  # it has ended, and workers start as new processes
            print(json.dumps(environment), file=forks.stdin, flush=True)
        return started

    services.start_ray_process = start_ray_process
    scripts.get_ray_client_dependency_error = lambda: "not needed"  # pyright: ignore[reportPrivateImportUsage]
    scripts.main()


def start_forks(address: str, programs: Path) -> "subprocess.Popen[str]":
    """Start the process that forks workers. It answers at an abstract socket and has their `sys.path`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen(128)
        listens = listener.fileno()
        command = [sys.executable, "-c", _FORKS, str(listens), str(programs.resolve())]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listens], text=True)


def workers() -> Path:
    """Return the folder of the programs with which Ray starts workers, without importing Ray."""
    ray = find_spec("ray")
    assert ray and ray.origin
    return Path(ray.origin).parent / "_private" / "workers"


def with_forks(option: str, setup_worker: Path, address: str) -> str:
    """Return the raylet's option. In the command that starts a worker, `ray_worker` comes first."""
    python = f"--python_worker_command={subprocess.list2cmdline([sys.executable])} "
    if not option.startswith(python + subprocess.list2cmdline([str(setup_worker)])):
        return option
    asks = subprocess.list2cmdline(["-IS", str(Path(__file__).with_name("ray_worker.py")), address])
    return f"{python}{asks} {option.removeprefix(python)}"


if __name__ == "__main__":
    main()
