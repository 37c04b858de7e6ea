"""Runs and generations on a cluster, and what must be said of them whatever happened meanwhile."""

import asyncio
from pathlib import Path

from lab import Cluster
from small_runs import small_run

from trackway.clients import CallPolicy, RolloutClient, TrainerClient, run
from trackway.deploy import train
from trackway.deploy.traces import MlflowStore
from trackway.deploy.traces.verify import Gap, dumps, verify
from trackway.trainer.config import compose
from trackway.trainer.dump import read_trajectories
from trackway.trainer.run_folder import RunFolder
from trackway.wire.headers import REPLICA
from trackway.wire.rollout import GenerateReply, GenerateRequest, SamplingParams
from trackway.wire.trainer import RunInfo, RunState

_STORED_S = 45.0
"""Longest wait for traces that waited for their backend."""


def start(cluster: Cluster, name: str, steps: int) -> str:
    """A small run whose training trajectories are all traced."""
    words = small_run(cluster.deployment.outputs, name, steps)
    return train.start_run(cluster.deployment, compose(words, config_name="tiny_demo"), name).run


def step_of(cluster: Cluster, name: str) -> int:
    """How far the run is."""
    info = run(TrainerClient(f"{cluster.deployment.base_url}/trainer").run(name))
    assert info.state not in (RunState.FAILED, RunState.STOPPED), info.message
    return info.step


def ended(cluster: Cluster, name: str) -> RunInfo:
    """The run once it is over."""
    return train.follow(cluster.deployment, name, lambda info: None)


def lost_nothing(info: RunInfo, steps: int) -> None:
    """The run ended well, and each trajectory that it asked for came once and without an error."""
    made = [one for file in dumps(RunFolder(Path(info.folder)), None, None) for one in read_trajectories(file)]
    assert (info.state, info.step, info.restarts) == (RunState.FINISHED, steps, 0)
    assert len({one.id for one in made}) == len(made) == 8 + 16 * steps + 8
    assert [one.error for one in made if one.error] == []


def trace_gaps(cluster: Cluster, info: RunInfo, steps: int) -> list[Gap]:
    """What the traces lack of the trajectories that were to be traced."""
    folder, store = RunFolder(Path(info.folder)), MlflowStore(cluster.deployment.mlflow_uri, [str(info.experiment_id)])
    found = verify(store, folder, dumps(folder, None, None), _STORED_S)
    print(f"{found.traced} trajectories traced, {found.complete} traces whole", *found.gaps, sep="\n", flush=True)
    assert found.traced == 2 + 16 * steps + 2
    return found.gaps


async def generate(cluster: Cluster, tokens: int, session: str = "", attempts: int = 1) -> str:
    """One generation of that length, by the head's proxy; the replica that answered."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1)
    request = GenerateRequest(request_id=f"{session}/0", token_ids=[1, 2, 3], sampling_params=params)
    policy = CallPolicy(attempts=attempts, read_s=120.0, total_s=120.0)
    client = RolloutClient(f"{cluster.deployment.base_url}/rollout", policy=policy)
    answer = await client.send("POST", "/inference/v1/generate", body=request, session_id=session or None)
    [choice] = GenerateReply.model_validate_json(answer.content).choices
    assert len(choice.token_ids) == tokens
    return answer.headers[REPLICA]


async def generating(cluster: Cluster, requests: int) -> None:
    """Return when the rollout replicas work on so many requests together."""
    client, at_work = RolloutClient(f"{cluster.deployment.base_url}/rollout"), dict[str, float]()
    async with asyncio.timeout(60):
        while sum(at_work.values()) < requests:
            answer = await client.send("GET", "/metrics")
            values = [line.split()[-1] for line in answer.text.splitlines() if line.startswith("trackway_in_flight")]
            at_work[answer.headers[REPLICA]] = sum(map(float, values)) - 1  # without the request for the metrics
            await asyncio.sleep(0.02)
