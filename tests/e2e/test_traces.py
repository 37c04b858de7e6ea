"""The promise: what goes wrong under Ray Serve is seen in the traces, and nobody else's request leaves one."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from urllib.parse import quote

import httpx
import pytest
from mlflow import MlflowClient
from transformers import AutoTokenizer

import trackway.traces as traces
from tests.e2e.classified import CLASSIFIED
from tests.services.rollout.tiny_classifier import logit_of
from tests.waiting import until
from trackway.clients import AgentClient, run
from trackway.clients.http_client import authorization, resolve_token
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.demo import gaps_on_one_machine
from trackway.traces import TraceTree
from trackway.wire.agent import GroupRequest, Limits, RewardModel, Sample
from trackway.wire.chat import Message
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Incident, TraceTarget, Trajectory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

N = 16
TOKENS = 900
"""Enough for the tiny model to write for some seconds."""


@pytest.fixture
def experiment(deployment: Deployment, request: pytest.FixtureRequest) -> str:
    """An MLflow experiment of this test's own, by id."""
    return MlflowClient(tracking_uri=deployment.mlflow_uri).create_experiment(request.node.name)


def long_group(experiment: str) -> GroupRequest:
    """Rollouts that write on for as long as they may."""
    sample = Sample(
        data_source="trackway/tiny_math",
        agent_name="single_turn_agent",
        prompt=[Message(role="user", content="What is 3 plus 4?")],
        reward_model=RewardModel(ground_truth="7"),
        extra_info={"index": 5},
    )
    return GroupRequest(
        run=f"by-hand-{experiment}",
        experiment_name="by-hand",
        step=1,
        sample=sample,
        n=N,
        sampling_params=SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1),
        limits=Limits(max_response_length=TOKENS, timeout_s=300),
        trace=True,
        trace_target=TraceTarget(mlflow_experiment_id=experiment),
    )


async def generating(deployment: Deployment, requests: int) -> None:
    """Return when the rollout service works on so many requests at once."""
    async with (
        httpx.AsyncClient(timeout=30.0, headers=authorization(resolve_token())) as http,
        asyncio.timeout(120),
    ):
        while True:
            metrics = (await http.get(f"{deployment.base_url}/rollout/metrics")).text
            values = [line.split()[-1] for line in metrics.splitlines() if line.startswith("trackway_in_flight")]
            if sum(map(float, values)) > requests:  # the request for the metrics is one of them
                return
            await asyncio.sleep(0.02)


def stored(deployment: Deployment, experiment: str, wanted: Callable[[list[TraceTree]], bool]) -> dict[str, TraceTree]:
    """The experiment's traces by id, once they are as wanted."""

    def found() -> list[TraceTree] | None:
        seen = [*traces.MlflowStore(deployment.mlflow_uri, [experiment]).trees()]
        return seen if wanted(seen) else None

    return {trace.trace_id: trace for trace in until(found)}


def outcomes(found: list[TraceTree]) -> list[str]:
    return [trace.tags.get("outcome", "") for trace in found]


def gaps(trace: TraceTree, trajectory: Trajectory) -> list[str]:
    """What the tree lacks and nothing in it explains.

    A generation that was answered before the kill was recorded in the process that died, whose memory is gone; a
    trajectory that failed has no more than its root.
    """
    if trajectory.error is not None:
        return [] if trace.tags["outcome"] == f"error:{trajectory.error.code.value}" else ["no outcome"]
    missing = gaps_on_one_machine(trace, trajectory)
    answered_before = Incident.REPLICA_LOST not in trajectory.incidents
    return [gap for gap in missing if not (answered_before and "chat spans" in gap)]


async def collected(stream: AsyncIterator[Trajectory]) -> list[Trajectory]:
    return [trajectory async for trajectory in stream]


def test_a_rollout_replica_killed_while_a_group_generates_is_seen_in_its_traces(
    deployment: Deployment, experiment: str
) -> None:
    [replica] = serve_api.service_statuses(deployment)[deployment.services.index("rollout")].replicas

    async def killed_meanwhile() -> list[Trajectory]:
        client = AgentClient(f"{deployment.base_url}/agent")
        asking = asyncio.create_task(collected(client.group(long_group(experiment))))
        await generating(deployment, N)
        os.kill(replica.health.pid, signal.SIGKILL)
        async with asyncio.timeout(300):
            return await asking

    made = {f"tr-{trajectory.trace_id}": trajectory for trajectory in run(killed_meanwhile())}
    assert sorted(trajectory.tags.rollout_n for trajectory in made.values()) == list(range(N))
    assert all(trajectory.error is not None or len(trajectory.response_ids) == TOKENS for trajectory in made.values())
    hit = {name for name, trajectory in made.items() if Incident.REPLICA_LOST in trajectory.incidents}
    assert hit

    found = stored(deployment, experiment, lambda seen: len(seen) == N and all(outcomes(seen)))
    assert found.keys() == made.keys()
    searched = traces.MlflowStore(deployment.mlflow_uri, [experiment]).trees("tags.outcome = 'replica_lost'")
    survived = {name for name in hit if made[name].error is None}
    assert {trace.trace_id for trace in searched} == survived and survived
    whole = stored(deployment, experiment, lambda seen: not any(gaps(trace, made[trace.trace_id]) for trace in seen))
    assert whole.keys() == made.keys()


def test_a_reward_model_scores_each_conversation_in_a_span_of_its_trajectory(
    deployment: Deployment, experiment: str
) -> None:
    request = long_group(experiment)
    request.n, request.sampling_params.max_tokens = 4, 8
    request.sample.data_source = CLASSIFIED
    request.sample.prompt = [Message(role="user", content="What is 7 plus 70?")]
    client = AgentClient(f"{deployment.base_url}/agent")
    made = {f"tr-{trajectory.trace_id}": trajectory for trajectory in run(collected(client.group(request)))}
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)

    def known(trajectory: Trajectory) -> float:
        [turn] = trajectory.turns
        said = [message.model_dump(exclude_none=True) for message in (*request.sample.prompt, *turn.messages)]
        return logit_of(tokenizer.encode(str(tokenizer.apply_chat_template(said, tokenize=False))))

    scores = {name: pytest.approx(known(trajectory), abs=1e-4) for name, trajectory in made.items()}
    rewards = {name: trajectory.reward for name, trajectory in made.items()}
    assert {name: reward and reward.score for name, reward in rewards.items()} == scores and len(scores) == 4
    assert {name: reward and reward.components for name, reward in rewards.items()} == {
        name: {"reward_model": score} for name, score in scores.items()
    }

    def shown(trace: TraceTree) -> list[object]:
        return [span.outputs for span in trace.spans() if span.name == "reward"]

    found = stored(deployment, experiment, lambda seen: len(seen) == 4 and all(map(shown, seen)))
    assert {name: shown(trace) for name, trace in found.items()} == {
        name: [{"score": score, "reward_model": score}] for name, score in scores.items()
    }


def test_a_group_whose_client_leaves_is_aborted_in_its_traces(deployment: Deployment, experiment: str) -> None:
    async def leave() -> None:
        client = AgentClient(f"{deployment.base_url}/agent")
        asking = asyncio.create_task(collected(client.group(long_group(experiment))))
        await generating(deployment, N)
        asking.cancel()
        await asyncio.wait([asking])

    run(leave())

    found = stored(deployment, experiment, lambda seen: outcomes(seen) == ["aborted"] * N)
    assert {trace.state for trace in found.values()} == {"ERROR"}


def test_a_callers_trace_goes_through_the_proxy_and_a_call_without_one_leaves_none(
    deployment: Deployment, experiment: str
) -> None:
    def calculate(expression: str, **headers: str) -> None:
        url = f"{deployment.base_url}/tools/tools/calculator/execute"
        headers |= authorization(resolve_token())
        answer = httpx.post(url, json={"arguments": {"expression": expression}}, headers=headers, timeout=60.0)
        assert answer.status_code == 200

    target = TraceTarget(mlflow_experiment_id=experiment).model_dump_json(exclude_defaults=True)
    baggage = f"agentic.target={quote(target)}"
    trace_id = os.urandom(16).hex()
    calculate("1+1", baggage=baggage)
    calculate("1+2", baggage=baggage, traceparent=f"00-{os.urandom(16).hex()}-{'b' * 16}-00")
    calculate("1+3", baggage=baggage, traceparent=f"00-{trace_id}-{'b' * 16}-01")

    found = stored(deployment, experiment, bool)
    assert list(found) == [f"tr-{trace_id}"]
    [span] = found[f"tr-{trace_id}"].spans()
    assert (span.name, span.inputs, span.parent_id) == ("execute_tool calculator", {"expression": "1+3"}, "b" * 16)
