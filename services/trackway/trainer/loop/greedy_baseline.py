"""ReMax's baseline: the score of one greedy rollout of the prompt, as a component of each reward of its group."""

from collections.abc import Sequence

from trackway.trainer.learner.filtering import REWARD_BASELINE
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import StopReason, Trajectory


def with_baseline(trajectories: Sequence[Trajectory], greedy: Trajectory) -> list[Trajectory]:
    """The group with the greedy rollout's score in each reward.

    Without that score each trajectory fails with the greedy rollout's error: none is compared with a made-up baseline.
    """
    if greedy.error is None and greedy.reward is not None:
        return [_based(trajectory, greedy.reward.score) for trajectory in trajectories]
    lacking = TrackwayError(ErrorCode.INTERNAL, "expected a reward, got none").to_reply().error
    error = greedy.error or lacking
    error = error.model_copy(update={"message": f"the greedy rollout {greedy.id} of the group failed: {error.message}"})
    return [
        trajectory.model_copy(update={"stop_reason": StopReason.ERROR, "error": trajectory.error or error})
        for trajectory in trajectories
    ]


def _based(trajectory: Trajectory, baseline: float) -> Trajectory:
    if trajectory.reward is None:
        return trajectory
    components = {**trajectory.reward.components, REWARD_BASELINE: baseline}
    reward = trajectory.reward.model_copy(update={"components": components})
    return trajectory.model_copy(update={"reward": reward})
