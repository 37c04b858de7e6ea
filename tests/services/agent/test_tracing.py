"""The tree that four services record of one trajectory."""

import json

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan
from transformers import PreTrainedTokenizerFast

from tests.services.agent.agent_services import AgentServices, call, group, open_services
from tests.services.agent.replaceable import loses_the_answer
from tests.services.agent.scripted_model import END
from tests.serving import served
from trackway.agent import AgentLoop, Episode, Toolbox, register
from trackway.agent.settings import AgentSettings
from trackway.tracing.export.otlp import weight
from trackway.tracing.export.translation import translated
from trackway.wire.chat import ChatModelSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Incident, StopReason, TraceBackend

COUNT = call("counter") + END
ANSWER = "#### 18" + END


def tree(spans: list[ReadableSpan]) -> list[tuple[str, str | None]]:
    """(name, name of the parent) of every span, sorted."""
    names = {span.context.span_id: span.name for span in spans if span.context}
    pairs = [(span.name, names[span.parent.span_id] if span.parent else None) for span in spans]
    return sorted(pairs, key=lambda pair: (pair[0], pair[1] or ""))


def root_of(spans: list[ReadableSpan]) -> ReadableSpan:
    [root] = [span for span in spans if span.parent is None]
    return root


@pytest.mark.anyio
async def test_turns_tools_and_reward_join_one_tree(services: AgentServices) -> None:
    trajectory = await services.say(COUNT, ANSWER, trace=True)

    spans = services.spans()
    assert tree(spans) == [
        ("chat tiny", "turn 0"),
        ("chat tiny", "turn 1"),
        ("execute_tool counter", "turn 0"),
        ("reward", "trajectory"),
        ("trajectory", None),
        ("turn 0", "trajectory"),
        ("turn 1", "trajectory"),
    ]
    assert {format(span.context.trace_id, "032x") for span in spans if span.context} == {trajectory.trace_id}


@pytest.mark.anyio
async def test_the_root_carries_tags_and_how_it_ended(services: AgentServices) -> None:
    trajectory = await services.say(COUNT, ANSWER, trace=True)

    attributes = dict(root_of(services.spans()).attributes or {})
    tags = {key.rsplit(".", 1)[1]: value for key, value in attributes.items() if key.startswith("agentic.tag.")}
    assert tags == {
        "step": 1,
        "sample_index": 7,
        "rollout_n": 0,
        "validate": False,
        "experiment_name": "exp",
        "outcome": "ok",
    }
    assert attributes["agentic.stop_reason"] == "answered"
    assert attributes["agentic.trajectory"] == trajectory.id
    assert (attributes["agentic.group"], attributes["agentic.title"]) == ("exp/1/7", "s1/i7/n0")
    tools = json.loads(str(attributes["gen_ai.tool.definitions"]))
    assert "counter" in [tool["function"]["name"] for tool in tools]


@pytest.mark.anyio
async def test_a_greedy_baseline_has_a_tag_of_its_own(services: AgentServices) -> None:
    services.model.scripts = {3: [ANSWER]}

    await services.run(group(n=4, rollouts=[3], is_baseline=True, trace=True))

    attributes = root_of(services.spans()).attributes or {}
    assert (attributes["agentic.tag.rollout_n"], attributes["agentic.tag.is_baseline"]) == (3, True)


@pytest.mark.anyio
async def test_a_trajectory_that_asked_a_policy_by_name_has_it_as_a_tag(services: AgentServices) -> None:
    services.model.scripts = {0: [ANSWER]}

    await services.run(group(policy="tiny", trace=True))

    assert (root_of(services.spans()).attributes or {})["agentic.tag.policy"] == "tiny"


@pytest.mark.anyio
async def test_the_root_shows_texts_reward_and_turns(services: AgentServices) -> None:
    trajectory = await services.say(ANSWER, trace=True)

    outputs = json.loads(str((root_of(services.spans()).attributes or {})["agentic.outputs"]))
    assert outputs == {
        "messages": [{"role": "assistant", "content": "#### 18"}],
        "reward": 1.0,
        "num_turns": 2,
        "stop_reason": "answered",
        "prompt_tokens": len(trajectory.prompt_ids),
        "response_tokens": len(trajectory.response_ids),
    }


@pytest.mark.anyio
async def test_a_generation_by_a_model_that_speaks_messages_has_its_new_messages_in_parts(
    settings: AgentSettings, tokenizer: PreTrainedTokenizerFast
) -> None:
    calls = [{"id": "x", "function": {"name": "counter", "arguments": "{}"}}]
    answers = iter([{"content": None, "tool_calls": calls}, {"content": "#### 18"}])
    server = FastAPI()

    @server.post("/v1/chat/completions")
    def _complete() -> object:
        choice = {"message": next(answers), "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 3}}

    async with served(server) as url:
        chat_model = ChatModelSettings(base_url=f"{url}/v1", model="other")
        async with open_services(settings.model_copy(update={"chat_model": chat_model}), tokenizer) as services:
            await services.run(group(validate=True, trace=True))
            chats = [span for span in services.spans() if span.name == "chat other"]

    shown = [translated(span, [TraceBackend.OTLP]).attributes or {} for span in chats]
    assert [span["gen_ai.provider.name"] for span in shown] == ["openai", "openai"]
    call_part = {"type": "tool_call", "id": "call00000", "name": "counter", "arguments": {}}
    result = {"type": "tool_call_response", "id": "call00000", "response": "count 1"}
    assert [json.loads(str(span["gen_ai.input.messages"])) for span in shown] == [
        [{"role": "user", "parts": [{"type": "text", "content": "9+9?"}]}],
        [{"role": "tool", "parts": [result]}],
    ]
    assert [json.loads(str(span["gen_ai.output.messages"])) for span in shown] == [
        [{"role": "assistant", "parts": [call_part], "finish_reason": "tool_call"}],
        [{"role": "assistant", "parts": [{"type": "text", "content": "#### 18"}], "finish_reason": "stop"}],
    ]


@pytest.mark.anyio
async def test_an_unsampled_trajectory_records_nothing(services: AgentServices) -> None:
    trajectory = await services.say(COUNT, ANSWER)

    assert (services.spans(), trajectory.trace_id) == ([], None)


@pytest.mark.anyio
async def test_the_rollouts_of_a_group_have_a_trace_each(services: AgentServices) -> None:
    services.model.scripts = {number: [ANSWER] for number in range(3)}

    trajectories = await services.run(group(n=3, trace=True))

    assert len({trajectory.trace_id for trajectory in trajectories}) == 3
    assert len(services.spans()) == 3 * 4


@pytest.mark.anyio
async def test_the_root_is_linked_to_its_caller_and_not_its_child(services: AgentServices) -> None:
    services.model.scripts = {0: [ANSWER]}
    parent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}

    await services.client.post("/groups", json=group(trace=True).model_dump(mode="json"), headers=parent)

    root = root_of(services.spans())
    assert [format(link.context.trace_id, "032x") for link in root.links] == ["a" * 32]


def weighed(spans: list[ReadableSpan]) -> int:
    return sum(weight(span) for span in spans)


@pytest.mark.anyio
async def test_a_trajectory_knows_what_its_trace_weighs_in_all_services(services: AgentServices) -> None:
    refused = call("counter", '{"refuse": true}') + END
    trajectory = await services.say(COUNT, refused, ANSWER, trace=True)

    assert trajectory.trace_bytes == weighed(services.spans()) > 0


@pytest.mark.anyio
async def test_an_answer_that_was_lost_on_its_way_counts_once(services: AgentServices) -> None:
    async def calculate() -> str:
        services.tools.faults = [loses_the_answer(httpx.ReadError("connection reset"))]
        return call("calculator", '{"expression": "1+1"}') + END

    trajectory = await services.say(calculate, ANSWER, trace=True)

    spans = services.spans()
    assert services.tools.paths == ["GET tools", "POST execute", "POST execute"]
    assert [span.name for span in spans].count("execute_tool calculator") == 1
    assert (trajectory.trace_bytes, trajectory.incidents) == (weighed(spans), [Incident.REPLICA_LOST])
    assert trajectory.incident_services == {Incident.REPLICA_LOST: ["tools"]}


@pytest.mark.anyio
async def test_both_tries_count_when_the_first_was_refused(services: AgentServices) -> None:
    async def paused() -> str:
        raise TrackwayError(ErrorCode.PAUSED, "generation is paused; ask again")

    trajectory = await services.say(paused, ANSWER, trace=True)

    spans = services.spans()
    assert [span.name for span in spans].count("chat tiny") == 2
    assert (trajectory.trace_bytes, trajectory.incidents) == (weighed(spans), [Incident.RETRIED])
    assert trajectory.incident_services == {Incident.RETRIED: ["rollout"]}


@register("unreadable_agent")
class UnreadableAgent(AgentLoop):
    """Has an id that no tokenizer knows; only in tests."""

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        episode.response_ids, episode.response_mask, episode.response_logprobs = [1 << 40], [1], [0.0]
        return StopReason.ANSWERED


@pytest.mark.anyio
async def test_a_text_that_cannot_be_decoded_costs_no_trajectory(services: AgentServices) -> None:
    [trajectory] = await services.run(group(agent_name="unreadable_agent", trace=True))

    root = root_of(services.spans())
    assert (trajectory.error, trajectory.response_ids) == (None, [1 << 40])
    assert [event.name for event in root.events] == ["text_unavailable"]
    assert (root.attributes or {})["agentic.tag.outcome"] == "ok"
