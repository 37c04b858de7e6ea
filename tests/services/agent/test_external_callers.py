"""Who calls a service with a recorded trace sees the service's work in it; without one there is never a span."""

import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from tests.services.agent.agent_services import AgentServices, group
from tests.services.agent.replaceable import Replaceable
from tests.services.agent.scripted_model import END

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

ANSWER = "#### 18" + END
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}, {"traceparent": f"00-{TRACE}-{SPAN}-00"}
INVALID = {
    "no traceparent": {},
    "not sampled": UNSAMPLED,
    "random-id flag without the sampled one": {"traceparent": f"00-{TRACE}-{SPAN}-02"},
    "words": {"traceparent": "yes please"},
    "a zero id": {"traceparent": f"00-{'0' * 32}-{SPAN}-01"},
    "an unknown version": {"traceparent": f"ff-{TRACE}-{SPAN}-01"},
    "a target without a trace": {"baggage": "agentic.target=%7B%22mlflow_run_id%22%3A%22r%22%7D"},
}


@dataclass(frozen=True)
class Work:
    """A request that makes spans, and the names of those directly below the caller's."""

    service: str
    path: str
    body: dict[str, Any]
    spans: tuple[str, ...]


WORKS = {
    "generate": Work(
        "rollout",
        "/generate",
        {"token_ids": [1, 2], "request_id": "t/0/0", "sampling_params": {"max_tokens": 99}},
        ("chat tiny",),
    ),
    "execute": Work(
        "tools",
        "/tools/calculator/execute",
        {"arguments": {"expression": "1+1"}},
        ("execute_tool calculator",),
    ),
    "score": Work(
        "reward",
        "/score",
        {"data_source": "openai/gsm8k", "solution_str": "#### 1", "ground_truth": "1"},
        ("reward",),
    ),
    "a trajectory": Work(
        "agent", "/trajectories", group(n=1).model_dump(mode="json", exclude_none=True), ("trajectory",)
    ),
    "a group": Work(
        "agent",
        "/groups",
        group(n=2).model_dump(mode="json", exclude_none=True),
        ("trajectory", "trajectory"),
    ),
}
ON_EVERY_SERVICE = ["GET /health", "GET /ready", "GET /metrics", "GET /docs", "GET /openapi.json", "GET /nowhere"]
REFUSED = {
    "rollout": "/generate",
    "tools": "/tools/calculator/execute",
    "reward": "/score",
    "agent": "/groups",
}


async def send(services: AgentServices, service: str, method: str, path: str, **request: Any) -> httpx.Response:
    """One request to one service; the scripts are renewed for it."""
    services.model.scripts = {number: [ANSWER] * 9 for number in range(2)}
    transports: dict[str, Replaceable] = {
        "rollout": services.rollout,
        "tools": services.tools,
        "reward": services.reward,
    }
    if service == "agent":
        return await services.client.request(method, path, **request)
    app = transports[service].app
    assert app is not None
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        return await client.request(method, path, **request)


async def work(services: AgentServices, what: Work, headers: dict[str, str]) -> None:
    answer = await send(services, what.service, "POST", what.path, json=what.body, headers=headers)
    assert answer.status_code == 200, answer.text


def below_the_caller(spans: list[ReadableSpan]) -> list[str]:
    """Names of the spans whose parent is the caller's; all spans are in the caller's trace."""
    assert {format(span.get_span_context().trace_id, "032x") for span in spans} == {TRACE}
    return [span.name for span in spans if span.parent and format(span.parent.span_id, "016x") == SPAN]


@pytest.mark.parametrize("what", WORKS.values(), ids=WORKS.keys())
async def test_a_recorded_trace_is_continued(services: AgentServices, what: Work) -> None:
    await work(services, what, SAMPLED)

    assert below_the_caller(services.spans()) == list(what.spans)


@pytest.mark.parametrize("what", WORKS.values(), ids=WORKS.keys())
@pytest.mark.parametrize("headers", INVALID.values(), ids=INVALID.keys())
async def test_without_a_recorded_trace_there_is_no_span(
    services: AgentServices, what: Work, headers: dict[str, str]
) -> None:
    await work(services, what, headers)

    assert services.spans() == []


@pytest.mark.parametrize(
    "target", ["%7Bnonsense", "%7B%22weave_project%22%3A%22three%2Fpart%2Fname%22%7D", "%%%", ";;"]
)
@pytest.mark.parametrize("what", WORKS.values(), ids=WORKS.keys())
async def test_baggage_that_cannot_be_read_costs_the_target_and_not_the_trace(
    services: AgentServices, what: Work, target: str
) -> None:
    await work(services, what, {**SAMPLED, "baggage": f"agentic.target={target}"})

    assert below_the_caller(services.spans()) == list(what.spans)


@pytest.mark.parametrize("service", REFUSED)
@pytest.mark.parametrize("headers", [{}, SAMPLED], ids=["alone", "with a trace"])
async def test_no_other_request_leaves_a_span(services: AgentServices, service: str, headers: dict[str, str]) -> None:
    for request in ON_EVERY_SERVICE:
        method, path = request.split()
        answer = await send(services, service, method, path, headers=headers)
        assert answer.status_code == (404 if path == "/nowhere" else 200)
    refused = await send(services, service, "POST", REFUSED[service], json={"wrong": 1}, headers=headers)

    assert (refused.status_code, services.spans()) == (422, [])


async def test_a_trajectory_with_a_trace_of_its_own_is_linked_to_its_caller(services: AgentServices) -> None:
    asked = Work("agent", "/trajectories", group(trace=True).model_dump(mode="json"), ())
    await work(services, asked, SAMPLED)

    [root] = [span for span in services.spans() if span.parent is None]
    links = [(format(link.context.trace_id, "032x"), format(link.context.span_id, "016x")) for link in root.links]
    assert (root.name, links) == ("trajectory", [(TRACE, SPAN)])
    assert format(root.get_span_context().trace_id, "032x") != TRACE


async def test_a_trajectory_that_is_not_to_be_recorded_is_not_for_any_caller(services: AgentServices) -> None:
    asked = Work("agent", "/trajectories", group(trace=False).model_dump(mode="json"), ())
    await work(services, asked, SAMPLED)

    assert services.spans() == []


async def test_the_whole_tree_of_a_trajectory_is_in_the_callers_trace(services: AgentServices) -> None:
    await work(services, WORKS["a trajectory"], SAMPLED)

    spans = services.spans()
    assert below_the_caller(spans) == ["trajectory"]
    assert sorted(span.name for span in spans) == ["chat tiny", "reward", "trajectory", "turn 0"]


async def test_the_answer_names_the_callers_trace(services: AgentServices) -> None:
    answer = await send(services, "agent", "POST", "/trajectories", json=WORKS["a trajectory"].body, headers=SAMPLED)

    assert json.loads(answer.text)["trace_id"] == TRACE
