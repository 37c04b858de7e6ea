"""The promise: with tokens everything works for those who have one, by the proxy and at the replicas' own ports alike.

The other files here show the rest of it: they run, scale, break and trace the same deployment with a token.
"""

import httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from tests.e2e.access_tokens import AGENT, OPERATOR
from trackway.clients import AgentClient, ServiceClient, ToolsClient, run
from trackway.console.app import create_app
from trackway.deploy.commands.console import services_of
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment
from trackway.trainer.data.tiny import make_tiny_rows
from trackway.wire.agent import GroupRequest
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.service import REPLICA
from trackway.wire.tools import ExecuteRequest
from trackway.wire.trajectory import Trajectory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

REQUESTS = [("GET", "/docs"), ("GET", "/replicas"), ("POST", "/instances"), ("POST", "/pause"), ("PUT", "/nothing")]
STRANGERS = [{}, {"authorization": "Bearer stranger-0123456789abcdef"}, {"x-session-id": "one"}]


def own_ports(deployment: Deployment) -> list[str]:
    return [str(replica.url) for replica in serve_api.replicas_at(f"{deployment.base_url}/tools")]


def test_who_has_no_token_gets_one_and_the_same_401_everywhere(deployment: Deployment) -> None:
    places = [*(f"{deployment.base_url}/{service}" for service in deployment.services), *own_ports(deployment)]
    with httpx.Client(trust_env=False) as http:
        answers = [
            http.request(method, place + path, headers=headers)
            for place in places
            for method, path in REQUESTS
            for headers in STRANGERS
        ]
    assert {(answer.status_code, answer.headers.get(REPLICA)) for answer in answers} == {(401, None)}
    assert (len(answers), len({answer.content for answer in answers})) == (7 * 5 * 3, 1)


@pytest.mark.parametrize(
    ("service", "method", "path"),
    [("tools", "GET", "/instances"), ("rollout", "POST", "/resume"), ("trainer", "POST", "/runs/nothing/stop")],
)
def test_an_agents_token_opens_no_operators_route(deployment: Deployment, service: str, method: str, path: str) -> None:
    places = own_ports(deployment) if service == "tools" else []
    for place in [f"{deployment.base_url}/{service}", *places]:
        assert refusal(place, AGENT, method, path) is ErrorCode.FORBIDDEN
        assert refusal(place, OPERATOR, method, path) in (None, ErrorCode.NOT_FOUND)


def refusal(place: str, token: str, method: str, path: str) -> ErrorCode | None:
    try:
        run(ServiceClient(place, token=SecretStr(token)).send(method, path))
    except TrackwayError as error:
        return error.code
    return None


def test_a_call_past_the_proxy_carries_no_token(deployment: Deployment) -> None:
    sent: list[tuple[str, str]] = []

    async def note(request: httpx.Request) -> None:
        sent.append((f"http://{request.url.netloc.decode()}", request.headers["authorization"]))

    async def calls() -> float:
        async with httpx.AsyncClient(event_hooks={"request": [note]}, trust_env=False) as http:
            client = ToolsClient(f"{deployment.base_url}/tools", http, token=SecretStr(AGENT), direct=True)
            made = await client.create("calc_gsm8k_reward", "one", {"ground_truth": "72"})
            result = await client.execute(made.instance_id, ExecuteRequest(arguments={"answer": "72"}), "one")
            await client.release(made.instance_id, "one")
        return result.reward

    assert run(calls()) == 0.0
    past = [header for place, header in sent if place in own_ports(deployment)]
    by_proxy = [header for place, header in sent if place == deployment.base_url]
    assert (len(past), by_proxy) == (4, [f"Bearer {AGENT}"])  # asked who is there, create, execute, release
    assert [header for header in past if AGENT in header] == []


def test_an_agents_token_is_enough_for_its_trajectories(deployment: Deployment) -> None:
    [row] = make_tiny_rows("train", 1, seed=1)
    request = GroupRequest(
        run="access",
        experiment_name="access",
        step=0,
        sample=row,
        n=4,
        sampling_params=SamplingParams(max_tokens=64, seed=1),
    )

    async def group() -> list[Trajectory]:
        return [
            trajectory
            async for trajectory in AgentClient(f"{deployment.base_url}/agent", token=SecretStr(AGENT)).group(request)
        ]

    made = run(group())
    assert ([trajectory.error for trajectory in made], {trajectory.reward is not None for trajectory in made}) == (
        [None] * 4,
        {True},
    )
    assert sum(len(trajectory.tool_rewards) for trajectory in made) >= 1


def test_the_console_asks_the_services_with_the_token_of_its_user_alone(deployment: Deployment) -> None:
    with TestClient(create_app(deployment.outputs, services=services_of(deployment.outputs, None))) as client:
        assert {client.get(f"/api/{page}").status_code for page in ("system", "try")} == {401}
        assert client.post("/api/try/prompt", json={"prompt": "What is 6 x 7?"}).status_code == 401
        client.headers["authorization"] = f"Bearer {AGENT}"
        services = client.get("/api/system").json()["services"]
        offer = client.get("/api/try").json()
        prompt = client.post("/api/try/prompt", json={"prompt": "What is 6 x 7?", "max_tokens": 8}).json()
        call = client.post("/api/try/tool", json={"tool": "calculator", "arguments": {"expression": "6*7"}}).json()
        answer = {"data_source": "openai/gsm8k", "solution_str": "#### 42", "ground_truth": "42"}
        score = client.post("/api/try/score", json=answer).json()

    assert [service["service"] for service in services if not service["answers"]] == []
    assert {replica["ready"] for service in services for replica in service["replicas"]} == {True}
    assert "calculator" in [tool["function"]["name"] for tool in offer["tools"]]
    assert prompt["facts"]["model"] == offer["model"] and 1 <= prompt["facts"]["tokens"] <= 8
    assert (call["text"], score["text"], score["facts"]["correct"]) == ("42", "1", 1.0)
