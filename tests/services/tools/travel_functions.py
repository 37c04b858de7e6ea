"""Functions as tools, in each docstring style; loaded as a file and by import path."""

from __future__ import annotations

import threading
from typing import Literal

from pydantic import BaseModel, Field, field_validator

from trackway.tools import ToolInputError, function_tool


class Leg(BaseModel):
    """One flight."""

    title: str
    hours: float = Field(gt=0)
    stops: list[Leg] = []

    @field_validator("title")
    @classmethod
    def _spoken(cls, title: str) -> str:
        if not title.strip():
            raise ValueError("expected a title, got spaces")
        return title


@function_tool
def plan(legs: list[Leg], json: dict[str, int], pace: Literal["slow", "fast"] = "slow", limit: int | None = None):
    """Plan a journey.

    The longest leg decides.

    Args:
        legs: The flights, in order.
        json (dict): Weights
            by name.
        pace: How to travel.
    """
    assert all(isinstance(leg, Leg) for leg in legs)
    return {"hours": sum(leg.hours for leg in legs), "pace": pace, "limit": limit, "weights": json}


@function_tool("whereabouts")
async def place(city: str) -> str:
    """Find a city.

    Parameters
    ----------
    city : str
        Its name.
    """
    return f"{city} on {threading.current_thread().name}"


@function_tool()
def thread_name(city: str) -> tuple[str, float, dict[str, float]]:
    """Name the thread.

    :param city: ignored
    """
    if city == "nowhere":
        raise ToolInputError("expected a city")
    return threading.current_thread().name, 0.5, {"calls": 1}
