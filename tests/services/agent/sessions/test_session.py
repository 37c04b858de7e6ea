"""A session over HTTP: its calls against a scripted model and the real rollout and reward services."""

import asyncio
import json
from typing import Any

import httpx
import httpx2
import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.services.agent.agent_services import AgentServices, call
from tests.services.agent.replaceable import answers
from tests.services.agent.scripted_model import END
from trackway.learner.filtering import TrainStatus, train_status
from trackway.wire.errors import ErrorCode
from trackway.wire.sessions import NodeKind, RootReason, SessionAccess, SessionState
from trackway.wire.trajectory import StopReason, Trajectory, WeightSpan

pytestmark = pytest.mark.anyio

SAMPLE = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "9+9?"}],
    "reward_model": {"ground_truth": "18"},
    "extra_info": {"index": 7},
}
PLAN = {"type": "object", "properties": {"count": {"type": "integer"}}}
QUESTION = [{"role": "user", "content": "9+9?"}]
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
ARGUMENTS = '{"expression": "9+9"}'
SAY_IT = [{"role": "user", "content": "Say it."}]
COUNT, ANSWER = "I will count.\n" + call("calculator", ARGUMENTS) + END, "#### 18" + END


async def opened(services: AgentServices, *script: str, **changes: Any) -> SessionAccess:
    services.model.scripts[0] = list(script)
    limits = {"max_prompt_length": 2048, "max_response_length": 4096}
    body = {"sample": SAMPLE, "sampling_params": {"max_tokens": 512}, "limits": limits, **changes}
    response = await services.client.post("/sessions", json=body)
    assert response.status_code == 200, response.text
    return SessionAccess.model_validate_json(response.text)


def retry(count: int) -> dict[str, str]:
    """The header in which OpenAI's and Anthropic's clients count their retries of a call."""
    return {"x-stainless-retry-count": f"{count}"}


async def chat(
    services: AgentServices, access: SessionAccess, messages: list[dict[str, Any]], retries: int = 0, **fields: Any
) -> httpx.Response:
    body = {"model": "any", "messages": messages, **fields}
    path = f"/sessions/{access.session_id}/v1/chat/completions"
    return await services.client.post(path, json=body, headers=retry(retries))


def logprobs_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The entries of a whole answer or of all chunks of a stream."""
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    bodies = [json.loads(line) for line in lines if line.startswith("{")]
    choices = [choice for body in bodies for choice in body["choices"]]
    return [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]


def message_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


async def ended(services: AgentServices, access: SessionAccess) -> Trajectory:
    response = await services.client.post(f"/sessions/{access.session_id}/end")
    assert response.status_code == 200, response.text
    return Trajectory.model_validate_json(response.text)


async def state(services: AgentServices, access: SessionAccess) -> SessionState:
    response = await services.client.get(f"/sessions/{access.session_id}/trajectory")
    return SessionState.model_validate_json(response.text)


def row_of(trajectory: Trajectory) -> tuple[object, ...]:
    """What is trained of a trajectory of one row."""
    assert trajectory.further_rows == []
    tokens = (trajectory.prompt_ids, trajectory.response_ids, trajectory.response_mask, trajectory.response_logprobs)
    turns = [(turn.index, turn.response_start, turn.response_end, turn.finish_reason) for turn in trajectory.turns]
    return *tokens, trajectory.weight_versions, turns


def rewritten(message: dict[str, Any]) -> dict[str, Any]:
    """The message as a client writes it down again: arguments serialised, text with other white space."""
    calls = json.loads(json.dumps(message["tool_calls"]))
    for tool_call in calls:
        tool_call["function"]["arguments"] = json.dumps(
            json.loads(tool_call["function"]["arguments"]), separators=(",", ":")
        )
    return {"role": "assistant", "content": f"  {message['content']} \n", "tool_calls": calls}


async def two_turns(services: AgentServices, access: SessionAccess, **fields: Any) -> None:
    """A call with a tool, and the answer, as a client that writes messages down again."""
    first = message_of(await chat(services, access, QUESTION, tools=TOOLS, **fields))
    assert first["tool_calls"][0]["function"] == {"name": "calculator", "arguments": ARGUMENTS}
    result = {"role": "tool", "content": "18", "tool_call_id": first["tool_calls"][0]["id"]}
    second = await chat(services, access, [*QUESTION, rewritten(first), result], tools=TOOLS, **fields)
    assert message_of(second)["content"] == "#### 18"


async def test_two_calls_become_the_row_of_the_tool_agent(services: AgentServices) -> None:
    access = await opened(services, COUNT, ANSWER)
    await two_turns(services, access)

    trajectory = await ended(services, access)

    encode = services.model.encode
    prompt = (
        "<|im_start|>system\nTools: calculator<|im_end|>\n<|im_start|>user\n9+9?<|im_end|>\n<|im_start|>assistant\n"
    )
    observation = encode("\n<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n")
    first, answer = encode(COUNT), encode(ANSWER)
    assert trajectory.error is None and trajectory.further_rows == []
    assert trajectory.prompt_ids == encode(prompt)
    assert trajectory.response_ids == first + observation + answer
    assert trajectory.response_mask == [1] * len(first) + [0] * len(observation) + [1] * len(answer)
    assert trajectory.response_logprobs[: len(first)] == [-(place + 1) / 8 for place in range(len(first))]
    assert trajectory.weight_versions == [
        WeightSpan(version=3, start=0, end=len(first)),
        WeightSpan(version=4, start=len(first) + len(observation), end=len(trajectory.response_ids)),
    ]
    assert (trajectory.stop_reason, trajectory.num_turns) == (StopReason.ANSWERED, 4)
    assert trajectory.reward is not None and trajectory.reward.score == 1.0
    assert [seen.token_ids for seen in services.model.seen()] == [
        trajectory.prompt_ids,
        trajectory.prompt_ids + first + observation,
    ]


async def test_a_call_becomes_the_row_of_the_single_turn_agent(services: AgentServices) -> None:
    access = await opened(services, ANSWER)
    await chat(services, access, QUESTION)
    trajectory = await ended(services, access)
    services.model.begin_again()

    of_loop = await services.say(ANSWER, agent_name="single_turn_agent")

    assert row_of(trajectory) == row_of(of_loop)
    assert trajectory.response_ids == services.model.encode(ANSWER)


async def test_a_stream_gives_the_same_and_continues_the_same_way(services: AgentServices) -> None:
    access = await opened(services, COUNT, ANSWER)
    response = await chat(services, access, QUESTION, tools=TOOLS, stream=True)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    [tool_call] = [tool_call for delta in deltas for tool_call in delta.get("tool_calls", [])]
    text = "".join(delta.get("content") or "" for delta in deltas)
    result = {"role": "tool", "content": "18", "tool_call_id": tool_call["id"]}
    message = {"role": "assistant", "content": text, "tool_calls": [tool_call]}

    await chat(services, access, [*QUESTION, message, result], tools=TOOLS, stream=True)

    trajectory = await ended(services, access)
    assert response.text.endswith("data: [DONE]\n\n")
    assert trajectory.further_rows == [] and len(trajectory.turns) == 2


async def test_a_retry_is_answered_from_the_record_streamed_or_not(services: AgentServices) -> None:
    access = await opened(services, COUNT, ANSWER)
    first = message_of(await chat(services, access, QUESTION, tools=TOOLS, stream=False))
    again = message_of(await chat(services, access, QUESTION, retries=1, tools=TOOLS))
    streamed = await chat(services, access, QUESTION, retries=2, tools=TOOLS, stream=True)
    result = {"role": "tool", "content": "18", "tool_call_id": again["tool_calls"][0]["id"]}
    await chat(services, access, [*QUESTION, again, result], tools=TOOLS)

    assert again["content"] == first["content"] and "I will count." in streamed.text
    seen = await state(services, access)
    kinds = [NodeKind.PROMPT, NodeKind.SAMPLED, NodeKind.RETRY, NodeKind.RETRY, NodeKind.OBSERVATION, NodeKind.SAMPLED]
    assert [node.kind for node in seen.nodes] == kinds
    assert len(services.model.requests) == 2
    assert (await ended(services, access)).further_rows == []


async def test_a_client_that_puts_the_stop_string_back_and_repeats_its_code_as_a_call_continues_the_row(
    services: AgentServices,
) -> None:
    code, answer = "I print.\n<code>\nprint(9+9)\n</code>", "<code>\nfinal_answer(18)\n</code>"
    access = await opened(services, code + END, answer + END)
    first = message_of(await chat(services, access, QUESTION, stop=["</code>"]))
    repeated = [{"id": "call_2", "type": "function", "function": {"name": "python", "arguments": "print(9+9)"}}]
    said = [f"{first['content']}</code>", f"Calling tools:\n{repeated}"]
    echo = [{"role": "assistant", "content": [{"type": "text", "text": text}]} for text in said]

    await chat(services, access, [*QUESTION, *echo, {"role": "user", "content": "18"}], stop=["</code>"])

    trajectory = await ended(services, access)
    encode = services.model.encode
    between = encode("<|im_end|>\n<|im_start|>user\n18<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.further_rows == []
    assert trajectory.response_ids == encode(code) + between + encode(answer)
    assert sum(trajectory.response_mask) == len(encode(code)) + len(encode(answer))


async def test_choices_of_a_chat_are_rows_behind_one_prompt_and_one_may_be_continued(services: AgentServices) -> None:
    access = await opened(services, COUNT, ANSWER, ANSWER)
    both = await chat(services, access, QUESTION, n=2, tools=TOOLS, reasoning_effort="low")
    assert both.status_code == 200, both.text
    messages = [choice["message"] for choice in both.json()["choices"]]
    [calling] = [message for message in messages if message.get("tool_calls")]
    result = {"role": "tool", "tool_call_id": calling["tool_calls"][0]["id"], "content": "18"}
    await chat(services, access, [*QUESTION, calling, result], tools=TOOLS)
    trajectory = await ended(services, access)

    count, answer = services.model.encode(COUNT), services.model.encode(ANSWER)
    other, continued = trajectory.rows
    assert other.response_ids == answer and other.response_mask == [1] * len(answer)
    assert continued.prompt_ids == other.prompt_ids
    assert continued.response_ids[: len(count)] == count and continued.response_ids[-len(answer) :] == answer
    assert sum(continued.response_mask) == len(count) + len(answer)
    kinds = [node.kind for node in (await state(services, access)).nodes]
    assert kinds.count(NodeKind.PROMPT) == 1 and kinds.count(NodeKind.SAMPLED) == 3


async def test_compaction_gives_a_second_row_and_one_reward(services: AgentServices) -> None:
    access = await opened(services, COUNT, "18+0" + END, ANSWER)
    await chat(services, access, QUESTION)
    await chat(services, access, [{"role": "user", "content": "So far: 18. Go on."}])
    await chat(services, access, [{"role": "user", "content": "Say it."}])

    trajectory = await ended(services, access)

    encode = services.model.encode
    assert [row.response_ids for row in trajectory.rows] == [encode(COUNT), encode("18+0" + END), encode(ANSWER)]
    assert all(set(row.response_mask) == {1} for row in trajectory.rows)
    assert trajectory.reward is not None and trajectory.reward.score == 1.0
    reasons = [node.reason for node in (await state(services, access)).nodes if node.parent is None]
    assert reasons == [RootReason.FIRST_CALL, RootReason.OTHER_CONVERSATION, RootReason.OTHER_CONVERSATION]


async def test_sampling_is_the_runs_whatever_the_agent_asks_for(services: AgentServices) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 11, "max_tokens": 64}
    access = await opened(services, ANSWER, sampling_params=sampling)
    await chat(services, access, QUESTION, temperature=0.0, top_p=0.1, top_k=2, max_tokens=32, seed=3)

    [seen] = services.model.seen()
    params = seen.sampling_params.model_dump(include={*sampling, "seed"})
    assert params == {**sampling, "max_tokens": 32, "seed": None}


async def test_sampling_of_the_agents_own_and_unknown_fields_are_noted_and_have_no_effect(
    services: AgentServices,
) -> None:
    access = await opened(services, ANSWER)
    own = {"presence_penalty": 0.1, "min_p": 0.2, "logit_bias": {"7": 5}, "top_k": 3.5, "repetition_penalty": 1.1}
    answered = await chat(services, access, QUESTION, **own, thinking={"type": "x"}, store=True, user=None)

    assert message_of(answered)["content"] == "#### 18"
    [seen] = services.model.seen()
    assert (seen.sampling_params.temperature, seen.sampling_params.top_k) == (1.0, -1)
    assert (await state(services, access)).ignored_fields == sorted([*own, "store", "thinking"])


async def test_the_names_of_ignored_fields_are_bounded(services: AgentServices) -> None:
    access = await opened(services, ANSWER)
    await chat(services, access, QUESTION, **{f"{number:02}{'x' * 99}": 1 for number in range(99)})

    names = (await state(services, access)).ignored_fields
    assert (len(names), names[-1]) == (64, "63" + "x" * 62)


@pytest.mark.parametrize("stream", [False, True])
async def test_top_logprobs_come_with_the_answer_and_again_with_a_retry(services: AgentServices, stream: bool) -> None:
    access = await opened(services, ANSWER)
    asked = {"logprobs": True, "top_logprobs": 2, "stream": stream}
    answers = [await chat(services, access, QUESTION, retries, **asked) for retries in range(2)]
    trajectory = await ended(services, access)

    found = [logprobs_of(answer) for answer in answers]
    assert found[0] == found[1] and len(services.model.requests) == 1
    written = services.model.encode(ANSWER)
    assert [entry["logprob"] for entry in found[0]] == [-(place + 1) / 8 for place in range(len(written))]
    assert [[top["logprob"] for top in entry["top_logprobs"]] for entry in found[0]] == [
        [entry["logprob"]] for entry in found[0]
    ]
    assert trajectory.response_logprobs == [entry["logprob"] for entry in found[0]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_guided_answer_is_in_the_trajectory_and_not_trained(services: AgentServices, stream: bool) -> None:
    plan = '{"count": 9}' + END
    access = await opened(services, plan, ANSWER)
    asked: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "plan", "schema": PLAN}}
    }
    guided = await chat(services, access, QUESTION, **asked, stream=stream)
    again = await chat(services, access, QUESTION, retries=1, **asked)
    text = message_of(again)["content"]
    await chat(services, access, [*QUESTION, {"role": "assistant", "content": text}, *SAY_IT])
    trajectory = await ended(services, access)

    assert guided.status_code == 200 and text == '{"count": 9}'
    params = [request.sampling_params for request in services.model.seen()]
    assert [p.structured_outputs and p.structured_outputs.json_schema for p in params] == [PLAN, None]
    first, answer = services.model.encode(plan), services.model.encode(ANSWER)
    between = len(trajectory.response_ids) - len(first) - len(answer)
    assert trajectory.response_ids[: len(first)] == first
    assert trajectory.response_mask == [0] * (len(first) + between) + [1] * len(answer)
    assert [turn.guided for turn in trajectory.turns] == [True, False]
    assert [span.version for span in trajectory.weight_versions] == [4]
    nodes = [node for node in (await state(services, access)).nodes if node.kind is NodeKind.SAMPLED]
    assert [node.guided for node in nodes] == [True, False]


async def test_a_guided_answer_that_is_cut_is_a_retryable_error_and_no_half_of_one(services: AgentServices) -> None:
    services.model.finish_reason = "abort"
    access = await opened(services, '{"count":')
    cut = await chat(services, access, QUESTION, response_format={"type": "json_object"})

    assert (cut.status_code, cut.headers["x-should-retry"]) == (503, "true")
    assert "its grammar cannot be entered in the middle" in cut.json()["error"]["message"]
    assert len(services.model.requests) == 1


async def test_a_format_that_the_engine_cannot_guide_is_refused_by_name(services: AgentServices) -> None:
    services.model.capabilities = frozenset()
    access = await opened(services)
    refused = await chat(services, access, QUESTION, response_format={"type": "json_object"})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
    assert "response_format: expected an engine that guides its sampling" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "asked", [{"logprobs": 1}, {"prompt_logprobs": 0}, {"structured_outputs": {"json_object": True}}]
)
async def test_a_session_whose_every_call_would_be_guided_is_refused(
    services: AgentServices, asked: dict[str, Any]
) -> None:
    response = await services.client.post("/sessions", json={"sample": SAMPLE, "sampling_params": asked})

    assert response.status_code == 422
    assert f"expected sampling_params without {next(iter(asked))}" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("guided_json", {}), ("modalities", ["audio"])],
)
async def test_a_field_that_changes_what_the_client_reads_is_refused_by_name(
    services: AgentServices, field: str, value: Any
) -> None:
    access = await opened(services)
    refused = await chat(services, access, QUESTION, **{field: value})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert f"{field}: expected nothing" in refused.json()["error"]["message"]


async def test_a_call_beyond_the_bound_is_refused_and_names_the_end(services: AgentServices) -> None:
    access = await opened(services, COUNT, bounds={"max_calls": 1})
    await chat(services, access, QUESTION)
    refused = await chat(services, access, [{"role": "user", "content": "8+8?"}])

    assert refused.status_code == 400 and "at most 1 calls" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert (await ended(services, access)).stop_reason is StopReason.MAX_TURNS


async def test_a_call_that_the_engine_refused_uses_up_no_call_and_leaves_no_node(services: AgentServices) -> None:
    full = {"error": {"code": "overloaded", "message": "full", "retryable": True, "detail": {"retry_after_s": 30.0}}}
    services.rollout.faults = [answers(429, json=full)] * 2
    access = await opened(services, COUNT, ANSWER, bounds={"max_calls": 2})

    refused = [(await chat(services, access, QUESTION)).status_code for _ in range(2)]
    said = [message_of(await chat(services, access, messages)) for messages in (QUESTION, SAY_IT)]

    assert refused == [429, 429] and said[1]["content"] == "#### 18"
    kinds = [node.kind for node in (await state(services, access)).nodes]
    assert kinds == [NodeKind.PROMPT, NodeKind.SAMPLED] * 2
    assert (await chat(services, access, [{"role": "user", "content": "8+8?"}])).status_code == 400
    assert (await ended(services, access)).stop_reason is StopReason.MAX_TURNS


async def test_retries_and_token_counts_are_bounded_by_eight_for_each_call(services: AgentServices) -> None:
    access = await opened(services, COUNT, ANSWER, bounds={"max_calls": 2})
    await chat(services, access, QUESTION)
    path = f"/sessions/{access.session_id}/v1/messages/count_tokens"

    retries = [(await chat(services, access, QUESTION, count + 1)).status_code for count in range(15)]
    counted = [await services.client.post(path, json={"model": "any", "messages": QUESTION}) for _ in range(2)]
    refused = await chat(services, access, QUESTION, retries=16)

    assert retries == [200] * 15 and [response.status_code for response in counted] == [200, 400]
    assert refused.status_code == 400
    assert "at most 16 retries and token counts" in refused.json()["error"]["message"]
    assert len((await state(services, access)).nodes) == 2 + 16
    assert (await chat(services, access, SAY_IT)).status_code == 200
    assert (await ended(services, access)).stop_reason is StopReason.MAX_TURNS


async def test_a_prompt_over_its_limit_names_the_limit_and_ends_the_session_by_its_name(
    services: AgentServices,
) -> None:
    limits = {"max_prompt_length": 60, "max_response_length": 4096}
    access = await opened(services, ANSWER, limits=limits)
    await chat(services, access, QUESTION)
    long = "9" * 90
    refused = await chat(services, access, [{"role": "user", "content": long}])
    path = f"/sessions/{access.session_id}/v1/completions"
    completion = await services.client.post(path, json={"model": "any", "prompt": long})
    ids = await services.client.post(path, json={"model": "any", "prompt": services.model.encode(long)})

    for response in (refused, completion, ids):
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "at most 60 tokens (limits.max_prompt_length)" in message and "max_model_len" not in message
    trajectory = await ended(services, access)
    assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.MAX_PROMPT)
    assert trajectory.response_ids == services.model.encode(ANSWER)


async def test_a_session_whose_only_prompt_is_over_its_limit_fails_with_that_limit(services: AgentServices) -> None:
    access = await opened(services, limits={"max_prompt_length": 20, "max_response_length": 4096})
    await chat(services, access, QUESTION)

    trajectory = await ended(services, access)

    assert trajectory.error is not None and trajectory.error.code == "invalid_request"
    assert "at most 20 tokens (limits.max_prompt_length), got at least" in trajectory.error.message


async def test_a_token_count_over_the_limits_names_them_and_ends_nothing(services: AgentServices) -> None:
    access = await opened(services, ANSWER, limits={"max_prompt_length": 60, "max_response_length": 60})
    body = {"model": "any", "messages": [{"role": "user", "content": "9" * 200}]}
    refused = await services.client.post(f"/sessions/{access.session_id}/v1/messages/count_tokens", json=body)
    await chat(services, access, QUESTION)

    assert refused.status_code == 400
    bound = "at most 120 tokens (limits.max_prompt_length and limits.max_response_length)"
    assert bound in refused.json()["error"]["message"]
    assert (await ended(services, access)).stop_reason is StopReason.ANSWERED


@pytest.mark.parametrize(
    ("choice", "prefix"),
    [
        ("required", "<tool_call>"),
        (
            {"type": "function", "function": {"name": "calculator"}},
            '<tool_call>\n{"name": "calculator", "arguments":',
        ),
    ],
)
async def test_a_forced_tool_call_is_a_call_of_its_turn(services: AgentServices, choice: object, prefix: str) -> None:
    written = call("calculator", ARGUMENTS).removeprefix(prefix) + END
    access = await opened(services, written)
    message = message_of(await chat(services, access, QUESTION, tools=TOOLS, tool_choice=choice))

    trajectory = await ended(services, access)

    [said] = trajectory.turns[0].messages
    assert said.tool_calls is not None and said.content == ""
    functions = [tool_call.function.model_dump() for tool_call in said.tool_calls]
    assert functions == [message["tool_calls"][0]["function"]] == [{"name": "calculator", "arguments": ARGUMENTS}]
    assert trajectory.response_ids == services.model.encode(written)
    assert trajectory.prompt_ids[-len(services.model.encode(prefix)) :] == services.model.encode(prefix)


async def test_tokens_of_all_calls_are_bounded(services: AgentServices) -> None:
    length = len(services.model.encode(ANSWER))
    access = await opened(services, ANSWER, ANSWER, bounds={"max_tokens": length + 2})
    await chat(services, access, QUESTION)
    cut = await chat(services, access, [{"role": "user", "content": "8+8?"}])
    refused = await chat(services, access, [{"role": "user", "content": "7+7?"}])

    assert cut.json()["choices"][0]["finish_reason"] == "length" and cut.json()["usage"]["completion_tokens"] == 2
    assert refused.status_code == 400
    assert (await ended(services, access)).stop_reason is StopReason.MAX_RESPONSE


async def test_a_session_ends_by_its_time_with_what_was_written(services: AgentServices) -> None:
    limits = {"max_prompt_length": 2048, "max_response_length": 4096, "timeout_s": 1.0}
    access = await opened(services, ANSWER, limits=limits)
    await chat(services, access, QUESTION)

    trajectory = await _ended_by_itself(services, access)

    assert trajectory.error is not None and trajectory.error.code == "deadline_exceeded"
    assert trajectory.response_ids == services.model.encode(ANSWER)
    refused = await chat(services, access, [{"role": "user", "content": "8+8?"}])
    assert refused.status_code == 400
    message = "the session has ended (by /end, with its agent, or by limits.timeout_s); open another one"
    assert refused.json()["error"]["message"] == message


async def _ended_by_itself(services: AgentServices, access: SessionAccess) -> Trajectory:
    async with asyncio.timeout(60):
        while (seen := await state(services, access)).trajectory is None:
            await asyncio.sleep(0.005)
    return seen.trajectory


async def test_a_posted_reward_replaces_the_reward_services(services: AgentServices) -> None:
    access = await opened(services, "I do not know" + END)
    await chat(services, access, QUESTION)
    body = {"score": 0.25, "components": {"style": 1.0}}
    await services.client.post(f"/sessions/{access.session_id}/reward", json=body)

    reward = (await ended(services, access)).reward

    assert reward is not None and (reward.score, reward.components) == (0.25, {"style": 1.0})


@pytest.mark.parametrize("body", [{"score": 3.5e38}, {"score": 1.0, "components": {"style": -1e308}}])
async def test_a_reward_beyond_float32_is_refused(services: AgentServices, body: dict[str, Any]) -> None:
    access = await opened(services, "I do not know" + END)
    await chat(services, access, QUESTION)

    answer = await services.client.post(f"/sessions/{access.session_id}/reward", json=body)

    assert answer.status_code == 422
    assert "than or equal to" in answer.json()["error"]["message"]


async def test_a_posted_reward_has_at_most_128_components(services: AgentServices) -> None:
    access = await opened(services)
    body = {"score": 0.25, "components": {f"{number}": 1.0 for number in range(129)}}

    refused = await services.client.post(f"/sessions/{access.session_id}/reward", json=body)

    assert refused.status_code == 422
    assert "components: Dictionary should have at most 128 items" in refused.json()["error"]["message"]


async def test_the_scores_of_calls_are_noted_and_their_sum_is_the_sessions(services: AgentServices) -> None:
    access = await opened(services, COUNT, "I do not know" + END)
    path = f"/sessions/{access.session_id}/reward"
    first = (await chat(services, access, QUESTION)).json()["id"]
    second = (await chat(services, access, [{"role": "user", "content": "Say it."}])).json()["id"]
    for call_id, score in ((first, 0.5), (second, -0.25)):
        assert (await services.client.post(path, json={"score": score, "call_id": call_id})).status_code == 200
    unknown = await services.client.post(path, json={"score": 1.0, "call_id": "chatcmpl-0"})

    trajectory = await ended(services, access)

    assert unknown.status_code == 404 and "chatcmpl-0" in unknown.json()["error"]["message"]
    rewards = [node.reward for node in (await state(services, access)).nodes if node.kind is NodeKind.SAMPLED]
    assert rewards == [0.5, -0.25]
    assert trajectory.reward is not None
    assert (trajectory.reward.score, trajectory.reward.components) == (0.25, {"call/0": 0.5, "call/1": -0.25})
    assert trajectory.reward.turn_scores == [0.5, -0.25]


async def test_a_reward_after_the_end_is_refused_and_changes_nothing(services: AgentServices) -> None:
    access = await opened(services, ANSWER)
    call_id = (await chat(services, access, QUESTION)).json()["id"]
    trajectory = await ended(services, access)

    for body in ({"score": 0.25}, {"score": 0.25, "call_id": call_id}):
        late = await services.client.post(f"/sessions/{access.session_id}/reward", json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "conflict")
        assert "post it before /end" in late.json()["error"]["message"]

    assert trajectory.reward is not None and trajectory.reward.score == 1.0
    seen = await state(services, access)
    assert seen.trajectory == trajectory and [node.reward for node in seen.nodes] == [None, None]


async def test_a_full_rollout_service_is_answered_with_the_time_to_wait(services: AgentServices) -> None:
    full = {"error": {"code": "overloaded", "message": "full", "retryable": True, "detail": {"retry_after_s": 30.0}}}
    services.rollout.faults = [answers(429, json=full)]
    access = await opened(services, ANSWER)

    refused = await chat(services, access, QUESTION)
    again = await chat(services, access, QUESTION)

    assert (refused.status_code, refused.headers["retry-after"], refused.headers["x-should-retry"]) == (
        429,
        "30",
        "true",
    )
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert message_of(again)["content"] == "#### 18"
    trajectory = await ended(services, access)
    assert [row.response_ids for row in trajectory.rows] == [services.model.encode(ANSWER)]


async def test_a_title_is_answered_and_left_out_of_the_rows(services: AgentServices) -> None:
    access = await opened(services, "A sum" + END, ANSWER)
    title = [{"role": "system", "content": "You are a title generator."}, *QUESTION]
    assert message_of(await chat(services, access, title))["content"] == "A sum"
    await chat(services, access, QUESTION)

    trajectory = await ended(services, access)

    assert [row.response_ids for row in trajectory.rows] == [services.model.encode(ANSWER)]


async def test_the_scorer_gets_the_conversation_of_the_last_call_that_is_no_title(services: AgentServices) -> None:
    access = await opened(services, COUNT, ANSWER, ANSWER, "A sum" + END)
    developer = {"role": "developer", "content": [{"type": "text", "text": "Add."}, {"type": "text", "text": "Say."}]}
    await two_turns(services, access)
    await chat(services, access, [developer, *QUESTION])
    await chat(services, access, [{"role": "system", "content": "You are a title generator."}, *QUESTION])

    await ended(services, access)

    [request] = services.reward.requests
    said = {"role": "assistant", "content": "#### 18"}
    told = [{name: value for name, value in message.items() if value} for message in told_of(request)]
    assert told == [{"role": "system", "content": "Add.\nSay."}, *QUESTION, said]


def told_of(request: httpx.Request) -> list[dict[str, Any]]:
    return json.loads(request.content)["messages"]


async def test_a_task_of_titles_is_trained(services: AgentServices) -> None:
    access = await opened(services, "A sum" + END, "Nine and nine" + END)
    title = [{"role": "system", "content": "Generate a title for this article."}, *QUESTION]
    await chat(services, access, title)
    await chat(services, access, [title[0], {"role": "user", "content": "8+8?"}])

    trajectory = await ended(services, access)

    encode = services.model.encode
    assert [row.response_ids for row in trajectory.rows] == [encode("A sum" + END), encode("Nine and nine" + END)]
    seen = (await state(services, access)).nodes
    assert [node.kind for node in seen] == [NodeKind.PROMPT, NodeKind.SAMPLED] * 2
    assert [node.reason for node in seen][::2] == [RootReason.FIRST_CALL, RootReason.FIRST_CALL]


async def test_a_title_that_is_talked_about_is_the_task(services: AgentServices) -> None:
    access = await opened(services, "A sum" + END, "Sum" + END)
    title = [{"role": "system", "content": "Generate a title for this article."}, *QUESTION]
    first = message_of(await chat(services, access, title))
    await chat(services, access, [*title, first, {"role": "user", "content": "Shorter."}])

    trajectory = await ended(services, access)

    assert trajectory.further_rows == [] and len(trajectory.turns) == 2
    assert sum(trajectory.response_mask) == len(services.model.encode("A sum" + END + "Sum" + END))


async def test_a_session_without_a_call_ends_by_that_name_and_has_no_score(services: AgentServices) -> None:
    access = await opened(services)
    await services.client.post(f"/sessions/{access.session_id}/reward", json={"score": 1.0})

    trajectory = await ended(services, access)

    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ERROR, None)
    assert trajectory.error is not None and trajectory.error.code is ErrorCode.AGENT_FAILED
    assert f"call the model at {access.base_url}, it ended and made no call" in trajectory.error.message
    assert train_status(trajectory, 3, None) is TrainStatus.ERROR


async def test_a_session_that_only_counted_tokens_was_answered_nothing(services: AgentServices) -> None:
    access = await opened(services)
    body = {"model": "any", "messages": QUESTION}
    await services.client.post(f"/sessions/{access.session_id}/v1/messages/count_tokens", json=body)

    trajectory = await ended(services, access)

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.AGENT_FAILED
    assert "it ended and none of its 1 calls was answered" in trajectory.error.message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_whose_calls_all_failed_ends_with_the_last_failure(
    services: AgentServices, stream: bool
) -> None:
    full = {"error": {"code": "overloaded", "message": "full", "retryable": True, "detail": {"retry_after_s": 30.0}}}
    services.rollout.faults = [answers(429, json=full)] * (2 if stream else 1)  # a stream is tried whole, too
    access = await opened(services)
    assert (await chat(services, access, QUESTION, stream=stream)).status_code == 429

    trajectory = await ended(services, access)

    assert trajectory.error is not None and trajectory.error.code is ErrorCode.OVERLOADED
    assert train_status(trajectory, 3, None) is TrainStatus.INFRASTRUCTURE


async def test_a_title_is_not_the_task_when_the_engine_refused_the_tasks_call(services: AgentServices) -> None:
    full = {"error": {"code": "overloaded", "message": "full", "retryable": True, "detail": {"retry_after_s": 30.0}}}
    access = await opened(services, "A sum" + END)
    await chat(services, access, [{"role": "system", "content": "You are a title generator."}, *QUESTION])
    services.rollout.faults = [answers(429, json=full)]
    assert (await chat(services, access, QUESTION)).status_code == 429

    assert (await ended(services, access)).response_ids == []


async def test_foreign_session_headers_are_recorded_only(services: AgentServices) -> None:
    access = await opened(services, ANSWER)
    await services.client.post(
        f"/sessions/{access.session_id}/v1/chat/completions",
        json={"model": "any", "messages": QUESTION},
        headers={"x-claude-code-session-id": "abc", "user-agent": "Agents/Python"},
    )

    assert (await state(services, access)).attributes == {
        "x-claude-code-session-id": "abc",
        "user-agent": "Agents/Python",
    }


async def test_a_deleted_session_is_unknown(services: AgentServices) -> None:
    access = await opened(services)
    assert (await services.client.delete(f"/sessions/{access.session_id}")).status_code == 200

    assert (await chat(services, access, QUESTION)).status_code == 404


async def test_the_models_list_names_the_context_length(services: AgentServices) -> None:
    access = await opened(services)

    response = await services.client.get(f"/sessions/{access.session_id}/v1/models")

    assert [(model["id"], model["max_model_len"]) for model in response.json()["data"]] == [("policy", 6144)]


async def test_openais_client_finds_the_model_by_its_name_and_no_other(services: AgentServices) -> None:
    access = await opened(services)
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(services.agent))
    for path, key in ((f"/sessions/{access.session_id}", "any"), ("", access.api_key)):
        client = AsyncOpenAI(base_url=f"http://agent{path}/v1", api_key=key, http_client=http, max_retries=0)

        assert (await client.models.retrieve("policy")).model_extra == {"max_model_len": 6144}
        with pytest.raises(
            NotFoundError, match="expected the model 'policy', got 'org/gpt'; calls may name any"
        ) as raised:
            await client.models.retrieve("org/gpt")
        assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
        assert raised.value.type == "invalid_request_error"
