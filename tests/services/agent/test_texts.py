"""The texts that a trace shows: where they stand, when they are left out, how long they may be, and what is hidden."""

import json
import logging
from collections import Counter
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, call, open_services
from tests.services.agent.replaceable import answers
from tests.services.agent.scripted_model import END
from trackway.agent.settings import AgentSettings
from trackway.chat.tokenizer import ChatTokenizer
from trackway.tracing import TracingSettings

pytestmark = pytest.mark.anyio

PROMPT = (
    "<|im_start|>system\nTools: counter, other, calculator, calc_gsm8k_reward<|im_end|>\n"
    "<|im_start|>user\n9+9?<|im_end|>\n<|im_start|>assistant\n"
)
OBSERVED = "\n<|im_start|>tool\ncount 1<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "Let me ponder. "
COUNT = THOUGHT + call("counter") + END
ANSWER = THOUGHT + "#### 18" + END
SECRET = "5551234"


def texts(spans: list[ReadableSpan], name: str, side: str) -> list[Any]:
    """`agentic.inputs` or `outputs` of the spans of a name, by their start; None where there are none."""
    found = sorted((span for span in spans if span.name == name), key=lambda span: span.start_time or 0)
    said = [(span.attributes or {}).get(f"agentic.{side.lower()}") for span in found]
    return [None if value is None else json.loads(str(value)) for value in said]


def shown(role: str, content: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a tokenizer turned ids into text."""
    counts: Counter[str] = Counter()

    def counted(owner: type[Any]) -> None:
        decode = vars(owner)["decode"]

        def counting(self: object, *args: Any, **kwargs: Any) -> Any:
            counts["decode"] += 1
            return decode(self, *args, **kwargs)

        monkeypatch.setattr(owner, "decode", counting)

    counted(next(base for base in PreTrainedTokenizerFast.__mro__ if "decode" in vars(base)))
    counted(ChatTokenizer)
    return counts


async def test_each_generation_shows_what_is_new_and_the_root_the_whole(services: AgentServices) -> None:
    await services.say(COUNT, ANSWER, trace=True)

    spans = services.spans()
    assert texts(spans, "chat tiny", "Inputs") == [shown("user", PROMPT), shown("user", OBSERVED)]
    assert texts(spans, "chat tiny", "Outputs") == [shown("assistant", COUNT), shown("assistant", ANSWER)]
    [root] = texts(spans, "trajectory", "Outputs")
    called = {"id": "call00000", "type": "function", "function": {"name": "counter", "arguments": "{}"}}
    assert root["messages"] == [
        {"role": "assistant", "content": THOUGHT.strip(), "tool_calls": [called]},
        {"role": "tool", "content": "count 1", "tool_call_id": "call00000", "name": "counter"},
        {"role": "assistant", "content": THOUGHT + "#### 18"},
    ]


async def test_a_generation_that_was_cut_shows_its_rest_alone(services: AgentServices) -> None:
    async def cut() -> str:
        services.model.finish_reason = "abort"
        return "#### "

    async def rest() -> str:
        services.model.finish_reason = None
        return "18" + END

    await services.say(cut, rest, trace=True)

    spans = services.spans()
    assert texts(spans, "chat tiny", "Inputs") == [shown("user", PROMPT), shown("user", "")]
    assert texts(spans, "chat tiny", "Outputs") == [shown("assistant", "#### "), shown("assistant", "18" + END)]


async def said_without_text(services: AgentServices, **asked: Any) -> list[ReadableSpan]:
    """The spans of a trajectory that used tools, rightly and wrongly."""
    malformed = "<tool_call>I ponder</tool_call>" + END
    await services.say(COUNT, malformed, ANSWER, trace=True, **asked)
    return services.spans()


@pytest.mark.parametrize("by", ["the run", "the service"])
async def test_without_token2text_there_are_counts_and_no_text(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast, by: str
) -> None:
    asked = {"trace_target": {"token2text": False}} if by == "the run" else {}
    tracing = TracingSettings(token2text=by == "the run")
    async with open_services(settings, tokenizer, tracing=tracing) as services:
        spans = await said_without_text(services, **asked)

    assert [span for span in spans if "ponder" in span.to_json() or "<|im_" in span.to_json()] == []
    assert texts(spans, "chat tiny", "Inputs") == texts(spans, "chat tiny", "Outputs") == [None] * 3
    [root] = texts(spans, "trajectory", "Outputs")
    assert root.keys() == {"reward", "num_turns", "stop_reason", "prompt_tokens", "response_tokens"}
    usage = [
        span.attributes["gen_ai.usage.output_tokens"] for span in spans if span.name == "chat tiny" and span.attributes
    ]
    assert all(isinstance(count, int) and count > 0 for count in usage)
    [reward] = texts(spans, "reward", "Inputs")
    assert reward == {"data_source": "openai/gsm8k", "method": "strict", "ground_truth": "18"}


async def test_without_token2text_tools_show_their_arguments_and_results_all_the_same(services: AgentServices) -> None:
    said = call("calculator", '{"expression": "2+3"}') + END
    await services.say(said, ANSWER, trace=True, trace_target={"token2text": False})

    spans = services.spans()
    assert texts(spans, "execute_tool calculator", "Inputs") == [{"expression": "2+3"}]
    assert texts(spans, "execute_tool calculator", "Outputs") == [{"text": "5", "reward": 0.0}]


async def test_a_run_that_wants_texts_gets_them_where_the_service_would_leave_them_out(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    async with open_services(settings, tokenizer, tracing=TracingSettings(token2text=False)) as services:
        await services.say(ANSWER, trace=True, trace_target={"token2text": True})
        spans = services.spans()

    assert texts(spans, "chat tiny", "Outputs") == [shown("assistant", ANSWER)]


async def test_text_is_decoded_for_traces_only_when_they_carry_it(
    services: AgentServices, decodes: Counter[str]
) -> None:
    spent = {}
    off = {"token2text": False}
    for name, asked in {
        "unrecorded": {"trace": False},
        "unrecorded, with texts": {"trace": False, "trace_target": {"token2text": True}},
        "without texts": {"trace": True, "trace_target": off},
        "with texts": {"trace": True},
    }.items():
        decodes.clear()
        services.model.begin_again()
        await services.say(COUNT, ANSWER, **asked)
        spent[name] = decodes["decode"]

    # Each turn is decoded once to find its calls and once to be scored, traced or not.
    needed = 2 * 2
    texts_of_two_generations = 2 * 2
    assert spent == {
        "unrecorded": needed,
        "unrecorded, with texts": needed,
        "without texts": needed,
        "with texts": needed + texts_of_two_generations,
    }


def whole_bytes(cut: str) -> int:
    """Bytes before the cut: what is left, and what the marker counts."""
    head, marker, count = cut.rpartition("[truncated ")
    assert marker and count.endswith(" bytes]"), cut[-40:]
    return int(count.removesuffix(" bytes]")) + len(head.encode())


async def test_a_text_that_is_too_long_is_cut_behind_a_marker_that_counts_what_is_missing(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    long = "ä" * 3000
    bounds = {"limits__max_tool_response_length": 9999, "limits__max_response_length": 9999}
    async with open_services(settings, tokenizer, tracing=TracingSettings(max_text_bytes=1000)) as services:
        services.counter.text = long
        trajectory = await services.say(COUNT, ANSWER, trace=True, **bounds)
        spans = services.spans()

    [result] = texts(spans, "execute_tool counter", "Outputs")
    [_, prompt] = texts(spans, "chat tiny", "Inputs")
    assert whole_bytes(result["text"]) == len(long.encode())
    assert whole_bytes(prompt["messages"][0]["content"]) == len(OBSERVED.replace("count 1", long).encode())
    assert len(result["text"]) < 1000 and trajectory.turns[0].messages[-1].content == long


@pytest.mark.parametrize("note", ['"5551234"', '[{"deep": "is 5551234 it"}]', "5551234", '{"5551234": true}'])
async def test_a_secret_is_hidden_on_every_span_and_left_in_the_training_data(
    settings: AgentSettings,
    tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
    note: str,
) -> None:
    tracing = TracingSettings(max_text_bytes=300)  # so that texts are cut, and cuts do not uncover it
    async with open_services(settings, tokenizer, lambda text: text.replace(SECRET, "***"), tracing) as services:
        services.counter.text = f"your number is {SECRET}"
        services.rollout.faults = [answers(500, text=f"{SECRET} is dead")]
        said = [
            call("counter", f'{{"note": {note}}}') + END,
            call(f"dial_{SECRET}") + END,
            call("counter", f'{{"number": {SECRET}') + END,
            call("calculator", f'{{"expression": "{SECRET} +"}}') + END,
            f"I dial {SECRET}. " * 20 + f"#### {SECRET}" + END,
        ]
        with caplog.at_level(logging.CRITICAL):
            trajectory = await services.say(
                *said, trace=True, truth=SECRET, sample__prompt=[{"role": "user", "content": f"Call {SECRET}!"}]
            )
        spans = services.spans()

    leaks = {span.name: span.to_json() for span in spans if SECRET in span.to_json()}
    assert (leaks, len(spans)) == ({}, 14)
    assert sum(span.to_json().count("***") for span in spans) > 10
    assert trajectory.error is None and trajectory.reward is not None and trajectory.reward.score == 1.0
    assert SECRET in tokenizer.decode(trajectory.response_ids) and SECRET in tokenizer.decode(trajectory.prompt_ids)
    assert SECRET in str(trajectory.turns[0].messages[-1].content) and SECRET in str(trajectory.prompt_messages)


@pytest.mark.parametrize("failing", ["tool", "rollout"])
async def test_a_secret_in_an_exception_is_hidden(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    async with open_services(settings, tokenizer, lambda text: text.replace(SECRET, "***")) as services:

        async def fail() -> str:
            raise RuntimeError(f"cannot dial {SECRET}")

        services.counter.before = fail
        with caplog.at_level(logging.CRITICAL):
            await services.say(*([COUNT, ANSWER] if failing == "tool" else [fail]), trace=True)
        spans = services.spans()

    assert [span.name for span in spans if SECRET in span.to_json()] == []
    [failed] = [
        span for span in spans if span.name in ("execute_tool counter", "trajectory") and span.status.description
    ]
    assert "cannot dial ***" in str(failed.status.description)
