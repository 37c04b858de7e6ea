"""The promise: a program that only knows OpenAI's SDK is trained, also while a replica of the agent service dies."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.access_tokens import OPERATOR
from tests.e2e.test_training import quiet, step_of, trajectories_of, whole
from tests.services.trainer.run_state.atif_documents import read_back
from tests.waiting import until
from trackway.agent.sessions.store import replica_of
from trackway.deploy.config import serve_config
from trackway.deploy.deployment import serve_api
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import ServeApi
from trackway.deploy.runs.session import RunSession
from trackway.trainer.data import make_tiny
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.agent import RewardModel, Sample
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode
from trackway.wire.service import ReplicaInfo
from trackway.wire.sessions import SessionAccess, SessionRequest, TrainedSession
from trackway.wire.trainer import RunInfo, RunState
from trackway.wire.trajectory import StopReason, Trajectory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[2] / "examples" / "agents" / "openai_script.py"
ACCURACY = "val-core/trackway/tiny_math/acc/mean@1"
Start = Callable[..., RunInfo]


@pytest.fixture(scope="module")
def agents(deployment: Deployment) -> Iterator[list[ReplicaInfo]]:
    """Two replicas of the agent service, whose external agent is the example."""
    with running_agents(deployment, {"command": [sys.executable, str(SCRIPT)]}, 2):
        yield agent_replicas(deployment)


@contextmanager
def running_agents(deployment: Deployment, external: Mapping[str, object], replicas: int) -> Iterator[None]:
    """Replicas of the agent service with these settings of its external agent; afterwards with the former ones."""
    before = deployment.serve_config
    old = {replica.health.pid for replica in agent_replicas(deployment)}
    deployment.serve_config = serve_config.with_options(before, "agent", {"external": external})
    serve_api.scale(deployment, "agent", replicas)
    until(lambda: len(now := agent_replicas(deployment)) == replicas and old.isdisjoint(r.health.pid for r in now))
    yield
    last = {replica.health.pid for replica in agent_replicas(deployment)}
    deployment.serve_config = before
    deployment.save()
    ServeApi(deployment.dashboard_url, deployment.token).deploy(before)
    until(lambda: (now := agent_replicas(deployment)) and last.isdisjoint(replica.health.pid for replica in now))


def agent_replicas(deployment: Deployment) -> list[ReplicaInfo]:
    [agent] = [service for service in serve_api.service_statuses(deployment) if service.service == "agent"]
    return agent.replicas


def rows(deployment: Deployment) -> list[str]:
    """Overrides for a run of the demo's rows with the external agent."""
    folder = deployment.outputs / "external-rows"
    make_tiny(folder, train_size=64, test_size=16, seed=0, agent_name="external")
    files = [f"data.train_files={folder / 'train.parquet'}", f"data.val_files={folder / 'test.parquet'}"]
    return [*files, "data.val_max_samples=4"]


def test_a_plain_openai_script_is_trained(
    deployment: Deployment, agents: list[ReplicaInfo], started: Start, tmp_path: Path
) -> None:
    few = [f"{key}=2" for key in ("data.train_batch_size", "actor_rollout_ref.rollout.n")]  # each starts a program
    few += ["actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    info = RunSession(deployment).follow(started("external", 2, *rows(deployment), *few).run, quiet)

    made = trajectories_of(info)
    assert (info.state, info.message, len(made)) == (RunState.FINISHED, "", 4 + 8 + 4)
    assert [trajectory.error for trajectory in made if trajectory.error] == []
    assert {(trajectory.agent_name, trajectory.stop_reason) for trajectory in made} <= {
        ("external", StopReason.ANSWERED),
        ("external", StopReason.MAX_RESPONSE),
    }
    metrics = [json.loads(line) for line in (Path(info.folder) / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert [row["step"] for row in metrics if ACCURACY in row["data"]] == [0, 2]
    differences = [row["data"]["training/rollout_logprob_diff_max"] for row in metrics if row["step"] > 0]
    assert len(differences) == 2 and max(differences) < 1e-4  # the learner's tokens are those that were sampled
    assert read_back(RunFolder(Path(info.folder)), tmp_path) == len(made)  # as ATIF documents

    traced = {f"tr-{trajectory.trace_id}": trajectory for trajectory in made if trajectory.trace_id}
    assert info.experiment_id and len(traced) == 2 + 8 + 2
    experiment = info.experiment_id
    assert until(lambda: whole(deployment, experiment, traced)).keys() == traced.keys()


@pytest.mark.extended
def test_sessions_of_a_killed_replica_go_on_elsewhere_or_end_by_name(
    deployment: Deployment, agents: list[ReplicaInfo], started: Start
) -> None:
    lost, kept = agents[0].health, agents[1].health
    ports = {agent.health.replica: agent.url for agent in agents}
    name = started("external-killed", 2, *rows(deployment)).run
    until(lambda: step_of(deployment, name) >= 1)
    opened = {replica: opened_on(deployment, replica) for replica in (lost.replica, kept.replica)}
    assert [answer(opened[replica]).status_code for replica in opened] == [200, 200]
    assert {replica: (opened[replica].direct_url or "").partition("/sessions/")[0] for replica in opened} == ports
    programs = until(lambda: running_programs(lost.pid))
    os.kill(lost.pid, signal.SIGKILL)

    until(lambda: "its sessions have ended: open another" in (gone := answer(opened[lost.replica])).text and gone)
    assert answer(opened[lost.replica]).json()["error"]["code"] == ErrorCode.UNAVAILABLE
    until(lambda: answer(opened[kept.replica]).status_code == 200)
    until(lambda: not any(program.is_running() for program in programs))

    info = RunSession(deployment).follow(name, quiet)
    made = trajectories_of(info)
    assert (info.state, info.restarts) == (RunState.FINISHED, 0)
    assert len({key(trajectory) for trajectory in made}) == len(made) == 4 + 32 + 4
    errors = [trajectory.error for trajectory in made if trajectory.error]
    assert {error.code for error in errors} <= {ErrorCode.AGENT_FAILED}, errors
    whole_ones = [trajectory for trajectory in made if trajectory.error is None]
    assert {turn.finish_reason for trajectory in whole_ones for turn in trajectory.turns} <= {"stop", "length"}


def test_sessions_of_a_deployed_agent_are_trained_also_when_the_run_is_killed(
    deployment: Deployment, agents: list[ReplicaInfo], started: Start
) -> None:
    name = started(
        "sessions",
        3,
        "trackway.rollouts_from=sessions",
        "data.train_files=[]",
        "data.val_files=[]",
        "trainer.save_freq=1",
    ).run
    until(lambda: accepts(deployment, name))
    until(lambda: "4 sessions of one group" in waits_of(deployment, name))
    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(lambda number: worked(deployment, number), range(32)))
        until(lambda: step_of(deployment, name) >= 1)
        os.kill(worker_of(deployment, name), signal.SIGKILL)
        rest = list(pool.map(lambda number: worked(deployment, number), range(32, 48)))

    info = RunSession(deployment).follow(name, quiet)
    made = trajectories_of(info)
    assert (info.state, info.restarts) == (RunState.FINISHED, 1)
    assert [trajectory.error for trajectory in made if trajectory.error] == []
    assert sorted(trajectory.session_id for trajectory in made) == sorted([*first, *rest])
    rows = [json.loads(line) for line in (Path(info.folder) / "metrics.jsonl").read_text().splitlines()]
    [first_step] = [row["data"] for row in rows if row["step"] == 1]
    assert first_step["training/rollout_logprob_diff_max"] < 1e-4  # none was sampled from an earlier run's weights
    assert (info.rollout_states["used"], info.rollout_states["submitted"]) == (48, 48)
    waiting = Path(info.folder) / "sessions"
    assert [*waiting.glob("waiting/*"), *waiting.glob("drawn/*")] == []


def accepts(deployment: Deployment, name: str) -> bool:
    headers = {"authorization": f"Bearer {OPERATOR}"}
    return httpx.get(f"{deployment.base_url}/trainer/sessions/run?run={name}", headers=headers).status_code == 200


def waits_of(deployment: Deployment, name: str) -> str:
    headers = {"authorization": f"Bearer {OPERATOR}"}
    return json.dumps(httpx.get(f"{deployment.base_url}/trainer/runs/{name}", headers=headers).json()["waits"])


def worker_of(deployment: Deployment, name: str) -> int:
    return json.loads((deployment.outputs / name / "worker.json").read_text())["pid"]


def worked(deployment: Deployment, number: int) -> str:
    """A session of a deployed agent from its beginning to its end; returns its id."""
    access = opened_for(deployment, train=TrainedSession(group=number // 4))
    assert answer(access).status_code == 200
    own, headers = access.base_url.removesuffix("/v1"), {"authorization": f"Bearer {OPERATOR}"}
    httpx.post(f"{own}/reward", json={"score": number % 2}, headers=headers, timeout=30).raise_for_status()
    httpx.post(f"{own}/end", headers=headers, timeout=120).raise_for_status()
    return access.session_id


def key(trajectory: Trajectory) -> tuple[bool, int, object, int]:
    tags = trajectory.tags
    return tags.validation, tags.step, tags.sample_index, tags.rollout_n


def opened_on(deployment: Deployment, replica: str) -> SessionAccess:
    """A session of this replica."""

    def open_one() -> SessionAccess | None:
        access = opened_for(deployment)
        return access if replica_of(access.session_id) == replica else None

    return until(open_one)


def opened_for(deployment: Deployment, train: TrainedSession | None = None) -> SessionAccess:
    """A session of some replica."""
    sample = Sample(
        data_source="openai/gsm8k",
        prompt=[Message(role="user", content="9+9?")],
        reward_model=RewardModel(ground_truth="18"),
    )
    body = SessionRequest(sample=sample, train=train).model_dump_json(exclude_none=True)
    headers = {"authorization": f"Bearer {OPERATOR}", "content-type": "application/json"}
    reply = httpx.post(f"{deployment.base_url}/agent/sessions", content=body, headers=headers, timeout=30)
    return SessionAccess.model_validate_json(reply.raise_for_status().content)


def answer(access: SessionAccess) -> httpx.Response:
    """The answer to a call of the session's model."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "9+9?"}], "max_tokens": 4}
    headers = {"authorization": f"Bearer {access.api_key}"}
    return httpx.post(f"{access.base_url}/chat/completions", json=body, headers=headers, timeout=60)


def running_programs(replica_pid: int) -> list[psutil.Process]:
    """The programs that the replica runs."""
    found: list[psutil.Process] = []
    for process in psutil.Process(replica_pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if str(SCRIPT) in process.cmdline():
                found.append(process)
    return found
