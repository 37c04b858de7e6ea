"""ReMax's baseline: the score of one greedy rollout of the prompt, as a component of each reward of its group."""

from collections.abc import Sequence

from trackway.learner.filtering import REWARD_BASELINE
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import StopReason, Trajectory


def with_baseline(trajectories: Sequence[Trajectory], greedy: Trajectory) -> list[Trajectory]:
    """The group with the greedy rollout's score in each reward, and the greedy rollout itself, which is not trained.

    Without that score each trajectory fails with the greedy rollout's error: none is compared with a made-up baseline.
    """
    greedy = greedy.model_copy(update={"is_baseline": True})
    if greedy.error is None and greedy.reward is not None:
        return [*(_based(trajectory, greedy.reward.score) for trajectory in trajectories), greedy]
    lacking = TrackwayError(ErrorCode.INTERNAL, "expected a reward, got none").to_reply().error
    error = greedy.error or lacking
    error = error.model_copy(update={"message": f"the greedy rollout {greedy.id} of the group failed: {error.message}"})
    failed = {"stop_reason": StopReason.ERROR}
    return [
        *(trajectory.model_copy(update={**failed, "error": trajectory.error or error}) for trajectory in trajectories),
        greedy,
    ]


def sampled_of(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Trajectories that are no greedy rollouts."""
    return [trajectory for trajectory in trajectories if not trajectory.is_baseline]


def _based(trajectory: Trajectory, baseline: float) -> Trajectory:
    if trajectory.reward is None:
        return trajectory
    components = {**trajectory.reward.components, REWARD_BASELINE: baseline}
    reward = trajectory.reward.model_copy(update={"components": components})
    return trajectory.model_copy(update={"reward": reward})
