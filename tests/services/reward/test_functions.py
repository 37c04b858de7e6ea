"""Scoring functions with verl's signature, from a file and from a module."""

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trackway.reward.functions import FunctionScorer, RewardFunction, reward_of, scorer
from trackway.reward.models import RewardModelSettings
from trackway.reward.scorers import RewardService, ScorerRegistry, scorers_of
from trackway.reward.settings import RewardSettings
from trackway.serving.user_code import OwnCodeError
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ScoreRequest
from trackway.wire.trajectory import Reward

REQUEST = ScoreRequest(data_source="me/sums", solution_str="it is 18", ground_truth="18", extra_info={"index": 3})


@pytest.fixture(autouse=True)
def path_restored() -> Iterator[None]:
    before, modules = [*sys.path], set(sys.modules)
    yield
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def of_file(tmp_path: Path, text: str, **options: object) -> RewardSettings:
    file = tmp_path / "rewards.py"
    file.write_text(text)
    return RewardSettings(custom_reward_function=RewardFunction.model_validate({"path": file, **options}))


async def score(settings: RewardSettings, request: ScoreRequest = REQUEST) -> Reward:
    return await RewardService(scorers_of(settings), timeout_s=5.0).score(request)


@pytest.mark.anyio
async def test_the_function_of_a_file_gets_verls_arguments_and_its_own(tmp_path: Path) -> None:
    text = """
def half(data_source, solution_str, ground_truth, extra_info=None, share=1.0):
    right = ground_truth in solution_str and data_source == "me/sums" and extra_info["index"] == 3
    return share if right else 0.0
"""
    settings = of_file(tmp_path, text, name="half", reward_kwargs={"share": 0.5})

    assert await score(settings) == Reward(score=0.5)


@pytest.mark.anyio
async def test_reward_kwargs_replace_an_argument_of_the_same_name_as_in_verl(tmp_path: Path) -> None:
    text = "def compute_score(data_source, solution_str, ground_truth, extra_info): return float(ground_truth)"

    assert await score(of_file(tmp_path, text, reward_kwargs={"ground_truth": "7"})) == Reward(score=7.0)


@pytest.mark.anyio
async def test_the_function_of_a_file_scores_every_data_source(tmp_path: Path) -> None:
    settings = of_file(tmp_path, "def compute_score(data_source, **row): return len(data_source)")

    scored = [
        (await score(settings, REQUEST.model_copy(update={"data_source": name}))).score
        for name in ("openai/gsm8k", "me/x")
    ]

    assert scored == [12.0, 4.0]
    assert [known.info.data_sources for known in scorers_of(settings)] == [["*"]]


@pytest.mark.anyio
async def test_an_async_function_runs_on_the_event_loop_and_any_other_in_a_thread() -> None:
    async def on_loop(**row: object) -> bool:
        return threading.current_thread() is threading.main_thread()

    def aside(**row: object) -> bool:
        return threading.current_thread() is not threading.main_thread()

    assert [await FunctionScorer(part, "x").score(REQUEST, "default") for part in (on_loop, aside)] == [
        Reward(score=1.0),
        Reward(score=1.0),
    ]


@pytest.mark.anyio
async def test_a_function_of_verls_batch_manager_gets_lists_of_one(tmp_path: Path) -> None:
    source = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos=None, bonus=0):
    return [{"score": len(s) + bonus, "of": float(g == "18")} for s, g in zip(solution_strs, ground_truths)]
"""
    settings = of_file(tmp_path, source, reward_kwargs={"bonus": 2})

    assert await score(settings) == Reward(score=len(REQUEST.solution_str) + 2.0, components={"of": 1.0})


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (1, Reward(score=1.0)),
        (True, Reward(score=1.0)),
        (np.float32(0.5), Reward(score=0.5)),
        ({"score": 1, "acc": np.float64(0.5), "pred": "18"}, Reward(score=1.0, components={"acc": 0.5}, answer="18")),
        ({"score": 1, "turn_scores": (True, np.float32(0.5))}, Reward(score=1.0, turn_scores=[1.0, 0.5])),
        ({"score": 1, "turn_scores": None}, Reward(score=1.0)),
    ],
)
def test_a_number_or_a_dict_with_one_is_a_reward(returned: object, reward: Reward) -> None:
    assert reward_of(returned) == reward


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("'1.0'", "expected it to return a number or a dict with 'score', got str '1.0'"),
        ("None", "expected it to return a number or a dict with 'score', got NoneType 'None'"),
        ("{'acc': 1}", "expected a dict with the key 'score', got the keys ['acc']"),
        ("{'score': '1'}", "expected it to return a number as 'score', got str '1'"),
        ("{'score': 1, 'turn_scores': '12'}", "expected it to return a list of numbers as 'turn_scores', got str '12'"),
        ("{'score': 1, 'turn_scores': 2}", "expected it to return a list of numbers as 'turn_scores', got int '2'"),
        ("{'score': 1, 'turn_scores': ['a']}", "expected it to return numbers as 'turn_scores', got str 'a'"),
        ("[1, 2]", "expected it to return a list of one score for one solution, got list '[1, 2]'"),
        ("1", "expected it to return a list of one score for one solution, got int '1'"),
    ],
)
async def test_a_function_that_returns_no_number_is_named(tmp_path: Path, result: str, message: str) -> None:
    parameters = "solution_strs, **row" if message.startswith("expected it to return a list of one") else "**row"
    settings = of_file(tmp_path, f"def compute_score({parameters}): return {result}")

    with pytest.raises(
        TrackwayError, match=re.escape(f"scorer 'rewards.py:compute_score' failed: TypeError: {message}")
    ):
        await score(settings)


def test_a_missing_function_is_told_with_those_of_the_file(tmp_path: Path) -> None:
    settings = of_file(tmp_path, "def score_it(**row): return 1.0\nLIMIT = 3")

    message = (
        r"custom_reward_function.name: expected a function of .*rewards.py, which has score_it, got 'compute_score'"
    )
    with pytest.raises(ValueError, match=message):
        scorers_of(settings)


def test_a_file_that_fails_is_told_with_its_line(tmp_path: Path) -> None:
    settings = of_file(tmp_path, "import json\nlimit = json.nothing\n")

    with pytest.raises(OwnCodeError, match=r"custom_reward_function.path '.*': AttributeError: .*rewards.py:2\)"):
        scorers_of(settings)


@pytest.mark.anyio
async def test_scorers_of_a_project_go_by_data_source_and_the_rest_to_the_one_without(tmp_path: Path) -> None:
    package = tmp_path / "own_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("from own_rewards import parts")
    (package / "parts.py").write_text("""
from trackway.reward import scorer

@scorer
def anything(**row):
    "Any row."
    return 1

@scorer("me/sums")
async def sums(**row):
    return 2

@scorer(data_sources=["me/a", "me/b"])
def letters(**row):
    return 3
""")
    settings = RewardSettings(modules=["own_rewards"], code_path=tmp_path)
    registry = ScorerRegistry(scorers_of(settings))

    names = [registry.get(source).info.name for source in ("openai/gsm8k", "me/sums", "me/b", "other")]

    assert names == [f"own_rewards.parts.{name}" for name in ("anything", "sums", "letters", "anything")]
    assert registry.get("x").info.description == "Any row."
    assert await score(settings) == Reward(score=2.0)


def test_a_project_without_a_scorer_for_every_row_keeps_the_built_in_ones(tmp_path: Path) -> None:
    (tmp_path / "own_single.py").write_text(
        "from trackway.reward import scorer\n@scorer('me/sums')\ndef sums(**row): return 2"
    )
    registry = ScorerRegistry(scorers_of(RewardSettings(modules=["own_single"], code_path=tmp_path)))

    assert registry.get("openai/gsm8k").info.name == "gsm8k"
    with pytest.raises(TrackwayError, match="got 'other'; add a scorer for it") as caught:
        registry.get("other")
    assert caught.value.code is ErrorCode.UNKNOWN_DATA_SOURCE


def test_the_decorator_leaves_the_function_as_it_is() -> None:
    def plain(**row: object) -> float:
        return 1.0

    assert scorer(plain) is plain
    assert scorer("me/sums")(plain) is plain


@pytest.mark.anyio
async def test_the_address_of_the_reward_model_is_that_of_its_service_and_an_own_argument_replaces_it(
    tmp_path: Path,
) -> None:
    text = """
def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    return {"127.0.0.1:8000/reward_model": 1.0, "here:1/v0": 2.0, "mine": 3.0}[reward_router_address]
"""
    settings = of_file(tmp_path, text)
    beside = settings.model_copy(update={"reward_model": RewardModelSettings(path="none")})
    there = {"reward_model": RewardModelSettings.model_validate({"path": "none", "base_url": "http://here:1/v0/"})}
    own = of_file(tmp_path, text, reward_kwargs={"reward_router_address": "mine"})

    scored = [await score(given) for given in (beside, settings.model_copy(update=there), own)]

    assert [reward.score for reward in scored] == [1.0, 2.0, 3.0]
