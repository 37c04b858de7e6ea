"""A classifier as the scorer `reward_model`: what it is asked, with which token, and servers that fail."""

from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from tests.serving import served
from trackway.clients import close_shared_http
from trackway.reward.scorers import Scorer, scorers_of
from trackway.reward.settings import RewardSettings
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ScoreRequest

pytestmark = pytest.mark.anyio

CALL = ToolCall(id="call_0", function=FunctionCall(name="calculator", arguments='{"expression": "1+1"}'))
MESSAGES = [
    Message(role="user", content="1+1?"),
    Message(role="assistant", content="", tool_calls=[CALL]),
    Message(role="tool", content="2", tool_call_id="call_0", name="calculator"),
    Message(role="assistant", content="2"),
]
ASKED = ScoreRequest(data_source="sums", solution_str="2", ground_truth="2", messages=MESSAGES)
BROKEN = Response("the replica died", status_code=500)


@pytest.fixture(autouse=True)
async def fresh_connections() -> AsyncIterator[None]:
    """None is kept beyond a test's server."""
    yield
    await close_shared_http()


def scores(*numbers: float) -> Response:
    data = [{"index": 0, "label": "LABEL_0", "probs": [*numbers], "num_classes": len(numbers)}]
    usage = {"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0}
    reply = {"id": "classify-1", "object": "list", "created": 1, "model": "rm", "data": data, "usage": usage}
    return JSONResponse(reply)


class ClassifierServer:
    """A server that returns the given answers in order, then repeats the last one; it records the requests."""

    def __init__(self, *answers: Response, path: str = "/classify") -> None:
        self.app = FastAPI()
        self.requests: list[Request] = []
        self.bodies: list[dict[str, object]] = []
        self._answers = [*answers]
        self.app.post(path)(self.answer)

    async def answer(self, request: Request) -> Response:
        self.requests.append(request)
        self.bodies.append(await request.json())
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def scorer_of(model: dict[str, object], **settings: object) -> Scorer:
    [scorer] = scorers_of(RewardSettings.model_validate({"reward_model": {"path": "rm", **model}, **settings}))
    return scorer


async def failure(scorer: Scorer) -> TrackwayError:
    with pytest.raises(TrackwayError) as caught:
        await scorer.score(ASKED, "default")
    assert caught.value.message.startswith("reward_model: ")
    return caught.value


async def test_a_servers_logit_is_the_score_and_only_our_own_service_gets_our_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRACKWAY_TOKEN", "ours")
    foreign, own = ClassifierServer(scores(-2.5)), ClassifierServer(scores(7.0), path="/reward_model/classify")
    async with served(foreign.app) as url:
        reward = await scorer_of({"base_url": url}).score(ASKED, "default")
    async with served(own.app) as url:
        other = await scorer_of({}, base_url=url).score(ASKED, "default")

    assert [(reward.score, reward.components), (other.score, other.components)] == [(-2.5, {}), (7.0, {})]
    call = {"name": "calculator", "arguments": '{"expression": "1+1"}'}
    assert (
        foreign.bodies
        == own.bodies
        == [
            {
                "model": "rm",
                "messages": [
                    {"role": "user", "content": "1+1?"},
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
                    },
                    {"role": "tool", "content": "2", "tool_call_id": "call_0", "name": "calculator"},
                    {"role": "assistant", "content": "2"},
                ],
                "use_activation": False,
            }
        ]
    )
    tokens = [server.requests[0].headers.get("authorization") for server in (foreign, own)]
    assert tokens == [None, "Bearer ours"]


async def test_a_server_that_fails_is_asked_again_with_the_same_key_and_no_score_is_made_up() -> None:
    recovering, down = ClassifierServer(BROKEN, BROKEN, scores(1.5)), ClassifierServer(BROKEN)
    async with served(recovering.app) as url:
        reward = await scorer_of({"base_url": url}).score(ASKED, "default")
    async with served(down.app) as url:
        error = await failure(scorer_of({"base_url": url, "attempts": 2}))

    keys = [request.headers["idempotency-key"] for request in recovering.requests]
    assert (reward.score, len(keys), len(set(keys))) == (1.5, 3, 1)
    assert (error.code, error.retryable, len(down.requests)) == (ErrorCode.UNAVAILABLE, True, 2)


async def test_a_reply_of_several_scores_is_an_error() -> None:
    async with served(ClassifierServer(scores(0.25, 0.75)).app) as url:
        error = await failure(scorer_of({"base_url": url}))

    assert error.code is ErrorCode.INTERNAL
    assert error.message.endswith("; serve a model with one label")


async def test_with_a_function_the_model_is_no_scorer(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("own") / "scoring.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info, **_):\n    return 0.5\n")
    scorer = scorer_of({}, custom_reward_function={"path": file})

    assert (scorer.info.name, scorer_of({}).info.name) == ("scoring.py:compute_score", "reward_model")
    assert (await scorer.score(ASKED, "default")).score == 0.5
