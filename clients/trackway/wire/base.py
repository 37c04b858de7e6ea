"""The two bases of every wire model: requests refuse unknown fields, replies ignore them.

A caller's typo must be an error. A reply from a newer service must still be readable by an older client.

JSON has no NaN and no infinity. They are written as in proto3's JSON mapping, as the strings "NaN", "Infinity" and
"-Infinity", which a float field parses. pydantic's default, null, loses the value and fails validation on reading. Bare
constants are invalid JSON for JavaScript, jq and httpx.

Every list of a request sets `fail_fast`, because pydantic otherwise collects an error for every invalid item.
"""

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def well_formed(text: str) -> str:
    """The text with U+FFFD for each lone surrogate, which Python's strings can hold and UTF-8 cannot."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join(REPLACEMENT if "\ud800" <= char <= "\udfff" else char for char in text)
    return text


NON_FINITE: Literal["strings"] = "strings"
"""pydantic's `ser_json_inf_nan` of every model that is written as JSON, on the wire or into a file."""


def _no_bool(value: object) -> object:
    """Python's True is an int, and pydantic takes it for 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "expected a number, got {value}", {"value": str(value).lower()})
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
"""A whole number in a request. true and false are refused."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A number that is neither NaN nor infinite."""

Float = Annotated[Finite, BeforeValidator(_no_bool)]
"""A number in a request. true, false, NaN and the infinities are refused."""

FLOAT32_MAX = 3.4028234663852886e38

Score = Annotated[Float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]
"""A number in a request that is representable in float32, the learner's type."""

TokenId = Annotated[int, Strict()]
"""An item of a long list of whole numbers: true and false are refused, without a Python call per item."""


def _inside(path: str) -> str:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or not path.isprintable():
        message = "expected a path inside the folder, such as model.safetensors, got {path}"
        raise PydanticCustomError("relative_path", message, {"path": repr(path)[:200]})
    return path


RelativePath = Annotated[str, AfterValidator(_inside)]
"""A path of a file that stays inside the folder to which it is relative."""


def named_number(value: float) -> float | str:
    """The number, or its JSON string when it is not finite, for values that are serialised without a model."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class WireRequest(BaseModel):
    """A request body: unknown fields are refused."""

    model_config = ConfigDict(
        extra="forbid", populate_by_name=True, serialize_by_alias=True, ser_json_inf_nan=NON_FINITE
    )


class WireReply(BaseModel):
    """A response body, or a value inside one: unknown fields are ignored."""

    model_config = ConfigDict(
        extra="ignore", populate_by_name=True, serialize_by_alias=True, ser_json_inf_nan=NON_FINITE
    )
