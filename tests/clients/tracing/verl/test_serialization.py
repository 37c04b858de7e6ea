"""Payloads are copied within bounds, and what is small is copied exactly."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel

from trackway.tracing.verl import MAX_ITEMS, MAX_VALUES, bounded


class Model(BaseModel):
    ids: list[int]
    score: float | None = None


@dataclass
class Data:
    model: Model
    path: Path


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Data(Model(ids=[1, 2]), Path("/a")), {"model": {"ids": [1, 2], "score": None}, "path": "PosixPath('/a')"}),
        (("ok", 0.5, {}), ["ok", 0.5, {}]),
        ({1: {2}, None: Colour.RED}, {"1": [2], "None": "red"}),
        ([float("nan"), float("-inf"), True], ["NaN", "-Infinity", True]),
        ([np.float32(0.5), np.int64(3)], [0.5, 3]),
        (b"\x00" * 5, "[5 bytes]"),
        ("größe 🙂", "größe 🙂"),
        ("a\udcff", "a?"),
        (1 << 5000, "[a number of 5001 bits]"),
    ],
)
def test_values_are_copied_into_what_json_can_hold(value: object, expected: object) -> None:
    assert bounded(value) == expected


def test_long_lists_and_mappings_say_how_much_is_missing() -> None:
    assert bounded(list(range(1000))) == [*range(MAX_ITEMS), f"[{1000 - MAX_ITEMS} more]"]
    mapping = bounded({str(index): index for index in range(1000)})
    assert isinstance(mapping, dict) and mapping["..."] == f"[{1000 - MAX_ITEMS} more]"


def test_width_times_depth_is_bounded_too() -> None:
    wide: object = 1
    for _ in range(5):
        wide = [wide] * 100

    def count(value: object) -> int:
        return 1 + sum(map(count, value)) if isinstance(value, list) else 1

    assert count(bounded(wide)) < 2 * MAX_VALUES


def test_a_circle_ends() -> None:
    circle: dict[str, object] = {}
    circle["self"] = circle
    assert "[too deep]" in str(bounded(circle))


def test_a_huge_text_keeps_its_beginning_and_says_what_is_missing() -> None:
    text = bounded("x" * 3_000_000)
    assert isinstance(text, str) and text.endswith(f"xx[truncated {3_000_000 - 4096} characters]")
