"""What may be a row's index, and which spellings are the same one."""

import math

import pytest

from trackway.wire.base import sample_index
from trackway.wire.trajectory import Tags, trajectory_id


@pytest.mark.parametrize(
    ("given", "index"),
    [
        (7, 7),
        (-7, -7),
        (0, 0),
        (None, 0),
        (7.0, 7),
        ("7", 7),
        ("-7", -7),
        ("0", 0),
        ("007", "007"),
        ("+7", "+7"),
        ("-0", "-0"),
        ("7.0", "7.0"),
        ("٧", "٧"),
        ("django__django-11099", "django__django-11099"),
        ("hotpot/5a8b57", "hotpot/5a8b57"),
        ("München 東京", "München 東京"),
        (2**63 - 1, 2**63 - 1),
        (2**63, "9223372036854775808"),
        ("9223372036854775808", "9223372036854775808"),
        ("a" * 128, "a" * 128),
    ],
)
def test_an_index_is_a_number_or_text(given: object, index: int | str) -> None:
    assert sample_index(given) == index
    assert type(sample_index(given)) is type(index)
    assert sample_index(str(index)) == index  # what a person types means the same row


@pytest.mark.parametrize(
    "given", [True, 1.5, math.nan, math.inf, "", "a\nb", "a\x1b[0m", "a\ud800", "a" * 129, [1], {"a": 1}, b"a", 10**200]
)
def test_anything_else_is_refused_in_a_few_words(given: object) -> None:
    with pytest.raises(ValueError, match="expected a whole number or 1 to 128 printable characters, got ") as refused:
        sample_index(given)
    assert len(str(refused.value)) < 220 and str(refused.value).isprintable()


def test_tags_of_numbers_are_the_bytes_that_they_were() -> None:
    tags = Tags(experiment_name="e", step=1, sample_index=17, rollout_n=2)

    assert tags.model_dump_json() == (
        '{"experiment_name":"e","step":1,"sample_index":17,"rollout_n":2,"validate":false}'
    )
    assert trajectory_id("r", tags) == "r/1/17/2"


def test_tags_of_text_cross_the_wire() -> None:
    tags = Tags(experiment_name="e", step=1, sample_index="astropy__astropy-12907", rollout_n=2)

    assert Tags.model_validate_json(tags.model_dump_json()) == tags
    assert trajectory_id("r", tags) == "r/1/astropy__astropy-12907/2"
