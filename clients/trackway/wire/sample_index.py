"""The index of a dataset row, part of its trajectories' ids: a whole number, or text such as `django__django-11099`.

Text that is a whole number in Python's notation is that number: `"17"` and `17` are the same row, `"017"` is another.
"""

import re
from typing import Annotated

from pydantic import BeforeValidator

LONGEST_INDEX = 128
"""Most characters of a text index."""

_CANONICAL = re.compile(r"0|-?[1-9][0-9]{0,18}")
_INT64 = range(-(2**63), 2**63)
"""Range of whole numbers in dumps and trace backends."""


def sample_index(value: object) -> int | str:
    """The index given by a row or a user; None (a row without an index) is 0, as in verl.

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
