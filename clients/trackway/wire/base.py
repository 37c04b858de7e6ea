"""The bases of every wire model, and the types of their fields: numbers, paths, names, indices of dataset rows.

Requests refuse unknown fields, because a caller's typo must be an error. Replies ignore them, so that an older client
can read the reply of a newer service.

JSON has no NaN and no infinity. They are written as in proto3's JSON mapping, as the strings "NaN", "Infinity" and
"-Infinity", which a float field parses. pydantic's default, null, loses the value and fails validation on reading. Bare
constants are invalid JSON for JavaScript, jq and httpx.

Every list of a request sets `fail_fast`, because pydantic otherwise collects an error for every invalid item.

A run's name is a folder and the first part of each trajectory's id: letters and digits of any script, without spaces
and slashes. The label of a project or an experiment is only displayed and sent to a backend, so it may have those.

The index of a dataset row is part of its trajectories' ids: a whole number, or text such as `django__django-11099`.
Text that is a whole number in Python's notation is that number: `"17"` and `17` are the same row, `"017"` is another.
"""

import math
import re
import unicodedata
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, StringConstraints
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


def is_none(value: object) -> bool:
    """Return whether a field is None, for `exclude_if`."""
    return value is None


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


LONGEST_INDEX = 128
"""Most characters of a text index."""

_CANONICAL = re.compile(r"0|-?[1-9][0-9]{0,18}")
_INT64 = range(-(2**63), 2**63)
"""Range of whole numbers in dumps and trace backends."""


def sample_index(value: object) -> int | str:
    """The index given by a row or a user. None (a row without an index) is 0, as in verl.

    Raises ValueError for anything else: a boolean, a fraction, a list, or text that is empty, too long or unprintable.
    """
    if value is None:
        return 0
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas turns a column of whole numbers with gaps into floats
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value in _INT64 else sample_index(str(value))
    if isinstance(value, str) and 1 <= len(value) <= LONGEST_INDEX and value.isprintable():
        is_number = _CANONICAL.fullmatch(value) is not None and int(value) in _INT64
        return int(value) if is_number else value
    shown = ascii(value)
    raise ValueError(
        f"expected a whole number or 1 to {LONGEST_INDEX} printable characters, got "
        + (shown if len(shown) <= LONGEST_INDEX else f"{shown[:40]}... ({type(value).__name__})")
    )


SampleIndex = Annotated[int | str, BeforeValidator(sample_index)]


LONGEST_RUN_NAME = 128
"""Most bytes of a run's name in UTF-8."""
RESERVED_NAMES = frozenset({"mlflow", "spool", "weights"})
"""Folders of an outputs folder that are not runs."""
LONGEST_LABEL = 256
"""Characters."""


def checked_run_name(name: str) -> str:
    """The name, if it is valid for a run. Raises ValueError otherwise."""
    fits = 1 <= len(name) <= LONGEST_RUN_NAME and name[0].isalnum() and all(map(_in_a_run_name, name))
    if not fits or len(name.encode()) > LONGEST_RUN_NAME:
        raise ValueError(
            f"expected a run name of letters, digits, '.', '_' and '-' that begins with a letter or a digit and has at "
            f"most {LONGEST_RUN_NAME} bytes, got {_shown(name)}; rename it"
        )
    if name in RESERVED_NAMES:
        raise ValueError(f"expected a run name other than {', '.join(sorted(RESERVED_NAMES))}, got {name!r}; rename it")
    return name


def checked_policy_name(name: str) -> str:
    """The name, if a policy can have it: a run's, or a run's and a step as `run:8`. Raises ValueError otherwise."""
    run, colon, step = name.partition(":")
    checked_run_name(run)
    if colon and not (step.isascii() and step.isdecimal()):
        raise ValueError(f"expected the name of a run, or a run and a step as run:8, got {_shown(name)}; rename it")
    return name


def functions_file_of(run: str) -> str:
    """The name of the file that says where a run's functions of a Python process are."""
    return f"functions-{checked_run_name(run)}.json"


def run_of_functions(file: str) -> str:
    """The run of such a file, or empty for any other file."""
    return file.removeprefix("functions-").removesuffix(".json") if re.fullmatch(r"functions-.+\.json", file) else ""


def checked_label(label: str) -> str:
    """The label, if it is valid for a project or an experiment. Raises ValueError otherwise."""
    parts = re.split(r"[/\\]", label)
    if not 1 <= len(label) <= LONGEST_LABEL or label != label.strip() or not label.isprintable() or ".." in parts:
        raise ValueError(
            f"expected a name of 1 to {LONGEST_LABEL} printable characters without spaces at its ends and without "
            f"'..' as a part, got {_shown(label)}; rename it"
        )
    return label


RunName = Annotated[str, AfterValidator(checked_run_name)]
PolicyName = Annotated[str, AfterValidator(checked_policy_name)]
RunNameInPath = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_RUN_NAME, pattern=r"^\w[\w.-]*$")]
"""Shows a pattern in OpenAPI. The complete rule, with a better message, is checked after it."""
Label = Annotated[str, AfterValidator(checked_label)]


def _in_a_run_name(character: str) -> bool:
    """Return whether the character is a letter, a digit, a combining mark, `.`, `_` or `-`."""
    return character.isalnum() or character in "._-" or unicodedata.category(character) in ("Mn", "Mc")


def _shown(name: str) -> str:
    """The beginning of the name in ASCII, for logs."""
    return ascii(name) if len(name) <= LONGEST_LABEL else f"{name[:40]!a} of {len(name)} characters"
