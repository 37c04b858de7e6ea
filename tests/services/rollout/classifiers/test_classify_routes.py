"""`/classify` of a rollout service whose model is a classifier: vLLM's requests and replies, and the reward service."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.services.rollout.tiny_classifier import MARK, logit_of, write_classifier
from tests.serving import served_in_thread
from trackway.clients import close_shared_http
from trackway.deploy.bundled import TINY_MODEL
from trackway.reward.scorers import scorers_of
from trackway.reward.settings import RewardSettings
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ScoreRequest
from trackway.wire.trajectory import Reward

QUESTION = {"role": "user", "content": "Is 77 more than 7?"}
ANSWER = {"role": "assistant", "content": "Yes, 77."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    settings = RolloutSettings(model_path=folder, model_name="rm", device="cpu", max_model_len=128)
    with served_in_thread(create_app(settings)) as url:
        yield url


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY_MODEL)


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/classify", json=body, timeout=60, trust_env=False)


def probs(url: str, **body: Any) -> list[float]:
    """The score of each input; the requests are raw unless they say otherwise."""
    reply = post(url, **{"model": "rm", "use_activation": False, **body}).raise_for_status().json()
    assert [data["index"] for data in reply["data"]] == [*range(len(reply["data"]))]
    return [number for data in reply["data"] for number in data["probs"]]


def test_a_reply_is_vllms(url: str) -> None:
    reply = post(url, model="rm", input=[[MARK, 5], [5]], use_activation=False, user="me", request_id="1").json()

    made_here = {reply.pop("id").partition("-")[0], type(reply.pop("created"))}
    assert made_here == {"classify", int}
    exact = [pytest.approx(logit_of(ids), abs=1e-4) for ids in ([MARK, 5], [5])]
    assert reply == {
        "object": "list",
        "model": "rm",
        "data": [
            {"index": index, "label": "LABEL_0", "probs": [number], "num_classes": 1}
            for index, number in enumerate(exact)
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3},
    }


def test_inputs_are_text_or_ids_and_a_conversation_is_rendered_by_the_models_template(
    url: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = ["7 and 8", "77"]
    rendered = str(tokenizer.apply_chat_template([QUESTION, ANSWER], tokenize=False))
    whole = tokenizer.encode(rendered, add_special_tokens=False)
    known = [logit_of(tokenizer.encode(text)) for text in texts]

    assert probs(url, input=texts) == pytest.approx(known, abs=1e-4)
    assert probs(url, input=texts[0]) == pytest.approx(known[:1], abs=1e-4)
    assert probs(url, input=tokenizer.encode(texts[0])) == pytest.approx(known[:1], abs=1e-4)
    assert probs(url, messages=[QUESTION, ANSWER]) == pytest.approx([logit_of(whole)], abs=1e-4)
    assert probs(url, input=rendered, add_special_tokens=False) == pytest.approx([logit_of(whole)], abs=1e-4)


def test_scores_pass_a_sigmoid_unless_the_request_or_the_model_says_no(url: str, tmp_path: Path) -> None:
    logit, sure = logit_of([MARK, 5, 5]), logit_of([MARK])
    squashed = 1 / (1 + 2.718281828459045**-logit)

    assert probs(url, input=[MARK, 5, 5], use_activation=None) == pytest.approx([squashed], abs=1e-5)
    assert probs(url, input=[MARK, 5, 5], use_activation=True) == pytest.approx([squashed], abs=1e-5)
    regression = create_app(RolloutSettings(model_path=write_classifier(tmp_path, regression=True), model_name="rm"))
    with served_in_thread(regression) as other:
        assert probs(other, input=[MARK], use_activation=True) == pytest.approx([sure], abs=1e-4)


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        ({"input": [5] * 129}, 400, "expected 1 to 128 prompt tokens, got 129"),
        ({"input": "1 + 1 " * 100}, 400, "input: expected 1 to 128 prompt tokens, got at least"),
        ({"messages": [QUESTION] * 20}, 400, "messages: expected 1 to 128 prompt tokens, got at least"),
        ({"input": ""}, 400, "expected text of at least one token"),
        ({"input": [480]}, 400, "expected token ids in 0..479, got 480..480"),
        ({"messages": [QUESTION, {"role": "system", "content": "late"}]}, 400, "chat template rejects them"),
        ({"input": "a", "messages": [QUESTION]}, 400, "expected either input or messages"),
        ({}, 400, "expected either input or messages"),
        ({"input": "a", "truncate_prompt_tokens": 3}, 400, "truncate_prompt_tokens: expected nothing, got 3"),
        ({"input": "a", "model": "policy"}, 404, "expected 'rm', which is served here, got 'policy'"),
    ],
)
def test_what_cannot_be_scored_is_refused(url: str, body: dict[str, Any], status: int, expected: str) -> None:
    reply = post(url, **body)
    assert (reply.status_code, expected in reply.json()["error"]["message"]) == (status, True), reply.text


def test_a_classifier_is_ready_has_a_name_and_metrics_and_does_not_generate(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False) as http:
        probs(url, input=[MARK, 5])
        ready, models, weights = (http.get(path).json() for path in ("/ready", "/v1/models", "/weights"))
        metrics = http.get("/metrics").text
        generated = http.post("/v1/completions", json={"model": "rm", "prompt": "7"})

    assert ready["ready"] is True
    assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("rm", 128)]
    assert (weights["version"], weights["latest"], weights["model"]) == (0, 0, "rm")
    assert "trackway_engine_waiting 0.0" in metrics and "trackway_engine_prefilled_tokens_total" in metrics
    assert generated.status_code == 404


def test_a_request_has_a_deadline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: object, token_ids: list[int]) -> float:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("trackway.rollout.classifiers.embedded.TorchClassifier.classify", never)
    with served_in_thread(
        create_app(RolloutSettings(model_path=folder, model_name="rm", classify_timeout_s=0.05))
    ) as other:
        reply = post(other, input="7")

    assert reply.status_code == 504
    assert "expected scores within 0.05 s (classify_timeout_s), got none" in reply.json()["error"]["message"]


CALL = ToolCall(id="call_0", function=FunctionCall(name="calculator", arguments='{"expression": "70 + 7"}'))
CONVERSATION = [
    Message(role="user", content="How much is 70 + 7?"),
    Message(role="assistant", content="", tool_calls=[CALL]),
    Message(role="tool", content="77", tool_call_id="call_0", name="calculator"),
    Message(role="assistant", content="It is 77."),
]


def asked(**more: Any) -> ScoreRequest:
    fields = {"data_source": "sums", "solution_str": "It is 77.", "ground_truth": "77", "messages": CONVERSATION}
    return ScoreRequest.model_validate({**fields, **more})


def score(settings: dict[str, Any], request: ScoreRequest) -> Reward:
    [scorer, *_] = scorers_of(RewardSettings.model_validate(settings))

    async def scored() -> Reward:
        try:
            return await scorer.score(request, "default")
        finally:
            await close_shared_http()

    return asyncio.run(scored())


def known_score(tokenizer: PreTrainedTokenizerBase) -> float:
    shown = [message.model_dump(exclude_none=True) for message in CONVERSATION]
    rendered = str(tokenizer.apply_chat_template(shown, tokenize=False))
    return logit_of(tokenizer.encode(rendered, add_special_tokens=False))


def test_without_a_function_the_reward_service_scores_the_conversation_with_its_tools_messages(
    url: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    reward = score({"reward_model": {"path": "rm", "base_url": url}}, asked())

    assert (reward.score, reward.components) == (pytest.approx(known_score(tokenizer), abs=1e-4), {})


def test_a_rule_counts_beside_the_classifier_by_its_weight(url: str, tokenizer: PreTrainedTokenizerBase) -> None:
    sums = [{"weights": {"reward_model": 0.5, "gsm8k": 2.0}}]
    request = asked(data_source="openai/gsm8k", solution_str="It is #### 77")
    reward = score({"reward_model": {"path": "rm", "base_url": url}, "weighted_scorers": sums}, request)

    model = known_score(tokenizer)
    assert reward.score == pytest.approx(0.5 * model + 2.0, abs=1e-4)
    assert reward.components == {
        **{"reward_model": pytest.approx(model, abs=1e-4), "gsm8k": 1.0},
        **{"correct": 1.0, "answered": 1.0},
    }


@pytest.mark.parametrize(
    ("settings", "request_", "code", "expected"),
    [
        ({}, asked(messages=[]), ErrorCode.INVALID_REQUEST, "reward_model: messages: expected the conversation"),
        (
            {},
            asked(messages=[Message(role="user", content="77 " * 100)]),
            ErrorCode.INVALID_REQUEST,
            "reward_model: messages: expected 1 to 128 prompt tokens, got at least 304; raise max_model_len",
        ),
        ({"path": "other"}, asked(), ErrorCode.MODEL_NOT_FOUND, "expected 'rm', which is served here, got 'other'"),
        ({"at": "/none"}, asked(), ErrorCode.INTERNAL, "must be a classifier"),
    ],
)
def test_a_conversation_without_a_score_is_an_error(
    url: str, settings: dict[str, str], request_: ScoreRequest, code: ErrorCode, expected: str
) -> None:
    model = {"path": settings.get("path", "rm"), "base_url": url + settings.get("at", "")}
    with pytest.raises(TrackwayError) as raised:
        score({"reward_model": model}, request_)
    assert (raised.value.code, expected in raised.value.message) == (code, True), raised.value.message


VERLS_WAY = """
import httpx

async def compute_score(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer
):
    chat = [{"role": "user", "content": ground_truth}, {"role": "assistant", "content": solution_str}]
    text = reward_model_tokenizer.apply_chat_template(chat, tokenize=False)
    async with httpx.AsyncClient(trust_env=False) as client:
        payload = {"model": "rm", "input": text, "use_activation": False}
        reply = await client.post(f"http://{reward_router_address}/classify", json=payload)
    return reply.raise_for_status().json()["data"][-1]["probs"][-1]
"""


def test_a_function_asks_the_classifier_as_verl_does(
    url: str, folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    file = tmp_path / "scoring.py"
    file.write_text(VERLS_WAY)
    model = {"path": str(folder), "base_url": url}
    reward = score({"custom_reward_function": {"path": file}, "reward_model": model}, asked())

    chat = [{"role": "user", "content": "77"}, {"role": "assistant", "content": "It is 77."}]
    ids = tokenizer.encode(str(tokenizer.apply_chat_template(chat, tokenize=False)))
    assert reward.score == pytest.approx(logit_of(ids), abs=1e-4)
