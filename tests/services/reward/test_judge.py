"""A model as a judge: its scores, what it is asked, and servers that fail."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from tests.serving import served
from tests.time_limits import ENDS_SOON
from trackway.clients import close_shared_http
from trackway.reward.app import create_app
from trackway.reward.models import JudgeScorer, JudgeSettings
from trackway.reward.settings import RewardSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ScoreRequest

pytestmark = pytest.mark.anyio

Run = Callable[[FastAPI], AbstractAsyncContextManager[httpx.AsyncClient]]
SOLUTION = "The capital of {ground_truth} is Paris."


@pytest.fixture(autouse=True)
async def fresh_connections() -> AsyncIterator[None]:
    """None is kept beyond a test's server."""
    yield
    await close_shared_http()


class ModelServer:
    """Chat completions that answer what they were told to, one after another, and keep what they were sent."""

    def __init__(self, *answers: str | Response) -> None:
        self.app = FastAPI()
        self.requests: list[Request] = []
        self.bodies: list[dict[str, object]] = []
        self._answers = [*answers]
        self.app.post("/v1/chat/completions")(self.answer)

    async def answer(self, request: Request) -> Response:
        self.requests.append(request)
        self.bodies.append(await request.json())
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Response):
            return answer
        return Response(json.dumps({"id": "1", "choices": [{"message": {"content": answer}}]}))


def judge(url: str, **settings: object) -> JudgeScorer:
    return JudgeScorer(JudgeSettings.model_validate({"base_url": f"{url}/v1", "model": "big", **settings}))


def solution() -> ScoreRequest:
    return ScoreRequest(
        data_source="capitals", solution_str=SOLUTION, ground_truth="France", extra_info={"question": "Which {one}?"}
    )


async def failure(scorer: JudgeScorer) -> TrackwayError:
    with pytest.raises(TrackwayError) as caught:
        await scorer.score(solution(), "default")
    return caught.value


@pytest.mark.parametrize(
    ("answer", "settings", "score"),
    [
        ("It is right.\nScore: 7.5", {}, 0.75),
        ("Score: 10 would be too much.\n**Score:** 2", {}, 0.2),
        ("score 0", {}, 0.0),
        ("<4>", {"score_pattern": "<(-?[0-9]+)>", "lowest": 1, "highest": 5}, 0.75),
        ("<-1>", {"score_pattern": "<(-?[0-9]+)>", "lowest": -1, "highest": 1}, 0.0),
        ("Score: 1, score: 2, no: score 3", {}, 0.3),
    ],
)
async def test_the_last_number_of_the_pattern_is_scaled_to_0_to_1(
    answer: str, settings: dict[str, object], score: float
) -> None:
    async with served(ModelServer(answer).app) as url:
        reward = await judge(url, **settings).score(solution(), "default")

    assert (reward.score, reward.components) == (score, {})


async def test_the_judge_is_asked_with_the_prompt_filled_in_once_and_only_its_own_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRACKWAY_TOKEN", "ours")
    server = ModelServer("Score: 1")
    prompt = "{data_source}: {extra_info.question} {ground_truth}? {solution_str} {other}"
    async with served(server.app) as url:
        await judge(url, prompt=prompt, max_tokens=5, temperature=0.5).score(solution(), "default")
        await judge(url, token="theirs").score(solution(), "default")

    text = f"capitals: Which {{one}}? France? {SOLUTION} {{other}}"
    messages = [{"role": "user", "content": text}]
    assert server.bodies[0] == {"model": "big", "messages": messages, "temperature": 0.5, "max_tokens": 5}
    tokens = [request.headers.get("authorization") for request in server.requests]
    assert tokens == [None, "Bearer theirs"]


@pytest.mark.parametrize(
    ("answer", "settings"),
    [
        *((answer, {}) for answer in ("I cannot say.", "Score: 11", "Score: -1", "Score: .5", "")),
        ("Score: high", {"score_pattern": r"Score: (\w+)"}),
        ("Score:", {"score_pattern": r"Score:( \d+)?"}),
    ],
)
async def test_an_answer_without_a_number_in_the_range_is_an_error_and_no_score(
    answer: str, settings: dict[str, object]
) -> None:
    async with served(ModelServer(answer).app) as url:
        error = await failure(judge(url, **settings))

    assert (error.code, error.retryable) == (ErrorCode.INTERNAL, False)
    assert error.message.startswith(f"judge 'judge': expected a number from 0 to 10 by score_pattern, got {answer!r};")


@pytest.mark.parametrize(
    ("choices", "shown"),
    [([], "''"), ([{"message": {"content": None}}], "''"), ([{"message": {"content": 200 * "x"}}], repr(120 * "x"))],
)
async def test_an_answer_without_text_has_no_number_and_of_a_long_one_the_end_is_shown(
    choices: list[object], shown: str
) -> None:
    async with served(ModelServer(Response(json.dumps({"choices": choices}))).app) as url:
        error = await failure(judge(url))

    assert f"got {shown};" in error.message


async def test_the_first_choice_counts() -> None:
    choices = [{"message": {"content": f"Score: {number}"}} for number in (3, 9, 6)]
    async with served(ModelServer(Response(json.dumps({"choices": choices}))).app) as url:
        assert (await judge(url).score(solution(), "default")).score == 0.3


async def test_a_judge_has_these_defaults_and_tells_its_range() -> None:
    settings = JudgeSettings.model_validate({"base_url": "http://127.0.0.1:9/v1", "model": "big"})

    given = settings.model_dump(exclude={"base_url", "model", "prompt", "score_pattern", "token"})
    assert given == {
        **{"name": "judge", "data_sources": ["*"], "lowest": 0.0, "highest": 10.0, "temperature": 0.0},
        **{"max_tokens": 1024, "timeout_s": 50.0, "attempts": 3, "max_in_flight": 16},
    }
    assert JudgeScorer(settings).info.description == "The score that big gives, from 0 to 10."


@pytest.mark.parametrize("key", ["temperature", "max_tokens", "timeout_s", "attempts", "max_in_flight"])
async def test_a_bound_of_a_setting_is_where_it_stops_to_work(key: str) -> None:
    lowest = {"temperature": 0.0, "timeout_s": 0.001}.get(key, 1)
    assert judge("http://127.0.0.1:9", **{key: lowest})
    with pytest.raises(ValidationError, match=key):
        judge("http://127.0.0.1:9", **{key: -0.001 if key == "temperature" else 0})


async def test_a_row_without_a_key_of_the_prompt_is_told() -> None:
    error = await failure(judge("http://127.0.0.1:9", prompt="{extra_info.rubric} {solution_str}"))

    assert error.code is ErrorCode.INVALID_REQUEST
    assert "expected 'rubric' in the row's extra_info for its prompt, got question;" in error.message


async def test_a_failing_or_full_server_is_asked_again() -> None:
    server = ModelServer(Response("down", 500), Response("full", 429), "Score: 10")
    async with served(server.app) as url:
        reward = await judge(url, attempts=2).score(solution(), "default")

    assert (len(server.requests), reward.score) == (3, 1.0)


@pytest.mark.parametrize(
    ("answer", "code", "requests"),
    [(Response("down", 500), ErrorCode.UNAVAILABLE, 2), (Response("no such model", 404), ErrorCode.INTERNAL, 1)],
)
async def test_a_failure_of_the_server_is_an_error_and_no_score(
    answer: Response, code: ErrorCode, requests: int
) -> None:
    server = ModelServer(answer)
    async with served(server.app) as url:
        error = await failure(judge(url, name="taste", attempts=2))

    assert (error.code, len(server.requests)) == (code, requests)
    assert error.message.startswith(f"judge 'taste': POST {url}/v1/chat/completions: ")


@ENDS_SOON
async def test_the_limit_of_a_score_includes_the_wait_for_a_place() -> None:
    server = ModelServer(Response("full", 429))
    async with served(server.app) as url:
        error = await failure(judge(url, timeout_s=0.2, max_in_flight=1))

    assert error.code in (ErrorCode.DEADLINE_EXCEEDED, ErrorCode.OVERLOADED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "Is it good?"}, r"expected \{solution_str\} in the prompt"),
        ({"score_pattern": "Score: [0-9]"}, "expected a group around the number"),
        ({"score_pattern": "("}, "expected a regular expression"),
        ({"lowest": 1.0, "highest": 1.0}, "expected lowest below highest, got 1 and 1"),
    ],
)
async def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        judge("http://127.0.0.1:9", **settings)


async def test_a_judge_and_the_built_in_scorer_are_weighed(running) -> None:
    async with served(ModelServer("Score: 5").app) as url:
        settings = RewardSettings.model_validate(
            {
                "judges": [{"base_url": f"{url}/v1", "model": "big"}],
                "weighted_scorers": [{"data_sources": ["openai/gsm8k"], "weights": {"gsm8k": 1, "judge": 0.5}}],
            }
        )
        async with running(create_app(settings)) as http:
            asked = {"data_source": "openai/gsm8k", "solution_str": "#### 18", "ground_truth": "18"}
            answer: httpx.Response = await http.post("/score", json=asked)

    assert answer.json() == {
        "score": 1.25,
        "components": {"gsm8k": 1.0, "judge": 0.5, "correct": 1.0, "answered": 1.0},
    }
