"""Secrets in a process's environment and memory."""

import ctypes
import logging
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

logger = logging.getLogger("trackway.system")

_PR_SET_DUMPABLE = 4
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
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


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
