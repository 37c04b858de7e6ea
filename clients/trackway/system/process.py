"""Helpers for the running process: log format, secrets, CPU threads, free ports, context values and user errors.

Log records escape control characters themselves, so that input with a newline cannot forge a log line. This covers
every logger and handler of the process, including Ray's and uvicorn's.
"""

import ctypes
import logging
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from random import SystemRandom
from typing import Any, Generic, TypeVar

from trackway.wire.errors import shortened


def visible(text: str, keep: str = "") -> str:
    """The text with unprintable characters as Python escapes: `\\n`, `\\x1b`, `\\u202e`.

    It stays on its line and cannot colour or reorder its surroundings. Characters in `keep` are left unchanged.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


MAX_CHARS = 16_384
"""Longest message and longest traceback of a record in characters. A longer one loses its middle."""
_INDENT = "  "
"""Indentation of tracebacks, whose last lines are the exception's text and may look like log lines."""


class _Escaping(logging.LogRecord):
    def getMessage(self) -> str:
        return visible(shortened(super().getMessage(), MAX_CHARS))


def escape_log_records() -> None:
    """Escape control characters in every further log record of this process."""
    make = logging.getLogRecordFactory()
    if not isinstance(make, _Factory):
        logging.setLogRecordFactory(_Factory(make))


class _Factory:
    """Ray wraps this factory in its own, and this one wraps the factory that was installed before it."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: object, **kwargs: object) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        record.__class__ = _escaping(type(record))
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            text = shortened("".join(traceback.format_exception(*record.exc_info)), MAX_CHARS)
            lines = text.rstrip("\n").split("\n")
            record.exc_text = "\n".join(_INDENT + visible(line) for line in lines)
        return record


@lru_cache(maxsize=16)
def _escaping(kind: type[logging.LogRecord]) -> type[logging.LogRecord]:
    if issubclass(kind, _Escaping):
        return kind
    return _Escaping if kind is logging.LogRecord else type(kind.__name__, (_Escaping, kind), {})


logger = logging.getLogger("trackway.system")

_SECRETS = re.compile(
    r"TRACKWAY_\w+|RAY_AUTH_TOKEN|WANDB_API_KEY|MLFLOW_TRACKING_\w+|OTEL_EXPORTER_OTLP_(TRACES_)?HEADERS"
)
"""Variables in which Trackway takes secrets. Any of its settings may hold one."""


def refuse_inspection() -> None:
    """Keep other processes of this user from reading this one's environment and memory, on Linux. Root still can.

    A program that is executed later can be read again: start it `without_secrets`. Debuggers and py-spy need root, and
    there are no core dumps. A process that shares GPU memory with others must not call this: CUDA IPC fetches file
    descriptors by pidfd_getfd, which needs the same permission as a debugger.
    """
    if sys.platform == "linux":
        set_dumpable = 4
        ctypes.CDLL(None).prctl(set_dumpable, 0, 0, 0, 0)


def read_secret(path: Path, setting: str) -> bytes:
    """The content of the file that this setting names. Warns once if all users can read it. Raises OSError."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o004:
            _warn_of_readers(path, setting)
        return file.read()


@cache
def _warn_of_readers(path: Path, setting: str) -> None:
    logger.warning("%s %s: every user of this machine can read it; chmod o-r (defaultMode: 0400)", setting, path)


def secrets_in(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables in which Trackway takes secrets."""
    return {name: value for name, value in environment.items() if _SECRETS.fullmatch(name)}


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The other variables, for a program that calls none of our services.

    Libraries' own credentials stay, such as HF_TOKEN and AWS's: a server of vLLM loads its model with them.
    """
    return {name: value for name, value in environment.items() if not _SECRETS.fullmatch(name)}


LARGE_MODEL = 2_000_000
"""Parameters from which a second thread pays: on two cores it made an update 0.92 to 0.99 times as fast at 0.23 million
parameters, 1.08 to 1.25 times at 0.92 million and 1.21 to 1.48 times from 5 million on."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota_file: Path = _QUOTA) -> int:
    """The cores that this process may use: those it is bound to, or fewer by a container's CPU limit."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
    except (OSError, ValueError):
        return bound
    return bound if quota == "max" else max(1, min(bound, int(quota) // int(period)))


def choose_threads(parameters: int, cores: int, taken: int = 0) -> int:
    """One thread for a small model, else all cores but those `taken` by another that computes at the same time."""
    return max(1, cores - taken) if parameters >= LARGE_MODEL else 1


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


class Experimental(StrEnum):
    """Reason why a feature is experimental, as its setting and guide say it."""

    GPU = "no engine or learner has run on a GPU"
    SEVERAL_GPUS = "no engine has run on several GPUs"
    SLEEP = "no engine has slept on a GPU"
    IPC = "no weights have come by CUDA IPC"
    NCCL = "no ranks have run on GPUs"
    OFFLOAD = "no weights have been offloaded from a GPU"
    WANDB = "nothing has been sent to W&B's own servers"
    DOCKER = "no container has run by docker"


@cache
def warn_experimental(feature: Experimental) -> None:
    """Log that this process uses the feature, once."""
    logging.getLogger("trackway").warning("experimental: %s", feature)


class UserError(Exception):
    """An error that the user can fix. The message says what was expected, what was found, and the remedy."""


T = TypeVar("T")


class ContextValue(Generic[T]):
    """Sets the variable inside the block, which gets the value. Takes a third of the time of a generator."""

    def __init__(self, variable: ContextVar[Any], value: T) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> T:
        self._token = self._variable.set(self._value)
        return self._value

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)
