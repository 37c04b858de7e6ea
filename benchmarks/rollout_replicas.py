"""One, two and four replicas of the simulated engine behind Ray Serve, as `trackway scale` makes them."""

import asyncio
import itertools
import random
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from sim_engine import use_sim

from trackway.clients import CallPolicy, RolloutClient, run
from trackway.clients.direct import TrajectoryRouting
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.local.up import bring_up, take_down
from trackway.system.waits import Waits, noted_in
from trackway.wire.rollout import GenerateRequest, SamplingParams
from trackway.wire.service import REPLICA

SLOTS = 8
TOKENS, STEP_S = 50, 0.02
"""Of an answer: a second of a slot, so that a replica can do about eight calls a second."""
TURNS = 4
PROMPT_TOKENS, OBSERVATION_TOKENS = 96, 16
WARM_S, WINDOW_S = 5.0, 25.0
SATURATED, MODERATE = 4 * SLOTS, SLOTS // 2
"""Trajectories at once for each replica."""
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"

_names = itertools.count()


def measure_replicas() -> None:
    """Calls a second with each number, and how often a trajectory finds its replica and its prefix again.

    Calls go to the replicas directly, by `rollout_routing: trajectory`; with four replicas by `group`, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "sim.yaml"
        config.write_text(yaml.safe_dump(serve_config()))
        settings = UpSettings(
            config=config, outputs=Path(folder), mlflow_uri="http://127.0.0.1:9", port=0, dashboard_port=0, ray_port=0
        )
        deployment = bring_up(settings, lambda name, state: print(f"{name}: {state}", flush=True))
        try:
            alone = 0.0
            for replicas in (1, 2, 4):
                serve_api.scale(deployment, "rollout", replicas)
                rate = show(deployment, replicas, SATURATED, "saturated")
                alone = alone or rate
                print(f"  {rate / alone / replicas:.3f} of linear", flush=True)
                show(deployment, replicas, MODERATE, "half full")
            show(deployment, replicas, SATURATED, "saturated", by_group=True)
            show(deployment, replicas, MODERATE, "half full", by_group=True)
        finally:
            take_down(deployment)


def serve_config() -> dict[str, object]:
    """The rollout application of `CPU_CONFIG`, with the engine simulated."""
    sim = {"response_tokens": TOKENS, "response_spread": 0.0, "step_s": STEP_S, "step_slope_s": 0.0}
    deployment = {
        "name": "rollout",
        "num_replicas": 1,
        "max_ongoing_requests": 2 * SLOTS,
        "graceful_shutdown_timeout_s": 60,
        "ray_actor_options": {"num_cpus": 0.1},
        "request_router_config": {
            "request_router_class": ROUTER,
            "request_router_kwargs": {"num_virtual_nodes": 500, "num_fallback_replicas": 2},
        },
    }
    application = {
        "name": "rollout",
        "route_prefix": "/rollout",
        "import_path": "trackway.deploy.graph:rollout",
        "args": {"engine": use_sim(), "engine_options": sim, "max_num_seqs": SLOTS},
        "deployments": [deployment],
    }
    return {"proxy_location": "HeadOnly", "logging_config": {"enable_access_log": False}, "applications": [application]}


@dataclass
class Seen:
    """What the trajectories of one phase met."""

    began: float = field(default_factory=time.monotonic)
    calls: int = 0
    """Answered within the window."""
    turns: int = 0
    """Second and later turns of all trajectories."""
    same_replica: int = 0
    """Of these: on the replica of the turn before."""
    replicas: Counter[str] = field(default_factory=Counter)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began


def show(deployment: Deployment, replicas: int, each: int, name: str, by_group: bool = False) -> float:
    """Run one phase and print it; returns calls a second."""
    url = f"{deployment.base_url}/rollout"
    before = run(tokens(url, replicas))
    seen = run(load(url, each * replicas, None if by_group else TrajectoryRouting()))
    computed, reused = (after - was for after, was in zip(run(tokens(url, replicas)), before, strict=True))
    rate = seen.calls / WINDOW_S
    print(
        f"{replicas} {name:9} by {'group' if by_group else 'trajectory'} ({each * replicas} trajectories at once): "
        f"{rate:.2f} calls a second, "
        f"same replica {seen.same_replica / max(1, seen.turns):.1%} of {seen.turns} turns, "
        f"prefix cache {reused / (reused + computed):.1%} of prompt tokens, "
        f"calls by replica {sorted(seen.replicas.values())}",
        flush=True,
    )
    return rate


async def load(url: str, at_once: int, routing: TrajectoryRouting | None) -> Seen:
    """Trajectories one after the other on each of `at_once` lines; the last ones are let finish."""
    policy = CallPolicy(max_in_flight=at_once)
    client, seen = RolloutClient(url, policy=policy, direct=True), Seen()
    client.routing = routing

    async def line() -> None:
        while seen.elapsed < WARM_S + WINDOW_S:
            await trajectory(client, seen)

    await asyncio.gather(*(line() for _ in range(at_once)))
    return seen


async def trajectory(client: RolloutClient, seen: Seen) -> None:
    """Turns of one session, each of which begins with all that was said before."""
    number = next(_names)
    draw, session, last = random.Random(number), f"load/{number}", ""
    prompt = list(ids(draw, PROMPT_TOKENS))
    for turn in range(TURNS):
        body = GenerateRequest(token_ids=prompt, sampling_params=SamplingParams(max_tokens=2 * TOKENS, seed=number))
        waits = Waits()
        with waits(session, "the rollout service") as waiting, noted_in([waiting]):
            reply = await client.generate(body, session, trajectory=session)
            replica = waiting.wait().progress
        if WARM_S <= seen.elapsed < WARM_S + WINDOW_S:
            seen.calls += 1
        seen.replicas[replica] += 1
        seen.turns += turn > 0
        seen.same_replica += replica == last
        last = replica
        prompt = [*prompt, *reply.choices[0].token_ids, *ids(draw, OBSERVATION_TOKENS)]
    client.release(session)


def ids(draw: random.Random, count: int) -> Iterator[int]:
    return (draw.randrange(3, 480) for _ in range(count))


async def tokens(url: str, replicas: int) -> tuple[float, float]:
    """Prompt tokens computed and reused so far, of all replicas; sessions are tried until each has answered."""
    client, found = RolloutClient(url), {}
    while len(found) < replicas:
        answer = await client.send("GET", "/metrics", session_id=uuid.uuid4().hex)
        lines = {line.split("{")[0].split()[0]: line for line in answer.text.splitlines() if line[:1] != "#"}
        read = [lines[f"trackway_engine_{kind}_tokens_total"].split()[-1] for kind in ("prefilled", "reused")]
        found[answer.headers[REPLICA]] = (float(read[0]), float(read[1]))
    return sum(prefilled for prefilled, _ in found.values()), sum(reused for _, reused in found.values())
