"""Workers of a local Ray are forks of one process, and start as new processes where a fork would differ."""

import inspect
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import psutil
import pytest
from ray._private import ray_constants, services
from ray._private.runtime_env.context import RuntimeEnvContext

from tests.waiting import until
from trackway.deploy.local import ray_forks, ray_head, ray_worker

WORKER = """
import json, os, random, resource, signal, sys, threading
import numpy, ray
state = {
    "pid": os.getpid(),
    "parent": os.getppid(),
    "leads its group": os.getpgid(0) == os.getpid(),
    "arguments": sys.argv,
    "path": sys.path[0],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "umask": os.umask(0o022),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "children": str(signal.getsignal(signal.SIGCHLD)),
    "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "out of memory": open("/proc/self/oom_score_adj").read(),
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "main": sys.modules["__main__"].__file__,
    "threads": threading.active_count(),
}
rolled = {"random": random.random(), "numpy": numpy.random.random()}
print("an error", file=sys.stderr)
print(json.dumps([state, rolled]), flush=True)
"""
SERVER = """
import sys
sys.path[0] = sys.argv[2]
from trackway.deploy.local import ray_forks
ray_forks.SERVICES, ray_forks.RAY = ["not_installed"], {modules}
ray_forks.main()
"""
SETUP_WORKER = "import sys; print('prepared', *sys.argv[1:], flush=True)"


class Forks:
    """A process to fork from, which has imported these modules, and a worker's program."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.folder, self.address = folder, f"test-{os.getpid()}-{folder.name}"
        self.program, self.setup = folder / "worker.py", folder / "setup_worker.py"
        self.asks = folder / "ray_worker.py"
        self.wait(200)  # busy cores need longer for the imports than a user's worker waits
        self.program.write_text(WORKER)
        self.setup.write_text(SETUP_WORKER)
        path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
        pipe = subprocess.PIPE
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{self.address}")
            listener.listen()
            listens = listener.fileno()
            command = [sys.executable, "-c", SERVER.format(modules=list(modules)), str(listens), str(folder)]
            self.server = subprocess.Popen(command, stdin=pipe, stderr=pipe, pass_fds=[listens], env=path, text=True)
        assert self.server.stdin
        print(json.dumps({"RAY_RAYLET_PID": "7"}), file=self.server.stdin, flush=True)
        self.environment = {**path, "RAY_RAYLET_PID": "7", **ray_forks.ANY_JOB}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> str:
        """End the process as its parent's end does, and return its errors."""
        self.server.send_signal(signal.SIGCONT)
        return self.server.communicate(timeout=60)[1]

    def wait(self, seconds: float) -> None:
        """Have the workers that start from now on wait this long for their fork."""
        own = inspect.getsource(ray_worker)
        changed = own.replace(f"FORK_S = {ray_worker.FORK_S}", f"FORK_S = {seconds}")
        assert changed != own
        self.asks.write_text(changed)

    def command(self, *arguments: str, address: str | None = None) -> list[str]:
        """Return the command with which the raylet starts a worker. Its last arguments are given."""
        start = [str(self.setup), str(self.program), "--worker-id=7", "--language=PYTHON"]
        return [sys.executable, "-IS", str(self.asks), address or self.address, *start, *arguments]

    def start(self, command: list[str], **variables: str) -> tuple[str, str]:
        """Return a worker's output and its errors. They are files, which a request that waits does not keep open."""
        output, errors = self.folder / "output", self.folder / "errors"
        with output.open("w") as out, errors.open("w") as err:
            environment, folder = {**self.environment, **variables}, self.folder
            subprocess.run(command, env=environment, cwd=folder, stdout=out, stderr=err, timeout=240, process_group=0)
            until(lambda: output.read_text().endswith("\n"))
        return output.read_text(), errors.read_text()

    def worker(self, *arguments: str, address: str | None = None, **variables: str) -> tuple[dict, dict]:
        """Return the state of a worker and its random numbers."""
        output, errors = self.start(self.command(*arguments, address=address), **variables)
        assert "an error" in errors, errors
        return tuple(json.loads(output))


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    with Forks(tmp_path, "numpy.random") as made:
        yield made


def context(**fields: object) -> str:
    return "--serialized-runtime-env-context=" + json.dumps({**vars(RuntimeEnvContext()), **fields})


def test_a_fork_is_as_a_new_process_would_be(forks: Forks) -> None:
    resource.prlimit(forks.server.pid, resource.RLIMIT_NOFILE, (500, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    before, mask = os.umask(0o027), signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        variables = {"RAY_JOB_ID": "01000000", "CUDA_VISIBLE_DEVICES": "7", "SPT_NOENV": "1"}
        forked, _ = forks.worker(**variables)
        new, _ = forks.worker(address="nowhere", **variables)
    finally:
        os.umask(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert (forked.pop("parent"), new.pop("parent")) == (forks.server.pid, os.getpid())
    assert forked.pop("pid") != new.pop("pid")
    assert forked == new
    assert new["arguments"] == [str(forks.program), "--worker-id=7"]
    assert (new["umask"], new["blocked"], new["environment"]["CUDA_VISIBLE_DEVICES"]) == (0o027, [signal.SIGINT], "7")


def test_a_fork_has_the_variables_of_its_runtime_environment(forks: Forks) -> None:
    forked, _ = forks.worker(context(env_vars={"CUDA_VISIBLE_DEVICES": "3"}))
    assert (forked["parent"], forked["environment"]["CUDA_VISIBLE_DEVICES"]) == (forks.server.pid, "3")


def test_forks_draw_different_random_numbers_and_leave_nothing_behind(forks: Forks) -> None:
    (_, first), (_, second) = forks.worker(), forks.worker()
    assert all(first[name] != second[name] for name in ("random", "numpy"))
    server = psutil.Process(forks.server.pid)
    opened = server.num_fds()
    for _ in range(5):
        assert forks.worker()[0]["parent"] == forks.server.pid
    until(lambda: server.children() == [])
    assert server.num_fds() == opened


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        ((), {"OMP_NUM_THREADS": "3"}, "its environment differs in OMP_NUM_THREADS"),
        ((), {"RAY_RAYLET_PID": "8"}, "its environment differs in RAY_RAYLET_PID"),
        ((context(env_vars={"FLAVOUR": "1"}),), {}, "its environment differs in FLAVOUR"),
        ((context(env_vars={"PATH": "/opt:${PATH}"}),), {}, "it has env_vars with $"),
        ((context(py_executable="uv run python"),), {}, "it has py_executable"),
        ((context(command_prefix=["cd", "/", "&&"]),), {}, "it has command_prefix"),
        ((context(override_worker_entrypoint="/other.py"),), {}, "it has override_worker_entrypoint"),
    ],
)
def test_a_worker_that_differs_starts_as_ray_starts_it(
    forks: Forks, arguments: tuple[str, ...], variables: dict[str, str], reason: str
) -> None:
    output, errors = forks.start(forks.command(*arguments), **variables)
    assert errors.splitlines()[0] == f"trackway: a worker starts as a new process instead of a fork: {reason}"
    if arguments:  # Ray's own `setup_worker.py` prepares it
        given = [str(forks.program), "--worker-id=7", "--language=PYTHON", *arguments]
        assert output == f"prepared {' '.join(given)}\n"
    else:
        state, _ = json.loads(output)
        assert (state["parent"], state["arguments"]) == (os.getpid(), [str(forks.program), "--worker-id=7"])


def test_a_worker_starts_as_a_new_process_once_an_imported_file_has_changed(tmp_path: Path) -> None:
    own = tmp_path / "own_code.py"
    own.write_text("")
    with Forks(tmp_path, "own_code") as forks:
        assert forks.worker()[0]["parent"] == forks.server.pid
        os.utime(own, (1, 1))
        output, errors = forks.start(forks.command())
        assert f"changed since they were imported: {own}\n" in errors
        assert json.loads(output)[0]["parent"] == os.getpid()


def test_a_worker_starts_as_a_new_process_where_an_import_starts_a_thread(tmp_path: Path) -> None:
    (tmp_path / "own_code.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    with Forks(tmp_path, "own_code") as forks:
        assert forks.worker()[0]["parent"] == os.getpid()
        assert "expected imports that start no threads" in forks.end()


def test_a_worker_starts_as_a_new_process_where_an_import_draws_an_id_of_ray(tmp_path: Path) -> None:
    (tmp_path / "own_code.py").write_text(
        "from ray._raylet import JobID, PlacementGroupID; PlacementGroupID.of(JobID.from_int(1))"
    )
    with Forks(tmp_path, "own_code") as forks:
        assert forks.worker()[0]["parent"] == os.getpid()
        assert "expected forks that draw ids of their own, got the same ids" in forks.end()


def test_forks_draw_different_ids_where_an_import_defines_an_actor(tmp_path: Path) -> None:
    """The next calls of two processes with the same ids would get each other's results."""
    (tmp_path / "own_code.py").write_text("import ray\n@ray.remote\nclass Actor: ...")
    with Forks(tmp_path, "own_code") as forks:
        forks.program.write_text(
            "import json, sys; from ray._raylet import JobID, PlacementGroupID; "
            "print('an error', file=sys.stderr); print(json.dumps([PlacementGroupID.of(JobID.from_int(1)).hex()]))"
        )
        assert forks.worker() != forks.worker()
        forks.program.write_text(WORKER)
        assert forks.worker()[0]["parent"] == forks.server.pid


def test_a_worker_starts_as_a_new_process_when_nothing_answers(tmp_path: Path) -> None:
    with Forks(tmp_path) as forks:
        forks.server.send_signal(signal.SIGSTOP)
        forks.wait(0.1)
        output, errors = forks.start(forks.command())
        assert errors.startswith(
            "trackway: a worker starts as a new process instead of a fork: TimeoutError: timed out\n"
        )
        assert json.loads(output)[0]["parent"] == os.getpid()
        forks.server.send_signal(signal.SIGCONT)
        forks.wait(200)
        assert forks.worker()[0]["parent"] == forks.server.pid


def test_no_worker_starts_for_a_process_that_has_ended(forks: Forks) -> None:
    """It may be killed, or tired of waiting, before it learns of its fork."""
    forks.program.write_text(f"open({str(forks.folder / 'started')!r}, 'w')")
    request = {
        "arguments": [str(forks.program)],
        "environment": forks.environment,
        "group": 0,
        "umask": 0,
        "blocked": [],
    }
    server = psutil.Process(forks.server.pid)
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(f"\0{forks.address}")
        socket.send_fds(asking, [b"\n"], [0, 1, 2])
        asking.sendall(json.dumps(request).encode() + b"\n")
        assert asking.recv(1) == b"\n"
        assert len(server.children()) == 1
    until(lambda: server.children() == [])
    assert not (forks.folder / "started").exists()


def test_forks_outlive_the_process_they_are_from_which_ends_with_its_parent(forks: Forks) -> None:
    forks.program.write_text("import sys, time; print('started', flush=True); time.sleep(600)")
    with subprocess.Popen(forks.command(), env=forks.environment, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout and started.stdout.readline() == "started\n"
        [fork] = psutil.Process(forks.server.pid).children()
        forks.end()
        assert (forks.server.returncode, fork.is_running()) == (0, True)
        fork.kill()


@pytest.mark.slow
def test_imports_leave_a_fork_free_to_become_any_worker(tmp_path: Path) -> None:
    """A new Ray may start threads, import torch, or draw the ids of its objects before a fork."""
    program = """
import json, sys
import ray
heavy = [name for name in ("torch", "transformers", "mlflow") if name in sys.modules]
print(json.dumps([{"heavy": heavy, "used": ray.is_initialized()}, {"ray": "ray.serve" in sys.modules}]))
print("an error", file=sys.stderr, flush=True)
"""
    with Forks(tmp_path, *ray_forks.SERVICES, *ray_forks.RAY) as forks:
        forks.program.write_text(program)
        assert forks.worker() == ({"heavy": [], "used": False}, {"ray": True})


@pytest.mark.parametrize("name", [*ray_forks.SERVICES, *ray_forks.RAY])
def test_each_module_that_is_imported_ahead_exists(name: str) -> None:
    assert find_spec(name), f"there is no {name}, so that each worker imports what came in its place"


def test_ray_starts_workers_with_the_command_that_is_changed_to_ask_for_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], str]] = []
    monkeypatch.setattr(services, "start_ray_process", lambda command, kind, **_: started.append((command, kind)))
    programs = ray_head.workers()
    parameters = inspect.signature(services.start_raylet).parameters
    arguments: dict[str, Any] = {
        **{name: "given" for name, parameter in parameters.items() if parameter.default is parameter.empty},
        "node_manager_port": 1,
        "setup_worker_path": str(programs / "setup_worker.py"),
        "worker_path": str(programs / "default_worker.py"),
        "resource_and_label_spec": SimpleNamespace(to_resource_dict=dict, labels={}, num_cpus=1),
        "resource_isolation_config": SimpleNamespace(is_enabled=lambda: False),
    }
    services.start_raylet(**arguments)
    [(command, kind)] = started
    assert kind == ray_constants.PROCESS_TYPE_RAYLET
    changed = [ray_head.with_forks(option, programs / "setup_worker.py", "here") for option in command]
    [worker] = [new for old, new in zip(command, changed, strict=True) if old != new]
    asks = ["-IS", ray_worker.__file__, "here", str(programs / "setup_worker.py"), str(programs / "default_worker.py")]
    assert shlex.split(worker)[:6] == [f"--python_worker_command={sys.executable}", *asks]


def test_ray_prepares_no_worker_in_a_way_that_forks_do_not_know() -> None:
    """`ray_worker` applies the first two, and starts a new process for the others."""
    known = {"env_vars", "py_executable", "command_prefix", "override_worker_entrypoint", "java_jars"}
    assert vars(RuntimeEnvContext()).keys() == known


def test_the_head_imports_no_commands_of_ray_that_it_does_not_run() -> None:
    program = "import runpy, sys; sys.argv = ['ray', '--version']; module = 'trackway.deploy.local.ray_head'; "
    program += "import atexit; atexit.register(lambda: print('pandas' in sys.modules, 'fastapi' in sys.modules)); "
    program += "runpy.run_module(module, run_name='__main__')"
    command, path = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=path, capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines()[1:] == ["False False"], ended.stderr
