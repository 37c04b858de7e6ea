"""What is refused, and that OpenAI's client raises its own exceptions for it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from transformers import PreTrainedTokenizerBase

from tests.services.rollout.model_routes.openai_server import CHAT
from tests.services.rollout.model_routes.scripted_engine import ScriptedEngine
from tests.serving import served_in_thread
from trackway.rollout.app import create_app
from trackway.rollout.engines.protocol import Capability
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorReply

TOOLS = [{"type": "function", "function": {"name": "add"}}]
OTHER = {"type": "function", "function": {"name": "sub"}}


def schema(value: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}


@pytest.fixture(autouse=True)
def _speaks(engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    engine.says = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("presence_penalty", 0.5, "presence_penalty: expected nothing or 0, got 0.5: unsupported"),
        ("frequency_penalty", 1, "unsupported"),
        ("logit_bias", {"17": 3}, "unsupported"),
        (
            "response_format",
            {"type": "json_object"},
            "expected an engine that guides its sampling (vllm with a tokenizer in model_path",
        ),
        ("response_format", {"type": "json_schema"}, "expected json_schema with type json_schema"),
        ("response_format", schema({"enum": ["x"] * 1001}), "at most 1000 values of an enum, got 1001; simplify it"),
        ("guided_json", {}, "give a JSON schema as response_format of /v1/chat/completions"),
        ("top_logprobs", 2, "top_logprobs: expected logprobs=true with it, got 2 without"),
        ("prompt_logprobs", 1, "prompt_logprobs: expected an engine that scores prompts"),
        ("top_logprobs", 21, "less than or equal to 20"),
        ("tempereture", 1, "Extra inputs are not permitted"),
        ("n", 129, "less than or equal to 128"),
        ("temperature", -1, "greater than or equal to 0"),
        ("max_tokens", 0, "greater than or equal to 1"),
        ("stop", [""], "at least 1 character"),
        ("messages", [], "at least 1 item"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content"),
        ("messages", [*CHAT, {"role": "system", "content": "late"}], "a system message must come first"),
        ("tool_choice", "required", "expected one of the tools [], got required"),
        ("stream_options", {"include_usage": True}, "expected stream=true"),
    ],
)
def test_a_chat_that_cannot_be_served_is_a_bad_request_that_names_the_field(
    scripted: OpenAI, field: str, value: object, said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.chat.completions.create(  # pyright: ignore[reportCallIssue]
            model="tiny",
            **{"messages": CHAT, "extra_body": {field: value}},  # pyright: ignore[reportArgumentType]
        )
    assert said in raised.value.message
    assert (raised.value.code, raised.value.type, raised.value.param) == (
        "invalid_request",
        "invalid_request_error",
        field,
    )


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("logprobs", 21, "less than or equal to 20"),
        ("top_logprobs", 1, "top_logprobs: expected nothing or 0, got 1: unsupported here; ask for logprobs"),
        ("prompt_logprobs", 21, "less than or equal to 20"),
        ("prompt_logprobs", 0, "prompt_logprobs: expected an engine that scores prompts"),
        ("echo", True, "echo: expected nothing or False, got True: unsupported"),
        ("suffix", "end", "unsupported"),
        ("best_of", 2, "unsupported"),
        ("prompt", "", "expected text of at least one token"),
        ("prompt", [], "prompt"),
        ("prompt", [[20], []], "prompt"),
    ],
)
def test_a_completion_that_cannot_be_served_is_a_bad_request_that_names_the_field(
    scripted: OpenAI, field: str, value: object, said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.completions.create(model="tiny", prompt="1", extra_body={field: value})
    assert said in raised.value.message
    assert raised.value.param == field


@pytest.mark.parametrize("stream", [False, True])
def test_top_logprobs_of_an_engine_that_has_none_are_refused_by_name(scripted: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.chat.completions.create(model="tiny", messages=CHAT, logprobs=True, top_logprobs=1, stream=stream)
    assert "top_logprobs: expected an engine that returns them (torch, vllm, sglang)" in raised.value.message
    assert raised.value.param == "top_logprobs"


@pytest.mark.parametrize("fields", [{}, {"include": ["file_search_call.results"]}])
def test_top_logprobs_of_a_response_without_logprobs_are_refused_by_name(
    scripted: OpenAI, fields: dict[str, object]
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.create(model="tiny", input="Say ok.", extra_body={"top_logprobs": 2, **fields})
    assert raised.value.param == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (
            {"response_format": schema({"type": "array", "items": {"not": {}}, "uniqueItems": True})},
            "response_format",
            "expected a JSON schema without not, uniqueItems beside tools",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "add", "parameters": {"enum": ["x"] * 1001}}}]},
            "tools",
            "tools: expected a JSON schema with at most 1000 values of an enum, got 1001; simplify it",
        ),
    ],
)
def test_schemas_that_cannot_guide_an_answer_beside_tools_are_refused_by_name(
    scripted: OpenAI, engine: ScriptedEngine, fields: dict[str, object], param: str, said: str
) -> None:
    engine.capabilities = frozenset({Capability.STRUCTURED_OUTPUTS})
    asked = {"tools": TOOLS, "response_format": {"type": "json_object"}, **fields}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=said) as raised:
            scripted.chat.completions.create(model="tiny", messages=CHAT, extra_body=asked, stream=stream)
        assert raised.value.param == param


def test_a_choice_that_is_no_tool_is_refused(scripted: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"expected one of the tools \['add'\], got sub"):
        scripted.chat.completions.create(model="tiny", messages=CHAT, extra_body={"tools": TOOLS, "tool_choice": OTHER})


def test_fields_that_change_nothing_are_accepted(scripted: OpenAI) -> None:
    answer = scripted.chat.completions.create(
        model="tiny",
        messages=CHAT,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        top_logprobs=0,
        response_format={"type": "text"},
        user="someone",
        metadata={"a": "b"},
        store=True,
        stop=None,
        seed=None,
        reasoning_effort="low",
        verbosity="low",
    )
    assert answer.choices[0].message.content == "ok"


@pytest.mark.parametrize("stream", [False, True])
def test_another_model_is_not_found(scripted: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        scripted.chat.completions.create(model="gpt", messages=CHAT, stream=stream)
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
    assert "expected a policy that is served here (tiny, base), got 'gpt'" in raised.value.message


def test_the_served_model_is_listed_and_found_and_no_other(scripted: OpenAI) -> None:
    assert [model.id for model in scripted.models.list()] == ["tiny"]
    assert (scripted.models.retrieve("tiny").model_extra or {})["max_model_len"] == 1024
    with pytest.raises(openai.NotFoundError):
        scripted.models.retrieve("org/other")


@pytest.mark.parametrize(
    ("path", "kind"),
    [("chat/completions", "invalid_request_error"), ("messages", "request_too_large")],
)
def test_a_body_that_is_too_large_is_refused_in_its_apis_format(scripted_url: str, path: str, kind: str) -> None:
    body = {"model": "tiny", "max_tokens": 1, "messages": CHAT, "metadata": {"many": [0] * 2_000_000}}

    response = httpx.post(f"{scripted_url}/v1/{path}", json=body)

    assert (response.status_code, response.headers["x-should-retry"]) == (413, "false")
    error = response.json()["error"]
    assert (error["type"], error["code"]) == (kind, "payload_too_large")
    assert ("param" in error, "type" in response.json()) == (
        kind == "invalid_request_error",
        kind != "invalid_request_error",
    )
    assert "expected JSON of at most" in error["message"]


def test_a_prompt_that_is_too_long_is_a_bad_request_of_the_engine(client: OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="expected 1 to 1023 prompt tokens, got 1024"):
            client.completions.create(model="tiny", prompt=[20] * 1024, stream=stream)


def test_weights_that_do_not_come_are_a_conflict(scripted_url: str) -> None:
    with (
        OpenAI(base_url=f"{scripted_url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.ConflictError) as raised,
    ):
        client.chat.completions.create(model="tiny", messages=CHAT, extra_body={"min_weight_version": 6})
    assert raised.value.code == "weights_behind"
    assert raised.value.response.headers["x-should-retry"] == "true"


def test_an_error_is_also_one_of_ours(scripted_url: str) -> None:
    answer = httpx.post(f"{scripted_url}/v1/chat/completions", json={"model": "gpt", "messages": CHAT})
    error = ErrorReply.model_validate(answer.json()).error
    assert (error.code, error.retryable, error.detail) == ("model_not_found", False, {"param": "model"})


def test_a_body_that_is_no_json_is_a_bad_request(scripted_url: str) -> None:
    answer = httpx.post(f"{scripted_url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.fixture
def bare(tmp_path: Path, engine: ScriptedEngine) -> Iterator[OpenAI]:
    """A model folder without a tokenizer."""
    settings = RolloutSettings(model_path=tmp_path, model_name="tiny")
    with served_in_thread(create_app(settings, engine)) as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        yield client


def test_a_model_without_a_tokenizer_says_so_and_is_not_asked_again(bare: OpenAI, engine: ScriptedEngine) -> None:
    with pytest.raises(openai.InternalServerError, match="expected a tokenizer in") as raised:
        bare.completions.create(model="tiny", prompt=[1])
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert raised.value.request.headers["x-stainless-retry-count"] == "0"
