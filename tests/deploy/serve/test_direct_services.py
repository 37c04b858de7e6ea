"""Rollout and agent replicas at their own ports: a full one passes generations on, and streams take turns."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from benchmarks.sim_engine import SIM
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from trackway.clients import AgentClient, CallPolicy, RolloutClient, close_shared_http
from trackway.clients.direct import TrajectoryRouting
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.serve.direct_port import DirectPort
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings
from trackway.serving.middleware import ReplicaName
from trackway.system.waits import Waits, noted_in
from trackway.trainer.data.tiny import make_tiny_rows
from trackway.wire.agent import GroupRequest
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import GenerateRequest, SamplingParams
from trackway.wire.service import Health, Ready, ReplicaInfo, ReplicaList

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.usefixtures("collector")]

REQUEST = GenerateRequest(token_ids=[5, 6, 7], sampling_params=SamplingParams(max_tokens=20))


def rollout(name: str, at_once: int = 1) -> FastAPI:
    """So many generations at a time, a fifth of a second each, and no queue."""
    sim = {"response_tokens": 20, "response_spread": 0.0, "step_s": 0.01, "step_slope_s": 0.0}
    args = {
        "engine": SIM,
        "engine_options": sim,
        "max_num_seqs": at_once,
        "max_queue": 0,
        "model_path": TINY_MODEL,
        "replica": name,
    }
    return create_app(RolloutSettings.model_validate(args))


@asynccontextmanager
async def listed(apps: Sequence[FastAPI], names: Sequence[str]) -> AsyncIterator[tuple[str, list[str]]]:
    """The URL of a proxy that only lists the replicas, and their own URLs."""
    ports = [DirectPort(app, "127.0.0.1", int, 0.0) for app in apps]
    proxy = FastAPI()

    @proxy.get("/replicas")
    async def replicas() -> ReplicaList:
        return ReplicaList(replicas=[described(name, port.url) for name, port in zip(names, ports, strict=True)])

    front = DirectPort(proxy, "127.0.0.1", int, 0.0)
    async with AsyncExitStack() as stack:
        for app in [*apps, proxy]:
            await stack.enter_async_context(app.router.lifespan_context(app))
        yield front.url, [port.url for port in ports]
        await close_shared_http()


def agent(name: str) -> FastAPI:
    """Streams one trajectory, which says by which replica it was made."""
    app = FastAPI()
    app.add_middleware(ReplicaName, replica=name)

    @app.get("/health")
    async def health() -> Health:
        return described(name, "").health

    @app.post("/groups")
    async def groups(request: GroupRequest) -> StreamingResponse:
        trajectory = request.failed(0, TrackwayError(ErrorCode.INTERNAL, "a test"))
        made = trajectory.model_copy(update={"agent_name": name})
        return StreamingResponse(iter([made.model_dump_json() + "\n"]))

    return app


def described(name: str, url: str) -> ReplicaInfo:
    health = Health(service="rollout", replica=name, pid=1, python="3", executable="python")
    return ReplicaInfo(health=health, ready=Ready(ready=True), url=url)


async def test_a_full_rollout_replica_passes_generations_of_its_group_on_to_the_next() -> None:
    async with listed([rollout("aaaa"), rollout("bbbb")], ["aaaa", "bbbb"]) as (url, _):
        client = RolloutClient(url, policy=CallPolicy(attempts=1, total_s=20.0), direct=True)
        await client.generate(REQUEST, "group")  # the list of replicas is here
        replies = await asyncio.gather(*(client.generate(REQUEST, "group") for _ in range(2)))
    assert ([len(reply.choices[0].token_ids) for reply in replies], client.spilled) == ([20, 20], 1)


async def test_trajectories_of_a_group_share_replicas_and_stay_until_theirs_leaves() -> None:
    body = REQUEST.model_copy(update={"token_ids": [5] * 20})
    async with listed([rollout("aaaa", 8), rollout("bbbb", 8)], ["aaaa", "bbbb"]) as (url, _):
        client = RolloutClient(url, direct=True, batches=True)
        client.routing = TrajectoryRouting()

        async def turn(trajectory: str) -> str:
            waits = Waits()
            with waits(trajectory, "the rollout service") as waiting, noted_in([waiting]):
                await client.generate(body, "group", trajectory=trajectory)
                return waiting.wait().progress

        names = ["0", "1", "2", "3"]
        turns = [await asyncio.gather(*map(turn, names)) for _ in range(3)]
        streamed = [piece async for piece in client.stream_generation(body, "group", trajectory="4")]
    assert turns[0] == turns[1] == turns[2]
    assert Counter(turns[0]) == {"replica aaaa": 2, "replica bbbb": 2}
    assert sum(len(piece.token_ids) for piece in streamed) == 20


async def test_openais_routes_answer_at_a_replicas_own_port() -> None:
    async with (
        listed([rollout("aaaa")], ["aaaa"]) as (_, [url]),
        httpx.AsyncClient(trust_env=False, timeout=60.0) as http,
    ):
        body = {"model": "policy", "messages": [{"role": "user", "content": "1+1"}], "max_tokens": 3}
        answer = await http.post(f"{url}/v1/chat/completions", json=body)
        assert (answer.status_code, len(answer.json()["choices"])) == (200, 1)


async def test_groups_are_streamed_by_each_agent_replica_in_turn() -> None:
    group = GroupRequest(run="run", experiment_name="e", step=1, sample=make_tiny_rows("train", 1, seed=1)[0], n=1)
    async with listed([agent("aaaa"), agent("bbbb")], ["aaaa", "bbbb"]) as (url, _):
        client = AgentClient(url, direct=True)
        made = [trajectory.agent_name for _ in range(4) async for trajectory in client.group(group)]
    assert made == ["aaaa", "bbbb"] * 2
