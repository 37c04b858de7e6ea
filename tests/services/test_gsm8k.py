import pytest

from trackway.gsm8k import Method, extract, score

TABLE = [
    # text, truth, strict, flexible: verl's own answers (verl/utils/reward_score/gsm8k.py, compute_score)
    ("#### 18", "18", 1.0, 1.0),
    ("#### 18.", "18", 0.0, 0.0),
    ("#### 18.0", "18", 0.0, 0.0),
    ("#### $18", "18", 0.0, 1.0),
    ("####18", "18", 0.0, 1.0),
    ("#### 1,000", "1000", 1.0, 0.0),
    ("#### 1,000", "1,000", 0.0, 1.0),
    ("#### -7", "-7", 1.0, 1.0),
    ("#### 1\n#### 2", "2", 1.0, 1.0),
    ("#### 1\n#### 2", "1", 0.0, 0.0),
    ("#### 18 clips, not 20", "18", 1.0, 0.0),
    ("the answer is 18 .", "18", 0.0, 1.0),
    ("", "18", 0.0, 0.0),
    ("no number", "18", 0.0, 0.0),
    ("...", "18", 0.0, 0.0),
]


@pytest.mark.parametrize(("text", "truth", "strict", "flexible"), TABLE)
def test_strict_and_flexible_agree_with_verl(text: str, truth: str, strict: float, flexible: float) -> None:
    assert score(text, truth) == strict
    assert score(text, truth, Method.STRICT) == strict
    assert score(text, truth, Method.FLEXIBLE) == flexible


@pytest.mark.parametrize("method", list(Method))
def test_only_the_last_300_characters_count(method: Method) -> None:
    inside = "#### 18" + " " * 293
    outside = inside + " "

    assert score(inside, "18", method) == 1.0
    assert extract(outside, method) == ("18" if method is Method.FLEXIBLE else None)


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("#### 18.", "18", 1.0),
        ("#### 18...", "18", 1.0),
        ("#### 18.0", "18", 1.0),
        ("#### 18.50", "18.5", 1.0),
        ("####$1,000", "1000", 1.0),
        ("#### -$1,000.00", "-1000", 1.0),
        ("#### 1000", "1,000", 1.0),
        ("#### 0.0", "0", 1.0),
        ("#### 18", "19", 0.0),
        ("#### 1.2.3", "1.2.3", 0.0),
        ("18", "18", 0.0),
        ("#### .", "0", 0.0),
    ],
)
def test_normalized_compares_by_value(text: str, truth: str, expected: float) -> None:
    assert score(text, truth, Method.NORMALIZED) == expected


def test_extract_gives_the_answer_as_each_method_reads_it() -> None:
    text = "so $5 and #### 1,250.50"

    assert extract(text) == "1250.50"
    assert extract(text, Method.FLEXIBLE) == "1,250.50"
    assert extract(text, Method.NORMALIZED) == "1250.5"
    assert extract("nothing", Method.FLEXIBLE) is None


@pytest.mark.parametrize("truth", ["9" * 1_000_000, "1e999999", "1e9999999", "1e-999999", "1e999999999999999999"])
def test_a_truth_that_is_no_reasonable_number_is_no_answer(truth: str) -> None:
    assert score("#### 1", truth, Method.NORMALIZED) == 0.0
