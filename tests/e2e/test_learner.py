"""The promise: what a learner of another kind publishes is what the engine samples from."""

import json
from collections import Counter
from pathlib import Path

import pytest

import trackway.traces as traces
from tests.e2e.test_training import quiet, trajectories_of
from tests.waiting import until
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.session import RunSession
from trackway.learner.weights.sharded_files import read_whole
from trackway.system.process import UserError
from trackway.wire.trainer import RunInfo, RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def adapter(deployment: Deployment, started) -> RunInfo:
    """A run that trains an adapter on two ranks, on groups that differ, less the score of a greedy rollout of each."""
    words = ("trackway.learner_ranks=2", "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.actor.optim.lr=0.01")
    filtered = ("algorithm.adv_estimator=remax", "algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=2")
    traced = ("trackway.trace_prompts_per_step=2",)
    return RunSession(deployment).follow(started("adapter", 3, *words, *filtered, *traced).run, quiet)


def metrics_of(info: RunInfo) -> list[dict[str, float]]:
    """The metrics of each step."""
    rows = map(json.loads, (Path(info.folder) / "metrics.jsonl").read_text().splitlines())
    return [row["data"] for row in rows if row["step"]]


def test_the_engine_samples_from_the_adapter_that_two_ranks_train(adapter: RunInfo) -> None:
    drifts = [row["training/rollout_logprob_diff_max"] for row in metrics_of(adapter)]
    versions = sorted({span.version for trajectory in trajectories_of(adapter) for span in trajectory.weight_versions})
    names = set(read_whole(next(Path(adapter.folder).rglob("global_step_3/actor")) / "model"))

    assert (adapter.state, adapter.restarts) == (RunState.FINISHED, 0)
    assert [trajectory.error for trajectory in trajectories_of(adapter) if trajectory.error] == []
    assert len(drifts) == 3 and max(drifts) < 1e-4
    assert versions == list(range(versions[0], versions[0] + 4))  # the last one answers the validation
    assert names and all(".lora_" in name for name in names)


def test_what_a_filter_left_out_is_in_the_metrics_and_its_traces_say_so(
    deployment: Deployment, adapter: RunInfo
) -> None:
    rows = metrics_of(adapter)
    evicted = int(sum(row["training/filter_groups/evicted_samples"] for row in rows))
    rollouts = {"used": 3 * 4 * 2, "dropped_filtered": 2 * evicted, "baseline": 3 * 4 + evicted}

    store = traces.MlflowStore(deployment.mlflow_uri, [str(adapter.experiment_id)])

    def fates() -> dict[str, int] | None:
        """How many traces have each fate, once there are some of each and all of a group."""
        counts = Counter(str(tree.feedback["fate"]) for tree in store.trees() if "fate" in tree.feedback)
        is_whole = counts["used"] + counts["dropped_filtered"] == 2 * counts["baseline"]
        return counts if is_whole and counts.keys() == rollouts.keys() else None

    assert evicted > 0
    assert {name: rows[-1][f"rollouts/{name}"] for name in rollouts} == rollouts
    assert rows[-1]["rollouts/submitted"] == sum(rollouts.values())
    until(fates, state=lambda: [tree.feedback for tree in store.trees()])


def test_a_run_without_the_nodes_of_its_learner_fails_with_what_they_offer(deployment: Deployment, started) -> None:
    name = started("nodes", 1, "trainer.nnodes=3", "trackway.placement_timeout_s=1").run

    with pytest.raises(UserError) as caught:
        RunSession(deployment).follow(name, quiet)

    expected = "expected 2 Ray nodes besides the trainer's, offering trackway_learner 1, CPU 1 each, got none in 1 s"
    assert f"trainer.nnodes: {expected}; add such nodes, or lower trainer.nnodes" in str(caught.value)
