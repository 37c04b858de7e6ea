"""A dataset row's index, by which its trajectories are named: a whole number, or text such as `django__django-11099`.

One spelling is one index: text that is a whole number as Python writes it is that number, so `"17"` and `17` are the
same row, and `"017"` is another one.
"""

import re
from typing import Annotated

from pydantic import BeforeValidator

LONGEST_INDEX = 128
"""Characters of an index that is text."""

_CANONICAL = re.compile(r"0|-?[1-9][0-9]{0,18}")
_INT64 = range(-(2**63), 2**63)
"""What dumps and trace backends keep as a number."""


def sample_index(value: object) -> int | str:
    """The index that a row or a person means; None, as where a row has none, is 0, as in verl.

    Raises ValueError for what is no index: a truth value, a fraction, a list, text that is empty, too long or does not
    print.
    """
    if value is None:
        return 0
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # tables turn a column of whole numbers with gaps into floats
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
