"""The promise: rollout replicas come and go alone, by hand or with the load, and no generation is lost by it."""

import asyncio
import contextlib
import copy
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.sim_engine import SIM

from tests.waiting import async_until, until
from trackway.clients import CallPolicy, RolloutClient, run
from trackway.clients.direct import TrajectoryRouting
from trackway.deploy.config import serve_config
from trackway.deploy.config.serve_config import Replicas
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import ServeApi
from trackway.deploy.local.settings import UpSettings
from trackway.system.waits import Waits, noted_in
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import GenerateRequest, SamplingParams
from trackway.wire.service import REPLICA

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NAME = "simulated"
TOKENS = 50
ANSWERS = {"response_tokens": TOKENS, "response_spread": 0.0, "step_s": 0.03, "step_slope_s": 0.0}
ARGS = {"engine": SIM, "engine_options": ANSWERS, "max_num_seqs": 8, "enable_sleep": True}
AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 3,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 2.0,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 2.0,
}


both_ways = pytest.mark.parametrize(
    "direct", [pytest.param(False, id="by the proxy", marks=pytest.mark.chaos), pytest.param(True, id="directly")]
)


def application() -> dict[str, Any]:
    """The rollout application as shipped, under another name, its engine simulated: 1.5 seconds a generation."""
    shipped = serve_config.load(UpSettings().config)
    [rollout] = [app for app in shipped["applications"] if app["name"] == "rollout"]
    rollout |= {"name": NAME, "route_prefix": f"/{NAME}", "args": ARGS}
    rollout["deployments"][0] |= {"ray_actor_options": {"num_cpus": 0.1}, "graceful_shutdown_timeout_s": 60}
    return rollout


@pytest.fixture(scope="module")
def simulated(deployment: Deployment) -> Iterator[Deployment]:
    """The session's deployment and one service more. Tests leave it with two replicas, which most of them use."""
    api, before = ServeApi(deployment.dashboard_url, deployment.token), deployment.serve_config
    deployment.serve_config = {**before, "applications": [*applications(before), application()]}
    others = pids(deployment)
    serve_api.scale(deployment, NAME, 1)
    yield deployment
    assert pids(deployment) == others  # nothing else restarted, whatever was done to this one
    deployment.serve_config = before
    deployment.save()
    api.deploy(before)
    until(lambda: NAME not in api.applications())


def applications(config: dict[str, object]) -> list[dict[str, Any]]:
    found = config["applications"]
    assert isinstance(found, list)
    return found


def pids(deployment: Deployment) -> dict[str, list[int]]:
    found = serve_api.service_statuses(deployment)
    return {
        service.service: [replica.health.pid for replica in service.replicas]
        for service in found
        if service.service != NAME
    }


class Load:
    """Generations, so many at once, until `end`; by default each is sent once only, so one that is lost is seen."""

    def __init__(self, deployment: Deployment, at_once: int, direct: bool, attempts: int = 1) -> None:
        self.answered = 0
        self.lost: list[Exception] = []
        self.replicas: set[str] = set()
        self._at_once = at_once
        url, policy = f"{deployment.base_url}/{NAME}", CallPolicy(attempts=attempts)
        self._client = RolloutClient(url, policy=policy, direct=direct)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: run(self._send()))
        self._thread.start()

    def end(self) -> None:
        """Let what is in flight finish."""
        self._ended.set()
        self._thread.join(120)

    def state(self) -> str:
        """What came of it so far, for a test that fails."""
        return f"{self.answered} answers from {sorted(self.replicas)}, {len(self.lost)} lost: {self.lost[-3:]}"

    async def _send(self) -> None:
        await asyncio.gather(*(self._line(f"line {number}") for number in range(self._at_once)))

    async def _line(self, name: str) -> None:
        while not self._ended.is_set():
            try:
                await self._one(f"{name} {self.answered}")
            except Exception as error:
                self.lost.append(error)

    async def _one(self, session: str) -> None:
        self.replicas.add(await generate(self._client, [5, 6, 7], session))
        self.answered += 1


async def generate(client: RolloutClient, prompt: list[int], session: str, tokens: int = TOKENS) -> str:
    """The name of the replica that answered."""
    body = GenerateRequest(token_ids=prompt, sampling_params=SamplingParams(max_tokens=tokens))
    return (await client.send("POST", "/generate", body=body, session_id=session)).headers[REPLICA]


@contextlib.contextmanager
def load(deployment: Deployment, at_once: int, direct: bool, attempts: int = 1) -> Iterator[Load]:
    working = Load(deployment, at_once, direct, attempts)
    try:
        yield working
    finally:
        working.end()


def replicas(deployment: Deployment) -> dict[str, int]:
    return ServeApi(deployment.dashboard_url, deployment.token).applications()[NAME].replicas


@both_ways
def test_scaling_up_and_down_under_load_loses_no_generation(simulated: Deployment, direct: bool) -> None:
    with load(simulated, at_once=12, direct=direct) as working:
        until(lambda: working.answered >= 12)
        up = {replica.health.replica for replica in serve_api.scale(simulated, NAME, 3)}
        until(lambda: working.replicas >= up)
        down = {replica.health.replica for replica in serve_api.scale(simulated, NAME, 1)}
        answered = working.answered
        until(lambda: working.answered >= answered + 12)
    assert (working.lost, len(up), len(down), down <= up) == ([], 3, 1, True)


def test_an_edited_config_over_serves_rest_api_scales_too(simulated: Deployment) -> None:
    edited = serve_config.with_replicas(simulated.serve_config, NAME, Replicas(2, 2))
    ServeApi(simulated.dashboard_url, simulated.token).deploy(edited)
    until(lambda: replicas(simulated) == {"RUNNING": 2})
    assert len(serve_api.scale(simulated, NAME, 2)) == 2  # it is what the deployment wants too


def test_a_killed_replica_loses_no_generation(simulated: Deployment) -> None:
    pids = {replica.health.replica: replica.health.pid for replica in serve_api.scale(simulated, NAME, 2)}
    with load(simulated, at_once=12, direct=True, attempts=5) as working:
        until(lambda: working.replicas >= pids.keys(), state=working.state)
        os.kill(min(pids.values()), signal.SIGKILL)
        answered = working.answered
        until(lambda: working.answered >= answered + 24)
        until(lambda: len(working.replicas) >= 3, state=working.state)  # the new one is called too
    assert working.lost == []


@both_ways
def test_turns_of_a_session_meet_the_same_replica(simulated: Deployment, direct: bool) -> None:
    async def sessions() -> list[set[str]]:
        client = RolloutClient(f"{simulated.base_url}/{NAME}", direct=direct)

        async def session(name: str) -> set[str]:
            return {await generate(client, [5, 6, 7], name, tokens=3) for _ in range(4)}

        return await asyncio.gather(*(session(f"session {number}") for number in range(16)))

    serve_api.scale(simulated, NAME, 2)
    met = run(sessions())
    assert [len(replicas) for replicas in met] == [1] * 16
    assert len(set.union(*met)) == 2


def test_trajectories_stay_until_their_replica_dies_and_start_on_its_replacement(simulated: Deployment) -> None:
    pids = {replica.health.replica: replica.health.pid for replica in serve_api.scale(simulated, NAME, 2)}
    client = RolloutClient(f"{simulated.base_url}/{NAME}", policy=CallPolicy(attempts=8), direct=True)
    client.routing = TrajectoryRouting()
    body = GenerateRequest(token_ids=[5, 6, 7] * 10, sampling_params=SamplingParams(max_tokens=3))

    async def turn(trajectory: str) -> str:
        waits = Waits()
        with waits(trajectory, "the rollout service") as waiting, noted_in([waiting]):
            await client.generate(body, trajectory, trajectory=trajectory)
            return waiting.wait().progress.removeprefix("replica ")

    async def play() -> tuple[list[list[str]], list[str], list[str]]:
        names = [f"trajectory {number}" for number in range(8)]
        turns = [await asyncio.gather(*map(turn, names)) for _ in range(3)]
        os.kill(pids[turns[0][0]], signal.SIGKILL)
        after = await asyncio.gather(*map(turn, names))
        started: list[str] = []

        async def is_on_a_new_replica() -> bool:
            started.append(await turn(f"new trajectory {len(started)}"))
            return started[-1] not in pids

        await async_until(is_on_a_new_replica)
        return turns, after, [await turn(name) for name in names]

    turns, after, later = run(play())
    killed, [kept] = turns[0][0], pids.keys() - {turns[0][0]}
    assert turns[0] == turns[1] == turns[2]
    assert turns[0].count(killed) == turns[0].count(kept) == 4
    assert [now for now, before in zip(after, turns[0], strict=True) if before == kept] == [kept] * 4
    assert killed not in [*after, *later]


def test_all_replicas_sleep_and_wake_up_at_one_call(simulated: Deployment) -> None:
    async def nap() -> list[list[list[str]]]:
        client = RolloutClient(f"{simulated.base_url}/{NAME}", policy=CallPolicy(attempts=1))
        told = [await client.sleep("abort"), await client.sleeping()]
        with pytest.raises(TrackwayError, match="paused"):
            await generate(client, [5, 6, 7], "session", tokens=3)
        told += [await client.wake_up(["weights"]), await client.wake_up(["kv_cache"])]
        await generate(client, [5, 6, 7], "session", tokens=3)
        return [[list(replica.asleep) for replica in replies.replicas] for replies in told]

    serve_api.scale(simulated, NAME, 2)
    both = ["kv_cache", "weights"]
    assert run(nap()) == [[both, both], [both, both], [["kv_cache"]] * 2, [[], []]]


@pytest.mark.extended
@both_ways
def test_replicas_follow_the_load_between_their_bounds(simulated: Deployment, direct: bool) -> None:
    serve_api.scale(simulated, NAME, 1)
    config = copy.deepcopy(simulated.serve_config)
    [own] = [app for app in applications(config) if app["name"] == NAME]
    own["deployments"][0].pop("num_replicas", None)
    own["deployments"][0]["autoscaling_config"] = AUTOSCALING
    simulated.serve_config = config
    assert len(serve_api.scale(simulated, NAME, Replicas(1, 3))) == 1
    with load(simulated, at_once=12, direct=direct) as working:
        until(lambda: replicas(simulated) == {"RUNNING": 3})
        until(lambda: len(working.replicas) >= 3, state=working.state)  # more where Serve replaced some meanwhile
    until(lambda: replicas(simulated) == {"RUNNING": 1})
    assert (working.lost, working.answered >= 12) == ([], True)
    [kept] = serve_api.scale(simulated, NAME, 1)
    assert kept.health.replica in {replica.health.replica for replica in serve_api.scale(simulated, NAME, 2)}
