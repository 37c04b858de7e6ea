"""A learner of two ranks, on a node of the cluster alone and with a second one: run within a node, prints JSON."""

import json
import os

import ray
from ray.util.placement_group import placement_group_table

from tests.services.trainer.learner_settings import learner_config
from tests.services.trainer.rank_processes import listening
from trackway.deploy.bundled import TINY_MODEL
from trackway.learner.config import LearnerConfig
from trackway.learner.ranks.group import LeadingLearner, RankError, RankGroup
from trackway.learner.ranks.launch import LAUNCHER
from trackway.run_config.placement import Placement
from trackway.wire.trajectory import Reward, StopReason, Tags, Trajectory, trajectory_id


def main() -> None:
    """What both learned, the error when the other node's rank was killed, and what is left of a placement."""
    os.environ[LAUNCHER] = "trackway.deploy.serve.rank_nodes:RayNodes"
    ray.init(address="auto")
    alone, _, _ = learned(Placement(2))
    together, error, hosts = learned(Placement(2, 2))
    refused = ""
    try:
        RankGroup(config(), Placement(3, 3), 60.0, 2.0)
    except ValueError as caught:
        refused = str(caught)
    states = [group["state"] for group in placement_group_table().values()]
    results = {"alone": alone, "together": together, "error": error, "hosts": hosts}
    print(json.dumps({**results, "refused": refused, "states": states}))


def config() -> LearnerConfig:
    """Of the tiny model, in float64."""
    return learner_config(TINY_MODEL, dtype="float64", lr=1e-2)


def learned(placement: Placement) -> tuple[list[object], str, list[str]]:
    """The metrics of two updates and log-probabilities after them; then the error when the second rank is killed.

    Also the addresses at which the first rank listens.
    """
    batch, before = [trajectory(row) for row in range(4)], listening(os.getpid())
    group = RankGroup(config(), placement, 60.0, 60.0)
    try:
        learner = LeadingLearner(config(), group)
        made: list[object] = [dict(learner.update(batch).metrics) for _ in range(2)]
        made.append(learner.log_probs(batch))
        hosts = sorted({host for host, _ in listening(os.getpid()) - before})
        try:
            group.processes[1].kill()
            group.processes[1].wait(30.0)
            learner.log_probs(batch)
        except RankError as error:
            return made, str(error), hosts
        return made, "", hosts
    finally:
        group.close()


def trajectory(row: int) -> Trajectory:
    """A scored answer of six tokens."""
    tags = Tags(experiment_name="e", step=1, sample_index=row // 2, rollout_n=row % 2)
    return Trajectory(
        id=trajectory_id("r", tags),
        session_id="s",
        tags=tags,
        agent_name="a",
        data_source="d",
        prompt_ids=[10, 11, 12],
        response_ids=[row, 2, 3, 4, 5, 6],
        response_mask=[1] * 6,
        response_logprobs=[-4.0] * 6,
        reward=Reward(score=float(row % 2)),
        stop_reason=StopReason.ANSWERED,
        num_turns=2,
    )
