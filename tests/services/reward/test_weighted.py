"""Weighted sums of scorers."""

import pytest
from pydantic import ValidationError

from trackway.reward.functions import FunctionScorer
from trackway.reward.scorers import Gsm8kScorer, Scorer, scorers_of
from trackway.reward.settings import RewardSettings
from trackway.reward.weighted import WeightedScorers, combined
from trackway.wire.reward import ScoreRequest

REQUEST = ScoreRequest(data_source="sums", solution_str="abcd", ground_truth="")


def half(**arguments: object) -> float:
    return 0.5


def length(**arguments: object) -> dict[str, float]:
    return {"score": 4.0, "half": 7.0, "letters": 4.0}


def broken(**arguments: object) -> float:
    raise LookupError("asked to fail")


def scorers() -> list[Scorer]:
    return [FunctionScorer(function, function.__name__, [function.__name__]) for function in (half, length, broken)]


def sum_of(**weights: float) -> WeightedScorers:
    return WeightedScorers(data_sources=["sums"], weights=weights)


@pytest.mark.anyio
async def test_the_score_is_the_sum_of_weights_times_scores_and_each_score_is_a_component() -> None:
    scorer = combined(scorers(), [sum_of(half=3.0, length=-0.25)])[0]

    reward = await scorer.score(REQUEST, "default")

    assert reward.score == 3.0 * 0.5 - 0.25 * 4.0
    assert reward.components == {"half": 0.5, "length": 4.0, "length.half": 7.0, "letters": 4.0}


@pytest.mark.anyio
async def test_scores_of_turns_are_weighed_and_added() -> None:
    def process(**arguments: object) -> dict[str, object]:
        return {"score": 3.0, "turn_scores": [1.0, 2.0]}

    def brevity(**arguments: object) -> dict[str, object]:
        return {"score": 1.0, "turn_scores": [0.5, 0.25]}

    own = [FunctionScorer(function, function.__name__, [function.__name__]) for function in (process, brevity)]
    scorer = combined([*own, *scorers()], [sum_of(process=2.0, brevity=-1.0, half=1.0)])[0]

    reward = await scorer.score(REQUEST, "default")

    assert (reward.score, reward.turn_scores) == (6.0 - 1.0 + 0.5, [2.0 - 0.5, 4.0 - 0.25])


@pytest.mark.anyio
async def test_scores_of_unequally_many_turns_are_not_added() -> None:
    def one(**arguments: object) -> dict[str, object]:
        return {"score": 3.0, "turn_scores": [1.0]}

    def two(**arguments: object) -> dict[str, object]:
        return {"score": 1.0, "turn_scores": [0.5, 0.25]}

    own = [FunctionScorer(function, function.__name__, [function.__name__]) for function in (one, two)]

    with pytest.raises(ValueError, match="zip"):
        await combined([*own, *scorers()], [sum_of(one=1.0, two=1.0)])[0].score(REQUEST, "default")


@pytest.mark.anyio
@pytest.mark.parametrize("text", ["it is 1000", "#### 1,000."])  # right by `flexible`, and by `normalized`
async def test_a_scorer_of_several_methods_scores_by_its_first(text: str) -> None:
    scorer = combined([Gsm8kScorer()], [sum_of(gsm8k=1.0)])[0]
    request = ScoreRequest(data_source="sums", solution_str=text, ground_truth="1000")

    assert (await scorer.score(request, "default")).score == 0.0


def test_a_sum_of_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        sum_of()


@pytest.mark.anyio
async def test_the_error_of_one_scorer_is_the_error_of_the_sum() -> None:
    scorer = combined(scorers(), [sum_of(half=1.0, broken=1.0)])[0]

    with pytest.raises(LookupError, match="asked to fail"):
        await scorer.score(REQUEST, "default")


def test_scorers_of_a_sum_score_through_it_only() -> None:
    served = combined(scorers(), [sum_of(half=1.0, length=1.0)])

    assert [(scorer.info.name, scorer.info.data_sources) for scorer in served] == [
        ("weighted", ["sums"]),
        ("broken", ["broken"]),
    ]
    assert served[0].info.description == "1 x half + 1 x length."


def test_names_of_no_scorer_or_of_several_are_refused() -> None:
    with pytest.raises(ValueError, match="'weighted': expected scorers among broken, half, length, got quarter"):
        combined(scorers(), [sum_of(half=1.0, quarter=1.0)])
    with pytest.raises(ValueError, match="expected one scorer of each name, got several of half"):
        combined([*scorers(), *scorers()], [sum_of(half=1.0)])


def test_a_sum_for_every_data_source_replaces_the_built_in_scorers() -> None:
    judged = {"judges": [{"base_url": "http://127.0.0.1:9/v1", "model": "big"}]}
    alone = scorers_of(RewardSettings.model_validate({**judged, "weighted_scorers": [{"weights": {"judge": 2}}]}))
    beside = scorers_of(
        RewardSettings.model_validate(
            {**judged, "weighted_scorers": [{"data_sources": ["me/essays"], "weights": {"judge": 2}}]}
        )
    )

    assert [scorer.info.name for scorer in alone] == ["weighted"]
    assert [scorer.info.name for scorer in beside] == ["weighted", "gsm8k"]
    assert isinstance(beside[1], Gsm8kScorer)
