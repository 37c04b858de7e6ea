"""Files that users write: unknown keys are refused, variables filled in, what is wrong is said in one line."""

import os
import re

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails


class UserEntry(BaseModel):
    """A section of a user's file: an unknown key is an error that lists the known ones."""

    # A message must not quote a token.
    model_config = ConfigDict(hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, raw: object) -> object:
        unknown = sorted(map(str, set(raw) - set(cls.model_fields))) if isinstance(raw, dict) else []
        if unknown:
            raise ValueError(f"expected keys out of {', '.join(cls.model_fields)}, got {', '.join(unknown)}")
        return raw


def problems_of(error: ValidationError) -> str:
    """Each wrong place and what was expected there."""
    return "; ".join(_problem(one) for one in error.errors(include_url=False, include_input=False))


def _problem(detail: ErrorDetails) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    message = "expected this key, got none" if detail["type"] == "missing" else detail["msg"]
    message = message.removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def filled(value: object, pattern: re.Pattern[str]) -> object:
    """`value` with each match of the pattern's `name` (or its `default`) in its texts replaced, also inside.

    LookupError when a variable is not set and has no default.
    """
    if isinstance(value, dict):
        return {key: filled(one, pattern) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, pattern) for one in value]
    return pattern.sub(_from_environment, value) if isinstance(value, str) else value


def _from_environment(found: re.Match[str]) -> str:
    value = os.environ.get(found["name"], found["default"])
    if value is None:
        raise LookupError(f"expected the environment variable {found['name']}, got none; set it or give a default")
    return value
