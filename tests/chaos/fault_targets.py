"""The processes behind a target, as the operating system has them now: asking a service would need the service."""

import contextlib
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from signal import Signals

import psutil

from tests.chaos.fault_schedule import SERVICES, Fault, Target
from trackway.deploy.deployment.record import Deployment
from trackway.learner.ranks.launch import RANK_PROGRAM


def processes_of(target: Target, deployment: Deployment, run: Path) -> list[psutil.Process]:
    """The target's processes: of a service one replica, of MLflow the server and its children; empty for none."""
    if target is Target.WORKER:
        return workers(run)
    if target is Target.RANK:
        return [process for process in with_children(workers(run)) if RANK_PROGRAM in _command(process)][:1]
    if target is Target.MLFLOW:
        return mlflow_server(deployment)
    title = title_of(target)
    return [process for process in family(deployment, "ray") if title.match(_title(process))][:1]


def title_of(target: Target) -> re.Pattern[str]:
    """The title that Ray gives the process of a service's replica, of the proxy or of the controller.

    It ends with the method that runs, and may have the actor's name before its class: `ray::NAME:ProxyActor.ready`.
    """
    if target in SERVICES:
        return re.compile(rf"ray::ServeReplica:{target}:")
    return re.compile(rf"ray::(\S+:)?{'ProxyActor' if target is Target.PROXY else 'ServeController'}\b")


def family(deployment: Deployment, name: str) -> list[psutil.Process]:
    """The descendants of a process that `trackway up` started, by its name in the deployment's record."""
    for record in deployment.processes:
        if record.name == name and (process := record.find()) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                return process.children(recursive=True)
    return []


def mlflow_server(deployment: Deployment) -> list[psutil.Process]:
    """MLflow's server and its children, without their keeper."""
    return family(deployment, "mlflow")


def workers(run: Path) -> list[psutil.Process]:
    """The processes that train the run of this folder; their parent may be gone."""
    return [
        process
        for process in psutil.process_iter()
        if "trackway.trainer.worker" in (words := _command(process)) and str(run) in words
    ]


def with_children(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes and their descendants."""
    return [descendant for process in processes for descendant in _with_children(process)]


def stopped(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that a SIGSTOP holds."""
    return [process for process in processes if _status(process) == psutil.STATUS_STOPPED]


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    return [process for process in processes if _status(process) not in ("", psutil.STATUS_ZOMBIE)]


def send(fault: Fault, processes: Sequence[psutil.Process]) -> None:
    """Signal the processes; SIGCONT follows SIGSTOP before this returns, and whether or not this process lives on."""
    if fault.signal is not Signals.SIGSTOP:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(fault.signal)
        return
    pids = " ".join(str(process.pid) for process in processes)
    script = f"kill -STOP {pids}; sleep {fault.stop_s}; kill -CONT {pids}"
    subprocess.run(["sh", "-c", script], start_new_session=True, timeout=fault.stop_s + 30, stderr=subprocess.DEVNULL)


def _with_children(process: psutil.Process) -> Iterator[psutil.Process]:
    yield process
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from process.children(recursive=True)


def _title(process: psutil.Process) -> str:
    """Ray writes it over the command."""
    return " ".join(_command(process))


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _status(process: psutil.Process) -> str:
    """Empty for a process that is gone; another process may have its pid by now."""
    try:
        return process.status() if process.is_running() else ""
    except psutil.NoSuchProcess:
        return ""
