"""What the model is told about its calls: verl's texts and verl's truncation, which here can count tokens too."""

from collections.abc import Sequence
from dataclasses import dataclass

from trackway.wire.agent import Limits
from trackway.wire.trajectory import ToolCallRecord

Place = tuple[int, int]
"""Where a token lies in a text: its first character, and the one behind its last."""

_MARKERS = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}


@dataclass(frozen=True)
class Observation:
    """The answer to one call, and its step reward; None when the call was over the limit of its turn."""

    text: str
    reward: float | None = 0.0
    record: ToolCallRecord | None = None
    """What came of the call, if it reached its tool."""


def unknown_function(name: str, available: Sequence[str]) -> Observation:
    """The model called a tool that it was not offered."""
    return Observation(f"Unknown function '{name}'. Available tools: {list(available)}")


def failed_call(record: ToolCallRecord, message: str) -> Observation:
    """The tool refused the arguments or raised."""
    return Observation(f"Error executing tool '{record.tool}': {message}", record=record)


def not_run(name: str, max_parallel_calls: int) -> Observation:
    """The call came after `max_parallel_calls` others of its turn (verl drops it without a word)."""
    text = f"The call of '{name}' was not run: at most {max_parallel_calls} tool call(s) run in one turn."
    return Observation(text, reward=None)


def truncated(text: str, limits: Limits, tokens: Sequence[Place] = ()) -> str:
    """`text` within its bounds, plus a marker at the side that the limits name.

    `tokens` are where the tokens of `text` lie, to be given when `max_tool_response_tokens` is set.
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
    """Characters kept at the start and at the end; a text within its bound is kept whole from both sides."""
    return (length, length) if bound is None or length <= bound else _shares(side, bound)


def _kept_tokens(length: int, side: str, bound: int, tokens: Sequence[Place]) -> tuple[int, int]:
    """The same for a bound in tokens; a character of which only some tokens would be kept goes."""
    if len(tokens) <= bound:
        return length, length
    head, tail = _shares(side, bound)
    start = min(tokens[head - 1][1], tokens[head][0]) if head else 0
    end = length - tokens[-tail - 1][1] if tail else 0
    return start, end


def _shares(side: str, bound: int) -> tuple[int, int]:
    shares = {"left": (0, bound), "right": (bound, 0), "middle": (bound // 2, bound // 2)}
    return shares[side]
