"""Telling what the model did wrong from what the infrastructure did wrong.

What the model did (bad arguments, a tool that raised or was too slow) becomes an observation. What the infrastructure
did is raised and ends the trajectory, so that it never reaches the context (verl puts both into it, verl #6978).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tracing import Incident

_TOLD_TO_THE_MODEL = {ErrorCode.INVALID_REQUEST, ErrorCode.PAYLOAD_TOO_LARGE, ErrorCode.TOOL_FAILED}


class CallFailed(Exception):
    """The tool answered that this call cannot be run; the model is told."""

    def __init__(self, error: TrackwayError) -> None:
        super().__init__(error.message)
        self.error = error

    @property
    def too_slow(self) -> bool:
        """Whether the tool's own time limit cut it off."""
        return self.error.code is ErrorCode.DEADLINE_EXCEEDED

    @property
    def incident(self) -> Incident:
        """Too slow, or anything else."""
        return Incident.TOOL_TIMEOUT if self.too_slow else Incident.TOOL_FAILED


@contextmanager
def faults_of_the_call() -> Iterator[None]:
    """CallFailed for errors of the call itself; a deadline that names the tool is that tool's own limit."""
    try:
        yield
    except TrackwayError as error:
        too_slow = error.code is ErrorCode.DEADLINE_EXCEEDED and "tool" in error.detail
        if too_slow or error.code in _TOLD_TO_THE_MODEL:
            raise CallFailed(error) from error
        raise
