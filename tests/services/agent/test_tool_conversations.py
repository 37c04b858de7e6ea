"""A conversation with a tool in each format: by the agent loop, and by OpenAI's client through a session."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, BadRequestError
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, group, open_services
from tests.services.chat.families import FAMILIES
from trackway.agent import Parsed, ParsedCall, ToolFormat, register_tool_format
from trackway.agent.settings import AgentSettings
from trackway.wire.sessions import SessionAccess
from trackway.wire.trajectory import StopReason, TokenRow, Trajectory, Turn

pytestmark = pytest.mark.anyio

ARGUMENTS = '{"expression": "9+9"}'
TOOLS: Any = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
QUESTION: Any = {"role": "user", "content": "9+9?"}


@register_tool_format("spoken")
class Spoken(ToolFormat):
    """A project's own format: `CALL` and an expression."""

    def parse(self, text: str, parameters: object = None) -> Parsed:
        """The call behind the mark."""
        content, mark, expression = text.partition("CALL ")
        arguments = f'{{"expression": "{expression}"}}'
        return Parsed(
            content.strip(), [ParsedCall("calculator", {"expression": expression}, arguments)] if mark else []
        )


@dataclass(frozen=True)
class Talk:
    """What the model of a family writes to call the calculator."""

    family: str
    words: str
    content: str = "I count."
    tool_parser: str | None = None
    """The setting; None lets the template tell."""


XML = (
    "I count.\n<tool_call>\n<function=calculator>\n<parameter=expression>\n9+9\n</parameter>\n</function>\n</tool_call>"
)
TALKS = {
    "hermes": Talk("qwen", f'I count.\n<tool_call>\n{{"name": "calculator", "arguments": {ARGUMENTS}}}\n</tool_call>'),
    "qwen3_coder": Talk("qwen", XML, tool_parser="qwen3_coder"),
    "llama3_json": Talk("llama3", f'{{"name": "calculator", "parameters": {ARGUMENTS}}}', ""),
    "mistral": Talk("mistral", f'[TOOL_CALLS] [{{"name": "calculator", "arguments": {ARGUMENTS}}}]', ""),
    "pythonic": Talk("llama3", '[calculator(expression="9+9")]', "", "pythonic"),
    "spoken": Talk("qwen", "I count. CALL 9+9", tool_parser="spoken"),
}
Open = Callable[[str, str | None], AbstractAsyncContextManager[AgentServices]]


@pytest.fixture
def with_family(settings: AgentSettings, tmp_path: Path) -> Open:
    """Opens the services with a family's tokenizer."""

    @asynccontextmanager
    async def opened(family: str, tool_parser: str | None) -> AsyncIterator[AgentServices]:
        tokenizer = FAMILIES[family].tokenizer()
        tokenizer.save_pretrained(tmp_path)
        own = {"model_path": str(tmp_path), "tool_parser": tool_parser}
        async with open_services(settings.model_copy(update=own), tokenizer) as services:
            services.model.finish_reason = "stop"
            yield services

    return opened


def said(turn: Turn) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of a turn as they are stored."""
    message = turn.messages[0]
    return message.content, [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def parts(row: Trajectory | TokenRow) -> list[tuple[int, list[int]]]:
    """The response as runs of tokens with the same mask."""
    runs: list[tuple[int, list[int]]] = []
    for mask, token in zip(row.response_mask, row.response_ids, strict=True):
        if not runs or runs[-1][0] != mask:
            runs.append((mask, []))
        runs[-1][1].append(token)
    return runs


def between(tokenizer: PreTrainedTokenizerFast, call_id: str) -> str:
    """The text that the template puts between the model's call and its next turn."""
    result = {"role": "tool", "content": "18", "tool_call_id": call_id, "name": "calculator"}
    conversation = [QUESTION, {"role": "assistant", "content": "written"}, result]
    whole = str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    return whole.partition("written")[2]


def check_tokens(row: Trajectory, services: AgentServices, written: list[str], call_id: str) -> None:
    """The written ids train, and between them is what the template writes, without what the model wrote of it."""
    tokenizer = services.model.tokenizer
    first, second = map(services.model.encode, written)
    glue = tokenizer.encode("e" + between(tokenizer, call_id), add_special_tokens=False)
    glue = glue[len(tokenizer.encode("e", add_special_tokens=False)) :]
    assert glue[0] == first[-1]
    assert parts(row) == [(1, first), (0, glue[1:]), (1, second)]


@pytest.mark.parametrize("name", TALKS)
async def test_the_agent_loop_runs_the_call_of_each_format(with_family: Open, name: str) -> None:
    talk = TALKS[name]
    end = FAMILIES[talk.family].end
    async with with_family(talk.family, talk.tool_parser) as services:
        trajectory = await services.say(talk.words + end, "#### 18" + end, limits__max_prompt_length=4096)

        assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.ANSWERED)
        assert said(trajectory.turns[0]) == (talk.content, [("calculator", ARGUMENTS)])
        assert [call.tool for call in trajectory.turns[0].calls] == ["calculator"]
        assert trajectory.reward is not None and trajectory.reward.score == 1.0
        check_tokens(trajectory, services, [talk.words + end, "#### 18" + end], "call00000")


async def test_xml_values_get_the_types_of_the_offered_tools(with_family: Open) -> None:
    xml = "<tool_call><function=counter><parameter=refuse>true</parameter></function></tool_call><|im_end|>"
    typed = {"type": "object", "properties": {"refuse": {"type": "boolean"}}}
    tools = [{"type": "function", "function": {"name": "counter", "parameters": typed}}]
    async with with_family("qwen", "qwen3_coder") as services:
        trajectory = await services.say(xml, "18<|im_end|>", limits__max_prompt_length=4096)
        services.model.begin_again()
        access = await opened(services, xml)
        message = await asked(client_of(services, access), [QUESTION], False, tools=tools)

    assert said(trajectory.turns[0]) == ("", [("counter", '{"refuse": true}')])
    assert trajectory.turns[0].messages[1].content == "Error executing tool 'counter': expected no refuse, got one"
    assert message["tool_calls"][0]["function"] == {"name": "counter", "arguments": '{"refuse": true}'}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", TALKS)
async def test_openais_client_gets_the_call_that_is_stored(with_family: Open, name: str, stream: bool) -> None:
    talk = TALKS[name]
    end = FAMILIES[talk.family].end
    async with with_family(talk.family, talk.tool_parser) as services:
        access = await opened(services, talk.words + end, "#### 18" + end)
        client = client_of(services, access)

        message = await asked(client, [QUESTION], stream)
        [call] = message["tool_calls"]
        result = {"role": "tool", "content": "18", "tool_call_id": call["id"]}
        answer = await asked(client, [QUESTION, message, result], stream)

        assert (message["content"] or "", call["function"]) == (
            talk.content,
            {"name": "calculator", "arguments": ARGUMENTS},
        )
        assert (answer["content"], answer["tool_calls"]) == ("#### 18", [])
        trajectory = await ended(services, access)
        assert said(trajectory.turns[0]) == (talk.content, [("calculator", ARGUMENTS)])
        stored = trajectory.turns[0].messages[0].tool_calls
        assert stored is not None and stored[0].id == call["id"]
        assert trajectory.further_rows == []
        check_tokens(trajectory, services, [talk.words + end, "#### 18" + end], call["id"])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic"])
async def test_a_forced_call_begins_as_its_format_does(with_family: Open, name: str) -> None:
    talk = TALKS[name]
    forced = {
        "hermes": '<tool_call>\n{"name": "calculator", "arguments":',
        "qwen3_coder": "<tool_call>\n<function=calculator>\n",
        "llama3_json": '{"name": "calculator", "parameters":',
        "mistral": '[TOOL_CALLS] [{"name": "calculator", "arguments":',
        "pythonic": "[calculator(",
    }[name]
    rest = (talk.words.removeprefix("I count.\n")).removeprefix(forced)
    async with with_family(talk.family, talk.tool_parser) as services:
        access = await opened(services, rest + FAMILIES[talk.family].end)
        choice = {"type": "function", "function": {"name": "calculator"}}

        message = await asked(client_of(services, access), [QUESTION], False, tool_choice=choice)

        [call] = message["tool_calls"]
        assert call["function"] == {"name": "calculator", "arguments": ARGUMENTS}
        prompt = str(services.model.tokenizer.decode(services.model.requests[0][1].token_ids))
        assert prompt.endswith(forced)
        trajectory = await ended(services, access)
        assert said(trajectory.turns[0]) == ("", [("calculator", ARGUMENTS)])
        assert parts(trajectory) == [(1, services.model.encode(rest + FAMILIES[talk.family].end))]


@pytest.mark.parametrize("name", [name for name in TALKS if name != "spoken"])
async def test_a_call_cut_by_the_limit_is_stored_as_text(with_family: Open, name: str) -> None:
    talk = TALKS[name]
    cut = talk.words[: -len("</tool_call>")] if "</tool_call>" in talk.words else talk.words[:-3]
    async with with_family(talk.family, talk.tool_parser) as services:
        services.model.finish_reason = "length"

        trajectory = await services.say(cut, limits__max_prompt_length=4096, trace=True)

        [turn] = trajectory.turns
        assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.MAX_RESPONSE)
        assert (turn.finish_reason, turn.messages[0].content.split(), turn.messages[0].tool_calls) == (
            "length",
            cut.split(),
            None,
        )
        assert (turn.calls, turn.calls_executed) == ([], 0)
        turns = [span for span in services.spans() if span.name == "turn 0"]
        assert "unclosed_call" in [event.name for span in turns for event in span.events]

        access = await opened(services, cut)
        services.model.begin_again()
        message = await asked(client_of(services, access), [QUESTION], False)
        assert (message["content"].split(), message["tool_calls"]) == (cut.split(), [])
        [stored] = (await ended(services, access)).turns
        assert (stored.messages[0].content, stored.messages[0].tool_calls) == (message["content"], None)


async def test_a_session_refuses_tools_for_a_template_without_them(with_family: Open) -> None:
    async with with_family("phi3", None) as services:
        access = await opened(services, "18<|end|>")

        with pytest.raises(BadRequestError, match="one that leaves out the schemas of tools") as caught:
            await asked(client_of(services, access), [QUESTION], False)
        assert caught.value.param == "tools"
        answer = await client_of(services, access).chat.completions.create(model="m", messages=[QUESTION])
        assert answer.choices[0].message.content == "18"


@pytest.mark.parametrize("family", ["gemma", "mistral_v1", "phi3", "vicuna"])
async def test_families_without_tools_answer_in_one_turn_and_refuse_tools(with_family: Open, family: str) -> None:
    async with with_family(family, None) as services:
        written = "#### 18" + FAMILIES[family].end

        answered = await services.say(written, sample__agent_name="single_turn_agent")
        refused = await services.say(written)

        assert (answered.error, answered.reward and answered.reward.score) == (None, 1.0)
        assert answered.turns[0].messages[0].content == "#### 18"
        assert parts(answered) == [(1, services.model.encode(written))]
        assert refused.error is not None and refused.error.code == "invalid_request"
        assert refused.error.message.startswith("expected a chat template that shows tools and their results")


async def opened(services: AgentServices, *script: str) -> SessionAccess:
    services.model.scripts[0] = list(script)
    body = group().model_dump(mode="json", include={"sample", "sampling_params", "limits"})
    response = await services.client.post("/sessions", json=body)
    assert response.status_code == 200, response.text
    return SessionAccess.model_validate_json(response.text)


def client_of(services: AgentServices, access: SessionAccess) -> AsyncOpenAI:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(services.agent))
    return AsyncOpenAI(
        base_url=f"http://agent/sessions/{access.session_id}/v1", api_key="any", http_client=http, max_retries=0
    )


async def asked(client: AsyncOpenAI, messages: list[Any], stream: bool, **fields: Any) -> dict[str, Any]:
    """The model's next message, as a client sends it back."""
    create: Any = client.chat.completions.create
    reply = await create(model="m", messages=messages, stream=stream, **{"tools": TOOLS, **fields})
    if not stream:
        message = reply.choices[0].message
        calls = [call.model_dump() for call in message.tool_calls or []]
        return {"role": "assistant", "content": message.content, "tool_calls": calls}
    content, calls = "", list[dict[str, Any]]()
    async for chunk in reply:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        calls += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or []]
    return {"role": "assistant", "content": content, "tool_calls": calls}


async def ended(services: AgentServices, access: SessionAccess) -> Trajectory:
    response = await services.client.post(f"/sessions/{access.session_id}/end")
    assert response.status_code == 200, response.text
    return Trajectory.model_validate_json(response.text)
