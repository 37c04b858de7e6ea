"""What the model is told about its calls: verl's texts and verl's truncation."""

from collections.abc import Sequence
from dataclasses import dataclass

from trackway.wire.agent import Limits


@dataclass(frozen=True)
class Observation:
    """The answer to one call, and its step reward; None when the call was over the limit of its turn."""

    text: str
    reward: float | None = 0.0
    executed: bool = False
    """Whether the call reached its tool."""


def unknown_function(name: str, available: Sequence[str]) -> Observation:
    """The model called a tool that it was not offered."""
    return Observation(f"Unknown function '{name}'. Available tools: {list(available)}")


def failed_call(name: str, message: str) -> Observation:
    """The tool refused the arguments or raised."""
    return Observation(f"Error executing tool '{name}': {message}", executed=True)


def not_run(name: str, max_parallel_calls: int) -> Observation:
    """The call came after `max_parallel_calls` others of its turn (verl drops it without a word)."""
    text = f"The call of '{name}' was not run: at most {max_parallel_calls} tool call(s) run in one turn."
    return Observation(text, reward=None)


def truncated(text: str, limits: Limits) -> str:
    """`text` cut to `max_tool_response_length` characters plus a marker, at the side that the limits name."""
    size = limits.max_tool_response_length
    if len(text) <= size:
        return text
    match limits.tool_response_truncate_side:
        case "left":
            return "(truncated)..." + text[len(text) - size :]
        case "right":
            return text[:size] + "...(truncated)"
        case _:
            half = size // 2
            return text[:half] + "...(truncated)..." + text[len(text) - half :]
