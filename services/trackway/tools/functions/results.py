"""Converts the return value of a function, or of a tool written for verl, to a ToolResult."""

import math
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from pydantic_core import PydanticSerializationError, to_json

from trackway.wire.text import well_formed
from trackway.wire.tools import ToolResult

_SURROGATE = "UnicodeEncodeError: 'utf-8' codec can't encode"
"""The start of pydantic's message for a lone surrogate."""


@runtime_checkable
class Response(Protocol):
    """verl's ToolResponse: text, and images or videos, which are replaced by a marker."""

    text: str | None
    image: list[object] | None
    video: list[object] | None


def result_of(returned: object) -> ToolResult:
    """text | JSON | ToolResult | (response[, reward[, metrics]]); a reward or metrics of None counts as missing.

    TypeError for a tuple of another length, or a reward or metrics of another type.
    """
    if isinstance(returned, ToolResult):
        return returned
    if not isinstance(returned, tuple):
        return ToolResult(text=text_of(returned))
    if not 1 <= len(returned) <= 3:
        raise TypeError(f"expected (response[, reward[, metrics]]), got {len(returned)} values: {returned!r}")
    response, reward, metrics = (*returned, None, None)[:3]
    if reward is not None and not isinstance(reward, int | float):
        raise TypeError(f"expected a number as the reward, got {reward!r}; return (response, reward, metrics)")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"expected a dict as the metrics, got {metrics!r}; return (response, reward, metrics)")
    return ToolResult(text=text_of(response), reward=float(reward or 0.0), metrics=numbers_of(metrics or {}))


def text_of(response: object) -> str:
    """Returns text unchanged and anything else as JSON; errors of an iterator are raised."""
    if isinstance(response, str):
        return response
    if isinstance(response, ToolResult):
        return response.text
    if isinstance(response, Response):
        markers = ["[image]"] * len(response.image or []) + ["[video]"] * len(response.video or [])
        return "\n".join(([response.text] if response.text else []) + markers)
    if isinstance(response, Iterator):
        response = list(response)
    try:
        return to_json(response).decode()
    except PydanticSerializationError as error:
        if _SURROGATE not in str(error):
            raise
        return to_json(_well_formed(response)).decode()


def _well_formed(value: object) -> object:
    """Removes lone surrogates from dicts, lists and texts; anything else is unchanged."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, Mapping):
        return {_well_formed(key): _well_formed(item) for key, item in value.items()}
    return [_well_formed(item) for item in value] if isinstance(value, list | tuple) else value


def numbers_of(metrics: Mapping[object, object]) -> dict[str, float]:
    """The numeric, finite metrics, which can be summed. verl's tools may also return texts and None."""
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
