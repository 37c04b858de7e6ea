import pytest

from trackway.trainer.run_state.trajectory_export import MAX_CHARS, RowFilter
from trackway.wire.errors import TrackwayError

COLUMNS = {"score": float, "failed": bool, "agent": str, "sample_index": object}
ROWS = [
    {"score": 0.0, "failed": False, "agent": "a", "sample_index": 1},
    {"score": 1.0, "failed": False, "agent": "b", "sample_index": "django-1"},
    {"score": None, "failed": True, "agent": None, "sample_index": 2},
]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("score > 0.5", [1]),
        ("not score > 0.5", [0, 2]),
        ("score == None", [2]),
        ("score != None", [0, 1]),
        ("score >= 0 and not failed", [0, 1]),
        ("failed or score == 1", [1, 2]),
        ("-1 < score < 1", [0]),
        ("0.5 > score", [0]),
        ("agent in ('a', 'c')", [0]),
        ("agent not in ['a']", [1, 2]),
        ("sample_index in (1, 'django-1')", [0, 1]),
        ("sample_index < 2", [0]),
        ("failed == True", [2]),
        (" (score > 0.5) ", [1]),
    ],
)
def test_a_filter_chooses_rows(text, places):
    matches = RowFilter(text, COLUMNS).matches

    assert [place for place, row in enumerate(ROWS) if matches(row)] == places


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("score > 0.5 and __import__('os').system('true')", "__import__('os').system('true')"),
        ("scores > 0.5", "scores"),
        ("score", "score"),
        ("score > '0.5'", "score compared with '0.5'"),
        ("score < None", "score compared with None"),
        ("score in agent", "score compared with agent"),
        ("failed > 1", "failed compared with 1"),
        ("score + 1 > 2", "score + 1 > 2"),
        ("score = 1", "score = 1"),
        ("score > 1; DROP TABLE rows", "score > 1; DROP TABLE rows"),
        ("", ""),
        ("not " * MAX_CHARS + "failed", f"{4 * MAX_CHARS + 6} characters"),
    ],
)
def test_anything_else_is_refused_with_the_columns(text, got):
    with pytest.raises(TrackwayError) as refused:
        RowFilter(text, COLUMNS)

    assert refused.value.message == (
        f'expected a filter such as "score > 0.5 and not failed", got {got!r}; compare the columns score, failed, '
        "agent, sample_index with and, or, not, in"
    )
