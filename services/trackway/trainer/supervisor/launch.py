"""The command line and the environment of a worker process."""

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from typing import IO


def worker_environment(secrets: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: the service's, with the variables of a run."""
    variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {"TQDM_DISABLE": "1", **os.environ, **variables, **secrets}


async def launch(arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None) -> Process:
    """Start a worker in a session of its own, with a pipe as standard input; without `output`, with the service's.

    Raises OSError when the system cannot start a process.
    """
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trackway.trainer.worker", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )
