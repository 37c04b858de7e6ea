"""Guided sampling by a real server: answers have their schema, in whole and streamed, and schemas may be refused."""

import json

import pytest

from tests.vllm.vllm_runs import EOS, PROMPT, Weights, tokenizer, worst
from trackway.chat.tool_formats import Hermes
from trackway.model_api.choices import grammar_of
from trackway.rollout.engines.protocol import Capability
from trackway.rollout.engines.remote.engine import RemoteEngine
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.openai import ChatRequest
from trackway.wire.rollout import SamplingParams, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}, "colour": {"enum": ["red", "blue"]}},
    "required": ["count", "colour"],
    "additionalProperties": False,
}

PAINT = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def guided(seed: int = 1, **schema: object) -> SamplingParams:
    grammar = StructuredOutputs.model_validate(schema or {"json": SCHEMA})
    # At a lower temperature this random model writes white space without end, which JSON allows.
    return SamplingParams(max_tokens=600, temperature=2.0, seed=seed, structured_outputs=grammar)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_an_answer_guided_by_a_schema_has_it_and_ends(
    engine: RemoteEngine, first: Weights, streamed: bool, ignore_eos: bool
) -> None:
    assert Capability.STRUCTURED_OUTPUTS in engine.capabilities
    params = guided().model_copy(update={"ignore_eos": ignore_eos, "logprobs": 3})
    if streamed:
        pieces = [piece async for piece in engine.stream(PROMPT, params, "a")]
        ids, reason = [token for piece in pieces for token in piece.token_ids], pieces[-1].finish_reason
    else:
        made = await engine.generate(PROMPT, params, "a")
        ids, reason = made.token_ids, made.finish_reason
        assert worst(made, first.model, params) > 0.1  # they are of what the grammar leaves
        assert made.logprobs[0] == 0.0 and made.top_logprobs[0] == [(made.token_ids[0], 0.0)]  # a brace alone
    answer = json.loads(str(tokenizer().decode(ids[:-1])))

    assert (reason, ids[-1]) == ("stop", EOS)
    assert set(answer) == {"count", "colour"}
    assert answer["count"] in range(100) and answer["colour"] in ("red", "blue")


async def test_an_answer_beside_tools_is_a_call_of_one_of_them_or_has_the_schema(engine: RemoteEngine) -> None:
    asked = ChatRequest.model_validate(
        {
            "model": "any",
            "messages": [{"role": "user", "content": "9+9?"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA}},
            "tools": [
                {"type": "function", "function": {"name": "paint", "parameters": PAINT}},
                {"type": "function", "function": {"name": "stop", "parameters": NOTHING}},
            ],
            "parallel_tool_calls": False,
        }
    )
    params = guided().model_copy(update={"structured_outputs": grammar_of(asked, Hermes())})
    found: set[str] = set()
    for seed in range(24):
        made = await engine.generate(PROMPT, params.model_copy(update={"seed": seed}), "a")
        assert (made.finish_reason, made.token_ids[-1]) == ("stop", EOS)
        text = str(tokenizer().decode(made.token_ids[:-1]))
        if not text.startswith("<tool_call>"):
            answer = json.loads(text)
            assert set(answer) == {"count", "colour"} and answer["colour"] in ("red", "blue")
            found.add("answer")
            continue
        parsed = Hermes().parse(text)
        [call] = parsed.calls
        assert (parsed.content, call.error) == ("", None)
        assert call.arguments in ([{"colour": "red"}, {"colour": "blue"}] if call.name == "paint" else [{}])
        found.add(call.name)
        if len(found) == 3:
            break

    assert found == {"answer", "paint", "stop"}


async def test_a_schema_that_the_server_cannot_guide_by_is_refused_and_the_server_goes_on(engine: RemoteEngine) -> None:
    refused = guided(json={"type": "nonsense"})
    for streamed in (False, True):
        with pytest.raises(
            TrackwayError, match=f"that {engine.settings.engine} can guide by, got its refusal"
        ) as raised:
            if streamed:
                await anext(engine.stream(PROMPT, refused, "a"))
            else:
                await engine.generate(PROMPT, refused, "a")
        assert (raised.value.code, raised.value.detail["param"]) == (ErrorCode.INVALID_REQUEST, "response_format")

    one_of_two = await engine.generate(PROMPT, guided(json={"enum": ["red", "blue"]}), "b")
    assert tokenizer().decode(one_of_two.token_ids[:-1]) in ('"red"', '"blue"')
