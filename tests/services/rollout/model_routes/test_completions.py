"""`/v1/completions` through OpenAI's client, on the torch engine."""

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI
from transformers import PreTrainedTokenizerBase

from tests.services.rollout.model_routes.openai_server import extra
from trackway.wire import rollout as wire
from trackway.wire.rollout import GenerateReply

IDS = {"return_token_ids": True}


def generated(url: str, prompt: list[int], seed: int, max_tokens: int) -> GenerateReply:
    """What the service's own route says."""
    params = {"seed": seed, "max_tokens": max_tokens}
    answer = httpx.post(f"{url}/inference/v1/generate", json={"token_ids": prompt, "sampling_params": params})
    return GenerateReply.model_validate(answer.json())


def test_the_tokens_are_those_of_generate_with_the_same_seed(
    client: OpenAI, torch_url: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = tokenizer.encode("12 + 30 =", add_special_tokens=False)
    ours = generated(torch_url, prompt, seed=4, max_tokens=40).choices[0]
    answer = client.completions.create(
        model="tiny", prompt="12 + 30 =", seed=4, max_tokens=40, logprobs=0, extra_body=IDS
    )
    choice = answer.choices[0]
    assert extra(choice)["token_ids"] == ours.token_ids
    assert extra(choice)["prompt_token_ids"] == prompt
    assert extra(choice)["weight_versions"] == [{"version": 0, "start": 0, "end": len(ours.token_ids)}]
    assert choice.logprobs.token_logprobs == pytest.approx(ours.token_logprobs, abs=1e-5)
    assert choice.text == tokenizer.decode(ours.token_ids, skip_special_tokens=True)
    assert choice.finish_reason == ours.finish_reason
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ours.token_ids),
        "total_tokens": len(prompt) + len(ours.token_ids),
    }
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "tiny", "cmpl-")


def test_token_ids_as_a_prompt_give_what_their_text_gives(client: OpenAI, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode("7 * 6 =", add_special_tokens=False)
    answers = [client.completions.create(model="tiny", prompt=prompt, seed=1) for prompt in ("7 * 6 =", ids)]
    assert answers[0].choices[0].text == answers[1].choices[0].text


def test_sixteen_tokens_are_made_when_nobody_says_how_many(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[20, 13], extra_body={"ignore_eos": True})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_several_prompts_with_several_choices_are_numbered_through(client: OpenAI, torch_url: str) -> None:
    answer = client.completions.create(
        model="tiny", prompt=[[20, 13], [20, 31, 9]], n=2, seed=8, max_tokens=12, extra_body={"ignore_eos": True, **IDS}
    )
    alone = [
        client.completions.create(
            model="tiny", prompt=prompt, seed=seed, max_tokens=12, extra_body={"ignore_eos": True, **IDS}
        ).choices[0]
        for prompt in ([20, 13], [20, 31, 9])
        for seed in (8, 9)
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.model_extra for choice in answer.choices] == [choice.model_extra for choice in alone]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 48)


def test_several_texts_are_several_prompts(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["1 + 1 =", "2 + 2 ="], temperature=0)
    alone = [client.completions.create(model="tiny", prompt=text, temperature=0) for text in ("1 + 1 =", "2 + 2 =")]
    assert [choice.text for choice in answer.choices] == [completion.choices[0].text for completion in alone]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_stream_says_what_the_whole_answer_says(client: OpenAI, seed: int) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "12 + 30 =", "seed": seed, "max_tokens": 60, "logprobs": 0}
    whole = client.completions.create(**asked, extra_body=IDS).choices[0]
    choices = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True, extra_body=IDS)]
    assert "".join(choice.text for choice in choices) == whole.text
    assert [token for choice in choices for token in extra(choice)["token_ids"]] == extra(whole)["token_ids"]
    assert [offset for choice in choices for offset in choice.logprobs.text_offset or []] == whole.logprobs.text_offset
    assert [token for choice in choices for token in choice.logprobs.tokens or []] == whole.logprobs.tokens
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [whole.finish_reason]
    assert ["prompt_token_ids" in extra(choice) for choice in choices] == [True] + [False] * (len(choices) - 1)


def test_a_stream_of_two_choices_counts_both_at_its_end(client: OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=[20, 13],
            n=2,
            seed=3,
            max_tokens=10,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    whole = client.completions.create(
        model="tiny", prompt=[20, 13], n=2, seed=3, max_tokens=10, extra_body={"ignore_eos": True}
    )
    texts = ["".join(c.choices[0].text for c in chunks[:-1] if c.choices[0].index == index) for index in (0, 1)]
    assert texts == [choice.text for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.model_dump(exclude_none=True) == whole.usage.model_dump(exclude_none=True)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_a_stop_string_cuts_the_text_and_ends_the_generation(client: OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=[20, 13, 20, 31], seed=1, logprobs=0)
    assert whole.choices[0].text == '2222---"}}\n22222222'
    cut = client.completions.create(model="tiny", prompt=[20, 13, 20, 31], seed=1, logprobs=0, stop=["2-", "}"])
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("222", "stop")
    assert cut.choices[0].logprobs.tokens == (whole.choices[0].logprobs.tokens or [])[:5]
    assert cut.usage.completion_tokens == 5


def test_a_stop_token_ends_the_generation_and_is_no_text(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=[20, 13, 20, 31], seed=1, extra_body={"stop_token_ids": [15], **IDS}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("2222", "stop")
    assert extra(answer.choices[0])["token_ids"] == [20, 20, 20, 20, 15]


def test_logprobs_name_tokens_by_text_or_by_id_and_say_where_they_begin(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [20, 13, 20, 31], "seed": 1, "max_tokens": 9, "logprobs": 0}
    texts = client.completions.create(**asked).choices[0].logprobs
    ids = client.completions.create(**asked, extra_body={"return_tokens_as_token_ids": True}).choices[0].logprobs
    assert texts.tokens == ["2", "2", "2", "2", "-", "-", "-", '"}}\n', "2"]
    assert texts.text_offset == [0, 1, 2, 3, 4, 5, 6, 7, 11]
    assert ids.tokens == [f"token_id:{token}" for token in (20, 20, 20, 20, 15, 15, 15, 325, 20)]
    assert texts.top_logprobs == [
        {token: logprob} for token, logprob in zip(texts.tokens, texts.token_logprobs, strict=True)
    ]


def test_the_likeliest_tokens_are_named_beside_the_sampled_ones(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [20, 13, 20, 31], "seed": 1, "max_tokens": 9}
    plain = client.completions.create(**asked, logprobs=0).choices[0].logprobs
    ids = {"return_tokens_as_token_ids": True}
    ranked = client.completions.create(**asked, logprobs=3, extra_body=ids).choices[0].logprobs
    chunks = [*client.completions.create(**asked, logprobs=3, stream=True, extra_body=ids)]

    assert ranked.token_logprobs == pytest.approx(plain.token_logprobs, abs=1e-5)
    tokens, logprobs = ranked.tokens or [], ranked.token_logprobs or []
    for token, logprob, top in zip(tokens, logprobs, ranked.top_logprobs or [], strict=True):
        assert len(top) == 3 and top[token] == logprob
        assert [*top.values()] == sorted(top.values(), reverse=True)
    streamed = [top for chunk in chunks for top in chunk.choices[0].logprobs.top_logprobs or []]
    assert [[*top] for top in streamed] == [[*top] for top in ranked.top_logprobs or []]


def test_sampling_parameters_reach_the_engine(client: OpenAI) -> None:
    greedy = client.completions.create(model="tiny", prompt="1 + 2 =", temperature=0, max_tokens=30).choices[0].text
    narrow: list[dict[str, Any]] = [{"top_p": 0.0001}, {"top_p": 0}, {"extra_body": {"top_k": 1}}]
    for one_candidate in narrow:
        answer = client.completions.create(model="tiny", prompt="1 + 2 =", seed=5, max_tokens=30, **one_candidate)
        assert answer.choices[0].text == greedy


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_are_in_the_first_choice_of_each_prompt(torch_url: str, stream: bool) -> None:
    prompts = [[20, 13, 9], [20, 31]]
    body = {"model": "tiny", "prompt": prompts, "n": 2, "max_tokens": 4, "prompt_logprobs": 2, "stream": stream}
    answer = httpx.post(f"{torch_url}/v1/completions", json=body)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] if stream else [answer.text]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    found = {choice["index"]: choice["prompt_logprobs"] for choice in choices if "prompt_logprobs" in choice}
    assert [*sorted(found)] == [0, 2]
    for index, prompt in zip((0, 2), prompts, strict=True):
        params = {"max_tokens": 1, "prompt_logprobs": 2}
        alone = httpx.post(f"{torch_url}/generate", json={"token_ids": prompt, "sampling_params": params}).json()
        assert found[index]["top_ids"] == alone["prompt_logprobs"]["top_ids"]
        assert found[index]["logprobs"] == pytest.approx(alone["prompt_logprobs"]["logprobs"], abs=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_of_a_chat_is_scored_once(torch_url: str, stream: bool) -> None:
    messages = [{"role": "user", "content": "1 + 2 ="}]
    body = {"model": "tiny", "messages": messages, "n": 2, "max_tokens": 4, "return_token_ids": True}
    answer = httpx.post(f"{torch_url}/v1/chat/completions", json={**body, "prompt_logprobs": 2, "stream": stream})
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] if stream else [answer.text]
    answers = [json.loads(event) for event in events]
    [found] = [answer["prompt_logprobs"] for answer in answers if "prompt_logprobs" in answer]
    prompt = next(answer["prompt_token_ids"] for answer in answers if "prompt_token_ids" in answer)
    params = {"max_tokens": 1, "prompt_logprobs": 2}
    alone = httpx.post(f"{torch_url}/generate", json={"token_ids": prompt, "sampling_params": params}).json()
    assert found["top_ids"] == alone["prompt_logprobs"]["top_ids"]
    assert found["logprobs"] == pytest.approx(alone["prompt_logprobs"]["logprobs"], abs=1e-5)


def test_prompt_logprobs_of_all_prompts_together_are_bounded(torch_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PROMPT_LOGPROBS", 3)
    body = {"model": "tiny", "prompt": [[20, 13, 9], [20, 31, 9]], "max_tokens": 1, "prompt_logprobs": 0}
    error = httpx.post(f"{torch_url}/v1/completions", json=body).json()["error"]
    assert error["message"].startswith("prompt_logprobs: expected at most 3 logprobs in a reply, got 4 of 4 prompt")


def test_a_stop_string_leaves_the_prompt_logprobs(torch_url: str) -> None:
    body = {
        "model": "tiny",
        "prompt": [20, 13, 9],
        "max_tokens": 9,
        "prompt_logprobs": 0,
        "seed": 1,
        "ignore_eos": True,
    }
    text = httpx.post(f"{torch_url}/v1/completions", json=body).json()["choices"][0]["text"]
    [choice] = httpx.post(f"{torch_url}/v1/completions", json={**body, "stop": text[:1]}).json()["choices"]
    assert (choice["text"], len(choice["prompt_logprobs"]["logprobs"])) == ("", 2)
