"""Observations: which errors of a call become one, the texts and truncation of verl, and truncation by tokens.

A fault of the call (bad arguments, a tool that raised or timed out) becomes an observation. A fault of the
infrastructure is raised and ends the trajectory, so it never enters the context (verl adds both, verl #6978).
`trackway.wire.errors.ERRORS` says which is which.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from trackway.wire.agent import Limits
from trackway.wire.errors import ErrorCode, ModelSees, TrackwayError
from trackway.wire.tracing import Incident
from trackway.wire.trajectory import ToolCallRecord

CharSpan = tuple[int, int]
"""Start and end offset of a token's characters in a text."""

_MARKERS = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}


class CallFailed(Exception):
    """The tool could not run this call. The message becomes an observation."""

    def __init__(self, error: TrackwayError) -> None:
        super().__init__(error.message)
        self.error = error

    @property
    def too_slow(self) -> bool:
        """Return whether the call exceeded the tool's time limit."""
        return self.error.code is ErrorCode.TOOL_TIMEOUT

    @property
    def incident(self) -> Incident:
        """The incident to record: a time-out or a tool error."""
        return Incident.TOOL_TIMEOUT if self.too_slow else Incident.TOOL_FAILED


@contextmanager
def faults_of_the_call() -> Iterator[None]:
    """Raises CallFailed for errors of a call that the model may read, including a time-out of the tool."""
    try:
        yield
    except TrackwayError as error:
        if error.model_sees is ModelSees.YES:
            raise CallFailed(error) from error
        raise


@dataclass(frozen=True)
class Observation:
    """The result of one call and its step reward, or None for a call beyond the turn's limit."""

    text: str
    reward: float | None = 0.0
    record: ToolCallRecord | None = None
    """The record of the call, if it reached its tool."""


def unknown_function(name: str, available: Sequence[str]) -> Observation:
    """The observation for a tool that was not offered."""
    return Observation(f"Unknown function '{name}'. Available tools: {list(available)}")


def failed_call(record: ToolCallRecord, message: str) -> Observation:
    """The observation for a call that the tool rejected or that raised."""
    return Observation(f"Error executing tool '{record.tool}': {message}", record=record)


def not_run(name: str, max_parallel_calls: int) -> Observation:
    """The observation for a call beyond the turn's `max_parallel_calls` (verl drops it silently)."""
    text = f"The call of '{name}' was not run: at most {max_parallel_calls} tool call(s) run in one turn."
    return Observation(text, reward=None)


def truncated(text: str, limits: Limits, tokens: Sequence[CharSpan] = ()) -> str:
    """`text` truncated to its limits, with a marker on the truncated side.

    `tokens` are the character offsets of its tokens, required when `max_tool_response_tokens` is set.
    """
    side = limits.tool_response_truncate_side
    kept = [_kept_characters(len(text), side, limits.max_tool_response_length)]
    if limits.max_tool_response_tokens is not None:
        kept.append(_kept_tokens(len(text), side, limits.max_tool_response_tokens, tokens))
    start, end = min(head for head, _ in kept), min(tail for _, tail in kept)
    if max(start, end) >= len(text):
        return text
    return f"{text[:start]}{_MARKERS[side]}{text[len(text) - end :]}"


def _kept_characters(length: int, side: str, bound: int | None) -> tuple[int, int]:
    """Characters kept at the start and at the end. Both equal the length when nothing is truncated."""
    return (length, length) if bound is None or length <= bound else _shares(side, bound)


def _kept_tokens(length: int, side: str, bound: int, tokens: Sequence[CharSpan]) -> tuple[int, int]:
    """The same for a limit in tokens. A character that is only partly kept is dropped."""
    if len(tokens) <= bound:
        return length, length
    head, tail = _shares(side, bound)
    start = min(tokens[head - 1][1], tokens[head][0]) if head else 0
    end = length - tokens[-tail - 1][1] if tail else 0
    return start, end


def _shares(side: str, bound: int) -> tuple[int, int]:
    shares = {"left": (0, bound), "right": (bound, 0), "middle": (bound // 2, bound // 2)}
    return shares[side]
