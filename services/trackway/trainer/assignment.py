"""A run and its secrets, for its worker: one line of JSON on standard input, which only the worker can read."""

import os
import select
import sys
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

EXIT_UNUSED = 1
"""A worker that got no run. If a run was sent too late, its supervisor restarts it as after a crash."""


class Assignment(BaseModel):
    """Inputs of a worker besides the run's folder."""

    model_config = ConfigDict(hide_input_in_errors=True)

    arguments: list[str]
    """The worker's command line arguments."""
    log: Path
    """File that its standard output and error are appended to."""
    environment: dict[str, str]
    """Environment variables of the run, secrets included."""


def receive(deadline_s: float) -> list[str]:
    """Wait for a run and return its arguments. Its log and its environment are in place then.

    Ends the process when standard input closes first, or after `deadline_s`.
    """
    line = b""
    end = time.monotonic() + deadline_s
    while not line.endswith(b"\n"):  # nothing follows the line: from then on the input only closes
        readable, _, _ = select.select([0], [], [], max(0.0, end - time.monotonic()))
        received = os.read(0, 65536) if readable else b""
        if not received:
            os._exit(EXIT_UNUSED)  # at once, while another thread may be inside an import
        line += received
    assignment = Assignment.model_validate_json(line)
    os.environ.update(assignment.environment)
    _redirect_output(assignment.log)
    return assignment.arguments


def _redirect_output(log: Path) -> None:
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
