import pytest

from tests.services.reward.shouting_scorer import ShoutingScorer
from trackway.reward.scorers import Gsm8kScorer, ScorerRegistry, method_of, scorers_of
from trackway.reward.settings import RewardSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ScoreRequest


def request_of(text: str, truth: str) -> ScoreRequest:
    return ScoreRequest(data_source="openai/gsm8k", solution_str=text, ground_truth=truth)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("text", "method", "score", "answered"),
    [
        ("#### 1,000", "strict", 1.0, 1.0),
        ("#### 1,000", "flexible", 0.0, 1.0),
        ("#### 1,000.", "strict", 0.0, 1.0),
        ("#### 1,000.", "normalized", 1.0, 1.0),
        ("it is 1000", "strict", 0.0, 0.0),
        ("it is 1000", "flexible", 1.0, 1.0),
    ],
)
async def test_gsm8k_scores_by_the_method_asked_for(text: str, method: str, score: float, answered: float) -> None:
    reward = await Gsm8kScorer().score(request_of(text, "1000"), method)

    assert reward.score == score
    assert reward.components == {"correct": score, "answered": answered}


def test_strict_is_the_default_and_an_unknown_method_is_told_with_the_known() -> None:
    assert method_of(Gsm8kScorer(), None) == "strict"
    with pytest.raises(TrackwayError, match="methods strict, flexible, normalized, got 'lenient'") as caught:
        method_of(Gsm8kScorer(), "lenient")
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("source", ["openai/gsm8k", "trackway/tiny_math"])
def test_both_data_sources_have_the_same_scorer(source: str) -> None:
    assert isinstance(ScorerRegistry(scorers_of(RewardSettings())).get(source), Gsm8kScorer)


def test_an_unknown_data_source_is_told_with_the_known() -> None:
    registry = ScorerRegistry([Gsm8kScorer(), ShoutingScorer()])

    with pytest.raises(TrackwayError, match="got 'openai/math'") as caught:
        registry.get("openai/math")
    assert caught.value.code is ErrorCode.UNKNOWN_DATA_SOURCE
    assert caught.value.detail == {"known": ["openai/gsm8k", "test/shouting", "trackway/tiny_math"]}


def test_two_scorers_of_one_source_are_refused() -> None:
    with pytest.raises(ValueError, match="source 'openai/gsm8k', got gsm8k and gsm8k; give one"):
        ScorerRegistry([Gsm8kScorer(), Gsm8kScorer()])


def test_an_import_path_that_is_no_scorer_is_refused() -> None:
    with pytest.raises(TypeError, match="to have `info` and `score`"):
        scorers_of(RewardSettings(extra_scorers=["json:JSONDecoder"]))
