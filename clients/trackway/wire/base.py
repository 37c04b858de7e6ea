"""The two bases of every wire model: requests refuse unknown fields, replies ignore them.

A caller's typo must be an error; a reply from a newer service must still be readable by an older client.

JSON has no NaN and no infinity. They are written as proto3's JSON mapping does, as the strings "NaN", "Infinity" and
"-Infinity", and a float reads them back. pydantic's default, null, loses which of them it was and is refused on
reading; bare constants are no JSON to JavaScript, jq and httpx.

Every list of a request says `fail_fast`: pydantic otherwise collects an error for each wrong item, however many.
"""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

NON_FINITE: Literal["strings"] = "strings"
"""pydantic's `ser_json_inf_nan` of every model that is written as JSON, on the wire or into a file."""


def _no_bool(value: object) -> object:
    """Python's True is an int, and pydantic takes it for 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "expected a number, got {value}", {"value": str(value).lower()})
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
"""A whole number in a request; true and false are refused."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A number that is neither NaN nor infinite."""

Float = Annotated[Finite, BeforeValidator(_no_bool)]
"""A number in a request; true, false, NaN and the infinities are refused."""

TokenId = Annotated[int, Strict()]
"""One of many whole numbers: refuses true and false too, and costs no call of Python for each."""


def named_number(value: float) -> float | str:
    """The number, or its name in JSON when it is not finite: for what is written without a model."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class WireRequest(BaseModel):
    """A body that a client sends: an unknown field is refused."""

    model_config = ConfigDict(
        extra="forbid", populate_by_name=True, serialize_by_alias=True, ser_json_inf_nan=NON_FINITE
    )


class WireReply(BaseModel):
    """A body that a service sends, or a value inside one: unknown fields are ignored."""

    model_config = ConfigDict(
        extra="ignore", populate_by_name=True, serialize_by_alias=True, ser_json_inf_nan=NON_FINITE
    )
