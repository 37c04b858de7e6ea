"""The command line, the environment and the secrets of a worker process."""

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from typing import IO


async def launch(arguments: Sequence[str], secrets: Mapping[str, str], output: IO[bytes]) -> Process:
    """Start a worker in a session of its own, with a pipe as standard input, from which it reads its secrets.

    Its environment has blanks for them, since other processes of the same user can read it. Raises OSError when the
    system cannot start a process.
    """
    variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trackway.trainer.worker", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=output,
        stderr=output,
        env={"TQDM_DISABLE": "1", **os.environ, **variables, **dict.fromkeys(secrets, "")},
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(RuntimeError):  # uvloop's, when it has died
        process.stdin.write(json.dumps(dict(secrets)).encode() + b"\n")
    return process
