"""Runs and generations on a cluster, and what must be said of them whatever happened meanwhile."""

import asyncio
from pathlib import Path

import psutil

from tests.cluster.ray_cluster import PATIENCE_S, Cluster, until
from tests.e2e.small_runs import small_run
from trackway.clients import CallPolicy, RolloutClient, TrainerClient, run
from trackway.deploy.runs.session import RunSession
from trackway.learner.ranks.launch import RANK_PROGRAM
from trackway.run_config import compose
from trackway.traces import MlflowStore
from trackway.traces.verify import Gap, dumps, verify
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.rollout import GenerateReply, GenerateRequest, SamplingParams
from trackway.wire.service import REPLICA
from trackway.wire.trainer import ENDED, RunInfo, RunState

STEPS = 100
"""More than any test waits for, on whatever machine: a run goes on until its test has seen enough."""
_STORED_S = 45.0
"""Longest wait for traces that waited for their backend."""


def start(cluster: Cluster, name: str, *overrides: str) -> str:
    """A small run whose training trajectories are all traced."""
    words = small_run(cluster.deployment.outputs, name, STEPS, *overrides)
    return RunSession(cluster.deployment).start(compose(words, config_name="tiny_demo"), name).run


def step_of(cluster: Cluster, name: str) -> int:
    """How far the run is."""
    info = run(_trainer(cluster).run(name))
    assert info.state not in (RunState.FAILED, RunState.STOPPED), info.message
    return info.step


def goes_on(cluster: Cluster, name: str, steps: int) -> None:
    """Return after so many more steps."""
    before = step_of(cluster, name)
    until(lambda: step_of(cluster, name) >= before + steps)


def stopped(cluster: Cluster, name: str) -> RunInfo:
    """The run, asked to stop and over."""
    return RunSession(cluster.deployment).stop(name, lambda info: None)


def stop_all(cluster: Cluster) -> None:
    """No run is active afterwards, and none goes on by itself."""
    for info in run(_trainer(cluster).runs()):
        if info.state not in ENDED or info.interrupted:
            stopped(cluster, info.run)


def lost_nothing(info: RunInfo) -> None:
    """The run went well until it was stopped, and each step's trajectories came once and without an error."""
    made = [
        trajectory for file in dumps(RunFolder(Path(info.folder)), None, None) for trajectory in read_trajectories(file)
    ]
    assert (info.state, info.interrupted, info.restarts) == (RunState.STOPPED, False, 0)
    assert len({trajectory.id for trajectory in made}) == len(made) == 8 + 16 * info.step
    assert [trajectory.error for trajectory in made if trajectory.error] == []


def trace_gaps(cluster: Cluster, info: RunInfo) -> list[Gap]:
    """What the traces lack of the trajectories that were to be traced."""
    folder, store = RunFolder(Path(info.folder)), MlflowStore(cluster.deployment.mlflow_uri, [str(info.experiment_id)])
    found = verify(store, folder, dumps(folder, None, None), _STORED_S)
    print(f"{found.traced} trajectories traced, {found.complete} traces whole", *found.gaps, sep="\n", flush=True)
    assert found.traced == 2 + 16 * info.step
    return found.gaps


def ranks_of(cluster: Cluster) -> list[list[str]]:
    """The command lines of ranks whose first one is in the cluster's network."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if RANK_PROGRAM in line and cluster.nodes["one"].address in line]


def _trainer(cluster: Cluster) -> TrainerClient:
    return TrainerClient(f"{cluster.deployment.base_url}/trainer")


async def generate(cluster: Cluster, tokens: int, session: str = "", attempts: int = 1) -> str:
    """One generation of that length, by the head's proxy; the replica that answered."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1)
    request = GenerateRequest(request_id=f"{session}/0", token_ids=[1, 2, 3], sampling_params=params)
    policy = CallPolicy(attempts=attempts, read_s=PATIENCE_S, total_s=PATIENCE_S)
    client = RolloutClient(f"{cluster.deployment.base_url}/rollout", policy=policy)
    answer = await client.send("POST", "/inference/v1/generate", body=request, session_id=session or None)
    [choice] = GenerateReply.model_validate_json(answer.content).choices
    assert len(choice.token_ids) == tokens
    return answer.headers[REPLICA]


async def generating(cluster: Cluster, requests: int) -> None:
    """Return when the rollout replicas work on so many requests together."""
    client, at_work = RolloutClient(f"{cluster.deployment.base_url}/rollout"), dict[str, float]()
    async with asyncio.timeout(PATIENCE_S):
        while sum(at_work.values()) < requests:
            answer = await client.send("GET", "/metrics")
            values = [line.split()[-1] for line in answer.text.splitlines() if line.startswith("trackway_in_flight")]
            at_work[answer.headers[REPLICA]] = sum(map(float, values)) - 1  # without the request for the metrics
            await asyncio.sleep(0.02)
