"""Long-lived child processes: started apart from the terminal, remembered with their start time, stopped as a tree."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from pydantic import BaseModel

from trackway.system.user_error import UserError

_children: list[subprocess.Popen[bytes]] = []
"""Kept so that Python does not complain of a child it forgot; they outlive us on purpose."""


class ProcessRecord(BaseModel):
    """A process we started; the start time tells it from a later one with the same pid."""

    name: str
    pid: int
    started: float
    log: Path

    def find(self) -> psutil.Process | None:
        """The process if it still runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 1.0
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def start(name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> ProcessRecord:
    """Start a process in its own session, output to `log`, so that Ctrl-C in our terminal reaches only us."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children.append(process)
    return ProcessRecord(name=name, pid=process.pid, started=psutil.Process(process.pid).create_time(), log=log)


def check_alive(record: ProcessRecord) -> None:
    """Raise UserError with the end of the log when the process is gone."""
    if record.find() is None:
        raise UserError(f"{record.name} ended while it started; the end of {record.log}:\n{tail(record.log)}")


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no log)"


def stop_tree(record: ProcessRecord, grace_s: float = 8.0) -> None:
    """End a process and all its descendants at once: politely first, by force after `grace_s` seconds."""
    main = record.find()
    if main is not None:
        tree = [*main.children(recursive=True), main]
        _signal(tree, kill=False)
        _, alive = psutil.wait_procs(tree, timeout=grace_s)
        _signal(alive, kill=True)
        psutil.wait_procs(alive, timeout=5.0)
    for child in _children:
        child.poll()


def _signal(processes: Sequence[psutil.Process], kill: bool) -> None:
    for process in processes:
        try:
            process.kill() if kill else process.terminate()
        except psutil.NoSuchProcess:
            continue
