"""The promise: runs and checkpoints share one deployment, each with a policy of its own, as if each were alone."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_trial import trackway
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.session import RunSession
from trackway.trainer.run_state.trajectory_dump import read_trajectories
from trackway.wire.trainer import RunInfo, RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

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


def test_two_runs_at_once_and_a_checkpoint_get_what_each_gets_alone(deployment: Deployment, started) -> None:
    session, keys = RunSession(deployment), ("trainer.save_freq=1",)
    alone = session.follow(started("alone", 2, *keys).run, lambda info: None)
    names = [started(name, 2, *keys).run for name in ("together", "beside")]
    runs = [session.follow(name, lambda info: None) for name in names]
    assert [(info.state, info.policy) for info in runs] == [(RunState.FINISHED, None), (RunState.FINISHED, "beside")]
    expected = rollouts_of(alone)
    assert len(expected) == 8 + 32 + 8
    assert [rollouts_of(info) for info in runs] == [expected, expected]

    outputs = ["--outputs", str(deployment.outputs)]
    trackway("policies", "load", "alone:2", *outputs)
    listed = {policy["name"]: policy for policy in json.loads(trackway("policies", "list", "--json", *outputs))}
    rows = str(deployment.outputs / "data" / "train.parquet")
    words = [
        "try",
        rows,
        f"actor_rollout_ref.model.path={TINY_MODEL}",
        "--config-name",
        "tiny_demo",
        "--json",
        *outputs,
    ]
    tried = {
        policy: json.loads(trackway(*words, "--policy", policy))["trajectories"]
        for policy in ("alone:2", "beside", "base")
    }
    spans = {policy: rollouts[0]["weight_versions"] for policy, rollouts in tried.items()}
    ids = {policy: rollouts[0]["response_ids"] for policy, rollouts in tried.items()}
    evaluate = ["evaluate", "running", "--data", rows, "--limit", "2", "--config-name", "tiny_demo", "--json", *outputs]
    evaluated = json.loads(trackway(*evaluate, "--policy", "alone:2"))["evaluation"]
    trackway("policies", "drop", "alone:2", *outputs)
    left = [policy["name"] for policy in json.loads(trackway("policies", "list", "--json", *outputs))]

    assert {"policy", "base", "beside", "alone:2"} <= listed.keys() and listed["policy"]["is_default"]
    assert "alone:2" not in left
    assert (evaluated["name"], evaluated["policy"], evaluated["summary"]["failed"]) == ("eval-alone-2", "alone:2", 0)
    assert ids["alone:2"] == ids["beside"] != []
    assert [spans[policy][0]["version"] for policy in ("alone:2", "beside", "base")] == [2, 3, 0]
