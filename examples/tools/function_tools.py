"""Tools from typed functions; signature and docstring become the JSON schema that the model sees.

TRACKWAY_FUNCTION_TOOL_PATH=examples/tools/function_tools.py uvicorn --factory trackway.tools.app:create_app
"""

from datetime import date
from typing import Literal

from pydantic import BaseModel, Field

from trackway.tools import ToolInputError, ToolResult, function_tool


class Stay(BaseModel):
    """One hotel stay."""

    city: str
    arrival: date
    nights: int = Field(ge=1)


@function_tool
def trip_price(stays: list[Stay], travellers: int = 1, season: Literal["low", "high"] = "low") -> dict[str, float]:
    """Price a trip.

    Args:
        stays: Where to sleep, in order.
        travellers: How many people travel.
        season: Prices double in the high one.
    """
    # Nested arguments arrive as what the signature says: `stay.arrival` is a date.
    nights = sum(stay.nights for stay in stays)
    return {"total": 80.0 * nights * travellers * (2 if season == "high" else 1)}


@function_tool("days_between")
async def days(start: date, end: date) -> ToolResult:
    """Count the days from one date to another.

    Args:
        start: First day.
        end: Last day; must not be earlier.
    """
    if end < start:
        raise ToolInputError(f"expected end on or after {start}, got {end}; swap them")
    return ToolResult(text=str((end - start).days), metrics={"days": (end - start).days})
