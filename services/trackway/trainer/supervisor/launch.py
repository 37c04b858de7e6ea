"""The command line, the environment and the secrets of a worker process."""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Iterable, Mapping, Sequence
from typing import IO

from trackway.trainer.assignment import Assignment


def worker_environment(secrets: Iterable[str]) -> dict[str, str]:
    """The environment of a worker: the service's, with the variables of a run, and blanks for these secrets.

    The names are there from the start: the worker may set them while another thread reads the environment.
    """
    variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {"TQDM_DISABLE": "1", **os.environ, **variables, **dict.fromkeys(secrets, "")}


async def launch(arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None) -> Process:
    """Start a worker in a session of its own, with a pipe as standard input; without `output`, with the service's.

    Its secrets follow by `send`. Raises OSError when the system cannot start a process.
    """
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trackway.trainer.worker", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )


def send(process: Process, assignment: Assignment) -> asyncio.StreamWriter:
    """Send a worker its run; does nothing when it has died. Returns its input."""
    assert process.stdin is not None
    with contextlib.suppress(RuntimeError):  # uvloop's, when it has died
        process.stdin.write(assignment.model_dump_json().encode() + b"\n")
    return process.stdin
