"""Separates the model's faults from those of the infrastructure.

A fault of the call (bad arguments, a tool that raised or timed out) becomes an observation. A fault of the
infrastructure is raised and ends the trajectory, so it never enters the context (verl adds both, verl #6978).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tracing import Incident

_SHOWN_TO_THE_MODEL = {ErrorCode.INVALID_REQUEST, ErrorCode.PAYLOAD_TOO_LARGE, ErrorCode.TOOL_FAILED}


class CallFailed(Exception):
    """The tool could not run this call; the message becomes an observation."""

    def __init__(self, error: TrackwayError) -> None:
        super().__init__(error.message)
        self.error = error

    @property
    def too_slow(self) -> bool:
        """Whether the call exceeded the tool's time limit."""
        return self.error.code is ErrorCode.DEADLINE_EXCEEDED

    @property
    def incident(self) -> Incident:
        """The incident to record: a time-out or a tool error."""
        return Incident.TOOL_TIMEOUT if self.too_slow else Incident.TOOL_FAILED


@contextmanager
def faults_of_the_call() -> Iterator[None]:
    """Raises CallFailed for errors of the call itself, a time-out of the tool included."""
    try:
        yield
    except TrackwayError as error:
        too_slow = error.code is ErrorCode.DEADLINE_EXCEEDED and "tool" in error.detail
        if too_slow or error.code in _SHOWN_TO_THE_MODEL:
            raise CallFailed(error) from error
        raise
