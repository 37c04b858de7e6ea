"""User files: unknown keys are rejected, variables replaced, problems reported in one line."""

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
    """Each invalid key with what was expected."""
    return "; ".join(_problem(detail) for detail in error.errors(include_url=False, include_input=False))


def _problem(detail: ErrorDetails) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    message = "expected this key, got none" if detail["type"] == "missing" else detail["msg"]
    message = message.removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def filled(value: object, pattern: re.Pattern[str]) -> object:
    """`value` with each match of the pattern's `name` (or its `default`) replaced in its texts, recursively.

    LookupError when a variable is not set and has no default.
    """
    if isinstance(value, dict):
        return {key: filled(item, pattern) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, pattern) for item in value]
    return pattern.sub(_from_environment, value) if isinstance(value, str) else value


def _from_environment(match: re.Match[str]) -> str:
    value = os.environ.get(match["name"], match["default"])
    if value is None:
        raise LookupError(f"expected the environment variable {match['name']}, got none; set it or give a default")
    return value
