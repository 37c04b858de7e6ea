"""The promise: runs and checkpoints share one deployment, each with a policy of its own, as if each were alone."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_external_agent import worker_of
from tests.e2e.test_trial import trackway
from tests.waiting import until
from trackway.clients import RolloutClient, run
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import replicas_at
from trackway.deploy.runs.session import RunSession
from trackway.trainer.run_state.checkpoint import MANIFEST, PREFIX, Manifest
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.trainer import RunInfo, RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

KEYS = ("trainer.save_freq=1", "algorithm.rollout_correction.bypass_mode=false")
"""The preset's `bypass_mode` trains on the engine's logprobs, which what else is in a batch rounds."""

Rollout = tuple[int, int | str, int, bool]


def rollouts_of(info: RunInfo) -> dict[Rollout, tuple[list[int], float | None]]:
    """The tokens and the score of each rollout. Logprobs are rounded by what else is in a batch."""
    files = sorted((Path(info.folder) / "trajectories").glob("*.parquet"))
    return {
        (tags.step, tags.sample_index, tags.rollout_n, tags.validation): (
            trajectory.response_ids,
            trajectory.reward and trajectory.reward.score,
        )
        for file in files
        for trajectory in read_trajectories(file)
        for tags in [trajectory.tags]
    }


def learned_by(info: RunInfo) -> dict[str, str]:
    """The digest of each file of the learner's state in the last checkpoint: weights, moments, random state."""
    root = Path(info.folder) / "checkpoints" / f"{PREFIX}{info.step}"
    files = Manifest.model_validate_json((root / MANIFEST).read_text()).files
    return {file.name: file.sha256 for file in files if file.name.startswith("actor/")}


def ids_and_versions(tried: str) -> tuple[list[int], set[int]]:
    """The tokens of the first rollout of a trial, and the weight versions that made them."""
    first = json.loads(tried)["trajectories"][0]
    return first["response_ids"], {span["version"] for span in first["weight_versions"]}


def test_two_runs_and_a_checkpoint_get_what_each_gets_alone_though_the_engines_are_killed(
    deployment: Deployment, started
) -> None:
    session = RunSession(deployment)
    outputs = ["--outputs", str(deployment.outputs)]
    rows = str(deployment.outputs / "data" / "train.parquet")
    preset = [f"actor_rollout_ref.model.path={TINY_MODEL}", "--config-name", "tiny_demo", "--json", *outputs]

    def policies() -> dict[str, dict[str, Any]]:
        return {policy["name"]: policy for policy in json.loads(trackway("policies", "list", "--json", *outputs))}

    def tried(policy: str) -> tuple[list[int], set[int]]:
        return ids_and_versions(trackway("try", rows, *preset, "--policy", policy))

    alone = session.follow(started("alone", 2, *KEYS).run, lambda info: None)
    trackway("policies", "load", "alone:2", *outputs)
    checkpoint = tried("alone:2")
    names = [started(name, 2, *KEYS).run for name in ("together", "beside")]
    rollout = RolloutClient(deployment.url("rollout"))
    until(lambda: any(policy.name == "beside" and policy.loaded for policy in run(rollout.policies()).policies))
    [killed] = replicas_at(deployment.url("rollout"))
    os.kill(killed.health.pid, signal.SIGKILL)
    beside_both = tried("alone:2")
    runs = [session.follow(name, lambda info: None) for name in names]
    expected = rollouts_of(alone)
    assert [(info.state, info.policy, info.restarts) for info in runs] == [
        (RunState.FINISHED, None, 0),
        (RunState.FINISHED, "beside", 0),
    ]
    assert len(expected) == 8 + 32 + 8
    assert [rollouts_of(info) for info in runs] == [expected, expected]
    assert learned_by(alone) and [learned_by(info) for info in runs] == [learned_by(alone)] * 2
    assert beside_both == checkpoint and checkpoint[1] == {2}
    [replica] = replicas_at(deployment.url("rollout"))
    assert replica.health.pid != killed.health.pid

    listed = policies()
    trials = {policy: tried(policy) for policy in ("beside", "base")}
    evaluate = ["evaluate", "running", "--data", rows, "--limit", "2", "--config-name", "tiny_demo", "--json", *outputs]
    evaluated = json.loads(trackway(*evaluate, "--policy", "alone:2"))["evaluation"]
    trackway("policies", "drop", "alone:2", *outputs)

    assert {"policy", "base", "beside", "alone:2"} <= listed.keys() and listed["policy"]["is_default"]
    assert "alone:2" not in policies()
    assert (evaluated["name"], evaluated["policy"], evaluated["summary"]["failed"]) == ("eval-alone-2", "alone:2", 0)
    assert trials["beside"] == (checkpoint[0], {3})
    assert checkpoint[0] and trials["base"][1] == {0}


@pytest.mark.extended  # test_manager.py kills one of two runs, and the test above runs two policies on engines
def test_two_adapters_of_one_base_learn_what_each_learns_alone_though_a_worker_is_killed(
    deployment: Deployment, started
) -> None:
    session = RunSession(deployment)
    adapter = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=5e-3", *KEYS)

    alone = session.follow(started("adapter-alone", 3, *adapter).run, lambda info: None)
    names = [started(name, 3, *adapter).run for name in ("adapter-first", "adapter-second")]
    killed = RunFolder(deployment.outputs / names[1])
    until(lambda: killed.info().step == 1)
    os.kill(worker_of(deployment, names[1]), signal.SIGKILL)
    runs = [session.follow(name, lambda info: None) for name in names]

    assert [(info.state, info.policy, info.restarts) for info in runs] == [
        (RunState.FINISHED, None, 0),
        (RunState.FINISHED, "adapter-second", 1),
    ]
    assert [rollouts_of(info) for info in runs] == [rollouts_of(alone)] * 2
    assert learned_by(alone) and [learned_by(info) for info in runs] == [learned_by(alone)] * 2
