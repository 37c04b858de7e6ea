"""GSM8K scoring: find the final answer in a text and compare it with the ground truth.

`strict` and `flexible` agree with verl's `verl/utils/reward_score/gsm8k.py` on every text, quirks included (`#### 18.`
is wrong for 18, flexible keeps commas): rewards must not change when a run migrates. `normalized` is lenient
and must be selected by name.
"""

import re
from decimal import Decimal, DecimalException
from enum import StrEnum

WINDOW = 300
"""Characters at the end of a solution that are searched. verl's limit, which keeps the regex cheap."""

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[0-9.,]+")
_NORMALIZED = re.compile(r"####\s*(-?\s*\$?\s*-?[0-9.,]+)")


class Method(StrEnum):
    """How the final answer is extracted and compared. The first is the default."""

    STRICT = "strict"
    """The last `#### <number>`, commas removed, equal to the truth as a string."""
    FLEXIBLE = "flexible"
    """The last number anywhere, commas kept, equal to the truth as a string."""
    NORMALIZED = "normalized"
    """The last `####` number, compared by value: `$1,000.`, `1000.0` and `1000` are the same."""


def extract(solution: str, method: Method = Method.STRICT) -> str | None:
    """The final answer by `method` in the last 300 characters, or None."""
    tail = solution[-WINDOW:]
    match method:
        case Method.STRICT:
            answers = _STRICT.findall(tail)
            return answers[-1].replace(",", "") if answers else None
        case Method.FLEXIBLE:
            return next((number for number in reversed(_FLEXIBLE.findall(tail)) if number != "."), None)
        case Method.NORMALIZED:
            answers = _NORMALIZED.findall(tail)
            return _plain(answers[-1]) if answers else None


def score(solution: str, ground_truth: str, method: Method = Method.STRICT) -> float:
    """1.0 if the final answer is the ground truth, else 0.0."""
    answer = extract(solution, method)
    if answer is None:
        return 0.0
    truth = _plain(ground_truth) if method is Method.NORMALIZED else ground_truth
    return 1.0 if answer == truth else 0.0


def _plain(number: str) -> str | None:
    """Normalizes a number, `-$1,000.50` as `-1000.5`. None for other text and very long numbers."""
    if len(number) > WINDOW:
        return None
    try:
        value = Decimal(re.sub(r"[$,\s]", "", number).rstrip("."))
    except DecimalException:
        return None
    if not value:
        return "0"
    return format(value.normalize(), "f") if abs(value.adjusted()) <= WINDOW else None
